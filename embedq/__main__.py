"""`python -m embedq` is the command `embedq`."""

from embedq.cli import main

if __name__ == "__main__":
    main()

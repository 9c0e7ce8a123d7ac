"""Helper of engine.py: sentence-transformers as it comes, embeds texts and answers with seconds, line by line."""

import json
import sys
import time

from sentence_transformers import SentenceTransformer


def main() -> None:
    # Its dtype is then the checkpoint's.
    model = SentenceTransformer(sys.argv[1], device="cpu")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        vectors = model.encode(request["texts"], show_progress_bar=False, **request["options"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "vectors": vectors.tolist()}), flush=True)


if __name__ == "__main__":
    main()

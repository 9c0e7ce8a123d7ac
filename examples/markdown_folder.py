"""Re-index a folder of Markdown, one document per section, and ask it questions.

    python examples/markdown_folder.py docs --model Qwen/Qwen3-Embedding-0.6B --index index -q "how is memory bounded?"

Each state of the folder gets a dataset of its own below `--index`, and `index/current` is turned to it once it is
complete: whoever searches meanwhile has the old one. A state that was indexed before is not computed again, and an
interrupted call goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def sections(folder: Path) -> Iterator[dict[str, str]]:
    """One document per heading: id `path#n`, the path, the heading, and the text with its heading."""
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text("utf-8", errors="replace")
        starts = [match.start() for match in HEADING.finditer(text)]
        for number, (start, end) in enumerate(zip([0, *starts], [*starts, len(text)], strict=True)):
            section = text[start:end].strip()
            if section:
                heading = HEADING.match(section)
                name = path.relative_to(folder).as_posix()
                yield {
                    "id": f"{name}#{number}",
                    "text": section,
                    "path": name,
                    "heading": heading[1] if heading else "",
                }


def embedq(*arguments: object) -> int:
    """Run the command; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "embedq", *map(str, arguments)]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--index", type=Path, default=Path("index"))
    parser.add_argument("--question", "-q")
    args = parser.parse_args()

    lines = [json.dumps(section) + "\n" for section in sections(args.folder)]
    state = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
    args.index.mkdir(parents=True, exist_ok=True)
    corpus = args.index / f"{state}.jsonl"
    corpus.write_text("".join(lines))
    dataset, current = args.index / state, args.index / "current"
    keep = ("--keep-text", "--metadata", "path", "--metadata", "heading")
    # 3: complete, but some documents failed; `embedq errors` names them.
    if (status := embedq("run", corpus, "-o", dataset, "--model", args.model, *keep)) not in (0, 3):
        return status
    fresh = args.index / f".{state}.link"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(state)
    fresh.replace(current)
    if args.question is None:
        return 0
    return embedq("search", current, args.question, "--model", args.model, "-k", 3)


if __name__ == "__main__":
    sys.exit(main())

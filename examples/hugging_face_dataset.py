"""Add a column of vectors to a Hugging Face dataset.

    python examples/hugging_face_dataset.py my_dataset --text body --model Qwen/Qwen3-Embedding-0.6B -o with_vectors

`my_dataset` is a directory that `Dataset.save_to_disk` wrote; so is the output, with a column `embedding` (null where a
row has no vector). Rows are matched by their position, so the dataset needs no ids. Memory does not grow with it.

Needs `pip install 'embedq[worker]' datasets`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import Features, Sequence, Value, load_from_disk


def embedq(*arguments: object) -> int:
    """Run the command; returns its exit status."""
    return subprocess.run([sys.executable, "-m", "embedq", *map(str, arguments)]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--text", default="text")
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("work"), help="directory for the corpus and the vectors")
    args = parser.parse_args()

    rows = load_from_disk(str(args.dataset))
    args.work.mkdir(parents=True, exist_ok=True)
    corpus, vectors = args.work / "corpus.jsonl", args.work / "vectors"
    with corpus.open("w") as out:
        for number, row in enumerate(rows.select_columns([args.text])):
            out.write(json.dumps({"id": number, "text": row[args.text]}) + "\n")
    # 3: complete, but some documents failed; `embedq errors` names them.
    if (status := embedq("run", corpus, "-o", vectors, "--model", args.model)) not in (0, 3):
        return status
    if status := embedq("export", vectors, "--to", "npy", "-o", args.work / "npy", "--replace"):
        return status

    embeddings = np.load(args.work / "npy/vectors.npy", mmap_mode="r")
    ordinals = pq.read_table(args.work / "npy/ids.parquet", columns=["ordinal"])["ordinal"].to_numpy()

    def attach(_: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
        places = np.searchsorted(ordinals, numbers)
        found = ordinals[np.minimum(places, len(ordinals) - 1)] == numbers
        return {"embedding": [embeddings[at] if has else None for at, has in zip(places, found, strict=True)]}

    features = Features({**rows.features, "embedding": Sequence(Value("float32"), length=embeddings.shape[1])})
    rows.map(attach, with_indices=True, batched=True, features=features).save_to_disk(str(args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

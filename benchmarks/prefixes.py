"""What is it worth to compute once what texts begin with in common?

    python benchmarks/prefixes.py --corpus corpus.jsonl --tokenizer tokenizer.json [--checkpoint DIR]

A random Qwen3-Embedding-0.6B-shaped checkpoint in bfloat16 embeds token batches as the tokenizer stage packs them:
longest first with every token computed, and by prefix with common beginnings computed once. Batches of both kinds,
taken from all over the input, take turns, so that a shared machine disturbs both alike. Two inputs: the first
documents of the corpus, and their first lines as questions behind the instruction that Qwen3-Embedding asks for.
Tokens are those of the texts, computed or not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from embedq_worker.checkpoint import load_checkpoint
from embedq_worker.engine import Engine, EngineSettings, PackedBatch, load_engine
from embedq_worker.engine import plan as planning
from embedq_worker.pack import longest_first, plan_batches
from embedq_worker.prefixes import common_prefixes, prefix_order
from engine import computed, cosine, make_checkpoint
from numpy.typing import NDArray
from tokenizers import Tokenizer

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
WORTH = planning._SHARED_AT_LEAST
_NEVER = 1 << 40


class Batches:
    """Texts in batches of one kind. Sharing is switched where the plan looks: it is no option of the engine."""

    def __init__(
        self, texts: PackedBatch, order: NDArray[np.int64], limit: int, common: NDArray[np.int64] | None = None
    ) -> None:
        self._texts, self._order = texts, order
        self._share = _NEVER if common is None else WORTH
        self._bounds = plan_batches(texts.lengths[order], limit, common)
        self._tokens, self._seconds = 0, 0.0
        #: Share of the tokens that are computed.
        self.computed = sum(map(self._computed, map(self.batch, range(len(self))))) / len(texts.input_ids)

    @property
    def rate(self) -> float:
        """Tokens/s over the whole input, at the speed of the computed tokens of the batches that were run.

        Batches differ in what they share: tokens/s of some of them would tell which ones were taken.
        """
        return self._tokens / self._seconds / self.computed

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def spread(self, count: int) -> list[int]:
        """Numbers of `count` batches, spread evenly over all: neighbours are alike."""
        return [int(number) for number in np.linspace(0, len(self) - 1, count + 2).round()[1:-1]]

    def batch(self, number: int) -> PackedBatch:
        offsets, ids = self._texts.cu_seqlens.tolist(), self._texts.input_ids.tolist()
        rows = self._order[self._bounds[number] : self._bounds[number + 1]]
        return PackedBatch.of([ids[offsets[row] : offsets[row + 1]] for row in rows])

    def run(self, engine: Engine, number: int) -> NDArray[np.float32]:
        planning._SHARED_AT_LEAST = self._share
        batch = self.batch(number)
        start = time.perf_counter()
        vectors = engine.encode(batch)
        self._seconds += time.perf_counter() - start
        self._tokens += self._computed(batch)
        return vectors

    def _computed(self, batch: PackedBatch) -> int:
        planning._SHARED_AT_LEAST = self._share
        return computed(batch)


def compare(engine: Engine, name: str, texts: PackedBatch, batches: int) -> None:
    limit, order = engine.max_batch_tokens, prefix_order(texts.input_ids, texts.cu_seqlens)
    plain = Batches(texts, longest_first(texts.lengths), limit)
    shared = Batches(texts, order, limit, common_prefixes(texts.input_ids, texts.cu_seqlens, order))
    for one, other in zip(plain.spread(batches), shared.spread(batches), strict=True):
        plain.run(engine, one)
        found = shared.run(engine, other)
    planning._SHARED_AT_LEAST = _NEVER
    same = cosine(found, engine.encode(shared.batch(other)))
    print(
        f"{name}: {len(texts)} texts, {len(texts.input_ids)} tokens, {shared.computed:.1%} of them computed; "
        f"every token {plain.rate:.1f}, common beginnings once {shared.rate:.1f} tokens/s: "
        f"{shared.rate / plain.rate:.2f}x; "
        f"smallest cosine between the two {same:.5f}",
        flush=True,
    )


def encode(tokenizer: Tokenizer, texts: Iterator[str], limit: int) -> PackedBatch:
    return PackedBatch.of([encoding.ids[:limit] for encoding in tokenizer.encode_batch(list(texts))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="JSON lines with a `text` field")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of Qwen3; default: a small byte-level one")
    parser.add_argument("--checkpoint", type=Path, help="where the 1.2 GB checkpoint is made, and found again")
    parser.add_argument("--window", type=int, default=4096, help="documents packed together, as the stage takes them")
    parser.add_argument("--batches", type=int, default=12, help="batches measured of each kind")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = make_checkpoint(options.checkpoint or Path(scratch) / "model", options.tokenizer)
        checkpoint = load_checkpoint(str(path))
        tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
        with options.corpus.open(encoding="utf-8") as file:
            documents = [json.loads(line)["text"] for line in itertools.islice(file, options.window)]
        settings = EngineSettings(device="cpu", dtype="bfloat16", max_batch_tokens=options.max_batch_tokens)
        engine = load_engine(checkpoint, settings)
        questions = (INSTRUCTION + text.partition("\n")[0] for text in documents)
        compare(engine, "documents", encode(tokenizer, iter(documents), checkpoint.max_length), options.batches)
        compare(engine, "questions", encode(tokenizer, questions, checkpoint.max_length), options.batches)


if __name__ == "__main__":
    main()

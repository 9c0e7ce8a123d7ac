"""The long fuzz: every decoder fed damaged input for minutes, each in a process of its own.

    python tests/fuzz/fuzz.py --minutes 10 [--target "token batch"] [--seed 1] [--jobs 2]

Inputs grow from the valid payloads of tests/unit/schemas/test_hostile_bytes.py and from corpora: bits are flipped,
words become interesting numbers, stretches are cut, doubled, moved, or taken from another input; what still decodes
becomes a new parent. Allowed ends are valid data that can be used to the last value, or the decoder's own error.
Anything else is a finding: another exception, a process that dies, more than 2 GiB, more than ten seconds. Its input
is kept and named.
"""

from __future__ import annotations

import argparse
import io
import json
import mmap
import multiprocessing
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "unit" / "schemas")]

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
from embedq_producer.blocks import ReadOptions  # noqa: E402
from embedq_producer.jsonl import read_jsonl  # noqa: E402
from embedq_schemas.errors import CodecError, InputError  # noqa: E402
from embedq_schemas.manifest import MANIFEST_NAME, read_manifest  # noqa: E402
from test_hostile_bytes import EVERY  # noqa: E402

MEMORY = 2 << 30
SECONDS = 10
LARGEST = 1 << 20
NUMBERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 1 << 40, 255, 65535)

Decode = Callable[[bytes], object]


def corpus(payload: bytes) -> object:
    """A JSONL corpus: each of its lines is a document or a reject, never both, and ordinals count them."""
    documents = rejects = duplicates = 0
    for block in read_jsonl(io.BytesIO(payload), options=ReadOptions(metadata=("lang",), block_documents=7)):
        block.documents.validate(full=True)
        block.documents.to_pydict()
        ordinals = block.documents.column("ordinal").to_numpy()
        assert (np.diff(ordinals) > 0).all(), "ordinals do not rise"
        documents += block.documents.num_rows
        rejects += len(block.rejects)
        duplicates += block.duplicates
    lines = sum(1 for line in payload.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(b" \t\r\v\f"))
    assert documents + rejects + duplicates == lines, f"{documents} + {rejects} + {duplicates} of {lines} lines"
    return documents > 0


def manifest(payload: bytes) -> object:
    """A dataset's manifest file."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, MANIFEST_NAME).write_bytes(payload)
        return read_manifest(Path(folder))


DOCUMENTS: tuple[object, ...] = (
    {"id": "a", "text": "hello", "lang": "en"},
    {"id": "b\u00e9", "text": "\U0001f600", "lang": None},
    {"text": "no id"},
    {"id": 7, "text": "a number"},
    {"id": "a", "text": "twice"},
    {"id": "c"},
    [],
    {"id": "d", "text": "\ud800"},
)
LINES = b"\n".join(json.dumps(document).encode() for document in DOCUMENTS)
TARGETS: dict[str, tuple[list[bytes], Decode, tuple[type[Exception], ...]]] = {
    **{name: ([payload], decode, (CodecError,)) for name, (payload, decode) in EVERY.items()},
    "manifest": ([EVERY["published file"][0] + b"\n" + EVERY["published file"][0] + b"\n"], manifest, (CodecError,)),
    "corpus": ([LINES, LINES.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + LINES + b"\n\n"], corpus, (InputError,)),
}


def mutate(parents: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(rng.choice(parents))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        length = min(rng.choice((1, 2, 4, 8, 16, 64, 256)), len(data) - at)
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            word = struct.pack("<q", rng.choice(NUMBERS))[: rng.choice((1, 2, 4, 8))]
            at -= at % len(word)
            data[at : at + len(word)] = word
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length] * rng.choice((1, 1, 2, 50))
        elif kind == 4:
            other = rng.choice(parents)
            start = rng.randrange(len(other) + 1)
            data[at : at + length] = other[start : start + rng.choice((length, 4, 64))]
        elif kind == 5:
            data[at : at + length] = rng.randbytes(length)
        else:
            data[at:at] = str(rng.choice(NUMBERS)).encode()
    return bytes(data[:LARGEST])


def attack(target: str, seed: int, minutes: float, scratch: str, report: str) -> None:
    """One process: mutate until the time is over. The input under test lies in `scratch`, should the process die."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seeds, decode, allowed = TARGETS[target]
    rng, tried, accepted = random.Random(f"{target} {seed}"), 0, 0
    sons: list[bytes] = []
    longest = 2 * max(map(len, seeds))
    until = time.monotonic() + minutes * 60
    with open(scratch, "r+b") as file, mmap.mmap(file.fileno(), LARGEST + 8) as current:
        while time.monotonic() < until:
            payload = mutate(sons if sons and rng.random() < 0.5 else seeds, rng)
            current[: len(payload) + 8] = struct.pack("<q", len(payload)) + payload
            signal.alarm(SECONDS)
            try:
                value = decode(payload)
                if isinstance(value, pa.RecordBatch):
                    value.to_pydict()
            except allowed:
                value = None
            finally:
                signal.alarm(0)
            tried += 1
            if value:
                accepted += 1
                # Sons of sons wander further from what was valid. Half of the parents stay seeds, and none gets so long
                # that most damage falls on ballast behind the end of a stream.
                if len(payload) <= longest:
                    sons = [*sons[-200:], payload]
    Path(report).write_text(json.dumps({"tried": tried, "accepted": accepted}))


def run(target: str, seed: int, minutes: float, findings: Path) -> bool:
    """Whether the target survived."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, report = Path(folder, "current"), Path(folder, "report")
        scratch.write_bytes(bytes(LARGEST + 8))
        process = multiprocessing.get_context("spawn").Process(
            target=attack, args=(target, seed, minutes, str(scratch), str(report))
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            figures = json.loads(report.read_text())
            print(
                f"{target:20} {figures['tried']:12,} inputs, {figures['accepted']:10,} valid: nothing found", flush=True
            )
            return True
        data = scratch.read_bytes()
        findings.mkdir(exist_ok=True)
        kept = findings / f"{target.replace(' ', '-')}-{seed}"
        kept.write_bytes(data[8 : 8 + struct.unpack("<q", data[:8])[0]])
        print(f"{target:20} FOUND: ended with {process.exitcode}; the input is {kept}", flush=True)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="per target")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: every one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        survived = list(
            pool.map(
                lambda target: run(target, options.seed, options.minutes, options.findings), options.target or TARGETS
            )
        )
    return 0 if all(survived) else 1


if __name__ == "__main__":
    sys.exit(main())

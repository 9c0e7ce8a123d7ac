"""The id set answers as a set of strings would."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
from embedq_producer.id_set import IdSet, hash_ids
from hypothesis import given, settings
from hypothesis import strategies as st

IDS = ["", "a", "doc-1", "\0", "é", "x" * 64, "x" * 65]
PINNED = [
    17438232446010641209,
    14066696395665309662,
    18176016701736931614,
    537168045243138334,
    7302581389643101316,
    12505817920649906617,
    13379330590885166102,
]


def hashes_of(*ids: str) -> list[int]:
    return [int(value) for value in hash_ids(pa.array(ids, pa.string()))]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.one_of(st.text(max_size=4), st.sampled_from(["x" * 64, "x" * 65, "é" * 40])), max_size=30)))
def test_the_set_tells_new_ids_from_known_ones_within_and_across_blocks(blocks: list[list[str]]) -> None:
    ids, known = IdSet(), set[str]()
    for block in blocks:
        expected = []
        for document_id in block:
            expected.append(document_id not in known)
            known.add(document_id)
        assert ids.add(hash_ids(pa.array(block, pa.string()))).tolist() == expected
    assert len(ids) == len(known)


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    # Fixed values: a run resumed by another process, machine or version must decide as the first one did.
    code = "import pyarrow, sys; from embedq_producer.id_set import hash_ids; "
    code += "print(hash_ids(pyarrow.array(eval(sys.argv[1]), pyarrow.string())).tolist())"
    command = [sys.executable, "-c", code, ascii(IDS)]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert other.strip() == str(PINNED)
    assert hashes_of(*IDS) == PINNED


def test_a_hash_does_not_depend_on_the_neighbours_or_on_a_slice() -> None:
    ids = ["", "a", "ab", "abc", "abcd", "abcde", "x" * 63, "x" * 64, "x" * 200, "\0", "\0\0", ""]
    column = pa.array(ids, pa.string())
    alone = [hashes_of(document_id)[0] for document_id in ids]
    assert hash_ids(column).tolist() == alone
    assert hash_ids(column.slice(3, 6)).tolist() == alone[3:9]
    assert hash_ids(column.slice(0, 0)).tolist() == []


def test_similar_ids_do_not_collide_in_either_half() -> None:
    ids = [f"{prefix}{index}" for prefix in ("", "doc-", "a" * 50, "b" * 70) for index in range(50_000)]
    hashes = hash_ids(pa.array(ids, pa.string()))
    assert np.unique(hashes).size == len(ids)
    # Of n random 32-bit values about n**2 / 2**33 = 5 repeat; each half alone must be that good.
    for half in (hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)):
        assert len(ids) - np.unique(half).size < 30


def test_trailing_zeros_and_word_boundaries_count() -> None:
    ids = ["a" + "\0" * count for count in range(64)] + ["\0" * count for count in range(64)]
    assert len(set(hashes_of(*ids))) == len(ids)


def test_memory_is_eight_bytes_per_id_in_few_parts() -> None:
    ids, generator = IdSet(), random.Random(3)
    total = 0
    while total < 300_000:
        size = generator.choice([1, 10, 1000, 1024])
        ids.add(np.arange(total, total + size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        total += size
    assert len(ids) == total
    assert ids.nbytes == 8 * total
    assert len(ids._parts) <= 20
    assert not ids.add(np.arange(total, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).any()

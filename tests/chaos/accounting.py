"""The checker: is every document of a run exactly one output row or one error row, and do the counters say the same?"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from embedq_schemas.manifest import read_manifest
from embedq_schemas.run import RunState
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.errors import read_errors


@dataclass(frozen=True)
class Corpus:
    """What was sent: texts by id, in the order of the lines; lines that are no document have no id."""

    path: Path
    texts: dict[str, str]
    ids: tuple[str | None, ...]
    skipped: int = 0


@dataclass
class Account:
    """What came of it. `problems` is empty for a run that lost, doubled and miscounted nothing."""

    rows: int = 0
    errors: int = 0
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def write_corpus(path: Path, documents: int, *, prefix: str = "doc", bad_lines: int = 0, long_texts: int = 0) -> Corpus:
    """Write a JSONL corpus with `bad_lines` that are no JSON and `long_texts` of a few hundred tokens."""
    texts: dict[str, str] = {}
    ids: list[str | None] = []
    with path.open("w") as out:
        for n in range(documents):
            name = f"{prefix}-{n}"
            texts[name] = f"document {n} of the corpus: " + "water people world " * (1 + n % 3)
            if n < long_texts:
                texts[name] = "many other people and languages " * 100
            out.write(json.dumps({"id": name, "text": texts[name]}) + "\n")
            ids.append(name)
        for _ in range(bad_lines):
            out.write("this is no JSON\n")
            ids.append(None)
    return Corpus(path, texts, tuple(ids))


def account(directory: Path, corpus: Corpus, state: RunState) -> Account:
    """Read every file of the dataset and hold it to the corpus and to the run's counters."""
    found = Account()
    listed = {file.name: file for file in read_manifest(directory).values()}
    present = {part.name for part in directory.glob("part-*.parquet")}
    if extra := present - set(listed):
        found.problems.append(f"files that no commit named: {sorted(extra)}")
    if missing := set(listed) - present:
        found.problems.append(f"files that are gone: {sorted(missing)}")
    seen: Counter[int] = Counter()
    for name in sorted(present & set(listed)):
        table = pq.read_table(directory / name, columns=["id", "ordinal", "text_sha256", "vector"])
        found.rows += table.num_rows
        if table.num_rows != listed[name].rows:
            found.problems.append(f"{name} holds {table.num_rows} rows, its manifest line says {listed[name].rows}")
        for row in table.drop_columns(["vector"]).to_pylist():
            seen[row["ordinal"]] += 1
            expected = corpus.ids[row["ordinal"]]
            if row["id"] != expected:
                found.problems.append(f"row {row['ordinal']} has id {row['id']}, the corpus {expected}")
            elif row["text_sha256"] != hashlib.sha256(corpus.texts[row["id"]].encode()).digest():
                found.problems.append(f"the text of {row['id']} is not the one that was sent")
    for letter in read_errors(Dataset(directory)):
        found.errors += 1
        seen[letter.ordinal] += 1
    found.lost = [ordinal for ordinal in range(len(corpus.ids)) if not seen[ordinal]]
    found.doubled = sorted(ordinal for ordinal, times in seen.items() if times > 1)
    if found.lost and len(found.lost) != corpus.skipped:
        found.problems.append(f"{len(found.lost)} documents have no row, such as {found.lost[:5]}")
    if found.doubled:
        found.problems.append(f"{len(found.doubled)} documents have several rows, such as {found.doubled[:5]}")
    counters = state.counters
    for what, counted, held in (
        ("input", counters.input, len(corpus.ids)),
        ("succeeded", counters.succeeded, found.rows),
        ("failed", counters.failed, found.errors),
        ("succeeded + failed + skipped", counters.settled, counters.input),
    ):
        if counted != held:
            found.problems.append(f"{what}: {counted} counted, {held} found")
    return found

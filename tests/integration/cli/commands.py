"""The real command, as a person runs it, and what its tests look at: corpora, datasets, processes left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import call
from waiting import wait_until

TIMEOUT_S = 90.0
_PROGRESS = re.compile(r"[a-z_ ]+: [\d,]+/[\d,]+\+? documents")
WORDS = ("queue", "Wort", "мир", "文章", "the", "of", "token", "model", "안녕", "naïve", "😀", "people", "zwölf")


@dataclass(frozen=True)
class Finished:
    """How a command ended, and what it printed beside its progress lines, which a slow machine sees more of."""

    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line on standard error; fails where there are more, or a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


def environment(**variables: str) -> dict[str, str]:
    """Variables of a child: none of ours but those given, one thread, no network."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDQ_")}
    return ours | {"EMBEDQ_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "80"} | variables


def start(
    *arguments: object, cwd: Path | None = None, stdin: IO[str] | None = None, **variables: str
) -> subprocess.Popen[str]:
    """Start `embedq` in a session of its own, which `leftovers` recognises."""
    return subprocess.Popen(
        [sys.executable, "-m", "embedq", *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment(**variables),
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> Finished:
    """Wait for the command; one that hangs is killed with all it started, and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"embedq did not end within {timeout_s} s:\n{out}\n{err}")
    assert "Traceback" not in err, err
    told = [line for line in err.splitlines(keepends=True) if not _PROGRESS.match(line)]
    return Finished(process.returncode, out, "".join(told))


def embedq(*arguments: object, cwd: Path | None = None, **variables: str) -> Finished:
    """Run `embedq` to its end."""
    return finish(start(*arguments, cwd=cwd, **variables))


def in_process(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """Run a command that starts no process inside this one, which saves the interpreter's start."""
    return Finished(*call(capsys, *arguments))


def write_corpus(path: Path, documents: Iterable[Mapping[str, Any]]) -> Path:
    """Write documents as JSON lines."""
    path.write_text("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents), "utf-8")
    return path


def documents(count: int, *, words: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """`count` documents with ids d0, d1, ..., each with a text of its own in several scripts and a `lang`."""
    rng = np.random.default_rng(seed)
    return [
        {
            "id": f"d{i}",
            "text": f"{i} " + " ".join(rng.choice(WORDS, 1 + (i % (2 * words)))),
            "lang": ["en", None][i % 2],
        }
        for i in range(count)
    ]


def rows(dataset: Path) -> dict[str, dict[str, Any]]:
    """Rows of all part files by id, in the order of their ordinals; fails if an id or an ordinal occurs twice."""
    table = pa.concat_tables([pq.read_table(part) for part in sorted(dataset.glob("part-*.parquet"))])
    found = sorted(table.to_pylist(), key=lambda row: row["ordinal"])
    by_id = {row["id"]: row for row in found}
    assert len(by_id) == len(found)
    assert len({row["ordinal"] for row in found}) == len(found)
    return by_id


def assert_complete(dataset: Path, ids: Iterable[str]) -> None:
    """Every id has exactly one row, the manifest names the files that exist, and nothing of the run is left over."""
    assert set(rows(dataset)) == set(ids)
    assert (dataset / "_SUCCESS").exists()
    assert not (dataset / "_state").exists()
    assert list((dataset / "_staging").iterdir()) == []
    manifest = [json.loads(line) for line in (dataset / "_manifest.jsonl").read_text().splitlines()]
    names = {f"part-{entry['token']}.parquet" for entry in manifest}
    assert names == {path.name for path in dataset.glob("part-*")}
    assert sum({entry["token"]: entry["rows"] for entry in manifest}.values()) == len(rows(dataset))


def leftovers(command: subprocess.Popen[str], dataset: Path | None = None) -> list[psutil.Process]:
    """Living processes of the command's session, or servers that work in `dataset`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == command.pid:
                continue
            mine = os.getsid(process.pid) == command.pid
            if mine or (dataset is not None and any(str(dataset) in word for word in process.cmdline())):
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError, psutil.AccessDenied):
            continue
    return found


def wait_for_rows(dataset: Path, command: subprocess.Popen[str]) -> None:
    """Wait until the run has published its first file."""

    def begun() -> bool:
        assert command.poll() is None, f"ended too early: {command.communicate()}"
        return (dataset / "_manifest.jsonl").exists()

    wait_until(begun, f"{dataset} has rows")


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """Parsed lines."""
    return map(json.loads, text.splitlines())

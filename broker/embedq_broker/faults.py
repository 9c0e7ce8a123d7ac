"""Fault points: named places where a test may kill, stop or delay the process it runs in.

Off, a point costs one comparison. Armed by an environment variable, so that processes started by others are reached:

    EMBEDQ_FAULTS="publish.renamed:kill"                    SIGKILL itself at the first passage
    EMBEDQ_FAULTS="embed.forward:delay:2:1.5"               wait 1.5 s at the second passage of each process
    EMBEDQ_FAULTS="embed.commit.after:kill:0.2"             at each passage with probability 0.2
    EMBEDQ_FAULTS="embed.forward@doc-17:exit137:every"      whenever document `doc-17` passes

Several are separated by commas. EMBEDQ_FAULTS_SEED (an integer) makes probabilities repeatable per process;
EMBEDQ_FAULTS_ONCE names a directory in which each fault that fired leaves a mark, so that it fires once over all
processes; EMBEDQ_FAULTS_LOG names a file that takes one JSON line per fault fired.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from embedq_schemas.errors import UsageError

Action = Literal["kill", "stop", "delay", "exit137", "raise"]

#: Every point, in the order in which a document passes them.
POINTS = (
    "produce.enqueue.before",
    "produce.enqueue.after",
    "tokenize.read",
    "tokenize.encode",
    "tokenize.commit.before",
    "tokenize.commit.after",
    "embed.read",
    "embed.forward",
    "embed.forwarded",
    "stage.written",
    "stage.fsynced",
    "stage.verified",
    "embed.commit.before",
    "embed.commit.after",
    "publish.before",
    "publish.renamed",
    "publish.synced",
    "publish.listed",
    "publish.dropped",
    "drain.planned",
    "drain.written",
    "drain.dropped",
    "finish.begun",
    "finish.marked",
    "finish.done",
    "keep.renew",
    # Rows of known texts, in the process of `embedq run`.
    "copy.begun",
    "copy.staged",
    "copy.committed",
    "copy.published",
    # A new generation takes the place of a dataset.
    "switch.begun",
    "switch.renamed",
    "switch.noted",
    "switch.listed",
    "switch.moved",
    "switch.unmarked",
    "switch.done",
    # A finished dataset's compaction.
    "compact.staged",
    "compact.renamed",
    "compact.noted",
    "compact.listed",
    "compact.moved",
)


class FaultError(Exception):
    """What the action `raise` raises: an error nobody expects."""


@dataclass
class _Fault:
    point: str
    document: str | None
    action: Action
    nth: int | None
    probability: float | None  # with nth None: at each passage; both None: at every one
    seconds: float
    passages: int = 0


class _Armed:
    def __init__(self, text: str, seed: int, once: str | None, log: str | None) -> None:
        self._faults: dict[str, list[_Fault]] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            fault = _parse(part)
            self._faults.setdefault(fault.point, []).append(fault)
        self._random = random.Random(seed)  # noqa: S311
        self._once = once
        self._log = log

    def pass_by(self, point: str, documents: Any) -> None:
        for fault in self._faults.get(point, ()):
            if fault.document is not None and (documents is None or fault.document not in _ids(documents)):
                continue
            fault.passages += 1
            if fault.nth is not None and fault.passages != fault.nth:
                continue
            if fault.probability is not None and self._random.random() >= fault.probability:
                continue
            if self._first_time(fault):
                self._write(fault)
                _act(fault)

    def _first_time(self, fault: _Fault) -> bool:
        if self._once is None:
            return True
        name = f"{fault.point}@{fault.document or ''}.{fault.action}".replace("/", "_")
        try:
            os.close(os.open(os.path.join(self._once, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _write(self, fault: _Fault) -> None:
        if self._log is None:
            return
        line = {"at": time.time(), "pid": os.getpid(), "point": fault.point, "action": fault.action}
        fd = os.open(self._log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            os.write(fd, json.dumps(line).encode() + b"\n")
        finally:
            os.close(fd)


def _ids(documents: Any) -> Iterable[str]:
    return set(documents.to_pylist())


def _parse(text: str) -> _Fault:
    where, _, rest = text.partition(":")
    point, _, document = where.partition("@")
    action, _, rest = rest.partition(":")
    when, _, seconds = rest.partition(":")
    if point not in POINTS:
        raise UsageError(f"EMBEDQ_FAULTS names the point {point!r}; there are: {', '.join(POINTS)}")
    if action not in get_args(Action):
        raise UsageError(f"EMBEDQ_FAULTS names the action {action!r}; there are: {', '.join(get_args(Action))}")
    nth: int | None = 1
    probability = None
    try:
        if when == "every":
            nth = None
        elif "." in when:
            nth, probability = None, float(when)
        elif when:
            nth = int(when)
        wait_s = float(seconds or 1.0)
    except ValueError:
        raise UsageError(f"EMBEDQ_FAULTS has {text!r}; write point[@document]:action[:when[:seconds]]") from None
    return _Fault(point, document or None, action, nth, probability, wait_s)  # type: ignore[arg-type]


def _act(fault: _Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Another thread may take the signal; this one must not get further meanwhile.
        time.sleep(0.05)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "exit137":
        os._exit(137)
    else:
        raise FaultError(f"the fault at {fault.point} was asked for")


def arm(text: str | None, *, seed: int = 0, once: str | None = None, log: str | None = None) -> None:
    """Arm this process's fault points from a text as in the module docstring, or disarm them; raises UsageError."""
    global _armed
    _armed = _Armed(text, seed, once, log) if text else None


def fault_point(point: str, documents: Any = None) -> None:
    """Pass a fault point.

    Args:
        point: one of POINTS.
        documents: ids of the documents that pass, as an Arrow column; read only where a fault asks for one.
    """
    if _armed is not None:
        _armed.pass_by(point, documents)


_armed: _Armed | None = None
arm(
    os.environ.get("EMBEDQ_FAULTS"),
    seed=int(os.environ.get("EMBEDQ_FAULTS_SEED") or 0),
    once=os.environ.get("EMBEDQ_FAULTS_ONCE"),
    log=os.environ.get("EMBEDQ_FAULTS_LOG"),
)

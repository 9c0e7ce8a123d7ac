"""What a person sees: progress while a run goes on, and tables of its state."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from embedq_broker.liveness import Heartbeat
from embedq_schemas.encoding import OnLong
from embedq_schemas.run import RunState
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from embedq.run import Snapshot

_WINDOW_S = 15.0


class RunProgress:
    """A progress bar on a terminal; a line every few seconds elsewhere. Documents, tokens/s, errors, time left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, facts="")
        #: Tokens that were done when this command began; None before the first look.
        self.tokens_before: int | None = None
        self._history: deque[tuple[float, int, int]] = deque()
        self._next_line = time.monotonic() + 10
        self.shown = False
        """Whether there was any progress to show, which an already complete run has not."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def note(self, sentence: str) -> None:
        """One sentence, above the bar."""
        self._console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def show(self, snapshot: Snapshot) -> None:
        """Bring the display up to date."""
        state, now = snapshot.state, time.monotonic()
        if self.tokens_before is None:
            self.tokens_before = state.counters.tokens
        self.shown = True
        counters = state.counters
        self._history.append((now, counters.settled, counters.tokens))
        while len(self._history) > 2 and now - self._history[0][0] > _WINDOW_S:
            self._history.popleft()
        facts = self._facts(snapshot)
        label = str(state.status) if snapshot.ready else "loading the model"
        total = counters.input if state.input_closed else None
        self._bar.update(self._task, description=label, completed=counters.settled, total=total, facts=facts)
        if not self._console.is_terminal and now >= self._next_line:
            self._next_line = now + 10
            self._console.print(f"{label}: {facts}", highlight=False, soft_wrap=True)

    def _facts(self, snapshot: Snapshot) -> str:
        state = snapshot.state
        counters = state.counters
        first, last = self._history[0], self._history[-1]
        span = last[0] - first[0]
        of = f"{counters.input:,}" if state.input_closed else f"{counters.input:,}+"
        parts = [f"{counters.settled:,}/{of} documents"]
        if span > 0.5 and last[2] > first[2]:
            parts.append(f"{(last[2] - first[2]) / span:,.0f} tokens/s")
            rate = (last[1] - first[1]) / span
            if state.input_closed and rate > 0:
                parts.append(f"{_duration((counters.input - counters.settled) / rate)} left")
        if counters.failed:
            parts.append(f"{counters.failed:,} errors")
        if snapshot.restarts:
            parts.append(f"{snapshot.restarts} restarts")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def summary(state: RunState, seconds: float | None = None, tokens_before: int = 0) -> str:
    """The last words of a run.

    `seconds` is how long this command worked, where it did; `tokens_before` what an earlier one had done by then.
    """
    c = state.counters
    what = "chunks" if state.spec.encoding.on_long is OnLong.CHUNK else "documents"
    took = f" in {_duration(seconds)}" if seconds is not None and not tokens_before else ""
    computed = c.tokens - tokens_before
    rate = f", {computed / seconds:,.0f} tokens/s" if seconds and computed > 0 else ""
    return (
        f"{state.status}: {c.succeeded:,} vectors of {c.input:,} {what}, {c.failed:,} failed, "
        f"{c.skipped:,} skipped, {c.tokens:,} tokens{took}{rate}"
    )


def runs_lines(states: list[RunState]) -> list[str]:
    """A few lines per run, none of which loses a name or a path to a narrow terminal."""
    lines: list[str] = []
    for state in states:
        c, sink = state.counters, state.spec.sink
        more = "" if state.input_closed else "+"
        lines.append(f"{state.spec.run}  {state.status}  {c.settled:,}/{c.input:,}{more} documents")
        lines.append(
            f"    {c.succeeded:,} succeeded, {c.failed:,} failed, {c.skipped:,} skipped, {c.tokens:,} tokens, "
            f"{state.spec.lane}"
        )
        where = f"dataset {sink.path}" if sink.kind == "parquet" else "results stay in Redis"
        count = state.published_files
        files = f", {count:,} file{'' if count == 1 else 's'}" if sink.kind == "parquet" else ""
        lines.append(f"    {where}{files}")
        if state.error:
            lines.append(f"    error: {state.error}")
    return lines or ["no runs"]


def workers_lines(beats: list[Heartbeat], *, silent_after_s: float) -> list[str]:
    """One line a process: who is alive, what it does, for how long."""
    now = time.time()
    table = [("process", "role", "state", "for", "held", "documents", "tokens", "heard")]
    for beat in beats:
        silent = now - beat.at
        state = beat.state if silent < silent_after_s else "silent"
        table.append(
            (beat.consumer, beat.role, state, _duration(beat.state_s), str(beat.held), f"{beat.documents:,}",
             f"{beat.tokens:,}", f"{silent:.0f} s ago")
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    for line, beat in zip(lines[1:], beats, strict=True):
        if beat.detail:
            lines.insert(lines.index(line) + 1, f"    {beat.detail}")
    return lines if beats else ["no workers"]


def state_json(state: RunState) -> dict[str, Any]:
    """A run's state for machines."""
    c = state.counters
    return {
        "run": state.spec.run,
        "status": state.status,
        "lane": state.spec.lane,
        "input": c.input,
        "input_closed": state.input_closed,
        "succeeded": c.succeeded,
        "failed": c.failed,
        "skipped": c.skipped,
        "tokens": c.tokens,
        "committed_files": state.committed_files,
        "published_files": state.published_files,
        "sink": state.spec.sink.model_dump(),
        "error": state.error,
        "created_at": state.created_at,
        "updated_at": state.updated_at,
    }


def consoles() -> tuple[Console, Console]:
    """(standard output for results, standard error for everything else)."""
    return Console(file=sys.stdout), Console(stderr=True)

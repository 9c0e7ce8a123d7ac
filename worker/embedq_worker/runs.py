"""What a worker knows of the runs whose work it holds: specifications for good, statuses for a moment."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar

from embedq_broker.registry import Registry
from embedq_schemas.errors import CodecError
from embedq_schemas.run import RunSpec, RunStatus

from embedq_worker.hold import until_accepted

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOST_SPECS = 4096
_STATUS_FRESH_S = 1.0


class RunCache:
    """Specifications and statuses of runs, read through from the registry. For one thread.

    A server that cannot answer is waited out: work is in hand whose outcome depends on the answer.
    """

    def __init__(self, registry: Registry, *, url: str, give_up: Callable[[], bool]) -> None:
        self._registry = registry
        self._url = url
        self._give_up = give_up
        self._specs: OrderedDict[str, RunSpec] = OrderedDict()
        self._statuses: dict[str, tuple[float, RunStatus | None]] = {}

    def load(self, runs: Iterable[str]) -> None:
        """Ask for what is not known of `runs`, or not fresh, in one round trip.

        Requests of services are runs of their own: asking for one after another would cost more than their work.
        """
        stale = [run for run in dict.fromkeys(runs) if run not in self._specs or not self._fresh(run)]
        if not stale:
            return
        if len(self._statuses) > _MOST_SPECS:
            self._statuses.clear()
        found = self.ask(lambda: self._registry.requests(stale))
        now = time.monotonic()
        for run, (spec, status) in zip(stale, found, strict=True):
            self._statuses[run] = (now, status)
            if spec is not None and run not in self._specs:
                self._decode(run, spec)
        while len(self._specs) > max(_MOST_SPECS, len(stale)):
            self._specs.popitem(last=False)

    def spec(self, run: str) -> RunSpec | None:
        """The run's specification; None if the registry does not know it.

        A specification this build cannot read ends its run, once, with the reason: its documents cannot be computed
        here, and must not end worker after worker.
        """
        if run not in self._specs:
            self.load([run])
        if run in self._specs:
            self._specs.move_to_end(run)
        return self._specs.get(run)

    def wanted(self, run: str) -> bool:
        """Whether the run's documents should still be computed; at most a second old."""
        if not self._fresh(run):
            self.load([run])
        return self._statuses[run][1] in (RunStatus.VALIDATING, RunStatus.IN_PROGRESS)

    def _fresh(self, run: str) -> bool:
        known = self._statuses.get(run)
        return known is not None and time.monotonic() - known[0] <= _STATUS_FRESH_S

    def _decode(self, run: str, spec: bytes) -> None:
        try:
            self._specs[run] = RunSpec.decode(spec)
        except CodecError as error:
            self._fail(run, str(error))

    def forget(self, run: str) -> None:
        """Ask for the run's status again next time."""
        self._statuses.pop(run, None)

    def _fail(self, run: str, error: str) -> None:
        open_states = [RunStatus.VALIDATING, RunStatus.IN_PROGRESS]
        moved, _ = self.ask(lambda: self._registry.transition(run, RunStatus.FAILED, open_states, error=error))
        if moved:
            log.error("run %s failed: %s", run, error)

    def ask(self, question: Callable[[], T]) -> T:
        """Put an idempotent question to the server, waiting until it answers."""
        return until_accepted(question, url=self._url, give_up=self._give_up)

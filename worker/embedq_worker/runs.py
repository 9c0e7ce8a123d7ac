"""What a worker knows of the runs whose work it holds: specifications for good, statuses for a moment."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from embedq_broker.registry import Registry
from embedq_schemas.errors import CodecError, RunNotFoundError
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

    def spec(self, run: str) -> RunSpec | None:
        """The run's specification; None if the registry does not know it.

        A specification this build cannot read ends its run, once, with the reason: its documents cannot be computed
        here, and must not end worker after worker.
        """
        if run in self._specs:
            self._specs.move_to_end(run)
            return self._specs[run]
        try:
            spec = self.ask(lambda: self._registry.state(run).spec)
        except RunNotFoundError:
            return None
        except CodecError as error:
            self._fail(run, str(error))
            return None
        self._specs[run] = spec
        while len(self._specs) > _MOST_SPECS:
            self._specs.popitem(last=False)
        return spec

    def wanted(self, run: str) -> bool:
        """Whether the run's documents should still be computed; at most a second old."""
        now = time.monotonic()
        known = self._statuses.get(run)
        if known is None or now - known[0] > _STATUS_FRESH_S:
            if len(self._statuses) > _MOST_SPECS:
                self._statuses.clear()
            known = (now, self.ask(lambda: self._registry.status(run)))
            self._statuses[run] = known
        return known[1] in (RunStatus.VALIDATING, RunStatus.IN_PROGRESS)

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

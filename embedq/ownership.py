"""Whose an object store prefix is, of all machines whose `embedq run` may want it.

A holder writes `_owner/<n>` again every few seconds. Whoever finds the newest one unchanged for long enough takes
number n + 1, which the store gives to one only, and a holder that finds a greater number than its own is none any more.
In a directory the lock of the file system says all this.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from embedq_schemas.errors import EmbedqError, RunConflictError
from embedq_worker.sinks.dataset import Dataset
from embedq_worker.sinks.s3 import S3Store

FOLDER = "_owner"
RENEW_S = 5.0
STALE_S = 20.0
"""A holder that was not heard of for so long is dead, or finds out before it writes the dataset's end."""
_NAME = "holder"
log = logging.getLogger(__name__)


class Ownership:
    """Being the one that writes a dataset, for a block."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        """
        Args:
            folder: of the state on this machine, whose lock the caller holds: whoever is named there is dead.
        """
        self._dataset = dataset
        self._store = dataset.place if isinstance(dataset.place, S3Store) else None
        self._folder = folder
        self._number = 0
        self._session = b""
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ownership", daemon=True)

    def __enter__(self) -> Self:
        if self._store is not None:
            self._take(self._store, _holder(self._folder))
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._stop.set()
            self._thread.join()
            if not self._lost:
                try:
                    self._store.delete([f"{FOLDER}/{self._number}"])
                except EmbedqError:
                    # Whoever comes next waits until it is old.
                    return

    def check(self) -> None:
        """Raise RunConflictError if another machine took the dataset over."""
        if self._lost:
            raise RunConflictError(f"another embedq run, on another machine, took over {self._dataset}")

    def confirm(self) -> None:
        """The same, having asked the store at this moment. Raises StorageError where it does not answer."""
        if self._store is not None and not self._is_ours(self._store):
            self._lost = True
        self.check()

    def _is_ours(self, store: S3Store) -> bool:
        try:
            last = store.read(f"{FOLDER}/{self._number}")
        except FileNotFoundError:
            return False
        # Numbers begin again once a holder has gone.
        return last.startswith(self._session) and _numbers(store)[-1:] == [self._number]

    def _take(self, store: S3Store, holder: str) -> None:
        numbers = _numbers(store)
        if numbers:
            _await_end(self._dataset, store, f"{FOLDER}/{numbers[-1]}", holder)
        self._number = numbers[-1] + 1 if numbers else 1
        self._session = f"{holder} {uuid.uuid4().hex} ".encode()
        # A reply may be lost and the request repeated, so that the object which is there is ours.
        with suppress(FileExistsError):
            store.create(f"{FOLDER}/{self._number}", self._content())
        if not self._is_ours(store):
            raise RunConflictError(f"another embedq run, on another machine, is writing into {self._dataset}")
        store.delete(f"{FOLDER}/{number}" for number in numbers)

    def _content(self) -> bytes:
        return self._session + f"{time.time_ns()}\n".encode()

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                self.confirm()
                if self._store is not None:
                    self._store.replace(f"{FOLDER}/{self._number}", self._content())
            except RunConflictError:
                return
            except EmbedqError:
                # The workers meet the same, and say it.
                continue


def _numbers(store: S3Store) -> list[int]:
    return sorted(int(name) for name in store.sizes(FOLDER) if name.isdecimal())


def _await_end(dataset: Dataset, store: S3Store, name: str, holder: str) -> None:
    """Wait until the holder of `name` must be dead; raises RunConflictError if it lives."""
    try:
        first = store.read(name)
        if first.split()[:1] == [holder.encode()]:
            return
        wait_s = STALE_S - store.age(name)
        if wait_s > 0:
            log.warning("waiting to see whether another embedq run is writing into %s", dataset)
        while wait_s > 0:
            time.sleep(min(1.0, wait_s))
            wait_s -= 1.0
            if store.read(name) != first:
                raise RunConflictError(f"another embedq run, on another machine, is writing into {dataset}")
    except FileNotFoundError:
        # It ended meanwhile.
        return


def _holder(folder: Path) -> str:
    """What this machine's state is called."""
    path = folder / _NAME
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()

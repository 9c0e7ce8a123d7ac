"""A new generation of a dataset: made in `_next` beside the old one, which readers see until the new one is complete.

`_next` is the output directory of an ordinary run. Its files then get their names in the dataset; `_SUCCESS` gets the
new counts and says how many rows were there before; one rename replaces the manifest, from which moment readers see the
new rows; the errors follow, the old files move to `_superseded/`, and `_run.json` is replaced last. A process that is
killed in between leaves a complete `_next`, with which the next command on the dataset goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from embedq_broker.faults import fault_point
from embedq_schemas.errors import OutputError
from embedq_schemas.manifest import MANIFEST_NAME, read_manifest
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.sinks.dataset import RANGES_NAME, RUN_NAME, Dataset
from embedq_worker.sinks.errors import read_errors
from embedq_worker.sinks.files import fsync_directory, storage_errors, write_durably

from embedq.dataset.reader import DatasetReader
from embedq.dataset.superseded import GRACE_S, tidy

NEXT_NAME = "_next"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Generation:
    """The next generation of the dataset `base`, whose lock the caller holds."""

    base: Dataset

    @property
    def dataset(self) -> Dataset:
        """Where it is made."""
        return Dataset(self.base.path / NEXT_NAME)

    def asked(self, wanted: RunSpec) -> RunSpec:
        """The request `wanted` of the dataset as one of its next generation."""
        return _moved(wanted, self.dataset.path)

    def make_room(self, wanted: RunSpec) -> bool:
        """Remove what an interrupted generation of another request left. Returns whether there was one."""
        owner = self.dataset.run_spec()
        if not self.dataset.path.exists() or (owner is not None and owner.same_request(self.asked(wanted))):
            return False
        self.drop()
        return owner is not None

    def drop(self) -> None:
        """Remove it, with all that it holds."""
        with storage_errors(f"remove {self.dataset.path}"):
            # Half removed it must not look complete.
            self.dataset.success.unlink(missing_ok=True)
            fsync_directory(self.dataset.path)
            fault_point("switch.unmarked")
            shutil.rmtree(self.dataset.path)
        fault_point("switch.done")

    def take_ranges(self) -> None:
        """Let new vectors be stored with the ranges that the old ones were stored with."""
        ranges, own = self.base.path / RANGES_NAME, self.dataset.path / RANGES_NAME
        if ranges.exists() and not own.exists():
            write_durably(own, ranges.read_bytes())

    @property
    def complete(self) -> bool:
        """Whether it is to take the place of the dataset."""
        return self.dataset.success.exists() and not self.empty

    @property
    def empty(self) -> bool:
        """Whether it is over without a vector, where the dataset has some: more likely a mistake than a wish."""
        return self.dataset.success.exists() and not _rows(self.dataset) and _rows(self.base) > 0

    @property
    def is_left_over(self) -> bool:
        """Whether it has taken the dataset's place already, and was not removed whole."""
        if not self.dataset.path.exists():
            return False
        own, base = self.dataset.run_spec(), self.base.run_spec()
        return own is None or (base is not None and own.run == base.run)

    def switch(self) -> None:
        """Make the complete generation the dataset. May be killed at any moment and called again.

        Raises:
            StorageError: the disk refused.
        """
        base, fresh = self.base, self.dataset
        spec, before = fresh.run_spec(), base.run_spec()
        assert spec is not None
        fault_point("switch.begun")
        with storage_errors(f"bring {fresh.path} into {base.path}"):
            # Once `_run.json` is replaced everything is, and the dataset may have changed since.
            if before is None or before.run != spec.run:
                self._replace(_moved(spec, base.path))
            self.drop()

    def _replace(self, spec: RunSpec) -> None:
        base, fresh = self.base, self.dataset
        files = list(read_manifest(fresh.path).values())
        before = _rows(base)
        for file in files:
            if (fresh.path / file.name).exists():
                os.replace(fresh.path / file.name, base.path / file.name)
        fsync_directory(base.path)
        fault_point("switch.renamed")
        summary = json.loads(fresh.success.read_bytes())
        write_durably(base.success, json.dumps(summary | {"replaces": before}).encode() + b"\n")
        fault_point("switch.noted")
        write_durably(base.path / MANIFEST_NAME, b"".join(file.encode() + b"\n" for file in files))
        fault_point("switch.listed")
        self._replace_errors(spec.run)
        ranges = fresh.path / RANGES_NAME
        if ranges.exists():
            write_durably(base.path / RANGES_NAME, ranges.read_bytes())
        else:
            (base.path / RANGES_NAME).unlink(missing_ok=True)
        tidy(base, files, GRACE_S)
        fault_point("switch.moved")
        write_durably(base.success, json.dumps(summary).encode() + b"\n")
        write_durably(base.path / RUN_NAME, spec.encode() + b"\n")

    def _replace_errors(self, run: str) -> None:
        folder = self.base.errors
        folder.mkdir(exist_ok=True)
        own = folder / f"part-{run}.jsonl"
        rows = b"".join(letter.encode() + b"\n" for letter in read_errors(self.dataset))
        if rows:
            write_durably(own, rows)
        for part in folder.glob("part-*.jsonl"):
            if part != own:
                part.unlink()


def finish_switch(base: Dataset) -> None:
    """Go on with a switch that was begun. The caller holds the dataset's lock."""
    if not base.is_directory:
        return
    generation = Generation(base)
    if generation.complete:
        generation.switch()
    elif generation.is_left_over:
        generation.drop()


def require_same_vectors(older: DatasetReader, wanted: RunSpec, dtype: str) -> str:
    """Refuse a request whose vectors would not be those of the dataset, and say in what to compute.

    Args:
        dtype: what the model is asked to compute in, or `auto`.

    Returns:
        The dtype that the dataset's vectors were computed in; `dtype` where it does not say.

    Raises:
        OutputError: model, options or dtype differ.
    """
    then, now = older.spec.encoding.model_dump(), wanted.encoding.model_dump()
    differing = [name for name in now if now[name] != then[name]]
    if older.files:
        facts = older.facts
        if facts.fingerprint != wanted.model_fingerprint:
            differing.insert(0, "model")
        if facts.dtype in _DTYPES and dtype == "auto":
            dtype = facts.dtype
        if facts.dtype and facts.dtype != dtype and dtype != "auto":
            differing.append("dtype")
    if differing:
        raise OutputError(
            f"{older.path} was made with another {', '.join(differing)}, so that its vectors cannot stay; "
            "--reindex computes all of them anew, and readers see the old ones until then"
        )
    return dtype


def _rows(dataset: Dataset) -> int:
    return sum(file.rows for file in read_manifest(dataset.path).values())


def _moved(spec: RunSpec, path: Path) -> RunSpec:
    assert isinstance(spec.sink, ParquetSink)
    return spec.model_copy(update={"sink": spec.sink.model_copy(update={"path": str(path)})})

"""The directory of a Parquet run: its layout, who may write where, and whose it is."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from embedq_schemas.errors import CodecError, OutputError, StorageError
from embedq_schemas.quantize import checked_ranges
from embedq_schemas.run import RunSpec
from numpy.typing import NDArray

from embedq_worker.sinks.files import create_durably, fsync_directory, storage_errors

RUN_NAME = "_run.json"
SUCCESS_NAME = "_SUCCESS"
ERRORS_NAME = "_errors"
STAGING_NAME = "_staging"
STATE_NAME = "_state"
RANGES_NAME = "_ranges.npy"


@dataclass(frozen=True)
class Dataset:
    """A dataset directory this process may write to."""

    path: Path

    @property
    def staging(self) -> Path:
        return self.path / STAGING_NAME

    @property
    def errors(self) -> Path:
        return self.path / ERRORS_NAME

    @property
    def success(self) -> Path:
        return self.path / SUCCESS_NAME

    def run_spec(self) -> RunSpec | None:
        """The run this directory holds; None before its first file.

        Raises:
            OutputError: it is not readable.
            StorageError: it cannot be read at the moment.
        """
        try:
            return RunSpec.decode((self.path / RUN_NAME).read_bytes())
        except FileNotFoundError:
            return None
        except (NotADirectoryError, IsADirectoryError, PermissionError, CodecError) as error:
            raise OutputError(f"{self.path / RUN_NAME} cannot be read: {error}") from None
        except OSError as error:
            # The disk or the network: that may pass, and is no reason to give the run up.
            raise StorageError(f"cannot read {self.path / RUN_NAME}: {error.strerror}") from error

    def prepare(self, spec: RunSpec) -> None:
        """Create the layout and claim the directory for the run.

        Raises:
            OutputError: the directory holds another run.
            StorageError: it cannot be written.
        """
        owner = self.run_spec()
        if owner is None:
            owner = self._claim(spec)
        if owner.run != spec.run:
            raise OutputError(f"{self.path} holds run {owner.run}; run {spec.run} may not write into it")
        with storage_errors(f"create the dataset {self.path}"):
            self.staging.mkdir(exist_ok=True)
            self.errors.mkdir(exist_ok=True)
            fsync_directory(self.path.parent)

    def ranges(self) -> NDArray[np.float32] | None:
        """Ranges of the vectors, float32 [2, dimension]; None before they are found.

        Raises:
            OutputError: they do not read back.
            StorageError: they cannot be read at the moment.
        """
        path = self.path / RANGES_NAME
        try:
            return checked_ranges(np.load(path, allow_pickle=False))
        except FileNotFoundError:
            return None
        except (ValueError, EOFError) as error:
            raise OutputError(f"{path} cannot be read: {error}") from None
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error

    def claim_ranges(self, proposed: NDArray[np.float32]) -> NDArray[np.float32]:
        """Lay down the ranges, or get those that were there first. In a directory that `prepare` has claimed.

        Raises:
            OutputError, StorageError: as `ranges` does, or they cannot be written.
        """
        if (found := self.ranges()) is not None:
            return found
        data = io.BytesIO()
        np.save(data, proposed)
        with storage_errors(f"write {self.path / RANGES_NAME}"), suppress(FileExistsError):
            create_durably(self.path / RANGES_NAME, data.getvalue())
        if (found := self.ranges()) is None:
            raise StorageError(f"{self.path / RANGES_NAME} was written and is not there")
        return found

    def _claim(self, spec: RunSpec) -> RunSpec:
        """The run that got the directory, of all that try at this moment."""
        with storage_errors(f"create the dataset {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                create_durably(self.path / RUN_NAME, spec.encode() + b"\n")
        return self.run_spec() or spec


def open_dataset(path: str, roots: Sequence[Path]) -> Dataset:
    """The dataset at `path`, if it lies below one of `roots` once links are followed.

    Whoever can push a job names the path; the roots are the operator's word on where a worker may write.

    Raises:
        OutputError: it does not.
    """
    try:
        real = Path(os.path.realpath(path))
    except ValueError:
        raise OutputError(f"{path!r} is not a path") from None
    if not any(real == root or root in real.parents for root in map(_real, roots)):
        allowed = ", ".join(map(str, roots))
        raise OutputError(f"{path} is outside the output roots of this worker ({allowed}); see --output-root")
    return Dataset(real)


def _real(root: Path) -> Path:
    return Path(os.path.realpath(root))


def require_free(dataset: Dataset) -> None:
    """Raise OutputError unless a new run may use the directory: it is missing, or empty."""
    try:
        names = os.listdir(dataset.path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise OutputError(f"{dataset.path} is a file; give a directory") from None
    except OSError as error:
        raise OutputError(f"{dataset.path} cannot be read: {error.strerror}") from None
    if names:
        raise OutputError(f"{dataset.path} is not empty and holds no run; give another directory, or empty it")


def require_writable(dataset: Dataset) -> None:
    """Raise StorageError now rather than after the first hour: create the directory and write a file in it."""
    probe = dataset.path / f".probe-{os.getpid()}"
    with storage_errors(f"write into {dataset.path}"):
        dataset.path.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"embedq")
        finally:
            probe.unlink(missing_ok=True)

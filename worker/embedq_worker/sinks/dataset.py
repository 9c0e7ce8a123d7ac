"""The dataset of a run: its layout, who may write where, and whose it is."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from embedq_schemas.errors import CodecError, OutputError, StorageError, UsageError
from embedq_schemas.quantize import checked_ranges
from embedq_schemas.run import RunSpec
from numpy.typing import NDArray

from embedq_worker.sinks import s3
from embedq_worker.sinks.files import storage_errors
from embedq_worker.sinks.store import ERRORS_NAME, STAGING_NAME, SUCCESS_NAME, DirectoryStore, Store

RUN_NAME = "_run.json"
STATE_NAME = "_state"
RANGES_NAME = "_ranges.npy"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True)
class Dataset:
    """A dataset this process may write to: a directory, or the prefix of an object store. `str()` says where it is."""

    place: Path | s3.S3Store

    def __str__(self) -> str:
        return self.store.location

    @property
    def store(self) -> Store:
        """What reads and writes its files."""
        return DirectoryStore(self.place) if isinstance(self.place, Path) else self.place

    @property
    def is_directory(self) -> bool:
        """Whether it lies in a directory of this machine's file systems."""
        return isinstance(self.place, Path)

    @property
    def path(self) -> Path:
        """The directory. Raises UsageError where there is none."""
        if not isinstance(self.place, Path):
            raise UsageError(f"{self} is on an object store; this works on a dataset in a directory")
        return self.place

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
            return RunSpec.decode(self.store.read(RUN_NAME))
        except FileNotFoundError:
            return None
        except (NotADirectoryError, IsADirectoryError, PermissionError, CodecError) as error:
            raise OutputError(f"{self}/{RUN_NAME} cannot be read: {error}") from None
        except OSError as error:
            # The disk or the network: that may pass, and is no reason to give the run up.
            raise StorageError(f"cannot read {self}/{RUN_NAME}: {error.strerror}") from error

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
            raise OutputError(f"{self} holds run {owner.run}; run {spec.run} may not write into it")
        with storage_errors(f"create the dataset {self}"):
            self.store.prepare()

    def ranges(self) -> NDArray[np.float32] | None:
        """Ranges of the vectors, float32 [2, dimension]; None before they are found.

        Raises:
            OutputError: they do not read back.
            StorageError: they cannot be read at the moment.
        """
        path = f"{self}/{RANGES_NAME}"
        try:
            return checked_ranges(np.load(io.BytesIO(self.store.read(RANGES_NAME)), allow_pickle=False))
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
        with storage_errors(f"write {self}/{RANGES_NAME}"), suppress(FileExistsError):
            self.store.create(RANGES_NAME, data.getvalue())
        if (found := self.ranges()) is None:
            raise StorageError(f"{self}/{RANGES_NAME} was written and is not there")
        return found

    def withdraw(self, tokens: Collection[str]) -> None:
        """Take files out of the manifest, then remove them; a repeated call goes on where one ended.

        Raises:
            StorageError: the disk refused.
        """
        if tokens:
            with storage_errors(f"withdraw files from {self}"):
                self.store.withdraw(tokens)

    def _claim(self, spec: RunSpec) -> RunSpec:
        """The run that got the directory, of all that try at this moment."""
        with storage_errors(f"create the dataset {self}"), suppress(FileExistsError):
            self.store.create(RUN_NAME, spec.encode() + b"\n")
        return self.run_spec() or spec


def is_url(location: str | Path) -> bool:
    """Whether a place is named by a URL, so that it is no path."""
    return _URL.match(os.fspath(location)) is not None


def dataset_at(location: str | Path) -> Dataset:
    """The dataset in the directory or below the object store prefix that a person names.

    Raises:
        UsageError: no dataset is written to such a place, or what reaches it is not installed.
    """
    text = os.fspath(location)
    if not is_url(text):
        return Dataset(Path(text))
    scheme = text.partition("://")[0]
    if scheme != "s3":
        raise UsageError(
            f"datasets are not written to {scheme}://; give a directory, or s3://bucket/prefix "
            "(with AWS_ENDPOINT_URL, of any store that speaks S3)"
        )
    return Dataset(s3.store_at(text))


def open_dataset(path: str, roots: Sequence[str | Path]) -> Dataset:
    """The dataset at `path`, if it lies below one of `roots` once links are followed.

    Whoever can push a job names the path; the roots are the operator's word on where a worker may write.

    Args:
        path: of a directory, or `s3://bucket/prefix`.
        roots: directories and object store prefixes.

    Raises:
        OutputError: it does not.
        UsageError: what reaches the object store is not installed.
    """
    places = [os.fspath(root) for root in roots]
    if is_url(path):
        if any(is_url(root) and f"{path}/".startswith(root.rstrip("/") + "/") for root in places):
            return dataset_at(path)
    else:
        try:
            real = Path(os.path.realpath(path))
        except ValueError:
            raise OutputError(f"{path!r} is not a path") from None
        allowed = [Path(os.path.realpath(root)) for root in places if not is_url(root)]
        if any(real == root or root in real.parents for root in allowed):
            return Dataset(real)
    raise OutputError(f"{path} is outside the output roots of this worker ({', '.join(places)}); see --output-root")


def require_free(dataset: Dataset) -> None:
    """Raise OutputError unless a new run may use the place: it is missing, or empty."""
    if not dataset.store.is_empty():
        kind = "directory" if dataset.is_directory else "prefix"
        raise OutputError(f"{dataset} is not empty and holds no run; give another {kind}, or empty it")


def require_writable(dataset: Dataset) -> None:
    """Raise StorageError or OutputError now rather than after the first hour: write, and remove what was written."""
    dataset.store.probe()

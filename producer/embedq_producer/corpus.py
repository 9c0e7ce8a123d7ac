"""A corpus: the files that a command's sources name, in a fixed order, and what tells one corpus from another."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

from embedq_schemas.errors import InputError

from .damage import DamagedFileError
from .formats import HEAD_BYTES, Format, of_content, of_name
from .places import (
    LocalFile,
    Place,
    RemoteFile,
    Stream,
    describe_os_error,
    remote_filesystem,
    standard_input,
    without_secrets,
)
from .streams import ByteStream

_MAX_STATE_BYTES = 64 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus."""

    place: Place
    label: str
    """Its name within the corpus: the path below the directory that was given, else as given."""
    format: Format | None
    """None: its first bytes and its name tell."""
    size: int | None
    mark: str
    """Changes with the content, together with `size`."""

    @property
    def name(self) -> str:
        """As a person calls it."""
        return self.place.name

    @property
    def shown_label(self) -> str:
        """`label` without secrets."""
        return without_secrets(self.label)

    def check_unchanged(self) -> None:
        """Raise InputError if it is not what it was when the corpus was put together."""
        size, mark = self.place.stamp()
        if size != self.size:
            raise InputError(
                f"The corpus {self.name} was changed during the run: it had {self.size} bytes, and has {size} now; "
                "a corpus must stay as it is until its run is complete."
            )
        if mark != self.mark:
            raise InputError(
                f"The corpus {self.name} was changed during the run: it has another modification time; "
                "a corpus must stay as it is until its run is complete."
            )


@dataclass(frozen=True)
class Corpus:
    """Files in the order in which they are read."""

    files: tuple[SourceFile, ...]
    left_out: tuple[str, ...] = ()
    """Files of the given directories that are of no known format."""

    @cached_property
    def identity(self) -> str:
        """A stable name for the content, to refuse resuming a run with another input.

        That of its only file, or a digest of those of all its files in their order: constant cost for each file. Names
        do not count. Raises InputError if a file cannot be read.
        """
        if len(self.files) == 1:
            return self.files[0].place.identity()
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.place.identity()}\n".encode())
        return f"{len(self.files)}-files-{digest.hexdigest()}"

    @property
    def name(self) -> str:
        """For one sentence about the whole."""
        if len(self.files) == 1:
            return self.files[0].name
        return f"of {len(self.files)} files from {self.files[0].name} on" if self.files else "without files"

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """Files of this machine."""
        return tuple(file.place.path for file in self.files if file.place.path is not None)


def open_corpus(sources: Sequence[str | Path], format: Format | None = None) -> Corpus:
    """The corpus that `sources` name, in their order.

    Args:
        sources: files, directories (their files in the order of their paths, without hidden ones and those that begin
            with an underscore), saved Hugging Face datasets, globs, URLs that fsspec knows, or `-` for standard input.
        format: what all files hold. None: each file's name or its first bytes say so, and files of a directory that
            are of no known format are left out.

    Raises:
        InputError: a source does not exist, cannot be read, or holds no file.
        UsageError: a URL needs a package that is not installed.
    """
    files: list[SourceFile] = []
    left_out: list[str] = []
    for source in map(str, sources):
        found = list(_files_of(source, format))
        known = [file for file in found if not isinstance(file, str)]
        left_out += [file for file in found if isinstance(file, str)]
        if not known:
            shown = without_secrets(source)
            raise InputError(f"The corpus {shown} holds no file of a known format; name the files, or give --format.")
        files += known
    return Corpus(tuple(files), tuple(left_out))


def corpus_of_stream(stream: BinaryIO, name: str, format: Format | None = None) -> Corpus:
    """A corpus that is read from an open stream of bytes, once."""
    return Corpus((_source(Stream(stream, name), name, format),))


def corpus_identity(path: Path) -> str:
    """`Corpus.identity` of one path."""
    return open_corpus([path]).identity


def _files_of(source: str, format: Format | None) -> Iterator[SourceFile | str]:
    """The files of one source; a name alone for a file of no known format."""
    if source == "-":
        yield _source(standard_input(), "-", format)
    elif "://" in source:
        yield from _remote_files(source, format)
    elif os.path.isdir(source):
        yield from _directory_files(Path(source), format)
    elif has_magic(source) and not os.path.lexists(source):
        matches = sorted(glob(source, recursive=True))
        if not matches:
            raise InputError(f"The corpus {source} matches no file.")
        for match in matches:
            if os.path.isdir(match):
                yield from _directory_files(Path(match), format)
            else:
                yield _source(LocalFile(Path(match)), match, format)
    else:
        yield _source(LocalFile(Path(source)), source, format)


def _source(place: Place, label: str, format: Format | None) -> SourceFile:
    return SourceFile(place, label, format, *place.stamp())


def _directory_files(folder: Path, format: Format | None) -> Iterator[SourceFile | str]:
    if (saved := _saved_dataset(folder)) is not None:
        for path in saved:
            yield _source(LocalFile(path), str(path.relative_to(folder)), Format.ARROW)
        return
    for path in sorted(_walk(folder), key=lambda path: path.relative_to(folder).parts):
        yield from _if_known(LocalFile(path), str(path.relative_to(folder)), format)


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder`, links followed, whatever is hidden left out; raises InputError rather than miss one."""

    def refuse(error: OSError) -> None:
        raise InputError(f"The corpus {error.filename} cannot be read: {describe_os_error(error)}.") from error

    seen: set[str] = set()
    for base, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        # A link that leads back up would be followed for ever.
        real = os.path.realpath(base)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        if "state.json" in names and (saved := _saved_dataset(Path(base))) is not None:
            yield from saved
            continue
        for name in names:
            path = Path(base, name)
            # A link that leads nowhere is a file that is missing, not one that is none.
            if not name.startswith((".", "_")) and (path.is_file() or path.is_symlink()):
                yield path


def _if_known(place: Place, label: str, format: Format | None) -> Iterator[SourceFile | str]:
    known = format or of_name(label) or _format_inside(place)
    yield place.name if known is None else _source(place, label, format)


def _format_inside(place: Place) -> Format | None:
    with place.peek() as raw:
        try:
            return of_content(ByteStream(raw, place.name).head(HEAD_BYTES))
        except DamagedFileError:
            # It is read, so that its damage becomes an error row.
            return Format.JSONL


def _saved_dataset(folder: Path) -> list[Path] | None:
    """The Arrow files of a dataset or of all splits that `datasets` saved to `folder`, in order; None elsewhere."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
            raise InputError(f"The corpus {folder / 'dataset_dict.json'} names no splits.")
        return [path for split in splits for path in _saved_dataset(folder / Path(split).name) or []]
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    state = _json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InputError(
            f"The corpus {folder} keeps its rows in an order of its own; call flatten_indices() before save_to_disk()."
        )
    try:
        return [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise InputError(f"The corpus {folder / 'state.json'} names no data files.") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"The corpus {path} cannot be read: {' '.join(str(error).split())[:200]}.") from None
    return content if isinstance(content, dict) else {}


def _remote_files(url: str, format: Format | None) -> Iterator[SourceFile | str]:
    filesystem, key = remote_filesystem(url)
    scheme = url.partition("://")[0]

    def whole(found: str) -> str:
        return found if "://" in found else f"{scheme}://{found.lstrip('/')}"

    def at(found: str) -> RemoteFile:
        return RemoteFile(filesystem, found, without_secrets(whole(found)))

    try:
        if has_magic(key):
            keys, base = sorted(filesystem.glob(key)), None
        elif filesystem.isdir(key) and not scheme.startswith("http"):
            keys, base = sorted(filesystem.find(key)), key.rstrip("/") + "/"
        else:
            keys, base = [key], None
    except Exception as error:  # the libraries behind fsspec each have exceptions of their own
        raise InputError(f"The corpus {without_secrets(url)} cannot be listed: {describe_os_error(error)}.") from error
    if not keys:
        raise InputError(f"The corpus {without_secrets(url)} matches no file.")
    for found in keys:
        if base is None:
            yield _source(at(found), whole(found), format)
        elif not any(part.startswith((".", "_")) for part in found.removeprefix(base).split("/")):
            yield from _if_known(at(found), found.removeprefix(base), format)

"""Files that are whole or not there, lines that stay alone, and directories that belong to one run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from embedq_schemas.errors import OutputError, StorageError
from embedq_schemas.manifest import MANIFEST_NAME, PublishedFile, read_manifest
from embedq_schemas.run import ParquetSink, RunSpec
from embedq_worker.sinks.dataset import RUN_NAME, Dataset, open_dataset, require_free, require_writable
from embedq_worker.sinks.files import append_line, create_durably, storage_errors, write_durably
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def spec(run: str, path: Path) -> RunSpec:
    return RunSpec(run=run, queue="q", sink=ParquetSink(path=str(path)), created_at=1.0)


def line(number: int) -> PublishedFile:
    return PublishedFile(token=f"{number:032x}", run="r", rows=1, size_bytes=1, tokens=1, ordinals=(number, number))


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for data in (b"one", b"", b"three" * 1000):
        write_durably(tmp_path / "f", data)
        assert (tmp_path / "f").read_bytes() == data
    assert names(tmp_path) == {"f"}


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "inside").touch()
    with pytest.raises(StorageError, match="cannot write it: "), storage_errors("write it"):
        write_durably(tmp_path / "f", b"x")
    assert names(tmp_path) == {"f"}


def test_writers_of_one_file_in_one_process_do_not_meet(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(50):
                write_durably(tmp_path / "f", data)
        except BaseException as error:
            errors.append(error)

    contents = [bytes([65 + n]) * (n + 1) * 1000 for n in range(4)]
    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (tmp_path / "f").read_bytes() in contents
    assert names(tmp_path) == {"f"}


def test_a_file_is_created_once(tmp_path: Path) -> None:
    create_durably(tmp_path / "f", b"first")
    with pytest.raises(FileExistsError):
        create_durably(tmp_path / "f", b"second")
    assert (tmp_path / "f").read_bytes() == b"first"
    assert names(tmp_path) == {"f"}


def test_a_file_is_created_once_where_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    test_a_file_is_created_once(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.integers(0, 5), st.data())
def test_a_torn_line_costs_only_itself(tmp_path: Path, before: int, data: st.DataObject) -> None:
    manifest = tmp_path / MANIFEST_NAME
    manifest.unlink(missing_ok=True)
    for number in range(before):
        append_line(manifest, line(number).encode())
    torn = line(before).encode() + b"\n"
    with manifest.open("ab") as file:
        file.write(torn[: data.draw(st.integers(0, len(torn) - 2))])
    assert set(read_manifest(tmp_path)) == {line(number).token for number in range(before)}
    append_line(manifest, line(before).encode())
    append_line(manifest, line(before + 1).encode())
    assert set(read_manifest(tmp_path)) == {line(number).token for number in range(before + 2)}


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom embedq_worker.sinks.files import append_line\n"
        "for n in range(40):\n    append_line(Path(sys.argv[1]), (sys.argv[2] * (2000 + n)).encode())\n"
    )
    letters = "abc"
    path = str(tmp_path / "lines")
    writers = [subprocess.Popen([sys.executable, "-c", script, path, letter]) for letter in letters]
    assert [writer.wait(60) for writer in writers] == [0] * len(letters)
    lines = Path(path).read_text().splitlines()
    assert sorted(lines) == sorted(letter * (2000 + n) for letter in letters for n in range(40))


def test_a_dataset_directory_belongs_to_the_run_that_came_first(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path / "a" / "out")
    first = spec("first", dataset.path)
    assert dataset.run_spec() is None
    dataset.prepare(first)
    dataset.prepare(first)
    assert names(dataset.path) == {RUN_NAME, "_staging", "_errors"}
    assert dataset.run_spec() == first
    with pytest.raises(OutputError, match="holds run first"):
        dataset.prepare(spec("second", dataset.path))
    assert dataset.run_spec() == first


def test_of_runs_that_claim_a_directory_at_once_one_gets_it(tmp_path: Path) -> None:
    for attempt in range(20):
        dataset = Dataset(tmp_path / str(attempt))
        got: list[str] = []
        start = threading.Barrier(4)

        def claim(run: str, dataset: Dataset = dataset, got: list[str] = got, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                dataset.prepare(spec(run, dataset.path))
            except OutputError:
                return
            got.append(run)

        threads = [threading.Thread(target=claim, args=(f"run{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        owner = dataset.run_spec()
        assert owner is not None
        assert got == [owner.run]


def test_a_run_file_that_cannot_be_read_is_an_error_and_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / RUN_NAME).write_bytes(b"{")
    with pytest.raises(OutputError, match=r"_run\.json cannot be read"):
        Dataset(tmp_path).prepare(spec("r", tmp_path))
    assert (tmp_path / RUN_NAME).read_bytes() == b"{"


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    """<tmp>/root is writable by workers, <tmp>/outside is not; links lead from one to the other."""
    for name in ("root/in", "outside", "rootless"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "escape").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "around").symlink_to(tmp_path / "root" / "in")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root" / "loop")
    (tmp_path / "entrance").symlink_to(tmp_path / "root")
    return tmp_path


@pytest.mark.parametrize(
    "path", ["root", "root/new", "root/in/deep/er", "root/around/x", "entrance/x", "root/in/../new"]
)
def test_a_dataset_below_a_root_is_opened_where_links_really_lead(roots: Path, path: str) -> None:
    for root in (roots / "root", roots / "entrance"):
        dataset = open_dataset(f"{roots}/{path}", [roots / "nowhere", root])
        assert dataset.path == Path(os.path.realpath(f"{roots}/{path}"))
        assert dataset.path.is_relative_to(roots / "root")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "outside",
        "rootless",
        "root/../outside/x",
        "root/escape",
        "root/escape/x",
        "root/in/../../outside",
        "root\0x",
    ],
)
def test_a_dataset_outside_every_root_is_refused(roots: Path, path: str) -> None:
    with pytest.raises(OutputError):
        open_dataset(f"{roots}/{path}", [roots / "root"])
    with pytest.raises(OutputError):
        open_dataset(f"{roots}/root/in", [])


def test_a_relative_path_is_held_to_the_roots_too(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(roots / "root")
    assert open_dataset("in", [roots / "root"]).path == roots / "root" / "in"
    with pytest.raises(OutputError):
        open_dataset("../outside", [roots / "root"])


def test_a_new_run_needs_a_directory_that_is_missing_or_empty(tmp_path: Path) -> None:
    require_free(Dataset(tmp_path / "missing"))
    require_free(Dataset(tmp_path))
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError):
            require_free(Dataset(path))


def test_a_directory_that_cannot_be_written_is_told_at_once_and_no_probe_stays(tmp_path: Path) -> None:
    require_writable(Dataset(tmp_path / "new" / "dir"))
    assert names(tmp_path / "new" / "dir") == set()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        require_writable(Dataset(tmp_path / "file" / "below"))

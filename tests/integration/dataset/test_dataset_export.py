"""`embedq export`: whole or not there, in input order, and nothing of what was there before is lost on the way.

That each target reads back with the right values is tested with its reader.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_helpers import Command, Made
from embedq_schemas.errors import OutputError
from handmade_dataset import add_file, complete, make_dataset, rows_of, text_of, vectors_of

from embedq.dataset import open_dataset
from embedq.dataset.export.faiss import _binary, _inner_product, _streams
from embedq.dataset.export.whole import whole


def test_json_lines_hold_every_column_and_read_back_to_the_same_float32(made: Made, embedq: Command) -> None:
    said = embedq("export", made.path, "--to", "jsonl", "-o", "rows.jsonl")
    assert said.out == f"60 vectors of 32 dimensions: {Path('rows.jsonl').resolve()}\n"
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == made.ids
    assert [row["text"] for row in rows] == [document["text"] for document in made.documents]
    np.testing.assert_array_equal(np.array([row["vector"] for row in rows], np.float32), made.vectors)
    assert rows[0]["text_sha256"] == next(open_dataset(made.path).batches(order="input")).column(5)[0].as_py().hex()


def test_numbers_at_the_edges_of_float32_read_back_from_json_lines(embedq: Command, tmp_path: Path) -> None:
    numbers = np.array([1e-45, -3.4028235e38, 1e-5, 16777216, 0.1, -0.0, 1e10, 7], dtype=np.float32)
    path = make_dataset(tmp_path / "d", [[0]])
    rows = rows_of([1])
    vector = pa.FixedSizeListArray.from_arrays(pa.array(numbers), type=rows.schema.field("vector").type)
    add_file(path, rows.set_column(2, rows.schema.field("vector"), vector))
    complete(path, 2, 2)
    assert embedq("export", path, "--to", "jsonl", "-o", "x.jsonl").status == 0
    line = Path("x.jsonl").read_text().splitlines()[1]
    np.testing.assert_array_equal(np.array(json.loads(line)["vector"], np.float32), numbers)


def test_a_doubled_document_is_exported_once_with_its_newest_row(embedq: Command, tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[2, 0, 1]])
    add_file(path, rows_of([1], seed=3))
    complete(path, 4, 2)
    expected = vectors_of([0, 1, 2])
    expected[1] = vectors_of([1], seed=3)[0]
    for target in ("npy", "faiss"):
        assert embedq("export", path, "--to", target, "-o", target).status == 0
        assert pq.read_table(f"{target}/ids.parquet").column("ordinal").to_pylist() == [0, 1, 2]
    np.testing.assert_array_equal(np.load("npy/vectors.npy"), expected)
    import faiss

    np.testing.assert_array_equal(faiss.read_index("faiss/index.faiss").reconstruct_n(0, 3), expected)


def test_the_index_is_written_as_the_installed_faiss_writes_it(embedq: Command, tmp_path: Path) -> None:
    import faiss

    assert _streams(_inner_product(faiss, 8))
    assert _streams(_binary(faiss, 16))
    path = make_dataset(tmp_path / "d", [[1, 3], [0, 2, 4]])
    assert embedq("export", path, "--to", "faiss", "-o", "f").status == 0
    index = faiss.IndexFlatIP(8)
    index.add(vectors_of(range(5)))
    assert Path("f/index.faiss").read_bytes() == bytes(faiss.serialize_index(index))


def test_where_faiss_writes_something_else_it_writes_the_index_itself(
    embedq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import faiss

    elsewhere = replace(_inner_product(faiss, 8), count_at=0)
    monkeypatch.setattr("embedq.dataset.export.faiss._inner_product", lambda *_: elsewhere)
    assert not _streams(elsewhere)
    path = make_dataset(tmp_path / "d", [[1, 0]])
    assert embedq("export", path, "--to", "faiss", "-o", "f").status == 0
    np.testing.assert_array_equal(faiss.read_index("f/index.faiss").reconstruct_n(0, 2), vectors_of([0, 1]))


@pytest.mark.parametrize("target", ["npy", "faiss", "lance", "jsonl"])
def test_what_is_there_is_replaced_only_on_request_and_whole(target: str, made: Made, embedq: Command) -> None:
    place = Path("place")
    command = ("export", made.path, "--to", target, "-o", place)
    assert embedq(*command).status == 0
    said = embedq(*command)
    assert said.status == 2
    assert said.err == f"error: output: {place.resolve()} exists; give another place, or add --replace\n"
    assert embedq(*command, "--replace").status == 0
    assert os.listdir() == ["place"]


def test_a_killed_export_leaves_nothing_under_the_name_and_the_next_one_clears_up(made: Made, embedq: Command) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from embedq.dataset.export.whole import whole\n"
        "with whole(Path('place'), replace=False, directory=True) as folder:\n"
        "    (folder / 'half').write_bytes(bytes(1000)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir()
    assert left != "place"
    with whole(Path("place"), replace=False, directory=True) as alive:
        # One that is being written is not cleared away.
        assert embedq("export", made.path, "--to", "npy", "-o", "place").status == 0
        assert alive.exists()
        assert not Path(left).exists()
        Path("place").rename("elsewhere")
    assert sorted(os.listdir()) == ["elsewhere", "place"]


def test_an_export_that_fails_midway_leaves_nothing(embedq: Command, tmp_path: Path) -> None:
    path = make_dataset(tmp_path / "d", [[0], [1]])
    part = path / open_dataset(path).files[1].name
    part.write_bytes(b"\0" * part.stat().st_size)
    for target in ("npy", "lance", "jsonl"):
        said = embedq("export", path, "--to", target, "-o", "place")
        assert said.status == 2, said.err
        assert f"{part.name} cannot be read" in said.err
    assert os.listdir() == ["d"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--to is missing"),
        (("--to", "npy"), "name it with --output"),
        (("--to", "pgvector"), "name it with --url"),
        (("--to", "qdrant"), "--to qdrant writes to a server"),
        (("--to", "stone"), "--to must be 'npy', 'faiss'"),
        (("--to", "npy", "-o", "vectors/inside"), "is not beside the dataset"),
        (("--to", "npy", "-o", "."), "is not beside the dataset"),
    ],
    ids=["nothing", "no output", "no url", "no place", "no target", "inside", "around"],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    arguments: tuple[str, ...], sentence: str, embedq: Command
) -> None:
    make_dataset(Path("vectors").resolve(), [[0]])
    said = embedq("export", "vectors", *arguments)
    assert said.status == 2
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert os.listdir() == ["vectors"]


@pytest.mark.parametrize(
    ("target", "module"), [("faiss", "faiss"), ("lance", "lance"), ("pgvector", "psycopg"), ("qdrant", "qdrant_client")]
)
def test_a_library_that_is_not_installed_is_named(
    target: str, module: str, embedq: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_dataset(tmp_path / "d", [[0]])
    monkeypatch.setitem(sys.modules, module, None)
    place = ("--url", "postgresql://localhost/x") if target == "pgvector" else ("-o", "place")
    said = embedq("export", path, "--to", target, *place)
    assert said.status == 2
    assert f"`pip install 'embedq[{target}]'` adds it" in said.err


def postgres_rows(url: str, table: str = "embeddings") -> list[tuple[Any, ...]]:
    import psycopg

    with psycopg.connect(url) as connection:
        rows: list[tuple[Any, ...]] = connection.execute(
            f"SELECT ordinal, text FROM {table} ORDER BY ordinal"
        ).fetchall()
        return rows


def test_a_table_is_replaced_in_one_transaction(embedq: Command, tmp_path: Path, postgres_url: str) -> None:
    import psycopg

    first = make_dataset(tmp_path / "first", [[0, 1]])
    second = make_dataset(tmp_path / "second", [[7], [5, 6]])
    to = ("--to", "pgvector", "--url", postgres_url)
    assert embedq("export", first, *to).out == f"2 vectors of 8 dimensions: table embeddings at {postgres_url}\n"
    said = embedq("export", second, *to)
    assert said.status == 2
    assert "the table embeddings exists" in said.err
    assert postgres_rows(postgres_url) == [(0, text_of(0)), (1, text_of(1))]
    for _ in range(2):
        assert embedq("export", second, *to, "--replace").status == 0
        assert postgres_rows(postgres_url) == [(o, text_of(o)) for o in (5, 6, 7)]
    with psycopg.connect(postgres_url) as connection:
        query = "SELECT column_name, udt_name FROM information_schema.columns WHERE table_name = 'embeddings'"
        kinds = dict(connection.execute(query).fetchall())
        comment = connection.execute("SELECT obj_description('embeddings'::regclass)").fetchone()
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert kinds == {
        "id": "text", "ordinal": "int8", "vector": "vector", "n_tokens": "int4", "truncated": "bool",
        "text_sha256": "bytea", "lang": "text", "text": "text",
    }  # fmt: skip
    assert comment is not None
    assert json.loads(comment[0])["model_id"] == "handmade"
    assert tables == [("embeddings",)]


def kill_after(module: str, source: str, count: int, call: str) -> None:
    """Run `call` of an export module in a process that is killed when `source` has given `count` items."""
    script = f"""
import os, signal, sys
from pathlib import Path
from embedq.dataset import open_dataset
from embedq.dataset.export import {module} as module
whole = module.{source}
def killing(reader):
    for number, item in enumerate(whole(reader)):
        if number == {count}:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item
module.{source} = killing
{call}
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def test_an_export_to_postgresql_that_is_killed_leaves_the_old_table_alone(
    embedq: Command, tmp_path: Path, postgres_url: str
) -> None:
    import psycopg

    to = ("--to", "pgvector", "--url", postgres_url, "--replace")
    assert embedq("export", make_dataset(tmp_path / "first", [[0, 1]]), *to).status == 0
    second = make_dataset(tmp_path / "second", [list(range(5, 3000))])
    call = f"module.export_pgvector(open_dataset({str(second)!r}), {postgres_url!r}, 'embeddings', replace=True)"
    kill_after("pgvector", "_rows", 2000, call)
    assert postgres_rows(postgres_url) == [(0, text_of(0)), (1, text_of(1))]
    assert embedq("export", second, *to).status == 0
    assert len(postgres_rows(postgres_url)) == 2995
    with psycopg.connect(postgres_url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert tables == [("embeddings",)]


def test_an_export_to_qdrant_that_is_killed_is_completed_by_the_next(embedq: Command, tmp_path: Path) -> None:
    from qdrant_client import QdrantClient

    path = make_dataset(tmp_path / "d", [list(range(12))])
    call = f"module._ROWS = 4\nmodule.export_qdrant(open_dataset({str(path)!r}), Path('q'), 'docs', "
    call += "api_key=None, replace=False)"
    kill_after("qdrant", "_points", 1, call)
    assert embedq("export", path, "--to", "qdrant", "-o", "q", "--table", "docs").status == 0
    client = QdrantClient(path="q")
    assert client.count("docs").count == 12
    client.close()


def test_what_postgresql_refuses_leaves_the_table_as_it_was(embedq: Command, tmp_path: Path, postgres_url: str) -> None:
    first = make_dataset(tmp_path / "first", [[0, 1]])
    to = ("--to", "pgvector", "--url", postgres_url, "--replace")
    assert embedq("export", first, *to).status == 0
    repeated = make_dataset(tmp_path / "repeated", [[5]])
    add_file(repeated, rows_of([6], ids=["d5"]))
    complete(repeated, 2, 2)
    said = embedq("export", repeated, *to)
    assert said.status == 2
    assert "holds an id twice, so it is no key for a table" in said.err
    wide = make_dataset(tmp_path / "wide", [[0]], dimensions=16_001)
    said = embedq("export", wide, *to)
    assert said.status == 2
    assert "16000" in said.err
    assert len(said.err.splitlines()) == 1
    assert postgres_rows(postgres_url) == [(0, text_of(0)), (1, text_of(1))]


def test_a_nul_character_does_not_end_an_export_to_postgresql(
    embedq: Command, tmp_path: Path, postgres_url: str
) -> None:
    path = make_dataset(tmp_path / "d", [[0]])
    rows = rows_of([1])
    add_file(path, rows.set_column(7, "text", pa.array(["a\0b"])))
    complete(path, 2, 2)
    assert embedq("export", path, "--to", "pgvector", "--url", postgres_url, "--table", "public.docs").status == 0
    assert postgres_rows(postgres_url, "docs")[1] == (1, "a\ufffdb")


@pytest.mark.parametrize(
    ("target", "url"),
    [("pgvector", "postgresql://me:hunter2@127.0.0.1:1/x?connect_timeout=2"), ("qdrant", "http://127.0.0.1:1")],
)
def test_a_server_that_is_not_there_is_named_without_its_password(
    target: str, url: str, made: Made, embedq: Command
) -> None:
    said = embedq("export", made.path, "--to", target, "--url", url)
    assert said.status == 5, said.err
    assert said.err.startswith("error: storage: cannot write ")
    assert len(said.err.splitlines()) == 1
    assert "127.0.0.1:1" in said.err
    assert "hunter2" not in said.err


def test_a_repeated_export_to_qdrant_updates_and_with_replace_removes_what_is_of_another_run(
    made: Made, embedq: Command, tmp_path: Path
) -> None:
    from qdrant_client import QdrantClient, models

    command = ("--to", "qdrant", "-o", tmp_path / "q", "--table", "docs")
    assert embedq("export", made.path, *command).status == 0
    client = QdrantClient(path=str(tmp_path / "q"))
    stale = models.PointStruct(id=1, vector=[0.5] * 32, payload={"embedq_run": "an older run"})
    client.upsert("docs", [stale])
    client.close()
    for more, count in (((), 61), (("--replace",), 60)):
        assert embedq("export", made.path, *command, *more).status == 0
        client = QdrantClient(path=str(tmp_path / "q"))
        assert client.count("docs").count == count
        client.close()
    other = make_dataset(tmp_path / "other", [[0]])
    said = embedq("export", other, *command)
    assert said.status == 2
    assert "does not hold vectors of 8 dimensions" in said.err
    (stored,) = (tmp_path / "q").rglob("storage.sqlite")
    stored.write_bytes(b"no database" * 1000)
    said = embedq("export", made.path, *command)
    assert said.status == 5
    assert "file is not a database" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_place_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def write() -> None:
        with whole(target, replace=False, directory=False) as file:
            file.write_text("ours")
            target.write_text("theirs")

    with pytest.raises(OutputError, match="exists by now"):
        write()
    assert target.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["target"]

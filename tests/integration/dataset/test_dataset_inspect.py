"""`embedq inspect`: every figure is what a plain count over the rows gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from dataset_helpers import Command, Made
from handmade_dataset import add_file, complete, make_dataset, new_dataset, rows_of


def test_a_real_dataset_is_described_by_its_own_rows(made: Made, embedq: Command) -> None:
    import pandas

    rows = pandas.read_parquet(made.path)
    found = json.loads(embedq("inspect", made.path, "--json").out)
    assert (found["rows"], found["complete"]) == (60, True)
    assert found["files"] == len(list(made.path.glob("part-*")))
    assert found["size_bytes"] == sum(part.stat().st_size for part in made.path.glob("part-*"))
    assert found["facts"]["model_id"] == "model"
    assert found["facts"]["dimensions"] == 32
    assert found["facts"]["dtype"] == "float32"
    assert found["errors"] == {"invalid_json": 1, "missing_text": 1}
    assert found["summary"]["input"] == 62
    assert found["truncated"] == rows["truncated"].sum() > 0
    assert (found["repeated_ids"], found["repeated_texts"], found["strangers"]) == (0, 0, 0)
    tokens = found["tokens"]
    assert tokens["total"] == rows["n_tokens"].sum()
    assert tokens["largest"] == rows["n_tokens"].max()
    assert tokens["median"] == np.sort(rows["n_tokens"])[29]
    assert sum(documents for _, _, documents in tokens["histogram"]) == 60
    for first, last, documents in tokens["histogram"]:
        assert documents == rows["n_tokens"].between(first, last).sum()
    norms = np.linalg.norm(np.stack(rows["vector"]).astype(np.float64), axis=1)
    assert abs(found["norms"]["mean"] - norms.mean()) < 1e-9
    assert (found["norms"]["not_unit"], found["norms"]["not_finite"]) == (0, 0)

    shown = embedq("inspect", made.path).out
    assert f"{made.path}  (" in shown
    assert "rows                     60" in shown
    assert "62 input, 60 succeeded, 2 failed" in shown
    assert "1 invalid_json" in shown
    assert "32, L2-normalised" in shown


def test_repeats_wrong_norms_values_and_strangers_are_counted(tmp_path: Path, embedq: Command) -> None:
    path = make_dataset(tmp_path / "d", [[0, 1, 2, 3]])
    rows = rows_of([1, 5, 6], ids=["d1", "d1", "d6"], scale=2)
    values = rows.column("vector").flatten().to_numpy().copy()
    values[-1] = np.nan
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), type=rows.schema.field("vector").type)
    add_file(path, rows.set_column(2, rows.schema.field("vector"), vectors))
    complete(path, 7, 2)
    (path / f"part-{'0' * 32}.parquet").write_bytes(b"left by a killed process")
    found = json.loads(embedq("inspect", path, "--json").out)
    assert (found["repeated_ids"], found["repeated_texts"], found["strangers"]) == (2, 1, 1)
    assert (found["norms"]["not_unit"], found["norms"]["not_finite"]) == (2, 1)
    assert abs(found["norms"]["largest"] - 2) < 1e-6
    assert "embedq compact removes them" in embedq("inspect", path).out


def test_an_incomplete_and_an_empty_dataset_are_described_too(tmp_path: Path, embedq: Command) -> None:
    path = new_dataset(tmp_path / "d")
    assert "not complete" in embedq("inspect", path).out
    add_file(path, rows_of([4]))
    shown = embedq("inspect", path).out
    assert "not complete" in shown
    assert "rows                     1\n" in shown
    assert json.loads(embedq("inspect", path, "--json").out)["complete"] is False


def test_what_is_no_dataset_is_said_in_one_line(tmp_path: Path, embedq: Command) -> None:
    said = embedq("inspect", tmp_path)
    assert (said.status, said.err) == (2, f"error: run_not_found: {tmp_path} holds no run\n")

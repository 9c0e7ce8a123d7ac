"""Batches: what they take, how they end, and that each request has exactly one outcome whatever is killed."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from stack import Caller, Stack, wait_until

OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def line(custom_id: str, model: str, inputs: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "input": inputs, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


def upload(stack: Caller, lines: list[Any]) -> str:
    content = "".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines)
    answer = stack.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def create(stack: Caller, lines: list[Any], **fields: Any) -> str:
    request = {"input_file_id": upload(stack, lines), "endpoint": "/v1/embeddings", "completion_window": "24h"}
    answer = stack.post("/v1/batches", json=request | fields)
    assert answer.status_code == 200, answer.text
    batch_id: str = answer.json()["id"]
    return batch_id


def state(stack: Caller, batch_id: str) -> dict[str, Any]:
    """The batch now; waits out a gateway or a server that is down."""

    def ask() -> dict[str, Any] | None:
        answer = stack.get(f"/v1/batches/{batch_id}")
        if answer.status_code == 503:
            return None
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    found: dict[str, Any] = wait_until(ask, "the gateway answers")
    return found


def ended(stack: Caller, batch_id: str) -> dict[str, Any]:
    wait_until(lambda: state(stack, batch_id)["status"] not in OPEN, f"{batch_id} is over")
    return state(stack, batch_id)


def outcomes(stack: Caller, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lines of the output and of the error file by custom id; fails where one occurs twice."""
    found: list[dict[str, Any]] = []
    for name in ("output_file_id", "error_file_id"):
        content = stack.get(f"/v1/files/{batch[name]}/content").text if batch[name] else ""
        lines = [json.loads(text) for text in content.splitlines()]
        found.append({each["custom_id"]: each for each in lines})
        assert len(found[-1]) == len(lines)
    assert not set(found[0]) & set(found[1])
    counts = batch["request_counts"]
    assert (counts["completed"], counts["failed"]) == (len(found[0]), len(found[1]))
    return found[0], found[1]


def test_lines_with_different_options_each_get_what_they_asked_for(stack: Stack) -> None:
    model = stack.model.name
    lines = [
        line("small", model, "one text", dimensions=4),
        line("whole", model, ["one text", "another"]),
        line("small again", model, "another", dimensions=4),
        line("ids", model, [[1, 2, 3], [4]]),
        line("cut", model, "long " * 200, truncate=True),
        line("bad ids", model, [[1, 2], [1 << 30]]),
        line("too long", model, ["fine", "long " * 200]),
        line("too wide", model, "one text", dimensions=64),
        line("odd", model, "one text", temperature=1),
        line("empty", model, []),
    ]
    done, failed = outcomes(stack, ended(stack, create(stack, lines)))
    widths = {name: [len(d["embedding"]) for d in each["response"]["body"]["data"]] for name, each in done.items()}
    assert widths == {"small": [4], "whole": [32, 32], "small again": [4], "ids": [32, 32], "cut": [32]}
    assert done["cut"]["response"]["body"]["usage"]["prompt_tokens"] == 64
    assert done["ids"]["response"]["body"]["usage"]["prompt_tokens"] == 4
    direct = stack.embed(["one text", "another"])
    for index in range(2):
        vector = done["whole"]["response"]["body"]["data"][index]["embedding"]
        assert vector == pytest.approx(direct["data"][index]["embedding"], abs=2e-3)
    refusals = {name: each["response"]["body"]["error"] for name, each in failed.items()}
    assert {name: (error["code"], error["param"]) for name, error in refusals.items()} == {
        "too long": ("too_long", "input[1]"),
        "bad ids": ("invalid_input_ids", "input[1]"),
        "too wide": ("invalid_dimensions", "dimensions"),
        "odd": ("unknown_field", "temperature"),
        "empty": ("empty_input", "input"),
    }


def test_a_file_that_is_no_batch_fails_and_names_its_lines(stack: Stack) -> None:
    good = line("a", stack.model.name, "text")
    lines = [
        good,
        "{not json",
        good,
        good | {"custom_id": "b", "method": "GET"},
        good | {"custom_id": "c", "url": "/v1/completions"},
        {"custom_id": "d"},
        good | {"custom_id": ""},
    ]
    batch = ended(stack, create(stack, lines))
    assert batch["status"] == "failed"
    found = [(problem["line"], problem["code"]) for problem in batch["errors"]["data"]]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_method"),
        (5, "mismatched_url"),
        (6, "invalid_request"),
        (7, "invalid_custom_id"),
    ]
    assert batch["output_file_id"] is batch["error_file_id"] is None
    empty = ended(stack, create(stack, ["", "  "]))
    assert (empty["status"], empty["errors"]["data"][0]["code"]) == ("failed", "empty_file")


def test_pages_of_batches_and_files_follow_each_other_without_gaps(stack: Stack) -> None:
    ids = [create(stack, [line("a", stack.model.name, "text")]) for _ in range(5)]
    for batch_id in ids:
        ended(stack, batch_id)
    seen: list[str] = []
    page = stack.get("/v1/batches?limit=2").json()
    while True:
        seen += [batch["id"] for batch in page["data"]]
        assert page["last_id"] == seen[-1]
        if not page["has_more"]:
            break
        page = stack.get(f"/v1/batches?limit=2&after={seen[-1]}").json()
    assert seen == sorted(seen, reverse=True)
    assert seen[:5] == ids[::-1]
    forward = stack.get("/v1/files?order=asc").json()["data"]
    backward = stack.get("/v1/files?order=desc").json()["data"]
    assert [file["id"] for file in forward] == [file["id"] for file in backward][::-1]


def test_a_cancelled_and_an_expired_batch_account_for_every_request(stack: Stack) -> None:
    lines = [line(f"r{i}", stack.model.name, f"text {i}") for i in range(30)]
    # Nothing moves while the worker is frozen, so both batches end with every request unfinished.
    with stack.worker.frozen():
        cancelled, expired = create(stack, lines), create(stack, lines, completion_window="1s")
        wait_until(lambda: state(stack, cancelled)["status"] == "in_progress", "the batch is under way")
        assert stack.post(f"/v1/batches/{cancelled}/cancel").json()["status"] == "cancelling"
        for batch_id, status in ((cancelled, "cancelled"), (expired, "expired")):
            batch = ended(stack, batch_id)
            assert batch["status"] == status
            assert batch[f"{status}_at"] >= batch["created_at"]
            done, failed = outcomes(stack, batch)
            assert done == {}
            assert set(failed) == {f"r{i}" for i in range(30)}
            assert {each["error"]["code"] for each in failed.values()} == {f"batch_{status}"}
    assert stack.post(f"/v1/batches/{cancelled}/cancel").json()["status"] == "cancelled"
    assert stack.post(f"/v1/batches/{expired}/cancel").status_code == 400


def test_an_input_file_may_be_deleted_once_its_batch_is_under_way(stack: Stack) -> None:
    with stack.worker.frozen():
        batch_id = create(stack, [line(f"r{i}", stack.model.name, f"text {i}") for i in range(20)])
        wait_until(lambda: state(stack, batch_id)["status"] == "in_progress", "the batch is under way")
        input_file = state(stack, batch_id)["input_file_id"]
        assert stack.delete(f"/v1/files/{input_file}").json()["deleted"]
        assert stack.get(f"/v1/files/{input_file}").status_code == 404
    done, failed = outcomes(stack, ended(stack, batch_id))
    assert (len(done), len(failed)) == (20, 0)


def test_what_a_finished_batch_used_is_given_back(stack: Stack) -> None:
    batch = ended(stack, create(stack, [line(f"r{i}", stack.model.name, f"text {i}") for i in range(50)]))
    assert batch["status"] == "completed"

    def left() -> list[object]:
        with stack.server.client() as client:
            keys = [key for key in client.keys("*") if batch["id"].encode() in key and b":store:" not in key]
        return [*keys, *(stack.data / "batches").iterdir()]

    wait_until(lambda: not left(), f"{left()} is gone")


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_each_request_of_5000_has_one_outcome_though_everything_is_killed(
    rounds: int, start_stack: Callable[..., Stack]
) -> None:
    stack = start_stack(worker=False)
    model, count = stack.model.name, 5000
    lines = [
        line(f"r{i}", model, [f"text {i}", "a second one"] if i % 10 == 0 else f"text {i}", dimensions=(8, 32)[i % 2])
        for i in range(count)
    ]
    for i in range(0, count, 500):
        lines[i] = line(f"r{i}", model, "long " * 100)
    batch_id = create(stack, lines)
    stack.restart_gateway()
    for number in range(rounds):
        before = state(stack, batch_id)
        if number >= 2 and before["status"] == "finalizing":
            break  # it has come that far between two kills
        assert before["status"] in ("validating", "in_progress")
        stack.start_worker("--max-batch-tokens", "512")
        wait_until(lambda before=before: progressed(state(stack, batch_id), before), "some requests are done")
        stack.worker.kill()
        stack.gateway.program.kill()
        stack.server.kill()
        stack.server.start()
        stack.start_gateway()
    stack.start_worker()
    batch = ended(stack, batch_id)
    assert batch["status"] == "completed"
    done, failed = outcomes(stack, batch)
    assert set(done) | set(failed) == {f"r{i}" for i in range(count)}
    assert set(failed) == {f"r{i}" for i in range(0, count, 500)}
    stack.gateway.wait_ready()
    for i in (1, 10, 2501, 4999):
        data = done[f"r{i}"]["response"]["body"]["data"]
        direct = stack.embed(lines[i]["body"]["input"], dimensions=lines[i]["body"]["dimensions"])["data"]
        assert [d["embedding"] for d in data] == [pytest.approx(d["embedding"], abs=2e-3) for d in direct]


def progressed(batch: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return bool(batch["request_counts"]["completed"] > before["request_counts"]["completed"])


def test_gateways_on_one_directory_finish_each_batch_once_and_one_that_stops_hands_its_own_over(stack: Stack) -> None:
    with stack.another() as second:
        with stack.worker.frozen():
            batches = [
                create(
                    (stack, second)[number % 2],
                    [line(f"r{i}", stack.model.name, f"text {number} {i}") for i in range(200)],
                )
                for number in range(6)
            ]
            for batch_id in batches:
                wait_until(lambda b=batch_id: state(stack, b)["status"] == "in_progress", "the batch is under way")
            assert second.program.stop() == 0
        for batch_id in batches:
            done, failed = outcomes(stack, ended(stack, batch_id))
            assert (len(done), len(failed)) == (200, 0)
        told = stack.gateway.program.text() + second.program.text()
    for batch_id in batches:
        assert told.count(f"batch {batch_id} is completed") == 1


def test_files_expire_when_they_were_asked_to(stack: Stack) -> None:
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    content = json.dumps(line("a", stack.model.name, "text"))
    file = stack.post("/v1/files", data=form, files={"file": ("in.jsonl", content)}).json()
    assert file["expires_at"] == file["created_at"] + 7200
    request = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    request["output_expires_after"] = {"anchor": "created_at", "seconds": 3600}
    batch = ended(stack, stack.post("/v1/batches", json=request).json()["id"])
    output = stack.get(f"/v1/files/{batch['output_file_id']}").json()
    assert output["expires_at"] == output["created_at"] + 3600
    with stack.server.client() as client:
        (key,) = client.keys(f"*file:{output['id']}")
        assert 0 < client.ttl(key) <= 3600
        # As when its time is over.
        client.delete(key)
    assert stack.get(f"/v1/files/{output['id']}").status_code == 404
    assert output["id"] not in [each["id"] for each in stack.get("/v1/files").json()["data"]]


def test_a_part_of_a_file_may_be_asked_for(stack: Stack) -> None:
    file_id = upload(stack, ["0123456789"])
    part = stack.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    assert stack.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=99-"}).status_code == 416


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no prlimit on this system")
def test_a_disk_that_refuses_is_waited_out_by_batches_and_answered_with_503_to_uploads(
    stack: Stack, tmp_path: Path
) -> None:
    with stack.another(data=tmp_path) as gateway:
        lines = [line(f"r{i}", stack.model.name, f"text {i}") for i in range(2000)]
        with stack.worker.frozen():
            file_id = upload(gateway, lines)
            # No file may grow beyond this, as on a full disk: neither an upload nor 2,000 vectors of 128 bytes fit.
            pid = gateway.program.process.pid
            soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, hard))
            form = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * 1_000_000)}}
            assert gateway.refused(503, "/v1/files", **form)["code"] == "storage"
            assert list((tmp_path / "tmp").iterdir()) == []
            request = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
            batch_id = gateway.post("/v1/batches", json=request).json()["id"]
            wait_until(lambda: f"batch {batch_id} waits" in gateway.program.text(), "the batch waits for the disk")
            assert state(gateway, batch_id)["status"] in OPEN
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        done, failed = outcomes(gateway, ended(gateway, batch_id))
        assert (len(done), len(failed)) == (2000, 0)

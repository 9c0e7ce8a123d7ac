"""`embedq serve` as a command: alone with a model, without its extra, with an address that is taken."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from stack import Program, listening, wait_until

LINE = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny-embedding", "input": "a"}}'
)


def serve(folder: Path, model: Path) -> tuple[Program, str]:
    gateway = Program(folder / "serve.log", "serve", "--model", model, "--device", "cpu", "--port", "0")
    return gateway, listening(gateway)


def test_one_command_serves_a_model_and_goes_on_with_its_batches_after_kill_9(
    tmp_path: Path, served_model: Path
) -> None:
    gateway, url = serve(tmp_path, served_model)
    try:
        files = {"file": ("a.jsonl", LINE)}
        file_id = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=files).json()["id"]
        request = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        batch_id = httpx.post(f"{url}/v1/batches", json=request).json()["id"]
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
        (tmp_path / "serve.log").unlink()
        gateway, url = serve(tmp_path, served_model)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "it is ready")
        body = {"model": served_model.name, "input": "a text"}
        assert httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).status_code == 200
        wait_until(
            lambda: httpx.get(f"{url}/v1/batches/{batch_id}").json()["status"] == "completed", "the batch is done"
        )
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        assert gateway.stop() == 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
    finally:
        gateway.kill()


def test_a_model_that_cannot_be_served_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "embedq", "serve", "--model", tmp_path / "model", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: model: ")
    assert "Traceback" not in done.stderr


def test_the_gateway_does_not_cut_texts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "embedq", "serve", "--on-long", "chunk", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence == "error: usage: --on-long must be 'error' or 'truncate', found 'chunk'"


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_the_command_says_what_installs_it(tmp_path: Path, missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from embedq.cli import main; main(['serve'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'embedq[gateway]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_commands_do_not_need_the_extra(tmp_path: Path) -> None:
    blocked = "; ".join(
        f"sys.modules[{name!r}] = None" for name in ("fastapi", "uvicorn", "orjson", "starlette", "uvloop")
    )
    program = f"import sys; {blocked}; from embedq.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_address_that_is_taken_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "embedq", "serve", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: usage: cannot listen on 127.0.0.1:")


def test_the_gateway_needs_no_torch() -> None:
    program = "import sys, embedq_gateway.server; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0

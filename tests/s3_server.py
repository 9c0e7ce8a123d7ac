"""An S3 server over HTTP for tests: moto's, and what lies in its buckets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from embedq_worker.sinks import s3
from servers import START_TIMEOUT_S, free_port
from waiting import wait_until

KEYS = {"AWS_ACCESS_KEY_ID": "test-access-key", "AWS_SECRET_ACCESS_KEY": "test-s3cr3t-key"}
SETTINGS = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


class S3Server:
    """One server on a free port. It holds its objects in memory."""

    def __init__(self) -> None:
        if missing := [name for name in ("boto3", "flask_cors", "moto") if importlib.util.find_spec(name) is None]:
            pytest.skip(f"not installed: {', '.join(missing)}; make install brings them")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(Path(__file__).with_name("moto_s3.py")), str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        import boto3

        self._client: Any = boto3.session.Session(
            KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1"
        ).client("s3", endpoint_url=self.url)

    def __enter__(self) -> Self:
        import urllib.request

        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5).close()
            except OSError:
                assert self._process.poll() is None, "moto ended"
                assert time.monotonic() < deadline, "moto did not start"
                time.sleep(0.05)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def bucket(self) -> Bucket:
        """A new, empty bucket."""
        return Bucket(self._client, self.url, f"bucket-{uuid.uuid4().hex[:12]}")


class Bucket:
    """A bucket, seen without our own code. `environment` is what a client of it needs."""

    def __init__(self, client: Any, url: str, name: str) -> None:
        self.client, self.name = client, name
        self.environment = {**KEYS, **SETTINGS, "AWS_ENDPOINT_URL": url}
        self.client.create_bucket(Bucket=name)

    def at(self, prefix: str) -> str:
        """The URL of a prefix."""
        return f"s3://{self.name}/{prefix}"

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects below `prefix`."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def uploads(self) -> list[tuple[str, str]]:
        """Key and id of every upload that is not complete."""
        answer = self.client.list_multipart_uploads(Bucket=self.name)
        return [(upload["Key"], upload["UploadId"]) for upload in answer.get("Uploads", ())]

    def deny(self, action: str) -> None:
        """Deny everybody an action from now on."""
        statement = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": f"arn:aws:s3:::{self.name}/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        self.client.put_bucket_policy(Bucket=self.name, Policy=policy)

    def abort(self, key: str, upload: str) -> None:
        self.client.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=upload)

    def copy(self, prefix: str, folder: Path) -> Path:
        """The dataset below `prefix` as a directory, laid out as one on disk is."""
        folder.mkdir(parents=True)
        lines = []
        for key in self.keys(f"{prefix}/"):
            name = key.removeprefix(f"{prefix}/")
            if name.startswith("_manifest/"):
                lines.append(self.read(key))
                continue
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(self.read(key))
        (folder / "_manifest.jsonl").write_bytes(b"".join(lines))
        (folder / "_staging").mkdir()
        return folder

    def wait_for_parts(self, prefix: str, count: int = 1) -> None:
        """Wait until so many files are published."""
        wait_until(lambda: len(self.keys(f"{prefix}/_manifest/")) >= count, f"{count} files below {prefix}")


def use(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process and those it starts be clients of a bucket; nothing of the machine's own settings leaks in."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _forget_clients_but_of(environment)
    yield


_clients_of: dict[str, str] = {}


def _forget_clients_but_of(environment: dict[str, str]) -> None:
    """A client of ours keeps the environment it was made in; making one takes a third of a second."""
    if environment != _clients_of:
        _clients_of.clear()
        _clients_of.update(environment)
        for cache in (s3._store, s3._client):
            cache.cache_clear()

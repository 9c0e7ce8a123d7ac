"""The pipeline of pipeline.py with its dataset on an S3 server, watched for files that are seen too early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from accounting import Account, Corpus, account
from embedq_schemas.run import ParquetSink, RunSpec, RunState, RunStatus
from pipeline import Pipeline
from s3_server import Bucket

PREFIX = "runs/vectors"


class S3Pipeline(Pipeline):
    """Its workers may write below `runs/` of the bucket."""

    def __init__(self, url: str, folder: Path, checkpoint: Path, corpus: Corpus, bucket: Bucket) -> None:
        super().__init__(url, folder, checkpoint, corpus)
        self.bucket = bucket
        self.prefix = PREFIX
        self.environment = bucket.environment
        self.worker = self.worker.model_copy(update={"output_roots": (bucket.at("runs"),)})

    def spec(self) -> RunSpec:
        return (
            super()
            .spec()
            .model_copy(update={"sink": ParquetSink(path=self.bucket.at(self.prefix), file_bytes=1 << 16)})
        )

    def poll(self) -> None:
        """No file may be seen that was not committed."""
        for key in self.bucket.keys(f"{self.prefix}/part-"):
            token = key.rpartition("part-")[2].removesuffix(".parquet")
            assert self.client.exists(self.keys.token(token)), f"{key} is seen without its commit"
        super().poll()

    def files(self) -> int:
        """How many are in the manifest."""
        return len(self.bucket.keys(f"{self.prefix}/_manifest/"))

    def check(self, state: RunState | None = None) -> Account:
        state = state or self.finish()
        assert state.status is RunStatus.COMPLETED, (state.status, state.error, self.log()[-2000:])
        copy = self.bucket.copy(self.prefix, self.folder / "copy")
        found = account(copy, self.corpus, state)
        assert not found.problems, found.problems
        assert json.loads((copy / "_SUCCESS").read_text())["succeeded"] == found.rows
        shutil.rmtree(copy)
        # Who was too slow with a batch stages it for nothing, and aborts its upload once the commit tells it so.
        self.until(lambda: not self.bucket.uploads(), "the end of all uploads")
        assert self.registry.backlog_bytes() == 0
        return found

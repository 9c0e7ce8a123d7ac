"""One rank above zero of a tensor-parallel model: `python -m embedq_worker.engine.rank JOB`, started by rank 0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO

import numpy as np
import torch
from embedq_schemas.errors import EmbedqError

from embedq_worker.checkpoint.decoder import read_decoder
from embedq_worker.checkpoint.files import read_object
from embedq_worker.checkpoint.tensors import index_weights
from embedq_worker.engine.backends import choose_backends
from embedq_worker.engine.base import PackedBatch
from embedq_worker.engine.decoder import Decoder
from embedq_worker.engine.group import Ranks
from embedq_worker.engine.memory import keep_freed_memory
from embedq_worker.engine.ranks import RankJob
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.engine.weights import WeightReader


def load_share(job: RankJob) -> Decoder:
    """Join the group and load this rank's share."""
    from torch._C._distributed_c10d import TCPStore

    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(job.threads)
    else:
        torch.cuda.set_device(device)
    group = Ranks(TCPStore("127.0.0.1", job.port, is_master=False), job.rank, job.size, device)
    folder = Path(job.folder)
    config = read_decoder(read_object(folder / "config.json"), causal=job.causal)
    settings = EngineSettings(**job.settings)
    chosen = choose_backends(
        config, settings, causal=job.causal, device=device, dtype=dtype, threads=job.threads, group=group
    )
    with WeightReader(index_weights(folder), config, dtype=dtype, device=device) as reader:
        return Decoder(
            config, reader, chosen.backends, length=job.max_length, causal=job.causal, last_only=job.last_only
        )


def serve(decoder: Decoder, commands: IO[bytes]) -> None:
    """Compute this rank's part of every batch until rank 0 closes the pipe."""
    while header := commands.read(16):
        texts, tokens = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
        offsets = np.frombuffer(commands.read(4 * texts), "<i4")
        ids = np.frombuffer(commands.read(4 * tokens), "<u4")
        if len(ids) != tokens:
            return
        with torch.inference_mode():
            decoder.forward(decoder.plan(PackedBatch(ids, offsets)), lambda: None)


def main() -> int:
    job = RankJob(**json.loads(sys.argv[1]))
    try:
        decoder = load_share(job)
        print("ready", flush=True)
        serve(decoder, sys.stdin.buffer)
    except (EmbedqError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # A communicator that lost its peers may block in its destructor; there is nothing left to clean up.
    os._exit(status)

"""The engine: packed token ids in, vectors out. Importing this module does not import torch."""

from __future__ import annotations

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.base import Engine, PackedBatch
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.engine.threads import spin_briefly

__all__ = ["Engine", "EngineSettings", "PackedBatch", "load_engine"]


def load_engine(checkpoint: Checkpoint, settings: EngineSettings) -> Engine:
    """Load the model. Raises ModelError where it cannot run as asked, with the reason."""
    if settings.kind == "null":
        from embedq_worker.engine.null import NullEngine

        return NullEngine(checkpoint, settings)
    spin_briefly()
    if settings.kind == "native" or (settings.kind == "auto" and checkpoint.decoder is not None):
        from embedq_worker.engine.native import NativeEngine

        return NativeEngine(checkpoint, settings)
    from embedq_worker.engine.encoder import TransformersEngine

    return TransformersEngine(checkpoint, settings)

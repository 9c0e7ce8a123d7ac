"""Any other encoder (BERT, XLM-R, ModernBERT, ...): transformers' own model, this package's pooling and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from embedq_schemas.errors import EngineError, ModelError
from numpy.typing import NDArray
from torch import Tensor

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.base import PackedBatch, check_batch, check_dimensions
from embedq_worker.engine.device import choose_device, choose_dtype, usable_cores
from embedq_worker.engine.heads import finish, load_heads, pool
from embedq_worker.engine.memory import keep_freed_memory
from embedq_worker.engine.plan import plan_batch
from embedq_worker.engine.settings import EngineSettings

#: A text joins a bucket only up to this factor of its shortest text: at most a fifth of a forward pass is padding.
_STRETCH = 1.25
_SHORT = 16


class TransformersEngine:
    """`AutoModel` on padded, length-bucketed batches. Remote code is never run."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        if settings.tensor_parallel not in (1, "auto"):
            raise ModelError(f"only Qwen2 and Qwen3 are split over ranks; {checkpoint.model_id} runs on one device")
        self._checkpoint = checkpoint
        self._device = choose_device(settings.device)
        # Small encoders gain little from bfloat16 on a CPU and lose four digits.
        automatic = settings.dtype == "auto" and self._device.type == "cpu"
        dtype = torch.float32 if automatic else choose_dtype(settings.dtype, self._device)
        threads = settings.threads or usable_cores()
        if self._device.type == "cpu":
            keep_freed_memory()
            torch.set_num_threads(threads)
        self._model: Any = _load(checkpoint, dtype).to(self._device).eval()
        self._heads = load_heads(checkpoint.dense, self._device)
        self.dimension = checkpoint.dimension
        self.max_length = checkpoint.max_length
        automatic_tokens = 16_384 if self._device.type == "cuda" else 4096
        self.max_batch_tokens = automatic_tokens if settings.max_batch_tokens == "auto" else settings.max_batch_tokens
        self.device = str(self._device)
        self.description: Mapping[str, str] = {
            "engine": "transformers",
            "device": self.device,
            "dtype": str(dtype).removeprefix("torch."),
            "model": type(self._model).__name__,
            "threads": str(threads) if self._device.type == "cpu" else "",
        }
        self._pad = int(getattr(self._model.config, "pad_token_id", None) or 0)
        self._steps = 0
        for module in self._model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    layer.register_forward_hook(self._advance)

    @property
    def steps(self) -> int:
        return self._steps

    def _advance(self, *_: Any) -> None:
        self._steps += 1

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        if self._model is None:
            raise EngineError("the engine is closed")
        check_batch(batch, vocab_size=self._checkpoint.vocab_size or 1 << 31, max_length=self.max_length)
        width = check_dimensions(dimensions, self.dimension)
        vectors = np.empty((len(batch), width), np.float32)
        try:
            with torch.inference_mode():
                for rows in buckets(batch.lengths, self.max_batch_tokens):
                    pooled = self._pooled(_select(batch, rows))
                    vectors[rows] = finish(pooled, self._heads, width, normalize=normalize).cpu().numpy()
                    self._steps += 1
        except (RuntimeError, MemoryError, IndexError) as error:
            raise EngineError(f"the forward pass failed on {len(batch.input_ids)} tokens: {error}") from error
        return vectors

    def _pooled(self, part: PackedBatch) -> Tensor:
        """float32 [n, hidden_size] of one bucket."""
        lengths, longest = part.lengths, int(part.lengths.max())
        mask = np.arange(longest) < lengths[:, None]
        ids = np.full(mask.shape, self._pad, np.int64)
        ids[mask] = part.input_ids
        inside = torch.from_numpy(mask).to(self._device)
        output = self._model(input_ids=torch.from_numpy(ids).to(self._device), attention_mask=inside.long())
        hidden = output.last_hidden_state[inside]
        return pool(hidden, plan_batch(part, self._device), self._checkpoint.pooling)

    def close(self) -> None:
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def buckets(lengths: NDArray[np.int32], max_batch_tokens: int) -> Iterator[NDArray[np.intp]]:
    """Rows to run together, by length: padded size within `max_batch_tokens`; one text alone may exceed it."""
    order = np.argsort(lengths, kind="stable")
    first = 0
    for index in range(len(order)):
        longest = int(lengths[order[index]])
        limit = max(_SHORT, _STRETCH * float(lengths[order[first]]))
        if index > first and (longest > limit or longest * (index - first + 1) > max_batch_tokens):
            yield order[first:index]
            first = index
    if len(order):
        yield order[first:]


def _select(batch: PackedBatch, rows: NDArray[np.intp]) -> PackedBatch:
    starts, stops = batch.cu_seqlens[:-1][rows], batch.cu_seqlens[1:][rows]
    ids = np.concatenate([batch.input_ids[start:stop] for start, stop in zip(starts, stops, strict=True)])
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32))


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True, trust_remote_code=False)
        if checkpoint.decoder is not None:
            config.is_causal = checkpoint.causal
        model, report = AutoModel.from_pretrained(
            str(checkpoint.path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"transformers does not load {checkpoint.model_id} ({checkpoint.model_type}) without remote code: {first}"
        ) from None
    # Sentence embeddings never use BERT's pooler, and many checkpoints leave it out.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(f"{checkpoint.model_id} lacks {missing[0]} and {len(missing) - 1} more weights")
    return model

"""The engine for Qwen2 and Qwen3: packed, padding-free, on one device or split over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from embedq_schemas.errors import EngineError, ModelError
from numpy.typing import NDArray
from torch import Tensor

from embedq_worker.checkpoint import Checkpoint, DecoderConfig, decoder_of
from embedq_worker.engine.backends import choose_backends
from embedq_worker.engine.base import Flight, Foreground, PackedBatch, check_batch, check_dimensions
from embedq_worker.engine.decoder import Decoder
from embedq_worker.engine.device import (
    choose_degree,
    choose_device,
    choose_dtype,
    choose_product_threads,
    usable_cores,
)
from embedq_worker.engine.gpu.flight import GpuFlight, LayerMark
from embedq_worker.engine.group import Group, Solo
from embedq_worker.engine.heads import finish, load_heads, pool
from embedq_worker.engine.memory import keep_freed_memory
from embedq_worker.engine.plan import TOKENS_STEP, BatchPlan
from embedq_worker.engine.ranks import RankProcesses
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.engine.shard import share_of
from embedq_worker.engine.tuning import check_memory, choose_batch_tokens, uniform_batch, values_per_token
from embedq_worker.engine.weights import WeightReader
from embedq_worker.prefixes import MOST_WHOLE


class NativeEngine:
    """A loaded Qwen2/Qwen3 embedding model. Rank 0 of its group, where it is split."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        self._checkpoint = checkpoint
        self._device = choose_device(settings.device)
        config = decoder_of(checkpoint)
        dtype = choose_dtype(settings.dtype, self._device)
        size = choose_degree(settings.tensor_parallel, checkpoint, self._device, dtype)
        share_of(config, 0, size)  # refuses an uneven split before any rank is started
        threads = settings.threads or max(1, usable_cores() // size)
        products = self._set_threads(settings, threads, size, dtype)
        self.dimension = checkpoint.dimension
        self.max_length = checkpoint.max_length
        self.device = str(self._device)
        self._last_only = checkpoint.pooling == "lasttoken"
        self._steps = 0
        self._planned: int | None = None  # tokens of a batch that fit; None while that is being found out
        self._ranks: RankProcesses | None = None
        if size > 1:
            self._ranks = RankProcesses(
                checkpoint.path,
                settings,
                causal=checkpoint.causal,
                last_only=self._last_only,
                max_length=checkpoint.max_length,
                size=size,
                device=self._device,
                dtype=str(dtype).removeprefix("torch."),
                threads=threads,
            )
        try:
            group: Group = Solo() if self._ranks is None else self._ranks.group
            chosen = choose_backends(
                config,
                settings,
                causal=checkpoint.causal,
                device=self._device,
                dtype=dtype,
                threads=threads,
                group=group,
            )
            with WeightReader(checkpoint.weights, config, dtype=dtype, device=self._device) as reader:
                self._decoder: Decoder | None = Decoder(
                    config,
                    reader,
                    chosen.backends,
                    length=checkpoint.max_length,
                    causal=checkpoint.causal,
                    last_only=self._last_only,
                )
            self._heads = load_heads(checkpoint.dense, self._device)
            if self._ranks is not None:
                self._ranks.wait_ready()
        except BaseException:
            if self._ranks is not None:
                self._ranks.close()
            raise
        self.description: Mapping[str, str] = {
            "engine": "native",
            "device": self.device,
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel": str(size),
            "attention": chosen.backends.attention.name,
            "operations": chosen.backends.ops.name,
            "threads": str(threads) if self._device.type == "cpu" else "",
            "product_threads": str(products) if self._device.type == "cpu" else "",
            "notes": "; ".join([*chosen.notes, *_warnings(dtype)]),
        }
        try:
            self.max_batch_tokens = self._planned = self._plan_memory(config, settings, dtype)
        except BaseException:
            self.close()
            raise

    def _plan_memory(self, config: DecoderConfig, settings: EngineSettings, dtype: torch.dtype) -> int:
        """Choose the batch size, then prove that it and the longest text fit, so that nothing runs out later."""
        if settings.max_batch_tokens == "auto":
            key = {
                **{name: text for name, text in self.description.items() if name != "notes"},
                "gpu": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "",
                "fingerprint": self._checkpoint.fingerprint,
                "torch": torch.__version__,
            }
            chosen = choose_batch_tokens(
                self.encode,
                key,
                device_type=self._device.type,
                vocab_size=config.vocab_size,
                max_length=self.max_length,
            )
        else:
            chosen = settings.max_batch_tokens
        if self._device.type == "cuda":
            text = min(128, self.max_length)
            batches = [(chosen, text, 0), (self.max_length, self.max_length, 0)]
            if self._checkpoint.shares_prefixes:
                # As many texts as ever come together, of which as many tokens are computed.
                batches.append((MOST_WHOLE * chosen, text, text - text // MOST_WHOLE))
            for tokens, length, alike in batches:
                try:
                    self.encode(uniform_batch(tokens, length, vocab_size=config.vocab_size, alike=alike))
                except EngineError as error:
                    raise ModelError(
                        f"a batch of {tokens} tokens does not fit this GPU ({error}); "
                        "lower max_length or max_batch_tokens, or raise tensor_parallel"
                    ) from None
        else:
            shares = self._checkpoint.shares_prefixes
            # A text alone has nothing to share, however long it is.
            for tokens, sharing in ((chosen, shares), (self.max_length, False)):
                width = values_per_token(config, shares_prefixes=sharing)
                check_memory(width, tokens=tokens, itemsize=dtype.itemsize)
        return chosen

    def _set_threads(self, settings: EngineSettings, threads: int, size: int, dtype: torch.dtype) -> int:
        if self._device.type != "cpu":
            return threads
        keep_freed_memory()
        chosen = settings.threads is not None or size > 1
        products = threads if chosen else choose_product_threads(threads, dtype)
        torch.set_num_threads(products)
        return products

    @property
    def steps(self) -> int:
        return self._steps

    def encode(
        self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        vectors = self._forward(batch, dimensions, normalize, self._advance)
        try:
            found: NDArray[np.float32] = vectors.cpu().numpy()
        except RuntimeError as error:
            raise self._failure(batch, error) from error
        self._advance()
        return found

    def launch(self, batch: PackedBatch, *, dimensions: int | None = None, normalize: bool = True) -> Flight:
        """Begin `encode`: in the background on a GPU."""
        if self._device.type != "cuda":
            return Foreground(partial(self.encode, batch, dimensions=dimensions, normalize=normalize))
        with self._on_device():
            most = LayerMark(after=self._decoder.config.num_layers // 2 if self._decoder else 0)

            def progress() -> None:
                self._advance()
                most.layer_done()

            try:
                vectors = self._forward(batch, dimensions, normalize, progress)
            except EngineError as error:
                return Foreground.failed(error)
            return GpuFlight(vectors, most, self._advance, lambda error: self._failure(batch, error))

    def _forward(
        self, batch: PackedBatch, dimensions: int | None, normalize: bool, progress: Callable[[], None]
    ) -> Tensor:
        """Vectors float32 [n, dimensions], on the device; a GPU may still be computing them."""
        if self._decoder is None:
            raise EngineError("the engine is closed")
        check_batch(batch, vocab_size=self._checkpoint.vocab_size, max_length=self.max_length)
        width = check_dimensions(dimensions, self.dimension)
        count = len(batch)
        if count == 0:
            return torch.empty(0, width)
        try:
            with torch.inference_mode(), self._on_device():
                plan = self._decoder.plan(batch)
                if count > 1 and self._exceeds(plan):
                    parts = (self._forward(part, dimensions, normalize, progress) for part in batch.halves())
                    return torch.cat(list(parts))
                if self._ranks is not None:
                    self._ranks.send(batch)
                hidden = self._decoder.forward(plan, progress)
                pooled = hidden.float() if self._last_only else pool(hidden, plan, self._checkpoint.pooling)
                return plan.in_order(finish(pooled, self._heads, width, normalize=normalize), count)
        except (RuntimeError, MemoryError) as error:
            raise self._failure(batch, error) from error

    def _exceeds(self, plan: BatchPlan) -> bool:
        """Whether memory was planned for less: the batch was packed for an embedder that takes more at once."""
        if self._planned is None:
            return False
        # Dummies, and beginnings too short to be shared.
        most = self._planned + max(4 * TOKENS_STEP, self._planned // 16)
        return plan.rows > most or plan.total_tokens > MOST_WHOLE * most

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels of our own launch on the thread's current GPU."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _failure(self, batch: PackedBatch, error: Exception) -> EngineError:
        reason = str(error) if self._ranks is None else self._ranks.fail(str(error))
        return EngineError(f"the forward pass failed on {len(batch.input_ids)} tokens: {reason}")

    def _advance(self) -> None:
        self._steps += 1

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._decoder = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _warnings(dtype: torch.dtype) -> list[str]:
    return ["float16 overflows on Qwen models: some texts may get no vector"] if dtype is torch.float16 else []

"""How fast a model runs here (`embedq bench`): tokens/s, FLOP/s, and their share of the measured matrix rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from embedq_worker.checkpoint import Checkpoint, decoder_of
from embedq_worker.engine import Engine


@dataclass(frozen=True)
class Speed:
    """One text length. `share` is FLOP/s over `matrix_flops`; attention's own FLOPs are left out of both.

    `texts_per_second` counts texts of `text_tokens` tokens. Medians over the repeats.
    """

    text_tokens: int
    batch_tokens: int
    tokens_per_second: float
    texts_per_second: float
    flops: float
    matrix_flops: float
    share: float


def measure_speed(
    checkpoint: Checkpoint, engine: Engine, *, text_tokens: Sequence[int] = (128, 512), repeats: int = 3
) -> list[Speed]:
    """Run full batches of equal texts, the matrix rate measured around every batch. Raises ModelError, EngineError.

    Only for Qwen2 and Qwen3: other models' FLOPs are not known from their configuration.
    """
    from embedq_worker.engine.tuning import uniform_batch

    config = decoder_of(checkpoint)
    rate = MatrixRate(checkpoint, engine)
    results = []
    for length in text_tokens:
        length = min(length, engine.max_length)
        tokens = max(length, engine.max_batch_tokens // length * length)
        batch = uniform_batch(tokens, length, vocab_size=config.vocab_size)
        engine.encode(batch)
        rate.measure()
        speeds, rates = [], []
        for _ in range(repeats):
            before = rate.measure()
            start = time.perf_counter()
            engine.encode(batch)
            speeds.append(tokens / (time.perf_counter() - start))
            rates.append((before + rate.measure()) / 2)
        speed, matrix = statistics.median(speeds), statistics.median(rates)
        share = statistics.median(2 * config.parameters * s / r for s, r in zip(speeds, rates, strict=True))
        results.append(Speed(length, tokens, speed, speed / length, 2 * config.parameters * speed, matrix, share))
    return results


class MatrixRate:
    """FLOP/s of the model's own four products on the engine's device and dtype, weights laid out as the engine's are.

    Packed weights multiply faster than torch's layout on some CPUs: beside the slower of the two, an engine could
    show more than the whole rate.
    """

    def __init__(self, checkpoint: Checkpoint, engine: Engine, *, rows: int | None = None) -> None:
        import torch

        from embedq_worker.engine.linear import make_linear, pays_to_pack

        config = decoder_of(checkpoint)
        device, dtype = torch.device(engine.device), getattr(torch, engine.description.get("dtype", "float32"))
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        query, key_value = config.num_heads * dim, config.num_kv_heads * dim
        shapes = [(query + 2 * key_value, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]
        self._rows = rows or (8192 if device.type == "cuda" else 2048)
        self._device = device
        ranks = int(engine.description.get("tensor_parallel", "1"))
        packed_rows = self._rows if pays_to_pack(dtype, device, ranks=ranks) else None
        self._flops = sum(2 * self._rows * outputs * columns for outputs, columns in shapes)
        self._products = [
            make_linear(torch.randn(shape, device=device).to(dtype), packed_rows=packed_rows) for shape in shapes
        ]
        self._inputs = [torch.randn(self._rows, columns, device=device).to(dtype) for _, columns in shapes]

    def measure(self, repeats: int = 3) -> float:
        """FLOP/s now, on `rows` rows."""
        import torch

        with torch.inference_mode():
            self._wait()
            start = time.perf_counter()
            for _ in range(repeats):
                for product, x in zip(self._products, self._inputs, strict=True):
                    product(x)
            self._wait()
            seconds = time.perf_counter() - start
        return repeats * self._flops / seconds

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

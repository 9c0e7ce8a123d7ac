"""What a checkpoint says about itself, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Architecture = Literal["qwen2", "qwen3", "other"]
Pooling = Literal["lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"]
RopeKind = Literal["default", "linear", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: theta, and the scaling named by `kind` (YaRN: arXiv 2309.00071)."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a Qwen2/Qwen3 decoder. `windows[i]` is layer i's sliding window in tokens, None for full attention."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: Rope
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    windows: tuple[int | None, ...]

    @property
    def parameters(self) -> int:
        """Weights outside the embedding table: each costs 2 FLOPs a token."""
        qkv = self.hidden_size * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        out = self.hidden_size * self.head_dim * self.num_heads
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (qkv + out + mlp)


@dataclass(frozen=True)
class Dense:
    """One sentence-transformers Dense module: `activation(x W^T + b)`, [n, in_features] -> [n, out_features]."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class TensorRef:
    """Where one safetensors tensor lies: dtype as in the header (`F32`, `BF16`...), absolute byte offset."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Weights:
    """The weight files. `tensors` maps names without the `model.` prefix; it is empty for pickled weights."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorRef]
    pickled: bool = False

    @property
    def nbytes(self) -> int:
        if self.tensors:
            return sum(ref.nbytes for ref in self.tensors.values())
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True)
class Checkpoint:
    """An embedding model as its own files describe it, after overrides.

    `dimension` is the length of a vector after pooling and Dense; `max_length` counts tokens, special ones included.
    `fingerprint` (sha256, hex) changes with everything that changes vectors. `notes` are sentences a user should read.
    """

    path: Path
    model_id: str
    revision: str | None
    architecture: Architecture
    model_type: str
    dimension: int
    hidden_size: int
    max_length: int
    pooling: Pooling
    include_prompt: bool
    normalize: bool
    causal: bool
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    tokenizer_file: Path
    vocab_size: int
    dtype: str
    dense: tuple[Dense, ...]
    decoder: DecoderConfig | None
    weights: Weights
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def shares_prefixes(self) -> bool:
        """Whether what texts begin with in common needs to be computed once only.

        Under a causal mask a token does not see what follows it, and the last token is all that such a model keeps.
        """
        return self.decoder is not None and self.causal and self.pooling == "lasttoken"

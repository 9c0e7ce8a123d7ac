"""What a user may decide about the engine. No torch here: the CLI and the tokenizer process read these fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

EngineKind = Literal["auto", "native", "transformers", "null"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionKind = Literal["auto", "flash_attn", "flashinfer", "torch", "sdpa", "cpu"]


class EngineSettings(BaseModel):
    """Fields of the engine; every `auto` is resolved at load time and shown in `Engine.description`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: EngineKind = Field(
        "auto",
        description="native runs Qwen2/Qwen3 without padding; transformers runs any other encoder; null returns fixed "
        "vectors without weights, for measuring the pipeline. auto picks native or transformers by architecture.",
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto: the first GPU, else the CPU."
    )
    dtype: Dtype = Field(
        "auto",
        description="auto: bfloat16 where the device has it in hardware, else float32. float16 overflows on Qwen.",
    )
    attention: AttentionKind = Field("auto", description="auto: the fastest backend that is right on the device.")
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        1, description="Ranks one model is split over. auto: the smallest degree whose share of the weights fits."
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads of the forward pass; unset: the cores this process may use."
    )
    max_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Tokens one forward pass computes; a larger value needs more memory, and lets longer common "
        "beginnings be computed once. auto: measured once a device.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Fuse norms, rope and activations with torch.compile; auto: where a compiler exists and pays.",
    )

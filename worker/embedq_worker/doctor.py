"""What works on this machine, what does not, and why (`embedq doctor`): the engine's part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` is a choice not taken or not possible here; `failed` needs attention."""

    subject: str
    state: State
    detail: str


_PACKAGES = ("torch", "transformers", "tokenizers", "gigatoken", "safetensors", "huggingface-hub", "psutil")


def examine() -> list[Finding]:
    """Packages, devices, attention backends, CPU kernels, dtypes. Takes a second or two; never raises."""
    findings = list(_packages())
    if importlib.util.find_spec("torch") is None:
        findings.append(Finding("engine", "failed", "torch is not installed; `pip install 'embedq[worker]'` adds it"))
        return findings
    return [*findings, *_devices(), *_attention(), *_compilers()]


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in _PACKAGES:
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed; `pip install 'embedq[worker]'` adds it")


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    from embedq_worker.engine.device import cpu_has_bfloat16, usable_cores

    memory = psutil.virtual_memory()
    dtype = "bfloat16" if cpu_has_bfloat16() else "float32 (no AVX512_BF16 or AMX)"
    yield Finding(
        "cpu",
        "ok",
        f"{usable_cores()} usable cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free, {dtype}",
    )
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        yield Finding("gpu", "missing", f"torch sees no GPU; it is {built}")
        return
    for index in range(torch.cuda.device_count()):
        free, total = (size / 1e9 for size in torch.cuda.mem_get_info(index))
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(
            f"gpu {index}",
            "ok",
            f"{torch.cuda.get_device_name(index)}, compute {major}.{minor}, {free:.1f} of {total:.1f} GB free",
        )


def _attention() -> Iterator[Finding]:
    import torch

    from embedq_worker.engine.attention.choose import HeadShape, candidates, check
    from embedq_worker.engine.cpu.build import load_kernels

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, factory in candidates(device, dtype).items():
        reason = check(name, factory, HeadShape(16, 8, 128), device, dtype)
        yield Finding(f"attention {name}", "missing" if reason else "ok", reason or f"works on {device}")
    kernels = load_kernels()
    yield Finding("attention cpu", "missing" if kernels.loaded is None else "ok", kernels.reason)


def _compilers() -> Iterator[Finding]:
    import torch

    from embedq_worker.engine.linear import pays_to_pack
    from embedq_worker.engine.ops import EagerOps, fused_ops

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        ops, passed = fused_ops(device, torch.bfloat16)
        yield Finding("fused operations", "missing" if type(ops) is EagerOps else "ok", "; ".join([ops.name, *passed]))
    packed = pays_to_pack(torch.bfloat16, torch.device("cpu"))
    yield Finding("packed bfloat16 products", "ok" if packed else "missing", "oneDNN" if packed else "not on this CPU")

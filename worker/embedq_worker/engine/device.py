"""Which device, dtype and thread count `auto` means here."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine.settings import Dtype


def choose_device(name: str) -> torch.device:
    """Raises ModelError where the named device is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelError(f"device {name} was asked for, but torch sees no GPU; `embedq doctor` says why")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ModelError(f"device {name} was asked for, but there are {torch.cuda.device_count()} GPUs")
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device mps was asked for, but torch cannot use it here")
    return device


def choose_dtype(name: Dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it fast: CPUs without avx512_bf16 or AMX emulate it slowly."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float32
    if device.type == "cpu" and cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def choose_degree(
    wanted: int | Literal["auto"], checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> int:
    """Ranks to split over. `auto`: the smallest power of two whose share of the weights fills at most 60% of a GPU.

    Raises ModelError where there are fewer GPUs than asked for or needed.
    """
    if device.type != "cuda":
        return 1 if wanted == "auto" else wanted
    available = torch.cuda.device_count() - (device.index or 0)
    if wanted != "auto":
        if wanted > available:
            raise ModelError(f"tensor_parallel is {wanted}, but {available} GPUs are visible from {device} on")
        return wanted
    stored = sum(math.prod(ref.shape) for ref in checkpoint.weights.tensors.values()) * dtype.itemsize
    needed = stored or checkpoint.weights.nbytes
    free, _ = torch.cuda.mem_get_info(device)
    degree = 1
    while needed / degree > 0.6 * free:
        degree *= 2
        if degree > available:
            raise ModelError(f"{checkpoint.model_id} needs {needed / 1e9:.0f} GB; {available} such GPUs do not hold it")
    return degree


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has avx512_bf16 or amx_bf16 instructions (Linux on x86; elsewhere False)."""
    try:
        flags = Path("/proc/cpuinfo").read_text("ascii", errors="ignore")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the cgroup's quota; hyperthreads of one core count once."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(cpu) for cpu in affinity}
    return max(1, min(len(cores), _quota()))


def choose_product_threads(cores: int, dtype: torch.dtype) -> int:
    """Threads for matrix products: all cores, or half of them where the rest add little, as measured in half a second.

    Virtual machines often show two hyperthreads of one core as two cores; both then share one matrix unit. What is
    measured is processor time: on a busy machine the clock would tell how long threads waited for a processor.
    """
    if cores == 1:
        return 1
    x, weight = torch.ones(2048, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
    best: dict[int, float] = {}
    with torch.inference_mode():
        for _ in range(9):  # the best of several: what else happens only ever makes it slower
            for count in (cores, cores // 2):
                torch.set_num_threads(count)
                start = time.process_time()
                F.linear(x, weight)
                best[count] = min(best.get(count, math.inf), (time.process_time() - start) / count)
    # Two real cores are nearly twice as fast as one. A small gain means shared hardware, where every product would
    # also wait for the slower thread.
    return cores if 1.2 * best[cores] < best[cores // 2] else cores // 2


def _core_of(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return max(1, int(quota) // int(period)) if quota != "max" else 1 << 16
    except (OSError, ValueError):
        return 1 << 16

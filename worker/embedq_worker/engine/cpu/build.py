"""Compiling kernels.cpp once a machine, where there is a compiler; nothing breaks where there is none."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.cpp")
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma")
_AMX = ("amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Kernels:
    """The compiled library, or None and the reason."""

    loaded: ctypes.CDLL | None
    reason: str
    amx: bool = False


@functools.cache
def load_kernels() -> Kernels:
    """Compile (once, into the user's cache) and load. Never raises: a reason is given instead."""
    if missing := _missing_instructions():
        return Kernels(None, missing)
    amx = _flags().issuperset(_AMX)
    kernels = _load(_NEEDED + _AMX if amx else _NEEDED)
    if amx and kernels.loaded is None:
        # A kernel or a compiler that does not know AMX may well know the rest.
        kernels = _load(_NEEDED)
    return kernels


def _missing_instructions() -> str | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the CPU kernels are for Linux on x86-64; this is {platform.system()} on {platform.machine()}"
    missing = [isa for isa in _NEEDED if isa not in _flags()]
    return f"this CPU has no {', '.join(missing)}" if missing else None


def _flags() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text("ascii", errors="ignore").split())


def _load(isa: tuple[str, ...]) -> Kernels:
    try:
        library = ctypes.CDLL(str(_built(isa)))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return Kernels(None, f"the CPU kernels did not compile: {str(error).strip()[-300:]}")
    if not library.embedq_enable():
        return Kernels(None, "the operating system does not let this process use AMX")
    amx = "amx_bf16" in isa
    return Kernels(library, f"compiled for {'AMX' if amx else 'AVX-512'} bfloat16", amx)


def _built(isa: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or clang++) on PATH")
    switches = (f"-m{name.replace('512_', '512').replace('_', '-')}" for name in isa)
    command = [compiler, "-std=c++17", "-O3", "-fPIC", "-shared", *switches]
    key = hashlib.sha256("\0".join([_SOURCE.read_text("utf-8"), *command]).encode()).hexdigest()[:20]
    target = _cache() / f"kernels-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            # Arguments are a fixed list and this package's own file; CXX is the user's choice of compiler.
            done = subprocess.run(  # noqa: S603
                [*command, str(_SOURCE), "-o", str(output)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(done.stderr)
            # Renaming keeps a second process that builds at the same time from loading half a file.
            output.replace(target)
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "embedq" / "kernels"

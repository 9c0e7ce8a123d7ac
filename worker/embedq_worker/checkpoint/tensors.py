"""The index of a checkpoint's weights: headers only, no weight is read and no torch is needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint.files import read_object
from embedq_worker.checkpoint.model import TensorRef, Weights

_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
#: A header larger than this is a broken or hostile file (the format's own limit).
_MAX_HEADER = 100_000_000


def read_header(path: Path, prefix: str = "") -> dict[str, TensorRef]:
    """Every tensor of one safetensors file, keyed by name without `prefix`. Raises ModelError on a damaged file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise ModelError(f"{path} is {size} bytes; too short for a safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, _MAX_HEADER):
                raise ModelError(f"{path} is damaged: its header claims {length} bytes of {size}")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the weights in {path}: {error}") from None
    start = 8 + length
    refs: dict[str, TensorRef] = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        ref = _entry(path, key, entry, start)
        if ref.offset + ref.nbytes > size:
            raise ModelError(f"{path} is truncated: {key} ends at byte {ref.offset + ref.nbytes} of {size}")
        refs[key.removeprefix(prefix)] = ref
    return refs


def _entry(path: Path, key: str, entry: Any, start: int) -> TensorRef:
    try:
        begin, end = entry["data_offsets"]
        return TensorRef(path, key, str(entry["dtype"]), tuple(map(int, entry["shape"])), start + begin, end - begin)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is damaged: the header entry of {key} is not readable") from None


def index_weights(folder: Path) -> Weights:
    """The weight files of `folder`: sharded or single safetensors, else pickled weights. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        mapping = read_object(index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in mapping.values()})
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files outside its folder")
        return _safetensors([folder / name for name in names], expected=set(mapping))
    single = folder / "model.safetensors"
    if single.exists():
        return _safetensors([single])
    pickled_index = folder / "pytorch_model.bin.index.json"
    if pickled_index.exists():
        mapping = read_object(pickled_index).get("weight_map") or {}
        files = tuple(folder / name for name in sorted({Path(str(name)).name for name in mapping.values()}))
        missing = [file.name for file in files if not file.exists()]
        if missing or not files:
            raise ModelError(f"{pickled_index} names {', '.join(missing) or 'no file'}; the download is not complete")
        return Weights(files, {}, pickled=True)
    pickled = folder / "pytorch_model.bin"
    if pickled.exists():
        return Weights((pickled,), {}, pickled=True)
    raise ModelError(f"no weights in {folder}: expected model.safetensors, its shards, or pytorch_model.bin")


def _safetensors(files: list[Path], expected: set[str] | None = None) -> Weights:
    tensors: dict[str, TensorRef] = {}
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} is missing; the download is not complete")
        for name, ref in read_header(file).items():
            short = name.removeprefix("model.")
            if short in tensors:
                raise ModelError(f"{name} is in both {tensors[short].file.name} and {file.name}")
            tensors[short] = ref
    if expected is not None:
        missing = expected - {ref.key for ref in tensors.values()}
        if missing:
            raise ModelError(f"{len(missing)} weights of the index are in no file, {min(missing)} among them")
    return Weights(tuple(files), tensors)


def check_shape(ref: TensorRef) -> None:
    """Raises ModelError where a tensor's bytes do not match its dtype and shape."""
    bits = _ITEM_BITS.get(ref.dtype)
    count = 1
    for extent in ref.shape:
        count *= extent
    if bits is not None and ref.nbytes * 8 != count * bits:
        raise ModelError(f"{ref.file} is damaged: {ref.key} of shape {ref.shape} {ref.dtype} has {ref.nbytes} bytes")

"""The sentence-transformers part of a checkpoint: modules.json, pooling, Dense heads, prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint.files import read_json, read_object
from embedq_worker.checkpoint.model import Dense, Pooling

_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class Modules:
    """`transformer` is the folder, relative to the checkpoint, that holds config.json and the weights."""

    transformer: str
    pooling: Pooling
    include_prompt: bool
    dense: tuple[Dense, ...]
    normalize: bool
    notes: tuple[str, ...]


def read_modules(folder: Path, *, dense: str | None = None) -> Modules:
    """Parse modules.json. `dense` replaces the Dense folder it names (stella ships one head per dimension).

    Raises ModelError on a module embedq does not compute exactly.
    """
    if not (folder / "modules.json").exists():
        note = "no modules.json: mean pooling, no normalisation module, as sentence-transformers assumes"
        heads = (_dense(folder / dense),) if dense else ()
        return Modules("", "mean", True, heads, False, (note,))
    entries = read_json(folder / "modules.json")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{folder / 'modules.json'} is not a list of modules")
    transformer, pooling, include_prompt, normalize = "", cast("Pooling | None", None), True, False
    heads_read: list[Dense] = []
    notes: list[str] = []
    for entry in sorted(entries, key=lambda item: int(item.get("idx", 0))):
        kind, path = str(entry.get("type", "")).rsplit(".", 1)[-1], str(entry.get("path", ""))
        if not (folder / path).resolve().is_relative_to(folder):
            raise ModelError(f"modules.json names {path!r}, which is outside the checkpoint")
        if kind == "Transformer":
            transformer = path
        elif kind == "Pooling":
            pooling, include_prompt = _pooling(folder / path / "config.json")
        elif kind == "Dense":
            if normalize:
                raise ModelError(
                    "modules.json normalises before a Dense module; only Dense then Normalize is supported"
                )
            heads_read.append(_dense(folder / (dense or path)))
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dropout":
            continue
        elif kind == "FlexibleQuantizer":
            notes.append(f"the checkpoint quantises its vectors ({entry.get('type')}); embedq writes them as float32")
        else:
            raise ModelError(f"modules.json uses {entry.get('type')!r}, which embedq does not support")
    if pooling is None:
        raise ModelError("modules.json has no Pooling module; pass the pooling explicitly if that is meant")
    if dense and not heads_read:
        heads_read.append(_dense(folder / dense))
    return Modules(transformer, pooling, include_prompt, tuple(heads_read), normalize, tuple(notes))


def _pooling(path: Path) -> tuple[Pooling, bool]:
    config = read_object(path)
    mode: Any = config.get("pooling_mode")
    if mode is None:
        active = [name for key, name in _LEGACY_MODES.items() if config.get(key)]
        mode = active or ["mean"]
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1:
        raise ModelError(f"{path} concatenates {', '.join(map(str, modes))} pooling; only one mode is supported")
    return check_pooling(modes[0]), bool(config.get("include_prompt", True))


def check_pooling(mode: Any) -> Pooling:
    """`mode` as a supported pooling. Raises ModelError."""
    if mode not in get_args(Pooling):
        raise ModelError(f"pooling {mode!r} is not supported; supported: {', '.join(get_args(Pooling))}")
    return cast("Pooling", mode)


def _dense(folder: Path) -> Dense:
    config = read_object(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise ModelError(f"{folder.name} uses activation {activation}; supported: {', '.join(ACTIVATIONS)}")
    if config.get("module_input_name", "sentence_embedding") not in (None, "sentence_embedding"):
        raise ModelError(f"{folder.name} is applied to {config['module_input_name']}, not to the pooled vector")
    try:
        return Dense(
            folder, int(config["in_features"]), int(config["out_features"]), bool(config.get("bias", True)), activation
        )
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{folder / 'config.json'} lacks in_features or out_features") from None


def read_prompts(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """The named prompts and the default's name, from config_sentence_transformers.json."""
    config = read_object(folder / "config_sentence_transformers.json", optional=True)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{folder / 'config_sentence_transformers.json'}: prompts must map names to strings")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"the default prompt {default!r} is not among the checkpoint's prompts")
    return dict(prompts), default

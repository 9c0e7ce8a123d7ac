"""load_checkpoint: a folder or a hub id becomes a Checkpoint, or one clear sentence about why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embedq_schemas.errors import ModelError

from embedq_worker.checkpoint.decoder import FAMILIES, is_causal, max_positions, read_decoder
from embedq_worker.checkpoint.files import read_object, resolve
from embedq_worker.checkpoint.fingerprint import fingerprint
from embedq_worker.checkpoint.model import Architecture, Checkpoint, DecoderConfig, Weights
from embedq_worker.checkpoint.modules import Modules, check_pooling, read_modules, read_prompts
from embedq_worker.checkpoint.tensors import check_shape, index_weights, read_header
from embedq_worker.checkpoint.verify import verify_decoder

#: Keyword arguments load_checkpoint takes beside `revision`.
OVERRIDES = ("pooling", "normalize", "causal", "max_length", "dense", "include_prompt")
#: Families whose position table starts after the padding index.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "longformer"}


def load_checkpoint(model: str, *, revision: str | None = None, **overrides: Any) -> Checkpoint:
    """Read what a checkpoint's own files say about it; no weight is loaded and torch is not needed.

    `model` is a local folder or a hub id. Overrides: `pooling` (str), `normalize` (bool), `causal` (bool), `max_length`
    (tokens, at most what the model allows), `dense` (folder of another Dense head), `include_prompt` (bool).
    Raises ModelError with one sentence where the checkpoint cannot be served exactly.
    """
    unknown = sorted(set(overrides) - set(OVERRIDES))
    if unknown:
        raise ModelError(f"unknown model override {unknown[0]!r}; known: {', '.join(OVERRIDES)}")
    overrides = {key: value for key, value in overrides.items() if value is not None}
    folder, model_id = resolve(model, revision)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{model_id} is a LoRA adapter; merge it into its base model (peft: merge_and_unload) and save that"
        )
    modules = read_modules(folder, dense=overrides.get("dense"))
    root = folder / modules.transformer
    config = read_object(root / "config.json")
    _refuse_config(config, model_id)
    model_type = str(config["model_type"])
    architecture: Architecture = FAMILIES.get(model_type, "other")
    if architecture == "other" and "causal" in overrides:
        raise ModelError(f"causal can be overridden for Qwen2 and Qwen3 only; {model_id} is {model_type}")
    causal = bool(overrides.get("causal", is_causal(config)))
    decoder = read_decoder(config, causal=causal) if architecture != "other" else None
    weights = index_weights(root)
    for ref in weights.tensors.values():
        check_shape(ref)
    if decoder is not None and not weights.pickled:
        verify_decoder(decoder, weights)
    hidden_size = _hidden_size(config)
    dimension = _check_dense(modules, hidden_size)
    tokenizer_file = _tokenizer_file(folder, root)
    _check_lowercase(folder, root, tokenizer_file)
    pooling = check_pooling(overrides.get("pooling", modules.pooling))
    normalize = bool(overrides.get("normalize", modules.normalize))
    include_prompt = bool(overrides.get("include_prompt", modules.include_prompt))
    prompts, default_prompt = read_prompts(folder)
    if not include_prompt and any(prompts.values()) and pooling not in ("lasttoken", "cls"):
        raise ModelError(
            f"{model_id} leaves prompts out of its {pooling} pooling (include_prompt is false), which is not supported"
        )
    max_length = _max_length(folder, root, config, overrides.get("max_length"))
    notes = list(modules.notes) + _notes(config, weights)
    if pooling == "lasttoken" and b"TemplateProcessing" not in tokenizer_file.read_bytes():
        notes.append("the tokenizer appends no end token, so the last token of the text itself is pooled")
    settings = {
        "model_type": model_type,
        "config": _relevant(config),
        "decoder": asdict(decoder) if decoder else None,
        "causal": causal,
        "pooling": pooling,
        "normalize": normalize,
        "include_prompt": include_prompt,
        "dense": [(head.in_features, head.out_features, head.bias, head.activation) for head in modules.dense],
        "prompts": dict(prompts),
        "default_prompt_name": default_prompt,
    }
    parts = [weights, *(_dense_weights(head.folder) for head in modules.dense)]
    return Checkpoint(
        path=root,
        model_id=model_id,
        revision=revision or _snapshot_revision(folder),
        architecture=architecture,
        model_type=model_type,
        dimension=dimension,
        hidden_size=hidden_size,
        max_length=max_length,
        pooling=pooling,
        include_prompt=include_prompt,
        normalize=normalize,
        causal=causal,
        prompts=prompts,
        default_prompt_name=default_prompt,
        tokenizer_file=tokenizer_file,
        vocab_size=int(config.get("vocab_size") or 0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        dense=modules.dense,
        decoder=decoder,
        weights=weights,
        fingerprint=fingerprint(settings, [tokenizer_file], parts),
        notes=tuple(notes),
    )


def _refuse_config(config: Mapping[str, Any], model_id: str) -> None:
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{model_id}: config.json names no model_type; is this a model folder?")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{model_id} holds {method}-quantised weights; use its float checkpoint")
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{model_id} is an encoder-decoder ({config['model_type']}); only encoders and decoders embed here"
        )


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that can change vectors: not the saver's version, storage dtype, or generation settings."""
    dropped = {
        "transformers_version",
        "torch_dtype",
        "dtype",
        "architectures",
        "auto_map",
        "use_cache",
        "_name_or_path",
    }
    dropped |= {"tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}
    return {key: value for key, value in config.items() if key not in dropped and value is not None}


def _hidden_size(config: Mapping[str, Any]) -> int:
    for key in ("hidden_size", "dim", "d_model", "n_embd"):
        if isinstance(config.get(key), int):
            return int(config[key])
    raise ModelError(f"config.json of this {config['model_type']} model names no hidden_size")


def _check_dense(modules: Modules, hidden_size: int) -> int:
    size = hidden_size
    for head in modules.dense:
        if head.in_features != size:
            raise ModelError(f"{head.folder.name} takes {head.in_features} values, but {size} reach it")
        size = head.out_features
    return size


def _dense_weights(folder: Path) -> Weights:
    if (folder / "model.safetensors").exists():
        return Weights((folder / "model.safetensors",), read_header(folder / "model.safetensors"))
    if (folder / "pytorch_model.bin").exists():
        return Weights((folder / "pytorch_model.bin",), {}, pickled=True)
    raise ModelError(f"no weights in {folder}")


def _tokenizer_file(folder: Path, root: Path) -> Path:
    for place in (root, folder):
        if (place / "tokenizer.json").exists():
            return place / "tokenizer.json"
    raise ModelError(f"{root} has no tokenizer.json; save the tokenizer with a current transformers (use_fast=True)")


def _check_lowercase(folder: Path, root: Path, tokenizer_file: Path) -> None:
    asked = any(
        read_object(place / "sentence_bert_config.json", optional=True).get("do_lower_case") for place in {folder, root}
    )
    if asked:
        normalizer = str(read_object(tokenizer_file).get("normalizer")).lower()
        if "lowercase': true" not in normalizer and "'type': 'lowercase'" not in normalizer:
            raise ModelError("sentence_bert_config.json asks for lower-casing, which this tokenizer.json does not do")


def _max_length(folder: Path, root: Path, config: Mapping[str, Any], override: int | None) -> int:
    limits: list[int] = []
    positions = max_positions(config)
    if positions is not None:
        offset = int(config.get("pad_token_id") or 0) + 1 if config["model_type"] in _OFFSET_POSITIONS else 0
        limits.append(positions - offset)
    for place in {folder, root}:
        limits.append(_limit(read_object(place / "sentence_bert_config.json", optional=True).get("max_seq_length")))
        limits.append(_limit(read_object(place / "tokenizer_config.json", optional=True).get("model_max_length")))
    allowed = min((limit for limit in limits if limit > 0), default=512)
    if override is None:
        return allowed
    if not 2 <= override <= allowed:
        raise ModelError(f"max_length {override} is not between 2 and the {allowed} tokens this model allows")
    return int(override)


def _limit(value: Any) -> int:
    """A usable limit or 0: tokenizers write 1e30 where they mean none."""
    return int(value) if isinstance(value, (int, float)) and 0 < value < 1e9 else 0


def _notes(config: Mapping[str, Any], weights: Weights) -> list[str]:
    notes = []
    if weights.pickled:
        notes.append("pytorch_model.bin: read without executing pickled code; safetensors loads faster and by rank")
    if config.get("auto_map"):
        notes.append("the checkpoint names remote code (auto_map); embedq never runs it")
    dtypes = {ref.dtype for ref in weights.tensors.values()}
    if "F16" in dtypes:
        notes.append(
            "weights are float16; computing in float16 overflows on Qwen models, so bfloat16 or float32 is used"
        )
    return notes


def _snapshot_revision(folder: Path) -> str | None:
    return folder.name if folder.parent.name == "snapshots" else None


def decoder_of(checkpoint: Checkpoint) -> DecoderConfig:
    """The decoder's shape. Raises ModelError for a checkpoint that is not Qwen2/Qwen3."""
    if checkpoint.decoder is None:
        raise ModelError(f"the native engine runs Qwen2 and Qwen3; {checkpoint.model_id} is {checkpoint.model_type}")
    return checkpoint.decoder

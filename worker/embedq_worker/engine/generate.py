"""Small seeded Qwen2/Qwen3 embedding checkpoints, for tests, the demonstration and benchmarks. NumPy only.

Weights are random, so the vectors mean nothing; everything around them (files, shapes, names, tokenizer) is as in a
trained checkpoint.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

END = "<|endoftext|>"
_SPECIALS = (END, "<|im_start|>", "<|im_end|>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = (
    "the of and to in is for that with on as are be this from by it was at or which not have an were their has"
    " one all more can when there other than its into only time some these two may then do first any new over such"
    " where most between after also about many queue vector token document model language water people world"
)
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
Values = NDArray[np.float32]


def generate_checkpoint(
    path: Path,
    *,
    family: Literal["qwen2", "qwen3"] = "qwen3",
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    pooling: str = "lasttoken",
    normalize: bool = True,
    causal: bool = True,
    dense: tuple[int, ...] = (),
    prefix: bool = False,
    shards: int = 1,
    tied: bool = True,
    max_length: int = 32_768,
    config: Mapping[str, Any] | None = None,
    prompts: Mapping[str, str] | None = None,
    tokenizer_json: Path | None = None,
) -> Path:
    """Write a checkpoint folder that transformers, sentence-transformers and embedq all load; returns `path`.

    `dense` gives the output sizes of Dense heads; `prefix` writes `model.` before every name; `tied=False` adds an
    `lm_head.weight`; `config` is merged into config.json last. Without `tokenizer_json` a byte-level BPE tokenizer of a
    few hundred tokens is made. The tokenizer appends `<|endoftext|>`, as Qwen3-Embedding's does.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _appending(json.loads(tokenizer_json.read_text("utf-8")) if tokenizer_json else small_tokenizer())
    _write(path / "tokenizer.json", tokenizer)
    needed = 1 + max([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])])
    head_dim = head_dim or hidden_size // heads
    settings = {
        "architectures": ["Qwen3ForCausalLM" if family == "qwen3" else "Qwen2ForCausalLM"],
        "model_type": family,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size or needed,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": max_length,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "attention_dropout": 0.0,
    }
    if family == "qwen3":
        settings |= {"head_dim": head_dim, "attention_bias": False}
    if not causal:
        settings["is_causal"] = False
    settings |= config or {}
    _write(path / "config.json", settings)
    rng = np.random.default_rng(seed)
    tensors = _decoder_tensors(settings, head_dim, tied=tied, rng=rng)
    shapes = {name: shape for name, shape, _ in tensors}
    names = {name: ("model." if prefix and not name.startswith("lm_head") else "") + name for name in shapes}
    _write_weights(path, tensors, names, dtype, shards, rng)
    _write_modules(path, hidden_size, pooling, normalize, dense, rng)
    end_id = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>" if any(t["content"] == "<|im_end|>" for t in tokenizer["added_tokens"]) else END,
            "pad_token": END,
            "model_max_length": max_length,
            "padding_side": "left",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(path / "generation_config.json", {"pad_token_id": end_id, "eos_token_id": end_id})
    default_prompts = {
        "query": "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
        "document": "",
    }
    _write(
        path / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": dict(default_prompts if prompts is None else prompts),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )
    return path


def small_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE with Qwen's pre-tokenizer: 256 bytes, a few common words, Qwen's specials."""
    alphabet = _byte_alphabet()
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[list[str]] = []
    for word in _WORDS.split():
        for text in (word, alphabet[ord(" ")] + word):
            for end in range(2, len(text) + 1):
                if text[:end] not in vocab:
                    vocab[text[:end]] = len(vocab)
                    merges.append([text[: end - 1], text[end - 1]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": text, **flags} for i, text in enumerate(_SPECIALS)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, indexed by the byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _appending(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Add the post-processor that appends `<|endoftext|>`, as Qwen3-Embedding's tokenizer.json has it."""
    end_id = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    processor = tokenizer.get("post_processor") or {}
    if "TemplateProcessing" in json.dumps(processor):
        return tokenizer
    special = {"SpecialToken": {"id": END, "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, special],
        "pair": [first, special, second, special],
        "special_tokens": {END: {"id": END, "ids": [end_id], "tokens": [END]}},
    }
    return {**tokenizer, "post_processor": {"type": "Sequence", "processors": [processor, template]}}


def _decoder_tensors(
    config: Mapping[str, Any], head_dim: int, *, tied: bool, rng: np.random.Generator
) -> list[tuple[str, tuple[int, ...], float]]:
    """(name, shape, scale): scale 0 marks a norm, whose weights lie around one."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    biased = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
    tensors: list[tuple[str, tuple[int, ...], float]] = [("embed_tokens.weight", (vocab, hidden), 1.0)]
    for layer in range(config["num_hidden_layers"]):
        base = f"layers.{layer}."
        for name, rows in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
            tensors.append((f"{base}self_attn.{name}.weight", (rows, hidden), hidden**-0.5))
            if biased:
                tensors.append((f"{base}self_attn.{name}.bias", (rows,), 0.3))
        tensors.append((base + "self_attn.o_proj.weight", (hidden, query), query**-0.5))
        if biased and config["model_type"] == "qwen3":
            tensors.append((base + "self_attn.o_proj.bias", (hidden,), 0.3))
        if config["model_type"] == "qwen3":
            tensors += [(f"{base}self_attn.{name}.weight", (head_dim,), 0.0) for name in ("q_norm", "k_norm")]
        tensors += [(f"{base}mlp.{name}.weight", (inner, hidden), hidden**-0.5) for name in ("gate_proj", "up_proj")]
        tensors.append((base + "mlp.down_proj.weight", (hidden, inner), inner**-0.5))
        tensors += [
            (base + f"{name}.weight", (hidden,), 0.0) for name in ("input_layernorm", "post_attention_layernorm")
        ]
    tensors.append(("norm.weight", (hidden,), 0.0))
    if not tied:
        tensors.append(("lm_head.weight", (vocab, hidden), 0.02))
    return tensors


def _values(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> Values:
    noise = rng.standard_normal(shape, dtype=np.float32)
    return 1.0 + 0.1 * noise if scale == 0.0 else noise * np.float32(scale)


def _encoded(values: Values, dtype: str) -> bytes:
    if dtype == "float32":
        return values.tobytes()
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    # Round to nearest, ties to even, as every bfloat16 conversion does.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_safetensors(
    path: Path, entries: list[tuple[str, tuple[int, ...]]], dtype: str, payloads: Iterator[bytes]
) -> None:
    """Write one safetensors file, a tensor at a time; `payloads` yields the bytes of `entries` in order."""
    size = 4 if dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in entries:
        nbytes = size * int(np.prod(shape))
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for payload in payloads:
            file.write(payload)


def _write_weights(
    path: Path,
    tensors: list[tuple[str, tuple[int, ...], float]],
    names: Mapping[str, str],
    dtype: str,
    shards: int,
    rng: np.random.Generator,
) -> None:
    parts = [part.tolist() for part in np.array_split(np.arange(len(tensors)), shards)]
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        chosen = [tensors[index] for index in part]
        payloads = (_encoded(_values(shape, scale, rng), dtype) for _, shape, scale in chosen)
        write_safetensors(path / file, [(names[name], shape) for name, shape, _ in chosen], dtype, payloads)
        weight_map |= {names[name]: file for name, _, _ in chosen}
        total += (path / file).stat().st_size
    if shards > 1:
        _write(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_modules(
    path: Path, hidden_size: int, pooling: str, normalize: bool, dense: tuple[int, ...], rng: np.random.Generator
) -> None:
    base = "sentence_transformers.models."
    modules = [("", base + "Transformer"), ("1_Pooling", base + "Pooling")]
    mode = {"lasttoken": "lasttoken", "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}.get(
        pooling, pooling if pooling == "mean_sqrt_len_tokens" else pooling + "_tokens"
    )
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{kind}": kind == mode for kind in kinds}
    _write(
        path / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden_size, **flags, "include_prompt": True}
    )
    size = hidden_size
    for number, out in enumerate(dense, start=2):
        folder = path / f"{number}_Dense"
        folder.mkdir(exist_ok=True)
        _write(
            folder / "config.json",
            {
                "in_features": size,
                "out_features": out,
                "bias": True,
                "activation_function": "torch.nn.modules.linear.Identity"
                if number == 2
                else "torch.nn.modules.activation.Tanh",
            },
        )
        weight, bias = _values((out, size), size**-0.5, rng), _values((out,), 0.1, rng)
        entries: list[tuple[str, tuple[int, ...]]] = [("linear.weight", (out, size)), ("linear.bias", (out,))]
        write_safetensors(folder / "model.safetensors", entries, "float32", iter([weight.tobytes(), bias.tobytes()]))
        modules.append((folder.name, base + "Dense"))
        size = out
    if normalize:
        modules.append((f"{len(modules)}_Normalize", base + "Normalize"))
        (path / modules[-1][0]).mkdir(exist_ok=True)
    _write(
        path / "modules.json",
        [{"idx": i, "name": str(i), "path": folder, "type": kind} for i, (folder, kind) in enumerate(modules)],
    )


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", "utf-8")

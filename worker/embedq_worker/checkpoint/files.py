"""Finding a checkpoint's folder and reading its JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embedq_schemas.errors import ModelError

#: What a served model needs from a hub repository; exports to other runtimes are left out.
_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model")
_SKIPPED = ("onnx/*", "openvino/*", "coreml/*", "*.gguf")


def resolve(model: str, revision: str | None) -> tuple[Path, str]:
    """The local folder of `model` and the name to show for it. Raises ModelError where there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.is_file():
        raise ModelError(
            f"{model} is a file; expected a checkpoint folder or a hub id such as Qwen/Qwen3-Embedding-0.6B"
        )
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or not model.strip():
        raise ModelError(f"no checkpoint folder at {model!r}")
    return _download(model, revision), model


def _download(model: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelError("huggingface-hub is not installed; `pip install 'embedq[worker]'` adds it") from None
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=list(_PATTERNS), ignore_patterns=list(_SKIPPED)
            )
        )
        if not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=["pytorch_model*.bin*"])
    except errors.GatedRepoError:
        raise ModelError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{model} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"no model {model!r} on the hub, and no folder of that name here") from None
    except errors.HFValidationError as error:
        raise ModelError(f"{model!r} is neither a folder nor a valid hub id: {error}") from None
    except (OSError, errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise ModelError(f"{model!r} is no folder here, not cached, and cannot be downloaded: {error}") from None
    except Exception as error:
        # The hub client raises its HTTP library's own classes where it cannot connect.
        raise ModelError(f"cannot download {model!r}: {type(error).__name__}: {error}") from None
    return folder


def read_json(path: Path) -> Any:
    """The parsed file. Raises ModelError where it is missing or broken."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; is {path.parent} a complete checkpoint?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The parsed file as a JSON object; `{}` where it is absent and optional."""
    if optional and not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value

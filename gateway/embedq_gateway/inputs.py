"""From a request's JSON to what is to be embedded and how, with every mistake named. For HTTP and for batch lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from embedq_schemas.encoding import EncodingOptions, OnLong, TruncationSide

from embedq_gateway.errors import ApiError
from embedq_gateway.watch import ServedModel

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_OPENING = re.compile(rb"\s*(\[?)\s*([^\s]?)")
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")
_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: Names that requests for queries and for documents go by, and the prompts that checkpoints keep for them.
_INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "search_query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "search_document", "retrieval.passage"),
    "search_document": ("document", "passage", "search_document", "retrieval.passage"),
    "passage": ("passage", "document", "search_document", "retrieval.passage"),
}
InputType = Literal["query", "search_query", "document", "search_document", "passage"]


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    max_inputs: int
    max_request_tokens: int
    on_long: OnLong


@dataclass(frozen=True)
class Inputs:
    """Texts, or documents given as token ids; exactly one of the two."""

    texts: list[str] | None
    token_ids: list[list[int]] | None

    def __len__(self) -> int:
        return len(self.texts if self.texts is not None else self.token_ids or ())

    @property
    def documents(self) -> list[str] | list[list[int]]:
        return self.texts if self.texts is not None else self.token_ids or []


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /v1/embeddings`: OpenAI's fields, then our own."""

    input: msgspec.Raw
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    truncate: bool | None = None

    @property
    def base64(self) -> bool:
        return self.encoding_format == "base64"


class TeiRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Body of `POST /embed`, as text-embeddings-inference takes it."""

    inputs: msgspec.Raw
    normalize: bool | None = True
    truncate: bool | None = False
    truncation_direction: Literal["right", "left", "Right", "Left"] | None = "right"
    prompt_name: str | None = None
    dimensions: int | None = None
    model: str | None = None


_embeddings_decoder = msgspec.json.Decoder(EmbeddingsRequest)
_tei_decoder = msgspec.json.Decoder(TeiRequest)
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[TokenId])
_id_lists = msgspec.json.Decoder(list[list[TokenId]])


def embeddings_request(body: Bytes) -> EmbeddingsRequest:
    """The decoded body; raises ApiError 400."""
    return decoded(_embeddings_decoder, body)


def tei_request(body: Bytes) -> TeiRequest:
    """The decoded body; raises ApiError 400."""
    return decoded(_tei_decoder, body)


def read_request(
    request: EmbeddingsRequest | TeiRequest, model: ServedModel, limits: Limits, aliases: tuple[str, ...]
) -> tuple[Inputs, EncodingOptions]:
    """What is to be embedded, and how; raises ApiError 400, 404 or 413."""
    check_model(request.model, model, aliases)
    options = encoding_options(request, model, limits)
    if isinstance(request, TeiRequest):
        inputs = parse_inputs(request.inputs, limits, param="inputs")
    else:
        inputs = parse_inputs(request.input, limits)
    if options.prompt and inputs.token_ids is not None:
        # Ids are the model's input as they are: a prompt would be without effect, and nobody would notice.
        param = "prompt_name" if request.prompt_name is not None else "input_type"
        raise ApiError(400, "invalid_prompt", "A prompt cannot be put before token ids.", param=param)
    return inputs, options


def parse_inputs(raw: msgspec.Raw, limits: Limits, *, param: str = "input") -> Inputs:
    """A string, a list of strings, a list of token ids, or a list of such lists; raises ApiError 400 or 413."""
    found = _OPENING.match(memoryview(raw))
    opening = b"".join(map(bytes, found.groups())) if found else b""
    if opening[:1] == b'"':
        inputs = Inputs([_value(_text, raw, param)], None)
    elif opening == b'["':
        inputs = Inputs(_value(_texts, raw, param), None)
    elif opening == b"[[":
        inputs = Inputs(None, _value(_id_lists, raw, param))
    elif opening == b"[]":
        raise ApiError(400, "empty_input", f"`{param}` is an empty list.", param=param)
    elif opening[:1] == b"[" and opening[1:].isdigit():
        inputs = Inputs(None, [_value(_ids, raw, param)])
    else:
        _value(_texts, raw, param)
        raise ApiError(400, "invalid_input", f"`{param}` holds neither texts nor token ids.", param=param)
    _check(inputs, limits, param)
    return inputs


def encoding_options(request: EmbeddingsRequest | TeiRequest, model: ServedModel, limits: Limits) -> EncodingOptions:
    """How the request wants its documents embedded; raises ApiError 400."""
    dimensions = request.dimensions
    if dimensions is not None and not 1 <= dimensions <= model.dimension:
        raise ApiError(
            400,
            "invalid_dimensions",
            f"`dimensions` is {dimensions}; this model gives 1 to {model.dimension}.",
            param="dimensions",
        )
    long = limits.on_long
    if request.truncate is not None:
        long = OnLong.TRUNCATE if request.truncate else OnLong.ERROR
    if isinstance(request, TeiRequest):
        side = (request.truncation_direction or "right").lower()
        # text-embeddings-inference answers with unit vectors unless told otherwise.
        normalize, input_type = request.normalize is not False, None
    else:
        side, normalize, input_type = "right", None, request.input_type
    return EncodingOptions(
        dimensions=dimensions,
        prompt=_prompt(model, request.prompt_name, input_type),
        normalize=normalize,
        truncation_side=TruncationSide(side),
        on_long=long,
    )


def check_model(name: str | None, model: ServedModel, aliases: tuple[str, ...]) -> None:
    """Raise ApiError 404 unless `name` is the served model, or one of its aliases."""
    if name is not None and name != model.id and name not in aliases:
        raise ApiError(
            404,
            "model_not_found",
            f"The model `{name[:200]}` is not served here; this is `{model.id}`.",
            param="model",
        )


def _prompt(model: ServedModel, name: str | None, input_type: str | None) -> str:
    """The prompt of the checkpoint that is asked for by name, or by the kind of text; none unless asked for."""
    if name is not None:
        if input_type is not None:
            raise ApiError(
                400, "invalid_prompt", "`prompt_name` and `input_type` exclude each other.", param="prompt_name"
            )
        if name not in model.prompts:
            known = ", ".join(sorted(model.prompts)) or "none"
            raise ApiError(
                400, "unknown_prompt", f"The model has no prompt `{name[:200]}`; it has: {known}.", param="prompt_name"
            )
        return model.prompts[name]
    if input_type is None:
        return ""
    names = _INPUT_TYPES[input_type]
    found = next((model.prompts[name] for name in names if name in model.prompts), None)
    if found is None and "query" in names and model.prompts:
        # Documents need no prompt; a query without the one the model was trained with finds little.
        raise ApiError(400, "unknown_prompt", f"The model has no prompt for `{input_type}`.", param="input_type")
    return found or ""


def _check(inputs: Inputs, limits: Limits, param: str) -> None:
    if not len(inputs):
        raise ApiError(400, "empty_input", f"`{param}` is an empty list.", param=param)
    if len(inputs) > limits.max_inputs:
        raise ApiError(
            413,
            "too_many_inputs",
            f"`{param}` holds {len(inputs):,} texts; one request may hold {limits.max_inputs:,}.",
            param=param,
        )
    empty = next((i for i, document in enumerate(inputs.documents) if not document), None)
    if empty is not None:
        what = "text" if inputs.texts is not None else "list of token ids"
        where = f"{param}[{empty}]" if len(inputs) > 1 else param
        raise ApiError(400, "empty_input", f"`{where}` is an empty {what}.", param=where)
    if inputs.token_ids is not None and sum(map(len, inputs.token_ids)) > limits.max_request_tokens:
        raise ApiError(
            413,
            "too_many_tokens",
            f"`{param}` holds more token ids than the {limits.max_request_tokens:,} that one request may hold.",
            param=param,
        )


def decoded(decoder: msgspec.json.Decoder[T], body: Bytes) -> T:
    try:
        return decoder.decode(body)
    except _INVALID as error:
        raise _refusal(error, "") from None


def _value(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, param: str) -> T:
    try:
        return decoder.decode(raw)
    except _INVALID as error:
        raise _refusal(error, param) from None


def _refusal(error: Any, param: str) -> ApiError:
    """msgspec's words as an answer that names the field."""
    if isinstance(error, UnicodeDecodeError) or "Invalid UTF-8" in str(error):
        return ApiError(400, "invalid_utf8", "The body is not UTF-8, or escapes half a character.", param=param or None)
    if isinstance(error, RecursionError):
        return ApiError(400, "invalid_json", "The body is nested too deeply.", param=param or None)
    message = str(error)
    if found := _UNKNOWN.search(message):
        name = found[1][:200]
        return ApiError(400, "unknown_field", f"Unrecognized request argument: `{name}`.", param=name)
    if found := _MISSING.search(message):
        return ApiError(400, "missing_field", f"The field `{found[1]}` is missing.", param=found[1])
    where = _AT.search(message)
    path = where[1] if where else ""
    param = f"{param}.{path}" if param and path and not path.startswith("[") else param + path
    sentence = message[: where.start()] if where else message
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, "invalid_value", f"{sentence}{f' at `{param}`' if param else ''}.", param=param or None)
    return ApiError(400, "invalid_json", f"The body is not JSON: {sentence}.", param=param or None)

"""What the failure of one document is to the client whose request held it."""

from __future__ import annotations

from embedq_schemas.errors import DocumentErrorCode

from embedq_gateway.errors import ApiError

#: Failures that the request itself can mend.
_BAD_INPUT = frozenset(
    {DocumentErrorCode.TOO_LONG, DocumentErrorCode.TOKENIZER_FAILED, DocumentErrorCode.INVALID_INPUT_IDS}
)


def of_document(index: int, code: DocumentErrorCode, message: str, inputs: int, *, param: str = "input") -> ApiError:
    """The answer to a request whose document `index`, of `inputs`, has no vector; 400 where it is wrong, else 422."""
    where = f"{param}[{index}]" if index >= 0 and inputs > 1 else param
    status = 400 if code in _BAD_INPUT else 422
    return ApiError(status, code.value, f"`{where}` cannot be embedded: {message.rstrip('.')}.", param=where)

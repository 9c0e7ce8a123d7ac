"""API keys. Each key is a tenant, whose files and batches no other key can see."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from embedq_schemas.errors import UsageError

from embedq_gateway.errors import ApiError

_TENANT_CHARS = 16
_EVERYBODY = "everybody"
_SHORTEST_KEY = 8


class ApiKeys:
    """The keys that are accepted; with none at all, every request is, as one tenant."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys)]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of an `Authorization` header; raises ApiError 401.

        The key itself is stored nowhere: a tenant is named by its digest.
        """
        if not self._digests:
            return _EVERYBODY
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "missing_api_key", "Send your API key as `Authorization: Bearer KEY`.")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, and in constant time: how long it takes says nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(401, "invalid_api_key", "This API key is not known here.")
        return digest.hex()[:_TENANT_CHARS]


def read_keys(file: Path | None, given: Iterable[str]) -> ApiKeys:
    """Keys of `file` (one a line; blank lines and `#` comments are skipped) and those `given`; raises UsageError."""
    keys = list(given)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-keys-file {file} cannot be read: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            # An empty file must not open the door to everybody.
            raise UsageError(f"--api-keys-file {file} holds no key")
        keys += found
    if any(len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(f"an API key needs at least {_SHORTEST_KEY} printable ASCII characters, without spaces")
    return ApiKeys(keys)

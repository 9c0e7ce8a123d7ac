"""Telling a newer version from a broken payload, once a strict decoder has refused it."""

from __future__ import annotations

import msgspec

from embedq_schemas.errors import UnsupportedVersionError
from embedq_schemas.names import SCHEMA_VERSION


def refuse_other_version(data: bytes | memoryview, field: str, what: str) -> None:
    """Raise UnsupportedVersionError if `data` is a JSON object whose `field` is a version other than ours.

    A newer version has fields this build does not know, so its strict decoder fails on those first.
    """
    try:
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    version = decoded.get(field, SCHEMA_VERSION) if isinstance(decoded, dict) else SCHEMA_VERSION
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise UnsupportedVersionError(f"{what}: version {str(version)[:20]}; this build knows {SCHEMA_VERSION}")

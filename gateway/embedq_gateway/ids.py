"""Ids of files and batches. They begin with the time, so that their alphabetical order is that of their creation."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """`prefix`, then 12 hexadecimal digits of Unix milliseconds and 20 random ones (the order of UUID version 7)."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"

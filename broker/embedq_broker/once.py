"""Warnings about things that are looked at again and again."""

from __future__ import annotations

import logging
from functools import lru_cache


@lru_cache(maxsize=1024)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log `message`, unless this process said so before."""
    log.warning("%s", message)

"""Holding finished work while the server cannot take it: the commit is sent again, never recomputed, never dropped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from embedq_broker import metrics
from embedq_broker.connect import translate
from embedq_schemas.errors import BrokerOutOfMemoryError, BrokerUnavailableError
from redis.exceptions import RedisError

T = TypeVar("T")
log = logging.getLogger(__name__)


def passes(failure: Exception) -> bool:
    """Whether a BrokerError may end by itself: a lost connection, a failover, a full disk or memory of the server."""
    return isinstance(failure, BrokerUnavailableError | BrokerOutOfMemoryError)


def until_accepted(send: Callable[[], T], *, url: str, give_up: Callable[[], bool], first_s: float = 0.05) -> T:
    """Call `send` until the server answers it.

    `send` must be idempotent. A lost connection and a full server are waited out with backoff, up to one second
    between tries; other answers of the server are errors of ours and are raised.

    Args:
        send: one attempt.
        url: for the message.
        give_up: asked after each failure; True raises the failure as a BrokerError.
    """
    attempt = 0
    while True:
        try:
            return send()
        except (RedisError, BrokerUnavailableError) as error:
            failure = translate(error, url) if isinstance(error, RedisError) else error
            if not passes(failure) or give_up():
                raise failure from error
            if attempt == 0:
                log.warning("holding finished work: %s", failure)
            time.sleep(min(first_s * 2 ** min(attempt, 10), 1.0))
            attempt += 1
            metrics.retries.inc()

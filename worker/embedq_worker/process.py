"""Entry point of a worker's child processes: `python -m embedq_worker.process`.

The first line on standard input is the configuration (JSON); standard input then stays open for as long as the
supervisor lives, so its end means that the supervisor is gone. Standard output carries one JSON line per event.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from embedq_broker.connect import connect, translate
from embedq_schemas.errors import EmbedqError
from redis.exceptions import RedisError

from embedq_worker.settings import ProcessConfig


def main() -> int:
    config = ProcessConfig.model_validate_json(sys.stdin.readline())
    logging.basicConfig(
        level=config.log_level, stream=sys.stderr, format=f"%(asctime)s {config.consumer} %(levelname)s %(message)s"
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Ctrl-C reaches the whole foreground group; the supervisor decides and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch_supervisor, args=(stop, config), daemon=True).start()
    try:
        if config.role == "tokenizer":
            from embedq_worker.tokenizer_process import run_tokenizer as run
        else:
            from embedq_worker.embedder_process import run_embedder as run
        run(config, stop, lambda: _say({"event": "ready"}))
    except EmbedqError as error:
        return _fail(error.code, str(error), error.exit_code)
    except RedisError as error:
        broker_error = translate(error, config.broker.redis_url)
        return _fail(broker_error.code, str(broker_error), broker_error.exit_code)
    return 0


def _watch_supervisor(stop: threading.Event, config: ProcessConfig) -> None:
    """Drain when the supervisor is gone, and end in any case once the grace period is over.

    Without a server there is nothing to drain to: an embedded one ends with the supervisor.
    """
    try:
        while sys.stdin.read(4096):
            pass
    except (OSError, ValueError):
        pass
    stop.set()
    deadline = time.monotonic() + config.worker.grace_s + 5
    unreachable = 0
    while time.monotonic() < deadline and unreachable < 3:
        time.sleep(0.5)
        try:
            connect(config.broker.redis_url, role="watch", blocking=True, socket_timeout_s=5.0).ping()
            unreachable = 0
        except RedisError:
            unreachable += 1
    os._exit(1)


def _say(event: dict[str, Any]) -> None:
    try:
        print(json.dumps(event), flush=True)
    except (BrokenPipeError, OSError):
        # The supervisor is gone; its end is noticed on standard input.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _fail(code: str, message: str, exit_code: int) -> int:
    _say({"event": "failed", "code": code, "message": message, "exit_code": exit_code})
    logging.getLogger(__name__).error("%s", message)
    return exit_code


if __name__ == "__main__":
    # Threads that hang in a device call must not keep a failed process alive.
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)

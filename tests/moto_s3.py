"""Moto's S3 server as a program, where it differs from S3 put right: `python moto_s3.py PORT`.

- Moto answers 500 to a part or a completion of an upload that is not there; S3 answers NoSuchUpload, also to a second
  completion once some time has passed, which is the harder case for a client.
- Moto looks whether an object exists before it takes its content, so that two conditional writes may both win; S3 lets
  one through. Here one request is answered after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import MultipartDict, S3Backend
from werkzeug.serving import run_simple


def _missing(self: MultipartDict, upload: str) -> Any:
    raise NoSuchUpload(upload_id=upload)


MultipartDict.__missing__ = _missing  # type: ignore[attr-defined]
_complete = S3Backend.complete_multipart_upload


def _completed_once(self: S3Backend, *arguments: Any, **named: Any) -> Any:
    key = _complete(self, *arguments, **named)
    if key is not None:
        key.multipart = None
    return key


S3Backend.complete_multipart_upload = _completed_once  # type: ignore[method-assign]


class OneAtATime:
    """Moto's application, entered by one thread at a time."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._lock:
            return list(self._moto(environ, start_response))


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), OneAtATime(), threaded=True)

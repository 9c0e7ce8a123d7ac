"""As much of S3's HTTP interface as reading needs: listing (version 2), HEAD, and GET with ranges."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import md5
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "Thu, 29 Feb 2024 12:00:00 GMT"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Mapping[str, bytes]
    """By `<bucket>/<key>`."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), {name: values[0] for name, values in parse_qs(url.query).items()}
        if "/" not in path:
            self._list(path, query)
        elif path not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            body = self.objects[path]
            first, last = 0, len(body) - 1
            if wanted := self.headers.get("Range"):
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                first, last = int(low), min(int(high or last), last)
            self._answer(206 if wanted else 200, body[first : last + 1], f"bytes {first}-{last}/{len(body)}")

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys: list[str] = []
        folders: set[str] = set()
        for name in sorted(self.objects):
            key = name.removeprefix(bucket + "/")
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-02-29T12:00:00.000Z</LastModified>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
        )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        count = len(keys) + len(folders)
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated><KeyCount>{count}</KeyCount>"
        self._answer(200, f"{text}{contents}{prefixes}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", _DATE)
        self.send_header("ETag", f'"{md5(body, usedforsecurity=False).hexdigest()}"')
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def object_store(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Serve `objects`, by `<bucket>/<key>`, at the URL that is given."""
    handler = type("Handler", (_Handler,), {"objects": objects})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()

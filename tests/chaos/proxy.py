"""A TCP proxy that mistreats a connection: it drops a reply, delays, cuts, half-closes, or moves to another server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections on a port of its own to `target`. Mistreatment applies to every connection."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._lose: list[bytes] = []
        self.lost = 0
        self.delay_s = 0.0
        self._refusing = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refusing = True
        self._listener.close()
        self.cut()

    def lose_reply(self, *requests: bytes) -> None:
        """Deliver the next request that contains each of `requests`, then cut the connection before its reply."""
        with self._lock:
            self._lose += requests

    def cut(self) -> int:
        """Reset every connection; returns how many."""
        with self._lock:
            pairs = list(self._pairs)
        for client, server in pairs:
            for end in (client, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        return len(pairs)

    def half_close(self) -> None:
        """End the direction from the server to the clients only."""
        with self._lock:
            pairs = list(self._pairs)
        for client, _ in pairs:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_WR)

    def refuse(self, refusing: bool) -> None:
        """Accept connections and close them at once, as while a failover goes on."""
        self._refusing = refusing
        if refusing:
            self.cut()

    def move(self, target_port: int) -> None:
        """Forward to another server from now on; what is connected is cut."""
        self.target_port = target_port
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
            swallow = threading.Event()
            threading.Thread(target=self._pump, args=(client, server, pair, swallow, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, pair, swallow, False), daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        swallow: threading.Event,
        upward: bool,
    ) -> None:
        tail = b""
        try:
            while data := source.recv(1 << 16):
                if self.delay_s:
                    time.sleep(self.delay_s)
                if upward:
                    if self._matches(tail + data):
                        swallow.set()
                    tail = data[-64:]
                elif swallow.is_set():
                    # The server has answered, so it has done what it was asked; nobody will hear of it.
                    self.lost += 1
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs.discard(pair)
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _matches(self, data: bytes) -> bool:
        with self._lock:
            for request in self._lose:
                if request in data:
                    self._lose.remove(request)
                    return True
        return False

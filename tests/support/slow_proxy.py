"""An HTTP proxy before a storage server: latency, bandwidth, and faults on chosen requests.

It runs in a thread of the test, forwards each request to one upstream and records it.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Fault = Literal["reset", "503", "403", "expired", "cut", "hang"]
"""What happens to a request: the connection is reset before the response, a response of this
status, or of S3 to expired credentials, a connection that ends in the middle of the content, no
response."""

STATUSES = {
    "503": ("503 Slow Down", ""),
    "403": ("403 Forbidden", ""),
    "expired": ("400 Bad Request", "<Error><Code>ExpiredToken</Code></Error>"),
}

CHUNK = 2**16


class Seen(NamedTuple):
    """A request as the proxy saw it."""

    method: str
    path: str
    range: str | None
    """The header Range, such as bytes=0-99."""


@dataclass
class Proxy:
    """Settings of a running proxy and its record; settings may change while it runs."""

    upstream: tuple[str, int]
    latency: float = 0.0
    """Seconds between a request and its response."""

    bandwidth: float = 0.0
    """Bytes per second of each connection; 0: unlimited."""

    fault: Callable[[Seen], Fault | None] = lambda _: None
    """Returns the fault of a request."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def ranges(self) -> list[tuple[str, str]]:
        """The path and the range of each request for a part of an object."""
        return [(one.path, one.range) for one in self.seen if one.range is not None]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the requests of one connection until either side closes it."""
        up: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while head := await _head(reader):
                # A server closes connections that were not used for a minute.
                if up is None or up[0].at_eof():
                    up = await asyncio.open_connection(*self.upstream)
                seen = _seen(head)
                self.seen.append(seen)
                body = await reader.readexactly(_length(head))
                await asyncio.sleep(self.latency)
                fault = self.fault(seen)
                if fault is not None:
                    self.faults[fault] += 1
                if fault == "reset":
                    break
                if fault == "hang":
                    await asyncio.sleep(3600)
                if fault in STATUSES:
                    status, text = STATUSES[fault]
                    header = f"Content-Length: {len(text)}"
                    writer.write(f"HTTP/1.1 {status}\r\n{header}\r\n\r\n{text}".encode())
                    await writer.drain()
                    continue
                up[1].write(head + body)
                response = await _head(up[0])
                if not response:  # the server has closed the connection: the client asks again
                    break
                length = 0 if seen.method == "HEAD" else _length(response)
                writer.write(response)
                await self._copy(up[0], writer, length // 2 if fault == "cut" else length)
                if fault == "cut":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            for stream in [writer, *([up[1]] if up else [])]:
                with suppress(ConnectionError):
                    stream.close()

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, length: int
    ) -> None:
        while length:
            chunk = await source.read(min(length, CHUNK))
            if not chunk:
                raise ConnectionResetError
            target.write(chunk)
            await target.drain()
            length -= len(chunk)
            if self.bandwidth:
                await asyncio.sleep(len(chunk) / self.bandwidth)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Read the head of a request or response; empty at the end of the connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def _length(head: bytes) -> int:
    return int(_headers(head).get("content-length", "0"))


def _seen(head: bytes) -> Seen:
    method, path, _ = head.decode("latin-1").split("\r\n")[0].split(" ")
    return Seen(method, path, _headers(head).get("range"))


@contextmanager
def proxied(upstream: tuple[str, int], *, latency: float = 0.0) -> Iterator[Proxy]:
    """Run a proxy before `upstream` on a free port of this machine."""
    proxy = Proxy(upstream, latency=latency)
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=2**20)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        with suppress(asyncio.CancelledError):
            await server.serve_forever()

    task = loop.create_task(main())

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(task)
        rest = asyncio.all_tasks(loop)
        for one in rest:
            one.cancel()
        loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=work, name="proxy", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()

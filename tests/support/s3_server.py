"""The part of S3's protocol that a data set needs, in a thread of the test.

Objects are in memory. Lists have pages, uploads may have parts, and ranges and If-Match are
answered as S3's documentation of GetObject, ListObjectsV2 and CompleteMultipartUpload says. What is
answered is the server's; the client of the tests is obstore.
"""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest
from slow_proxy import Proxy, proxied

from largebatch import storage
from largebatch.bucket import open_bucket

PAGE = 3  # keys in a page of a list: S3 has 1,000
DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


@dataclass
class Storage:
    """The content of a server."""

    bucket: str
    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def environment(self, port: int = 0) -> dict[str, str]:
        """Return the variables with which a client finds the server, or a proxy on `port`."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": "testing-key",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_REGION": "us-east-1",
        }


def etag(content: bytes) -> str:
    """Return the ETag of an object."""
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    storage: Storage

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    @property
    def query(self) -> dict[str, str]:
        pairs = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        return {name: values[0] for name, values in pairs.items()}

    def key(self) -> str | None:
        """Return the key of the request, empty for the bucket; answer 404 to another bucket."""
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket == self.storage.bucket:
            return key
        self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        return None

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        fields = {"Content-Length": str(len(content)), "Last-Modified": DATE}
        for name, value in {**fields, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self) -> None:
        key = self.key()
        if key is None:
            return
        if not key:
            self.list()
            return
        content = self.storage.objects.get(key)
        if content is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("If-Match", etag(content)) != etag(content):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            span = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], ETag=etag(content), Content_Range=span)
        elif self.command == "HEAD":
            self.answer(200, Content_Length=str(len(content)), ETag=etag(content))
        else:
            self.answer(200, content, ETag=etag(content))

    do_HEAD = do_GET  # noqa: N815 -- the library's name

    def list(self) -> None:
        prefix = self.query.get("prefix", "")
        after = self.query.get("continuation-token", "")
        keys = sorted(k for k in self.storage.objects if k.startswith(prefix) and k > after)
        size = min(PAGE, int(self.query.get("max-keys", PAGE)))
        page = keys[:size]
        more = len(keys) > size
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z"
            f"</LastModified><ETag>{escape(etag(self.storage.objects[key]))}</ETag>"
            f"<Size>{len(self.storage.objects[key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
            "</ListBucketResult>"
        )
        self.answer(200, text.encode(), Content_Type="application/xml")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def do_PUT(self) -> None:
        key, content, query = self.key(), self.body(), self.query
        if key is None:
            return
        if "uploadId" in query:
            self.storage.parts[query["uploadId"]][int(query["partNumber"])] = content
        else:
            self.storage.objects[key] = content
        self.answer(200, ETag=etag(content))

    def do_POST(self) -> None:
        key, body, query = self.key(), self.body(), self.query
        if key is None:
            return
        if "delete" in query:
            removed = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for written in removed:
                self.storage.objects.pop(unescape(written), None)
            rows = "".join(f"<Deleted><Key>{written}</Key></Deleted>" for written in removed)
            self.answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
            return
        if "uploads" in query:
            identity = str(len(self.storage.parts))
            self.storage.parts[identity] = {}
            text = f"<R><Bucket>b</Bucket><Key>k</Key><UploadId>{identity}</UploadId></R>"
            self.answer(200, text.encode())
            return
        parts = self.storage.parts[query["uploadId"]]
        content = b"".join(parts[number] for number in sorted(parts))
        self.storage.objects[key] = content
        self.answer(200, f"<R><ETag>{escape(etag(content))}</ETag></R>".encode())

    def do_DELETE(self) -> None:
        key = self.key()
        if key is not None:
            self.storage.objects.pop(key, None)
            self.answer(204)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Print nothing: clients close connections when they end."""


@contextmanager
def serving(bucket: str = "photos") -> Iterator[Storage]:
    """Run a server with one empty bucket on a free port of this machine."""
    content = Storage(bucket)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"storage": content}))
    content.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield content
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Storage, Proxy]]:
    """Run an empty bucket behind a proxy, and set what a client needs to find it."""
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.03))
    with serving() as objects, proxied(("127.0.0.1", objects.port)) as proxy:
        for name, value in objects.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        open_bucket.cache_clear()
        yield objects, proxy
        open_bucket.cache_clear()


def upload(folder: Path, objects: Storage, *, to: str) -> None:
    """Copy the visible files of a folder into a bucket, without its index."""
    for path in folder.rglob("[!.]*"):
        if path.is_file():
            objects.objects[f"{to}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()

"""A W&B server that keeps one run in memory: as much as the library's own upload asks for."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Server(ThreadingHTTPServer):
    """Its run: rows of history by their line, summary, what the run was given, alerts, files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.alerts: list[tuple[str, ...]] = []
        self.files: dict[str, bytes] = {}
        """Content of the files of artifacts and of the run, by name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer a query of GraphQL."""
        where = {"name": "p", "entity": {"name": "me"}}
        if name == "NotifyScriptableRunAlert":
            self.alerts.append((given["severity"], given["title"], given["text"]))
        if name == "CreateArtifact":
            self.run["artifact"] = given["input"]["artifactTypeName"]
        if name == "UpsertBucket":
            self.run |= {key: value for key, value in given.items() if value is not None}
            bucket = {"id": "run", "name": given["name"], "displayName": "", "project": where}
            return {"upsertBucket": {"bucket": bucket, "inserted": not self.rows}}
        if name == "RunResumeStatus":
            tail = [json.dumps(self.rows[max(self.rows)])] if self.rows else []
            bucket = {
                "id": "run", "name": given["name"], "displayName": "", "config": "{}",
                "summaryMetrics": json.dumps(self.summary), "tags": [], "wandbConfig": '{"t": 1}',
                "historyLineCount": len(self.rows), "historyTail": json.dumps(tail),
                "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0,
            }  # fmt: skip
            return {"model": {**where, "bucket": bucket if self.rows else None}}
        if name == "CreateRunFiles":
            files = [self._file(each) for each in given["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        artifact = {"id": "artifact", "state": "PENDING", "artifactSequence": {"id": "sequence"}}
        names = [each["name"] for each in given.get("input", {}).get("artifactFiles", [])]
        files = [{**self._file(each), "artifact": artifact} for each in names]
        of_artifacts = {
            "artifact": artifact,
            "artifactManifest": {"id": "manifest", "file": self._file("manifest")},
            "files": {"edges": [{"node": file} for file in files]},
        }
        return {name[:1].lower() + name[1:]: of_artifacts}

    def _file(self, name: str) -> dict[str, Any]:
        return {"name": name, "uploadUrl": f"{self.url}/{name}", "uploadHeaders": []}


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        content = self._read()
        body = {} if self.path.endswith("metrics") else json.loads(content)
        if "query" in body:
            found = re.search(r"(?:query|mutation)\s+(\w+)", body["query"])
            data = self.server.answer(found[1] if found else "", body.get("variables") or {})
            self._send({"data": data})
            return
        for name, file in (body.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                lines = map(json.loads, file["content"])
                self.server.rows |= dict(enumerate(lines, start=file["offset"]))
            elif name == "wandb-summary.json":
                self.server.summary = json.loads(file["content"][-1])
        self._send({})

    def do_PUT(self) -> None:
        self.server.files[self.path.strip("/")] = self._read()
        self._send({})

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server until the block ends."""
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()

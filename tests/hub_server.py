"""A hub of our own: the part of the Hugging Face hub's API that its client calls for downloads."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name, as folders.

    Attributes:
        gated: repositories that no one has access to.
        cuts: by file, numbers of bytes after which the next answers break off.
        sent: bytes sent of each file; ranges: those that were asked for.
        tells: sizes that the API reports instead of the real ones.
    """

    folders: dict[str, Path]
    address: str = ""
    gated: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    tells: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def serve_hub(folders: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(folders)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = match[1] if match else ""
        if repo not in self.hub.folders:
            return self._refuse(401 if api else 404, "RepoNotFound", "Repository not found")
        if repo in self.hub.gated and not (api and api[2] is None):
            return self._refuse(403, "GatedRepo", f"Access to model {repo} is restricted")
        folder = self.hub.folders[repo]
        if ((api and api[3]) or (file and file[2]) or "main") not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if api:
            return self._json(self._tree(folder) if api[2] == "tree" else self._info(repo, folder))
        assert file
        if not (folder / file[3]).is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(folder / file[3], body)

    def _info(self, repo: str, folder: Path) -> Any:
        siblings = [
            {"rfilename": str(file.relative_to(folder)), "size": self._size(file), "blobId": _etag(file)}
            for file in _files(folder)
        ]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}

    def _tree(self, folder: Path) -> Any:
        return [
            {
                "type": "file",
                "path": str(file.relative_to(folder)),
                "size": file.stat().st_size,
                "oid": _etag(file),
            }
            for file in _files(folder)
        ]

    def _size(self, file: Path) -> int:
        return self.hub.tells.get(file.name, file.stat().st_size)

    def _file(self, file: Path, body: bool) -> None:
        data = file.read_bytes()
        asked, begin, end = self.headers.get("Range"), 0, len(data)
        if body and asked:
            self.hub.ranges.append((file.name, asked))
            [first, last] = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(data)) if last else len(data)
        self.send_response(206 if body and asked else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        if body and asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        cuts = self.hub.cuts.get(file.name)
        part = data[begin:end][: cuts.pop(0)] if cuts else data[begin:end]
        self.hub.sent[file.name] += len(part)
        self.wfile.write(part)
        self.close_connection = len(part) < end - begin

    def _refuse(self, code: int, error: str, message: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", error)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()

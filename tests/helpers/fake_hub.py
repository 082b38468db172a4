"""A Hugging Face Hub on localhost with one model in it, for tests of how the real one is talked to."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves `folder` as `owner/tiny`; `owner/gated` is gated, all else is not found. `requests` is what was asked.

    commits: folders of other revisions of `owner/tiny`, whose name is their commit.
    """

    folder: Path
    url: str = ""
    requests: list[str] = field(default_factory=list)
    commits: dict[str, Path] = field(default_factory=dict)

    def folder_of(self, commit: str) -> Path:
        """Where the files of a commit lie."""
        return self.commits.get(commit, self.folder)


@contextmanager
def serve(folder: Path, commits: dict[str, Path] | None = None) -> Iterator[FakeHub]:
    """Serve a model folder, and those of other commits, until the block ends."""
    hub = FakeHub(folder, commits=commits or {})
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if path.startswith("/api/models/owner/gated"):  # its description is public, its files are not
            self._json({"id": "owner/gated", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}, path)
        elif path.startswith("/owner/gated/resolve/"):
            self._refuse(403, "GatedRepo")
        elif path.startswith("/api/models/owner/tiny/revision/absent"):
            self._refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/owner/tiny"):
            commit = next((one for one in hub.commits if one in path.split("/")), COMMIT)
            names = sorted(file.name for file in hub.folder_of(commit).iterdir())
            description = {"id": "owner/tiny", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self._json(description, path)
        elif (parts := path.split("/"))[:4] == ["", "owner", "tiny", "resolve"] and parts[4] in (
            COMMIT,
            *hub.commits,
        ):
            self._file(hub.folder_of(parts[4]) / parts[-1], parts[4])
        else:
            self._refuse(404 if path.startswith("/api/models/owner/") else 401, "RepoNotFound")

    def _json(self, description: dict[str, object], path: str) -> None:
        if "/tree/" in path:
            names = [entry["rfilename"] for entry in description["siblings"]]  # type: ignore[attr-defined, index]
            body: object = [
                {"type": "file", "path": name, "oid": "0" * 40, "size": (self.server.hub.folder / name).stat().st_size}
                if (self.server.hub.folder / name).is_file()
                else {"type": "file", "path": name, "oid": "0" * 40, "size": 1}
                for name in names
            ]
        else:
            body = description
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content = file.read_bytes()
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

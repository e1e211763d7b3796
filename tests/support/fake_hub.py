"""A small Hugging Face Hub, which a thread of this process serves from memory.

The server supports the requests of ``huggingface_hub`` 2.x without Xet: repository creation,
pre-upload, Git LFS (basic and multipart), commits, revisions, trees and downloads. It redirects LFS
downloads to another host name, like the real Hub redirects them to its CDN. ``hub.fail(...)``
injects faults: errors, delays and closed connections.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.hub_routes import ROUTES
from tests.support.hub_store import Blob, Commit, HubError, Repo, is_lfs


@dataclass
class Fault:
    """A fault that the server produces for the next ``times`` matching requests.

    Attributes:
        method: The HTTP method of the requests.
        path: A regular expression that matches a part of their path.
        times: Number of requests with the fault.
        action: One of these faults:

            - "status": respond with ``status`` and ``headers``.
            - "drop": close the connection before the response.
            - "cut": close the connection in the middle of the request or response body.
            - "lost": process the request, then close the connection without a response.
            - "delay": wait ``seconds``, then respond normally.
            - "hold": wait for ``hub.release``, then respond normally.
            - "hang": send nothing until ``hub.release``, then close the connection.
            - "drip": like "hang", but send a byte every ``seconds``.
            - "slow": read the request in pieces of 100 kB with pauses of ``seconds``.
        met: Set when the fault occurs.
        pieces: Number of pieces that "slow" has read.
    """

    method: str
    path: str
    times: int = 1
    action: str = "status"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    error: str = "injected fault"
    seconds: float = 0.0
    met: threading.Event = field(default_factory=threading.Event)
    pieces: int = 0


class FakeHub:
    """The server, which runs while its context is active.

    ``url`` is the address of the server, for HF_ENDPOINT.
    """

    def __init__(self, multipart_over: int = 20_000_000, part_size: int = 6_000_000) -> None:
        self.multipart_over, self.part_size = multipart_over, part_size
        self.tokens = {"hf_test": "user"}
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock, self.release = threading.RLock(), threading.Event()
        hub = self

        class Bound(Handler):
            pass

        Bound.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.cdn = f"http://localhost:{self.port}"  # another host name, like the real CDN

    def __enter__(self) -> FakeHub:
        poll = {"poll_interval": 0.01}
        threading.Thread(target=self.server.serve_forever, kwargs=poll, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, path: str, **how: object) -> Fault:
        """Adds a fault for requests whose path matches the regular expression ``path``."""
        fault = Fault(method, path, **how)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.requests.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    fault.met.set()
                    return fault
        return None

    def create(self, repo_id: str, kind: str = "models", private: bool = False) -> Repo:
        repo = self.repos[kind, repo_id] = Repo(repo_id, private)
        repo.commit("main", "initial commit", {})
        return repo

    def seed(self, repo_id: str, folder: str | Path, **create: object) -> Repo:
        """Creates a repository with the files of ``folder``."""
        repo, root = self.create(repo_id, **create), Path(folder)  # type: ignore[arg-type]
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        files = {
            path.relative_to(root).as_posix(): Blob(path.read_bytes(), is_lfs(path.name, 0))
            for path in paths
        }
        repo.commit("main", "seed", files)
        return repo

    def repo(self, repo_id: str, kind: str = "models") -> Repo:
        return self.repos[kind, repo_id]


def _coded(headers: dict[str, str], code: str | None) -> dict[str, str]:
    return {**headers, "X-Error-Code": code} if code else headers


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_any(self) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        fault = self.hub.fault_for(self.command, parts.path)
        self.cut = fault is not None and fault.action == "cut"
        if fault and fault.action == "delay":
            time.sleep(fault.seconds)
        if fault and fault.action == "hold":
            self.hub.release.wait()
        if fault and fault.action in ("hang", "drip"):
            return self.hang(fault.seconds if fault.action == "drip" else None)
        if fault and fault.action == "drop":
            return self.hang_up()
        length = int(self.headers.get("Content-Length") or 0)
        if self.cut and length:
            self.rfile.read(length // 2)
            return self.hang_up()
        if fault and fault.action == "slow":
            self.body = self.read_slowly(length, fault)
        else:
            self.body = self.read_chunks() if self.chunked else self.rfile.read(length)
        try:
            if fault and fault.action == "status":
                return self.send({"error": fault.error}, fault.status, fault.headers)
            answer = self.dispatch(parts.path)
            if fault and fault.action == "lost":
                return self.hang_up()
            self.send(*answer)
        except HubError as error:
            headers = {"X-Error-Message": str(error)}
            self.send({"error": str(error)}, error.status, _coded(headers, error.code))

    do_GET = do_HEAD = do_POST = do_PUT = do_any

    @property
    def chunked(self) -> bool:
        return self.headers.get("Transfer-Encoding") == "chunked"

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def read_slowly(self, length: int, fault: Fault) -> bytes:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
        body = b""
        while len(body) < length and not self.hub.release.wait(fault.seconds):
            body += self.rfile.read(min(100_000, length - len(body)))
            fault.pieces += 1
        return body

    def hang(self, seconds: float | None) -> None:
        self.close_connection = True
        try:
            while not self.hub.release.wait(seconds):
                self.wfile.write(b"H")
        except OSError:  # the client closed the connection
            pass

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def dispatch(self, path: str) -> tuple:
        for method, pattern, function in ROUTES:
            if method == self.command.replace("HEAD", "GET") and (m := re.fullmatch(pattern, path)):
                with self.hub.lock:
                    return function(self, **{k: unquote(v or "") for k, v in m.groupdict().items()})
        raise HubError(404, f"no route for {self.command} {path}")

    def send(
        self, answer: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[: len(data) // 2] if self.cut else data)
        if self.cut:
            self.hang_up()

    def json(self) -> dict:
        return json.loads(self.body)

    def user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def repo(self, kind: str, id: str, write: bool = False) -> Repo:
        user, repo = self.user(), self.hub.repos.get((kind or "models", id))
        if repo is None or (repo.private and user is None):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and user is None:
            raise HubError(401, "Invalid username or password.")
        return repo

    def commit_at(self, repo: Repo, revision: str) -> Commit:
        if commit := repo.at(revision or "main"):
            return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

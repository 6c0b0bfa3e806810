"""A server with the part of the Hugging Face hub's HTTP API that loading a repository needs."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def commit_of(repository: str, branch: str) -> str:
    return hashlib.sha1(f"{repository} {branch}".encode()).hexdigest()


@dataclass
class LocalHub:
    """folders: by repository ("models/OWNER/NAME", "datasets/OWNER/NAME") and branch. gated: refused repositories."""

    folders: Mapping[str, Mapping[str, Path]]
    gated: frozenset[str] = frozenset()
    url: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    def found(self, repository: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the folder of a branch or a commit."""
        for branch, folder in self.folders[repository].items():
            commit = commit_of(repository, branch)
            if revision in (branch, commit):
                return commit, folder
        return None


class _Answers(BaseHTTPRequestHandler):
    hub: LocalHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        self.hub.asked.append(self.path)
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        path = self.path.partition("?")[0].replace("%2F", "/").strip("/")
        api = path.startswith("api/")
        words = path.removeprefix("api/").split("/")
        if not api and words[0] != "datasets":
            words.insert(0, "models")
        repository, rest = "/".join(words[:3]), words[3:]
        if repository in self.hub.gated:
            self._refuse(HTTPStatus.FORBIDDEN, "GatedRepo")
        elif repository not in self.hub.folders:
            self._refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")
        elif api:
            self._send_facts(repository, rest)
        else:
            self._send_file(repository, rest[1:])

    def _send_facts(self, repository: str, rest: list[str]) -> None:
        kind, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        found = self.hub.found(repository, revision)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            return
        commit, folder = found
        files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
        names = [str(each.relative_to(folder)) for each in files]
        if kind == "tree":
            answer: object = [
                {"type": "file", "path": name, "size": each.stat().st_size, "oid": _etag(each)}
                for name, each in zip(names, files, strict=True)
            ]
        else:
            siblings = [{"rfilename": name} for name in names]
            name = repository.partition("/")[2]
            facts: dict[str, object] = {"_id": "0", "id": name, "modelId": name, "sha": commit}
            answer = {**facts, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repository: str, rest: list[str]) -> None:
        for cut in range(1, len(rest)):
            found = self.hub.found(repository, "/".join(rest[:cut]))
            if found is not None:
                commit, path = found[0], found[1].joinpath(*rest[cut:])
                self._send(path.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{_etag(path)}"'})
                return
        self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code}, status)

    def _send(
        self, data: bytes, headers: Mapping[str, str], status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def local_hub(hub: LocalHub) -> Iterator[LocalHub]:
    """Answers at `hub.url` while the block runs."""
    answers = type("_AnswersOfOne", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()

"""A Hugging Face Hub on the loopback address, for tests: serves local directories to huggingface_hub.

It speaks what ``snapshot_download`` and ``hf_hub_download`` of huggingface_hub 1.33 ask for (hf_api.py ``model_info``
and ``list_repo_tree``, file_download.py ``get_hf_file_metadata`` and ``http_get``, utils/_http.py
``hf_raise_for_status``): model info and file tree at a revision, HEAD and GET of files with Range, and error codes in
``X-Error-Code``.

    with serve_hub({"org/tiny": {"main": snapshot_dir}}) as hub:
        ... HF_ENDPOINT=hub.endpoint ...
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_LARGE = (".safetensors", ".bin", ".model", ".pth", ".gguf")  # what the hub keeps in git-lfs, with a SHA-256 as ETag


@dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes
    oid: str  # what git would call it
    sha256: str | None  # of a large file


@dataclass(frozen=True, slots=True)
class _Snapshot:
    commit: str
    files: dict[str, _Blob]


@dataclass(slots=True)
class Hub:
    """A running server.

    Attributes:
        endpoint: Its URL, for ``HF_ENDPOINT``.
        requests: Method and path of every request so far, in order of arrival.
        cut_after: If set, a file's body is cut after this many bytes, as by a connection that breaks.
    """

    endpoint: str
    requests: list[str] = field(default_factory=list)
    cut_after: int | None = None
    _repos: dict[str, dict[str, _Snapshot]] = field(default_factory=dict)
    _gated: frozenset[str] = frozenset()

    def commit(self, repo: str, revision: str = "main") -> str:
        """The commit that a revision names."""
        return self._repos[repo][revision].commit


@contextmanager
def serve_hub(repos: Mapping[str, Mapping[str, Path]], *, gated: Collection[str] = ()) -> Iterator[Hub]:
    """Serves models on 127.0.0.1 until the block is left.

    Args:
        repos: ``org/name`` -> revision -> directory with its files; files are read once, here.
        gated: Repositories whose files may not be fetched.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    hub._repos = {repo: {rev: _read(path) for rev, path in revs.items()} for repo, revs in repos.items()}
    hub._gated = frozenset(gated)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(folder: Path) -> _Snapshot:
    """Reads a directory as a commit whose id depends on its content alone."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest() if path.name.endswith(_LARGE) else None
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        files[path.relative_to(folder).as_posix()] = _Blob(data, oid, sha256)
    listing = "".join(f"{blob.oid} {name}\n" for name, blob in files.items())
    return _Snapshot(hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest(), files)


class _RefusedError(Exception):
    """An answer that is an error: the status, and the code that huggingface_hub tells errors apart by."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    """One request per connection (HTTP/1.0), so that closing the server leaves no thread behind."""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *args: object) -> None:
        """Keeps stderr clean; ``Hub.requests`` has it all."""

    @property
    def _hub(self) -> Hub:
        hub = self.server.hub  # type: ignore[attr-defined]
        assert isinstance(hub, Hub)
        return hub

    def _answer(self, *, body: bool) -> None:
        self._hub.requests.append(f"{self.command} {self.path}")
        path = urlsplit(self.path).path
        try:
            if match := _TREE.fullmatch(path):
                self._send_json(_tree(self._snapshot(match)), body=body)
            elif match := _INFO.fullmatch(path):
                self._send_json(self._info(match), body=body)
            elif match := _FILE.fullmatch(path):
                self._send_file(match, body=body)
            else:
                raise _RefusedError(404, "EntryNotFound")
        except _RefusedError as error:
            self._send(error.status, {"X-Error-Code": error.code, "X-Error-Message": error.code}, b"", body=body)

    def _snapshot(self, match: re.Match[str]) -> _Snapshot:
        revisions = self._hub._repos.get(match["repo"])
        if revisions is None:
            raise _RefusedError(404, "RepoNotFound")
        wanted = unquote(match["revision"] or "main")
        by_commit = {snapshot.commit: snapshot for snapshot in revisions.values()}
        found = revisions.get(wanted) or by_commit.get(wanted)
        if found is None:
            raise _RefusedError(404, "RevisionNotFound")
        return found

    def _info(self, match: re.Match[str]) -> dict[str, object]:
        snapshot = self._snapshot(match)
        repo, files = match["repo"], [{"rfilename": name} for name in snapshot.files]
        gated = "manual" if repo in self._hub._gated else False
        return {"_id": repo, "id": repo, "modelId": repo, "sha": snapshot.commit, "gated": gated, "siblings": files}

    def _send_file(self, match: re.Match[str], *, body: bool) -> None:
        snapshot = self._snapshot(match)
        if match["repo"] in self._hub._gated:
            raise _RefusedError(403, "GatedRepo")
        blob = snapshot.files.get(unquote(match["file"]))
        if blob is None:
            raise _RefusedError(404, "EntryNotFound")
        size, status, data = len(blob.data), 200, blob.data
        headers = {"X-Repo-Commit": snapshot.commit, "ETag": f'"{blob.sha256 or blob.oid}"', "Accept-Ranges": "bytes"}
        if blob.sha256:
            headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{blob.sha256}"'}
        if wanted := _RANGE.fullmatch(self.headers.get("Range", "")):
            begin, end = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
            status, data = 206, blob.data[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
        self._send(status, headers, data, body=body)

    def _send_json(self, value: object, *, body: bool) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode(), body=body)

    def _send(self, status: int, headers: dict[str, str], data: bytes, *, body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        cut = self._hub.cut_after if "X-Repo-Commit" in headers else None
        if body:
            self.wfile.write(data[:cut])


def _tree(snapshot: _Snapshot) -> list[dict[str, object]]:
    """Files as ``list_repo_tree(recursive=True)`` lists them; folders are left out, as nothing here needs them."""
    out: list[dict[str, object]] = []
    for name, blob in snapshot.files.items():
        size = len(blob.data)
        item: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": blob.oid}
        if blob.sha256:
            item["lfs"] = {"oid": blob.sha256, "size": size, "pointerSize": 134}
        out.append(item)
    return out

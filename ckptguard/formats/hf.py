"""Hugging Face snapshots: safetensors files with a ``config.json`` beside them.

Source: transformers/modeling_utils.py ``_get_resolved_checkpoint_files`` (5.12) for which file is taken,
huggingface_hub/file_download.py (1.33) for the cache layout ``models--org--name/{refs,blobs,snapshots/<commit>}``.
Which tensors stand where is worked out in ``hf_tables``, what the snapshot says of itself in ``hf_facts``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ckptguard.core.errors import NotFoundError, UnsupportedError
from ckptguard.core.index import FileEntry, Index
from ckptguard.core.problems import Problem
from ckptguard.core.wording import some
from ckptguard.formats import hf_facts, hf_tables
from ckptguard.formats.remote import RemoteDirectory, RemotePath, directory
from ckptguard.formats.storage import Directory

# Weights that are pickles, by the names that transformers and Meta's releases gave them. rng_state_0.pth, optimizer.pt
# and training_args.bin of a Trainer checkpoint are pickles too, but no weights.
_PICKLED = re.compile(r"(pytorch_model|adapter_model)[^/]*\.bin(\.index\.json)?|(?!rng_state)[^/]*\.pth")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPO_PREFIX = "models--"
_FOLDERS_LOOKED_INTO = 32  # for a hint where the weights are: each is a request to a store


class HuggingFace:
    """A directory with ``*.safetensors`` files, one such file, or a repository in the Hugging Face cache."""

    name = "huggingface"

    def why_not(self, path: Path) -> str | None:
        """See ``Format.why_not``. Pickled weights are accepted here, so that ``read_index`` can refuse them by name."""
        if path.is_file():
            known = path.name.endswith(hf_tables.SUFFIX) or _PICKLED.fullmatch(path.name)
            return None if known else f"a file that is not *{hf_tables.SUFFIX}"
        if not path.is_dir():
            return "not a directory"
        snapshot = _snapshot(path)
        if isinstance(snapshot, str):
            return snapshot
        names = sorted(entry.name for entry in snapshot.iterdir())
        if any(n.endswith((hf_tables.SUFFIX, hf_tables.INDEX_SUFFIX)) or _PICKLED.fullmatch(n) for n in names):
            return None
        folders = sorted(p for p in snapshot.iterdir() if p.is_dir())
        below = next((p for p in folders[:_FOLDERS_LOOKED_INTO] if _holds_weights(p)), None)
        elsewhere = f" (but some in {below.name}/: give that directory)" if below else ""
        return f"no *{hf_tables.SUFFIX}{elsewhere}"

    def open_files(self, path: Path) -> Directory:
        """See ``Format.open_files``; a repository in the cache stands for the commit that its ``main`` names."""
        if path.is_file():
            return RemoteDirectory(path.parent, only=path.name) if isinstance(path, RemotePath) else _OneFile(path)
        snapshot = _snapshot(path)
        if isinstance(snapshot, str):
            raise NotFoundError(f"{path}: {snapshot}")
        blobs = _blobs(snapshot)
        return Directory(snapshot, blobs=blobs) if blobs else directory(snapshot)

    def read_index(self, files: Directory) -> Index:
        """See ``Format.read_index``."""
        pickled = [name for name in files.listing if _PICKLED.fullmatch(name)]
        readable = [n for n in files.listing if n.endswith((hf_tables.SUFFIX, hf_tables.INDEX_SUFFIX)) and "/" not in n]
        if pickled and not readable:
            raise _pickles_only(files.root, pickled)
        tensors, problems = hf_tables.read_tables(files, alone=_alone(files))
        said, more = hf_facts.gather(files, source=_source(files.root))
        problems = [*_links(files), *problems, *more]
        if pickled:
            message = f"{some(pickled, 3)}: pickled weights beside the safetensors; they are not read"
            problems.append(Problem("note", message, file=pickled[0]))
        roles = {name: role for name in files.listing if (role := hf_facts.role_of(name))}
        roles.update(dict.fromkeys(pickled, "pickled weights, not read"))
        return Index(self.name, str(files.root), tensors, {}, files.listing, roles, said, tuple(problems))


def _alone(files: Directory) -> bool:
    """Whether one file was asked for, not a directory."""
    return isinstance(files, _OneFile) or (isinstance(files, RemoteDirectory) and files.only is not None)


class _OneFile(Directory):
    """A single file as a directory of its own, so that its neighbours are neither listed nor read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._only = path.name

    @cached_property
    def listing(self) -> Mapping[str, FileEntry]:
        """The one file."""
        path = self.root / self._only
        if not path.is_symlink():
            return {self._only: FileEntry(self._only, path.stat().st_size)}
        target = Path(os.path.realpath(path))
        # A link that the user typed is the user's own choice, and may lead anywhere; _contains must agree below.
        return {self._only: FileEntry(self._only, target.stat().st_size, str(target), True)}

    def _contains(self, real: Path) -> bool:
        return real == Path(os.path.realpath(self.root / self._only))


def _snapshot(path: Path) -> Path | str:
    """The snapshot that a directory stands for, or why it stands for none: itself, unless it is a cached repository."""
    snapshots = path / "snapshots"
    if not (path.resolve().name.startswith(_REPO_PREFIX) and snapshots.is_dir()):
        return path
    main = path / "refs" / "main"
    commit = main.read_text(errors="replace").strip()[:64] if main.is_file() else ""
    if _COMMIT.fullmatch(commit):
        chosen = snapshots / commit
        return chosen if chosen.is_dir() else f"refs/main names the commit {commit}, which is not in snapshots/"
    found = sorted(p for p in snapshots.iterdir() if p.is_dir())
    if len(found) == 1:
        return found[0]
    return f"no refs/main, and snapshots/ holds {', '.join(p.name for p in found) or 'nothing'}: give one of them"


def _holds_weights(folder: Path) -> bool:
    try:
        return any(path.name.endswith(hf_tables.SUFFIX) for path in folder.iterdir())
    except PermissionError:
        return False


def _cached_repo(snapshot: Path) -> Path | None:
    """The ``models--org--name`` directory that a snapshot belongs to, or None outside of the cache layout (or in a store)."""
    if isinstance(snapshot, RemotePath):
        return None
    where = snapshot.resolve()
    repo = where.parent.parent
    return repo if where.parent.name == "snapshots" and repo.name.startswith(_REPO_PREFIX) else None


def _blobs(snapshot: Path) -> Path | None:
    """The cache's store of file contents. A link in its place could lead anywhere, so it is not followed."""
    repo = _cached_repo(snapshot)
    blobs = repo / "blobs" if repo else None
    return blobs if blobs and blobs.is_dir() and not blobs.is_symlink() else None


def _source(root: Path) -> dict[str, object]:
    """Where a cached snapshot came from: repository, commit, and the branches and tags that name that commit."""
    repo = _cached_repo(root)
    if repo is None:
        return {}
    commit = root.resolve().name
    refs = repo / "refs"
    named = sorted(
        path.relative_to(refs).as_posix()
        for path in (refs.rglob("*") if refs.is_dir() else ())
        if path.is_file() and path.read_text(errors="replace").strip() == commit
    )
    # The cache writes "/" as "--"; a name may not hold "--" itself (huggingface_hub/utils/_validators.py).
    out: dict[str, object] = {"repository": repo.name.removeprefix(_REPO_PREFIX).replace("--", "/"), "commit": commit}
    return out | ({"revisions": ", ".join(named)} if named else {})


def _links(files: Directory) -> list[Problem]:
    """Links that leave the snapshot or lead nowhere, whatever they are for."""
    out = []
    for entry in files.listing.values():
        if not entry.inside:
            message = f"{entry.path}: a link out of the snapshot (to {entry.link_target}); it is not followed"
            out.append(Problem("escape", message, file=entry.path))
        elif entry.size_bytes < 0 and entry.link_target is not None:
            if Path(entry.link_target).is_dir():
                out.append(Problem("note", f"{entry.path}: a link to a directory is not followed", file=entry.path))
            elif not entry.path.endswith(hf_tables.SUFFIX):  # those are reported with what they should hold
                message = f"{entry.path}: a link to {entry.link_target}, where nothing is"
                out.append(Problem("missing-file", message, file=entry.path))
    return out


def _pickles_only(root: Path, pickled: list[str]) -> UnsupportedError:
    return UnsupportedError(
        f"{root}: its weights are pickles ({some(pickled, 3)}). Loading a pickle runs whatever code its maker put in it: "
        "only safetensors are read",
        next_step="Use the hub's own conversion if the repository has one (an open pull request 'Adding safetensors "
        "variant', given as org/name@refs/pr/N), or convert it in a sandbox: load it with transformers and call "
        "save_pretrained(DST, safe_serialization=True).",
    )

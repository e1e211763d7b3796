"""The contents of a fake Hub: repositories, commits and files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

LFS_SUFFIXES = (".safetensors", ".msgpack", ".bin", ".model", ".png", ".parquet")


@dataclass(frozen=True)
class Blob:
    """The content of one file of a commit."""

    data: bytes
    lfs: bool = False

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass
class Commit:
    oid: str
    title: str
    files: dict[str, Blob]
    parent: str | None


@dataclass
class Repo:
    """A repository with its commits, branches and tags."""

    id: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> Commit:
        parent = self.branches.get(branch)
        seed = f"{self.id}|{parent}|{title}|{len(self.commits)}"
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), title, files, parent)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def at(self, revision: str) -> Commit | None:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    def history(self, revision: str = "main") -> list[Commit]:
        """Returns the commits of a branch, newest first, without the empty initial commit."""
        commits, commit = [], self.at(revision)
        while commit and commit.parent:
            commits.append(commit)
            commit = self.commits[commit.parent]
        return commits


class HubError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def is_lfs(name: str, size: int) -> bool:
    return name.endswith(LFS_SUFFIXES) or "tfevents" in name or size > 10_000_000


def tree(files: dict[str, Blob], folder: str, recursive: bool) -> list[dict]:
    """Returns the entries of a folder in the format of the Hub."""
    prefix = folder.strip("/") + "/" if folder.strip("/") else ""
    entries: dict[str, dict] = {}
    for path, blob in files.items():
        if not path.startswith(prefix):
            continue
        steps = path[len(prefix) :].split("/")
        for depth in range(1, len(steps) if recursive else min(2, len(steps))):
            name = prefix + "/".join(steps[:depth])
            entries[name] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        if recursive or len(steps) == 1:
            entry = {"type": "file", "oid": blob.git_oid, "size": len(blob.data), "path": path}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
            entries[path] = entry
    if prefix and not entries:
        raise HubError(404, f"{folder} does not exist", "EntryNotFound")
    return list(entries.values())

"""The routes of the fake Hub.

A route is a function that handles one type of request. It returns the body of the response and,
optionally, the status and the headers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.hub_store import Blob, HubError, is_lfs, tree

if TYPE_CHECKING:
    from tests.support.fake_hub import FakeHub, Handler

ROUTES: list[tuple[str, str, Callable]] = []


def route(method: str, pattern: str) -> Callable:
    """Returns a decorator that adds a function to `ROUTES`.

    Args:
        method: The HTTP method of the requests.
        pattern: A regular expression for their path. Its groups become arguments of the function.
    """

    def register(function: Callable) -> Callable:
        ROUTES.append((method, pattern, function))
        return function

    return register


API = r"/api/(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)"
GIT = r"/(?:(?P<kind>datasets)/)?(?P<id>[^/]+/[^/]+?)"


@route("POST", "/api/repos/create")
def create(request: Handler) -> tuple:
    if (user := request.user()) is None:
        raise HubError(401, "Invalid username or password.")
    body = request.json()
    id = f"{body.get('organization') or user}/{body['name']}"
    kind, url = body.get("type", "model") + "s", f"{request.hub.url}/{id}"
    if (kind, id) in request.hub.repos:
        return {"error": "You already created this model repo", "url": url}, 409
    request.hub.create(id, kind, body.get("visibility") == "private")
    return ({"url": url},)


@route("POST", "/api/validate-yaml")
def validate_yaml(request: Handler) -> tuple:
    import yaml

    try:
        header = re.match(r"---\n(.*?)\n---", request.json()["content"], re.DOTALL)
        yaml.safe_load(header[1] if header else "")
    except yaml.YAMLError as error:
        return {"errors": [{"message": str(error)}], "warnings": []}, 400
    return ({"errors": [], "warnings": []},)


@route("GET", API + "(?:/revision/(?P<rev>[^/]+))?")
def info(request: Handler, kind: str, id: str, rev: str) -> tuple:
    repo = request.repo(kind, id)
    commit = request.commit_at(repo, rev)
    siblings = [{"rfilename": path} for path in commit.files]
    answer = {"id": id, "modelId": id, "sha": commit.oid, "siblings": siblings}
    return ({**answer, "private": repo.private, "tags": [], "downloads": 0, "likes": 0},)


@route("GET", API + "/tree/(?P<rev>[^/]+)(?:/(?P<folder>.*))?")
def list_tree(request: Handler, kind: str, id: str, rev: str, folder: str) -> tuple:
    commit = request.commit_at(request.repo(kind, id), rev)
    recursive = request.query.get("recursive", ["false"])[0].lower() == "true"
    return (tree(commit.files, folder, recursive),)


@route("GET", API + "/refs")
def refs(request: Handler, kind: str, id: str) -> tuple:
    repo = request.repo(kind, id)
    names = {"branches": ("heads", repo.branches), "tags": ("tags", repo.tags)}
    answer = {
        key: [
            {"name": n, "ref": f"refs/{ref}/{n}", "targetCommit": o} for n, o in commit_id.items()
        ]
        for key, (ref, commit_id) in names.items()
    }
    return ({**answer, "converts": []},)


@route("POST", API + "/branch/(?P<name>[^/]+)")
def branch(request: Handler, kind: str, id: str, name: str) -> tuple:
    repo = request.repo(kind, id, write=True)
    if name in repo.branches:
        return {"error": "Reference already exists"}, 409
    start = request.json().get("startingPoint", "main") if request.body else "main"
    repo.branches[name] = request.commit_at(repo, start).oid
    return ({},)


@route("POST", API + "/tag/(?P<rev>[^/]+)")
def tag(request: Handler, kind: str, id: str, rev: str) -> tuple:
    repo = request.repo(kind, id, write=True)
    repo.tags[request.json()["tag"]] = request.commit_at(repo, rev).oid
    return ({},)


@route("POST", API + "/preupload/(?P<rev>[^/]+)")
def preupload(request: Handler, kind: str, id: str, rev: str) -> tuple:
    commit = request.commit_at(request.repo(kind, id, write=True), rev)
    answers = []
    for file in request.json()["files"]:
        mode = "lfs" if is_lfs(file["path"], file["size"]) else "regular"
        answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        if blob := commit.files.get(file["path"]):
            answer["oid"] = blob.oid
        answers.append(answer)
    return ({"files": answers},)


@route("POST", GIT + r"\.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, kind: str, id: str) -> tuple:
    request.repo(kind, id, write=True)
    hub, answers = request.hub, []
    for entry in request.json()["objects"]:
        answer, oid = {"oid": entry["oid"], "size": entry["size"]}, entry["oid"]
        if oid not in hub.lfs:
            upload: dict = {"href": f"{hub.cdn}/lfs-upload/{oid}"}
            if entry["size"] > hub.multipart_over:
                count = -(-entry["size"] // hub.part_size)
                parts = {f"{n:05}": f"{hub.cdn}/lfs-part/{oid}/{n}" for n in range(1, count + 1)}
                header = {"chunk_size": str(hub.part_size), **parts}
                upload = {"href": f"{hub.url}/lfs-complete/{oid}", "header": header}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/lfs-verify"}}
        answers.append(answer)
    return ({"transfer": "basic", "objects": answers},)


def store_lfs(hub: FakeHub, oid: str, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != oid:
        raise HubError(400, "content does not have the promised sha256")
    hub.lfs[oid] = data


@route("PUT", "/lfs-upload/(?P<oid>[0-9a-f]+)")
def lfs_upload(request: Handler, oid: str) -> tuple:
    if request.headers.get("Authorization"):
        raise HubError(400, "the storage host must not see the token")
    store_lfs(request.hub, oid, request.body)
    return ({},)


@route("PUT", "/lfs-part/(?P<oid>[0-9a-f]+)/(?P<part>[0-9]+)")
def lfs_part(request: Handler, oid: str, part: str) -> tuple:
    request.hub.parts[oid, int(part)] = request.body
    return {}, 200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'}


@route("POST", "/lfs-complete/(?P<oid>[0-9a-f]+)")
def lfs_complete(request: Handler, oid: str) -> tuple:
    numbers = [part["partNumber"] for part in request.json()["parts"]]
    store_lfs(request.hub, oid, b"".join(request.hub.parts[oid, n] for n in numbers))
    return ({},)


@route("POST", "/lfs-verify")
def lfs_verify(request: Handler) -> tuple:
    entry = request.json()
    if len(request.hub.lfs.get(entry["oid"], b"")) != entry["size"]:
        raise HubError(404, "object not found")
    return ({},)


@route("POST", API + "/commit/(?P<rev>[^/]+)")
def commit(request: Handler, kind: str, id: str, rev: str) -> tuple:
    repo = request.repo(kind, id, write=True)
    parent = request.commit_at(repo, rev)
    lines = [json.loads(line) for line in request.body.splitlines() if line]
    header, files = lines[0]["value"], dict(parent.files)
    if header.get("parentCommit", parent.oid) != parent.oid:
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    for line in lines[1:]:
        apply_operation(request.hub, files, line["key"], line["value"])
    new_commit = repo.commit(rev, header["summary"], files)
    url = f"{request.hub.url}/{id}/commit/{new_commit.oid}"
    return ({"success": True, "commitOid": new_commit.oid, "commitUrl": url},)


def apply_operation(hub: FakeHub, files: dict[str, Blob], key: str, value: dict) -> None:
    path = value["path"]
    if key == "file":
        files[path] = Blob(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        if value["oid"] not in hub.lfs:
            raise HubError(400, f"LFS object of {path} was never uploaded")
        files[path] = Blob(hub.lfs[value["oid"]], lfs=True)
    elif key == "deletedFile":
        files.pop(path, None)
    elif key == "deletedFolder":
        for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
            del files[name]


@route("GET", GIT + "/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
def resolve(request: Handler, kind: str, id: str, rev: str, path: str) -> tuple:
    commit = request.commit_at(request.repo(kind, id), rev)
    blob = commit.files.get(path)
    if blob is None:
        headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.oid}
        return {"error": f"Entry {path} not found"}, 404, headers
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.git_oid}"', "Accept-Ranges": "bytes"}
    if not blob.lfs:
        return blob.data, 200, headers
    request.hub.lfs[blob.oid] = blob.data
    linked = {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": str(len(blob.data))}
    return b"", 302, {**headers, **linked, "Location": f"{request.hub.cdn}/lfs/{blob.oid}"}


@route("GET", "/lfs/(?P<oid>[0-9a-f]+)")
def lfs_download(request: Handler, oid: str) -> tuple:
    data = request.hub.lfs[oid]
    headers = {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
    if byte_range := re.match(r"bytes=(\d+)-", request.headers.get("Range", "")):
        start = int(byte_range[1])
        span = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return data[start:], 206, {**headers, "Content-Range": span}
    return data, 200, headers

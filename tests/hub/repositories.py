"""Repositories of the Hub on localhost: commits over a folder of blobs, and the answers of its API."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

LARGE = (".safetensors", ".bin")
Answer = tuple[int, Any, dict[str, str]]  # status, JSON or bytes, headers
Query = dict[str, list[str]]


class HubError(Exception):
    """An error of the API, with the code by which huggingface_hub recognises it."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclass
class Hub:
    """The state of the server. `tokens` are users by token; `requests` lists the requests, as `METHOD path`."""

    folder: Path
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_" + "a" * 34: "someone"})
    requests: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)  # the user agents of clients, each once
    num_uploads_before_cut: int | None = (
        None  # after so many, uploads end with a closed connection after half the bytes
    )
    corrupted: set[str] = field(default_factory=set)  # paths that are sent with one bit turned
    truncated: set[str] = field(default_factory=set)  # paths of which only half is sent
    failing: set[str] = field(default_factory=set)  # paths for which the server gives an error of its own
    url: str = ""

    @property
    def content_url(self) -> str:
        """Large contents lie on another host, as on the Hub: clients do not send their token there."""
        return self.url.replace("127.0.0.1", "localhost")

    def blob(self, oid: str) -> Path:
        """Where a content lies."""
        return self.folder / "blobs" / oid

    def keep(self, content: bytes) -> str:
        """Store a content; its name."""
        oid = hashlib.sha256(content).hexdigest()
        self.blob(oid).parent.mkdir(parents=True, exist_ok=True)
        self.blob(oid).write_bytes(content)
        return oid

    def uploads(self) -> list[str]:
        """Names of the large contents that were sent, in order."""
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("PUT /lfs/")]

    def load(self, repo: str, user: str | None) -> dict[str, Any]:
        """A repository, if `user` may know of it."""
        path = self.folder / "repos" / f"{repo}.json"
        state = json.loads(path.read_text()) if path.is_file() else None
        if state is None or (state["private"] and user != repo.partition("/")[0]):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        return dict(state)

    def save(self, repo: str, state: dict[str, Any]) -> None:
        """Write it back."""
        path = self.folder / "repos" / f"{repo}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(state))

    def repos(self) -> list[str]:
        """All names."""
        root = self.folder / "repos"
        return sorted(path.relative_to(root).as_posix().removesuffix(".json") for path in root.rglob("*.json"))


def commit_of(state: dict[str, Any], revision: str) -> str:
    """The commit that a branch, tag or id means."""
    revision = unquote(revision)
    found = state["refs"].get(revision, revision)
    if found not in state["commits"]:
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return str(found)


def info(hub: Hub, repo: str, state: dict[str, Any], commit: str) -> dict[str, Any]:
    """The Hub's description of a model, with tags from the metadata of its card."""
    files = state["commits"][commit]["files"]
    card: dict[str, Any] = {}
    if "README.md" in files:
        match = re.match(
            r"---\n(.*?)\n---", hub.blob(files["README.md"]["oid"]).read_text(encoding="utf-8"), re.DOTALL
        )
        card = yaml.safe_load(match[1]) if match else {}
    bases = card.get("base_model", [])
    bases = [bases] if isinstance(bases, str) else bases
    relation = card.get("base_model_relation")
    tags = [*card.get("tags", []), *(f"base_model:{base}" for base in bases)]
    tags += [f"base_model:{relation}:{base}" for base in bases if relation]
    reply = {
        "id": repo,
        "modelId": repo,
        "author": repo.partition("/")[0],
        "sha": commit,
        "private": state["private"],
    }
    times = {"createdAt": "2026-01-01T00:00:00.000Z", "lastModified": "2026-01-01T00:00:00.000Z"}
    siblings = [{"rfilename": path} for path in files]
    config = json.loads(hub.blob(files["config.json"]["oid"]).read_text("utf-8")) if "config.json" in files else {}
    reply["config"] = {name: config[name] for name in ("architectures", "model_type") if name in config}
    return {**reply, **times, "tags": tags, "cardData": card, "siblings": siblings, "downloads": 0, "likes": 0}


def create(hub: Hub, sent: bytes, user: str) -> Answer:
    """`POST /api/repos/create`."""
    body = json.loads(sent)
    owner = body.get("organization") or user
    if owner != user:
        raise HubError(403, f"You don't have the rights to create a model under the namespace {owner}")
    repo = f"{owner}/{body['name']}"
    if repo in hub.repos():
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, {}
    first = hashlib.sha1(repo.encode()).hexdigest()
    state = {"private": body.get("visibility") == "private" or bool(body.get("private")), "refs": {"main": first}}
    hub.save(repo, {**state, "commits": {first: {"files": {}, "title": "initial commit"}}})
    return 200, {"url": f"{hub.url}/{repo}", "name": repo, "id": repo}, {}


def batch(hub: Hub, body: bytes, user: str) -> Answer:
    """`POST /REPO.git/info/lfs/objects/batch`: an address for each blob that is missing, none for the others."""
    objects = []
    for each in json.loads(body)["objects"]:
        actions = {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}
        objects.append(each if hub.blob(each["oid"]).is_file() else {**each, "actions": actions})
    return 200, {"transfer": "basic", "objects": objects}, {}


def commit(hub: Hub, body: bytes, user: str, repo: str, revision: str) -> Answer:
    """`POST /api/models/REPO/commit/REVISION`: one line of JSON for each operation."""
    state = hub.load(repo, user)
    parent = commit_of(state, revision)
    files = dict(state["commits"][parent]["files"])
    title = ""
    for line in map(json.loads, body.splitlines()):
        kind, value = line["key"], line["value"]
        if kind == "header":
            title = value["summary"]
        elif kind == "file":
            content = base64.b64decode(value["content"])
            files[value["path"]] = {"oid": hub.keep(content), "size": len(content), "lfs": False}
        elif kind == "lfsFile":
            if not hub.blob(value["oid"]).is_file():
                raise HubError(400, f"LFS pointer of {value['path']} points to a blob that was not uploaded")
            files[value["path"]] = {"oid": value["oid"], "size": hub.blob(value["oid"]).stat().st_size, "lfs": True}
        elif kind == "deletedFile":
            files.pop(value["path"])
        else:
            raise HubError(400, f"Unknown operation {kind}")
    oid = hashlib.sha1(json.dumps([parent, title, files]).encode()).hexdigest()
    state["commits"][oid] = {"files": files, "title": title}
    state["refs"][unquote(revision)] = oid
    hub.save(repo, state)
    reply = {"commitUrl": f"{hub.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True}
    return 200, reply, {}


def preupload(hub: Hub, body: bytes, user: str, owner: str) -> Answer:
    """`POST /api/models/REPO/preupload/REVISION`: which files travel as blobs."""
    modes = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in json.loads(body)["files"]}
    return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}, {}


def resolve(hub: Hub, query: Query, user: str | None, repo: str, revision: str, path: str) -> Answer:
    """`GET /REPO/resolve/REVISION/PATH`: the content, or where a large one lies."""
    if path in hub.failing:
        raise HubError(503, "The service is down")
    state = hub.load(repo, user)
    oid = commit_of(state, revision)
    headers = {"X-Repo-Commit": oid}
    entry = state["commits"][oid]["files"].get(unquote(path))
    if entry is None:
        error = HubError(404, "Entry not found", "EntryNotFound")
        error.headers |= headers
        raise error
    if entry["lfs"]:
        linked = {"X-Linked-Etag": f'"{entry["oid"]}"', "X-Linked-Size": str(entry["size"])}
        return 302, b"", {**headers, **linked, "Location": f"{hub.content_url}/cdn/{entry['oid']}/{path}"}
    return 200, hub.blob(entry["oid"]).read_bytes(), {**headers, "ETag": f'"{entry["oid"]}"'}


def tree(hub: Hub, query: Query, user: str | None, repo: str, revision: str, under: str) -> Answer:
    """`GET /api/models/REPO/tree/REVISION`: every file, whatever the depth."""
    state = hub.load(repo, user)
    files = state["commits"][commit_of(state, revision)]["files"]
    entries = []
    for path, entry in files.items():
        if path.startswith(unquote(under)):
            reply = {"type": "file", "path": path, "oid": entry["oid"][:40], "size": entry["size"]}
            lfs = {"oid": entry["oid"], "size": entry["size"], "pointerSize": 130}
            entries.append({**reply, "lfs": lfs} if entry["lfs"] else reply)
    if under and not entries:
        raise HubError(404, f"{under} does not exist on {revision}", "EntryNotFound")
    return 200, entries, {}


def listed(hub: Hub, query: Query, user: str | None) -> Answer:
    """`GET /api/models`: those that `user` may see, by author, tags and name."""
    found = []
    for repo in hub.repos():
        try:
            state = hub.load(repo, user)
        except HubError:
            continue
        reply = info(hub, repo, state, state["refs"]["main"])
        required_tags = query.get("filter", [])
        is_named = query.get("search", [""])[0].lower() in repo.lower()
        if (
            is_named
            and set(required_tags) <= set(reply["tags"])
            and query.get("author", [reply["author"]])[0] == reply["author"]
        ):
            found.append(reply)
    return 200, found[: int(query.get("limit", ["1000"])[0])], {}


def whoami(hub: Hub, query: Query, user: str | None) -> Answer:
    """`GET /api/whoami-v2`."""
    if user is None:
        raise HubError(401, "Invalid username or password.")
    return 200, {"type": "user", "name": user, "auth": {"accessToken": {"role": "write"}}}, {}


def content(hub: Hub, query: Query, user: str | None, oid: str) -> Answer:
    """`GET /cdn/OID/PATH`: a large content, whoever asks."""
    return 200, hub.blob(oid).read_bytes(), {"ETag": f'"{oid}"'}


def model(hub: Hub, query: Query, user: str | None, repo: str, revision: str | None) -> Answer:
    """`GET /api/models/REPO` and `.../revision/REVISION`."""
    state = hub.load(repo, user)
    return 200, info(hub, repo, state, commit_of(state, revision or "main")), {}


def refs(hub: Hub, query: Query, user: str | None, repo: str) -> Answer:
    """`GET /api/models/REPO/refs`."""
    named = hub.load(repo, user)["refs"].items()
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid} for name, oid in named]
    return 200, {"branches": branches, "tags": [], "converts": []}, {}


def branch(hub: Hub, body: bytes, user: str, repo: str, name: str) -> Answer:
    """`POST /api/models/REPO/branch/NAME`."""
    state = hub.load(repo, user)
    if unquote(name) in state["refs"]:
        return 409, {"error": f"Reference already exists: {name}"}, {}
    state["refs"][unquote(name)] = commit_of(state, json.loads(body or b"{}").get("startingPoint", "main"))
    hub.save(repo, state)
    return 200, {}, {}


def validate(hub: Hub, body: bytes, user: str) -> Answer:
    """`POST /api/validate-yaml`: metadata of a card, which must be YAML."""
    yaml.safe_load(re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)[1])
    return 200, {"errors": [], "warnings": []}, {}


READS: dict[str, Callable[..., Answer]] = {
    r"/api/models": listed,
    r"/api/whoami-v2": whoami,
    r"/cdn/(\w+)/.*": content,
    r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": resolve,
    r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)": tree,
    r"/api/models/([^/]+/[^/]+)/refs": refs,
    r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?": model,
}
WRITES: dict[str, Callable[..., Answer]] = {
    r"/[^/]+/[^/]+\.git/info/lfs/objects/batch": batch,
    r"/api/validate-yaml": validate,
    r"/api/repos/create": create,
    r"/api/models/([^/]+)/[^/]+/preupload/[^/]+": preupload,
    r"/api/models/([^/]+/[^/]+)/commit/([^/]+)": commit,
    r"/api/models/([^/]+/[^/]+)/branch/([^/]+)": branch,
}


def answer(hub: Hub, routes: dict[str, Callable[..., Answer]], path: str, content: Any, user: str | None) -> Answer:
    """Answer with the first route that fits; `content` is the query or the body. Only owners write to a repository."""
    for pattern, function in routes.items():
        if match := re.fullmatch(pattern, path):
            if routes is WRITES and user is None:
                raise HubError(401, "Invalid username or password.")
            if routes is WRITES and match.groups() and match[1].partition("/")[0] != user:
                raise HubError(403, "You don't have the rights to write to this repository")
            return function(hub, content, user, *match.groups())
    raise HubError(404, f"No such address: {path}")

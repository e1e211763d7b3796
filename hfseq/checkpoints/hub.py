"""What hfseq says to the Hugging Face Hub: finding files, pushing folders, now or meanwhile.

``huggingface_hub`` is imported inside functions. Its client retries uploads of file contents but
neither commits nor repository creation, so both directions go through one bounded retry here; and
it waits for ever for most answers, so every request gets time-outs.
Tokens come from the caller, the environment or ``hf auth login`` and never reach a message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hfseq.checkpoints import network
from hfseq.errors import CheckpointError, HfseqError, UsageError, one_line, redact

logger = logging.getLogger("hfseq.checkpoints.hub")

T = TypeVar("T")

#: Attempts of a push, and of a download, whose client repeats much itself.
PUSH_ATTEMPTS, DOWNLOAD_ATTEMPTS = 4, 2

#: Seconds; what the Hub asks for beyond that is not waited for.
MAX_RETRY_WAIT = 300.0

#: Seconds for a connection, and for each part of an answer.
CONNECT_TIMEOUT, READ_TIMEOUT = 20.0, 90.0

#: Statuses of HTTP that may pass by themselves.
RETRYABLE_STATUSES = frozenset({408, 409, 412, 429, 500, 502, 503, 504})

DEFAULT_IGNORE_PATTERNS: tuple[str, ...] = (
    *("checkpoint-*", "checkpoints/*", "previous-*", "optimizer*", "opt_state*"),
    *(".cache/*", "*/.cache/*", ".git/*", "wandb/*", "wandb_run_id", "*__pycache__/*"),
    *("*.tmp", "*.tmp-*", "*.tmp/*", "*.lock", "*.incomplete"),
)

#: Where a run keeps its training checkpoints, a folder a step.
CHECKPOINT_DIR = "checkpoints"

#: Where a folder that is being pushed keeps what it looked like.
SNAPSHOT_DIR = Path(".cache", "push")

#: Files that a run appends to, and so may not be hard-linked into a snapshot.
APPENDED_FILES = ("*tfevents*", "*.jsonl", "*.log")

#: Bytes; smaller files are copied into a snapshot.
HARD_LINK_MIN_BYTES = 8_000_000


class HubError(HfseqError):
    """The Hub refused a push or could not be reached."""


# -- finding files


def resolve_file(
    name_or_path: str | os.PathLike[str],
    filename: str,
    *,
    revision: str | None = None,
    subfolder: str = "",
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> str | None:
    """Return the local path of a checkpoint's file, downloading it if need be; None if it has none.

    ``name_or_path`` is a directory or a Hub name ("user/model"). Everything but the plain absence
    of the file (no such repository or revision, no access, no network, a path that leaves the
    checkpoint) raises CheckpointError.
    """
    name, path = os.fspath(name_or_path), PurePosixPath(subfolder or "", filename)
    if path.is_absolute() or ".." in path.parts or "\\" in filename:
        raise CheckpointError(f"file name '{path}' of {name} points outside the checkpoint")
    if os.path.isdir(os.path.expanduser(name)):
        local = Path(name).expanduser() / path
        return str(local) if local.is_file() else None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise CheckpointError(f"no checkpoint at '{name}': neither a directory nor a Hub name")
    from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

    cache = None if cache_dir is None else os.fspath(cache_dir)
    offline = local_files_only or constants.HF_HUB_OFFLINE

    def download() -> str:
        return hf_hub_download(
            name,
            str(path),
            revision=revision,
            cache_dir=cache,
            token=token,
            local_files_only=offline,
            force_download=force_download and not offline,
            library_name="hfseq",
        )

    try:
        if offline:
            return download()
        return network.run_with_stall_timeout(
            lambda: with_retries(download, attempts=DOWNLOAD_ATTEMPTS)
        )
    except network.TransferStalled as error:
        raise CheckpointError(
            f"cannot load '{name}' from the Hub: {error}. The same command goes on with what has "
            "arrived"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        # Offline, a checkpoint whose configuration is cached simply lacks the other files.
        for config in (str(path.with_name("config.json")), "config.json"):
            cached = try_to_load_from_cache(name, config, cache_dir=cache, revision=revision)
            if offline and path.name != "config.json" and isinstance(cached, str):
                return None
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error
    except Exception as error:
        absent = isinstance(error, errors.EntryNotFoundError)
        if absent and not isinstance(error, errors.RevisionNotFoundError):
            return None
        if not is_hub_error(error):
            raise
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error


def _not_loaded(name: str, revision: str | None, error: Exception, offline: bool) -> str:
    where = f"'{name}'" + (f" at revision '{revision}'" if revision else "")
    if offline:
        return f"{where} is not in the local cache and downloads are switched off (offline mode)"
    if type(error).__name__ == "RevisionNotFoundError":
        return f"'{name}' on the Hub has no revision '{revision}' (a branch, tag or commit)"
    if "/" not in name and type(error).__name__ == "RepositoryNotFoundError":
        where += " (no such directory either)"
    return f"cannot load {where} from the Hub: {describe_hub_error(error)}"


# -- pushing folders


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload with hfseq",
    revision: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = DEFAULT_IGNORE_PATTERNS,
    checkpoint: bool = False,
) -> str:
    """Push a complete folder as one commit, creating the repository if need be.

    Returns the address of the commit (of the newest one when nothing has changed). Transient
    failures are retried, honouring Retry-After; anything else raises HubError. Files that are on
    the Hub but not in the folder stay there. A push that was interrupted resumes cheaply: large
    files that have arrived are not sent again.

    With ``checkpoint`` the newest training checkpoint goes along and replaces the one on the Hub.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = dict(files_to_push(Path(folder), allow_patterns, ignore_patterns, checkpoint))
    if not files:
        raise UsageError(f"nothing to push: {folder} holds no file of a model")
    api = HfApi(token=token, library_name="hfseq")

    def create() -> str:
        """Create repository and branch where absent; return the full name ("user/model")."""
        # `None` leaves the choice to the organisation's own default; `False` would force "public".
        name = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(name).private:
            raise HubError(
                f"'{name}' exists already and is public, but a private repository was asked for; "
                "make it private on the Hub or choose another name"
            )
        if revision and revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        return name

    def commit() -> str:
        # Not upload_folder: with Xet, which is on by default, it makes several commits of a folder.
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=file, path_or_fileobj=path)
            for file, path in files.items()
        ]
        if checkpoint:
            # Two checkpoints side by side would be taken for a run's own history.
            there = api.list_repo_files(name, revision=revision)
            old = {file for file in there if file.startswith(f"{CHECKPOINT_DIR}/")} - files.keys()
            operations += [CommitOperationDelete(path_in_repo=file) for file in sorted(old)]
        return api.create_commit(
            name, operations, commit_message=message or "Upload with hfseq", revision=revision
        ).commit_url

    try:
        name = with_retries(create)
        return with_retries(commit)
    except Exception as error:
        if isinstance(error, HfseqError) or not is_hub_error(error):
            raise
        reason = redact(describe_hub_error(error), token)
        raise HubError(f"cannot push {folder} to '{repo_id}': {reason}") from error


def files_to_push(
    folder: Path,
    allow: Sequence[str] | None,
    ignore: Sequence[str] | None,
    checkpoint: bool = False,
) -> Iterator[tuple[str, Path]]:
    """Yield (name in the repository, path) of the files to push, sorted by name.

    ``checkpoint`` adds the newest training checkpoint, whatever the patterns say.
    """
    if not folder.is_dir():
        raise CheckpointError(f"nothing to push: {folder} is not a directory")
    # A checkpoint under way has a longer name: it gets its number when it is complete.
    complete = [path for path in (folder / CHECKPOINT_DIR).glob("*") if path.name.isdecimal()]
    newest = max(complete, key=lambda path: int(path.name), default=None) if checkpoint else None
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        wanted = newest is not None and path.is_relative_to(newest)
        if not wanted and not any(fnmatch(name, pattern) for pattern in ignore or ()):
            wanted = allow is None or any(fnmatch(name, pattern) for pattern in allow)
        if not wanted or not path.is_file():
            continue
        # What a link points to elsewhere is not published; the Hub's cache is made of links.
        real = path.resolve() if path.is_symlink() else root
        if not (real.is_relative_to(root) or real.is_relative_to(root.parents[1] / "blobs")):
            raise UsageError(
                f"{path} is a link to {real}, outside of the folder: put a copy there if it is to "
                "be published, or remove the link"
            )
        yield name, path


# -- pushing as training goes


class BackgroundPusher:
    """Pushes the saves of a training run to the Hub from a thread, one commit a save.

    ``push`` takes a snapshot of the folder (hard links for weights, copies for the rest, within
    ``<folder>/.cache``) and returns; the run may go on writing. While an upload is under way only
    the newest snapshot waits. A failed push is logged and made good by the next one, or by
    ``finish``. Nothing here raises into the training loop, and a process that ends does not wait
    for an upload that hangs, as it would for ``HfApi.run_as_future``. ``checkpoint`` is as for
    `push_folder`. ``stalled`` says whether ``finish`` has given up on an upload.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        repo_id: str,
        private: bool = False,
        token: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        self.folder, self.repo_id, self.private = Path(folder), repo_id, private
        self.checkpoint, self.commit_url, self._token = checkpoint, "", token
        self._error: str | None = None
        self._message, self._count = "", 0
        self._waiting: tuple[Path, str] | None = None
        self._thread: threading.Thread | None = None
        self.stalled = False
        self._lock = threading.Lock()
        shutil.rmtree(self.folder / SNAPSHOT_DIR, ignore_errors=True)  # left by a killed run

    def push(self, message: str) -> None:
        """Push the folder as it is now; returns at once."""
        self._message = message
        try:
            snapshot = self._snapshot()
        except (OSError, HfseqError) as error:
            self._failed(f"cannot take a snapshot of {self.folder}: {one_line(error)}")
            return
        with self._lock:
            if self._waiting:
                shutil.rmtree(self._waiting[0], ignore_errors=True)
            self._waiting = (snapshot, message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hub-push", daemon=True)
                self._thread.start()

    def finish(self, timeout: float | None = None) -> str | None:
        """Wait for the pushes, repeat a failed last one; return None or what is left to do.

        An upload is given up when no bytes have moved for ``timeout`` seconds, by default those of
        ``--hub_timeout``.
        """
        limit, traffic = (
            network.stall_timeout if timeout is None else timeout,
            network.TrafficMonitor(),
        )
        for last in (False, True):
            if (thread := self._thread) and not network.wait_for_transfer(thread, limit, traffic):
                self.stalled = True
                return self.incomplete_message(f"it hangs: no bytes have moved for {limit:g} s")
            if last or self._error is None:
                break
            self.push(self._message)
        if self._error is not None:
            return self.incomplete_message(self._error)
        shutil.rmtree(self.folder / SNAPSHOT_DIR, ignore_errors=True)
        return None

    def incomplete_message(self, reason: str) -> str:
        """Say that the push is not complete, and why, and what finishes it."""
        command = push_command(self.folder, self.repo_id, self.private, self.checkpoint)
        return f"the push to '{self.repo_id}' is not complete: {reason}. Finish it with: {command}"

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                (snapshot, message), self._waiting = self._waiting, None
            try:
                self.commit_url = push_folder(
                    snapshot,
                    self.repo_id,
                    private=self.private,
                    token=self._token,
                    message=message,
                    ignore_patterns=None,
                    checkpoint=self.checkpoint,
                )
                self._error = None
            except Exception as error:  # a thread that dies silently would lose every later push
                text = redact(one_line(error), self._token)
                self._failed(text.replace(str(snapshot), str(self.folder)))
            shutil.rmtree(snapshot, ignore_errors=True)

    def _failed(self, reason: str) -> None:
        self._error = reason
        if not self.stalled:
            logger.warning(
                "push to the Hub failed (training goes on, next save retries): %s", reason
            )

    def _snapshot(self) -> Path:
        self._count += 1
        snapshot = self.folder / SNAPSHOT_DIR / f"{os.getpid()}-{self._count}"
        snapshot.mkdir(parents=True)
        for name, path in files_to_push(
            self.folder, None, DEFAULT_IGNORE_PATTERNS, self.checkpoint
        ):
            target = snapshot / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # A link keeps the old content when the file is replaced by renaming, as weights are; a
            # file that is appended to would change under the upload.
            appended = any(fnmatch(path.name, pattern) for pattern in APPENDED_FILES)
            if not appended and path.stat().st_size > HARD_LINK_MIN_BYTES:
                with contextlib.suppress(OSError):  # a file system without hard links
                    os.link(path, target)
                    continue
            shutil.copy2(path, target)
        return snapshot


def push_command(
    folder: Path, repo_id: str, private: bool = False, checkpoint: bool = False
) -> str:
    """Return the command that finishes a push."""
    words = ["hfseq", "push", str(folder), "--hub_model_id", repo_id]
    return shlex.join([*words, *["--hub_private_repo"] * private, *["--checkpoint"] * checkpoint])


# -- time-outs, trying again, and saying what went wrong


def set_timeout(seconds: float) -> None:
    """Set after how many seconds without a byte moving a transfer hangs (``--hub_timeout``)."""
    network.stall_timeout = seconds
    _limit_requests()


def _limit_requests() -> None:
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make = _http._GLOBAL_CLIENT_FACTORY  # a user may have set one
    if not getattr(make, "has_limits", False):

        def make_client() -> Any:
            client = make()
            client.event_hooks["request"].append(_limit)
            return client

        make_client.has_limits = True  # type: ignore[attr-defined]
        set_client_factory(make_client)


def _limit(request: Any) -> None:
    """Give a request of the client's HTTP library the time-outs that it has not."""
    if network.is_abandoned():
        raise network.TransferStalled("nobody waits for it any more")
    limits = {
        "connect": CONNECT_TIMEOUT,
        "read": READ_TIMEOUT,
        "write": READ_TIMEOUT,
        "pool": READ_TIMEOUT,
    }
    given = request.extensions.get("timeout") or {}
    known = {name: value for name, value in given.items() if value is not None}
    request.extensions = {**request.extensions, "timeout": limits | known}


def with_retries(call: Callable[[], T], attempts: int = PUSH_ATTEMPTS) -> T:
    """Call until it succeeds, waiting 1, 2, 4 ... seconds (or what the Hub says) after failures.

    Only what may pass by itself is retried: the statuses in PASSING and failed connections.
    """
    _limit_requests()
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:
            response, wait = _response(error), 2.0**attempt
            passing = _is_connection_error(error)
            if response is not None:
                passing = response.status_code in RETRYABLE_STATUSES
                reset = re.search(r"\br=0;t=(\d+)", response.headers.get("ratelimit", ""))
                asked = response.headers.get("Retry-After") or (reset[1] if reset else "")
                wait = float(asked) if asked.isdigit() else wait
            if not passing or wait > MAX_RETRY_WAIT or attempt + 1 == attempts:
                raise
            logger.info("%s; trying again in %.0f s", describe_hub_error(error), wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException) -> Any:
    """Return the HTTP library's response of the first error in the chain that has one, or None."""
    responses = (getattr(link, "response", None) for link in _chain(error))
    return next((response for response in responses if response is not None), None)


def _is_connection_error(error: BaseException) -> bool:
    # The client's HTTP library was httpx and is httpx2: recognise its errors by their base's name.
    names = {base.__name__ for link in _chain(error) for base in type(link).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "TimeoutError"})


def is_hub_error(error: BaseException) -> bool:
    """Whether the network, the Hub or its client may have caused this, rather than our own code."""
    return isinstance(error, (OSError, ValueError, RuntimeError)) or _is_connection_error(error)


def describe_hub_error(error: BaseException) -> str:
    """Say in one line what went wrong and what to do about it."""
    response, root = _response(error), list(_chain(error))[-1]
    if response is not None:
        status = response.status_code
        hint = _STATUS_HINTS.get(status, "the Hub answered with an error; try again later")
        if status == 401 and type(error).__name__ == "RepositoryNotFoundError":
            hint = "no such repository, or it is private; check the name or run `hf auth login`"
        said = response.headers.get("X-Error-Message") or getattr(error, "server_message", None)
        reason = f"HTTP {status}: {hint}" + (f" [the Hub says: {one_line(said)}]" if said else "")
    elif _is_connection_error(error):
        return f"no connection to the Hub ({one_line(root) or type(root).__name__})"
    else:
        reason = "" if root is error else f"{type(root).__name__}: {one_line(root)}"
    if type(error) in (ValueError, RuntimeError):  # these say which file it was
        return f"{one_line(error)} {reason}".strip()
    return reason or one_line(error) or type(error).__name__


_STATUS_HINTS = {
    400: "the Hub rejected the request",
    401: "not logged in, or the token is not valid; run `hf auth login` or set HF_TOKEN",
    402: "the account's quota or plan does not allow this",
    403: "no permission; use a token with write access to this repository, or accept its terms",
    404: "no such repository (or it is private and the token has no access to it)",
    409: "the repository has changed meanwhile",
    412: "the repository has changed meanwhile",
    413: "a file is too large for the Hub",
    429: "too many requests; wait and try again",
    507: "the storage quota is used up",
}

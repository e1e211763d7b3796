"""Downloads files from the Hugging Face Hub and pushes folders, also in the background.

``huggingface_hub`` is imported inside functions. Its client retries uploads of files, but neither
commits nor the creation of repositories, and it has no timeouts for most responses. This module
therefore adds its own retries and timeouts to downloads and pushes. Tokens come from the caller,
the environment or ``hf auth login``, and never appear in messages.
"""

from __future__ import annotations

import contextlib
import functools
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

#: Maximum number of attempts of a push and of a download. Downloads need fewer attempts, because
#: the client also retries them.
PUSH_ATTEMPTS, DOWNLOAD_ATTEMPTS = 4, 2

#: Maximum time in seconds to wait before a retry. If the Hub requests a longer wait, the error is
#: raised without a retry.
MAX_RETRY_WAIT = 300.0

#: Seconds without network traffic after which an attempt is abandoned and a new one starts.
ATTEMPT_TIMEOUT = 90.0

#: HTTP status codes of errors that may be temporary.
RETRYABLE_STATUSES = frozenset({408, 409, 412, 429, 500, 502, 503, 504})

DEFAULT_IGNORE_PATTERNS: tuple[str, ...] = (
    *("checkpoint-*", "checkpoints/*", "previous-*", "optimizer*", "opt_state*"),
    *(".cache/*", "*/.cache/*", ".git/*", "wandb/*", "wandb_run_id", "*__pycache__/*"),
    *("*.tmp", "*.tmp-*", "*.tmp/*", "*.lock", "*.incomplete"),
)

#: Directory of the training checkpoints in an output directory, with one folder per step.
CHECKPOINT_DIR = "checkpoints"

#: Directory of the snapshots for background pushes in an output directory.
SNAPSHOT_DIR = Path(".cache", "push")

#: Files that a run appends to. They must not be hard-linked into a snapshot.
APPENDED_FILES = ("*tfevents*", "*.jsonl", "*.log")

#: Files above this size in bytes are hard-linked into a snapshot. Smaller files are copied.
HARD_LINK_MIN_BYTES = 8_000_000


_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

#: Endings of the names of files. A checkpoint with such a name is a local path.
_FOREIGN_SUFFIXES = (".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth")
_FILE_SUFFIXES = (*_FOREIGN_SUFFIXES, ".bin", ".json", ".msgpack", ".safetensors")


class HubError(HfseqError):
    """The Hub refused a push or could not be reached."""


# -- finding files


def check_directory(name: str | os.PathLike[str]) -> None:
    """Raises `CheckpointError` if ``name`` is a path that does not exist or cannot be loaded.

    Names that the Hub does not allow, and names with the ending of a file, are paths.
    """
    name = os.fspath(name)
    path, is_file = os.path.expanduser(name), name.lower().endswith(_FILE_SUFFIXES)
    if os.path.isfile(path) and path.lower().endswith(_FOREIGN_SUFFIXES):
        problem = f"file '{name}' has a format that hfseq does not read"
    elif os.path.exists(path) or (not is_file and _HUB_NAME.fullmatch(name)):
        return
    else:
        path_type = "file" if is_file else "directory"
        problem = f"{path_type} '{name}' does not exist (in '{Path.cwd()}')"
    raise CheckpointError(
        f"{problem}. Use an existing directory, such as the output directory of a run, or the name "
        "of a model on the Hub, such as 'FacebookAI/roberta-base'"
    )


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
    """Returns the local path of a file of a checkpoint, and downloads it if necessary.

    Args:
        name_or_path: Directory or Hub name such as ``"user/model"``.
        filename: Name of the file in the checkpoint.
        revision: Branch, tag or commit on the Hub. Default: ``main``.
        subfolder: Folder of the file in the checkpoint.
        cache_dir: Cache directory. Default: the cache directory of ``huggingface_hub``.
        token: Access token. Default: the stored token.
        local_files_only: Whether to use only the cache.
        force_download: Whether to download the file even if it is in the cache.

    Returns:
        The path, or `None` if the checkpoint does not have the file.

    Raises:
        CheckpointError: The repository or revision does not exist or cannot be accessed, or the
            path points outside the checkpoint.
    """
    name, path = os.fspath(name_or_path), PurePosixPath(subfolder or "", filename)
    if path.is_absolute() or ".." in path.parts or "\\" in filename:
        raise CheckpointError(f"file name '{path}' of {name} points outside the checkpoint")
    if os.path.isdir(os.path.expanduser(name)):
        local = Path(name).expanduser() / path
        return str(local) if local.is_file() else None
    check_directory(name)
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
            f"cannot load '{name}' from the Hub: {error}. Run the same command again to resume the "
            "download"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        # In offline mode, a file that is not in the cache counts as missing from the checkpoint if
        # the checkpoint's configuration is in the cache.
        for config in ("config.json", "adapter_config.json"):
            for file in {str(path.with_name(config)), config} - {str(path)}:
                cached = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
                if offline and path.name != config and isinstance(cached, str):
                    return None
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error
    except Exception as error:
        not_found = isinstance(error, errors.EntryNotFoundError)
        if not_found and not isinstance(error, errors.RevisionNotFoundError):
            return None
        if not is_hub_error(error):
            raise
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error


class Repository:
    """Maps the names of a repository's files to local paths, and downloads them if necessary.

    Files that are neither in the cache nor in the list of the repository's files are not requested.

    Args:
        name: Hub name such as ``"user/model"``.
        **options: Options of `resolve_file`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        check_directory(name)
        self.name, self._options = name, options

    def __call__(self, filename: str) -> str | None:
        """Returns the local path of a file, or `None` if the repository does not have it."""
        if not self.may_contain(filename):
            return None
        return resolve_file(self.name, filename, **self._options)

    def may_contain(self, filename: str) -> bool:
        """Returns `False` if a file is neither in the cache nor in the repository's list of files.

        If the list of files is not available, returns `True`.
        """
        path = str(PurePosixPath(self._options.get("subfolder") or "", filename))
        return self._is_cached(path) or self._names is None or path in self._names

    def _is_cached(self, path: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        if self._options.get("force_download") or not _HUB_NAME.fullmatch(self.name):
            return False
        options = {key: self._options.get(key) for key in ("cache_dir", "revision")}
        return isinstance(try_to_load_from_cache(self.name, path, **options), str)

    @functools.cached_property
    def _names(self) -> frozenset[str] | None:
        """The names of all files, or `None` if the list is not available, for example offline."""
        from huggingface_hub import HfApi, constants

        offline = self._options.get("local_files_only") or constants.HF_HUB_OFFLINE
        if offline or not _HUB_NAME.fullmatch(self.name):
            return None
        api = HfApi(token=self._options.get("token"), library_name="hfseq")

        def request() -> Any:
            revision = self._options.get("revision")
            return api.model_info(self.name, revision=revision, expand=["siblings"])

        try:
            files = network.run_with_stall_timeout(request).siblings
        except Exception as error:
            if not is_hub_error(error):
                raise
            return None  # a later request for a file reports the problem
        return None if files is None else frozenset(file.rfilename for file in files)


def _not_loaded(name: str, revision: str | None, error: Exception, offline: bool) -> str:
    repository = f"'{name}'" + (f" at revision '{revision}'" if revision else "")
    if offline:
        return f"{repository} is not in the local cache and downloads are disabled (offline mode)"
    if type(error).__name__ == "RevisionNotFoundError":
        return f"'{name}' on the Hub has no revision '{revision}' (a branch, tag or commit)"
    if "/" not in name and type(error).__name__ == "RepositoryNotFoundError":
        repository += " (a directory of this name does not exist either)"
    return f"cannot load {repository} from the Hub: {describe_hub_error(error)}"


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
    """Pushes a complete folder as one commit, and creates the repository if necessary.

    Temporary failures are retried after the time that the Hub requests. Files on the Hub that are
    not in the folder are kept. If a push is repeated, large files that have already arrived are not
    sent again.

    Args:
        folder: The folder.
        repo_id: Repository, e.g. ``"user/model"``.
        private: Whether the repository must be private.
        token: Access token. Default: the stored token.
        message: Commit message.
        revision: Branch, which is created if necessary. Default: ``main``.
        allow_patterns: Patterns of the files to push. Default: all files.
        ignore_patterns: Patterns of the files to ignore.
        checkpoint: Whether to also push the newest training checkpoint, which replaces the one on
            the Hub.

    Returns:
        The URL of the commit, or of the newest commit if nothing has changed.

    Raises:
        HubError: The Hub rejected the push or could not be reached.
        UsageError: The folder has no files to push, or contains a link to a file outside of the
            folder.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = dict(files_to_push(Path(folder), allow_patterns, ignore_patterns, checkpoint))
    if not files:
        raise UsageError(f"nothing to push: {folder} contains no files of a model")
    api = HfApi(token=token, library_name="hfseq")

    def create() -> str:
        """Creates the repository and the branch if necessary, and returns the repository's name."""
        # `None` uses the default of the organization; `False` would make the repository public.
        name = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(name).private:
            raise HubError(
                f"'{name}' already exists and is public, but a private repository was requested. "
                "Make it private on the Hub or use another name"
            )
        if revision and revision != "main":
            api.create_branch(name, branch=revision, exist_ok=True)
        return name

    def commit() -> str:
        # upload_folder creates several commits for a folder with Xet, which is enabled by default.
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=file, path_or_fileobj=path)
            for file, path in files.items()
        ]
        if checkpoint:
            # Remove old checkpoints from the Hub. Otherwise checkpoints of several runs would look
            # like those of a single run.
            remote_files = api.list_repo_files(name, revision=revision)
            old = {
                file for file in remote_files if file.startswith(f"{CHECKPOINT_DIR}/")
            } - files.keys()
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
    """Yields the name in the repository and the path of each file to push, sorted by name.

    Args:
        folder: The folder.
        allow: Patterns of the files to push, or `None` for all files.
        ignore: Patterns of the files to ignore.
        checkpoint: Whether to add the newest training checkpoint, independently of the patterns.

    Raises:
        CheckpointError: The folder does not exist.
        UsageError: A file is a link to a file outside the folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"nothing to push: {folder} is not a directory")
    # The directory name of a complete checkpoint is a number. Other directories are incomplete.
    complete = [path for path in (folder / CHECKPOINT_DIR).glob("*") if path.name.isdecimal()]
    newest = max(complete, key=lambda path: int(path.name), default=None) if checkpoint else None
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        selected = newest is not None and path.is_relative_to(newest)
        if not selected and not any(fnmatch(name, pattern) for pattern in ignore or ()):
            selected = allow is None or any(fnmatch(name, pattern) for pattern in allow)
        if not selected or not path.is_file():
            continue
        # A link could publish a file outside the folder. Only links into the Hub cache are allowed.
        target = path.resolve() if path.is_symlink() else root
        if not (target.is_relative_to(root) or target.is_relative_to(root.parents[1] / "blobs")):
            raise UsageError(
                f"{path} is a link to {target}, which is outside the folder: replace the link by a "
                "copy to publish it, or remove the link"
            )
        yield name, path


# -- background pushes during training


class BackgroundPusher:
    """Pushes the saves of a training run to the Hub in a background thread, one commit per save.

    ``push`` creates a snapshot of the folder in ``<folder>/.cache`` and returns, so that the run
    can continue to write. The snapshot has hard links to weight files and copies of other files.
    While an upload is running, only the newest snapshot waits for the next upload.

    Errors of uploads are logged, not raised. The next push or ``finish`` repeats a failed push.
    Unlike ``HfApi.run_as_future``, the thread does not keep a process alive if an upload stalls.

    Attributes:
        folder: The folder.
        repo_id: Repository, e.g. ``"user/model"``.
        private: Whether the repository must be private.
        checkpoint: Whether to also push the newest training checkpoint, as in `push_folder`.
        commit_url: URL of the last commit, or an empty string.
        stalled: Whether ``finish`` has abandoned an upload.
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
        """Pushes the current state of the folder in the background."""
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
        """Waits until all pushes are complete, and repeats the last push if it has failed.

        Args:
            timeout: Seconds without network traffic after which an upload is abandoned. Default:
                ``--hub_timeout``.

        Returns:
            `None`, or a message with the command that completes the push.
        """
        limit = network.stall_timeout if timeout is None else timeout
        traffic = network.TrafficMonitor()
        for is_retry in (False, True):
            if (thread := self._thread) and not network.wait_for_transfer(thread, limit, traffic):
                self.stalled = True
                return self.incomplete_message(f"no network traffic for {limit:g} s")
            if is_retry or self._error is None:
                break
            self.push(self._message)
        if self._error is not None:
            return self.incomplete_message(self._error)
        shutil.rmtree(self.folder / SNAPSHOT_DIR, ignore_errors=True)
        return None

    def incomplete_message(self, reason: str) -> str:
        """Returns a message with the reason for an incomplete push and the command to finish it."""
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
            except Exception as error:  # an error would end the thread and lose all later pushes
                text = redact(one_line(error), self._token)
                self._failed(text.replace(str(snapshot), str(self.folder)))
            shutil.rmtree(snapshot, ignore_errors=True)

    def _failed(self, reason: str) -> None:
        self._error = reason
        if not self.stalled:
            logger.warning(
                "push to the Hub failed (training continues, the next save retries): %s", reason
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
            # A hard link keeps the old content of a file that is replaced by renaming, as weights
            # are. A file that is appended to would change during the upload.
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
    """Returns the ``hfseq push`` command that completes a push."""
    words = ["hfseq", "push", str(folder), "--hub_model_id", repo_id]
    return shlex.join([*words, *["--hub_private_repo"] * private, *["--checkpoint"] * checkpoint])


# -- timeouts, retries and error messages


def set_timeout(seconds: float) -> None:
    """Sets the seconds without network traffic after which transfers fail (``--hub_timeout``)."""
    network.stall_timeout = seconds


def with_retries(call: Callable[[], T], attempts: int = PUSH_ATTEMPTS) -> T:
    """Calls a function until it succeeds.

    Failed connections, requests without a response, and responses with a status code in
    `RETRYABLE_STATUSES` are retried after 1, 2, 4, ... seconds, or after the time that the Hub
    requests. The error of the last attempt is raised.

    Args:
        call: The function.
        attempts: Maximum number of calls.
    """
    from huggingface_hub.utils import parse_ratelimit_headers

    for attempt in range(attempts):
        if network.is_abandoned():
            raise network.TransferStalled("the transfer was abandoned")
        try:
            if ATTEMPT_TIMEOUT >= network.stall_timeout:
                return call()
            return network.run_with_stall_timeout(call, ATTEMPT_TIMEOUT)
        except Exception as error:
            response, wait = _response(error), 2.0**attempt
            retryable = _is_connection_error(error) or isinstance(error, network.TransferStalled)
            if response is not None:
                retryable = response.status_code in RETRYABLE_STATUSES
                retry_after = response.headers.get("Retry-After", "")
                limit = parse_ratelimit_headers(response.headers)
                if retry_after.isdigit():
                    wait = float(retry_after)
                elif limit is not None and limit.remaining == 0:
                    wait = float(limit.reset_in_seconds)
            is_last = attempt + 1 == attempts or network.is_abandoned()
            if not retryable or wait > MAX_RETRY_WAIT or is_last:
                raise
            logger.info("%s; retrying in %.0f s", describe_hub_error(error), wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: BaseException) -> Any:
    """Returns the HTTP response that an error or one of its causes contains, or `None`."""
    responses = (getattr(link, "response", None) for link in _chain(error))
    return next((response for response in responses if response is not None), None)


def _is_connection_error(error: BaseException) -> bool:
    # The client uses httpx or httpx2, depending on its version, so classes are compared by name.
    names = {base.__name__ for link in _chain(error) for base in type(link).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "TimeoutError"})


def is_hub_error(error: BaseException) -> bool:
    """Returns whether the network, the Hub or its client may have raised an error."""
    return isinstance(error, (OSError, ValueError, RuntimeError)) or _is_connection_error(error)


def describe_hub_error(error: BaseException) -> str:
    """Returns a one-line description of an error, with a hint on how to fix it."""
    response, root = _response(error), list(_chain(error))[-1]
    if response is not None:
        status = response.status_code
        hint = _STATUS_HINTS.get(status, "the Hub returned an error; try again later")
        if status == 401 and type(error).__name__ == "RepositoryNotFoundError":
            hint = "no such repository, or it is private; check the name or run `hf auth login`"
        server_message = response.headers.get("X-Error-Message") or getattr(
            error, "server_message", None
        )
        reason = f"HTTP {status}: {hint}" + (
            f" [message of the Hub: {one_line(server_message)}]" if server_message else ""
        )
    elif _is_connection_error(error):
        return f"no connection to the Hub ({one_line(root) or type(root).__name__})"
    else:
        reason = "" if root is error else f"{type(root).__name__}: {one_line(root)}"
    if type(error) in (ValueError, RuntimeError):  # messages of these types contain the file name
        return f"{one_line(error)} {reason}".strip()
    return reason or one_line(error) or type(error).__name__


_STATUS_HINTS = {
    400: "the Hub rejected the request",
    401: "not logged in, or the token is not valid; run `hf auth login` or set HF_TOKEN",
    402: "the account's quota or plan does not allow this",
    403: "no permission; use a token with write access to this repository, or accept its terms",
    404: "no such repository (or it is private and the token has no access to it)",
    409: "the repository has changed in the meantime",
    412: "the repository has changed in the meantime",
    413: "a file is too large for the Hub",
    429: "too many requests; wait and try again",
    507: "the storage quota is exceeded",
}

"""What hfseq says to the Hugging Face Hub: finding files and pushing folders.

``huggingface_hub`` is imported inside functions. Its client retries uploads of file contents but
neither commits nor repository creation, so both directions go through one bounded retry here.
Tokens come from the caller, the environment or ``hf auth login`` and never reach a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from hfseq.errors import CheckpointError, HfseqError, UsageError
from hfseq.hub_retry import explain, is_hub_error, redact, with_retries

DEFAULT_IGNORE: tuple[str, ...] = (
    *("checkpoint-*", "checkpoints/*", "previous-*", "optimizer*", "opt_state*"),
    *(".cache/*", "*/.cache/*", ".git/*", "wandb/*", "wandb_run_id", "*__pycache__/*"),
    *("*.tmp", "*.tmp-*", "*.tmp/*", "*.lock", "*.incomplete"),
)
DOWNLOAD_ATTEMPTS = 2
#: Where a run keeps its training checkpoints, a folder a step.
CHECKPOINTS = "checkpoints"


class HubError(HfseqError):
    """The Hub refused a push or could not be reached."""


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
    cache = None if cache_dir is None else os.fspath(cache_dir)
    return _download(name, path, revision, cache, token, local_files_only, force_download)


def _download(
    name: str,
    path: PurePosixPath,
    revision: str | None,
    cache_dir: str | None,
    token: str | bool | None,
    local_files_only: bool,
    force_download: bool,
) -> str | None:
    from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

    offline = local_files_only or constants.HF_HUB_OFFLINE

    def cached(file: str) -> object:
        return try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)

    def download() -> str:
        return hf_hub_download(
            name,
            str(path),
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=offline,
            force_download=force_download and not offline,
            library_name="hfseq",
        )

    try:
        return with_retries(download, attempts=1 if offline else DOWNLOAD_ATTEMPTS)
    except errors.LocalEntryNotFoundError as error:
        # Offline, a checkpoint whose configuration is cached simply lacks the other files.
        known = [cached(str(path.with_name("config.json"))), cached("config.json")]
        if offline and path.name != "config.json" and any(isinstance(k, str) for k in known):
            return None
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(_not_loaded(name, revision, error, offline)) from error
    except errors.EntryNotFoundError:
        return None
    except Exception as error:
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
    return f"cannot load {where} from the Hub: {explain(error)}"


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload with hfseq",
    revision: str | None = None,
    allow_patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] | None = DEFAULT_IGNORE,
    checkpoint: bool = False,
) -> str:
    """Push a complete folder as one commit, creating the repository if need be.

    Returns the address of the commit (of the newest one when nothing has changed). Transient
    failures are retried, honouring Retry-After; anything else raises HubError. Files that are on
    the Hub but not in the folder stay there. A push that was interrupted resumes cheaply: large
    files that have arrived are not sent again.

    With ``checkpoint`` the newest training checkpoint goes along and replaces the one on the Hub.
    """
    from huggingface_hub import HfApi

    files = list(files_to_push(Path(folder), allow_patterns, ignore_patterns, checkpoint))
    if not files:
        raise UsageError(f"nothing to push: {folder} holds no file of a model")
    api = HfApi(token=token, library_name="hfseq")
    try:
        name = with_retries(lambda: _create(api, repo_id, private, revision))
        return with_retries(lambda: _commit(api, name, files, message, revision, checkpoint))
    except Exception as error:
        if isinstance(error, HfseqError) or not is_hub_error(error):
            raise
        reason = redact(explain(error), token)
        raise HubError(f"cannot push {folder} to '{repo_id}': {reason}") from error


def _create(api: Any, repo_id: str, private: bool, revision: str | None) -> str:
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


def _commit(
    api: Any,
    name: str,
    files: list[tuple[str, Path]],
    message: str,
    revision: str | None,
    checkpoint: bool,
) -> str:
    # Not upload_folder: with Xet, which is on by default, it makes several commits of one folder.
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=n, path_or_fileobj=p) for n, p in files
    ]
    if checkpoint:
        # Two checkpoints side by side would be taken for a run's own history.
        there = api.list_repo_files(name, revision=revision)
        old = {file for file in there if file.startswith(f"{CHECKPOINTS}/")} - dict(files).keys()
        operations += [CommitOperationDelete(path_in_repo=file) for file in sorted(old)]
    return api.create_commit(
        name, operations, commit_message=message or "Upload with hfseq", revision=revision
    ).commit_url


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
    newest = _newest_checkpoint(folder) if checkpoint else None
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file():
            continue
        in_checkpoint = newest is not None and path.is_relative_to(newest)
        if not in_checkpoint and any(fnmatch(name, pattern) for pattern in ignore or ()):
            continue
        if in_checkpoint or allow is None or any(fnmatch(name, pattern) for pattern in allow):
            _refuse_foreign(path, folder)
            yield name, path


def _refuse_foreign(path: Path, folder: Path) -> None:
    """Refuse to publish what a link points to elsewhere; the Hub's own cache is made of links."""
    if not path.is_symlink():
        return
    real, own = path.resolve(), folder.resolve()
    if not any(real.is_relative_to(place) for place in (own, own.parents[1] / "blobs")):
        raise UsageError(
            f"{path} is a link to {real}, outside of the folder: put a copy there if it is to be "
            "published, or remove the link"
        )


def _newest_checkpoint(folder: Path) -> Path | None:
    # A checkpoint under way has a longer name: it gets its number when it is complete.
    complete = [path for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return max(complete, key=lambda path: int(path.name), default=None)

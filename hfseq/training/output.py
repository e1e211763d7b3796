"""Devices: the right kind, a cache of compiled programs, and profiles of chosen steps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from hfseq.errors import UsageError

logger = logging.getLogger(__name__)


def require_device(wanted: str | None) -> None:
    """Refuse to run on another kind of device than the one asked for."""
    if wanted is None:
        return
    backend = "gpu" if wanted == "cuda" else wanted
    if jax.default_backend() != backend:
        found = ", ".join(sorted({f"{d.platform} ({d.device_kind})" for d in jax.devices()}))
        extra = "cuda" if backend == "gpu" else backend
        raise UsageError(
            f"--device {wanted} was asked for, but jax sees only {found}: install hfseq[{extra}], "
            "look at `hfseq env`, or drop --device"
        )


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs between runs."""
    if folder == "none" or jax.config.values["jax_compilation_cache_dir"]:
        return
    cache = Path(os.environ.get("HFSEQ_CACHE") or "~/.cache/hfseq").expanduser()
    path = folder or str(cache / "xla")
    jax.config.update("jax_compilation_cache_dir", path)
    logger.debug("compiled programs are kept in %s", path)


try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]


FILE = ".hfseq-run.lock"


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of an output directory while the body runs.

    The system frees it when its holder ends, however that ends, so a file that a killed run left
    blocks nobody. Where a file system has no locks, a warning says so.

    Raises:
        UsageError: another run holds it; with that run's process, machine and time of start.
    """
    if fcntl is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--output_dir {folder} is in use by {_holder(file.read())}: wait until it has "
                "ended, or give another directory"
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): nothing keeps a second run out of it",
                folder, error.strerror,
            )  # fmt: skip
        own = {"process": os.getpid(), "machine": socket.gethostname(), "since": _now()}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(own))
        file.flush()
        yield


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _holder(text: str) -> str:
    try:
        known = json.loads(text)
        return f"process {known['process']} on {known['machine']} since {known['since']}"
    except (ValueError, KeyError, TypeError):  # it is just writing its name
        return "another run"

"""Devices: the right kind, a cache of compiled programs, and profiles of chosen steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax

from hfseq.errors import UsageError
from hfseq.training.arguments import profiled_steps

logger = logging.getLogger(__name__)


class Profiler:
    """Writes a jax profile of the steps ``first-last``, both included, to ``folder/profile``.

    Steps count from 1, as in the log. A run that goes on in the middle of them profiles the rest.
    """

    def __init__(self, steps: str | None, folder: Path):
        self.folder, self.running = folder / "profile", False
        self.first, self.last = profiled_steps(steps) if steps else (0, 0)

    def at(self, step: int, before: Any = None) -> None:
        """Start or stop before ``step`` runs; ``before`` is what the step before it measured.

        Steps run while the host is ahead of them, so the one before has to be over.
        """
        if not self.running and self.first <= step <= self.last:
            jax.block_until_ready(before)
            jax.profiler.start_trace(str(self.folder))
            self.running = True
        elif self.running and step > self.last:
            self.close(before)

    def close(self, before: Any = None) -> None:
        """Write what was recorded, once ``before`` is there."""
        if self.running:
            jax.block_until_ready(before)
            jax.profiler.stop_trace()
            self.running, self.first = False, self.last + 1
            logger.info("profile written to %s (open it with TensorBoard or xprof)", self.folder)


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

"""The key-value store of jax's coordinator: the one file that knows jax's private names for it.

Messages between processes go through it: flags, verdicts, errors. The numbers of training never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hfseq.training.process_arguments import ProcessArguments

FOREVER = 7 * 24 * 3600 * 1000  # milliseconds; dead processes are found by their heartbeats


def _state() -> Any:
    from jax._src.distributed import global_state

    return global_state


def client() -> Any:
    """Return jax's client of the coordinator, or None where there is one process."""
    return _state().client


def process_index() -> int:
    """Return the number of this process, without starting jax's devices."""
    return _state().process_id


def process_count() -> int:
    """Return how many processes there are, without starting jax's devices."""
    return _state().num_processes


def detect(processes: ProcessArguments) -> list[Any]:
    """Return address, count and number; a cluster that jax knows fills in what was not said."""
    from jax._src.clusters import ClusterEnv

    found = ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address=processes.address, num_processes=processes.count,
        process_id=processes.number, local_device_ids=processes.devices,
        cluster_detection_method=None, initialization_timeout=processes.coordinator_timeout,
    )  # fmt: skip
    return list(found[:3])


def write(key: str, value: str, overwrite: bool = False) -> None:
    """Put a value (not empty) into the store; without ``overwrite`` a second one is an error."""
    client().key_value_set(key, value, overwrite)


def wait_for(key: str) -> str:
    """Return a value when some process has written it."""
    return client().blocking_key_value_get(key, FOREVER)


def read(key: str) -> str:
    """Return a value, or an empty text: not there, or no store any more (jax reports that)."""
    try:
        return client().key_value_try_get(key)
    except Exception:
        return ""


def count(folder: str) -> int:
    """Return how many keys begin with ``folder``."""
    try:
        return len(client().key_value_dir_get(folder))
    except Exception:
        return 0


def poll(ready: Callable[[], Any], seconds: float) -> Any:
    """Return the first true ``ready()`` within so many seconds, or its last value."""
    end = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < end:
        time.sleep(0.1)
    return found

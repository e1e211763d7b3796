"""What a run says while it trains: metrics, a progress bar, and a loss that went wrong."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.errors import NonFiniteLoss
from hfseq.training import throughput

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

logger = logging.getLogger(__name__)


def log(loop: Loop, bar: Any) -> None:
    """Read the sums of the log window, empty it, and report."""
    window = _empty_window(loop)
    step, bad = loop.progress.step, window.pop("bad_steps")
    if bad:
        not_finite(loop, int(bad))
    rate = float(loop.schedule(step - 1))
    measured = loop.objective.metrics(window) | extra_metrics(loop)
    loop.metrics |= {
        **{f"train_{name}": value for name, value in measured.items()},
        "train_learning_rate": rate,
        "train_grad_norm": float(loop.last_step["grad_norm"]),
        "tokens_seen": float(loop.progress.tokens_seen),
        **loop.meter.read(),
        "peak_memory_gb": throughput.peak_memory_gb(),
        "train_runtime": loop.progress.seconds,
    }
    if not loop.arguments.data.streaming:
        loop.metrics["epoch"] = step / len(loop.data.train)
    loop.report({k: v for k, v in loop.metrics.items() if not k.startswith("eval_")}, step)
    bar.set_postfix(loss=f"{measured['loss']:.3f}")
    if bar.disable and jax.process_index() == 0:
        line = f"Step... ({step} | Loss: {measured['loss']:.6g}, Learning Rate: {rate:.6g})"
        print(line, flush=True)


def extra_metrics(loop: Loop) -> dict[str, float]:
    """Read what the model reports of its collections, e.g. how many codes are in use."""
    if not loop.state["extra"]:
        return {}
    found = jax.device_get(loop.read_extra(loop.state["extra"]))
    return {name: float(value) for name, value in found.items()}


def _empty_window(loop: Loop) -> dict[str, float]:
    window = loop.state["window"]
    sums = {name: float(value) for name, value in jax.device_get(window).items()}
    loop.state["window"] = jax.tree.map(_zeros, window)
    return sums


def _zeros(like: jax.Array) -> jax.Array:
    """Return zeros of the same place; device_put would have all processes compare theirs."""
    zero = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: zero[index])


def not_finite(loop: Loop, count: int) -> None:
    """Stop the run, or say how many steps were skipped, as ``--on_non_finite`` asks."""
    step = loop.progress.step
    if loop.training.on_non_finite == "skip":
        logger.warning(
            "%d steps up to %d had a non-finite loss or gradient and were skipped", count, step
        )
        return
    loop.checkpoints.settle()
    kept = loop.checkpoints.steps()
    saved = f"the checkpoint of step {kept[-1]} is kept" if kept else "nothing was saved yet"
    raise NonFiniteLoss(
        f"the loss or a gradient became NaN or infinite at step {step} or since the last log; "
        f"{saved}. Lower --learning_rate, set --max_grad_norm 1, warm up for longer, or use "
        "--on_non_finite skip"
    )


def progress_bar(loop: Loop) -> Any:
    """Return a progress bar, which shows on a terminal only."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and not loop.training.disable_tqdm and jax.process_index() == 0
    return tqdm(
        total=loop.total_steps,
        initial=loop.progress.step,
        disable=not shown,
        unit="step",
        desc="Training",
    )

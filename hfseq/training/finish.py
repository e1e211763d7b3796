"""What a run leaves behind: model, tokenizer, evaluation results, plot, card, and the push."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import cards, plots
from hfseq.errors import HfseqError
from hfseq.hub_background import BackgroundPusher
from hfseq.training import card, setup, writing
from hfseq.whole_files import write_text

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

logger = logging.getLogger(__name__)


class Publisher:
    """Uploads the output directory after each save: to the Hub, to remote storage, or both."""

    def __init__(self, loop: Loop):
        training = loop.training
        self.workspace, self._checkpoints = loop.workspace, loop.checkpoints
        self._strategy = training.hub_strategy if training.push_to_hub else "none"
        self._pusher = None
        if training.push_to_hub and jax.process_index() == 0:
            name = training.hub_model_id or Path(training.output_dir.rstrip("/")).name
            self._pusher = BackgroundPusher(
                loop.folder,
                name,
                private=training.hub_private_repo,
                checkpoint=self._strategy == "checkpoint",
            )

    def publish(self, message: str) -> None:
        """Start uploading what was just saved; never stops training."""
        if self._strategy == "checkpoint":
            self._checkpoints.wait()  # else the one before would be pushed
        if self._pusher and self._strategy != "end":
            self._pusher.push(message)

    def finish(self, message: str) -> None:
        """Upload the final state and say what is left to do where that failed."""
        self.workspace.push(strict=True)
        if self._pusher:
            self._pusher.push(message)
            problem = self._pusher.finish()
            if problem:
                raise HfseqError(problem)


def save_model(loop: Loop) -> None:
    """Write weights, configuration and tokenizer into the output directory, all or nothing."""
    params = setup.to_host(loop.state["params"], loop.layout)
    extra = jax.tree.map(np.asarray, loop.state["extra"])  # replicated: every process has it
    if jax.process_index() != 0:
        return
    loop.model.save_pretrained(loop.folder, params=params, **({"extra": extra} if extra else {}))
    loop.tokenizer.save_pretrained(loop.folder)
    write_arguments(loop)
    loop.workspace.push()


def write_arguments(loop: Loop) -> None:
    """Write the run's flags to ``training_args.json``, which any training script reads as such."""
    values = {name: value for name, value in loop.arguments.as_dict().items() if value is not None}
    text = json.dumps(values, indent=4, sort_keys=True, default=str)
    write_text(loop.folder / "training_args.json", cards.private(text) + "\n")


def complete(loop: Loop) -> None:
    """Write results, curve and card, and push it all."""
    training = loop.training
    loop.checkpoints.finish(loop.progress.best_step)
    # By all processes: their parameters are gathered for it.
    examples = card.samples(loop) if training.do_train else []
    if jax.process_index() != 0:
        return
    if loop.written is None:  # else they were shown when they were written
        writing.show(loop, "eval_samples", ("given", "model"), examples)
    write_results(loop)
    if training.do_train:
        curve = draw_curve(loop)
        card.write_card(loop, curve, examples)
    loop.publisher.finish("End of training")


def choose_weights(loop: Loop) -> bool:
    """Put the weights in place that the run is to leave, if those are not the last; save them.

    The best checkpoint's with ``load_best_model_at_end``, the mean of the last ones with
    ``average_checkpoints``. Returns whether anything changed.
    """
    training = loop.training
    if training.load_best_model_at_end:
        changed = _load_best(loop)
    elif training.average_checkpoints:
        changed = _average(loop, training.average_checkpoints)
    else:
        return False
    if changed:
        save_model(loop)
    return changed


def _load_best(loop: Loop) -> bool:
    best = loop.progress.best_step
    if best is None or best not in loop.checkpoints.steps():
        logger.warning(
            "--load_best_model_at_end: the best evaluation was not saved; the last weights are left"
        )
        return False
    loop.state = loop.checkpoints.restore(best, _abstract(loop))
    logger.info(
        "the weights of step %d, the best by %s, are saved",
        best,
        loop.training.metric_for_best_model,
    )
    return best != loop.progress.step


def _average(loop: Loop, count: int) -> bool:
    """Replace the weights by the mean of the last checkpoints' (Vaswani et al., 2017, section 6.1).

    Statistics beside the weights are averaged with them: they describe these weights, not the
    last. Of the collections that training overwrites (FP8 scales) the largest counts: a mean might
    clip. Sums are of float32, one checkpoint in memory at a time.
    """
    steps = loop.checkpoints.steps()[-count:]
    if len(steps) < count:
        logger.warning(
            "--average_checkpoints %d: there are %d checkpoints; their mean is taken",
            count, len(steps),
        )  # fmt: skip
    if len(steps) < 2:
        return False
    add = jax.jit(lambda total, part: jax.tree.map(_add, total, part))
    total: Any = None
    largest: dict[str, Any] = {}
    for step in steps:
        restored = loop.checkpoints.restore(step, _abstract(loop))
        extra = dict(restored["extra"])
        scales = {name: extra.pop(name) for name in loop.model.overwritten_extra}
        largest = jax.tree.map(jnp.maximum, largest, scales) if largest else scales
        part = {"params": restored["params"], "extra": extra}
        total = jax.tree.map(_widen, part) if total is None else add(total, part)
    old = {"params": loop.state["params"]}
    old["extra"] = {
        name: loop.state["extra"][name] for name in loop.state["extra"].keys() - largest
    }
    mean = jax.jit(lambda sums, old: jax.tree.map(lambda a, b: _mean(a, b, len(steps)), sums, old))
    new = mean(total, old)
    loop.state = {**loop.state, "params": new["params"], "extra": new["extra"] | largest}
    logger.info("the mean of the weights of the steps %s is saved", ", ".join(map(str, steps)))
    return True


def _widen(leaf: Any) -> Any:
    return leaf.astype(np.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _add(total: Any, leaf: Any) -> Any:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return total + leaf.astype(total.dtype) if floating else leaf


def _mean(total: Any, like: Any, count: int) -> Any:
    """Of the sum of ``count`` leaves; what is no floating number is the last one's."""
    floating = jnp.issubdtype(like.dtype, jnp.floating)
    return (total / count).astype(like.dtype) if floating else total


def _abstract(loop: Loop) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), loop.state
    )


def write_results(loop: Loop) -> None:
    """Write ``eval_results.json``, ``train_results.json`` … with v4's keys."""
    loop.folder.mkdir(parents=True, exist_ok=True)  # an evaluation alone may be the first to write
    for split in ("eval", "train", "predict"):
        found = {k: v for k, v in loop.metrics.items() if k.startswith(f"{split}_")}
        if found:
            # JSON has no NaN, which a correlation with a constant is.
            shown = {k: v if math.isfinite(v) else None for k, v in found.items()}
            text = json.dumps(shown, indent=4, sort_keys=True) + "\n"
            write_text(loop.folder / f"{split}_results.json", text)


def draw_curve(loop: Loop) -> str:
    """Draw the learning curve from the log; returns its file name, or '' where there is no log."""
    log = loop.folder / "metrics.jsonl"
    if not log.exists():
        return ""
    try:
        plots.learning_curve(log, loop.folder / "learning_curve.png", title=card.run_name(loop))
    except (HfseqError, OSError) as error:
        logger.warning("no learning curve was drawn: %s", error)
        return ""
    return "learning_curve.png"

"""What a run leaves behind: model, tokenizer, evaluation results, plot, card, and the push."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import errors, plugins
from hfseq.checkpoints.hub import BackgroundPusher
from hfseq.errors import HfseqError, write_whole
from hfseq.nn import trees
from hfseq.plugins.registry import describe
from hfseq.reports import cards, plots
from hfseq.training import evaluation, setup

if TYPE_CHECKING:
    from hfseq.training.run import Loop

logger = logging.getLogger(__name__)

#: File of what a card says and no log does, from which another card can be made.
FACTS = "run.json"


# What `CardContext.with_log` and the architecture's plugin fill in.
_OF_THE_LOG = (
    *("model_name", "steps", "tokens_seen", "throughput", "mfu", "eval_results", "curve_file"),
    *("about", "citation", "repo_id"),
)


_NO_HYPERPARAMETERS = (
    *("output_dir", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy"),
    *("report_to", "debug", "card_license", "card_language", "card_samples"),
    *("plugin", "run_name", "disable_tqdm", "overwrite_output_dir", "train_file"),
    *(
        "validation_file",
        "test_file",
        "tokenizer_name",
        "config_name",
        "model_name_or_path",
        "cache_dir",
    ),
    *("data_cache_dir", "compilation_cache_dir", "do_train", "do_eval", "overwrite_cache"),
    *("resume_from_checkpoint", "use_fast_tokenizer", "logging_first_step"),
)


def write_card(loop: Loop, curve: str, examples: Sequence[tuple[str, str]] = ()) -> None:
    """Write the model card; its numbers are those of the log, ``examples`` of :func:`samples`."""
    arguments, progress, data = loop.arguments, loop.progress, loop.data
    source = arguments.data.dataset_name or _file_names(arguments.data.train_file or [])
    source = data.description.get("name", source)
    config = loop.model.config
    languages = [getattr(config, f"{side}_lang", None) for side in ("source", "target")]
    counts = data.description.get("train", {})
    spec = plugins.load().architectures.get(loop.model.config.model_type)
    model_type = loop.model.config.model_type
    hidden = {
        name: value
        for name, value in arguments.as_dict().items()
        if name not in _NO_HYPERPARAMETERS
    }
    context = cards.CardContext(
        model_name=run_name(loop),
        architecture=loop.model.torch_class_name(),
        model_type=model_type,
        command=arguments.command,
        datasets=[
            cards.CardDataset(
                name=source,
                config=arguments.data.dataset_config_name,
                files=arguments.data.train_file or (),
                documents=counts.get("documents"),
                tokens=counts.get("tokens"),
            )
        ],
        tokenizer=f"{type(loop.tokenizer).__name__} with {len(loop.tokenizer):,} entries",
        hyperparameters={
            name: value for name, value in hidden.items() if value not in (None, "", [], False)
        },
        hardware=_hardware(),
        versions={
            name: metadata.version(name)
            for name in ("hfseq", "jax", "flax", "transformers")
            if _has(name)
        },
        duration_s=progress.seconds,
        parameters=sum(
            int(np.prod(leaf.shape))
            for leaf in trees.flatten(loop.model.params_shape_tree).values()
        ),
        steps=progress.step,
        tokens_seen=progress.tokens_seen,
        curve_file=curve,
        repo_id=loop.training.hub_model_id or "",
        base_model=arguments.model.model_name_or_path,
        stock=_is_stock(loop.model.stored_config().model_type),
        custom_code=bool(getattr(loop.model.stored_config(), "auto_map", None)),
        sample_outputs=examples,
        language=loop.training.card_language or [code for code in languages if code] or None,
        licence=loop.training.card_license,
        about=spec.card or "",
        citation=spec.citation,
    )
    own = {
        split: getattr(arguments.data, f"{split}_file", None) for split in ("validation", "test")
    }
    judged = {split: _file_names(files) for split, files in own.items() if files}
    log = loop.folder / "metrics.jsonl"
    if log.exists():
        context = context.with_log(log, dataset=source, own=judged)
        context.duration_s = progress.seconds
    try:
        cards.write_model_card(loop.folder, context)
        known = _known(context) | {"judged_on": judged}
        text = json.dumps(known, indent=4, ensure_ascii=False, default=str)
        write_whole(loop.folder / FACTS, errors.private(text) + "\n")
    except OSError as error:
        logger.warning("no model card was written: %s", error)


def _known(context: cards.CardContext) -> dict[str, Any]:
    """Return what the card says and the log does not, without what is empty."""
    empty: tuple[Any, ...] = (None, "", (), [], {}, False)
    known = {k: v for k, v in dataclasses.asdict(context).items() if k not in _OF_THE_LOG}
    known["datasets"] = [
        {name: value for name, value in data.items() if value not in empty}
        for data in known["datasets"]
    ]
    kept = {name: value for name, value in known.items() if value not in empty}
    return kept | {"stock": context.stock}


def samples(loop: Loop) -> list[tuple[str, str]]:
    """Return what the model was given and what it answered.

    From the last evaluation that wrote texts; without one, to rows of the validation data.
    """
    count = loop.training.card_samples
    if loop.written is not None:
        pairs = [(source, text) for source, _, text in evaluation.samples_of(loop.written, count)]
    else:
        pairs = _answers(loop, count)
    return [(given, answer or "(nothing)") for given, answer in pairs]


def _answers(loop: Loop, count: int) -> list[tuple[str, str]]:
    judged = loop.data.evaluation
    if not count or judged is None:
        return []
    try:
        with evaluation.alone(loop) as (model, params):
            return loop.objective.samples(model, params, judged.rows, count)
    except Exception as error:  # the training is done: its card is not to fail for its examples
        logger.warning("the card has no sample outputs: %s", describe(error))
        return []


def _file_names(files: list[str]) -> str:
    """Name local data by folder and file: ``norwegian-laws/train.jsonl``."""
    return ", ".join("/".join(Path(name).parts[-2:]) for name in files) or "local data"


def run_name(loop: Loop) -> str:
    """Return the name of the run, by default that of its output directory."""
    return loop.training.run_name or Path(loop.training.output_dir.rstrip("/")).name


def _is_stock(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _has(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _hardware() -> str:
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {kind}"
    forced = f" as {len(devices)} jax devices" if len(devices) > 1 else ""
    return f"{os.cpu_count()} CPU cores ({platform.machine()}){forced}"


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
    write_whole(loop.folder / "training_args.json", errors.private(text) + "\n")


def complete(loop: Loop) -> None:
    """Write results, curve and card, and push it all."""
    training = loop.training
    loop.checkpoints.finish(loop.progress.best_step)
    # By all processes: their parameters are gathered for it.
    examples = samples(loop) if training.do_train else []
    if jax.process_index() != 0:
        return
    if loop.written is None:  # else they were shown when they were written
        evaluation.show(loop, "eval_samples", ("given", "model"), examples)
    write_results(loop)
    if training.do_train:
        curve = draw_curve(loop)
        write_card(loop, curve, examples)
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
            write_whole(loop.folder / f"{split}_results.json", text)


def draw_curve(loop: Loop) -> str:
    """Draw the learning curve from the log; returns its file name, or '' where there is no log."""
    log = loop.folder / "metrics.jsonl"
    if not log.exists():
        return ""
    try:
        plots.learning_curve(log, loop.folder / "learning_curve.png", title=run_name(loop))
    except (HfseqError, OSError) as error:
        logger.warning("no learning curve was drawn: %s", error)
        return ""
    return "learning_curve.png"

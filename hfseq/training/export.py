"""What a run leaves: the model, the weights that count, results, curve, card, and the push."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import errors, plugins
from hfseq.checkpoints import network
from hfseq.checkpoints.hub import BackgroundPusher
from hfseq.checkpoints.storage import Workspace
from hfseq.data.tokenizers import write_v4_config
from hfseq.errors import CheckpointError, HfseqError, write_atomically
from hfseq.nn import trees
from hfseq.objectives.base import GeneratedTexts
from hfseq.plugins.registry import describe_error
from hfseq.reports import cards, plots
from hfseq.training import evaluation
from hfseq.training.arguments import TrainingArguments
from hfseq.training.checkpointer import Checkpointer, Progress
from hfseq.training.processes import StopSignal
from hfseq.training.setup import Run
from hfseq.training.state import TrainState, to_host

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: File of what a card says and no log does, from which another card can be made.
CARD_DATA_FILE = "run.json"

#: Seconds without a byte moving that a run waits for which has to end: who stops it waits, too.
FINAL_UPLOAD_SECONDS = 30.0


def export(run: Run, state: TrainState, folder: Path) -> None:
    """Write weights, configuration, tokenizer and flags into ``folder``, each whole or not at all.

    All processes take part; process 0 writes. Any training script reads ``training_args.json``.
    """
    params = to_host(state.params, run.layout)
    extra = jax.tree.map(np.asarray, state.extra)  # replicated: every process has it
    if jax.process_index() != 0:
        return
    run.model.save_pretrained(folder, params=params, **({"extra": extra} if extra else {}))
    _save_tokenizer(run.tokenizer, folder)
    values = {name: v for name, v in run.arguments.as_dict().items() if v is not None}
    text = json.dumps(values, indent=4, sort_keys=True, default=str)
    write_atomically(folder / "training_args.json", errors.redact_private(text) + "\n")


def _adapter(model: FlaxPreTrainedModel) -> str:
    """Say what of a model with adapters was trained; "" for another."""
    config, shapes = model.peft_config, trees.flatten(model.abstract_params)
    if config is None:
        return ""
    count, all_ = (
        sum(int(np.prod(shapes[path].shape)) for path in paths)
        for paths in (model.trainable_paths, shapes)
    )
    name = str(config.base_model_name_or_path)
    name = Path(name).name if Path(name).exists() else name
    return (
        f"LoRA of rank {config.r}, {count:,} of {all_:,} parameters trained, for {name}; PyTorch "
        "loads it with the package peft"
    )


def _described(reader: Any) -> str:
    """Name a tokenizer and its size, or what reads pictures or sound in its place."""
    name = type(getattr(reader, "inputs", reader)).__name__
    if hasattr(reader, "tokenizer"):
        return f"{name}, {_described(reader.tokenizer)}"
    return f"{name} with {len(reader):,} entries" if hasattr(reader, "get_vocab") else name


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer file by file; a failure leaves those that were there."""
    with tempfile.TemporaryDirectory() as written:
        try:
            tokenizer.save_pretrained(written)
        except Exception as error:
            # The Rust library tells of the system's errors by their text alone.
            if type(error) is Exception and (told := re.search(r"\(os error (\d+)\)", str(error))):
                raise OSError(int(told[1]), os.strerror(int(told[1])), str(folder)) from error
            raise
        write_v4_config(Path(written))
        for path in sorted(Path(written).rglob("*")):
            target = folder / path.relative_to(written)
            if path.is_dir():
                target.mkdir(exist_ok=True)
                continue
            with errors.atomic_replace(target) as temporary:
                shutil.copyfile(path, temporary)


class Publisher:
    """Uploads the output directory after each save: to the Hub, to remote storage, or both."""

    def __init__(self, training: TrainingArguments, workspace: Workspace, saved: Checkpointer):
        self.workspace, self._saved = workspace, saved
        self._strategy = training.hub_strategy if training.push_to_hub else "none"
        self._pusher = None
        if training.push_to_hub and jax.process_index() == 0:
            self._pusher = BackgroundPusher(
                workspace.path,
                training.hub_model_id or Path(training.output_dir.rstrip("/")).name,
                private=training.hub_private_repo,
                checkpoint=self._strategy == "checkpoint",
            )

    def upload_to_storage(self) -> None:
        """Upload what was just saved to remote storage."""
        if jax.process_index() == 0:
            self.workspace.push()

    def publish(self, message: str) -> None:
        """Start uploading what was just saved; never stops training."""
        self.upload_to_storage()
        if self._strategy == "checkpoint":
            self._saved.wait()  # else the one before would be pushed
        if self._pusher and self._strategy != "end":
            self._pusher.push(message)

    def finish(self, message: str, stop: StopSignal) -> None:
        """Upload the final state, and say what is left to do where that failed.

        The Hub is left where it hangs (``--hub_timeout``), or at a signal, with a warning: the
        model is on disk. A run that a signal has stopped waits for less.

        Raises:
            HfseqError: the Hub refuses it, or it cannot be written to remote storage.
        """
        limit = min(network.stall_timeout, FINAL_UPLOAD_SECONDS if stop.received else math.inf)
        stored, error, problem = False, None, None
        try:
            with stop.interruptible():
                if self._pusher:
                    self._pusher.push(message)
                try:
                    stored = self.workspace.push(strict=True, timeout=limit)
                except CheckpointError as caught:
                    error = caught
                if self._pusher:
                    problem = self._pusher.finish(limit)
        except KeyboardInterrupt:
            name = signal.Signals(stop.received).name
            if self.workspace.is_remote and not stored:
                logger.warning(
                    "%s: the same command goes on", self.workspace.incomplete_message(name)
                )
            if self._pusher:
                self._pusher.stalled = True
                logger.warning("%s", self._pusher.incomplete_message(name))
            return
        if problem and (error or (self._pusher and self._pusher.stalled)):
            logger.warning("%s", problem)
        elif problem:
            raise HfseqError(problem)
        if error:
            raise error


# -- the weights that a run leaves


def choose_weights(
    run: Run, state: TrainState, progress: Progress, checkpointer: Checkpointer
) -> TrainState | None:
    """Return the state whose weights the run is to leave, or None where those are the last.

    The best checkpoint's with ``load_best_model_at_end``, the mean of the last ones with
    ``average_checkpoints``.
    """
    training = run.arguments.training
    if not training.load_best_model_at_end:
        count = training.average_checkpoints
        return average_weights(run, state, checkpointer, count) if count else None
    best = progress.best_step
    if best is None or best not in checkpointer.steps():
        logger.warning(
            "--load_best_model_at_end: the best evaluation was not saved; the last weights are left"
        )
        return None
    chosen = None
    if best != progress.step:
        chosen = checkpointer.restore(best, run.abstract_state())
    metric = training.metric_for_best_model
    logger.info("the weights of step %d, the best by %s, are saved", best, metric)
    return chosen


def average_weights(
    run: Run, state: TrainState, checkpointer: Checkpointer, count: int
) -> TrainState | None:
    """Return ``state`` with the mean of the last checkpoints' weights (Vaswani et al., 2017, 6.1).

    Statistics beside the weights are averaged with them: they describe these weights, not the
    last. Of the collections that training overwrites (FP8 scales) the largest counts: a mean might
    clip. Sums are of float32, one checkpoint in memory at a time.
    """
    steps = checkpointer.steps()[-count:]
    if len(steps) < count:
        logger.warning(
            "--average_checkpoints %d: there are %d checkpoints; their mean is taken",
            count,
            len(steps),
        )
    if len(steps) < 2:
        return None

    def is_float(leaf: jax.Array) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating)

    def widened(leaf: jax.Array) -> jax.Array:
        return leaf.astype(np.float32) if is_float(leaf) else leaf

    def added(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return total + leaf.astype(total.dtype) if is_float(leaf) else leaf

    def mean(total: jax.Array, like: jax.Array) -> jax.Array:  # else the last one's
        return (total / len(steps)).astype(like.dtype) if is_float(like) else total

    add = jax.jit(lambda total, part: jax.tree.map(added, total, part))
    total: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    for step in steps:
        restored = checkpointer.restore(step, run.abstract_state())
        extra = dict(restored.extra)
        scales = {name: extra.pop(name) for name in run.model.overwrite_with_gradient}
        largest = jax.tree.map(jnp.maximum, largest, scales) if largest else scales
        part = {"params": restored.params, "extra": extra}
        total = add(total, part) if total else jax.tree.map(widened, part)
    kept = {name: state.extra[name] for name in state.extra.keys() - largest.keys()}
    old = {"params": state.params, "extra": kept}
    new = jax.jit(lambda sums, old: jax.tree.map(mean, sums, old))(total, old)
    logger.info("the mean of the weights of the steps %s is saved", ", ".join(map(str, steps)))
    return dataclasses.replace(state, params=new["params"], extra=new["extra"] | largest)


# -- results, curve, card


def write_results(folder: Path, metrics: Mapping[str, float]) -> None:
    """Write ``eval_results.json``, ``train_results.json`` … with v4's keys."""
    folder.mkdir(parents=True, exist_ok=True)  # an evaluation alone may be the first to write
    for split in ("eval", "train", "predict"):
        # JSON has no NaN, which a correlation with a constant is.
        shown = {
            name: value if math.isfinite(value) else None
            for name, value in metrics.items()
            if name.startswith(f"{split}_")
        }
        if shown:
            text = json.dumps(shown, indent=4, sort_keys=True) + "\n"
            write_atomically(folder / f"{split}_results.json", text)


def run_name(training: TrainingArguments) -> str:
    """Return the name of the run, by default that of its output directory."""
    return training.run_name or Path(training.output_dir.rstrip("/")).name


def draw_curve(run: Run) -> str:
    """Draw the learning curve from the log; returns its file name, or '' where there is no log."""
    log, curve = run.folder / "metrics.jsonl", "learning_curve.png"
    if not log.exists():
        return ""
    try:
        plots.learning_curve(log, run.folder / curve, title=run_name(run.arguments.training))
    except (HfseqError, OSError) as error:
        logger.warning("no learning curve was drawn: %s", error)
        return ""
    return curve


def sample_outputs(
    run: Run, state: TrainState, texts: GeneratedTexts | None
) -> list[tuple[str, str]]:
    """Return what the model was given and what it answered, for the card.

    From ``texts``, the last that were written; without any, to rows of the validation data.
    """
    count = run.arguments.training.card_samples
    judged = run.data.evaluation if run.data else None
    pairs: Sequence[tuple[str, str]] = []
    if texts is not None:
        pairs = [(source, text) for source, _, text in evaluation.select_samples(texts, count)]
    elif count and judged is not None:
        try:
            with evaluation.inference_model(run, state) as (model, params):
                pairs = run.objective.samples(model, params, judged.rows, count)
        except Exception as error:  # the training is done: its card is not to fail for its examples
            logger.warning("the card has no sample outputs: %s", describe_error(error))
    return [(given, answer or "(nothing)") for given, answer in pairs]


# What `CardContext.with_log` and the architecture's plugin fill in.
_OF_THE_LOG = (
    *("model_name", "steps", "tokens_seen", "throughput", "mfu", "eval_results", "curve_file"),
    *("about", "citation", "repo_id"),
)
# Flags that say where and how, but nothing of what was trained.
_NO_HYPERPARAMETERS = (
    *("output_dir", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy"),
    "hub_timeout",
    *("report_to", "debug", "card_license", "card_language", "card_samples"),
    *("plugin", "run_name", "disable_tqdm", "overwrite_output_dir", "train_file"),
    *("validation_file", "test_file", "tokenizer_name", "config_name", "model_name_or_path"),
    *("cache_dir", "data_cache_dir", "compilation_cache_dir", "do_train", "do_eval"),
    *("overwrite_cache", "resume_from_checkpoint", "use_fast_tokenizer", "logging_first_step"),
)


def write_card(
    run: Run, progress: Progress, curve: str, examples: Sequence[tuple[str, str]] = ()
) -> None:
    """Write the model card and its facts; numbers are the log's, ``examples`` of :func:`samples`.

    A card that cannot be written is a warning.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    arguments, model = run.arguments, run.model
    training, data, config = arguments.training, arguments.data, model.config
    description = run.data.description if run.data else {}
    counts = description.get("train", {})
    source = description.get("name", data.dataset_name or _file_names(data.train_file or []))
    languages = [getattr(config, f"{side}_lang", None) for side in ("source", "target")]
    spec = plugins.load().architectures.get(config.model_type)
    stored = model.stored_config()
    devices = jax.devices()
    hardware = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu":
        forced = f" as {len(devices)} jax devices" if len(devices) > 1 else ""
        hardware = f"{os.cpu_count()} CPU cores ({platform.machine()}){forced}"
    versions = {}
    for name in ("hfseq", "jax", "flax", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    context = cards.CardContext(
        model_name=run_name(training),
        architecture=model.torch_class_name(),
        model_type=config.model_type,
        command=arguments.command,
        datasets=[
            cards.CardDataset(
                name=source,
                config=data.dataset_config_name,
                files=data.train_file or (),
                documents=counts.get("documents"),
                tokens=counts.get("tokens"),
            )
        ],
        tokenizer=_described(run.tokenizer),
        hyperparameters={
            name: value
            for name, value in arguments.as_dict().items()
            if name not in _NO_HYPERPARAMETERS and value not in (None, "", [], False)
            if arguments.model.use_peft or not name.startswith("lora_")
        },
        hardware=hardware,
        versions=versions,
        duration_s=progress.seconds,
        parameters=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model.abstract_params)),
        steps=progress.step,
        tokens_seen=progress.tokens_seen,
        curve_file=curve,
        repo_id=training.hub_model_id or "",
        base_model=arguments.model.model_name_or_path,
        pipeline_tag=run.objective.pipeline_tag,
        stock=stored.model_type in CONFIG_MAPPING_NAMES,
        custom_code=bool(getattr(stored, "auto_map", None)),
        sample_outputs=examples,
        language=training.card_language or [code for code in languages if code] or None,
        licence=training.card_license,
        about=spec.card or "",
        citation=spec.citation,
        adapter=_adapter(model),
        tags=run.objective.tags,
        chat=bool(getattr(run.tokenizer, "chat_template", None)),
    )
    own = {split: getattr(data, f"{split}_file", None) for split in ("validation", "test")}
    judged = {split: _file_names(names) for split, names in own.items() if names}
    log = run.folder / "metrics.jsonl"
    if log.exists():
        context = context.with_log(log, dataset=source, split_datasets=judged)
        context.duration_s = progress.seconds

    def told(facts: Mapping[str, Any]) -> dict[str, Any]:
        empty: tuple[Any, ...] = (None, "", (), [], {}, False)
        return {name: value for name, value in facts.items() if value not in empty}

    try:
        cards.write_model_card(run.folder, context)
        facts = {k: v for k, v in dataclasses.asdict(context).items() if k not in _OF_THE_LOG}
        facts["datasets"] = [told(one) for one in facts["datasets"]]
        facts = told(facts) | {"stock": context.stock, "judged_on": judged}
        text = json.dumps(facts, indent=4, ensure_ascii=False, default=str)
        write_atomically(run.folder / CARD_DATA_FILE, errors.redact_private(text) + "\n")
    except OSError as error:
        logger.warning("no model card was written: %s", error)


def _file_names(files: Sequence[str]) -> str:
    """Name local data by folder and file: ``norwegian-laws/train.jsonl``."""
    return ", ".join("/".join(Path(name).parts[-2:]) for name in files) or "local data"

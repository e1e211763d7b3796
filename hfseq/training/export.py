"""The output of a run: model, final weights, results, learning curve, model card, and uploads."""

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
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import errors, plugins
from hfseq.checkpoints import network
from hfseq.checkpoints.hub import BackgroundPusher
from hfseq.checkpoints.quantized import describe_origin
from hfseq.checkpoints.storage import Workspace
from hfseq.data.tokenizers import write_v4_config
from hfseq.errors import CheckpointError, HfseqError, write_atomically
from hfseq.modeling.sentence import MODULES_KEY
from hfseq.nn import trees
from hfseq.objectives.base import GeneratedTexts
from hfseq.plugins.registry import describe_error
from hfseq.reports import cards, plots
from hfseq.reports.log import read_metrics
from hfseq.training import evaluation
from hfseq.training.arguments import TrainingArguments
from hfseq.training.checkpointer import Checkpointer, Progress
from hfseq.training.processes import StopSignal
from hfseq.training.setup import Run
from hfseq.training.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: File with the data of the model card that is not in the log. The model card can be regenerated
#: from this file and the log.
CARD_DATA_FILE = "run.json"

#: If a signal stopped the run, its upload is abandoned after this many seconds without traffic.
FINAL_UPLOAD_SECONDS = 30.0


def export(run: Run, state: TrainState, folder: Path) -> None:
    """Writes weights, configuration, tokenizer and flags to `folder`, each file atomically.

    All processes must call this function. Process 0 writes the files. The flags are written to
    `training_args.json`, which can be passed to a training script in place of flags.
    """
    params = {
        path: run.layout.cut(path, leaf)
        for path, leaf in trees.flatten(state.inference_params).items()
    }
    extra = jax.tree.map(np.asarray, state.extra)  # replicated: every process has it
    run.model.save_pretrained(
        folder, params=trees.unflatten(params), **({"extra": extra} if extra else {})
    )
    if jax.process_index() != 0:
        return
    _save_tokenizer(run.tokenizer, folder)
    values = {name: v for name, v in run.arguments.as_dict().items() if v is not None}
    text = json.dumps(values, indent=4, sort_keys=True, default=str)
    write_atomically(folder / "training_args.json", errors.redact_private(text) + "\n")


def _describe_adapter(model: FlaxPreTrainedModel) -> str:
    """Describes the adapter of a model for the model card, or returns an empty string."""
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
        f"LoRA of rank {config.r} for {name}, {count:,} of {all_:,} parameters trained. PyTorch "
        "loads it with the peft package"
    )


def _describe_tokenizer(reader: Any) -> str:
    """Describes a tokenizer and its size, or an image or audio processor, for the model card."""
    name = type(getattr(reader, "input_processor", reader)).__name__
    if hasattr(reader, "tokenizer"):
        return f"{name}, {_describe_tokenizer(reader.tokenizer)}"
    return f"{name} with {len(reader):,} entries" if hasattr(reader, "get_vocab") else name


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves a tokenizer. If saving fails, existing files are kept."""
    with tempfile.TemporaryDirectory() as temporary_folder:
        try:
            tokenizer.save_pretrained(temporary_folder)
        except Exception as error:
            # The Rust library of tokenizers reports the error number of the operating system only
            # in its message.
            if type(error) is Exception and (
                errno_match := re.search(r"\(os error (\d+)\)", str(error))
            ):
                raise OSError(
                    int(errno_match[1]), os.strerror(int(errno_match[1])), str(folder)
                ) from error
            raise
        write_v4_config(Path(temporary_folder))
        for path in sorted(Path(temporary_folder).rglob("*")):
            target = folder / path.relative_to(temporary_folder)
            if path.is_dir():
                target.mkdir(exist_ok=True)
                continue
            with errors.atomic_replace(target) as temporary:
                shutil.copyfile(path, temporary)


class Publisher:
    """Uploads the output directory to the Hub, to remote storage, or to both.

    Args:
        training: The training flags.
        workspace: The output directory, and its location in remote storage if it has one.
        checkpointer: The checkpoints of the run.
    """

    def __init__(
        self, training: TrainingArguments, workspace: Workspace, checkpointer: Checkpointer
    ):
        self.workspace, self._checkpointer = workspace, checkpointer
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
        """Uploads new and changed files to remote storage."""
        if jax.process_index() == 0:
            self.workspace.push()

    def publish(self, message: str) -> None:
        """Uploads the last save to remote storage, and starts to push it to the Hub.

        With `--hub_strategy end`, nothing is pushed to the Hub before the end of the run. Failed
        uploads are logged and do not stop the run.

        Args:
            message: The commit message on the Hub.
        """
        self.upload_to_storage()
        if self._strategy == "checkpoint":
            self._checkpointer.wait()  # otherwise the checkpoint before the last would be pushed
        if self._pusher and self._strategy != "end":
            self._pusher.push(message)

    def finish(self, message: str, stop: StopSignal) -> None:
        """Uploads the final files, and logs how to complete the upload if it is abandoned.

        The upload is abandoned with a warning after `--hub_timeout` seconds without network
        traffic, or if a signal arrives. In both cases, the files remain on disk. If a signal has
        already stopped the run, the limit is at most `FINAL_UPLOAD_SECONDS`.

        Args:
            message: The commit message on the Hub.
            stop: The signal handler of the run.

        Raises:
            HfseqError: The Hub rejects the upload, or remote storage cannot be written.
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
                    "%s: run the same command again to continue",
                    self.workspace.incomplete_message(name),
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


# -- the final weights


def choose_weights(
    run: Run, state: TrainState, progress: Progress, checkpointer: Checkpointer
) -> TrainState | None:
    """Returns the state with the final weights, or `None` if these are the last weights.

    With `load_best_model_at_end`, the final weights are those of the best checkpoint. With
    `average_checkpoints`, they are the average of the weights of the last checkpoints.
    """
    training = run.arguments.training
    if not training.load_best_model_at_end:
        count = training.average_checkpoints
        return average_weights(run, state, checkpointer, count) if count else None
    best = progress.best_step
    if best is None or best not in checkpointer.steps():
        logger.warning(
            "--load_best_model_at_end: the best step was not saved, keeping the last weights"
        )
        return None
    best_state = None
    if best != progress.step:
        best_state = checkpointer.restore(best, run.abstract_state())
    metric = training.metric_for_best_model
    logger.info("saving the weights of step %d, which has the best %s", best, metric)
    return best_state


def average_weights(
    run: Run, state: TrainState, checkpointer: Checkpointer, count: int
) -> TrainState | None:
    """Returns `state` with the average of the weights of the last checkpoints.

    See Vaswani et al., 2017, section 6.1. Statistics in the model's non-parameter collections are
    averaged like the weights. FP8 scales are not averaged: their maximum is used, because large
    values might be clipped with the average scale. Sums are computed in float32. Checkpoints are
    loaded one at a time to save memory.

    Args:
        run: The run.
        state: The last state.
        checkpointer: The checkpoints of the run.
        count: The number of checkpoints.

    Returns:
        The new state, or `None` if there are fewer than two checkpoints.
    """
    steps = checkpointer.steps()[-count:]
    if len(steps) < count:
        logger.warning(
            "--average_checkpoints %d: only %d checkpoints exist, averaging these",
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

    def mean(total: jax.Array, like: jax.Array) -> jax.Array:  # integers keep the last value
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
    other_collections = {name: state.extra[name] for name in state.extra.keys() - largest.keys()}
    old = {"params": state.params, "extra": other_collections}
    new = jax.jit(lambda sums, old: jax.tree.map(mean, sums, old))(total, old)
    logger.info("saving the average of the weights of steps %s", ", ".join(map(str, steps)))
    return dataclasses.replace(state, params=new["params"], extra=new["extra"] | largest)


# -- results, learning curve, model card


def json_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replaces NaN and infinite metrics by `None`, because JSON does not support these values.

    For example, the correlation with a constant is NaN.
    """
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def write_results(folder: Path, metrics: Mapping[str, float]) -> None:
    """Writes `eval_results.json`, `train_results.json` and `predict_results.json`.

    The keys are the same as in Transformers 4.
    """
    folder.mkdir(parents=True, exist_ok=True)  # not created yet if the run only evaluates
    for split in ("eval", "train", "predict"):
        values = {
            name: value
            for name, value in json_metrics(metrics).items()
            if name.startswith(f"{split}_")
        }
        if values:
            text = json.dumps(values, indent=4, sort_keys=True) + "\n"
            write_atomically(folder / f"{split}_results.json", text)


def run_name(training: TrainingArguments) -> str:
    """Returns the name of the run. Default: the name of its output directory."""
    return training.run_name or Path(training.output_dir.rstrip("/")).name


def draw_curve(run: Run) -> str:
    """Draws the learning curve of the log.

    Returns:
        The file name of the image, or an empty string if the log does not exist or drawing fails.
    """
    log, curve = run.folder / "metrics.jsonl", "learning_curve.png"
    if not log.exists():
        return ""
    try:
        plots.learning_curve(log, run.folder / curve, title=run_name(run.arguments.training))
    except (HfseqError, OSError) as error:
        logger.warning("could not draw the learning curve: %s", error)
        return ""
    return curve


def sample_outputs(
    run: Run, state: TrainState, texts: GeneratedTexts | None
) -> list[tuple[str, str]]:
    """Returns pairs of prompt and output for the model card.

    If an evaluation has generated texts, the pairs are selected from `texts`. Otherwise, the model
    runs on rows of the validation split.
    """
    count = run.arguments.training.card_samples
    evaluation_data = run.data.evaluation if run.data else None
    pairs: Sequence[tuple[str, str]] = []
    if texts is not None:
        pairs = [(source, text) for source, _, text in evaluation.select_samples(texts, count)]
    elif count and evaluation_data is not None:
        try:
            with evaluation.inference_model(run, state) as (model, params):
                pairs = run.objective.samples(model, params, evaluation_data.rows, count)
        except Exception as error:  # missing examples must not fail a finished run
            logger.warning("no sample outputs in the model card: %s", describe_error(error))
    return [(prompt, answer or "(nothing)") for prompt, answer in pairs]


def _first_outputs(progress: Progress, examples: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the outputs before training for the inputs of `examples`, or an empty list."""
    outputs = {prompt: output for prompt, output in progress.first_samples or ()}
    if any(prompt not in outputs for prompt, _ in examples):
        return []
    return [outputs[prompt] for prompt, _ in examples]


# Fields that `CardContext.with_log` and the plugin of the architecture fill in.
_FIELDS_FROM_LOG = (
    *("model_name", "steps", "tokens_seen", "throughput", "mfu", "eval_results", "curve_file"),
    *("about", "citation", "repo_id"),
)
# Flags about paths, logging and uploads, which are not hyperparameters.
_NO_HYPERPARAMETERS = (
    *("output_dir", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy"),
    "hub_timeout",
    *("report_to", "debug", "card_license", "card_language", "card_samples"),
    *("plugin", "run_name", "disable_tqdm", "json", "overwrite_output_dir", "train_file"),
    *("validation_file", "test_file", "tokenizer_name", "config_name", "model_name_or_path"),
    *("cache_dir", "data_cache_dir", "compilation_cache_dir", "do_train", "do_eval"),
    *("overwrite_cache", "resume_from_checkpoint", "use_fast_tokenizer", "logging_first_step"),
)


def write_card(
    run: Run, progress: Progress, curve: str, examples: Sequence[tuple[str, str]] = ()
) -> None:
    """Writes the model card and its data file. If writing fails, a warning is logged.

    Args:
        run: The run.
        progress: The progress at the end.
        curve: The result of `draw_curve`.
        examples: The result of `sample_outputs`.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    arguments, model = run.arguments, run.model
    training, data, config = arguments.training, arguments.data, model.config
    description = run.data.description if run.data else {}
    counts = description.get("train", {})
    source = description.get("name", data.dataset_name or _file_names(data.train_file or []))
    languages = [getattr(config, f"{side}_lang", None) for side in ("source", "target")]
    spec = plugins.load().find_architecture(
        config.model_type, run.objective.task_head(config), arguments.model.bridge
    )
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
        tokenizer=_describe_tokenizer(run.tokenizer),
        hyperparameters={
            name: value
            for name, value in arguments.as_dict().items()
            if name not in _NO_HYPERPARAMETERS and value not in (None, "", [], False)
            if arguments.model.use_peft or not name.startswith("lora_")
        },
        hardware=hardware,
        versions=versions,
        duration_s=progress.seconds,
        parameters=_count_parameters(model),
        steps=progress.step,
        tokens_seen=progress.tokens_seen,
        curve_file=curve,
        repo_id=training.hub_model_id or "",
        base_model=arguments.model.model_name_or_path,
        dequantized_from=describe_origin(config),
        pipeline_tag=run.objective.pipeline_tag,
        stock=stored.model_type in CONFIG_MAPPING_NAMES,
        custom_code=bool(getattr(stored, "auto_map", None)),
        sample_outputs=examples,
        first_outputs=_first_outputs(progress, examples),
        language=training.card_language or [code for code in languages if code] or None,
        licence=training.card_license,
        about=spec.card or "",
        citation="\n\n".join(filter(None, (spec.citation, run.objective.citation))),
        extra_sections=_method_section(run, description),
        adapter=_describe_adapter(model),
        tags=run.objective.tags,
        chat=bool(getattr(run.tokenizer, "chat_template", None)),
    )
    split_files = {split: getattr(data, f"{split}_file", None) for split in ("validation", "test")}
    split_datasets = {split: _file_names(names) for split, names in split_files.items() if names}
    log = run.folder / "metrics.jsonl"
    if log.exists():
        context = context.with_log(log, dataset=source, split_datasets=split_datasets)
        context.duration_s = progress.seconds

    def non_empty(values: Mapping[str, Any]) -> dict[str, Any]:
        empty: tuple[Any, ...] = (None, "", (), [], {}, False)
        return {name: value for name, value in values.items() if value not in empty}

    try:
        cards.write_model_card(run.folder, context)
        card_data = {
            k: v for k, v in dataclasses.asdict(context).items() if k not in _FIELDS_FROM_LOG
        }
        card_data["datasets"] = [non_empty(dataset) for dataset in card_data["datasets"]]
        card_data = non_empty(card_data) | {"stock": context.stock, "judged_on": split_datasets}
        text = json.dumps(card_data, indent=4, ensure_ascii=False, default=str)
        write_atomically(run.folder / CARD_DATA_FILE, errors.redact_private(text) + "\n")
    except OSError as error:
        logger.warning("could not write the model card: %s", error)


def _method_section(run: Run, description: Mapping[str, Any]) -> list[str]:
    """Returns the section of the model card about the training method, if there is one."""
    log = run.folder / "metrics.jsonl"
    counts = {split: value for split, value in description.items() if isinstance(value, dict)}
    rows = run.objective.card_rows(counts, read_metrics(log) if log.exists() else [])
    if not rows:
        return []
    return ["\n".join(["## Method", "", "| | |", "|---|---|", *_table_rows(rows)])]


def _table_rows(rows: Mapping[str, str]) -> Iterator[str]:
    for name, value in rows.items():
        yield f"| {name} | {cards.shorten_paths(value).replace('|', chr(92) + '|')} |"


def _count_parameters(model: FlaxPreTrainedModel) -> int:
    """Returns the number of parameters that are saved with the model."""
    sizes = {p: math.prod(leaf.shape) for p, leaf in trees.flatten(model.abstract_params).items()}
    if model.sentence_config is None:  # the weights of modules are only used in training
        sizes = {path: size for path, size in sizes.items() if path[0] != MODULES_KEY}
    return sum(sizes.values())


def _file_names(files: Sequence[str]) -> str:
    """Returns the folder and file names of local data, e.g. `norwegian-laws/train.jsonl`."""
    return ", ".join("/".join(Path(name).parts[-2:]) for name in files) or "local data"

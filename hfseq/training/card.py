"""What the card of a run says: gathered from its flags, its model, its data and its log."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq import cards, plugins, trees
from hfseq.registry import describe
from hfseq.training import writing
from hfseq.whole_files import write_text

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

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
        write_text(loop.folder / FACTS, cards.private(text) + "\n")
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
        pairs = [(source, text) for source, _, text in writing.samples_of(loop.written, count)]
    else:
        pairs = _answers(loop, count)
    return [(given, answer or "(nothing)") for given, answer in pairs]


def _answers(loop: Loop, count: int) -> list[tuple[str, str]]:
    judged = loop.data.evaluation
    if not count or judged is None:
        return []
    try:
        with writing.alone(loop) as (model, params):
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

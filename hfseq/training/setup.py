"""What a run is made of: tokenizer, configuration, model, parameters, rows of data."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import plugins
from hfseq.checkpoints import config as config_checks
from hfseq.checkpoints.config import native_config, override, parse_overrides, preset_values
from hfseq.data.arguments import has_arrays
from hfseq.data.batches import Batches, StreamBatches, WindowBatches
from hfseq.data.streaming import StreamingBatches
from hfseq.data.tokenizers import check_vocabulary
from hfseq.errors import CheckpointError, HfseqError, UsageError, first_line
from hfseq.nn import fp8, sharding, trees
from hfseq.nn.precision import choose_precision
from hfseq.training.arguments import Arguments
from hfseq.training.checkpointer import Checkpointer, find, progress_of

if TYPE_CHECKING:
    from hfseq.training.run import Loop

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Windows:
    """How rows are cut: ``count`` windows of ``length`` tokens; ``streams`` never reset."""

    length: int
    count: int
    streams: bool


def plan(arguments: Any, objective: Any, model: Any, length: int) -> Windows | None:
    """Return how rows of ``length`` tokens are cut, or None where a row is one step.

    Raises:
        UsageError: what is trained cannot carry a state, or the length does not fit.
    """
    training = arguments.training
    window, streams = training.update_length, training.state_reset == "never"
    if window is None or not training.do_train:
        return None
    if problem := _problem(arguments, objective, model, length):
        raise UsageError(f"--update_length {window}: {problem}")
    return Windows(window, length // window, streams)


def _problem(arguments: Any, objective: Any, model: Any, length: int) -> str | None:
    """Say why windows cannot be, if so."""
    window, data = arguments.training.update_length, arguments.data
    name = model.config.model_type
    if not objective.carries_state:
        return (
            f"'{objective.name}' needs a row as a whole; only causal language modelling "
            "(run_clm_flax.py) trains it window by window"
        )
    if not model.fixed_state:
        return (
            f"'{name}' keeps keys and values of every token it has seen, so there is no state of "
            "fixed size to carry; vq_transformer has one. Drop the flag"
        )
    try:
        jax.eval_shape(lambda: model.init_cache(1, 0))
    except UsageError as error:  # an option of the configuration leaves it without a state
        return str(error)
    if has_arrays(data) and arguments.training.state_reset == "never":
        return (
            "--state_reset never needs one text to read on in, and images are rows of their own; "
            "drop --state_reset"
        )
    if length % window:
        fits = [n for n in range(1, length + 1) if length % n == 0][-6:]
        return (
            f"rows of {length} tokens are not whole windows: give a divisor of the row length "
            f"(such as {', '.join(map(str, fits))}), or another --block_size"
        )
    if data.streaming:
        return "--streaming has no row to go back to for its next window; drop one of the two"
    if data.line_by_line:
        return "--line_by_line makes rows of different lengths; drop one of the two"
    if not objective.cross_documents:
        return (
            "documents that share a row cannot be kept apart by a state that is carried on; add "
            "--cross_documents (the text is one stream)"
        )
    return None


ROLES = ("pad", "bos", "eos")


def _hub_options(arguments: Arguments) -> dict[str, Any]:
    model = arguments.model
    options = {"cache_dir": model.cache_dir, "revision": model.model_revision}
    return {name: value for name, value in options.items() if value is not None}


def load_tokenizer(arguments: Arguments, objective: Any, folder: Path) -> Any:
    """Load the tokenizer that the flags name, or have the objective make one in ``folder``."""
    from transformers import AutoTokenizer

    name = arguments.model.tokenizer_name or arguments.model.model_name_or_path
    if not name:
        made = objective.make_tokenizer(arguments.data, folder, plugins.load())
        if made is not None:
            return made
        raise UsageError(
            "no tokenizer: give --tokenizer_name (a directory or Hub name), or train one with "
            "scripts/train_tokenizer.py"
        )
    options = _hub_options(arguments) | {"trust_remote_code": arguments.model.trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # the Rust reader of tokenizer.json raises nothing more exact
        first = first_line(error)
        raise CheckpointError(
            f"cannot load the tokenizer '{name}' ({first}): give a directory that holds "
            "tokenizer.json, or a name on the Hub"
        ) from error


def load_config(arguments: Arguments, tokenizer: Any, objective: Any) -> Any:
    """Load or make the configuration, apply ``--config_overrides`` and check the vocabulary.

    ``objective`` is the class of the objective: it may have a default model type, and adapt the
    configuration (and the tokenizer).
    """
    from transformers import AutoConfig, PreTrainedConfig

    from hfseq.checkpoints.config import refuse_untrusted_config
    from hfseq.plugins import register_auto_classes

    register_auto_classes()
    model = arguments.model
    name = model.config_name or model.model_name_or_path
    if name:
        try:
            with config_checks.reading(name):
                stored, _ = PreTrainedConfig.get_config_dict(name, **_hub_options(arguments))
                config_checks.check_mapping(stored, name)
                refuse_untrusted_config(stored, model.trust_remote_code, name)
                config = native_config(
                    AutoConfig.from_pretrained(
                        name, trust_remote_code=model.trust_remote_code, **_hub_options(arguments)
                    )
                )
        except HfseqError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot load the configuration '{name}': {error}") from error
        config_checks.check_numbers(config, name)
        if model.model_type and model.model_type != config.model_type:
            raise UsageError(
                f"--model_type {model.model_type} and the configuration of {name} "
                f"('{config.model_type}') disagree: drop one of them"
            )
    elif model_type := model.model_type or objective.default_model_type:
        config = _fresh_config(model_type, tokenizer, model.preset)
    else:
        raise UsageError("no model: give --model_name_or_path, --config_name or --model_type")
    if name and model.preset:
        raise UsageError(
            f"--preset {model.preset} is a size for training from scratch, and {name} has one "
            "already: drop one of them"
        )
    if model.config_overrides:
        override(config, parse_overrides(model.config_overrides))
    objective.configure(config, tokenizer, weights_source(arguments) is None)
    objective.configure_data(config, arguments.data, plugins.load())
    check_vocabulary(tokenizer, config)
    return config


def _fresh_config(model_type: str, tokenizer: Any, preset: str | None) -> Any:
    """Make a configuration with the tokenizer's vocabulary and special tokens."""
    kind = plugins.load().architectures.get(model_type).load_config()
    sizes = preset_values(kind, preset, model_type)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ROLES}
    ids = {name: token for name, token in ids.items() if token is not None}
    # The tokenizer knows its size and its special tokens better than a preset.
    own = {name: ids[name] for name in ids if hasattr(kind, name)}
    config = kind(**{**sizes, "vocab_size": len(tokenizer), **own})
    ends = getattr(kind, "eos_token_id", None)
    for name in ("decoder_start_token_id", "forced_eos_token_id"):  # BART's are its end of text
        if ends is not None and getattr(config, name, None) == ends:
            setattr(config, name, config.eos_token_id)
    return config


def build_model(arguments: Arguments, config: Any, task: str) -> Any:
    """Build the structure of the model (no parameters yet)."""
    spec = plugins.load().architectures.get(config.model_type)
    if task not in spec.heads:
        raise UsageError(
            f"architecture '{config.model_type}' has no class {task} "
            f"(it has {', '.join(spec.heads)})"
        )
    model, head, source = arguments.model, spec.load_head(task), weights_source(arguments)
    # The checkpoint may decide about the structure (T5: is the head tied?).
    told = head.options_of(source, **_hub_options(arguments)) if source else {}
    made = head(
        config,
        seed=arguments.training.seed,
        _do_init=False,
        precision=choose_precision(
            model.recipe,
            model.computed_in,
            model.sites,
            amax_history_length=model.fp8_amax_history_length,
            margin=model.fp8_margin,
        ),
        scan_layers=model.scan_layers,
        gradient_checkpointing=model.gradient_checkpointing,
        attn_implementation=model.attn_implementation,
        **told,
    )
    fp8.advise(made.precision, getattr(config, "hidden_size", None))
    if model.gradient_checkpointing and not model.scan_layers and jax.default_backend() == "cpu":
        logger.warning(
            "--gradient_checkpointing saves little memory on a CPU unless layers are scanned: XLA "
            "computes them again before it needs them; add --scan_layers"
        )
    if source:  # what a fine-tuned model inherits: tokens it must not write, its longest output
        made.load_generation_config(source, **_hub_options(arguments))
    return made


def lay_out(model: Any, mesh: Mesh, sequence_parallel: bool = False) -> sharding.Layout:
    """Pair the architecture's sharding rules with the mesh, and have the model compute on it."""
    spec = plugins.load().architectures.get(model.config.model_type)
    layout = sharding.Layout(
        mesh,
        spec.load_sharding(),
        getattr(model.config, "vocab_size", None),
        tuple(model.stacked_prefixes),
    )
    sharding.check_heads(model, mesh)
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.params_shape_tree).items()}
    model.use_mesh(mesh, layout.axes(shapes), sequence_parallel)
    return layout


def make_params(arguments: Arguments, model: Any, layout: sharding.Layout) -> tuple[Any, Any]:
    """Load or initialise the parameters where they belong, and the collections beside them.

    No host holds a whole model: files are read by slices, and a fresh initialisation is compiled
    with its output shardings.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.params_shape_tree).items()}
    places = layout.shardings(shapes)
    path = weights_source(arguments)
    if path:
        params, extra = _load_params(arguments, model, layout, places, path)
    else:
        init = jax.jit(
            lambda key: trees.unflatten(
                {
                    p: layout.pad(p, leaf)
                    for p, leaf in trees.flatten(model.init_weights(key)).items()
                }
            ),
            out_shardings=trees.unflatten(places),
        )
        key = jax.random.PRNGKey(arguments.training.seed)
        params, extra = init(key), model.init_extra(key)
    dtype = arguments.model.param_dtype
    return (
        params if dtype == "float32" and not path else trees.cast_floating(params, dtype)
    ), extra


def weights_source(arguments: Arguments) -> str | None:
    """Return where the weights come from; evaluation alone falls back on the output directory."""
    training = arguments.training
    return arguments.model.model_name_or_path or (
        None if training.do_train else training.output_dir
    )


def _load_params(
    arguments: Arguments, model: Any, layout: sharding.Layout, places: dict, path: str
) -> Any:
    replicated = NamedSharding(layout.mesh, PartitionSpec())

    def place(name: trees.Path, shape: tuple[int, ...]) -> NamedSharding:
        return places[name] if layout.padded(name, shape) == shape else replicated

    loaded = type(model).from_pretrained(
        path, config=model.config, sharding=place, scan_layers=model.scan_layers,
        seed=arguments.training.seed, precision=model.precision,
        ignore_mismatched_sizes=getattr(arguments.data, "ignore_mismatched_sizes", False),
        **_hub_options(arguments),
    )  # fmt: skip
    flat = trees.flatten(loaded.params)
    padded = {
        name: jax.device_put(layout.pad(name, leaf), places[name]) for name, leaf in flat.items()
    }
    return trees.unflatten(padded), jax.device_put(loaded.extra, replicated)


@dataclasses.dataclass
class Prepared:
    """The data of a run; ``None`` where a split is not needed.

    ``test`` are rows to judge; what an objective writes texts of, it reads itself.
    """

    train: Any  # Batches or StreamingBatches
    evaluation: Any  # Batches
    length: int
    description: dict[str, Any]
    test: Any = None  # Batches


def prepare_data(
    arguments: Arguments,
    tokenizer: Any,
    objective: Any,
    length: int,
    train_batch: int,
    eval_batch: int,
    windows: Windows | None = None,
) -> Prepared:
    """Load, tokenise and pack the splits that the run needs; ``length`` is tokens of text a row.

    With ``windows`` a training batch is a window of its rows.
    """
    data, training = arguments.data, arguments.training
    splits = objective.load_splits(plugins.load())
    wanted = {"train": training.do_train, "validation": _evaluates(training),
              "test": training.do_predict}  # fmt: skip
    needed = [name for name, want in wanted.items() if want]
    absent = [name for name in needed if name not in splits]
    if absent:
        flags = {"train": "only --do_eval", "validation": "drop --do_eval",
                 "test": "--test_split_percentage, or drop --do_predict"}  # fmt: skip
        raise UsageError(
            f"the data has no {absent[0]} split: give --{absent[0]}_file, or {flags[absent[0]]}"
        )
    known = getattr(splits, "description", {})
    description: dict[str, Any] = {"name": known["name"]} if "name" in known else {}
    train: Any = None
    if "train" in needed:
        if data.streaming:
            train = StreamingBatches(
                splits["train"], tokenizer, splits.text_column, length, train_batch, training.seed,
                line_by_line=data.line_by_line, cross_documents=objective.cross_documents,
                keep_blank=data.keep_blank, append_eos=getattr(data, "append_eos", False),
            )  # fmt: skip
        else:
            streams = windows is not None and windows.streams
            row = windows.length if windows is not None and streams else length
            rows, description["train"] = objective.make_rows(splits, "train", row)
            train = _train_batches(rows, train_batch, training.seed, windows)
    judged = {}
    for split in ("validation", *(["test"] if objective.judges_test else [])):
        if split in needed:
            rows, description[split] = objective.make_rows(splits, split, length)
            judged[split] = Batches(rows, eval_batch, training.seed, shuffle=False)
    return Prepared(train, judged.get("validation"), length, description, judged.get("test"))


def _train_batches(rows: Any, size: int, seed: int, windows: Windows | None) -> Batches:
    if windows is None:
        return Batches(rows, size, seed)
    if windows.streams:
        return StreamBatches(rows, size, seed)
    return WindowBatches(rows, size, seed, windows.count)


def _evaluates(training: Any) -> bool:
    return training.do_eval or training.eval_strategy != "no"


def to_host(params: Any, layout: sharding.Layout) -> Any:
    """Gather parameters to the host without padding rows, ready to be saved."""

    def gather(path: trees.Path, leaf: jax.Array) -> np.ndarray:
        if not leaf.is_fully_addressable:
            leaf = _replicate(leaf, NamedSharding(layout.mesh, PartitionSpec()))
        return np.asarray(layout.cut(path, jnp.asarray(leaf)))

    return trees.unflatten(
        {path: gather(path, leaf) for path, leaf in trees.flatten(params).items()}
    )


@functools.partial(jax.jit, static_argnums=1)
def _replicate(leaf: jax.Array, everywhere: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, everywhere)


def read_progress(loop: Loop) -> None:
    """Find the checkpoint to resume and read its record, before the batch size is settled.

    Sets ``loop.restore_from``, ``loop.restore_step`` (None: nothing to resume) and
    ``loop.progress``.
    """
    source, wanted = loop.training.resume_from_checkpoint, None
    loop.restore_step, checkpoints = None, loop.checkpoints
    if not loop.training.do_train:
        return
    if source:
        folder, wanted = find(source)
        if folder.absolute() != loop.folder.absolute():
            checkpoints = Checkpointer(folder, limit=None)
    loop.restore_from = checkpoints
    steps = checkpoints.steps()
    loop.restore_step = wanted if wanted is not None else (steps[-1] if steps else None)
    if loop.restore_step is not None:
        if source and jax.process_index() == 0:  # else `set_damaged_aside` has looked
            checkpoints.check(loop.restore_step)
        loop.progress = progress_of(checkpoints, loop.restore_step)
    _keep_collections(loop)


def _keep_collections(loop: Loop) -> None:
    """Record what the state holds beside parameters, which a run cannot change on its way."""
    sizes = {
        name: sum(math.prod(leaf.shape) for leaf in trees.flatten(tree).values())
        for name, tree in loop.model.extra_shape_tree.items()
    }
    own = {"precision": loop.model.precision.name, "sizes": sizes}
    before = loop.progress.collections
    if before is not None and before["sizes"] != sizes:
        raise UsageError(
            f"the checkpoint of step {loop.restore_step} was trained with --precision "
            f"{before['precision']} and holds {_listed(before['sizes'])}; with --precision "
            f"{own['precision']} and these flags it would hold {_listed(sizes)}. Give the flags of "
            f"the run; or begin another with its weights: --model_name_or_path "
            f"{loop.training.output_dir} and a new --output_dir"
        )
    loop.progress.collections = own


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} ({size} numbers)" for name, size in sizes.items()) or "no collections"


def keep_windows(loop: Loop) -> None:
    """Record how rows are cut into windows; the state in a checkpoint belongs to that cut.

    Raises:
        UsageError: the checkpoint to go on from was trained with another one.
    """
    plan, progress = loop.windows, loop.progress
    own = None if plan is None else {
        "update_length": plan.length, "state_reset": "never" if plan.streams else "sequence",
        "block_size": plan.length * plan.count, "global_batch_size": loop.batch_size,
    }  # fmt: skip
    if loop.restore_step is not None and own != progress.windows:
        raise UsageError(
            f"the checkpoint of step {loop.restore_step} was trained {_told(progress.windows)}, "
            f"and the flags say {_told(own)}: give the same flags, or another --output_dir"
        )
    progress.windows = own


def _told(windows: dict[str, Any] | None) -> str:
    if windows is None:
        return "without --update_length"
    return "with " + " ".join(f"--{name} {value}" for name, value in windows.items())

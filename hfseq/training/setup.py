"""What a run is made of: tokenizer, configuration, model, parameters, rows of data."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import plugins, trees
from hfseq.data import tokenization
from hfseq.data.batches import Batches
from hfseq.data.packing import LineRows, PackedRows
from hfseq.data.sources import load_splits
from hfseq.data.streaming import StreamingBatches
from hfseq.data.tokenizers import check_vocabulary
from hfseq.errors import CheckpointError, UsageError
from hfseq.training import sharding
from hfseq.training.arguments import Arguments

logger = logging.getLogger(__name__)


def _hub_options(arguments: Arguments) -> dict[str, Any]:
    model = arguments.model
    options = {"cache_dir": model.cache_dir, "token": model.token, "revision": model.model_revision}
    return {name: value for name, value in options.items() if value is not None}


def load_tokenizer(arguments: Arguments) -> Any:
    """Load the tokenizer that the flags name."""
    from transformers import AutoTokenizer

    name = arguments.model.tokenizer_name or arguments.model.model_name_or_path
    if not name:
        raise UsageError(
            "no tokenizer: give --tokenizer_name (a directory or Hub name), or train one with "
            "scripts/train_tokenizer.py"
        )
    options = _hub_options(arguments) | {"trust_remote_code": arguments.model.trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"cannot load the tokenizer '{name}' ({first}): give a directory that holds "
            "tokenizer.json, or a name on the Hub"
        ) from error


def load_config(arguments: Arguments, tokenizer: Any) -> Any:
    """Load or make the configuration, apply ``--config_overrides`` and check the vocabulary."""
    from transformers import AutoConfig

    from hfseq.transformers_hook import register_auto_classes

    register_auto_classes()
    model = arguments.model
    name = model.config_name or model.model_name_or_path
    if name:
        try:
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=model.trust_remote_code, **_hub_options(arguments)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot load the configuration '{name}': {error}") from error
        if model.model_type and model.model_type != config.model_type:
            raise UsageError(
                f"--model_type {model.model_type} and the configuration of {name} "
                f"('{config.model_type}') disagree: drop one of them"
            )
    elif model.model_type:
        # A fresh configuration has the vocabulary that the tokenizer has.
        spec = plugins.load().architectures.get(model.model_type)
        config = spec.load_config()(vocab_size=len(tokenizer))
    else:
        raise UsageError("no model: give --model_name_or_path, --config_name or --model_type")
    if model.config_overrides:
        _override(config, model.config_overrides)
    check_vocabulary(tokenizer, config)
    return config


def _override(config: Any, changes: str) -> None:
    """Apply ``name=value,name=value`` with each value in the type of what it replaces."""
    import yaml

    for change in changes.split(","):
        name, equals, value = change.partition("=")
        name = name.strip()
        if not equals or not hasattr(config, name):
            raise UsageError(
                f"--config_overrides '{change}': give name=value with a name that "
                f"{type(config).__name__} has"
            )
        try:
            setattr(config, name, yaml.safe_load(value))
        except Exception as error:
            raise UsageError(f"--config_overrides '{change}': {error}") from error


def build_model(arguments: Arguments, config: Any, task: str) -> Any:
    """Build the structure of the model (no parameters yet)."""
    spec = plugins.load().architectures.get(config.model_type)
    if task not in spec.heads:
        raise UsageError(
            f"architecture '{config.model_type}' has no class {task} "
            f"(it has {', '.join(spec.heads)})"
        )
    model = arguments.model
    return spec.load_head(task)(
        config,
        seed=arguments.training.seed,
        _do_init=False,
        precision=model.recipe,
        scan_layers=model.scan_layers,
        gradient_checkpointing=model.gradient_checkpointing,
        attn_implementation=model.attn_implementation,
    )


def make_layout(model: Any, mesh: Mesh) -> sharding.Layout:
    """Pair the architecture's sharding rules with the mesh."""
    spec = plugins.load().architectures.get(model.config.model_type)
    return sharding.Layout(
        mesh,
        spec.load_sharding(),
        getattr(model.config, "vocab_size", None),
        tuple(model.stacked_prefixes),
    )


def make_params(arguments: Arguments, model: Any, layout: sharding.Layout) -> tuple[Any, dict]:
    """Load or initialise the parameters where they belong; returns them with their shardings.

    No host holds a whole model: files are read by slices, and a fresh initialisation is compiled
    with its output shardings.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.params_shape_tree).items()}
    places = layout.shardings(shapes)
    path = weights_source(arguments)
    if path:
        params = _load_params(arguments, model, layout, places, path)
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
        params = init(jax.random.PRNGKey(arguments.training.seed))
    dtype = arguments.model.param_dtype
    return (
        params if dtype == "float32" and not path else trees.cast_floating(params, dtype)
    ), places


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
        seed=arguments.training.seed,
        **_hub_options(arguments),
    )  # fmt: skip
    flat = trees.flatten(loaded.params)
    padded = {
        name: jax.device_put(layout.pad(name, leaf), places[name]) for name, leaf in flat.items()
    }
    return trees.unflatten(padded)


@dataclasses.dataclass
class Prepared:
    """The data of a run; ``None`` where a split is not needed."""

    train: Any  # Batches or StreamingBatches
    evaluation: Any  # Batches
    length: int
    description: dict[str, Any]


def row_length(arguments: Arguments, tokenizer: Any, model: Any) -> int:
    """Return tokens a row: what the flag says, else the longest that tokenizer and model allow."""
    limit = model.max_length()
    wanted = arguments.data.max_seq_length
    if wanted and limit and wanted > limit:
        raise UsageError(
            f"--max_seq_length {wanted} is longer than the position table of this model allows "
            f"({limit}): give at most {limit}, or a configuration with more max_position_embeddings"
        )
    return wanted or min(tokenizer.model_max_length, limit or 512)


def prepare_data(
    arguments: Arguments, tokenizer: Any, length: int, train_batch: int, eval_batch: int
) -> Prepared:
    """Load, tokenise and pack the splits that the run needs."""
    data, training = arguments.data, arguments.training
    splits = load_splits(data, plugins.load())
    needed = (["train"] if training.do_train else []) + (
        ["validation"] if _evaluates(training) else []
    )
    absent = [name for name in needed if name not in splits]
    if absent:
        raise UsageError(
            f"the data has no {absent[0]} split: give --{absent[0]}_file, or "
            + ("drop --do_eval" if absent[0] == "validation" else "only --do_eval")
        )
    description: dict[str, Any] = {}
    train: Any = None
    if "train" in needed:
        if data.streaming:
            train = StreamingBatches(
                splits["train"], tokenizer, splits.text_column, length, train_batch, training.seed,
                line_by_line=data.line_by_line,
            )  # fmt: skip
        else:
            rows = _rows(arguments, splits, "train", tokenizer, length, description)
            train = Batches(rows, train_batch, training.seed)
    evaluation = None
    if "validation" in needed:
        rows = _rows(arguments, splits, "validation", tokenizer, length, description)
        evaluation = Batches(rows, eval_batch, training.seed, shuffle=False)
    return Prepared(train, evaluation, length, description)


def _evaluates(training: Any) -> bool:
    return training.do_eval or training.eval_strategy != "no"


def _rows(
    arguments: Arguments, splits: Any, split: str, tokenizer: Any, length: int, facts: dict
) -> Any:
    data = arguments.data
    dataset = splits[split]
    if not hasattr(dataset, "__len__"):  # a streamed validation split is read once
        dataset = _materialise(dataset)
    store = tokenization.tokenize(
        dataset, tokenizer, splits.text_column, cache_dir=data.cache_directory,
        line_by_line=data.line_by_line, max_length=length, num_proc=data.preprocessing_num_workers,
        overwrite=data.overwrite_cache, description=f"Tokenising {split}",
    )  # fmt: skip
    facts[split] = {"documents": len(store), "tokens": store.total_tokens}
    return (
        LineRows(store, length, data.pad_to_max_length)
        if data.line_by_line
        else PackedRows(store, length)
    )


def _materialise(stream: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(stream))


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh, micro: int) -> dict[str, jax.Array]:
    """Cut a global batch into ``micro`` micro-batches and lay it over the mesh.

    Each process holds the whole host batch and puts only what its devices need on them. An array of
    the rows' own shape is split over ``sequence`` too; others (targets per group) are not.
    """
    rows = batch["input_ids"].shape

    def put(array: np.ndarray) -> jax.Array:
        cut = array.reshape(micro, array.shape[0] // micro, *array.shape[1:])
        place = sharding.batch_sharding(mesh, cut.ndim, split_length=array.shape == rows)
        return jax.make_array_from_callback(cut.shape, place, lambda index: cut[index])

    return {name: put(array) for name, array in batch.items()}


def to_host(params: Any, layout: sharding.Layout) -> Any:
    """Gather parameters to the host without padding rows, ready to be saved."""

    def gather(path: trees.Path, leaf: jax.Array) -> np.ndarray:
        if not leaf.is_fully_addressable:
            replicated = NamedSharding(layout.mesh, PartitionSpec())
            leaf = jax.jit(lambda x: x, out_shardings=replicated)(leaf)
        return np.asarray(layout.cut(path, jnp.asarray(leaf)))

    return trees.unflatten(
        {path: gather(path, leaf) for path, leaf in trees.flatten(params).items()}
    )

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
from hfseq.config_overrides import override, parse_overrides
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

ROLES = ("pad", "bos", "eos")


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


def load_config(arguments: Arguments, tokenizer: Any, objective: Any) -> Any:
    """Load or make the configuration, apply ``--config_overrides`` and check the vocabulary.

    ``objective`` is the class of the objective: it may have a default model type, and adapt the
    configuration (and the tokenizer).
    """
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
    elif model_type := model.model_type or objective.default_model_type:
        config = _fresh_config(model_type, tokenizer)
    else:
        raise UsageError("no model: give --model_name_or_path, --config_name or --model_type")
    if model.config_overrides:
        override(config, parse_overrides(model.config_overrides))
    objective.configure(config, tokenizer, weights_source(arguments) is None)
    check_vocabulary(tokenizer, config)
    return config


def _fresh_config(model_type: str, tokenizer: Any) -> Any:
    """Make a configuration with the tokenizer's vocabulary and special tokens."""
    kind = plugins.load().architectures.get(model_type).load_config()
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ROLES}
    ids = {name: token for name, token in ids.items() if token is not None}
    config = kind(
        vocab_size=len(tokenizer), **{name: ids[name] for name in ids if hasattr(kind, name)}
    )
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
    return head(
        config,
        seed=arguments.training.seed,
        _do_init=False,
        precision=model.recipe,
        scan_layers=model.scan_layers,
        gradient_checkpointing=model.gradient_checkpointing,
        attn_implementation=model.attn_implementation,
        **told,
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


def row_length(arguments: Arguments, tokenizer: Any, model: Any, objective: Any) -> int:
    """Return tokens a row: what the flag says, else the longest that tokenizer and model allow."""
    limit, data = model.max_length(), arguments.data
    wanted = data.row_length
    if wanted and limit and wanted > limit:
        flag = "max_seq_length" if data.max_seq_length else "block_size"
        raise UsageError(
            f"--{flag} {wanted} is longer than the position table of this model allows "
            f"({limit}): give at most {limit}, or a configuration with more max_position_embeddings"
        )
    longest = objective.default_length
    most = limit or longest
    if longest > 512:  # v4's limit for rows of causal models
        most = min(most, longest)
    return wanted or min(tokenizer.model_max_length, most)


def prepare_data(
    arguments: Arguments,
    tokenizer: Any,
    objective: Any,
    length: int,
    train_batch: int,
    eval_batch: int,
) -> Prepared:
    """Load, tokenise and pack the splits that the run needs; ``length`` is tokens of text a row."""
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
                line_by_line=data.line_by_line, cross_documents=objective.cross_documents,
                keep_blank=data.keep_blank,
            )  # fmt: skip
        else:
            rows = _rows(arguments, splits, "train", tokenizer, objective, length, description)
            train = Batches(rows, train_batch, training.seed)
    evaluation = None
    if "validation" in needed:
        rows = _rows(arguments, splits, "validation", tokenizer, objective, length, description)
        evaluation = Batches(rows, eval_batch, training.seed, shuffle=False)
    return Prepared(train, evaluation, length, description)


def _evaluates(training: Any) -> bool:
    return training.do_eval or training.eval_strategy != "no"


def _rows(
    arguments: Arguments,
    splits: Any,
    split: str,
    tokenizer: Any,
    objective: Any,
    length: int,
    facts: dict,
) -> Any:
    data, column = arguments.data, splits.text_column
    dataset = splits[split]
    if not hasattr(dataset, "__len__"):  # a streamed validation split is read once
        dataset = _materialise(dataset)
    store = tokenization.tokenize(
        dataset, tokenizer, column, cache_dir=data.cache_directory,
        line_by_line=data.line_by_line, max_length=length, num_proc=data.preprocessing_num_workers,
        overwrite=data.overwrite_cache, keep_blank=data.keep_blank,
        description=f"Tokenising {split}",
    )  # fmt: skip
    facts[split] = {"documents": len(store), "tokens": store.total_tokens}
    if split == "validation" and getattr(data, "word_perplexity", False):
        facts[split]["words"] = tokenization.count_words(dataset, column, data.keep_blank)
    if data.line_by_line:
        return LineRows(store, length, data.pad_to_max_length)
    return PackedRows(store, length, objective.cross_documents)


def _materialise(stream: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(stream))


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh, micro: int) -> dict[str, jax.Array]:
    """Cut a global batch into ``micro`` micro-batches and lay it over the mesh.

    Each process holds the whole host batch and puts only what its devices need on them. An array of
    the rows' own shape is split over ``sequence`` too, where that divides it; others (targets per
    group, a decoder's) are not.
    """
    rows = batch["input_ids"].shape

    def put(array: np.ndarray) -> jax.Array:
        cut = array.reshape(micro, array.shape[0] // micro, *array.shape[1:])
        split = array.shape == rows and not rows[1] % mesh.shape["sequence"]
        place = sharding.batch_sharding(mesh, cut.ndim, split_length=split)
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

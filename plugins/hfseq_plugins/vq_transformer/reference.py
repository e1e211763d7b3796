"""Converts checkpoints of the public Transformer-VQ code (Lingle, 2024), called the reference.

Depending on the branch, the reference writes one of two layouts. The *recurrent* layout (branches
`main`, `dev`, `legacy`) has one subtree per layer, and one kernel for keys, values and gate. In the
*stacked* layout (branch `optimized`), the first two axes of every leaf of the stack are (layers,
1). In both layouts, the statistics of codebooks are among the parameters. hfseq stores them in the
collection `codebook`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hfseq.errors import UsageError
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

# hfseq's names -> the reference's names of the parameters of an attention.
RECURRENT = {
    "input_norm/scale": "input_ln/g",
    "input_norm/bias": "input_ln/b",
    "q_proj/kernel": "q_proj/kernel",
    "r_proj/kernel": "r_proj/kernel",
    "o_proj/kernel": "res_proj/kernel",
    "content_bias": "u",
    "position_bias": "v",
}
STACKED = {
    "q_proj/kernel": "qkvg_producer/q_proj/kernel",
    "k_proj/kernel": "qkvg_producer/k_proj/kernel",
    "v_proj/kernel": "qkvg_producer/v_proj/kernel",
    "r_proj/kernel": "xl_bias_producer/xl_r_proj/kernel",
    "o_proj/kernel": "res_proj/kernel",
    "content_bias": "xl_bias_producer/xl_u",
    "position_bias": "xl_bias_producer/xl_v",
}
MLP = {"up_proj/kernel": "Dense_0/kernel", "down_proj/kernel": "Dense_1/kernel"}
# hfseq's names -> the reference's names of the options in the configuration.
OPTIONS = {
    "vocab_size": "n_vocab",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "head_dim": "d_k",
    "num_codes": "n_code",
    "block_size": "block_len",
    "sinusoid_base": "pe_lam",
    "absolute_positions": "pe_abs",
    "tie_word_embeddings": "e_tie",
    "final_norm": "e_preln",
    "logit_scale": "e_scale",
    "commitment_cost": "c_beta",
    "ema_decay": "c_gamma",
}
RECURRENT_OPTIONS = {
    "value_dim": "d_v",
    "window_size": "mem_len",
    "use_compressive_cache": "agg_cache",
}
DROPOUTS = {
    "embedding_dropout": "p_dropemb",
    "sinusoid_dropout": "p_dropsin",
    "residual_dropout": "p_dropres",
    "layer_dropout": "p_droplyr",
}
# `sum` computes the same as `serial` in another order of operations.
REDUCTIONS = {"serial": "serial", "matmul": "matmul", "assoc_scan": "associative_scan"}
REDUCTIONS |= {"sum": "serial"}


class ConvertedReference(NamedTuple):
    """A converted checkpoint.

    Attributes:
        config: The configuration.
        params: The parameters, for `model(..., params=params)`.
        extra: The other collections, for `model(..., extra=extra)`.
    """

    config: VQTransformerConfig
    params: dict[str, Any]
    extra: dict[str, Any]


class _Leaves:
    """Reads the leaves of a tree by name, and records which leaves are missing or unused."""

    def __init__(self, tree: Mapping[str, Any]):
        self.flat = flatten_dict(tree, sep="/")
        self.left, self.missing = set(self.flat), list[str]()

    def take(self, name: str, index: int | None = None) -> np.ndarray:
        """Returns a leaf, or its slice for layer `index` in the stacked layout."""
        if name not in self.flat:
            self.missing.append(name)
            return np.zeros(0, np.float32)
        self.left.discard(name)
        leaf = np.asarray(self.flat[name])
        if index is None:
            return leaf
        return leaf[index, 0]

    def peek(self, name: str) -> np.ndarray:
        """Returns a leaf without marking it as used.

        Raises:
            UsageError: The leaf is missing.
        """
        if name not in self.flat:
            raise UsageError(f"the tree does not match the configuration: the tree lacks {name}")
        return np.asarray(self.flat[name])

    def check(self) -> None:
        """Raises a UsageError that lists all missing and unexpected leaves, if there are any."""
        problems = (
            [f"the tree lacks {', '.join(sorted(set(self.missing)))}"] if self.missing else []
        )
        if self.left:
            problems.append(f"unexpected leaves: {', '.join(sorted(self.left))}")
        if problems:
            raise UsageError("the tree does not match the configuration: " + "; ".join(problems))


def convert_reference(params: Mapping[str, Any], options: Mapping[str, Any]) -> ConvertedReference:
    """Converts the parameters and the configuration of the public Transformer-VQ.

    Args:
        params: The nested parameters of the reference in one of the two layouts, or a train state
            with an entry `params`. Leaves are NumPy or JAX arrays.
        options: The configuration, with the names of the reference's command line (`n_layer`,
            `d_k`, `mem_len`, ...). Dropout rates are optional.

    Returns:
        The configuration, and parameters and collections in float32.

    Raises:
        UsageError: Leaves or options are missing, unexpected or inconsistent. The message lists
            them.
    """
    tree: Mapping[str, Any] = params
    while "params" in tree:
        tree = tree["params"]
    convert = _convert_stacked if "stack" in tree else _convert_recurrent
    if "stack" not in tree and "transformer_layers_0" not in tree:
        raise UsageError(
            f"unknown layout: the tree has {', '.join(sorted(tree)) or 'no entries'}, but "
            "Transformer-VQ has 'transformer_layers_0' (recurrent) or 'stack' (stacked)"
        )
    return convert(_Leaves(tree), options)


def read_reference(file: str | os.PathLike[str], options: Mapping[str, Any]) -> ConvertedReference:
    """Reads a checkpoint of the public Transformer-VQ, written with `flax.training.checkpoints`.

    Args:
        file: The msgpack file of parameters or of a train state.
        options: The configuration, see :func:`convert_reference`.

    Returns:
        The configuration, and parameters and collections in float32.

    Raises:
        UsageError: The file is not a msgpack tree, or :func:`convert_reference` raises an error.
    """
    from flax.serialization import msgpack_restore

    try:
        tree = msgpack_restore(Path(file).read_bytes())
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file} is not a msgpack tree: {error}") from error
    if not isinstance(tree, Mapping):
        raise UsageError(f"{file} contains a {type(tree).__name__} instead of a tree of parameters")
    return convert_reference(tree, options)


def _common(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Converts the dropout rates and the options in `names` (hfseq's -> the reference's names)."""
    missing = [theirs for theirs in names.values() if theirs not in options]
    if missing:
        raise UsageError(f"the configuration of Transformer-VQ lacks {', '.join(missing)}")
    values = {ours: options[theirs] for ours, theirs in names.items()}
    return values | {ours: options.get(theirs, 0.0) for ours, theirs in DROPOUTS.items()}


def _codebook(leaves: _Leaves, theirs: str, ours: str, layer: int | None = None) -> dict[str, Any]:
    """Returns the codebook of one attention, with zeros for the statistics of the next step."""
    sums, counts = (leaves.take(f"{theirs}/{name}", layer) for name in ("c_sum", "c_count"))
    statistics = {"sums": sums, "counts": counts}
    statistics |= {f"new_{name}": np.zeros_like(leaf) for name, leaf in statistics.items()}
    return {f"{ours}/codebook/{name}": leaf for name, leaf in statistics.items()}


def _finish(
    config: VQTransformerConfig, leaves: _Leaves, params: dict[str, Any], books: dict[str, Any]
) -> ConvertedReference:
    """Checks names and shapes, and returns nested trees of float32 arrays."""
    leaves.check()
    # The expected size of the last axis, for each leaf for which it follows from the options.
    columns = {
        "q_proj": config.query_heads * config.head_dim,
        "k_proj": config.key_heads * config.head_dim,
        "v_proj": config.key_heads * config.value_width,
        "o_proj": config.hidden_size,
        "down_proj": config.hidden_size,
        "embed_tokens": config.hidden_size,
        "lm_head": config.vocab_size,
        "lm_head_bias": config.vocab_size,
        "counts": config.num_codes,
    }
    wrong = [
        f"'{name}' has {leaf.shape[-1]} columns, but the configuration needs {columns[part]}"
        for name, leaf in (params | books).items()
        for part in name.split("/")[-2:]
        if part in columns and leaf.ndim and leaf.shape[-1] != columns[part]
    ]
    if wrong:
        raise UsageError("the tree does not match the configuration: " + "; ".join(wrong))

    def nest(flat: dict[str, Any]) -> dict[str, Any]:
        return unflatten_dict({n: np.asarray(v, np.float32) for n, v in flat.items()}, sep="/")

    return ConvertedReference(config, nest(params), {"codebook": nest(books)} if books else {})


# -- the recurrent layout
# ----------------------------------------------------------------------------------------


def _convert_recurrent(leaves: _Leaves, options: Mapping[str, Any]) -> ConvertedReference:
    heads = options.get("n_head", 1)
    config = VQTransformerConfig(
        **_common(options, OPTIONS | RECURRENT_OPTIONS),
        head_type="shga" if heads == 1 else "mhga",
        num_attention_heads=heads,
        num_key_value_heads=heads,
        stop_gradient_cache=not options.get("grad_thru_cache", True),
        head_bias=True,
    )
    keys, values = config.key_heads * config.head_dim, config.key_heads * config.value_width
    params: dict[str, Any] = {}
    books: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        for name, scanned in (("attention", "scanned_attn1"), ("attention_2", "scanned_attn2")):
            theirs, ours = f"transformer_layers_{layer}/{scanned}", f"model/layers/{layer}/{name}"
            for ours_leaf, theirs_leaf in RECURRENT.items():
                params[f"{ours}/{ours_leaf}"] = leaves.take(f"{theirs}/{theirs_leaf}")
            # The columns of keys of all heads, then those of values, then those of gates.
            fused = leaves.take(f"{theirs}/kvg_proj/kernel")
            if fused.shape[-1] not in (0, keys + 2 * values):
                raise UsageError(
                    f"kvg_proj has {fused.shape[-1]} columns, but n_head={config.key_heads}, "
                    f"d_k={config.head_dim} and d_v={config.value_width} need {keys + 2 * values}"
                )
            parts = np.split(fused, [keys, keys + values], axis=-1)
            params |= {f"{ours}/{n}_proj/kernel": x for n, x in zip("kvg", parts, strict=True)}
            books |= _codebook(leaves, f"{theirs}/quantizer", ours)
    params["model/embed_tokens/embedding"] = leaves.take("token_embedder/embs")
    if config.absolute_positions:
        params["model/position_scale"] = leaves.take("position_embedder/scale")
    if config.final_norm:
        params["model/norm/scale"] = leaves.take("out_ln/g")
        params["model/norm/bias"] = leaves.take("out_ln/b")
    if not config.tie_word_embeddings:
        leaves.left.discard("token_embedder/bias_out")  # saved, but unused by an untied head
        params["lm_head/kernel"] = leaves.take("out_proj/kernel")
    bias = "token_embedder/bias_out" if config.tie_word_embeddings else "out_proj/bias"
    params["lm_head_bias"] = leaves.take(bias)
    return _finish(config, leaves, params, books)


# -- the stacked layout
# ----------------------------------------------------------------------------------------


def _convert_stacked(leaves: _Leaves, options: Mapping[str, Any]) -> ConvertedReference:
    config = _stacked_config(leaves, options)
    depths = {leaf.shape[0] for name, leaf in leaves.flat.items() if name.startswith("stack/")}
    if depths != {config.num_hidden_layers}:
        raise UsageError(
            "the tree does not match the configuration: its leaves have "
            f"{' and '.join(map(str, sorted(depths)))} layers, but n_layer is "
            f"{config.num_hidden_layers}"
        )
    gated = config.head_type == "shga"
    names = STACKED | ({"g_proj/kernel": "qkvg_producer/g_proj/kernel"} if gated else {})
    params: dict[str, Any] = {}
    books: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        for number, name in enumerate(("attention", "attention_2") if gated else ("attention",)):
            theirs, ours = f"stack/VQAttention_{number}", f"model/layers/{layer}/{name}"
            for ours_leaf, theirs_leaf in names.items():
                params[f"{ours}/{ours_leaf}"] = leaves.take(f"{theirs}/{theirs_leaf}", layer)
            books |= _codebook(leaves, f"{theirs}/quantizer", ours, layer)
        for ours_leaf, theirs_leaf in {} if gated else MLP.items():
            kernel = leaves.take(f"stack/MultiLayerPerceptron_0/{theirs_leaf}", layer)
            params[f"model/layers/{layer}/mlp/{ours_leaf}"] = kernel
    params["model/embed_tokens/embedding"] = leaves.take("token_embed/embedding")
    if config.absolute_positions:
        params["model/position_scale"] = leaves.take("pos_embed/scale")
    if not config.tie_word_embeddings:
        params["lm_head/kernel"] = leaves.take("out_proj/kernel")
    if config.head_bias:
        params["lm_head_bias"] = leaves.take("out_proj/bias")
    return _finish(config, leaves, params, books)


def _stacked_config(leaves: _Leaves, options: Mapping[str, Any]) -> VQTransformerConfig:
    """Returns the configuration. Sizes that `options` lacks are read from the leaves' shapes."""
    fields, head_type = _common(options, OPTIONS), options.get("head_type", "shga")
    keys, values = (
        leaves.peek(f"stack/VQAttention_0/qkvg_producer/{name}_proj/kernel").shape[-1]
        for name in "kv"
    )
    key_heads = max(1, keys // fields["head_dim"])
    reduction = options.get("reduction_type", "serial")
    if reduction not in REDUCTIONS:
        raise UsageError(
            f"reduction_type='{reduction}' is unknown (known: {', '.join(REDUCTIONS)})"
        )
    if head_type != "shga":
        inner_width = leaves.peek("stack/MultiLayerPerceptron_0/Dense_0/kernel").shape[-1]
        fields |= {"intermediate_size": inner_width}
    return VQTransformerConfig(
        **fields,
        head_type=head_type,
        num_attention_heads=1
        if head_type == "shga"
        else fields["hidden_size"] // fields["head_dim"],
        num_key_value_heads=key_heads,
        value_dim=values // key_heads,
        window_size=options["block_len"],
        reduction=REDUCTIONS[reduction],
        attention_type=options.get("attn_type", "vq"),
        norm_affine=False,
        head_bias="out_proj/bias" in leaves.flat,
        scale_head_bias=False,
    )

"""Golden numbers, tiny models and comparisons for the tests of the VQ Transformer.

The golden file contains numbers of the public reference, described in `vq_golden.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn import trees
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.reference import ConvertedReference, convert_reference

MAIN = ("gau", "gau_l6_m3", "gau_noagg", "gau_untied", "mhga")
CASES = (*(f"main/{case}" for case in MAIN), "opt/shga", "opt/mqa")
# All head types, with options that differ from the defaults.
HEADS: dict[str, dict[str, Any]] = {
    "shga": {"head_type": "shga"},
    "mhga": {"head_type": "mhga", "num_attention_heads": 2, "value_dim": 6},
    "mha": {"head_type": "mha", "norm_affine": False, "head_bias": True, "logit_scale": 0.5},
    "mqa": {"head_type": "mqa", "tie_word_embeddings": True, "logit_scale": 0.5},
    "gqa": {"head_type": "gqa", "num_attention_heads": 4, "num_key_value_heads": 2},
}
REDUCTIONS = ("recurrent", "serial", "matmul", "associative_scan")


class Golden:
    """The arrays of the golden file, by their slash-separated names."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def has(self, name: str) -> bool:
        return name in self.arrays

    def tree(self, prefix: str) -> dict[str, Any]:
        start = f"{prefix}/"
        actual = {n.removeprefix(start): a for n, a in self.arrays.items() if n.startswith(start)}
        return trees.unflatten({tuple(name.split("/")): leaf for name, leaf in actual.items()})

    def options(self, case: str) -> dict[str, Any]:
        return json.loads(str(self.arrays[f"{case}/config_json"]))

    def reference(self, case: str, entry: str = "params") -> ConvertedReference:
        """Returns the parameters (or gradients) of a case, converted to hfseq."""
        actual = convert_reference(self.tree(f"{case}/{entry}"), self.options(case))
        return actual._replace(extra=jax.tree.map(jnp.asarray, actual.extra))

    def batch(self) -> dict[str, np.ndarray]:
        return {name: self[f"common/{name}"] for name in ("inputs", "targets", "loss_mask")}


def config(head: str = "shga", **changes: Any) -> VQTransformerConfig:
    """Returns a tiny configuration with distinct sizes."""
    sizes = {
        "vocab_size": 19,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "head_dim": 8,
        "num_codes": 5,
        "window_size": 4,
        "block_size": 4,
        "sinusoid_base": 1000.0,
        "absolute_positions": True,
        "commitment_cost": 0.02,
    }
    return VQTransformerConfig(**{**sizes, **HEADS[head], **changes})


def model(head: str = "shga", **changes: Any) -> FlaxVQTransformerForCausalLM:
    """Returns a tiny model without parameters."""
    return FlaxVQTransformerForCausalLM(config(head, **changes), _do_init=False)


def variables(flax_model: Any, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns random parameters and codebooks of a model, without special values.

    Codes have the norm of keys. Each codebook has one rarely used code.
    """
    rng = np.random.default_rng(seed)

    def draw(path: trees.Path, leaf: Any) -> np.ndarray:
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        if path[-1] == "kernel":
            return noise / leaf.shape[-2] ** 0.5
        return 1 + 0.2 * noise if path[-1] == "scale" else 0.5 * noise

    flat = trees.flatten(flax_model.params_shape_tree)
    params = trees.unflatten({path: draw(path, leaf) for path, leaf in flat.items()})
    return params, codebooks(flax_model.config, rng)


def codebooks(model_config: VQTransformerConfig, rng: np.random.Generator) -> dict[str, Any]:
    """Returns codebook statistics whose rows have about the norm of keys."""
    heads, codes, width = model_config.key_heads, model_config.num_codes, model_config.head_dim

    def book() -> dict[str, np.ndarray]:
        counts = rng.uniform(0.5, 4.0, (heads, codes)).astype(np.float32)
        counts[:, 0] = 0.004
        rows = rng.normal(size=(heads, codes, width)).astype(np.float32) * width**-0.25
        entries = {"sums": rows * np.maximum(counts, 0.01)[..., None], "counts": counts}
        entries |= {f"new_{name}": np.zeros_like(leaf) for name, leaf in entries.items()}
        return jax.tree.map(jnp.asarray, entries)

    names = ("attention", "attention_2") if model_config.gated else ("attention",)
    layers = {
        str(number): {name: {"codebook": book()} for name in names}
        for number in range(model_config.num_hidden_layers)
    }
    return {"codebook": {"model": {"layers": layers}}}


def ids(rows: int, length: int, seed: int = 0, size: int = 19) -> np.ndarray:
    """Returns token IDs, `(rows, length)`, without special tokens."""
    return np.random.default_rng(seed).integers(3, size, (rows, length)).astype(np.int32)


def attentions(tree: Mapping[str, Any]) -> list[Any]:
    """Returns the parts of a state or a collection per attention module, in order."""
    parts = []
    layers = tree["model"]["layers"]
    for number in sorted(layers, key=int):
        parts += [layers[number][name] for name in sorted(layers[number]) if name != "mlp"]
    return parts


def statistics(extra: Mapping[str, Any], entry: str) -> list[np.ndarray]:
    """Returns an entry (such as `sums` or `new_counts`) of all codebooks, in order."""
    return [np.asarray(part["codebook"][entry]) for part in attentions(extra["codebook"])]


def token_losses(logits: Any, targets: Any) -> Any:
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, jnp.asarray(targets)[..., None], -1)[..., 0]


def max_difference(ours: Any, theirs: Any) -> float:
    """Returns the maximum absolute difference of two arrays of the same shape."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b).max(initial=0.0))


def assert_gradients_close(ours: Any, theirs: Any, relative: float = 2e-5) -> None:
    """Asserts that all leaves agree within `relative` of their largest entry."""
    mine, expected = trees.flatten(ours), trees.flatten(theirs)
    assert mine.keys() == expected.keys()
    for path, leaf in expected.items():
        limit = relative * float(np.abs(leaf).max(initial=0.0)) + 1e-8
        assert max_difference(mine[path], leaf) <= limit, (
            trees.join(path),
            max_difference(mine[path], leaf),
            limit,
        )

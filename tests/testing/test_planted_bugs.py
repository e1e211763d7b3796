"""Plausible bugs in models of each kind are found by the check that names them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import transformers
from flax import nnx

from hfseq import nn, plugins
from hfseq.testing import check_architecture
from tests.support import models

pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
DECODER = SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
EXPERTS = DECODER | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATE = SMALL | {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8}
#: Architecture, head and configuration of each kind.
KINDS: dict[str, tuple[str, str, Any]] = {
    "encoder": ("bert", "ForMaskedLM", lambda: models.bert_config(num_hidden_layers=1)),
    "decoder": (
        "mistral",
        "ForCausalLM",
        lambda: transformers.MistralConfig(**DECODER | TOKENS, head_dim=8, sliding_window=4),
    ),
    "experts": (
        "qwen3_moe",
        "ForCausalLM",
        lambda: transformers.Qwen3MoeConfig(**EXPERTS | TOKENS, head_dim=8),
    ),
    "state": (
        "mamba2",
        "ForCausalLM",
        lambda: transformers.Mamba2Config(**STATE | TOKENS),
    ),
    "encoder-decoder": ("t5", "ForSeq2SeqLM", lambda: models.t5_config()),
    "vision": ("vit", "ForImageClassification", lambda: models.vit_config()),
}


def load(kind: str) -> Any:
    """Returns the module of the model, which is that of an example for two kinds."""
    files = {"experts": "experts_decoder.py", "state": "mamba2_decoder.py"}
    extra = [EXAMPLES / files[kind]] if kind in files else []
    name, task, _ = KINDS[kind]
    model_class = plugins.load(extra).architectures[name].target.load_head(task)
    return sys.modules[model_class.module_class.__module__]


def wrap(owner: Any, name: str, change: Any) -> Any:
    """Returns a patch: `change(original, *args, **kwargs)` instead of `owner.name`."""

    def patch(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        target = getattr(module, owner) if isinstance(owner, str) and owner else owner or module
        original = getattr(target, name)
        if isinstance(target, type):

            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return change(functools.partial(original, self), self, *args, **kwargs)

            monkeypatch.setattr(target, name, method)
        else:
            monkeypatch.setattr(target, name, functools.partial(change, original))

    return patch


def attend_with(**changes: Any) -> Any:
    return wrap(nn, "attend", lambda attend, *args, **kwargs: attend(*args, **kwargs | changes))


def double_std(normal: Any, std: float, *args: Any) -> Any:
    return normal(2 * std, *args)


def regroup_heads(attend: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Repeats key heads as a sequence instead of each one several times."""
    times = query.shape[2] // key.shape[2]
    return attend(
        query, jnp.tile(key, (1, 1, times, 1)), jnp.tile(value, (1, 1, times, 1)), **options
    )


def late_cache(extend: Any, module: Any, key: Any, *args: Any) -> Any:
    key, *rest = extend(module, key, *args)
    return jnp.roll(key, 1, axis=1) if module.cached_key is not None else key, *rest


def wider_window(init: Any, self: Any, config: Any, rngs: Any) -> None:
    init(config, rngs)
    self.windows = {n: w and (w[0] + 1, w[1]) for n, w in self.windows.items()}


def drop_overflow(call: Any, self: Any, x: Any, scores: Any) -> Any:
    """Drops the tokens of an expert beyond twice the mean load."""
    flat = scores.reshape(-1, scores.shape[-1])
    capacity = 2 * flat.shape[0] * 2 // flat.shape[1]
    kept = jnp.cumsum(flat > 0, axis=0) <= capacity
    return call(x, (flat * kept).reshape(scores.shape))


def half_softmax(call: Any, self: Any, x: Any) -> Any:
    softmax = jax.nn.softmax
    jax.nn.softmax = lambda scores: softmax(scores.astype(x.dtype))
    try:
        return call(x)
    finally:
        jax.nn.softmax = softmax


def without_topk_norm(init: Any, self: Any, config: Any, rngs: Any) -> None:
    init(config, rngs)
    self.normalize = not self.normalize


def one_expert(init: Any, self: Any, config: Any, rngs: Any) -> None:
    init(config, rngs)
    self.experts_per_token = 1


def swap_halves(call: Any, self: Any, x: Any, scores: Any) -> Any:
    weights = self.gate_up_proj[...]
    gate, up = jnp.split(weights, 2, axis=1)
    self.gate_up_proj.set_value(jnp.concatenate([up, gate], 1))
    result = call(x, scores)
    self.gate_up_proj.set_value(weights)
    return result


def frozen_router(call: Any, self: Any, x: Any, scores: Any) -> Any:
    return call(x, jax.lax.stop_gradient(scores))


def reversed_parts(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    joined = module.FlaxQwen3MoeModel.joined_weights["experts.gate_up_proj"]
    parts = type(joined)(tuple(reversed(joined.names)))
    for cls in (module.FlaxQwen3MoeModel, module.FlaxQwen3MoeForCausalLM):
        changed = {**cls.joined_weights, "experts.gate_up_proj": parts}
        monkeypatch.setattr(cls, "joined_weights", changed)


def unmasked(call: Any, self: Any, x: Any, mask: Any) -> Any:
    return call(x, jnp.ones_like(mask))


def shifted_window(write: Any, self: Any, entries: Any) -> None:
    if "window" in entries:
        entries = {**entries, "window": jnp.roll(entries["window"], 1, axis=1)}
    write(entries)


def changed_after_init(**changes: Any) -> Any:
    """Returns a change of constructors that sets parameters to other values."""

    def change(init: Any, self: Any, *args: Any) -> None:
        init(*args)
        for name, value in changes.items():
            variable = getattr(self, name)
            variable.set_value(value(variable[...]))

    return change


def one_group(norm: Any, self: Any, y: Any) -> Any:
    groups, self.groups = self.groups, 1
    try:
        return norm(y)
    finally:
        self.groups = groups


def class_token_last(prepend: Any, self: Any, x: Any) -> Any:
    return jnp.roll(prepend(x), -1, axis=1)


def transposed_patches(embed: Any, projection: Any, pixel_values: Any) -> Any:
    return embed(projection, pixel_values.swapaxes(-1, -2))


def without_bias(init: Any, self: Any, config: Any, rngs: Any) -> None:
    init(config, rngs)
    self.key.bias = nnx.data(None)


def no_dropout(call: Any, self: Any, x: Any, rngs: Any = None) -> Any:
    return call(x, None)


BUGS: dict[str, tuple[str, Any]] = {
    "encoder: attention dropout forgotten": ("torch_dropout", attend_with(dropout_rate=0.0)),
    "encoder: larger initial values": ("torch_initialization", wrap(nn, "normal", double_std)),
    "encoder: another gelu": (
        "torch_parity",
        wrap(nn, "activation", lambda find, name: find("gelu_new" if name == "gelu" else name)),
    ),
    "encoder: padding is visible": (
        "padding",
        wrap(nn, "visible", lambda visible, mask=None, *args: visible(None, *args)),
    ),
    "encoder: documents see each other": (
        "packing",
        wrap(nn, "visible", lambda visible, mask=None, segments=None, **o: visible(mask, **o)),
    ),
    "encoder: unscaled scores": ("torch_parity", attend_with(scale=1.0)),
    "decoder: neighboring features rotated": (
        "torch_parity",
        wrap(nn, "rotate", lambda rotate, x, angles: rotate(x, angles, interleaved=True)),
    ),
    "decoder: window off by one": ("torch_parity", wrap("Decoder", "__init__", wider_window)),
    "decoder: cache off by one": ("cached_decoding", wrap(nn, "extend_cache", late_cache)),
    "decoder: key heads in another order": ("torch_parity", wrap(nn, "attend", regroup_heads)),
    "decoder: positions start at 0 in every call": (
        "cached_decoding",
        wrap(
            nn.Rotary,
            "__call__",
            lambda call, self, p: call(jnp.broadcast_to(jnp.arange(p.shape[1]), p.shape)),
        ),
    ),
    "decoder: attention dropout forgotten": ("torch_dropout", attend_with(dropout_rate=0.0)),
    "experts: tokens beyond twice the mean load dropped": (
        "torch_experts",
        wrap("Experts", "__call__", drop_overflow),
    ),
    "experts: router in half precision": (
        "torch_experts",
        wrap("SparseBlock", "__call__", half_softmax),
    ),
    "experts: other sums of scores": (
        "torch_parity",
        wrap("SparseBlock", "__init__", without_topk_norm),
    ),
    "experts: one expert per token": ("torch_parity", wrap("SparseBlock", "__init__", one_expert)),
    "experts: gate and values swapped": ("torch_parity", wrap("Experts", "__call__", swap_halves)),
    "experts: parts joined in reverse order": ("torch_files", reversed_parts),
    "experts: router without gradient": (
        "gradients",
        wrap("Experts", "__call__", frozen_router),
    ),
    "state: padding changes the state": ("generation", wrap("Mixer", "__call__", unmasked)),
    "state: convolution cache off by one": (
        "cached_decoding",
        wrap("Mixer", "write_cache", shifted_window),
    ),
    "state: other initial steps": (
        "torch_initialization",
        wrap("Mixer", "__init__", changed_after_init(dt_bias=jnp.zeros_like)),
    ),
    "state: other initial decay": (
        "torch_initialization",
        wrap("Mixer", "__init__", changed_after_init(A_log=lambda value: value[::-1])),
    ),
    "state: one group in the norm": ("torch_parity", wrap("Mixer", "gated_norm", one_group)),
    "state: no direct connection": (
        "gradients",
        wrap("Mixer", "__call__", lambda call, self, x, mask: jax.lax.stop_gradient(call(x, mask))),
    ),
    "encoder-decoder: relative positions not transposed": (
        "torch_parity",
        wrap(
            nn,
            "relative_position_bias",
            lambda bias, *args, **kwargs: bias(*args, **kwargs).swapaxes(-1, -2),
        ),
    ),
    "encoder-decoder: scaled scores": ("torch_parity", attend_with(scale=None)),
    "encoder-decoder: padding of the source is visible": (
        "padding",
        wrap(nn, "visible_across", lambda visible, mask=None, *args: visible(None, *args)),
    ),
    "encoder-decoder: cache off by one": ("cached_decoding", wrap(nn, "extend_cache", late_cache)),
    "encoder-decoder: larger initial values": (
        "torch_initialization",
        wrap(nn, "normal", double_std),
    ),
    "encoder-decoder: another activation": (
        "torch_parity",
        wrap(nn, "activation", lambda find, name: find("gelu" if name == "relu" else name)),
    ),
    "vision: class token at the end": (
        "torch_parity",
        wrap("Embeddings", "prepend_cls_token", class_token_last),
    ),
    "vision: patches transposed": ("torch_parity", wrap(nn, "embed_patches", transposed_patches)),
    "vision: dropout forgotten": ("torch_dropout", wrap(nn.Dropout, "__call__", no_dropout)),
    "vision: larger initial values": ("torch_initialization", wrap(nn, "normal", double_std)),
    "vision: no bias of keys": ("torch_loads_it", wrap("SelfAttention", "__init__", without_bias)),
    "vision: unscaled scores": ("torch_parity", attend_with(scale=1.0)),
}
FIRST = {kind: next(bug for bug in BUGS if bug.startswith(f"{kind}:")) for kind in KINDS}


@pytest.mark.parametrize(
    "bug", [b if b in FIRST.values() else pytest.param(b, marks=pytest.mark.slow) for b in BUGS]
)
def test_planted_bugs_are_found(bug, monkeypatch):
    kind = bug.partition(":")[0]
    name, task, make_config = KINDS[kind]
    check, patch = BUGS[bug]
    patch(monkeypatch, load(kind))
    with pytest.raises(AssertionError, match=rf"\.{check}: "):
        check_architecture(name, make_config(), heads=[task], checks=[check])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_models_without_bugs_pass(kind):
    name, task, make_config = KINDS[kind]
    load(kind)
    report = check_architecture(name, make_config(), heads=[task])
    assert not report.failed and {check for check, _ in BUGS.values()} & {
        label.rpartition(".")[2] for label in report.passed
    }


def test_every_kind_has_five_bugs_or_more():
    counts = {kind: sum(bug.startswith(f"{kind}:") for bug in BUGS) for kind in KINDS}
    assert min(counts.values()) >= 5

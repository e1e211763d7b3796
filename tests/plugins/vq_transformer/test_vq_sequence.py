"""Rows that are sharded over the mesh axis `sequence` give the results of one device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hfseq import nn
from hfseq.nn.context import Options
from hfseq_plugins.vq_transformer import sequence
from hfseq_plugins.vq_transformer.blocks import AttentionInputs, AttentionOptions, ScoreTerms
from hfseq_plugins.vq_transformer.layers import attend
from hfseq_plugins.vq_transformer.state import State

BATCH, HEADS, GROUPS, WIDTH, VALUES, CODES = 4, 2, 2, 4, 3, 5
LENGTHS = np.array([32, 9, 8, 0])


def mesh(axis_size: int, data: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: axis_size * data]).reshape(data, axis_size)
    return Mesh(devices, ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def codes(tokens: int, lengths: np.ndarray | None, seed: int = 0) -> jax.Array:
    random_codes = np.random.default_rng(seed).integers(0, CODES, (BATCH, HEADS, tokens))
    real = np.arange(tokens) < (tokens if lengths is None else lengths[:, None])
    return jnp.asarray(
        np.where(np.broadcast_to(real, (HEADS, BATCH, tokens)).swapaxes(0, 1), random_codes, CODES),
        jnp.int32,
    )


def operands(tokens: int, how: AttentionOptions, variant: str):
    """Returns inputs, terms, state and lengths of a plain, packed or continued batch."""
    lengths = None if variant == "plain" else LENGTHS
    segment = None
    if variant == "packed":
        segment = np.ones((BATCH, tokens), np.int32)
        segment[0, 5:], segment[0, 12:], segment[2] = 2, 3, np.arange(tokens) // 4 + 1
        segment = np.where(np.arange(tokens) < LENGTHS[:, None], segment, 0)
    book = random_array(HEADS, CODES, WIDTH, seed=9)
    code = codes(tokens, lengths)
    key = book[jnp.arange(HEADS)[:, None], jnp.minimum(code, CODES - 1)]
    inputs = AttentionInputs(
        random_array(BATCH, HEADS, GROUPS, tokens, WIDTH, seed=1),
        key,
        random_array(BATCH, HEADS, tokens, VALUES, seed=3),
        code,
        segment,
    )
    offsets = random_array(2, HEADS, GROUPS, 1, WIDTH, seed=4)
    terms = ScoreTerms(book, random_array(how.window + 1, HEADS, WIDTH, seed=5), *offsets)
    past_counts = np.array([7, 0, how.window + 3, 2]) if variant == "continued" else None
    return inputs, terms, None if past_counts is None else state(how, past_counts), lengths


def state(how: AttentionOptions, token_counts: np.ndarray) -> State:
    """Returns a state after `token_counts`, `(B,)`, tokens."""
    window = how.window
    slots = (token_counts[:, None] - 1 - np.arange(window)) % max(window, 1)
    occupied = np.zeros((BATCH, window), bool)
    for row, count in enumerate(token_counts):
        occupied[row, slots[row, : min(count, window)]] = True
    code = np.where(occupied[:, None], codes(window, None, 6), CODES).astype(np.int32)
    older = np.maximum(token_counts - window, 0)
    count = np.zeros((BATCH, HEADS, CODES), np.int32)
    count[..., 1] = older[:, None]
    mean = np.where(count[..., None] > 0, random_array(BATCH, HEADS, CODES, VALUES, seed=7), 0.0)
    return State(
        random_array(BATCH, HEADS, window, WIDTH, seed=8),
        random_array(BATCH, HEADS, window, VALUES, seed=9),
        jnp.asarray(code),
        jnp.asarray(mean, jnp.float32),
        jnp.asarray(count),
        jnp.asarray(token_counts, jnp.int32),
    )


def evaluate(how: AttentionOptions, on: Mesh | None, operands):
    """Returns outputs, the state after them, and the gradients of a function of both."""
    inputs, terms, cached, lengths = operands

    def total(floats, terms):
        query, key, value = floats
        call_inputs = inputs._replace(query=query, key=key, value=value)
        with nn.options(Options(mesh=on)):
            out, updated = attend(call_inputs, terms, how, cached, lengths)
        if lengths is not None:
            out = jnp.where((jnp.arange(32) < lengths[:, None])[:, None, None, :, None], out, 0.0)
        state_term = 0.0 if updated is None else jnp.sin(updated.window_value).sum()
        return jnp.sin(out).sum() + state_term, (out, updated)

    grad = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, actual), gradients = grad((inputs.query, inputs.key, inputs.value), terms)
    return actual, gradients


def assert_close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * (1 + np.abs(b).max(initial=0.0)))


# Windows shorter and longer than a piece, longer than all pieces, and of size 0.
QUICK = [(11, 4, 4, "packed"), (11, 4, 4, "continued")]
THOROUGH = [
    (3, 2, 4, "plain"),
    *(
        (window, block, axis_size, variant)
        for window, block, axis_size in ((4, 4, 2), (30, 4, 8), (70, 4, 8), (0, 4, 4), (1, 8, 4))
        for variant in ("plain", "packed", "continued")
    ),
]


@pytest.mark.parametrize(
    ("window", "block", "axis_size", "variant"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH)],
)
def test_pieces_give_what_the_whole_gives(window, block, axis_size, variant):
    how = AttentionOptions(window, block)
    inputs = operands(32, how, variant)
    assert_close(evaluate(how, mesh(axis_size), inputs), evaluate(how, None, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["packed", "continued"])
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "serial"},
        {"reduction": "matmul"},
        {"reduction": "associative_scan"},
        {"compressive": False},
        {"stop_gradient": True},
        {"stop_gradient": True, "reduction": "serial"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_way_of_computing_can_be_cut(options, variant):
    how = AttentionOptions(6, 4, **options)
    inputs = operands(32, how, variant)
    assert_close(evaluate(how, mesh(4, data=2), inputs), evaluate(how, None, inputs))


def test_lengths_that_do_not_divide_are_computed_whole_with_a_warning(caplog):
    sequence._warn_not_split.cache_clear()
    with nn.options(Options(mesh=mesh(4))):
        assert sequence.mesh_for(32, 4) is not None
        assert sequence.mesh_for(24, 4) is None and sequence.mesh_for(24, 4) is None
    (record,) = caplog.records
    assert "24 tokens" in record.message and "multiple of 16" in record.message
    assert sequence.mesh_for(24, 4) is None


@pytest.mark.slow
def test_keys_and_values_never_come_together_on_a_device():
    how, tokens = AttentionOptions(4, 4), 512
    inputs, terms, _, _ = operands(tokens, how, "plain")
    axes = AttentionInputs(3, 2, 2, 2)
    placed = AttentionInputs(
        *(
            jax.device_put(leaf, NamedSharding(mesh(8), PartitionSpec(*(None,) * axis, "sequence")))
            for leaf, axis in zip(inputs[:4], axes[:4], strict=True)
        )
    )

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(query, key, value, code):
        with nn.options(Options(mesh=mesh(8))):
            out, _ = attend(AttentionInputs(query, key, value, code), terms, how, None, None)
        return jnp.sin(out).sum()

    program = jax.jit(gradient).lower(*placed[:4]).compile().as_text()
    names = "all-gather|all-reduce|collective-permute|all-to-all"
    moved = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* (?:{names})(?:-start)?\(", program)
    sizes = [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in moved]
    assert sizes and max(sizes) < BATCH * HEADS * tokens

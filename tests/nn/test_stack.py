"""Stacked layers: scan equals loop, per-layer arguments, collected inputs, rematerialisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.context import Options
from hfseq.nn.stack import LayerStacks, stack_layers, stacked_paths


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nn.Linear(8, 8, nn.normal(0.3), rngs), nn.Dropout(0.3)

    def __call__(self, x, shift, *, rngs, gain=1.0):
        x = self.dropout(jnp.tanh(self.dense(x) + shift), rngs) * gain
        return x, x.sum()


class Model(nnx.Module):
    def __init__(self, rngs, count=3):
        self.layer = nn.Layers([Layer(rngs) for _ in range(count)])

    def __call__(self, x, rngs=None, **kwargs):
        return nn.run_layers(self.layer, x, 0.1, rngs=rngs, **kwargs)


def models(count=3):
    loop, scan = Model(nnx.Rngs(0), count), Model(nnx.Rngs(0), count)
    stack_layers(scan)
    return loop, scan


X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def trained(model, remat, **kwargs):
    graph, params = nnx.split(model)

    def loss(params):
        with nn.options(Options(remat=remat)):
            keys = nn.make_keys(jax.random.key(1))
            x, seconds, inputs = nnx.merge(graph, params)(X, rngs=keys, collect=True, **kwargs)
        return (x * X).sum(), (x, seconds, inputs)

    return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_scan_equals_loop_to_the_last_bit(remat, count):
    loop, scan = models(count)
    (listed, plain), (stacked, scanned) = trained(loop, remat), trained(scan, remat)
    assert jax.tree.structure(plain) == jax.tree.structure(scanned)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, scanned))
    if remat:  # otherwise the compiler chooses what to keep and what to recompute
        for number in range(count):
            kernel = listed["layer"][number]["dense"]["kernel"][...]
            assert np.array_equal(stacked["layer"]["dense"]["kernel"][number], kernel)


def test_stacking_keeps_every_layers_parameters():
    loop, scan = models()
    assert scan.layer.num_stacked == 3
    for number, layer in enumerate(loop.layer):
        assert np.array_equal(scan.layer.dense.kernel[...][number], layer.dense.kernel[...])


@pytest.mark.parametrize("scanned", [False, True])
def test_inputs_of_layers_and_seconds_are_collected(scanned):
    model = models()[scanned]
    x, seconds, inputs = model(X, collect=True)
    assert len(seconds) == len(inputs) == 3 and np.array_equal(inputs[0], X)
    assert np.allclose(seconds[-1], x.sum(), rtol=1e-6)
    assert model(X)[2] is None


@pytest.mark.parametrize("scanned", [False, True])
def test_arguments_by_layer(scanned):
    model = models()[scanned]
    gains = {"gain": jnp.array([1.0, 0.0, 1.0])}
    _, seconds, _ = model(X, per_layer=gains)
    assert float(seconds[1]) == 0 and float(seconds[0]) != 0


@pytest.mark.parametrize("scanned", [False, True])
def test_layers_draw_different_dropout(scanned):
    model = models()[scanned]
    _, _, inputs = model(X * 0 + 1, rngs=nn.make_keys(jax.random.key(0)), collect=True)
    assert not np.array_equal(inputs[1] == 0, inputs[2] == 0)


class Counter(nnx.Variable):
    """A collection beside the parameters."""


class Counting(nnx.Module):
    def __init__(self):
        self.count = Counter(jnp.zeros(()))

    def __call__(self, x, *, rngs):
        self.count[...] = self.count[...] + x.sum()
        return x + 1, None


class Holder(nnx.Module):
    def __init__(self):
        self.layer = nn.Layers([Counting(), Counting()])


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_other_collections_are_updated(scanned, remat):
    model = Holder()
    if scanned:
        stack_layers(model)
    with nn.options(Options(remat=remat)):
        nn.run_layers(model.layer, jnp.ones(2))
    counts = nnx.to_pure_dict(nnx.state(model, Counter))["layer"]
    found = counts["count"] if scanned else jnp.stack([counts[i]["count"] for i in range(2)])
    assert found.tolist() == [2.0, 4.0]


class Biased(nnx.Module):
    """A layer of which the first one holds what all of them are given."""

    def __init__(self, rngs, first):
        self.dense = nn.Linear(8, 8, nn.normal(0.3), rngs)
        self.table = nnx.Param(jnp.arange(8.0)) if first else nnx.data(None)

    def __call__(self, x, shared, *, rngs):
        return jnp.tanh(self.dense(x) + shared), None


class Sharing(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nn.Layers(
            [Biased(rngs, first=number == 0) for number in range(3)], shared=("table",)
        )

    def __call__(self, x):
        first = self.layer[0] if isinstance(self.layer, nn.Layers) else self.layer
        return nn.run_layers(self.layer, x, first.table[...].reshape(8))[0]


@pytest.mark.parametrize("remat", [False, True])
def test_what_only_the_first_layer_holds_is_stacked_once(remat):
    outputs, gradients = [], []
    for scanned in (False, True):
        model = Sharing()
        if scanned:
            stack_layers(model)
            assert model.layer.table.shape == (1, 8) and model.layer.dense.kernel.shape[0] == 3
        with nn.options(Options(remat=remat)):
            value, gradient = jax.jit(nnx.value_and_grad(lambda model: (model(X) ** 2).sum()))(
                model
            )
        outputs.append(value)
        held = gradient["layer"] if scanned else gradient["layer"][0]
        gradients.append(np.asarray(held["table"][...]).reshape(8))
    assert outputs[0] == outputs[1]
    assert gradients[0].all() and np.allclose(*gradients, rtol=1e-5)


class Mixed(nnx.Module):
    """A layer with a window, and perhaps a norm, as ModernBERT's and Gemma's differ."""

    def __init__(self, rngs, window, normed=True):
        self.norm = nn.LayerNorm(8, 1e-5) if normed else nnx.data(None)
        self.dense, self.dropout = nn.Linear(8, 8, nn.normal(0.3), rngs), nn.Dropout(0.3)
        self.window, self.act = window, lambda x: jnp.tanh(x)  # (a function a layer, all alike)

    def __call__(self, x, *, rngs, gain=1.0):
        x = x if self.norm is None else self.norm(x)
        x = self.dropout(self.act(self.dense(x) * gain), rngs).at[:, : self.window].mul(2)
        return x, x.sum()


class Deep(nnx.Module):
    def __init__(self, kinds):
        rngs = nnx.Rngs(0)
        self.layer = nn.Layers([Mixed(rngs, *kind) for kind in kinds])

    def __call__(self, x, rngs=None, **kwargs):
        return nn.run_layers(self.layer, x, rngs=rngs, **kwargs)


FIRST, NEAR, FULL = (8, False), (3,), (8,)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ([NEAR, NEAR, FULL, FULL], [(0, 1, 2), (2, 1, 2)]),
        ([*[*[NEAR] * 5, FULL] * 4, NEAR, NEAR], [(0, 6, 4), (24, 1, 2)]),
        ([FIRST, *[NEAR, NEAR, FULL] * 2], [(0, 1, 1), (1, 3, 2)]),
        ([FIRST, NEAR, NEAR], [(0, 1, 1), (1, 1, 2)]),
    ],
)
def test_layers_that_differ_are_scanned_in_runs_and_patterns(kinds, runs):
    model = Deep(kinds)
    kernels = [layer.dense.kernel[...] for layer in model.layer]
    stack_layers(model)
    assert isinstance(model.layer, LayerStacks) and [tuple(run) for run in model.layer.runs] == runs
    assert len(model.layer) == sum(period for _, period, _ in runs)
    listed = stacked_paths(model)
    assert sorted(int(p[-1]) for paths in listed.values() for p in paths) == [*range(len(kinds))]
    for (_, stack), paths in listed.items():
        for index, (_, number) in enumerate(paths):
            kernel = model.layer[int(stack)].dense.kernel[index]
            assert np.array_equal(kernel, kernels[int(number)])


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scanned_patterns_equal_the_loop_to_the_last_bit(remat):
    kinds = [FIRST, *[NEAR, FULL] * 2, NEAR]
    gains = {"gain": jnp.linspace(0.5, 1.5, len(kinds))}
    loop, scan = Deep(kinds), Deep(kinds)
    stack_layers(scan)
    assert [tuple(run) for run in scan.layer.runs] == [(0, 1, 1), (1, 2, 2), (5, 1, 1)]
    listed, plain = trained(loop, remat, per_layer=gains)
    stacked, scanned = trained(scan, remat, per_layer=gains)
    assert jax.tree.structure(plain) == jax.tree.structure(scanned)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, scanned))
    for (_, stack), paths in stacked_paths(scan).items():
        for index, (_, number) in enumerate(paths):
            one = listed["layer"][int(number)]["dense"]["kernel"][...]
            other = stacked["layer"][int(stack)]["dense"]["kernel"][index]
            assert np.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "difference"),
    [
        ([NEAR, FULL], "window: 8, not 3"),
        ([FIRST, FULL], "norm: .*LayerNorm.*, not None"),
        ([NEAR, FULL, FIRST], "window: 8, not 3"),
    ],
)
def test_layers_of_which_no_two_are_alike_are_refused_by_number_and_name(kinds, difference):
    with pytest.raises(
        UsageError, match=rf"of layer can .* layer 1 differs .* layer 0 in {difference}"
    ):
        stack_layers(Deep(kinds))


def test_what_later_layers_hold_alone_cannot_be_shared():
    class Late(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            made = [Biased(rngs, first=number == 1) for number in range(3)]
            self.layer = nn.Layers(made, shared=("table",))

    with pytest.raises(UsageError, match="the first layer lacks table"):
        stack_layers(Late())


def test_a_table_that_is_not_declared_as_shared_makes_another_layer_of_the_first():
    model = Sharing()
    model.layer = nn.Layers(list(model.layer))
    stack_layers(model)
    assert [tuple(run) for run in model.layer.runs] == [(0, 1, 1), (1, 1, 2)]

"""Stacked layers: scan equals loop, arguments per layer, collected inputs, rematerialization."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.context import Options
from hfseq.nn.stack import LayerStacks, _equal, stack_layers, stacked_paths


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


@pytest.mark.parametrize(
    ("count", "remat"),
    [pytest.param(1, False, marks=pytest.mark.slow), (1, True), (3, False), (3, True)],
)
def test_scan_matches_loop_bit_for_bit(remat, count):
    loop, scan = models(count)
    (listed, plain), (stacked, scanned) = trained(loop, remat), trained(scan, remat)
    assert jax.tree.structure(plain) == jax.tree.structure(scanned)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, scanned))
    if remat:  # without it the compiler decides which values are recomputed
        for number in range(count):
            kernel = listed["layer"][number]["dense"]["kernel"][...]
            assert np.array_equal(stacked["layer"]["dense"]["kernel"][number], kernel)


def test_stacking_keeps_the_parameters_of_every_layer():
    loop, scan = models()
    assert scan.layer.num_stacked == 3
    for number, layer in enumerate(loop.layer):
        assert np.array_equal(scan.layer.dense.kernel[...][number], layer.dense.kernel[...])


@pytest.mark.parametrize("scanned", [False, True])
def test_layer_inputs_and_second_results_are_collected(scanned):
    model = models()[scanned]
    x, seconds, inputs = model(X, collect=True)
    assert len(seconds) == len(inputs) == 3 and np.array_equal(inputs[0], X)
    assert np.allclose(seconds[-1], x.sum(), rtol=1e-6)
    assert model(X)[2] is None


@pytest.mark.parametrize("scanned", [False, True])
def test_arguments_per_layer(scanned):
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
    """A collection other than the parameters."""


class CountingLayer(nnx.Module):
    def __init__(self):
        self.count = Counter(jnp.zeros(()))

    def __call__(self, x, *, rngs):
        self.count[...] = self.count[...] + x.sum()
        return x + 1, None


class CountingModel(nnx.Module):
    def __init__(self):
        self.layer = nn.Layers([CountingLayer(), CountingLayer()])


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_other_collections_are_updated(scanned, remat):
    model = CountingModel()
    if scanned:
        stack_layers(model)
    with nn.options(Options(remat=remat)):
        nn.run_layers(model.layer, jnp.ones(2))
    counts = nnx.to_pure_dict(nnx.state(model, Counter))["layer"]
    totals = counts["count"] if scanned else jnp.stack([counts[i]["count"] for i in range(2)])
    assert totals.tolist() == [2.0, 4.0]


class LayerWithTable(nnx.Module):
    """A layer whose table only the first layer owns. All layers get its value as an argument."""

    def __init__(self, rngs, first):
        self.dense = nn.Linear(8, 8, nn.normal(0.3), rngs)
        self.table = nnx.Param(jnp.arange(8.0)) if first else nnx.data(None)

    def __call__(self, x, shared, *, rngs):
        return jnp.tanh(self.dense(x) + shared), None


class ModelWithSharedTable(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = nn.Layers(
            [LayerWithTable(rngs, first=number == 0) for number in range(3)], shared=("table",)
        )

    def __call__(self, x):
        first = self.layer[0] if isinstance(self.layer, nn.Layers) else self.layer
        return nn.run_layers(self.layer, x, first.table[...].reshape(8))[0]


@pytest.mark.parametrize("remat", [False, True])
def test_a_shared_parameter_of_the_first_layer_is_stacked_once(remat):
    outputs, gradients = [], []
    for scanned in (False, True):
        model = ModelWithSharedTable()
        if scanned:
            stack_layers(model)
            assert model.layer.table.shape == (1, 8) and model.layer.dense.kernel.shape[0] == 3
        with nn.options(Options(remat=remat)):
            value, gradient = jax.jit(nnx.value_and_grad(lambda model: (model(X) ** 2).sum()))(
                model
            )
        outputs.append(value)
        layer_gradient = gradient["layer"] if scanned else gradient["layer"][0]
        gradients.append(np.asarray(layer_gradient["table"][...]).reshape(8))
    assert outputs[0] == outputs[1]
    assert gradients[0].all() and np.allclose(*gradients, rtol=1e-5)


class MixedLayer(nnx.Module):
    """A layer with a window and an optional norm, like ModernBERT's and Gemma's."""

    def __init__(self, rngs, window, normed=True):
        self.norm = nn.LayerNorm(8, 1e-5) if normed else nnx.data(None)
        self.dense, self.dropout = nn.Linear(8, 8, nn.normal(0.3), rngs), nn.Dropout(0.3)
        self.window, self.act = (
            window,
            lambda x: jnp.tanh(x),
        )  # another function object in each layer, with equal code

    def __call__(self, x, *, rngs, gain=1.0):
        x = x if self.norm is None else self.norm(x)
        x = self.dropout(self.act(self.dense(x) * gain), rngs).at[:, : self.window].mul(2)
        return x, x.sum()


class MixedModel(nnx.Module):
    def __init__(self, layer_options):
        rngs = nnx.Rngs(0)
        self.layer = nn.Layers([MixedLayer(rngs, *options) for options in layer_options])

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
def test_different_layers_are_scanned_in_runs_and_patterns(kinds, runs):
    model = MixedModel(kinds)
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
def test_scanned_patterns_match_the_loop_bit_for_bit(remat):
    kinds = [FIRST, *[NEAR, FULL] * 2, NEAR]
    gains = {"gain": jnp.linspace(0.5, 1.5, len(kinds))}
    loop, scan = MixedModel(kinds), MixedModel(kinds)
    stack_layers(scan)
    assert [tuple(run) for run in scan.layer.runs] == [(0, 1, 1), (1, 2, 2), (5, 1, 1)]
    listed, plain = trained(loop, remat, per_layer=gains)
    stacked, scanned = trained(scan, remat, per_layer=gains)
    assert jax.tree.structure(plain) == jax.tree.structure(scanned)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, scanned))
    for (_, stack), paths in stacked_paths(scan).items():
        for index, (_, number) in enumerate(paths):
            loop_kernel = listed["layer"][int(number)]["dense"]["kernel"][...]
            scan_kernel = stacked["layer"][int(stack)]["dense"]["kernel"][index]
            assert np.allclose(loop_kernel, scan_kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "difference"),
    [
        ([NEAR, FULL], "window: 8, not 3"),
        ([FIRST, FULL], "norm: .*LayerNorm.*, not None"),
        ([NEAR, FULL, FIRST], "window: 8, not 3"),
    ],
)
def test_an_error_names_the_difference_if_no_two_layers_are_interchangeable(kinds, difference):
    with pytest.raises(
        UsageError, match=rf"of layer can .* Layer 1 differs .* layer 0 in {difference}"
    ):
        stack_layers(MixedModel(kinds))


def test_shared_parameters_must_belong_to_the_first_layers():
    class Late(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            layers = [LayerWithTable(rngs, first=number == 1) for number in range(3)]
            self.layer = nn.Layers(layers, shared=("table",))

    with pytest.raises(UsageError, match="parameter table, but an earlier layer"):
        stack_layers(Late())


def test_an_undeclared_shared_parameter_makes_the_first_layer_different():
    model = ModelWithSharedTable()
    model.layer = nn.Layers(list(model.layer))
    stack_layers(model)
    assert [tuple(run) for run in model.layer.runs] == [(0, 1, 1), (1, 1, 2)]


def holder(way, number):
    """Returns a function of a layer that holds its number in one of the ways of Python."""
    if way == "default":
        return lambda x, number=number: x * number
    if way == "keyword-only default":
        return lambda x, *, number=number: x * number
    if way == "captured variable":
        return lambda x: x * number
    if way == "partial":
        return functools.partial(operator.mul, number)
    if way == "attribute":

        def scaled(x):
            return x

        scaled.number = number
        return scaled
    namespace = {"number": number}  # a module of its own
    exec("def scaled(x):\n    return x * number", namespace)
    return namespace["scaled"]


@pytest.mark.parametrize(
    "way",
    [
        "default",
        "keyword-only default",
        "captured variable",
        "partial",
        "attribute",
        "global variable",
    ],
)
def test_layers_whose_functions_hold_different_values_are_not_equal(way):
    first, same, other = holder(way, 2.0), holder(way, 2.0), holder(way, 3.0)
    assert _equal(first, first)
    if way != "global variable":  # two modules may differ in other names
        assert _equal(first, same)
    assert not _equal(first, other)

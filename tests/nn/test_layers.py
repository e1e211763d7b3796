"""Layers compared with their formulas, and with PyTorch where it has them."""

from __future__ import annotations

import inspect
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn.layers import ACTIVATIONS
from tests.support.models import close
from tests.support.tiers import first

X = jnp.asarray(np.random.default_rng(0).normal(2, 3, size=(2, 5, 8)), jnp.float32)
INIT = nn.normal(0.5)


def test_linear_with_and_without_bias():
    layer = nn.Linear(8, 3, INIT, nnx.Rngs(0))
    layer.bias[...] = jnp.array([1.0, 2.0, 3.0])
    assert close(layer(X), X @ layer.kernel[...] + jnp.array([1.0, 2.0, 3.0]), 1e-6)
    bare = nn.Linear(8, 3, INIT, nnx.Rngs(0), use_bias=False)
    assert bare.bias is None and close(bare(X), X @ bare.kernel[...], 1e-6)


def test_conv1d_is_a_linear_with_a_transposed_kernel():
    conv, linear = (make(8, 3, INIT, nnx.Rngs(0)) for make in (nn.Conv1D, nn.Linear))
    assert conv.kernel.shape == (3, 8) and conv.bias.shape == (3,)
    linear.kernel[...] = conv.kernel[...].T
    assert close(conv(X), linear(X), 1e-6)


def test_linear_computes_in_the_dtype_of_its_recipe():
    layer = nn.Linear(8, 3, INIT, nnx.Rngs(0))
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    layer.compute_dtype = jnp.float16
    assert layer(X).dtype == jnp.float16 and layer.kernel[...].dtype == jnp.float32


def test_embedding_looks_up_rows_and_computes_tied_logits():
    table = nn.Embed(6, 8, INIT, nnx.Rngs(0))
    ids = jnp.array([[0, 5], [3, 3]])
    assert np.array_equal(table(ids), table.embedding[...][ids])
    assert close(table.attend(X), X @ table.embedding[...].T, 1e-6)


def test_layer_norm_equals_pytorch():
    torch = pytest.importorskip("torch")
    layer, theirs = nn.LayerNorm(8, 1e-5), torch.nn.LayerNorm(8, eps=1e-5)
    for name, other in (("scale", "weight"), ("bias", "bias")):
        value = np.random.default_rng(1).normal(size=8).astype(np.float32)
        getattr(layer, name)[...] = jnp.asarray(value)
        getattr(theirs, other).data = torch.tensor(value)
    assert close(layer(X), theirs(torch.tensor(np.asarray(X))).detach().numpy(), 1e-6)


def test_rms_norm_equals_its_formula():
    layer = nn.RMSNorm(8, 1e-6)
    layer.scale[...] = jnp.arange(8.0)
    expected = X / np.sqrt(np.square(X).mean(-1, keepdims=True) + 1e-6) * np.arange(8)
    assert close(layer(X), expected, 1e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_compute_in_float32_inside(norm):
    large = (X * 1000).astype(jnp.float16)
    actual = norm(8, 1e-5)(large)
    assert actual.dtype == jnp.float16 and np.isfinite(actual).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_its_rate_and_keeps_the_mean(rate):
    ones = jnp.ones((200, 200))
    dropped = np.asarray(nn.Dropout(rate)(ones, nn.make_keys(jax.random.key(0))))
    assert abs((dropped == 0).mean() - rate) < 0.01 and abs(dropped.mean() - 1) < 0.02


def test_dropout_rates_of_zero_and_one():
    keys = nn.make_keys(jax.random.key(0))
    assert nn.Dropout(0.0)(X, keys) is X and nn.Dropout(0.5)(X, None) is X
    assert not np.asarray(nn.Dropout(1.0)(X, keys)).any()


def test_drop_path_drops_rows_with_a_rate_per_layer():
    ones, keys = jnp.ones((4000, 2, 3)), nn.make_keys(jax.random.key(0))
    drop = jax.jit(lambda rate: nn.DropPath(0.25)(ones, keys, rate))
    for rate in (0.25, 0.5):
        dropped = np.asarray(drop(rate)).reshape(4000, -1)
        assert (dropped == dropped[:, :1]).all()
        assert abs((dropped[:, 0] == 0).mean() - float(rate)) < 0.03
        assert np.allclose(dropped.max(), 1 / (1 - float(rate)), rtol=1e-4)
    assert nn.DropPath(0.0)(X, keys) is X and nn.DropPath(0.5)(X, None) is X
    assert np.array_equal(nn.DropPath(0.5)(X, keys, 0.0), X)
    assert not np.asarray(nn.DropPath(1.0)(X, keys)).any()


def test_activations_equal_transformers():
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    values = np.linspace(-6, 6, 101, dtype=np.float32)
    for name in sorted(set(ACTIVATIONS) & set(ACT2FN)):
        expected = ACT2FN[name](torch.tensor(values)).numpy()
        assert close(nn.activation(name)(values), expected, 1e-6), name
    assert {"gelu", "gelu_new", "relu", "silu", "swish", "tanh"} <= set(ACTIVATIONS) & set(ACT2FN)


def test_unknown_activation_suggests_a_similar_name():
    with pytest.raises(UsageError, match="'gelo' in the configuration; did you mean 'gelu'"):
        nn.activation("gelo")


def test_layer_norm_without_bias_or_scale():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    full_norm = nn.LayerNorm(8, 1e-5)
    for use_bias, use_scale in ((False, True), (True, False), (False, False)):
        norm = nn.LayerNorm(8, 1e-5, use_bias=use_bias, use_scale=use_scale)
        names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(norm, nnx.Param))}
        used = {"bias": use_bias, "scale": use_scale}
        assert names == {name for name, is_used in used.items() if is_used}
        np.testing.assert_array_equal(norm(x), full_norm(x))


def test_layer_classes_have_the_signature_of_their_constructor():
    exported = [getattr(nn, name) for name in nn.__all__ if inspect.isclass(getattr(nn, name))]
    others = (
        nn.Buffer,
        nn.ExpertLayer,
        nn.Sequential,
        nn.Function,
    )  # no layers, or *args of layers
    classes = [item for item in exported if item not in others]
    assert len(classes) == 23
    for layer_class in classes:
        signature = inspect.signature(layer_class)
        constructor = inspect.signature(layer_class.__init__)
        assert list(signature.parameters) == list(constructor.parameters)[1:], layer_class
        assert "args" not in signature.parameters, layer_class

    class Mine(nn.CachedAttention):
        def __init__(self, config, rngs):
            super().__init__()

    assert list(inspect.signature(Mine).parameters) == ["config", "rngs"]
    norm = nn.LayerNorm(2, 1e-5)
    assert list(inspect.signature(norm).parameters) == ["x"]  # of a layer, that of its call


def test_help_documents_the_arguments_of_a_layer():
    other_classes = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Dropout)
    for layer_class in (nn.Linear, nn.Conv1D, nn.Embed, *other_classes):
        text = pydoc.plain(pydoc.render_doc(layer_class))
        names = inspect.signature(layer_class).parameters
        assert f"{layer_class.__name__}({next(iter(names))}" in text
        documented = (
            layer_class.__mro__[1].__doc__ if layer_class is nn.Conv1D else layer_class.__doc__
        )
        assert all(f"{name}: " in documented for name in names), layer_class


def test_a_tied_head_adds_its_bias():
    table = nn.Embed(3, 2, nn.normal(1.0), nnx.Rngs(0))
    x, bias = jnp.ones((1, 4, 2)), nnx.Param(jnp.array([1.0, 2.0, 3.0]))
    assert np.array_equal(table.attend(x, bias), table.attend(x) + bias[...])


def test_initializers_of_jax_are_accepted():
    init = jax.nn.initializers.uniform(1.0)
    layer = nn.Linear(3, 5, init, nnx.Rngs(0))
    assert np.array_equal(layer.kernel[...], init(nnx.Rngs(0).params(), (3, 5), jnp.float32))


CONVOLUTIONS = [
    ((16,), {"stride": 16}),
    ((3,), {"padding": [(1, 1)]}),
    ((3,), {"stride": 2, "padding": 1, "groups": 2, "use_bias": False}),
    ((4, 4), {"stride": 4}),
    ((3, 3), {"stride": (2, 1), "padding": 1, "groups": 4}),
    ((2, 3), {"padding": [(1, 1), (0, 0)]}),
]


@pytest.mark.parametrize(
    ("groups", "shape"),
    first([(8, (2, 9, 8)), (2, (3, 4, 5, 6)), (1, (2, 7, 4))], (2, (3, 4, 5, 6))),
)
def test_group_norm_and_gradients_equal_pytorch(groups, shape):
    torch = pytest.importorskip("torch")
    layer, features = nn.GroupNorm(groups, shape[-1], 1e-5), shape[-1]
    layer.scale[...], layer.bias[...] = jnp.arange(features) / 3, jnp.ones(features) / 7
    x = np.random.default_rng(0).normal(2.0, 3.0, shape).astype(np.float32)
    torch_input = torch.from_numpy(np.moveaxis(x, -1, 1).copy()).requires_grad_()
    scale, bias = (torch.from_numpy(np.array(v[...])) for v in (layer.scale, layer.bias))
    theirs = torch.nn.functional.group_norm(torch_input, groups, scale, bias, 1e-5)
    theirs.sin().sum().backward()

    def total(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = layer(x)
        return jnp.sin(output).sum(), output

    gradient, output = jax.jit(jax.grad(total, has_aux=True))(x)
    assert close(output, np.moveaxis(theirs.detach().numpy(), 1, -1), 1e-5)
    assert close(gradient, np.moveaxis(torch_input.grad.numpy(), 1, -1), 1e-5)
    assert jax.eval_shape(layer, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(UsageError, match="5 groups do not divide 8 channels"):
        nn.GroupNorm(5, 8, 1e-5)


@pytest.mark.parametrize(("size", "options"), CONVOLUTIONS)
def test_convolutions_and_gradients_equal_pytorch(size, options):
    torch = pytest.importorskip("torch")
    layer = nn.Conv(8, 12, size, nn.normal(0.2), nnx.Rngs(0), **options)
    if layer.bias is not None:
        layer.bias[...] = jnp.arange(12) / 12
    x = np.random.default_rng(0).normal(size=(2, 17, 14, 8)[: len(size) + 2][:-1] + (8,))
    x = x.astype(np.float32)
    functions = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}
    last, first = (0, *range(2, x.ndim), 1), (0, x.ndim - 1, *range(1, x.ndim - 1))
    torch_input = torch.from_numpy(x.transpose(first).copy()).requires_grad_()
    axes = np.argsort((*range(2, x.ndim), 1, 0))
    weight = torch.from_numpy(np.asarray(layer.kernel[...]).transpose(axes).copy()).requires_grad_()
    bias = None if layer.bias is None else torch.from_numpy(np.array(layer.bias[...]))
    theirs = functions[len(size)](
        torch_input,
        weight,
        bias,
        layer.stride,
        [pair[0] for pair in layer.padding],
        groups=layer.groups,
    )
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state, x):
        def loss(state, x):
            output = nnx.merge(graph, state)(x)
            return jnp.sin(output).sum(), output

        return jax.grad(loss, (0, 1), has_aux=True)(state, x)

    ours, output = run(state, x)
    assert close(output, theirs.detach().numpy().transpose(last), 1e-5)
    theirs.sin().sum().backward()
    kernel = np.asarray(ours[0]["kernel"][...]).transpose(axes)
    assert close(kernel, weight.grad.numpy(), 1e-5)
    assert close(ours[1], torch_input.grad.numpy().transpose(last), 1e-5)


def test_a_convolution_computes_in_the_dtype_of_its_recipe():
    for stride in (1, 4):
        layer = nn.Conv(4, 6, (4, 4), nn.normal(0.2), nnx.Rngs(0), stride=stride)
        layer.compute_dtype = jnp.bfloat16
        assert layer(jnp.ones((1, 8, 8, 4))).dtype == jnp.bfloat16


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_a_convolution_with_a_sharded_batch(groups):
    layer = nn.Conv(
        8, 12, (4,), nn.normal(0.2), nnx.Rngs(0), stride=2, padding=[(2, 1)], groups=groups
    )
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (8, 11, 8))

    def gradient(x):
        loss = jax.grad(lambda state, x: jnp.sin(nnx.merge(graph, state)(x)).sum(), (0, 1))
        return jax.tree.leaves(jax.jit(loss)(state, x))

    devices = jax.sharding.Mesh(np.array(jax.devices()[:4]), "d")
    split = jax.device_put(x, jax.NamedSharding(devices, jax.P("d")))
    assert all(map(close, gradient(split), gradient(x)))


def test_groups_must_divide_the_channels():
    with pytest.raises(UsageError, match="3 groups do not divide 8 and 12 channels"):
        nn.Conv(8, 12, (3,), nn.normal(0.2), nnx.Rngs(0), groups=3)

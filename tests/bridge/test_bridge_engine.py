"""PyTorch's forward passes over jax arrays: views, writes, randomness, masks, refusals, threads."""

from __future__ import annotations

import concurrent.futures
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hfseq import nn  # noqa: E402
from hfseq.errors import WeightsError  # noqa: E402
from hfseq_plugins.bridge import comparison, modules, tiny, trace  # noqa: E402
from hfseq_plugins.bridge.refusals import UnsupportedModel  # noqa: E402


class Module(torch.nn.Module):
    """A module whose forward pass is a function of its input and its parameter and buffer."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


def run(function, x, **options):
    """Returns what the bridge computes under `jax.jit`, and the changed buffers."""
    module = Module(function)
    tensors = {"weight": jnp.asarray(module.weight.detach()), "count": jnp.zeros(4)}
    return jax.jit(lambda t, x: trace.call(module, t, {"x": x}, **options))(tensors, jnp.asarray(x))


X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def write_through_transposed_slice(self, x):
    y = x * 1
    y.t()[1:3].mul_(10)
    y[0, ::2] = 5
    return y


def write_through_chain(self, x):
    y = x.clone().view(2, 6)
    part = y.unsqueeze(0).permute(2, 0, 1)[1]
    part += 1
    y.squeeze_()
    return y, part


def write_through_split(self, x):
    y = x + 0
    a, b = y.split(2, dim=1)
    a.zero_()
    b.add_(a + 3)
    y.unbind(0)[1].fill_(7)
    y.diagonal().copy_(torch.ones(3))
    return y


def contiguous_copy_is_no_view(self, x):
    y = x * 1
    copy = y.t().contiguous()
    copy.fill_(0)
    flat = y.t().reshape(-1)
    flat.fill_(0)
    same = y.reshape(-1)
    same[0] = 9
    return y


def constant_gets_traced_values(self, x):
    table = torch.zeros(3, 4)
    row = table[1]
    table[:, 1] = x[:, 1]
    row[0] = x.sum()
    table.masked_fill_(torch.eye(3, 4).bool(), -1)
    return table, row


def change_shape_in_place(self, x):
    y = (x * 2).unsqueeze_(0)
    y.squeeze_(0).transpose_(0, 1)
    return y


def boolean_masks(self, x):
    y = x.clone()
    y[x > 0] = -1
    y.masked_scatter_(x < 0, torch.arange(12.0).reshape(3, 4))
    return y


def promotions(self, x):
    half = x.to(torch.bfloat16)
    return half * torch.tensor(2.0), half + x.sum(), x.long() / 2, (x > 0).sum(), x.double().float()


@pytest.mark.parametrize(
    "function",
    [
        write_through_transposed_slice,
        write_through_chain,
        write_through_split,
        contiguous_copy_is_no_view,
        constant_gets_traced_values,
        change_shape_in_place,
        boolean_masks,
        promotions,
    ],
    ids=lambda function: function.__name__,
)
def test_writes_and_views_equal_pytorch(function):
    theirs = function(Module(function), torch.from_numpy(X))
    ours, _ = run(function, X)
    pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]
    for a, b in pairs:
        b = b.detach()
        assert jnp.issubdtype(a.dtype, jnp.floating) == b.is_floating_point()
        assert (a.dtype == jnp.bfloat16) == (b.dtype == torch.bfloat16)
        b = b.float().numpy()
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, atol=0.05 if a.dtype == jnp.bfloat16 else 1e-5
        )


def test_buffers_are_returned_and_modules_stay_unchanged():
    def forward(self, x):
        self.count.add_(x.sum(0))
        self.stored = x
        return x @ self.weight.T

    module = Module(forward)
    tensors = {"weight": jnp.asarray(module.weight.detach()), "count": jnp.ones(4)}
    _, buffers = trace.call(module, tensors, {"x": jnp.asarray(X)})
    np.testing.assert_allclose(buffers["count"], 1 + X.sum(0), rtol=1e-6)
    assert not module.count.any() and not hasattr(module, "stored")
    with pytest.raises(WeightsError, match=r"weight has the shape \(2,\)"):
        trace.call(module, {"weight": jnp.zeros(2)}, {"x": jnp.asarray(X)})


@pytest.mark.parametrize("write", ["none", "no_grad", "data"])
def test_gradients_stop_where_pytorch_stops_them(write, caplog):
    def forward(self, x):
        with torch.no_grad():
            fixed = self.weight * 2
            if write == "no_grad":
                self.weight.div_(4)
        if write == "data":
            self.weight.data.clamp_(-0.5, 0.5)
        y = self.weight * 3
        with torch.no_grad():
            y[0] = 7
        return (fixed * self.weight + self.weight.detach() * x + y**2).sum()

    module = Module(forward)
    initial = jnp.asarray(module.weight.detach().numpy().copy())
    forward(module, torch.from_numpy(X)).backward()

    def loss(weight):
        return trace.call(module, {"weight": weight}, {"x": jnp.asarray(X)}, train=True)[0]

    np.testing.assert_allclose(jax.grad(loss)(initial), module.weight.grad, rtol=1e-6)
    assert ("changes the parameters weight" in caplog.text) == (write != "none")


def test_random_numbers_come_from_the_key():
    def forward(self, x):
        y = torch.nn.functional.dropout(x, 0.5, self.training)
        return y, torch.rand(3), torch.randn_like(x)

    first, second, other = (
        run(forward, X, train=True, rng=jax.random.key(seed))[0] for seed in (0, 0, 1)
    )
    for a, b, c in zip(first, second, other, strict=True):
        assert (a == b).all() and not (a == c).all()
    kept = np.asarray(first[0]) != 0
    np.testing.assert_allclose(np.asarray(first[0])[kept], 2 * X[kept], rtol=1e-3)
    with pytest.raises(UnsupportedModel, match="draws random numbers"):
        run(forward, X)


def test_random_number_that_is_not_read_needs_no_key():
    def forward(self, x):
        skip = torch.rand([])
        return x if self.training and skip < 0.5 else x * 2

    np.testing.assert_allclose(run(forward, X)[0], 2 * X)


def condition_on_value(self, x):
    return x if x.sum() > 0 else -x


def item_of_value(self, x):
    return x[: int(x.abs().sum().item())]


def list_of_values(self, x):
    return torch.tensor(x.tolist())


def shape_from_values(self, x):
    return x[x > 0]


def unknown_operator(self, x):
    return torch.special.bessel_j0(x)


def numpy_of_values(self, x):
    return torch.from_numpy(x.numpy() * 2)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (condition_on_value, "a condition"),
        (item_of_value, "item"),
        (list_of_values, "tolist"),
        (numpy_of_values, "numpy"),
        (shape_from_values, "boolean index"),
        (unknown_operator, "bessel_j0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusals_name_the_operator_the_file_and_the_line(function, problem):
    with pytest.raises(UnsupportedModel, match=problem) as caught:
        run(function, X)
    statement = caught.value.statement
    assert statement.file.endswith("test_bridge_engine.py")
    assert statement.line == function.__code__.co_firstlineno + 1
    assert caught.value.solution and function.__name__ == statement.function


def test_numpy_inputs_may_steer_python_code():
    def forward(self, x):
        return x.new_ones(int(x[0]), x.tolist()[1])

    module = Module(forward)
    output, _ = trace.call(module, {"weight": jnp.zeros((3, 4))}, {"x": np.array([2, 5])})
    assert output.shape == (2, 5)


def test_tensors_that_were_created_outside_of_the_trace_keep_their_values():
    table = torch.arange(12.0).reshape(4, 3).t()  # such as a table in a cache of Transformers
    (same, row), _ = run(lambda self, x: (table, table[1]), X)
    np.testing.assert_array_equal(same, table)
    np.testing.assert_array_equal(row, table[1])


def test_tables_of_a_trace_are_usable_in_pytorch():
    @functools.lru_cache
    def table():  # Transformers caches the results of some functions
        return torch.arange(12.0).reshape(3, 4)

    traced, _ = run(lambda self, x: x * table(), X)
    result = table() + torch.ones(4)
    assert type(result) is torch.Tensor
    np.testing.assert_array_equal(result, np.arange(1.0, 13).reshape(3, 4))
    np.testing.assert_allclose(traced, X * (np.asarray(result) - 1), rtol=1e-6)


def test_checks_that_only_raise_errors_are_assumed_to_pass():
    def forward(self, x):
        assert x.max() < 100
        if torch.isnan(x).any():
            raise ValueError("not a number")
        assert x.max().item() < 100 and x.size(0) == 3
        torch._check_tensor_all_with(ValueError, x < 100, lambda: "too large")
        return x * 2

    np.testing.assert_allclose(run(forward, X)[0], 2 * X)


def test_overflow_is_clamped_as_in_pytorch():
    def forward(self, x):
        y = x * 3e38
        if not torch.isfinite(y).all():
            limit = torch.finfo(y.dtype).max - 1000
            y = torch.clamp(y, min=-limit, max=limit)
        return y

    for scale in (1e-3, 10):
        expected = forward(None, torch.from_numpy(X * np.float32(scale)))
        np.testing.assert_array_equal(run(forward, X * np.float32(scale))[0], expected.numpy())


def pool(self, x):
    image = (self.weight * x).reshape(1, 1, 3, 4)
    maximum = torch.nn.functional.max_pool2d(image, 2, 1, 1)
    average = torch.nn.functional.avg_pool2d(image, 2, 1, 1)
    outside = torch.nn.functional.avg_pool2d(image, 3, 2, 1, True, False)
    large = torch.nn.functional.avg_pool2d(image, 50, ceil_mode=True)
    return (maximum**2).sum() + sum((y**3).sum() for y in (average, outside, large))


def sum_bags(self, x):
    indices, offsets = torch.tensor([0, 2, 1, 0, 2]), torch.tensor([0, 2, 2])
    weights = x.reshape(-1)[:5]
    bags = torch.nn.functional.embedding_bag(
        indices, self.weight, offsets, mode="sum", per_sample_weights=weights
    )
    return (bags**2).sum()


def select_rows(self, x):
    chosen = torch.tensor([True, False, True])
    y = self.weight * x
    y[chosen, 1] = 2 * y[chosen, 2]
    return (y[chosen] ** 3).sum() + y[:, torch.tensor([True, False, False, True])].sum()


def embed(self, x):
    rows = torch.nn.functional.embedding(torch.tensor([0, 1, 1, 2]), self.weight, padding_idx=1)
    return (rows**2 * x[:1].T).sum()


@pytest.mark.parametrize(
    "function", [pool, embed, sum_bags, select_rows], ids=lambda function: function.__name__
)
def test_gradients_of_layers_equal_pytorch(function):
    module = Module(function)
    function(module, torch.from_numpy(X)).backward()
    gradient = jax.jit(
        jax.grad(lambda w: trace.call(module, {"weight": w}, {"x": jnp.asarray(X)})[0])
    )(jnp.asarray(module.weight.detach()))
    np.testing.assert_allclose(gradient, module.weight.grad, rtol=1e-4, atol=1e-4)


def test_custom_functions_run_and_refuse_unknown_gradients():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    np.testing.assert_allclose(run(lambda self, x: Double.apply(x), X)[0], 2 * X)
    module = Module(lambda self, x: Double.apply(self.weight).sum())
    with pytest.raises(UnsupportedModel, match="Double"):
        jax.grad(lambda w: trace.call(module, {"weight": w}, {"x": jnp.asarray(X)})[0])(
            jnp.zeros((3, 4))
        )


# -- models of Transformers
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mistral():
    """A decoder with a sliding window, its bridged version, and its inputs."""
    model = tiny.tiny_model("mistral")
    return model, comparison.Bridged(model, tiny.tiny_inputs(model))


def test_transformers_is_unchanged_outside_of_calls(mistral):
    model, bridged = mistral
    ids = torch.arange(4, 20)[None]
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    before = model(**options).last_hidden_state
    rows = torch.nn.functional.dropout.__code__, torch.Tensor.tolist, torch.Tensor.__bool__
    bridged.outputs(bridged.tensors, bridged.arrays)
    assert torch.equal(before, model(**options).last_hidden_state)
    assert rows == (
        torch.nn.functional.dropout.__code__,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
    )
    assert model.config._attn_implementation != "hfseq"
    assert type(torch.zeros(2) + 1) is torch.Tensor


def test_threads_and_nested_calls_are_independent(mistral):
    _, bridged = mistral
    expected = bridged.forward()

    def traced(_):
        return jax.jit(lambda t, a: bridged.outputs(t, a))(bridged.tensors, bridged.arrays)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(traced, number) for number in range(2)]
        plain = torch.ones(3).tolist()  # PyTorch in another thread at the same time
        for future in futures:
            for name, value in future.result().items():
                np.testing.assert_allclose(value, expected[name], atol=1e-5)
    assert plain == [1.0, 1.0, 1.0]

    def outer(self, x):
        inner = bridged.outputs(bridged.tensors, bridged.arrays)["last_hidden_state"]
        return x * torch.from_numpy(np.array([float(inner.size)], np.float32))

    size = expected["last_hidden_state"].size
    np.testing.assert_allclose(run(outer, X)[0], X * size, rtol=1e-6)


def test_gradient_checkpointing_keeps_values_gradients_and_statistics(mistral):
    _, bridged = mistral

    def loss(tensors, checkpointing):
        outputs, _ = trace.call(
            bridged.module, tensors, bridged.arrays, gradient_checkpointing=checkpointing
        )
        return jnp.square(outputs["last_hidden_state"]).sum()

    plain, remat = (
        jax.jit(jax.value_and_grad(lambda t, on=on: loss(t, on)))(bridged.tensors)
        for on in (False, True)
    )
    np.testing.assert_allclose(remat[0], plain[0], rtol=1e-5)
    for name, gradient in plain[1].items():
        np.testing.assert_allclose(
            remat[1][name], gradient, atol=1e-5 * float(jnp.abs(gradient).max()), err_msg=name
        )
    text = str(jax.make_jaxpr(lambda t: loss(t, True))(bridged.tensors))
    assert text.count("checkpoint") + text.count("remat") >= 2


def test_packed_rows_equal_separate_rows(mistral):
    _, bridged = mistral
    ids = bridged.arrays["input_ids"]
    positions = jnp.concatenate([jnp.arange(10), jnp.arange(6)])[None]
    segments = jnp.asarray([[1] * 10 + [2] * 6])

    def hidden(inputs, segment_ids=None):
        outputs, _ = trace.call(bridged.module, bridged.tensors, inputs, segment_ids=segment_ids)
        return outputs["last_hidden_state"][0]

    packed = hidden({"input_ids": ids[:1], "position_ids": positions}, segments)
    first, second = hidden({"input_ids": ids[:1, :10]}), hidden({"input_ids": ids[:1, 10:]})
    np.testing.assert_allclose(packed, jnp.concatenate([first, second]), atol=1e-5)


def test_attention_gets_a_description_of_the_mask(mistral, monkeypatch):
    _, bridged = mistral
    calls = []

    def attend(*args, **options):
        calls.append(options["mask"])
        return nn.attend(*args, **options)

    from hfseq_plugins.bridge import registries

    monkeypatch.setattr(registries.nn, "attend", nn.attend)
    monkeypatch.setattr(registries, "nn", _Namespace(nn, attend=attend))
    bridged.outputs(bridged.tensors, bridged.arrays)
    assert calls and all(mask.dense is None for mask in calls)
    window = bridged.module.config.sliding_window
    assert {mask.window for mask in calls} == {(window - 1, 0)} and calls[0].causal


class _Namespace:
    def __init__(self, base, **values):
        self.__dict__.update(vars(base), **values)


def test_building_allocates_no_parameters():
    config = transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=2, vocab_size=10**6)
    module = modules.build(config, "LlamaForCausalLM")
    assert all(parameter.is_meta for parameter in module.parameters())
    tables = modules.buffers(module)
    assert list(tables) == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert all(np.isfinite(table).all() and table.any() for table in tables.values())
    with pytest.raises(WeightsError, match=r"parameters of LlamaForCausalLM are missing: model"):
        trace.call(module, {}, {"input_ids": jnp.zeros((1, 2), jnp.int32)})


def test_native_families_do_not_import_the_engine():
    code = (
        "import sys, hfseq\n"
        "import hfseq_plugins.bert, hfseq_plugins.llama, hfseq_plugins.bridge\n"
        "assert not {'jax', 'torch'} & set(sys.modules)\n"
        "assert not [name for name in sys.modules if name.startswith('hfseq_plugins.bridge.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

"""The translation table of `hfseq port`, row by row, against PyTorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import nn
from hfseq.checkpoints.weights import torch_axes
from hfseq.cli.port import table
from hfseq.cli.port.expressions import Expressions
from hfseq.nn import functional as F

torch = pytest.importorskip("torch")

JAX_NAMES = {"jax": jax, "jnp": jnp, "nn": nn, "F": F, "nnx": nnx, "np": np}
TORCH_NAMES = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "np": np}
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
STATISTICS = {"mean": "running_mean", "var": "running_var"}


def arrays() -> dict[str, np.ndarray]:
    """Returns the variables of the examples."""
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "x": floats(2, 3, 4),
        "y": floats(2, 3, 4),
        "positive": np.abs(floats(2, 3, 4)) + 0.1,
        "unit": np.tanh(floats(2, 3, 4)),
        "pairs": floats(2, 3, 2),
        "square": floats(2, 3, 3),
        "vector": floats(4),
        "ascending": np.sort(floats(6)),
        "table": floats(11, 4),
        "taps": floats(3, 3, 3),
        "image": floats(2, 4, 8, 6),
        "image_taps": floats(4, 4, 3, 3),
        "grid": rng.uniform(-1.2, 1.2, (2, 5, 4, 2)).astype(np.float32),
        "ids": rng.integers(0, 10, (2, 5)).astype(np.int64),
        "places": np.stack([rng.permutation(3) for _ in range(8)], 1)
        .reshape(3, 2, 4)
        .swapaxes(0, 1),
        "order": rng.permutation(3),
        "mask": rng.random((2, 3, 4)) < 0.5,
    }


def translate(text: str) -> tuple[str, list[str]]:
    """Returns the translation of an expression, and the reasons why parts have none."""
    reasons: list[str] = []
    expressions = Expressions({}, lambda *_: None, lambda _, reason: reasons.append(reason))
    tree = expressions.visit(ast.parse(text, mode="eval"))
    return ast.unparse(ast.fix_missing_locations(tree)), reasons


def leaves(value: Any) -> Iterator[Any]:
    """Yields the arrays of a result."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def check(text: str, ours: Any, theirs: Any) -> None:
    """Compares a translated result with PyTorch's."""
    pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
    assert pairs
    for a, b in pairs:
        if getattr(b, "dtype", None) == torch.bfloat16:
            assert a.dtype == jnp.bfloat16
            a, b = a.astype(jnp.float32), b.float()
        a, b = np.asarray(a), b.detach().numpy() if hasattr(b, "detach") else np.asarray(b)
        assert a.shape == b.shape, f"{text}: shape {a.shape}, not {b.shape}"
        assert (a.dtype.kind in "iu") == (b.dtype.kind in "iu"), f"{text}: {a.dtype}, not {b.dtype}"
        assert (a.dtype == bool) == (b.dtype == bool), f"{text}: {a.dtype}, not {b.dtype}"
        limit = (
            max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0))) if b.dtype.kind == "f" else 1
        )
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * limit, err_msg=text)


def rows(group: str) -> list[str]:
    """Returns the examples of a group."""
    return [example for rule in table.GROUPS[group] for example in rule.examples()]


@pytest.mark.parametrize(
    "group", [name for name in table.GROUPS if name not in ("modules", "helpers")]
)
def test_rows_compute_what_pytorch_computes(group: str) -> None:
    inputs = arrays()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    examples = rows(group)
    texts = []
    for example in examples:
        text, reasons = translate(example)
        assert not reasons, f"{example}: {reasons}"
        assert "torch" not in text, f"{example}: {text}"
        texts.append(compile(text, text, "eval"))

    @jax.jit
    def evaluate(inputs: dict[str, jax.Array]) -> list[Any]:
        return [eval(text, {**JAX_NAMES, "rngs": None, **inputs}) for text in texts]

    for example, ours in zip(examples, evaluate(inputs), strict=True):
        check(example, ours, eval(example, {**TORCH_NAMES, **tensors}))


def module_examples() -> list[tuple[str, str, str]]:
    """Returns constructors, their calls and the names of their inputs."""
    found = []
    for example in rows("modules"):
        node = ast.parse(example, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call):
            constructor = ast.unparse(node.func).removesuffix(".eval()")
            arguments = ", ".join(ast.unparse(argument) for argument in node.args)
            found.append((example, constructor, f"({arguments},)"))
    return found


def load(module: nnx.Module, state: dict[str, Any]) -> None:
    """Copies PyTorch's parameters into a module by their names."""
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        *parents, leaf = [str(part) for part in path]
        names = [
            ".".join([*parents, new])
            for new in (LEAVES.get(leaf, leaf), STATISTICS.get(leaf, leaf))
        ]
        value = state[next(name for name in names if name in state)].numpy()
        axes = torch_axes((*parents, leaf), value.ndim)
        variable.set_value(jnp.asarray(value.transpose(axes) if axes else value))
    count = len(nnx.to_flat_state(nnx.state(module)))
    assert count == len([name for name in state if not name.endswith("num_batches_tracked")])


def test_modules_compute_what_pytorch_computes() -> None:
    inputs = arrays()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    torch.manual_seed(0)
    examples = module_examples()
    modules, theirs = [], []
    for example, constructor, argument in examples:
        text, reasons = translate(constructor)
        assert not reasons, f"{example}: {reasons}"
        reference = eval(constructor, TORCH_NAMES).eval()
        for value in reference.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape) + 0.5)
        zeros = jax.nn.initializers.zeros
        module = eval(text, {**JAX_NAMES, "init": zeros, "rngs": nnx.Rngs(0)})
        if isinstance(module, nnx.Module):
            load(module, reference.state_dict())
        modules.append((module, compile(argument, argument, "eval")))
        theirs.append(reference(*eval(argument, tensors)))

    @jax.jit
    def evaluate(inputs: dict[str, jax.Array]) -> list[Any]:
        return [module(*eval(argument, dict(inputs))) for module, argument in modules]

    for (example, *_), ours, expected in zip(examples, evaluate(inputs), theirs, strict=True):
        check(example, ours, expected)

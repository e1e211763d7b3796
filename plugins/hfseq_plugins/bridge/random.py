"""Random operators of PyTorch, which draw their numbers with hfseq's keys.

Without a key, code may draw a random number but not read it. This is necessary because Transformers
draws a number for each layer that may be skipped in training. It also draws this number in
evaluation, but does not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverload

from hfseq import nn
from hfseq_plugins.bridge import state
from hfseq_plugins.bridge.dtypes import JAX_DTYPES
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.tensor import JaxTensor, Node, Unread

#: Draws random values. Its arguments are the keys, the shape, the data type, and the parameters of
#: the distribution.
Sampler = Callable[..., jax.Array]


def _key(keys: nn.Keys) -> jax.Array:
    """Returns a new key for numbers that do not belong to single rows of the batch."""
    return keys.shared.child().key


def _bernoulli(keys: nn.Keys, shape: tuple[int, ...], dtype: Any, p: Any = 0.5) -> jax.Array:
    """Draws ones with probability `p` and zeros otherwise.

    If `p` is a number, the random bits are the 16-bit integers that hfseq's dropout uses, because
    these are fast.
    """
    rows = keys.key.size
    source = keys if shape and shape[0] % rows == 0 else keys.shared
    if isinstance(p, float | int):
        threshold = round((1 - p) * 65536)
        if threshold >= 65536:
            return jnp.zeros(shape, dtype)
        return (source.bits(shape) >= jnp.uint16(threshold)).astype(dtype)
    return jax.random.bernoulli(_key(keys), p, shape).astype(dtype)


def _uniform(
    keys: nn.Keys, shape: tuple[int, ...], dtype: Any, low: Any = 0.0, high: Any = 1.0
) -> jax.Array:
    return jax.random.uniform(_key(keys), shape, dtype, low, high)


def _normal(
    keys: nn.Keys, shape: tuple[int, ...], dtype: Any, mean: Any = 0.0, std: Any = 1.0
) -> jax.Array:
    return mean + std * jax.random.normal(_key(keys), shape, dtype)


def _exponential(keys: nn.Keys, shape: tuple[int, ...], dtype: Any, rate: float = 1.0) -> jax.Array:
    return jax.random.exponential(_key(keys), shape, dtype) / rate


def _integers(keys: nn.Keys, shape: tuple[int, ...], dtype: Any, low: int, high: int) -> jax.Array:
    return jax.random.randint(_key(keys), shape, low, high, dtype)


def _permutation(keys: nn.Keys, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.permutation(_key(keys), shape[0]).astype(dtype)


def _categories(
    keys: nn.Keys, shape: tuple[int, ...], dtype: Any, p: jax.Array, replace: bool
) -> jax.Array:
    scores = jnp.log(p)
    if replace:
        samples = jax.random.categorical(_key(keys), scores, shape=(shape[-1], *p.shape[:-1]))
        return jnp.moveaxis(samples, 0, -1).astype(dtype)
    noise = jax.random.gumbel(_key(keys), p.shape)
    return jax.lax.top_k(scores + noise, shape[-1])[1].astype(dtype)


def _sizes(
    func: str, args: tuple[Any, ...]
) -> tuple[Sampler, tuple[int, ...], tuple[Any, ...]] | None:
    """Returns the sampler of a random operator, the shape of its result, and its parameters.

    Returns:
        These three values, or `None` if the operator is not supported.
    """
    name = func.split(".")[1]
    if name in ("rand", "randn"):
        return (_uniform if name == "rand" else _normal), tuple(args[0]), ()
    if name in ("rand_like", "randn_like"):
        return (_uniform if name == "rand_like" else _normal), tuple(args[0].shape), ()
    if name in ("bernoulli", "bernoulli_"):
        sampler, shape = _bernoulli, tuple(args[0].shape)
        if func == "aten.bernoulli.default":
            return sampler, shape, (args[0],)
        return sampler, shape, tuple(args[1:2])
    if name in ("uniform_", "uniform"):
        return _uniform, tuple(args[0].shape), tuple(args[1:3])
    if name in ("normal_", "normal_functional"):
        return _normal, tuple(args[0].shape), tuple(args[1:3])
    if name in ("exponential_", "exponential"):
        return _exponential, tuple(args[0].shape), tuple(args[1:2])
    if name == "randperm":
        return _permutation, (args[0],), ()
    if name == "randint":
        bounds = (0, args[0]) if "low" not in func else args[:2]
        return _integers, tuple(args[1 if "low" not in func else 2]), tuple(bounds)
    if name == "randint_like":
        bounds = (0, args[1]) if "low" not in func else args[1:3]
        return _integers, tuple(args[0].shape), tuple(bounds)
    if name == "multinomial":
        shape = (*args[0].shape[:-1], args[1])
        return _categories, tuple(shape), (args[0], len(args) > 2 and args[2])
    if func in (
        "aten.normal.Tensor_Tensor",
        "aten.normal.Tensor_float",
        "aten.normal.float_Tensor",
    ):
        shape = torch.broadcast_shapes(*(x.shape for x in args[:2] if isinstance(x, torch.Tensor)))
        return _normal, tuple(shape), tuple(args[:2])
    return None


_NAMES = {
    *("rand", "randn", "rand_like", "randn_like", "bernoulli", "bernoulli_", "uniform_", "uniform"),
    *("normal_", "normal", "normal_functional", "exponential_", "exponential", "randperm"),
    *("randint", "randint_like", "multinomial", "native_dropout", "rrelu_with_noise"),
    *("geometric_", "cauchy_", "log_normal_", "poisson", "random_"),
}


def is_random(func: OpOverload) -> bool:
    """Returns whether an operator draws random numbers."""
    name = str(func).split(".")
    return name[0] == "aten" and name[1] in _NAMES


def draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a random operator.

    Returns:
        The random values. If the call has no keys, the result is a tensor that raises an error when
        it is read.
    """
    keys, name = state.current().keys, str(func)
    if name == "aten.native_dropout.default":
        return _dropout(keys, *args)
    parts = _sizes(name, args)
    if parts is None:
        raise UnsupportedModel(
            f"the operator {func} has no translation to jax",
            operator=name,
            solution="docs/bridge.md explains how to add an operator",
        )
    sampler, shape, options = parts
    torch_dtype = kwargs.get("dtype") or _default_dtype(name, args)
    if sampler is _categories or sampler is _permutation:
        torch_dtype = torch.int64
    if keys is None:
        return _unread(name, shape, torch_dtype)
    options = tuple(x.array if isinstance(x, JaxTensor) else x for x in options)
    named = {"mean", "std", "p", "lambd", "from", "to"} & set(kwargs)
    if named and not options:
        options = tuple(
            kwargs[n] for n in ("mean", "from", "p", "lambd", "std", "to") if n in kwargs
        )
    return sampler(keys, shape, JAX_DTYPES[torch_dtype], *options)


def _dropout(keys: nn.Keys | None, x: JaxTensor, p: float, train: bool | None = True) -> Any:
    array = x.array
    if not train or p == 0:
        return array, jnp.ones(array.shape, bool)
    if keys is None:
        return _unread("dropout", tuple(x.shape), x.dtype), jnp.ones(array.shape, bool)
    keep = _bernoulli(keys, array.shape, bool, 1 - p)
    return jnp.where(keep, array / (1 - p), 0).astype(array.dtype), keep


def _default_dtype(name: str, args: tuple[Any, ...]) -> torch.dtype:
    if args and isinstance(args[0], torch.Tensor):
        return args[0].dtype
    return torch.int64 if "rand" in name and ("int" in name or "perm" in name) else torch.float32


def _unread(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> JaxTensor:
    def raise_error() -> None:
        raise UnsupportedModel(
            f"{name} draws random numbers, but the call of the model has no random key",
            operator=name,
            solution="Pass dropout_rng with train=True, or pass the random numbers as an input",
        )

    return JaxTensor(Node(Unread(raise_error)), shape, dtype)

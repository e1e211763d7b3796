"""Runs operators of PyTorch on tensors that hold jax arrays.

If no argument of an operator depends on a jax array, PyTorch computes the result immediately, and
the result is a constant of the program. Otherwise, a function of `hfseq_plugins.bridge.operators`
computes the operator. PyTorch decomposes operators without such a function into other operators.
In-place operators compute a new array, which replaces the values of their tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hfseq.errors import HfseqError
from hfseq_plugins.bridge import random, state
from hfseq_plugins.bridge.dtypes import JAX_DTYPES, numpy_array
from hfseq_plugins.bridge.gradients import with_gradient_of, without_gradient
from hfseq_plugins.bridge.operators import OPERATORS, Operator
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.tensor import JaxTensor, Node, from_array, from_constant
from hfseq_plugins.bridge.views import put_of


class BridgeMode(TorchDispatchMode):
    """Sends every operator of this thread to `dispatch`, including those without tensors."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator."""
        return dispatch(func, args, kwargs or {})


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator.

    Args:
        func: The operator, a `torch._ops.OpOverload`.
        args: Positional arguments: tensors, lists of tensors and numbers.
        kwargs: Keyword arguments.

    Returns:
        The result of the operator, in which all tensors are `JaxTensor`s.

    Raises:
        UnsupportedModel: The operator has no translation to jax.
    """
    tensors: list[torch.Tensor] = []
    _collect(args, tensors)
    _collect(kwargs.values(), tensors)
    is_random = random.is_random(func)
    if not is_random and all(
        not isinstance(tensor, JaxTensor) or tensor.node.is_constant for tensor in tensors
    ):
        if not state.is_tracing():  # Transformers caches some tables of a traced call
            return func(*_map(_constant, args), **_map(_constant, kwargs))
        return _run_constant(func, args, kwargs)
    args, kwargs = _wrap(args), _wrap(kwargs)
    if is_random:
        return _finish(func, args, kwargs, random.draw(func, args, kwargs))
    if func in _BATCH_NORMS:
        return _batch_norm(func, args, kwargs)
    if func.is_view and not _is_composite(func):
        return _view(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _change_shape(func, args, kwargs)
    # The result of composite operators such as `to` and `reshape` may be a view of their input, so
    # PyTorch decomposes them below.
    operator = None if func.is_view else _find(func)
    if operator is not None:
        return _finish(func, args, kwargs, _call(operator, func, args, kwargs))
    decomposition = _decompositions().get(func)
    with BridgeMode():
        if decomposition is not None:
            result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_composite(func):
            return func.decompose(*args, **kwargs)
    if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
        return args[0].item()
    if str(func).split(".")[1] in _SHAPES_FROM_VALUES:
        raise value_needed(str(func))
    raise UnsupportedModel(
        f"the operator {func} has no translation to jax",
        operator=str(func),
        solution="docs/bridge.md explains how to add an operator",
    )


JaxTensor.run_operator = staticmethod(dispatch)


_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
)


def _batch_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs batch normalization and updates the running statistics.

    These operators need their own function because their schema does not state which arguments they
    change.
    """
    operator = _find(func)
    assert operator is not None
    results = _call(operator, func, args, kwargs)
    if len(results) > 3 and args[3] is not None:
        args[3].node.write(results[3])
        args[4].node.write(results[4])
    return tuple(from_array(result) for result in results[:3])


_SHAPES_FROM_VALUES = frozenset(
    {"nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "argwhere"}
)


def value_needed(name: str) -> UnsupportedModel:
    """Returns the error for an operator whose output shape depends on the values of its input."""
    return UnsupportedModel(
        f"the shape of the result of {name} depends on values, which are only known when the "
        "compiled program runs",
        operator=name,
        solution="The model needs a native implementation, or different PyTorch code",
    )


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Returns whether PyTorch implements an operator by calls of other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _collect(values: Any, tensors: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, tensors)


def _map(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Applies a function to all tensors in nested arguments."""
    if isinstance(values, torch.Tensor):
        return function(values)
    if isinstance(values, list | tuple):
        if isinstance(values, torch.Size):
            return values
        return type(values)([_map(function, value) for value in values])
    if isinstance(values, dict):
        return {name: _map(function, value) for name, value in values.items()}
    return values


def _wrap(values: Any) -> Any:
    return _map(lambda x: x if isinstance(x, JaxTensor) else from_constant(x), values)


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, JaxTensor):
        assert tensor.node.constant is not None
        return tensor.node.constant
    return tensor


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {**decomposition_table, **core_aten_decompositions()}


def _run_constant(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator in PyTorch and wraps its results as constants."""
    # A decomposition runs in a second BridgeMode. Without this line, the outer BridgeMode would
    # also run the operator and wrap its results.
    is_nested = torch._C._len_torch_dispatch_stack() > 0
    with _disable_current_modes() if is_nested else contextlib.nullcontext():
        results = func(*_map(_constant, args), **_map(_constant, kwargs))
    if torch.Tag.inplace_view in func.tags:
        if isinstance(args[0], JaxTensor):
            return _change_shape(func, args, kwargs)
        return args[0]
    written = _written(func, args, kwargs)
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    is_view = func.is_view and isinstance(args[0], JaxTensor)
    single = not isinstance(results, list | tuple)
    outputs = []
    for number, result in enumerate([results] if single else results):
        if not isinstance(result, torch.Tensor):
            outputs.append(result)
            continue
        output = from_constant(result)
        if is_view:
            node = _view_node(func, args, kwargs, None if single else number)
            node.constant = output.node.constant
            output.node = node
        outputs.append(output)
    return outputs[0] if single else type(results)(outputs)


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns the positions and names of the arguments that an operator changes in place."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operator has changed in place, if they are its results."""
    if not func._schema.is_mutable:
        return []
    written = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    return written if len(func._schema.returns) == len(written) else []


def _find(func: OpOverload) -> Operator | None:
    """Finds an operator in the table.

    An in-place operator without an entry, such as `add_`, has the entry of `add`.
    """
    name = str(func)
    operator = OPERATORS.get(name)
    if operator is None and func._schema.is_mutable:
        packet, _, overload = name.rpartition(".")
        functional = f"{packet.removesuffix('_')}.{overload}"
        operator = OPERATORS.get(functional)
        if operator is None and overload == "out":
            operator = OPERATORS.get(f"{packet}.default") or OPERATORS.get(f"{packet}.Tensor")
    if operator is None and "_copy." in name:
        operator = OPERATORS.get(name.replace("_copy.", "."))
    return operator


#: Operators whose result may have a shape that depends on the values of a boolean index.
_INDEXING = frozenset({"index", "unsafe_index", "index_put", "unsafe_index_put", "index_put_impl"})


def _array(tensor: torch.Tensor) -> Any:
    return tensor.array if isinstance(tensor, JaxTensor) else tensor


def _index_array(tensor: torch.Tensor) -> Any:
    """Returns a NumPy array for a constant boolean index, so that the number of rows is known."""
    if isinstance(tensor, JaxTensor) and tensor.node.is_constant and tensor.dtype == torch.bool:
        assert tensor.node.constant is not None
        return numpy_array(tensor.node.constant)
    return _array(tensor)


def _call(
    operator: Operator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Computes an operator with its function of jax arrays.

    Returns:
        An array, or a list or tuple of arrays.
    """
    if operator.promoted:
        args = _promote(operator, args)
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    convert = _index_array if str(func).split(".")[1].strip("_") in _INDEXING else _array
    arrays = _map(convert, args)
    arrays = [JAX_DTYPES.get(x, x) if isinstance(x, torch.dtype) else x for x in arrays]
    options = _map(convert, kwargs)
    for name in ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"):
        options.pop(name, None)
    if "dtype" in options:
        options["dtype"] = JAX_DTYPES.get(options["dtype"], options["dtype"])
    try:
        return operator.function(*arrays, **options)
    except jax.errors.NonConcreteBooleanIndexError:
        raise value_needed(f"{func} with a boolean index") from None
    except (HfseqError, jax.errors.ConcretizationTypeError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"the translation of {func} failed ({type(error).__name__}: {error})",
            operator=str(func),
            solution="docs/bridge.md explains how to report and correct an operator",
        ) from error


def _promote(operator: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts the operands to a common data type, by PyTorch's rules of type promotion."""
    first, second = operator.promoted
    if len(args) <= second or args[first] is None or args[second] is None:
        return args
    dtype = torch.result_type(args[first], args[second])
    converted = list(args)
    for position in (first, second):
        value = converted[position]
        if isinstance(value, JaxTensor):
            array = value.array
            if array.dtype != JAX_DTYPES[dtype]:
                array = array.astype(JAX_DTYPES[dtype])
            converted[position] = array
        elif JAX_DTYPES[dtype] == np.dtype("int32") and isinstance(value, int):
            limits = np.iinfo(np.int32)
            converted[position] = min(max(value, limits.min), limits.max)
    return tuple(converted)


def _finish(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    """Wraps the results of an operator in tensors.

    If the operator works in place, the results become the values of the tensors that it changes.
    """
    if not torch.is_grad_enabled():
        results = jax.tree.map(
            lambda x: without_gradient(x) if isinstance(x, jax.Array) else x, results
        )
    if func._schema.is_mutable:
        return _write(func, args, kwargs, results)
    dtype = kwargs.get("dtype")

    def wrap(result: Any) -> Any:
        if isinstance(result, JaxTensor) or not isinstance(result, jax.Array | np.ndarray):
            return result
        if isinstance(result, np.ndarray):
            result = jnp.asarray(result)
        if dtype is not None and JAX_DTYPES.get(dtype) == result.dtype:
            return from_array(result, dtype)
        return from_array(result)

    if isinstance(results, list | tuple):
        return type(results)(wrap(result) for result in results)
    return wrap(results)


def _write(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> Any:
    values = results if isinstance(results, list | tuple) else [results]
    names = _written_arguments(func)
    targets = [args[i] if i < len(args) else kwargs.get(name) for i, name in names]
    for target, value in zip(targets, values, strict=False):
        if target is None:
            continue
        if isinstance(value, JaxTensor):  # a random number without a key, which must not be read
            root = target.node.root
            root.value, root.constant, root.version = value.node.value, None, root.version + 1
            continue
        dtype = JAX_DTYPES[target.dtype]
        array = jnp.broadcast_to(jnp.asarray(value, dtype), tuple(target.shape))
        root = target.node.root
        old = root.value
        target.node.write(array)
        if not torch.is_grad_enabled() and isinstance(old, jax.Array):
            root.value, root.version = with_gradient_of(old, root.value), root.version + 1
    return _written(func, args, kwargs)[0] if len(targets) == 1 else tuple(targets)


def _view_function(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None
) -> Callable[[jax.Array], jax.Array]:
    operator = _find(func)
    if operator is None:
        raise UnsupportedModel(
            f"the operator {func} has no translation to jax",
            operator=str(func),
            solution="docs/bridge.md explains how to add an operator",
        )

    def apply(array: jax.Array) -> jax.Array:
        result = operator.function(array, *args[1:], **kwargs)
        return result if number is None else result[number]

    return apply


def _view_node(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None
) -> Node:
    """Returns the values of a view of the first argument, as a `Node`."""
    parent = args[0].node
    if func is torch.ops.aten.as_strided.default:
        # The strides refer to the storage of the base tensor, not to the first argument, which may
        # be a view itself.
        parent = parent.root
        if len(args) < 4:
            args = (*args[:3], args[0].storage_offset())
    kwargs = {"dtype": JAX_DTYPES[kwargs["dtype"]]} if "dtype" in kwargs else {}
    apply = _view_function(func, args, kwargs, number)
    return Node(parent=parent, apply=apply, put=put_of(func, args, number, apply))


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator whose results are views of its first argument."""
    try:
        with no_dispatch():
            metadata = func(*args, **kwargs)
    except RuntimeError:
        # In PyTorch, the results of some operators have the strides of their inputs. In the bridge
        # they are contiguous, so a view may be impossible, and the result is a copy.
        metadata = None
    if metadata is None:
        operator = _find(func)
        assert operator is not None
        return _finish(func, args, kwargs, _call(operator, func, args, kwargs))
    if isinstance(metadata, list | tuple):
        return type(metadata)(
            _as_view(func, args, kwargs, number, entry) for number, entry in enumerate(metadata)
        )
    return _as_view(func, args, kwargs, None, metadata)


def _as_view(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: int | None,
    metadata: torch.Tensor,
) -> JaxTensor:
    node = _view_node(func, args, kwargs, number)
    if not torch.is_grad_enabled():
        apply = node.apply
        assert apply is not None
        node.apply = lambda array: without_gradient(apply(array))
    shape, strides = tuple(metadata.shape), metadata.stride()
    view = JaxTensor(node, shape, metadata.dtype, strides, int(metadata.storage_offset()))
    description = getattr(args[0], "visible", None)
    if description is not None and shape == tuple(args[0].shape):
        view.visible = description  # type: ignore[attr-defined]
    return view


def _change_shape(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `squeeze_` and other operators that change the shape of a tensor in place."""
    tensor = args[0]
    packet, _, overload = str(func).removeprefix("aten.").partition(".")
    overload = "int" if packet == "transpose_" else overload
    functional = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), overload)
    constant = tensor.node.constant
    tensor.node = _view_node(functional, args, kwargs, None)
    tensor.node.constant = constant
    with no_dispatch():
        func(*args, **kwargs)
    return tensor

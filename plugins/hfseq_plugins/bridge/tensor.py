"""PyTorch tensors whose values are jax arrays.

A `JaxTensor` has the shape, data type and strides that PyTorch expects, but no storage. A `Node`
holds its values. They are a jax array, or a PyTorch tensor if they do not depend on any jax array,
such as tables that are computed from shapes.

Views behave as in PyTorch: the node of a view refers to the node of the tensor that it views. After
a write to a tensor or to one of its views, all of them have the new values. A write replaces the
jax array of a node, because jax arrays cannot be changed.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from hfseq_plugins.bridge.dtypes import TORCH_DTYPES, numpy_array
from hfseq_plugins.bridge.refusals import UnsupportedModel, model_frame
from hfseq_plugins.bridge.value_checks import AssumedNumber, passing_answer

Array = jax.Array
#: Functions in which `tolist` returns the tensor itself, because the code that receives the result
#: also accepts a tensor.
TENSORS_AS_LISTS = frozenset({("modeling_jetmoe.py", "forward")})


class Scopes(threading.local):
    """The nested traces of jax in this thread.

    jax traces a rematerialized layer separately. The arrays of such a trace must not be used
    outside of it. Each trace is a scope.

    Attributes:
        active: Identifiers of the scopes. The innermost scope is the last.
        writes: For each scope, the nodes that were created outside of it and changed in it, with
            the values that they had before.
    """

    def __init__(self) -> None:
        self.active: list[int] = [0]
        self.writes: list[dict[Node, Any]] = [{}]


scopes = Scopes()
_scope_numbers = itertools.count(1)


@contextlib.contextmanager
def inner_scope() -> Iterator[dict[Node, Any]]:
    """Adds a scope for the duration of a `with` block.

    Yields:
        A dictionary that collects the nodes from outer scopes that the block changes, with the
        values that they had before.
    """
    writes: dict[Node, Any] = {}
    scopes.active.append(next(_scope_numbers))
    scopes.writes.append(writes)
    try:
        yield writes
    finally:
        scopes.active.pop()
        scopes.writes.pop()


class Unread:
    """A value that must not be read, such as a random number that was drawn without a key.

    Args:
        raise_error: Function that is called when the value is read. It raises the error.
    """

    def __init__(self, raise_error: Callable[[], Any]):
        self.raise_error = raise_error


class Node:
    """The values of a tensor, or of a view of another tensor.

    Attributes:
        parent: The node of the tensor that is viewed, or `None` for a tensor that is not a view.
        apply: Function that computes the values of the view from the values of the parent.
        put: Function that computes the new values of the parent after a write to the view. Its
            arguments are the old values of the parent and the new values of the view.
        value: The jax array of a node without a parent, or `None` for a constant.
        constant: The PyTorch tensor, if the values do not depend on jax arrays. The constants of a
            view and of its parent have the same storage.
        version: Number of writes to a node without a parent.
        scope: The scope in which the node was created.
    """

    __slots__ = (
        "apply",
        "cached",
        "constant",
        "parent",
        "put",
        "root",
        "scope",
        "value",
        "version",
    )

    def __init__(
        self,
        value: Any = None,
        *,
        constant: torch.Tensor | None = None,
        parent: Node | None = None,
        apply: Callable[[Array], Array] | None = None,
        put: Callable[[Array, Array], Array] | None = None,
    ):
        self.value, self.constant, self.parent = value, constant, parent
        self.apply, self.put = apply, put
        self.root: Node = self if parent is None else parent.root
        self.version = 0
        self.scope = scopes.active[-1]
        self.cached: tuple[int, int, Array] | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the values do not depend on any jax array."""
        return self.root.constant is not None

    def read(self) -> Array:
        """Returns the current values as a jax array."""
        if self.is_constant:
            assert self.constant is not None
            return jnp.asarray(numpy_array(self.constant))
        if self.parent is None:
            if isinstance(self.value, Unread):
                self.value.raise_error()
            return self.value
        if self.cached is not None:
            version, scope, array = self.cached
            if version == self.root.version and scope in scopes.active:
                return array
        assert self.apply is not None
        array = self.apply(self.parent.read())
        self.cached = (self.root.version, scopes.active[-1], array)
        return array

    def write(self, array: Array) -> None:
        """Replaces the values. Views of the same tensor change as well."""
        if self.parent is not None:
            assert self.put is not None
            self.parent.write(self.put(self.parent.read(), array))
            self.cached = (self.root.version, scopes.active[-1], array)
            return
        if self.scope != scopes.active[-1] and self.scope in scopes.active:
            inside = scopes.active.index(self.scope) + 1
            for writes in scopes.writes[inside:]:
                writes.setdefault(self, self.value if self.constant is None else self.read())
        self.value, self.constant = array, None
        self.version += 1


class JaxTensor(torch.Tensor):
    """A PyTorch tensor without storage, whose values are a jax array or a constant.

    Args:
        node: The values.
        shape: The shape.
        dtype: The PyTorch data type. It may have 64 bits where the data type of jax has 32.
        strides: The PyTorch strides in elements. Default: the strides of a contiguous tensor.
        offset: Offset of the first element in PyTorch's storage, in elements.
    """

    node: Node

    @staticmethod
    def __new__(
        cls: type[JaxTensor],
        node: Node,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
        offset: int | None = None,
    ) -> JaxTensor:
        """Creates the tensor. PyTorch requires `__new__` for tensors without storage."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, offset, dtype=dtype, device=torch.device("cpu")
        )
        tensor.node = node
        return tensor

    #: Function that runs an operator, given the operator, its positional arguments and its keyword
    #: arguments. `hfseq_plugins.bridge.dispatch` sets this attribute.
    run_operator: ClassVar[Callable[[Any, Any, dict[str, Any]], Any]]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator."""
        return cls.run_operator(func, args, kwargs or {})

    @property
    def array(self) -> Array:
        """The values as a jax array."""
        return self.node.read()

    def jax(self) -> Array:
        """Returns a NumPy array if the tensor is a constant, otherwise the values as a jax array.

        Transformers calls this method to find out whether the values are traced when it builds
        masks.
        """
        return np.zeros(()) if self.node.is_constant else self.array  # type: ignore[return-value]

    def known(self, operator: str) -> torch.Tensor:
        """Returns the values as a PyTorch tensor, for Python code that depends on them.

        Args:
            operator: The operator or statement that requires the values, for the error message.

        Raises:
            UnsupportedModel: The values are not known while jax traces the model.
        """
        if self.node.is_constant:
            assert self.node.constant is not None
            return self.node.constant
        array = self.array
        if isinstance(array, jax.core.Tracer):
            raise UnsupportedModel(
                f"{operator} asks for a value that is only known when the compiled program runs",
                operator=operator,
                solution=(
                    "If the value comes from an input that has the same values in each batch, such "
                    "as the sizes of images, pass that input as a NumPy array. Otherwise the model "
                    "needs a native implementation"
                ),
            )
        from hfseq_plugins.bridge.dtypes import torch_tensor

        return torch_tensor(array).to(self.dtype)

    def item(self) -> Any:
        """Returns the value of a tensor with one element as a Python number."""
        answer = passing_answer(self)
        if answer is None:
            return self.known("item()").item()
        return answer if self.dtype == torch.bool else AssumedNumber(answer)

    def __bool__(self) -> bool:
        answer = passing_answer(self)
        return bool(self.known("a condition")) if answer is None else answer

    def tolist(self) -> Any:
        """Returns the values as nested lists."""
        frame = model_frame(sys._getframe(1))
        if frame is not None and not self.node.is_constant:
            code = frame.f_code
            if (Path(code.co_filename).name, code.co_name) in TENSORS_AS_LISTS:
                return self
        return self.known("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Returns the values as a NumPy array."""
        return self.known("numpy()").numpy(force=force)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __deepcopy__(self, memo: Any) -> JaxTensor:
        copy = from_array(self.array, self.dtype)
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "constant" if self.node.is_constant else "traced"
        return f"JaxTensor({tuple(self.shape)}, {self.dtype}, {kind})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.node.is_constant and self.dim() == 0:
            return format(self.item(), spec)
        return repr(self)


def from_array(array: Array, dtype: torch.dtype | None = None) -> JaxTensor:
    """Wraps a jax array.

    Args:
        array: The array.
        dtype: The PyTorch data type. Default: the data type that corresponds to that of the array,
            except that int32 becomes int64.
    """
    dtype = dtype or TORCH_DTYPES[jnp.dtype(array.dtype)]
    return JaxTensor(Node(array), tuple(array.shape), dtype)


def from_constant(tensor: torch.Tensor) -> JaxTensor:
    """Wraps a PyTorch tensor whose values do not depend on any jax array."""
    if isinstance(tensor, JaxTensor):
        return tensor
    with no_dispatch():  # a trace of a model would return a JaxTensor
        tensor = tensor.detach()
    node = Node(constant=tensor)
    return JaxTensor(
        node, tuple(tensor.shape), tensor.dtype, tensor.stride(), int(tensor.storage_offset())
    )


def as_arrays(tree: Any) -> Any:
    """Replaces all tensors in nested lists, tuples and dictionaries with jax arrays."""
    return torch.utils._pytree.tree_map(
        lambda x: (
            (x if isinstance(x, JaxTensor) else from_constant(x)).array
            if isinstance(x, torch.Tensor)
            else x
        ),
        tree,
    )


def as_tensors(tree: Any) -> Any:
    """Replaces all jax arrays in nested lists, tuples and dictionaries with tensors."""
    return torch.utils._pytree.tree_map(
        lambda x: from_array(x) if isinstance(x, jax.Array) else x, tree
    )

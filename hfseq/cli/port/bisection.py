"""Finds the first module of a port whose result differs from PyTorch's.

The port and the PyTorch model run with the same inputs and parameters. The inputs and outputs of
each module are recorded in the order of the calls. The two records can be compared because a port
names its modules like PyTorch. The first value that differs gives the name of the module. The call
stack of the PyTorch model gives the line of its source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from flax import nnx

from hfseq.errors import one_line
from hfseq.testing.case import Case, relative_error
from hfseq.testing.torch import torch_inputs, torch_model

#: Identifies a recorded value: the name of the module, the index of the call, and whether the value
#: is an output (`True`) or an input (`False`) of that call.
Key = tuple[str, int, bool]
#: Maximum number of source lines that a report shows per location.
SHOWN_LINES = 8


@dataclasses.dataclass(frozen=True)
class Location:
    """A range of lines in a file.

    Attributes:
        path: The file.
        first: The number of the first line.
        last: The number of the last line, which is part of the range.
    """

    path: str
    first: int
    last: int

    def __str__(self) -> str:
        lines = (
            f"line {self.first}" if self.first == self.last else f"lines {self.first}-{self.last}"
        )
        return f"{Path(self.path).name}, {lines}"

    @property
    def source(self) -> list[str]:
        """The text of the lines, at most `SHOWN_LINES` of them."""
        lines = [linecache.getline(self.path, n).rstrip() for n in range(self.first, self.last + 1)]
        return lines[:SHOWN_LINES] + (["..."] if len(lines) > SHOWN_LINES else [])


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value of a port that differs from PyTorch's, or an error of the port.

    Attributes:
        module: Name of the module whose code computes the value, such as "layers.0.mlp".
        value: What differs, such as "the input of layers.0.mlp.down_proj".
        error: `max|a - b| / max(1, max|b|)`, where `a` is the port's value and `b` is PyTorch's.
        location: The lines of Transformers that compute the value, if they are known.
        ours: The port's value at the index of the largest difference.
        theirs: PyTorch's value at the same index.
        index: The index of the largest difference.
        shapes: The shape of the port's value and the shape of PyTorch's value.
        message: The error that the port raises, or an empty string.
        port_location: The lines of the port that compute the value or raise the error.
    """

    module: str
    value: str = ""
    error: float = 0.0
    location: Location | None = None
    ours: float = 0.0
    theirs: float = 0.0
    index: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    message: str = ""
    port_location: Location | None = None

    def __str__(self) -> str:
        name = self.module or "the model"
        location = "" if self.location is None else f" ({self.location})"
        lines = [f"{name} differs by {self.error:.1e}{location}"]
        if self.message:
            lines = [f"{name} raises {self.message}{location}"]
        if self.location is not None:
            lines += [f"    {line}" for line in self.location.source]
        if self.port_location is not None:
            lines.append(f"  the port: {self.port_location}")
            lines += [f"    {line}" for line in self.port_location.source]
        if not self.message:
            ours, theirs = self.shapes
            shapes = f"shape {ours}" if ours == theirs else f"shape {ours}, PyTorch's is {theirs}"
            lines.append(f"  {self.value}: {shapes}")
            if self.index:
                index = ", ".join(map(str, self.index))
                lines.append(f"  at [{index}]: {self.ours:.6g}, PyTorch has {self.theirs:.6g}")
        return "\n".join(lines)


@dataclasses.dataclass
class Record:
    """The inputs and outputs of the modules of a model, in the order of the calls.

    Attributes:
        values: The first array of the arguments, and of the results, of each call.
        lines: The file and line of the model code from which each call is made.
        active: The calls that are still running, as pairs of a module name and a call index.
        calls: Number of calls of each module.
    """

    values: dict[Key, np.ndarray] = dataclasses.field(default_factory=dict)
    lines: dict[Key, tuple[str, int]] = dataclasses.field(default_factory=dict)
    active: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    calls: Counter[str] = dataclasses.field(default_factory=Counter)

    def enter(self, name: str, arguments: Any, line: tuple[str, int] | None) -> None:
        """Adds the arguments of a call, and the file and line from which it is made."""
        call = self.calls[name]
        self.calls[name] += 1
        self.active.append((name, call))
        self._add((name, call, False), arguments)
        if line is not None:
            self.lines[(name, call, False)] = line

    def leave(self, results: Any) -> None:
        """Adds the results of the innermost running call."""
        self._add((*self.active.pop(), True), results)

    def _add(self, key: Key, values: Any) -> None:
        array = next(_arrays(values), None)
        if array is not None:
            self.values[key] = array


def _arrays(values: Any) -> Iterator[np.ndarray]:
    """Yields the floating-point arrays of nested arguments or results."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _arrays(value)
    elif isinstance(values, jax.core.Tracer):  # the value exists only inside of a compiled loop
        return
    elif isinstance(values, jax.Array):
        if jax.dtypes.issubdtype(values.dtype, np.floating):
            yield np.asarray(values, np.float32)
    elif hasattr(values, "is_floating_point") and values.is_floating_point():
        yield values.detach().float().numpy()


def first_difference(case: Case) -> Difference | None:
    """Compares the inputs and outputs of the modules of a port with those of PyTorch's modules.

    Args:
        case: The head under test. Both models use the parameters of `case.model`.

    Returns:
        The first difference, or `None` if all modules agree.
    """
    model = torch_model(case)
    theirs = record_torch(model, torch_inputs(case))
    ours, error = record_port(case)
    mask = next((case.inputs[side.mask] for side in case.sides), None)
    prefix = _prefix(ours, theirs)
    modules = dict(model.named_modules())
    for key, expected in theirs.values.items():
        name, call, is_output = key
        value = ours.values.get(_prefixed(prefix, key))
        compared = None if value is None else _aligned(value, expected)
        if value is None or compared is None:
            continue
        a, b = _without_padding(compared, mask), _without_padding(expected, mask)
        if (difference := relative_error(a, b)) <= case.tolerance:
            continue
        if is_output:
            module, described = name, f"the output of {name or 'the model'}"
        else:
            module, described = _parent(name, theirs), f"the input of {name}"
        distance = np.nan_to_num(np.abs(a - b), nan=np.inf)
        index = tuple(int(i) for i in np.unravel_index(np.argmax(distance), b.shape))
        return Difference(
            module,
            described,
            difference,
            _location(key, theirs, _forward(type(modules[name]))),
            float(a[index]),
            float(b[index]),
            index,
            (value.shape, expected.shape),
            port_location=_location(_prefixed(prefix, key), ours, _port_call(prefix + name, case)),
        )
    if error is None:
        return None
    module, call = ours.active[-1] if ours.active else ("", 0)
    name = module.removeprefix(prefix)
    location = None
    if name in modules:
        # Calls that the port did not reach are not candidates for the location of the error.
        earlier_lines = {
            key: line for key, line in theirs.lines.items() if _prefixed(prefix, key) in ours.lines
        }
        body = _forward(type(modules[name]))
        location = _location(
            (name, call, True), dataclasses.replace(theirs, lines=earlier_lines), body
        )
    message = one_line(f"{type(error).__name__}: {error}")
    return Difference(
        module, location=location, message=message, port_location=_raised(error, case)
    )


def _prefixed(prefix: str, key: Key) -> Key:
    """Returns the key in the port's record for a key in PyTorch's record."""
    return (prefix + key[0] if key[0] else "", *key[1:])


def record_torch(model: Any, inputs: Mapping[str, Any]) -> Record:
    """Runs a PyTorch model and records the inputs and outputs of its modules."""
    import torch

    record = Record()

    def enter(name: str, module: Any, arguments: Any, keywords: Any) -> None:
        record.enter(name, (arguments, keywords), _calling_line(_is_model_file))

    def leave(module: Any, arguments: Any, results: Any) -> None:
        record.leave(results)

    handles = []
    for name, module in model.named_modules():
        observe_arguments = functools.partial(enter, name)
        handles.append(module.register_forward_pre_hook(observe_arguments, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return record


def record_port(case: Case) -> tuple[Record, Exception | None]:
    """Runs a port without compiling it and records the inputs and outputs of its modules.

    Returns:
        The record, and the error that ended the call, if any.
    """
    record = Record()
    names: dict[int, str] = {}
    port = inspect.getsourcefile(case.cls.module_class)

    def observed(function: Callable[..., Any], root: type) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, root) and not names:
                names.update(_module_names(self))
            name = names.get(id(self))
            # A method that is called through super() belongs to a call that is already recorded.
            if name is None or record.active and record.active[-1][0] == name:
                return function(self, *args, **kwargs)
            record.enter(name, (args, kwargs), _calling_line(lambda path: path == port))
            results = function(self, *args, **kwargs)
            record.leave(results)
            return results

        return call

    module = case.model.nnx()
    root = type(module)
    classes = {type(child) for _, child in nnx.iter_graph(module) if isinstance(child, nnx.Module)}
    with contextlib.ExitStack() as stack:
        for owner in {base for module_class in classes for base in module_class.__mro__}:
            function = vars(owner).get("__call__")
            if function is not None and issubclass(owner, nnx.Module) and owner is not nnx.Module:
                stack.callback(setattr, owner, "__call__", function)
                owner.__call__ = observed(function, root)  # type: ignore[method-assign]
        try:
            case.model(**case.inputs)
        except Exception as error:
            return record, error
    return record, None


def _module_names(root: nnx.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for path, child in nnx.iter_graph(root):
        if isinstance(child, nnx.Module):
            names.setdefault(id(child), ".".join(map(str, path)))
    return names


def _prefix(ours: Record, theirs: Record) -> str:
    """Returns the prefix, such as "model.", that only the port's module names have."""
    names = {name for name, _, _ in theirs.values} - {""}
    if any(name in ours.calls for name in names):
        return ""
    prefixes = {name.partition(".")[0] + "." for name in ours.calls} - {"."}
    return max(prefixes, key=lambda p: sum(p + n in ours.calls for n in names), default="")


def _aligned(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Returns the port's value in PyTorch's layout, or `None` if the values are not comparable.

    The layouts can differ for two reasons. Convolutions of hfseq put the channels last, and some
    PyTorch models merge the batch axis and the token axis.
    """
    if ours.shape == theirs.shape:
        return ours
    if ours.ndim > 2 and (moved := np.moveaxis(ours, -1, 1)).shape == theirs.shape:
        return moved
    is_joined = 2 in (ours.ndim, theirs.ndim) and ours.shape[-1:] == theirs.shape[-1:]
    if ours.size == theirs.size:
        if is_joined or np.squeeze(ours).shape == np.squeeze(theirs).shape:
            return ours.reshape(theirs.shape)
    return None


def _without_padding(value: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Sets a value to zero at padding tokens, where the results of both models are undefined."""
    if mask is None:
        return value
    if value.shape[:1] == (mask.size,):
        mask = mask.reshape(-1)
    if value.shape[: mask.ndim] != mask.shape:
        return value
    return np.where(mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim)) != 0, value, 0)


# -- lines of the source
# ---------------------------------------------------------------------------------------


def _is_model_file(path: str) -> bool:
    return Path(path).name.startswith("modeling_") and "models" in Path(path).parts


def _calling_line(is_model_file: Callable[[str], bool]) -> tuple[str, int] | None:
    """Returns the file and line of the innermost stack frame in a model file, or `None`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_model_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _parent(name: str, record: Record) -> str:
    """Returns the name of the closest parent of a module that has been called.

    An empty string is the name of the whole model.
    """
    while name:
        name = name.rpartition(".")[0]
        if name in record.calls:
            return name
    return name


def _method(owner: type, name: str) -> Location | None:
    """Returns the lines of the body of a method, or `None` if its source is not available."""
    function = inspect.unwrap(getattr(owner, name))
    try:
        lines, first = inspect.getsourcelines(function)
        path = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return None
    header = next((n for n, line in enumerate(lines) if line.rstrip().endswith(":")), 0)
    return Location(str(path), first + min(header + 1, len(lines) - 1), first + len(lines) - 1)


def _forward(module_class: type) -> Location | None:
    """Returns the lines of the forward method of a class of a model file."""
    location = _method(module_class, "forward")
    return location if location is not None and _is_model_file(location.path) else None


def _port_call(name: str, case: Case) -> Location | None:
    """Returns the lines of a module's `__call__`, or `None` if the port does not define it."""
    module = case.model.nnx()
    children = {v: k for k, v in _module_names(module).items()}
    for _, child in nnx.iter_graph(module):
        if id(child) == children.get(name):
            location = _method(type(child), "__call__")
            port = inspect.getsourcefile(case.cls.module_class)
            return location if location is not None and location.path == port else None
    return None


def _location(key: Key, record: Record, body: Location | None) -> Location | None:
    """Returns the lines of a model file that compute a value, or `None` if they are not known.

    Args:
        key: Identifies the value.
        record: The record that contains the value.
        body: The lines of the module's forward method, if it is in a model file.
    """
    name, call, is_output = key
    if not is_output or body is None:
        line = record.lines.get((name, call, False))
        return None if line is None else Location(line[0], line[1], line[1])
    prefix = f"{name}." if name else ""
    inner = [
        line
        for (child, _, _), (path, line) in record.lines.items()
        if child != name and child.startswith(prefix)
        if path == body.path and body.first <= line <= body.last
    ]
    return Location(body.path, max(inner, default=body.first), body.last)


def _raised(error: Exception, case: Case) -> Location | None:
    """Returns the line of the port that raises an error, or `None` if no line of the port does."""
    path = inspect.getsourcefile(case.cls.module_class)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return Location(str(path), lines[-1], lines[-1]) if lines and lines[-1] else None

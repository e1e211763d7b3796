"""Translates PyTorch expressions and statements to JAX, by the rules of the table."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Collection, Mapping

from hfseq.cli.port import table
from hfseq.cli.port.syntax import assign, call, dotted, expression, own_attribute
from hfseq.cli.port.table import Rule

Lift = Callable[["Expressions", ast.Call], "ast.AST | None"]
Report = Callable[[ast.AST, str], None]

#: Python modules, other than PyTorch's, whose functions keep their names.
_FOREIGN = (
    "math",
    "np",
    "numpy",
    "jnp",
    "jax",
    "functools",
    "itertools",
    "collections",
    "copy",
    "re",
)
#: Methods of Python's lists, dictionaries and strings.
_PYTHON_METHODS = frozenset(
    {
        *("append", "extend", "insert", "pop", "get", "items", "keys", "values", "update", "copy"),
        *(
            "join",
            "startswith",
            "endswith",
            "lower",
            "upper",
            "format",
            "strip",
            "replace",
            "index",
        ),
        *("setdefault", "count", "remove", "reverse", "rsplit", "isdigit", "to_dict"),
    }
)
_NUMPY_ARRAYS = ("np.array", "np.zeros", "np.ones", "np.empty", "np.full", "np.arange")
_CONTAINERS = (ast.Dict, ast.List, ast.ListComp, ast.DictComp, ast.Set)
#: For each PyTorch layer, the expression that reads its `weight` from the layer of hfseq.
_WEIGHTS = {
    "nn.Linear": "kernel[...].T",
    "nn.Embedding": "embedding[...]",
    "nn.LayerNorm": "scale[...]",
    "nn.RMSNorm": "scale[...]",
    "nn.GroupNorm": "scale[...]",
    "nn.Conv1d": "kernel[...].transpose(2, 1, 0)",
    "nn.Conv2d": "kernel[...].transpose(3, 2, 0, 1)",
    "nn.Conv3d": "kernel[...].transpose(4, 3, 0, 1, 2)",
}
#: PyTorch classes that become NNX variables. The array of a variable is read with `[...]`.
_ARRAYS = ("nn.Parameter", "nn.Buffer")
#: Calls that do not affect the result of a model.
_MESSAGES = ("logger.", "warnings.", "torch._check", "torch._dynamo.")
_CHECKS = frozenset({"torch_compilable_check", "print", "requires_backends"})
#: Methods whose results depend on the values of an array. A condition that calls one of them has no
#: translation.
_VALUE_TESTS = frozenset({"any", "all", "item", "max", "min", "sum", "equal", "allclose", "mean"})
_VIEWS = frozenset(
    {
        *("view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "expand", "narrow"),
        *("select", "t", "detach", "view_as", "flatten", "unbind", "split", "chunk", "contiguous"),
    }
)


class Expressions(ast.NodeTransformer):
    """Replaces PyTorch's functions, methods, data types and in-place writes with JAX code.

    Args:
        parts: For each attribute of `self`, the name of its PyTorch class such as "nn.Linear" or
            "nn.Parameter", or another description of the submodule. The key "" stands for the
            PyTorch layer that the class derives from.
        lift: Called first for each call. Returns the complete translation of the call, or `None` if
            the table should translate it.
        report: Called with code that has no translation, and the reason.
    """

    def __init__(self, parts: Mapping[str, object], lift: Lift, report: Report):
        self.parts = parts
        self.lift = lift
        self.report = report
        #: Attributes of layers whose parameters get no gradient.
        self.frozen: Collection[str] = ()
        #: Names of the attributes that are convolutions, from all classes of the file.
        self.convolutions: Collection[str] = ()
        self.containers: set[str] = set()
        self.dtypes: set[str] = set()
        #: Attributes that are a parameter or `None`.
        self.optional: set[str] = set()
        #: For each projection that may be tied to the embeddings, the expression of the embeddings
        #: and the attribute of the bias.
        self.tied: dict[str, tuple[str, str]] = {}
        self.writes = Writes(None)

    def enter(self, function: ast.FunctionDef) -> None:
        """Prepares the translation of a function, whose statements limit the possible writes."""
        self.containers = set()
        self.dtypes = {
            dotted(node.targets[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and dotted(node.value).endswith(".dtype")
        }
        self.writes = Writes(function)

    # -- calls

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Translates a call."""
        if own_attribute(node.func) in self.frozen:
            ids = [*node.args, *(word.value for word in node.keywords)]
            embeddings = ast.Call(node.func, [self.visit(arg) for arg in ids], [])
            return call("jax.lax.stop_gradient", embeddings)
        lifted = self.lift(self, node)
        if lifted is not None:
            return lifted
        name = torch_name(node.func)
        if name in ("Tensor.to", "Tensor.type"):
            return self._cast(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "tolist":
            if (numbers := _fixed_numbers(self, node.func.value)) is not None:
                return numbers
            inner = ast.walk(node.func.value)
            functions = [dotted(part.func) for part in inner if isinstance(part, ast.Call)]
            if functions and all(name.startswith("np.") for name in functions):
                return node  # numbers that NumPy computes
        rule = table.RULES.get(name)
        if name.startswith("nn.") and rule is not None:
            return self.construct(node) or node
        if rule is None and isinstance(node.func, ast.Attribute) and not name.startswith(_ROOTS):
            return self._method(node, node.func)
        if rule is None:
            if name.startswith(_ROOTS):
                self._refuse(node, name)
                return node
            return self.generic_visit(node)
        arguments = [self.visit(argument) for argument in node.args]
        keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
        return self._apply(rule, node, arguments, keywords)

    def construct(self, node: ast.Call) -> ast.expr | None:
        """Translates a call that creates a module, such as `nn.Conv2d(...)`.

        Returns:
            The call in hfseq, or `None` if the table does not contain the module. The variables
            `init` and `rngs` in the call must be defined by the constructor that contains it.
        """
        name = torch_name(node.func)
        rule = table.RULES.get(name) if name.startswith("nn.") else None
        if rule is None:
            return None
        if name == "nn.Parameter" and (shape := _random_shape(node.args[0])) is not None:
            size = self.visit(shape)
            return call("nnx.Param", call("init", "rngs.params()", size, "jnp.float32"))
        arguments = [self.visit(argument) for argument in node.args]
        keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
        return _literal_sizes(self._apply(rule, node, arguments, keywords))

    def _method(self, node: ast.Call, function: ast.Attribute) -> ast.AST:
        """Translates a method call, whose object is a tensor or any other object."""
        owner, method = dotted(function.value), function.attr
        if method == "forward" and ast.unparse(function.value) == "super()":
            function.attr = "__call__"
        if (
            own_attribute(function)
            or owner.split(".")[0] in _FOREIGN
            or owner.startswith(("config", "self.config", "F", "nn.", "nnx", "out."))
            or isinstance(function.value, ast.Call)
            and dotted(function.value.func) == "super"
            or isinstance(function.value, ast.Constant)
        ):
            return self.generic_visit(node)
        in_place = method.endswith("_") and not method.startswith("_")
        rule = table.RULES.get(f"Tensor.{method.removesuffix('_') if in_place else method}")
        if rule is None:
            if method in table.DATA_DEPENDENT or method in table.RANDOM:
                self._refuse(node, f"Tensor.{method}")
            elif method in _PYTHON_METHODS or owner.startswith("self.") or owner in self.containers:
                return self.generic_visit(node)
            elif method in table.METHODS or method in TENSOR_METHODS or in_place:
                self.report(node, f"the tensor method .{method}() has no translation")
            return self.generic_visit(node)
        if in_place and isinstance(function.value, ast.Name | ast.Subscript):
            if reason := self.writes.unsafe_expression(node, function.value):
                self.report(node, reason)
        value = self.visit(function.value)
        arguments = [value, *(self.visit(argument) for argument in node.args)]
        keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
        if method in ("max", "min") and len(arguments) == 2 and not _is_axis(arguments[1]):
            return call(f"jnp.{method}imum", *arguments)
        return self._apply(rule, node, arguments, keywords)

    def _apply(
        self, rule: Rule, node: ast.Call, arguments: list[ast.expr], keywords: list[ast.keyword]
    ) -> ast.expr:
        name = torch_name(node.func)
        if name in ("torch.max", "torch.min") and len(arguments) == 2:
            if not _is_axis(arguments[1]):
                return call(f"jnp.{name[-3:]}imum", *arguments)
        if name == "F.dropout" and any(
            isinstance(value, ast.Constant) and value.value is False
            for value in (*arguments[2:3], *(w.value for w in keywords if w.arg == "training"))
        ):
            return arguments[0]
        if name == "torch.einsum" and len(arguments) == 2:
            arguments = [arguments[0], *_elements(arguments[1])]
        try:
            return substitute(rule, arguments, keywords)
        except ValueError as error:
            self.report(node, f"{dotted(node.func) or ast.unparse(node.func)}: {error}")
            return node

    def _refuse(self, node: ast.Call, name: str) -> None:
        short = name.rpartition(".")[2]
        if short == "where" or short in table.DATA_DEPENDENT:
            reason = (
                f"the result of {name} depends on the values of an array, not only on its shape"
            )
        elif short in table.RANDOM:
            reason = f"{name} draws random numbers"
        else:
            reason = f"{name} has no translation"
        self.report(node, reason)

    def _cast(self, node: ast.Call) -> ast.AST:
        """Translates `x.to(...)`, whose arguments are data types, devices or other tensors."""
        assert isinstance(node.func, ast.Attribute)
        value = self.visit(node.func.value)
        dtype: ast.expr | None = None
        for argument in (*node.args, *(w.value for w in node.keywords if w.arg == "dtype")):
            text = ast.unparse(argument)
            if "device" in text or isinstance(argument, ast.Constant):
                continue
            is_dtype = (
                "dtype" in text
                or text.startswith("torch.")
                or text in ("int", "bool", "float")
                or text in self.dtypes
            )
            dtype = self.visit(
                argument if is_dtype else ast.Attribute(argument, "dtype", ast.Load())
            )
        if dtype is None:
            return value
        return ast.Call(ast.Attribute(value, "astype", ast.Load()), [dtype], [])

    # -- names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Translates data types, constants and the parameters of layers."""
        name = dotted(node)
        root, _, last = name.rpartition(".")
        text = ast.unparse(node)
        if text == "self.dtype" or re.fullmatch(r"next\([\w.]+\.parameters\(\)\)\.dtype", text):
            return expression("jnp.float32")  # precision recipes only change layers
        if root == "torch" and last in table.DTYPES:
            return expression(table.DTYPES[last])
        if name in table.CONSTANTS:
            return expression(table.CONSTANTS[name])
        attribute = own_attribute(node)
        if attribute in self.optional and isinstance(node.ctx, ast.Load):
            return expression(f"None if {text} is None else {text}[...]")
        if attribute and self.parts.get(attribute) in _ARRAYS and isinstance(node.ctx, ast.Load):
            return _read(node)
        base = self.parts.get("")  # the layer of PyTorch that the class derives from
        if isinstance(base, str) and attribute == "weight" and base in _WEIGHTS:
            return expression(f"self.{_WEIGHTS[base]}")
        if base == "nn.LayerNorm" and attribute == "eps":
            return expression("self.epsilon")
        if base == "nn.LayerNorm" and attribute == "normalized_shape":
            return expression("self.scale[...].shape")
        if base == "nn.LayerNorm" and attribute in ("normalized_shape", "eps"):
            names = {"normalized_shape": "self.scale.shape", "eps": "self.epsilon"}
            return expression(names[attribute])
        if isinstance(base, str) and attribute == "bias":
            return expression("self.bias[...]")
        if node.attr == "out_channels" and self.is_convolution(node.value):
            return expression(f"{ast.unparse(self.visit(node.value))}.kernel.shape[-1]")
        if own_attribute(node.value) in self.tied and node.attr in ("weight", "bias"):
            return self._tied(own_attribute(node.value), node.attr)
        part, owner = self.part_of(node.value), ast.unparse(node.value)
        if isinstance(part, str) and node.attr == "weight" and part in _WEIGHTS:
            weight = expression(f"{owner}.{_WEIGHTS[part]}")
            is_frozen = own_attribute(node.value) in self.frozen
            return call("jax.lax.stop_gradient", weight) if is_frozen else weight
        if isinstance(part, str) and node.attr == "bias" and part.startswith("nn."):
            return expression(f"{owner}.bias[...]")
        return self.generic_visit(node)

    def is_convolution(self, node: ast.AST) -> bool:
        """Returns whether an expression is a convolution, such as `self.conv` or `layer.conv`."""
        if str(self.part_of(node)).startswith("nn.Conv"):
            return True
        return isinstance(node, ast.Attribute) and node.attr in self.convolutions

    def _tied(self, name: str, leaf: str) -> ast.expr:
        """Reads a parameter of a projection that may be tied to the embeddings."""
        embeddings, bias = self.tied[name]
        if leaf == "bias":
            return expression(f"self.{bias or f'{name}.bias'}[...]")
        tied = f"{embeddings}.embedding[...]"
        return expression(f"{tied} if self.{name} is None else self.{name}.kernel[...].T")

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Translates a comparison. A parameter is not read if it is compared with `None`."""
        is_none = len(node.comparators) == 1 and ast.unparse(node.comparators[0]) == "None"
        if is_none and self.parts.get(own_attribute(node.left)) in _ARRAYS:
            return node
        if is_none and self.parts.get("") and own_attribute(node.left) == "bias":
            return node
        return self.generic_visit(node)

    def part_of(self, node: ast.AST) -> object:
        """Returns the description of a submodule such as `self.embeddings.projection`.

        Returns:
            A value like those of `parts`, or `None` if the expression is not a known submodule.
        """
        if attribute := own_attribute(node):
            return self.parts.get(attribute)
        if isinstance(node, ast.Attribute):
            return getattr(self.part_of(node.value), "parts", {}).get(node.attr)
        return None

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        """Translates a list of fixed numbers, such as the rates of stochastic depth."""
        values = _listed_values(node)
        numbers = None if values is None else _fixed_numbers(self, values)
        if numbers is not None:
            return numbers
        if isinstance(values, ast.Call) and isinstance(values.func, ast.Attribute):
            parts = _fixed_numbers(self, values.func.value) if values.func.attr == "split" else None
            if parts is not None:
                ends = f"np.cumsum({ast.unparse(self.visit(values.args[0]))})[:-1]"
                assert isinstance(parts, ast.Call) and isinstance(parts.func, ast.Attribute)
                node.generators[0].iter = call("np.split", parts.func.value, ends)
                return node
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Translates `ACT2FN[name]` to `nn.activation(name)`."""
        if dotted(node.value) == "ACT2FN":
            return call("nn.activation", self.visit(node.slice))
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Translates a conditional expression.

        `size if isinstance(size, tuple) else (size, size)` becomes `nn.height_and_width(size)`.
        """
        if tests_values(node.test):
            self.report(node, "a conditional expression that depends on the values of an array")
            return node
        size, test = ast.unparse(node.body), ast.unparse(node.test)
        is_sequence = re.fullmatch(
            rf"isinstance\({re.escape(size)}, (collections\.abc\.)?(Iterable|\(list, tuple\)"
            r"|\(tuple, list\)|tuple|list|Sequence)\)",
            test,
        )
        if is_sequence and ast.unparse(node.orelse) == f"({size}, {size})":
            return call("nn.height_and_width", self.visit(node.body))
        return self.generic_visit(node)

    # -- statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Translates the statements of a function."""
        self.enter(node)
        node.returns = None
        for parameter in (*node.args.args, *node.args.kwonlyargs):
            parameter.annotation = None
        node.body = self.statements(node.body)
        return node

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Translates statements in order."""
        results: list[ast.stmt] = []
        for node in body:
            result = self.visit(node)
            results += result if isinstance(result, list) else [] if result is None else [result]
        return results or [ast.Pass()]

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Translates an assignment. `x[i] = y` becomes `x = x.at[i].set(y)`."""
        target, value = node.targets[0], node.value
        if dotted(value).endswith(".device"):
            return None
        if re.fullmatch(r"self\.(\w+) = self\.\1\.to\(.*\)", ast.unparse(node)):
            return None  # moves a buffer to the device of an input
        if isinstance(value, ast.Call) and dotted(value.func) in ("kwargs.pop", "kwargs.get"):
            name = value.args[0].value if isinstance(value.args[0], ast.Constant) else ""
            if name == dotted(target) and name in ("output_hidden_states", "output_attentions"):
                return None  # the port has an argument with this name
            node.value = value = value.args[1] if len(value.args) > 1 else ast.Constant(None)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=True)
            pairs_left = [(a, b) for a, b in pairs if not dotted(b).endswith(".device")]
            if len(pairs_left) == 1:
                return self.visit(assign(*pairs_left[0]))
            target.elts, value.elts = [a for a, _ in pairs_left], [b for _, b in pairs_left]
        if ast.unparse(target) in ("kwargs['output_hidden_states']", "kwargs['output_attentions']"):
            return assign(ast.unparse(target)[8:-2], self.visit(value))
        is_container = (
            isinstance(value, _CONTAINERS)
            or isinstance(value, ast.Call)
            and dotted(value.func)
            in ("dict", "list", "set", "defaultdict", "copy.deepcopy", "copy.copy")
            or isinstance(value, ast.Call)
            and dotted(value.func) in _NUMPY_ARRAYS  # NumPy arrays are mutable
        )
        if isinstance(target, ast.Name) and is_container:
            self.containers.add(target.id)
        if isinstance(target, ast.Subscript) and not self._is_container(target):
            return self._write(node, target, "set", self.visit(value))
        method = self._in_place_call(value)
        if method is not None and ast.unparse(target) == ast.unparse(method.value):
            assert isinstance(value, ast.Call)
            node.value = _functional(value, method)
        node.value = self.visit(node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Translates `x[i] += y`, and `x += y` if it changes no other variable that is read."""
        methods = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
        if isinstance(node.target, ast.Subscript) and not self._is_container(node.target):
            method = methods.get(type(node.op))
            if method is None:
                self.report(node, "this in-place operator on a part of an array has no translation")
                return node
            return self._write(node, node.target, method, self.visit(node.value))
        if isinstance(node.target, ast.Name) and (
            reason := self.writes.unsafe(node, node.target.id)
        ):
            self.report(node, reason)
        node.value = self.visit(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Removes the annotation, because it may name a type of PyTorch."""
        return self.visit(assign(node.target, node.value)) if node.value else None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Drops log messages and checks, and turns `x.add_(y)` into an assignment to `x`."""
        value = node.value
        if isinstance(value, ast.Constant):
            return None
        if isinstance(value, ast.Call):
            name = dotted(value.func)
            if name.startswith(_MESSAGES) or name in _CHECKS:
                return None
            if method := self._in_place_call(value):
                target, function = method.value, _functional(value, method)
                if isinstance(target, ast.Subscript):
                    return self.visit(assign(target, function))
                if reason := self.writes.unsafe(node, dotted(target)):
                    self.report(node, reason)
                target = copy.deepcopy(target)
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Name | ast.Attribute):
                        inner.ctx = ast.Load()
                target.ctx = ast.Store()  # type: ignore[attr-defined]
                return ast.copy_location(assign(target, self.visit(function)), node)
        node.value = self.visit(value)
        return node

    def visit_Assert(self, node: ast.Assert) -> None:
        """Drops assertions, because they only check inputs."""

    def visit_Delete(self, node: ast.Delete) -> None:
        """Drops `del`, because it only frees memory."""

    def visit_If(self, node: ast.If) -> ast.AST:
        """Translates an `if` statement, unless its condition depends on the values of an array."""
        if tests_values(node.test):
            self.report(node, "a branch that depends on the values of an array")
            return node
        node.test = self.visit(node.test)
        node.body = self.statements(node.body)
        node.orelse = self.statements(node.orelse) if node.orelse else []
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        """Translates a `for` loop."""
        node.iter = self.visit(node.iter)
        node.body = self.statements(node.body)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        """Translates a `while` loop, unless its condition depends on the values of an array."""
        if tests_values(node.test):
            self.report(node, "a loop that depends on the values of an array")
            return node
        node.test = self.visit(node.test)
        node.body = self.statements(node.body)
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """Translates `with` statements that disable gradients or set automatic precision."""
        names = [
            dotted(item.context_expr.func if isinstance(item.context_expr, ast.Call) else None)
            for item in node.items
        ]
        gradients = {"torch.no_grad", "torch.inference_mode"}
        casts = {
            "torch.autocast",
            "maybe_autocast",
            "torch.amp.autocast",
            "torch.cuda.amp.autocast",
        }
        if not set(names) <= gradients | casts:
            context = ast.unparse(node.items[0].context_expr)
            self.report(node, f"the context manager {context} has no translation")
            return node
        body = self.statements(node.body)
        if gradients & set(names):
            for inner in (inner for stmt in body for inner in ast.walk(stmt)):
                if isinstance(inner, ast.Assign):
                    inner.value = call("jax.lax.stop_gradient", inner.value)
        return body

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Reports a `try` statement, which has no translation."""
        self.report(node, "a try statement")
        return node

    # -- writes

    def _is_container(self, target: ast.Subscript) -> bool:
        index = target.slice
        is_text = isinstance(index, ast.Constant) and isinstance(index.value, str)
        return is_text or dotted(target.value) in self.containers

    def _write(
        self, node: ast.stmt, target: ast.Subscript, method: str, value: ast.expr
    ) -> ast.stmt:
        owner = target.value
        if not isinstance(owner, ast.Name):
            self.report(node, "a write into a part of an array that is not a local variable")
            return node
        if reason := self.writes.unsafe(node, owner.id):
            self.report(node, reason)
        read = ast.Name(owner.id, ast.Load())
        index = self.visit(target.slice)
        if method == "set" and isinstance(target.slice, ast.Name | ast.UnaryOp | ast.Compare):
            if not isinstance(getattr(target.slice, "op", ast.Invert()), ast.USub):
                # The index may be a boolean array.
                result = call("F.put", read, index, value)
                return ast.copy_location(assign(ast.Name(owner.id, ast.Store()), result), node)
        position = ast.Subscript(ast.Attribute(read, "at", ast.Load()), index, ast.Load())
        result = ast.Call(ast.Attribute(position, method, ast.Load()), [value], [])
        return ast.copy_location(assign(ast.Name(owner.id, ast.Store()), result), node)

    def _in_place_call(self, node: ast.AST) -> ast.Attribute | None:
        """Returns the method of a call such as `x.add_(y)`, if it writes into a variable.

        `x` may be a variable, an attribute of `self`, or an index expression of a variable.
        """
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return None
        method, owner = node.func.attr, node.func.value
        if not method.endswith("_") or method.startswith("_") or method in table.RANDOM:
            return None
        is_variable = isinstance(owner, ast.Name | ast.Subscript) or bool(own_attribute(owner))
        is_listed = f"Tensor.{method[:-1]}" in table.RULES or method == "copy_"
        return node.func if is_variable and is_listed else None


class Writes:
    """Decides whether a write into a tensor can be translated.

    A write in PyTorch changes the tensor for all variables that refer to its memory. JAX arrays do
    not change, so the translation assigns a new array to one variable. This is correct only if no
    other variable of the same tensor is read afterwards.

    Args:
        function: The function that contains the writes. If it is `None`, all writes are allowed.
    """

    def __init__(self, function: ast.FunctionDef | None):
        nodes = list(ast.walk(function)) if function is not None else []
        self.parameters = {arg.arg for arg in function.args.args} if function is not None else set()
        self.aliases: list[tuple[int, str, str]] = []  # (line, name, name of the same tensor)
        self.reads: dict[str, list[int]] = {}
        self.assigned: dict[str, list[int]] = {}
        self.returned = {
            name.id
            for node in nodes
            if isinstance(node, ast.Return) and node.value is not None
            for name in ast.walk(node.value)
            if isinstance(name, ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.Name):
                lines = self.reads if isinstance(node.ctx, ast.Load) else self.assigned
                lines.setdefault(node.id, []).append(node.lineno)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                base = _base(node.value)
                if base and base != node.targets[0].id:
                    self.aliases.append((node.lineno, node.targets[0].id, base))

    def unsafe(self, node: ast.AST, name: str) -> str | None:
        """Returns why a write into `name` has no translation, or `None`."""
        line = getattr(node, "lineno", 0)
        for alias_line, first, second in self.aliases:
            other = second if first == name else first if second == name else None
            if other is None or alias_line > line:
                continue
            reassigned = [n for n in self.assigned.get(name, []) if alias_line < n < line]
            other_lines = [n for n in self.assigned.get(other, []) if n > alias_line]
            until = min(other_lines, default=1 << 30)
            read_later = any(line < n <= until for n in self.reads.get(other, []))
            if not reassigned and read_later:
                return f"a write into '{name}' also changes '{other}', which is read afterwards"
        return None

    def unsafe_expression(self, node: ast.AST, owner: ast.expr) -> str | None:
        """Returns why `x.add_(y)` inside an expression has no translation, or `None`."""
        name = _base(owner) or ""
        line = getattr(node, "end_lineno", 0)
        until = min((n for n in self.assigned.get(name, []) if n >= node.lineno), default=1 << 30)  # type: ignore[attr-defined]
        if any(line < n <= until for n in self.reads.get(name, [])):
            return (
                f"a write into '{name}' inside of an expression, although '{name}' is read "
                "afterwards"
            )
        return None


def _base(node: ast.AST) -> str | None:
    """Returns the variable whose memory an expression shares, or `None`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        is_view = all(isinstance(i, ast.Slice | ast.Constant | ast.UnaryOp) for i in index)
        is_text = any(isinstance(i, ast.Constant) and isinstance(i.value, str) for i in index)
        return _base(node.value) if is_view and not is_text else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _base(node.func.value) if node.func.attr in _VIEWS else None
    return None


def _functional(node: ast.Call, method: ast.Attribute) -> ast.expr:
    """Returns `x.add(y)` for `x.add_(y)`, and `y` for `x.copy_(y)`."""
    if method.attr == "copy_":
        return node.args[0]
    owner = copy.deepcopy(method.value)
    for inner in ast.walk(owner):
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript):
            inner.ctx = ast.Load()
    function = ast.Attribute(owner, method.attr[:-1], ast.Load())
    return ast.copy_location(ast.Call(function, node.args, node.keywords), node)


# -- the table

_ROOTS = ("torch.", "F.", "nn.")


def torch_name(node: ast.AST) -> str:
    """Returns the name by which the table lists a function, or `""`.

    For example, `torch.nn.functional.pad` becomes `F.pad`, and the methods `to` and `type` of any
    object become `Tensor.to` and `Tensor.type`. Other names do not change.
    """
    name = dotted(node)
    for prefix in ("torch.nn.functional.", "nn.functional.", "functional."):
        if name.startswith(prefix):
            return f"F.{name.removeprefix(prefix)}"
    if name.startswith("torch.nn."):
        return name.removeprefix("torch.")
    if (
        isinstance(node, ast.Attribute)
        and node.attr in ("to", "type")
        and not name.startswith(_ROOTS)
    ):
        return f"Tensor.{node.attr}"
    return name


def substitute(rule: Rule, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
    """Returns the expression that replaces a call.

    Args:
        rule: The row of the table.
        arguments: The translated positional arguments. The first argument of a method is its
            tensor.
        keywords: The translated keyword arguments.

    Raises:
        ValueError: No expression of the rule uses all of these arguments.
    """
    values, variadic = _bind(rule, arguments, keywords)
    params = table.parameters(rule)
    defaults = {p.name: p.default for p in params}
    passed = {
        name
        for name, value in values.items()
        if name in variadic or defaults[name] is None or not _equal(value, defaults[name])
    }
    passed -= {p.name for p in params if p.is_ignored}
    if rule.names.startswith("Tensor."):
        passed.discard(params[0].name)
    for result in rule.results:
        template = expression(result)
        names = {node.id for node in ast.walk(template) if isinstance(node, ast.Name)}
        if passed <= names:
            break
    else:
        unread = ", ".join(sorted(passed - names))
        raise ValueError(f"no translation for the argument {unread}")
    return _fill(template, values, variadic, defaults)


def _bind(
    rule: Rule, arguments: list[ast.expr], keywords: list[ast.keyword]
) -> tuple[dict[str, ast.expr], dict[str, list[ast.expr]]]:
    """Returns the arguments by parameter name, and the argument list of a variadic parameter."""
    values: dict[str, ast.expr] = {}
    variadic: dict[str, list[ast.expr]] = {}
    remaining = list(arguments)
    params = table.parameters(rule)
    for parameter in params:
        if parameter.is_variadic:
            if remaining:
                variadic[parameter.name], remaining = remaining, []
        elif remaining:
            if isinstance(remaining[0], ast.Starred):
                raise ValueError("a starred argument has no translation")
            values[parameter.name] = remaining.pop(0)
    if remaining:
        raise ValueError(f"unexpected argument {ast.unparse(remaining[0])}")
    names = {parameter.name for parameter in params}
    for keyword in keywords:
        name = keyword.arg
        if name in table.IGNORED_PARAMETERS and name not in names:
            continue
        if name not in names:
            name = next((n for n in table.SYNONYMS.get(name or "", ()) if n in names), name)
        if name not in names and name in _SECOND:
            name = next((p.name for p in params[1:2]), name)
        if name is None:
            raise ValueError("a ** argument has no translation")
        if name not in names:
            raise ValueError(f"no translation for the argument {name}")
        values[name] = keyword.value
    for name, items in variadic.items():
        single = items[0] if len(items) == 1 and not isinstance(items[0], ast.Starred) else None
        values[name] = single or ast.Tuple(items, ast.Load())
    for parameter in params:
        if parameter.default is None and not parameter.is_variadic and parameter.name not in values:
            raise ValueError(f"the argument {parameter.name} is missing")
    return values, variadic


#: Names that different functions of PyTorch have for their second argument.
_SECOND = frozenset({"other", "exponent", "y", "tensor2", "mat2", "vec2"})


def _fill(
    template: ast.expr,
    values: Mapping[str, ast.expr],
    variadic: Mapping[str, list[ast.expr]],
    defaults: Mapping[str, ast.expr | None],
) -> ast.expr:
    """Replaces the names of parameters in the template with the arguments."""
    missing = {
        name
        for name, default in defaults.items()
        if name not in values and (default is None or _is_ellipsis(default))
    }

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in values:
                return copy.deepcopy(values[node.id])
            default = defaults.get(node.id)
            return node if default is None else copy.deepcopy(default)

        def visit_Call(self, node: ast.Call) -> ast.AST:
            arguments: list[ast.expr] = []
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
                    name = argument.value.id
                    if name in variadic:
                        arguments += [copy.deepcopy(item) for item in variadic[name]]
                    elif name in values:
                        arguments.append(copy.deepcopy(values[name]))
                    elif name not in missing:
                        arguments.append(argument)
                elif not (isinstance(argument, ast.Name) and argument.id in missing):
                    arguments.append(self.visit(argument))
            keywords = [
                ast.keyword(word.arg, self.visit(word.value))
                for word in node.keywords
                if not missing & {n.id for n in ast.walk(word.value) if isinstance(n, ast.Name)}
            ]
            return ast.Call(self.visit(node.func), arguments, keywords)

    return Fill().visit(template)


def _is_ellipsis(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _equal(value: ast.expr, default: ast.expr | None) -> bool:
    return default is not None and ast.dump(value) == ast.dump(default)


def _is_axis(node: ast.expr) -> bool:
    """Returns whether the second argument of `max` is an axis rather than another tensor."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int)
    return is_number or dotted(node).rpartition(".")[2] in ("dim", "axis")


def _elements(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return list(node.elts)
    return [node]


def _read(node: ast.Attribute) -> ast.expr:
    return ast.Subscript(node, ast.Constant(...), ast.Load())


def _listed_values(node: ast.ListComp) -> ast.expr | None:
    """Returns `values` for `[x.item() for x in values]`, or `None`."""
    generator = node.generators[0]
    text = ast.unparse(node.elt)
    variable = dotted(generator.target)
    if len(node.generators) > 1 or generator.ifs:
        return None
    return generator.iter if text in (f"{variable}.item()", f"{variable}.tolist()") else None


def _fixed_numbers(visitor: Expressions, node: ast.expr) -> ast.expr | None:
    """Translates `torch.linspace(...)` to a list of numbers, or returns `None`."""
    if not isinstance(node, ast.Call) or dotted(node.func) != "torch.linspace":
        return None
    words = [word.value for word in node.keywords if word.arg in ("start", "end", "steps")]
    numbers = [visitor.visit(argument) for argument in (*node.args, *words)]
    values = call("np.linspace", *numbers)
    return ast.Call(ast.Attribute(values, "tolist", ast.Load()), [], [])


def _random_shape(node: ast.expr) -> ast.expr | None:
    """Returns the shape of a tensor that is created with random or unset values, or `None`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _random_shape(node.left) or _random_shape(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("uniform_", "normal_"):
            return _random_shape(node.func.value)
    if not isinstance(node, ast.Call) or dotted(node.func) not in _UNSET_VALUES:
        return None
    sizes = node.args or [word.value for word in node.keywords if word.arg == "size"]
    if len(sizes) == 1 and not isinstance(
        sizes[0], ast.Constant | ast.Name | ast.Attribute | ast.BinOp
    ):
        return sizes[0]
    return ast.Tuple(sizes, ast.Load())


_UNSET_VALUES = frozenset(
    {f"torch.{name}" for name in ("randn", "rand", "empty", "Tensor", "FloatTensor")}
)


def _literal_sizes(node: ast.expr) -> ast.expr:
    """Replaces calls such as `nn.per_axis(3, 2)` with their values, such as `(3, 3)`."""

    class Sizes(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if dotted(node.func) != "nn.per_axis":
                return node
            size, count = node.args
            if isinstance(size, ast.Constant) and isinstance(count, ast.Constant):
                assert isinstance(count.value, int)
                return ast.Tuple([copy.copy(size) for _ in range(count.value)], ast.Load())
            return size if isinstance(size, ast.Tuple) else node

    return Sizes().visit(node)


def tests_values(node: ast.AST) -> bool:
    """Returns whether a condition depends on the values of an array."""
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Call):
            continue
        if isinstance(inner.func, ast.Attribute) and inner.func.attr in _VALUE_TESTS:
            root = dotted(inner.func.value).split(".")[0]
            if root not in ("config", "self", "math", "np", "re"):
                return True
    return False


#: Tensor methods that the table does not contain. The list lets a report name the method.
TENSOR_METHODS = frozenset(
    {
        *("abs_", "backward", "bernoulli", "cholesky", "data_ptr", "element_size", "geqrf"),
        *("index_put", "index_put_", "is_contiguous", "kthvalue", "lu", "masked_select", "median"),
        *("mode", "multinomial", "nonzero", "numpy", "pin_memory", "put_", "qr", "register_hook"),
        *("renorm", "requires_grad_", "resize_", "set_", "share_memory_", "stft", "storage"),
        *("stride", "svd", "take", "to_sparse", "unique", "unique_consecutive", "as_strided"),
        *("item", "tolist", "quantile", "trace", "vdot", "index_fill", "logcumsumexp", "logit"),
    }
)

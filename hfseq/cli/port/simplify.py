"""Simplifies the translated functions and classes of a port.

The translation keeps the structure of PyTorch's code. Many of its statements have no effect in a
port, because hfseq never passes some arguments, and its functions use another layout of arrays. The
pass removes such statements, and writes repeated statements once. It only changes how values are
computed, not the values.
"""

from __future__ import annotations

import ast
import collections
import copy
import re
from collections.abc import Callable, Collection, Iterator, Sequence

from hfseq.cli.port.syntax import (
    argument,
    attributes_written,
    default_values,
    dotted,
    expression,
    is_none,
    method,
    names_read,
    names_written,
    own_attribute,
    replace,
    statement,
)
from hfseq.cli.port.tidying import is_plain, is_pure, return_directly, tidy_body, unused_names

#: Attributes of modules that functions of hfseq read.
_KEPT_ATTRIBUTES = {"kv_heads", "head_dim", "cross", "causal", "window", "layer_type", "rate"}


def simplify(nodes: Sequence[ast.stmt], public: Collection[str]) -> list[ast.stmt]:
    """Returns simplified copies of the functions and classes of a port.

    Args:
        nodes: The definitions, in the order of the file.
        public: The names of the classes that the model classes of hfseq call.
    """
    body = copy.deepcopy(list(nodes))
    for _ in range(6):
        text = [ast.dump(node) for node in body]
        for function, owner in _functions(body):
            simplify_function(function, owner)
        _inline_wrappers(body)
        _embed_patches(body)
        _drop_default_scale(body)
        _drop_missing_arrays(body)
        _name_elements(body)
        _collect_groups(body)
        _drop_constructors(body)
        Parameters(body, public).simplify()
        body = _reachable(body, public)
        _drop_attributes(body)
        if [ast.dump(node) for node in body] == text:
            break
    _name_arguments(body)
    for function, _ in _functions(body):
        function.body = merge_repeated(function.body)
    return body


def simplify_function(function: ast.FunctionDef, owner: ast.ClassDef | None = None) -> None:
    """Simplifies the body of one function in place.

    Args:
        function: The function.
        owner: The class that contains the function, if any.
    """
    algebra = _Algebra()
    body = [algebra.visit(item) for item in function.body]
    facts = _Facts(function, owner)
    body = facts.block(_propagate_none(body, function), set(facts.required))
    for step in _FUNCTION_STEPS:
        body = step(body)
    for step in _BLOCK_STEPS:
        body = _in_blocks(body, step)
    if function.name != "__init__":
        body = return_directly(unused_names(tidy_body(body)))
    else:
        body = tidy_body(body)
    function.body = body or [ast.Pass()]


def _propagate_none(body: list[ast.stmt], function: ast.FunctionDef) -> list[ast.stmt]:
    """Replaces a variable that is `None` in all statements after its only assignment."""
    for number, item in enumerate(body):
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        name = item.targets[0].id
        if is_none(item.value) and name not in names_written(body[number + 1 :]):
            rest = [replace(line, {name: "None"}) for line in body[number + 1 :]]
            algebra = _Algebra()
            return [*body[:number], *(algebra.visit(line) for line in rest)]
    return body


def _functions(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node, None
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield item, node


def _in_blocks(
    body: list[ast.stmt], step: Callable[[list[ast.stmt]], list[ast.stmt]]
) -> list[ast.stmt]:
    """Applies a step to a block of statements, and to the blocks inside of its statements."""
    for item in body:
        for name in ("body", "orelse"):
            if isinstance(item, ast.If | ast.For | ast.While | ast.With) and getattr(
                item, name, None
            ):
                setattr(item, name, _in_blocks(getattr(item, name), step))
    return step(body)


# -- expressions


class _Algebra(ast.NodeTransformer):
    """Evaluates operations that have no effect."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            if isinstance(node.test.operand, ast.Compare | ast.Name | ast.Attribute):
                node.test, node.body, node.orelse = node.test.operand, node.orelse, node.body
        if ast.unparse(node.body) == ast.unparse(node.orelse):
            return node.body
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add) and ast.unparse(node.left) == "0":
            return node.right
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        left, right = node.left, node.comparators[0]
        if len(node.ops) == 1 and isinstance(left, ast.Constant) and is_none(right):
            if isinstance(node.ops[0], ast.Is | ast.IsNot):
                return ast.Constant((left.value is None) == isinstance(node.ops[0], ast.Is))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if all(
            isinstance(part, ast.Slice)
            and not (part.upper or part.step)
            and (part.lower is None or ast.unparse(part.lower) == "0")
            for part in elements
        ) and isinstance(node.ctx, ast.Load):
            return node.value  # x[:, :]
        text = ast.unparse(node)
        if match := re.fullmatch(r"(.+)\.T\.shape\[-1\]", text):
            return expression(f"{match[1]}.shape[0]")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        value = node.value
        if node.attr == "dtype" and isinstance(value, ast.Call):
            function = value.func
            if isinstance(function, ast.Attribute) and function.attr in ("transpose", "swapaxes"):
                node.value = value = function.value
        if node.attr == "dtype" and isinstance(value, ast.Attribute) and value.attr == "T":
            node.value = value = value.value
        if node.attr in ("dtype", "shape") and isinstance(value, ast.Subscript):
            if isinstance(value.slice, ast.Constant) and value.slice.value is Ellipsis:
                node.value = value.value  # the parameter has the same attribute
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function, name = node.func, dotted(node.func)
        if name == "nn.attend":
            node.keywords = [word for word in node.keywords if not is_none(word.value)]
        if name == "nn.Conv":
            node.keywords = [w for w in node.keywords if ast.unparse(w) not in _CONV_DEFAULTS]
        if name == "jnp.arange" and len(node.args) == 2 and ast.unparse(node.args[0]) == "0":
            node.args = node.args[1:]
        if name == "jnp.arange":
            node.keywords = [w for w in node.keywords if ast.unparse(w) != "dtype=jnp.int32"]
        if name == "int" and len(node.args) == 1 and isinstance(node.args[0], ast.BinOp):
            quotient = node.args[0]
            sides = (dotted(quotient.left), dotted(quotient.right))
            if isinstance(quotient.op, ast.Div) and all(s.startswith("config.") for s in sides):
                return ast.BinOp(quotient.left, ast.FloorDiv(), quotient.right)
        if name == "F.expand" and len(node.args) > 2 and not node.keywords:
            return _broadcast(node)
        if not isinstance(function, ast.Attribute):
            return node
        array = ast.unparse(function.value)
        arguments = [ast.unparse(arg) for arg in node.args]
        if function.attr == "astype" and arguments == [f"{array}.dtype"]:
            return function.value
        if function.attr == "reshape" and arguments == [f"{array}.shape"]:
            return function.value
        if function.attr == "reshape" and len(node.args) == 1:
            if isinstance(node.args[0], ast.Starred):
                node.args = [node.args[0].value]
        if function.attr == "swapaxes" and _swap(function.value) == arguments:
            assert isinstance(function.value, ast.Call)
            return function.value.func.value  # type: ignore[attr-defined]
        return node


_CONV_DEFAULTS = ("dilation=1", "groups=1", "stride=1", "padding=0", "use_bias=True")


def _swap(node: ast.AST) -> list[str] | None:
    """Returns the axes of `x.swapaxes(a, b)`, or `None` for any other expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "swapaxes":
            return [ast.unparse(arg) for arg in node.args]
    return None


def _broadcast(node: ast.Call) -> ast.expr:
    """Returns `jnp.broadcast_to` for `F.expand` of a parameter."""
    array = node.args[0]
    if isinstance(array, ast.IfExp) and is_none(array.body):
        array = array.orelse  # an array is needed here
    text = ast.unparse(array)
    if not re.fullmatch(r"self\.\w+\[\.\.\.\]", text):
        return node
    sizes = [ast.unparse(size) for size in node.args[1:]]
    shape = f"{text.removesuffix('[...]')}.shape"
    while sizes and sizes[-1] == "-1":
        sizes.pop()
    rest = len(node.args) - 1 - len(sizes)
    if "-1" in sizes or not rest:
        return node
    tail = f"{shape}[-1]" if rest == 1 else f"*{shape}[-{rest}:]"
    return expression(f"jnp.broadcast_to({text}, ({', '.join([*sizes, tail])}))")


# -- statements


class _Facts:
    """Removes branches whose condition is known from the statements before them.

    Args:
        function: The function whose statements are simplified.
        owner: The class that contains the function, if any.
    """

    def __init__(self, function: ast.FunctionDef, owner: ast.ClassDef | None):
        self.function, self.owner = function, owner
        defaults = len(function.args.defaults)
        required = function.args.args[: len(function.args.args) - defaults]
        self.required = {arg.arg for arg in required} & {"input_ids", "pixel_values"}
        self.required |= getattr(function, "not_none", set())
        #: Conditions on the configuration that the enclosing branches decide.
        self.tests: dict[str, bool] = {}
        self.attributes: set[str] | None = None
        if owner is not None and function.name != "__init__":
            self.attributes = {
                node.attr
                for node in ast.walk(owner)
                if isinstance(node, ast.Attribute)
                and dotted(node.value) == "self"
                and isinstance(node.ctx, ast.Store)
            } | {item.name for item in owner.body if isinstance(item, ast.FunctionDef)}
            if any(ast.unparse(base) not in ("nnx.Module",) for base in owner.bases):
                self.attributes = None

    def block(self, body: list[ast.stmt], known: set[str]) -> list[ast.stmt]:
        """Simplifies statements.

        Args:
            body: The statements.
            known: Variables that are not `None`. The method adds the variables that are not `None`
                after the statements.
        """
        lines: list[ast.stmt] = []
        for item in body:
            if isinstance(item, ast.If):
                truth = self.truth(item.test, known)
                if truth is not None:
                    lines += self.block(item.body if truth else item.orelse, known)
                    continue
                inside, outside = set(known), set(known)
                text = ast.unparse(item.test)
                if match := re.fullmatch(r"(\w+) is (not )?None", text):
                    (inside if match[2] else outside).add(match[1])
                outer = dict(self.tests)
                fixed = names_read([item.test]) <= {"config"}
                self.tests |= {text: True} if fixed else {}
                item.body = self.block(item.body, inside)
                self.tests = outer | ({text: False} if fixed else {})
                item.orelse = self.block(item.orelse, outside)
                self.tests = outer
                item.test = self.without_hasattr(item.test)
                ends = bool(item.body) and isinstance(item.body[-1], ast.Return | ast.Raise)
                known.clear()
                known |= outside if ends else inside & outside
                if item.body and item.orelse and _same(item.body, item.orelse):
                    lines += item.body
                    continue
                if not item.body and not item.orelse:
                    continue
                if not item.body:
                    item.test, item.body, item.orelse = _negated(item.test), item.orelse, []
                lines.append(item)
                continue
            if isinstance(item, ast.For | ast.While):
                known -= names_written([item])
                item.body = self.block(item.body, set(known))
                lines.append(item)
                continue
            item = _IfExps(self, known).visit(item)
            for node in ast.walk(item):
                if isinstance(node, ast.Name):
                    node.not_none = node.id in known  # type: ignore[attr-defined]
            written = names_written([item])
            known -= written
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                if _is_value(item.value, known):
                    known.add(item.targets[0].id)
            lines.append(item)
            if isinstance(item, ast.Return | ast.Raise):
                break
        return lines

    def truth(self, test: ast.expr, known: set[str]) -> bool | None:
        """Returns the value of a condition, or `None` if it is not known."""
        text = ast.unparse(test)
        if text in self.tests:
            return self.tests[text]
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if match := re.fullmatch(r"(\w+) is (not )?None", text):
            if match[1] in known:
                return bool(match[2])
        if match := re.fullmatch(r"hasattr\(self, '(\w+)'\)", text):
            return match[1] in self.attributes if self.attributes is not None else None
        if re.fullmatch(r"isinstance\(config\.\w*act\w*, str\)", text):
            return True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand, known)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            values = [self.truth(value, known) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        return None

    def without_hasattr(self, test: ast.expr) -> ast.expr:
        """Removes operands whose value does not change the condition."""
        if isinstance(test, ast.BoolOp):
            neutral = isinstance(test.op, ast.And)
            rest = [value for value in test.values if self.truth(value, set()) is not neutral]
            if rest and len(rest) < len(test.values):
                return rest[0] if len(rest) == 1 else ast.BoolOp(test.op, rest)
        return test


class _IfExps(ast.NodeTransformer):
    def __init__(self, facts: _Facts, known: set[str]):
        self.facts, self.known = facts, known

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        truth = self.facts.truth(node.test, self.known)
        return node if truth is None else node.body if truth else node.orelse


def _same(first: Sequence[ast.AST], second: Sequence[ast.AST]) -> bool:
    return [ast.dump(node) for node in first] == [ast.dump(node) for node in second]


def _negated(test: ast.expr) -> ast.expr:
    text = ast.unparse(test)
    if match := re.fullmatch(r"([\w.]+) is (not )?None", text):
        return expression(f"{match[1]} is {'' if match[2] else 'not '}None")
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _is_value(node: ast.expr, known: set[str]) -> bool:
    """Returns whether an expression is certainly not `None`."""
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if re.match(r"(jnp|jax|F)\.|create_\w+$|nn\.(positions_in_segments|rotate|dropout)$", name):
            return True
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return method in ("reshape", "astype", "swapaxes", "transpose", "sum", "mean")
    if isinstance(node, ast.Name):
        return node.id in known
    return isinstance(node, ast.BinOp | ast.Tuple | ast.List | ast.JoinedStr)


def _reads(body: Sequence[ast.AST], name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for item in body
        for node in ast.walk(item)
    )


def _until_written(
    body: Sequence[ast.stmt], start: int, name: str
) -> tuple[list[ast.stmt], bool] | None:
    """Returns the statements that may read a variable after statement `start`.

    Returns:
        The statements up to the next one that assigns the variable, and whether there is one.
        `None` if a branch or a loop assigns it.
    """
    lines: list[ast.stmt] = []
    for item in body[start + 1 :]:
        lines.append(item)
        if name in names_written([item]):
            return (lines, True) if isinstance(item, ast.Assign) else None
    return lines, False


def cancel_swaps(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes `.swapaxes(a, b)` where a variable is only read after swapping the axes back."""
    for number, item in enumerate(body):
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        axes, name = _swap(item.value), item.targets[0].id
        if axes is None:
            continue
        found = _until_written(body, number, name)
        if found is None:
            continue
        lines, _ = found
        swaps = [
            node
            for line in lines
            for node in ast.walk(line)
            if _swap(node) == axes and dotted(node.func.value) == name  # type: ignore[attr-defined]
        ]
        if not swaps or len(swaps) != _reads(lines, name):
            continue
        item.value = item.value.func.value  # type: ignore[attr-defined]
        for position, line in enumerate(body[number + 1 : number + 1 + len(lines)]):
            body[number + 1 + position] = _Unswap(name, axes).visit(line)
    return [
        item
        for item in body
        if not (isinstance(item, ast.Assign) and dotted(item.value)
                and dotted(item.value) == dotted(item.targets[0]))
    ]  # fmt: skip


class _Unswap(ast.NodeTransformer):
    def __init__(self, name: str, axes: list[str]):
        self.name, self.axes = name, axes

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _swap(node) == self.axes and dotted(node.func.value) == self.name:  # type: ignore[attr-defined]
            return node.func.value  # type: ignore[attr-defined]
        return self.generic_visit(node)


def drop_row_flattening(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes a reshape to two axes and back, around layers that act on the last axis."""
    texts = [ast.unparse(item) for item in body]
    for number, text in enumerate(texts):
        match = re.fullmatch(r"(\w+) = (\w+)\.shape", text)
        if match is None or number + 1 == len(texts):
            continue
        shape, name = match.groups()
        if texts[number + 1] != f"{name} = {name}.reshape(-1, {name}.shape[-1])":
            continue
        for end in range(number + 2, len(texts)):
            back = re.fullmatch(rf"(\w+) = (\(?)(.+?)(\)?)\.reshape\({shape}\)", texts[end])
            if back is None:
                continue
            between = [node for item in body[number + 2 : end] for node in ast.walk(item)]
            calls = [dotted(node.func) for node in between if isinstance(node, ast.Call)]
            plain = all(re.fullmatch(r"self\.\w+|nn\.dropout", called) for called in calls)
            if not plain or _reads(body[number:], shape) != 1:
                break
            item = body[end]
            assert isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
            item.value = item.value.func.value  # type: ignore[attr-defined]
            return [*body[:number], *body[number + 2 :]]
    return body


def drop_casts(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes casts of an input to the dtype of a kernel, which the layers of hfseq do themselves.

    Also removes the reshape of token IDs to two axes, which they have.
    """
    lines: list[ast.stmt] = []
    choices = any("num_choices" in ast.unparse(item) for item in body)
    for item in body:
        text = ast.unparse(item)
        if re.fullmatch(
            r"(\w+) = \1\.astype\(self(\.\w+)+\.(kernel|scale|embedding)\.dtype\)", text
        ):
            continue
        if not choices and re.fullmatch(
            r"(input_ids|token_type_ids) = \1\.reshape\(-1, (\1\.shape\[-1\]|seq_length)\)", text
        ):
            continue
        match = re.fullmatch(r"if (\w+)\.dtype != (\w+):\n    \1 = \1\.astype\(\2\)", text)
        if match:
            lines = [
                line
                for line in lines
                if not re.fullmatch(
                    rf"{match[2]} = self(\.\w+)+\.(kernel|scale|embedding)\.dtype",
                    ast.unparse(line),
                )
            ]
            if match[2] not in names_written(lines):
                continue
        lines.append(item)
    return lines


def name_used_sizes(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replaces `a, _, _ = x.shape` with `a = x.shape[0]`."""
    for item in body:
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Tuple):
            continue
        text = ast.unparse(item.value)
        if not re.fullmatch(r"\w+(\.|_)shape(\[:\d\])?", text):
            continue
        names = [dotted(element) for element in item.targets[0].elts]
        used = [number for number, name in enumerate(names) if name != "_"]
        if len(used) == 1 and all(names):
            array = text.split("[")[0]
            item.targets = [ast.Name(names[used[0]], ast.Store())]
            item.value = expression(f"{array}[{used[0]}]")
    return body


def split_last_axis(body: list[ast.stmt]) -> list[ast.stmt]:
    """Uses `jnp.unstack` for a split into slices of size 1 that are then squeezed."""
    for number, item in enumerate(body[:-2]):
        match = re.fullmatch(
            r"\(?(\w+), (\w+)\)? = F\.split\((\w+), 1, dim=-1\)", ast.unparse(item)
        )
        if match is None:
            continue
        names = [match[1], match[2]]
        squeezes = [ast.unparse(line) for line in body[number + 1 : number + 3]]
        if squeezes == [f"{name} = F.squeeze({name}, dim=-1)" for name in names]:
            line = statement(f"{names[0]}, {names[1]} = jnp.unstack({match[3]}, axis=-1)")
            return [*body[:number], line, *body[number + 3 :]]
    return body


def inline_single_uses(body: list[ast.stmt]) -> list[ast.stmt]:
    """Inlines variables that hold a field or another variable and that are read once."""
    for number, item in enumerate(body):
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        name, value = item.targets[0].id, dotted(item.value)
        found = _until_written(body, number, name)
        if not value or found is None:
            continue
        lines, rewritten = found
        is_field = value.startswith("config.")
        is_constant = is_field and value not in attributes_written(lines)
        if is_constant and _reads(lines, name) == 1 and not _in_loop(lines, name):
            texts = {name: value}
            for line in lines:
                replace(line, texts) if not isinstance(line, ast.Assign) else _read(line, texts)
            return inline_single_uses([*body[:number], *body[number + 1 :]])
        if is_field or "." in value or value == name:
            continue
        # y = f(x); z = y, and y is not read any more: z = f(x)
        writers = [
            line
            for line in body[:number]
            if isinstance(line, ast.Assign) and dotted(line.targets[0]) == value
        ]
        if not writers or value in names_written(body[number:]) or _reads(body[number:], value) > 1:
            continue
        first = body.index(writers[0])
        between = body[first:number]
        if name in names_written(between) or _reads(between, name) and _reads([writers[0]], name):
            continue
        if _reads(between[1:], name) or _reads(body[:first], value) or _reads([writers[0]], value):
            continue
        if len(writers) != len([line for line in between if value in names_written([line])]):
            continue
        for line in between:
            for node in ast.walk(line):
                if isinstance(node, ast.Name) and node.id == value:
                    node.id = name
        return inline_single_uses([*body[:number], *body[number + 1 :]])
    return body


def _read(line: ast.Assign, texts: dict[str, str]) -> None:
    line.value = replace(line.value, texts)  # type: ignore[assignment]


def _in_loop(body: Sequence[ast.stmt], name: str) -> bool:
    loops = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.FunctionDef, ast.Lambda)
    return any(
        isinstance(node, loops) and _reads([node], name) for line in body for node in ast.walk(line)
    )


def choose_modules(body: list[ast.stmt]) -> list[ast.stmt]:
    """Writes the choice between a module and `None` as one expression."""
    lines: list[ast.stmt] = []
    for item in body:
        if isinstance(item, ast.If) and len(item.body) == 1 and len(item.orelse) <= 1:
            first = item.body[0]
            name = own_attribute(first.targets[0]) if isinstance(first, ast.Assign) else ""
            other: ast.stmt | None = item.orelse[0] if item.orelse else None
            if other is None and lines and name:
                previous = lines[-1]
                if ast.unparse(previous) == f"self.{name} = nnx.data(None)":
                    other = lines.pop()
            if (
                name
                and isinstance(first, ast.Assign)
                and isinstance(other, ast.Assign)
                and own_attribute(other.targets[0]) == name
                and not isinstance(first.value, ast.IfExp)
            ):
                value = ast.IfExp(item.test, first.value, other.value)
                lines.append(ast.Assign(first.targets, value, lineno=0))
                continue
        lines.append(item)
    return lines


def drop_loop_numbers(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes `enumerate` from loops that do not read the number."""
    for item in body:
        if isinstance(item, ast.For) and isinstance(item.iter, ast.Call):
            if dotted(item.iter.func) == "enumerate" and isinstance(item.target, ast.Tuple):
                number, value = item.target.elts
                if not _reads(item.body, dotted(number)) and len(item.iter.args) == 1:
                    item.target, item.iter = value, item.iter.args[0]
    return body


def refuse_missing_arrays(body: list[ast.stmt]) -> list[ast.stmt]:
    """Adds an error where a statement needs a parameter that the model may not have."""
    lines: list[ast.stmt] = []
    for item in body:
        match = re.search(r"jnp\.broadcast_to\(self\.(mask_token)\[", ast.unparse(item))
        if match and isinstance(item, ast.Assign):
            check = f"if self.{match[1]} is None"
            if not any(ast.unparse(line).startswith(check) for line in lines):
                lines.append(
                    statement(
                        f"{check}:\n    raise ValueError('bool_masked_pos needs a mask token, "
                        "which this model does not have')"
                    )
                )
        lines.append(item)
    return lines


def flatten_choices(body: list[ast.stmt]) -> list[ast.stmt]:
    """Writes the reshape of several inputs to two axes once."""
    names: list[str] = []
    positions: list[int] = []
    for number, item in enumerate(body):
        match = re.fullmatch(
            r"(\w+) = \1\.reshape\(-1, \1\.shape\[-1\]\)( if \1 is not None else None)?",
            ast.unparse(item),
        )
        if match:
            names.append(match[1])
            positions.append(number)
    if len(names) < 3 or positions[-1] - positions[0] != len(names) - 1:
        return body
    group = ", ".join(names)
    line = statement(
        f"{group} = (None if ids is None else ids.reshape(-1, ids.shape[-1]) for ids in ({group}))"
    )
    return [*body[: positions[0]], line, *body[positions[-1] + 1 :]]


def drop_dead_stores(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes assignments to variables that are assigned again before they are read."""
    lines: list[ast.stmt] = []
    for number, item in enumerate(body):
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            found = _until_written(body, number, name)
            if found is not None and found[1] and not _reads(found[0], name):
                if is_pure(item.value):
                    continue
        lines.append(item)
    return lines


def drop_full_masks(body: list[ast.stmt]) -> list[ast.stmt]:
    """Removes a default mask of ones, if only `nn.visible` reads it."""
    for number, item in enumerate(body):
        if not isinstance(item, ast.If) or ast.unparse(item.test) != "attention_mask is None":
            continue
        line = item.body[0]
        if len(item.body) != 1 or item.orelse or not isinstance(line, ast.Assign):
            continue
        if not re.match(r"attention_mask = jnp\.ones\(", ast.unparse(line)):
            continue
        found = _until_written(body, number, "attention_mask")
        if found is None:
            continue
        visible = [
            node
            for other in found[0]
            for node in ast.walk(other)
            if isinstance(node, ast.Call)
            and dotted(node.func) == "nn.visible"
            and dotted(node.args[0]) == "attention_mask"
        ]
        if len(visible) == _reads(found[0], "attention_mask"):
            return [*body[:number], *body[number + 1 :]]
    return body


def drop_aliases(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replaces a second name of a variable, and a second variable with the same shape."""
    for number, item in enumerate(body):
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            continue
        name, rest = item.targets[0].id, body[number + 1 :]
        if name in names_written(body[:number]) | names_written(rest):
            continue
        value = dotted(item.value)
        if not value and isinstance(item.value, ast.Tuple):
            for earlier in body[:number]:
                if isinstance(earlier, ast.Assign) and isinstance(earlier.value, ast.Tuple):
                    between = names_written(body[body.index(earlier) + 1 : number])
                    same = ast.unparse(earlier.value) == ast.unparse(item.value)
                    if same and not between & names_read([item]):
                        value = dotted(earlier.targets[0])
        if not value or "." in value or value in names_written(rest):
            continue
        renamed: list[ast.stmt] = [replace(line, {name: value}) for line in rest]  # type: ignore[misc]
        return drop_aliases([*body[:number], *renamed])
    return body


def hoist_common_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Moves equal first statements of both branches of an `if` statement in front of it."""
    lines: list[ast.stmt] = []
    for item in body:
        if isinstance(item, ast.If) and item.orelse:
            while item.body and item.orelse and _same(item.body[:1], item.orelse[:1]):
                if names_written(item.body[:1]) & names_read([item.test]):
                    break
                lines.append(item.body.pop(0))
                item.orelse.pop(0)
            if not item.body and not item.orelse:
                continue
            if not item.body:
                item.test, item.body, item.orelse = _negated(item.test), item.orelse, []
        lines.append(item)
    return lines


#: Steps for the statements of a whole function. They must see all statements that read a variable.
_FUNCTION_STEPS = (
    drop_full_masks,
    drop_aliases,
    cancel_swaps,
    drop_row_flattening,
    inline_single_uses,
)
#: Steps for the statements of any block.
_BLOCK_STEPS = (
    drop_dead_stores,
    hoist_common_statements,
    drop_casts,
    name_used_sizes,
    split_last_axis,
    choose_modules,
    drop_loop_numbers,
    refuse_missing_arrays,
    flatten_choices,
)


# -- repeated statements


def merge_repeated(body: list[ast.stmt]) -> list[ast.stmt]:
    """Writes three or more consecutive assignments that differ in one attribute as one statement.

    `self.q = nn.Linear(a, b)`, and the same for `k` and `v`, becomes
    `self.q, self.k, self.v = (nn.Linear(a, b) for _ in range(3))`.
    """
    lines: list[ast.stmt] = []
    position = 0
    while position < len(body):
        group = _equal_values(body[position:])
        if len(group) > 2:
            targets = ", ".join(ast.unparse(item.targets[0]) for item in group)
            value = ast.unparse(group[0].value)
            lines.append(statement(f"{targets} = ({value} for _ in range({len(group)}))"))
            position += len(group)
            continue
        group, parts = _equal_calls(body[position:])
        if len(group) > 2:
            targets = ", ".join(ast.unparse(item.targets[0]) for item in group)
            value = ast.unparse(replace(copy.deepcopy(group[0].value), {parts[0]: "part"}))
            lines.append(statement(f"{targets} = ({value} for part in ({', '.join(parts)}))"))
            position += len(group)
            continue
        lines.append(body[position])
        position += 1
    return lines


def _equal_values(body: Sequence[ast.stmt]) -> list[ast.Assign]:
    group: list[ast.Assign] = []
    for item in body:
        if not isinstance(item, ast.Assign) or not own_attribute(item.targets[0]):
            break
        if not re.match(r"[A-Z]\w+\(|nn\.(Linear|Conv|Conv1D|Embed)\(", ast.unparse(item.value)):
            break
        if group and ast.unparse(item.value) != ast.unparse(group[0].value):
            break
        group.append(item)
    return group


def _equal_calls(body: Sequence[ast.stmt]) -> tuple[list[ast.Assign], list[str]]:
    group: list[ast.Assign] = []
    parts: list[str] = []
    form = ""
    for item in body:
        if not isinstance(item, ast.Assign) or not isinstance(item.targets[0], ast.Name):
            break
        called = [
            dotted(node.func)
            for node in ast.walk(item.value)
            if isinstance(node, ast.Call) and own_attribute(node.func)
        ]
        if len(called) != 1:
            break
        text = ast.unparse(replace(copy.deepcopy(item.value), {called[0]: "part"}))
        if group and text != form or set(names_written(group)) & names_read([item]):
            break
        form = text
        group.append(item)
        parts.append(called[0])
    return group, parts


# -- classes


def _inline_wrappers(body: list[ast.stmt]) -> None:
    """Inlines methods that are called once, from `__call__`, and are not longer than it."""
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        call = methods.get("__call__")
        for name, wrapper in list(methods.items()):
            if call is None or not re.search(r"chunk$|^_?reshape$", name) or wrapper.decorator_list:
                continue
            if _inline(call, name, wrapper):
                node.body.remove(wrapper)


def _inline(call: ast.FunctionDef, name: str, wrapper: ast.FunctionDef) -> bool:
    """Replaces the statement of a function that calls a method by the method's statements."""
    calls = [
        node
        for node in ast.walk(call)
        if isinstance(node, ast.Attribute) and dotted(node) == f"self.{name}"
    ]
    returns = [node for node in ast.walk(wrapper) if isinstance(node, ast.Return)]
    last = wrapper.body[-1]
    if len(calls) != 1 or len(returns) != 1 or last is not returns[0] or last.value is None:
        return False
    for number, item in enumerate(call.body):
        value = getattr(item, "value", None)
        if not isinstance(item, ast.Assign | ast.Return) or not isinstance(value, ast.Call):
            continue
        if dotted(value.func) != f"self.{name}":
            continue
        names = [arg.arg for arg in wrapper.args.args][1:]
        arguments = dict(zip(names, value.args, strict=False))
        arguments |= {word.arg: word.value for word in value.keywords if word.arg}
        if not all(dotted(argument) for argument in arguments.values()):
            return False
        lines = copy.deepcopy(wrapper.body)
        renamed = {n: dotted(v) for n, v in arguments.items() if n != dotted(v)}
        local = names_written(lines)
        after = names_read(call.body[number + 1 :])
        if local & set(renamed) or local & (after - names_written([item])):
            return False
        lines = [replace(line, renamed) for line in lines]  # type: ignore[misc]
        final = lines.pop()
        assert isinstance(final, ast.Return)
        item.value = final.value
        call.body[number : number + 1] = [*lines, item]
        return True
    return False


def _embed_patches(body: Sequence[ast.stmt]) -> None:
    """Uses `nn.embed_patches` for a convolution whose output is flattened to a sequence."""
    pattern = r"F\.flatten\(self\.(\w+)\((\w+)\), start_dim=2\)\.swapaxes\(1, 2\)"
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        found = [
            (inner, match)
            for inner in ast.walk(node)
            if isinstance(inner, ast.Return | ast.Assign) and inner.value is not None
            if (match := re.fullmatch(pattern, ast.unparse(inner.value)))
        ]
        if len(found) != 1:
            continue
        item, match = found[0]
        convolutions = [
            inner.value
            for inner in ast.walk(node)
            if isinstance(inner, ast.Assign)
            and own_attribute(inner.targets[0]) == match[1]
            and isinstance(inner.value, ast.Call)
            and dotted(inner.value.func) == "nn.Conv"
        ]
        reads = sum(own_attribute(inner) == match[1] for inner in ast.walk(node))
        if len(convolutions) != 1 or reads != 2:
            continue
        words = [word for word in convolutions[0].keywords if word.arg != "channels_first"]
        if len(words) == len(convolutions[0].keywords) or len(convolutions[0].args) < 3:
            continue
        size = convolutions[0].args[2]
        per_axis = (
            size if isinstance(size, ast.Call) and dotted(size.func) == "nn.per_axis" else None
        )
        axes = len(size.elts) if isinstance(size, ast.Tuple) else 2
        if axes != 2 or per_axis and ast.unparse(per_axis.args[1]) != "2":  # several frames
            continue
        convolutions[0].keywords = words
        stride = next((word.value for word in words if word.arg == "stride"), None)
        if (
            per_axis is not None
            and stride is not None
            and ast.unparse(per_axis.args[0]) == ast.unparse(stride)
            and f"{ast.unparse(stride)} = nn.height_and_width(" in ast.unparse(node)
        ):
            convolutions[0].args[2] = copy.deepcopy(stride)
        item.value = expression(f"nn.embed_patches(self.{match[1]}, {match[2]})")


def _drop_constructors(body: Sequence[ast.stmt]) -> None:
    """Removes constructors that pass all of their arguments to the constructor of a layer."""
    for node in body:
        if not isinstance(node, ast.ClassDef) or not re.match(
            r"nn\.(Embed|Linear|LayerNorm)$", dotted(node.bases[0]) if node.bases else ""
        ):
            continue
        init = method(node, "__init__")
        if init is not None and not init.args.defaults and len(node.body) > 1:
            names = ", ".join(arg.arg for arg in init.args.args[1:])
            if [ast.unparse(item) for item in init.body] == [f"super().__init__({names})"]:
                node.body.remove(init)


def _collect_groups(body: Sequence[ast.stmt]) -> None:
    """Runs groups of layers with `nn.run_layers`, to collect hidden states and attention weights.

    The pattern is that of ALBERT, whose steps share the parameters of a few groups.
    """
    group_call = re.compile(
        r"\(?(\w+), attentions, inputs\)? = nn\.run_layers\(self\.(\w+), \1, (.*)rngs=rngs, "
        r"collect=output_hidden_states, return_weights=output_attentions\)"
    )
    step = re.compile(
        r"for (\w+) in range\((.+)\):\n    (\w+) = int\(\1 / \(\2 / (.+)\)\)\n"
        r"    (\w+) = self\.(\w+)\[\3\]\(\5, (\w+), rngs=rngs, "
        r"output_attentions=output_attentions, output_hidden_states=output_hidden_states\)"
    )
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in classes.values():
        call = method(node, "__call__")
        if call is None:
            continue
        for number, item in enumerate(call.body):
            match = step.fullmatch(ast.unparse(item))
            if match is None:
                continue
            index, count, _, groups, state, name, mask = match.groups()
            made = [
                (inner, re.search(r"nnx\.List\(\[(\w+)\(", ast.unparse(inner.value)))
                for inner in ast.walk(node)
                if isinstance(inner, ast.Assign) and own_attribute(inner.targets[0]) == name
            ]
            owner = classes.get(made[0][1][1]) if len(made) == 1 and made[0][1] else None
            inner_call = method(owner, "__call__") if owner else None
            result = call.body[-1]
            if owner is None or inner_call is None:
                continue
            if len(inner_call.body) != 2:
                continue
            inner_match = group_call.fullmatch(ast.unparse(inner_call.body[0]))
            if inner_match is None or not isinstance(result, ast.Return):
                continue
            if ast.unparse(inner_call.body[1]) != f"return {inner_match[1]}":
                continue
            if not isinstance(result.value, ast.Call) or len(result.value.keywords) != 1:
                continue
            x, layers, words = inner_match.groups()
            inner_call.body = [
                statement("attentions = ()"),
                statement(
                    f"for layer in self.{layers}:\n"
                    f"    {x}, weights = layer({x}, {words}rngs=rngs, "
                    "return_weights=return_weights)\n"
                    "    attentions += (weights,)"
                ),
                statement(f"return ({x}, attentions)"),
            ]
            for inner in ast.walk(owner):  # a scan over the groups contains no other scan
                if isinstance(inner, ast.Assign) and own_attribute(inner.targets[0]) == layers:
                    inner.value.func = expression("nnx.List")  # type: ignore[attr-defined]
            keep = [a for a in inner_call.args.kwonlyargs if not a.arg.startswith("output_")]
            inner_call.args.kwonlyargs = [*keep, ast.arg("return_weights")]
            inner_call.args.kw_defaults = [
                *inner_call.args.kw_defaults[: len(keep)], ast.Constant(False)
            ]  # fmt: skip
            made[0][0].value.func = expression("nn.Layers")  # type: ignore[attr-defined]
            mask_name = inner_call.args.args[2].arg
            call.body[number : number + 1] = [
                statement(f"order = [{index} * {groups} // {count} for {index} in range({count})]"),
                statement(
                    f"{state}, attentions, inputs = nn.run_layers(self.{name}, {state}, "
                    f"{mask_name}={mask}, order=order, rngs=rngs, collect=output_hidden_states, "
                    "return_weights=output_attentions)"
                ),
            ]
            states = f"(*inputs, {state}) if output_hidden_states else None"
            result.value.keywords += [
                ast.keyword("hidden_states", expression(states)),
                ast.keyword(
                    "attentions", expression("sum(attentions, ()) if output_attentions else None")
                ),
            ]
            break


def _drop_attributes(body: Sequence[ast.stmt]) -> None:
    """Removes attributes with plain values that no method of the port reads."""
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    elsewhere = set(_KEPT_ATTRIBUTES)
    own: dict[str, set[str]] = {}
    for node in body:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
                if dotted(inner.value) != "self":
                    elsewhere.add(inner.attr)
                elif isinstance(node, ast.ClassDef):
                    own.setdefault(node.name, set()).add(inner.attr)
    related: dict[str, set[str]] = {name: set(reads) for name, reads in own.items()}
    for node in classes.values():
        for base in map(dotted, node.bases):
            if base in classes:
                both = related.get(node.name, set()) | related.get(base, set())
                related[node.name] = related[base] = both
    for function, owner in _functions(body):
        if function.name == "__init__" and owner is not None:
            read = elsewhere | related.get(owner.name, set())
            function.body = [
                item
                for item in function.body
                if not (
                    isinstance(item, ast.Assign)
                    and own_attribute(item.targets[0])
                    and own_attribute(item.targets[0]) not in read
                    and is_plain(item.value)
                )
            ] or [ast.Pass()]


_HEAD_DIM = r"self\.(head_dim|attention_head_size|head_size)"


def _drop_default_scale(body: Sequence[ast.stmt]) -> None:
    """Removes the scale of attention scores where it is the default of `nn.attend`."""
    default = rf"{_HEAD_DIM} \*\* \(?-0\.5\)?|1(\.0)? / math\.sqrt\({_HEAD_DIM}\)"
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        scales = {
            ast.unparse(item.targets[0])
            for item in ast.walk(node)
            if isinstance(item, ast.Assign) and re.fullmatch(default, ast.unparse(item.value))
        }
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and dotted(call.func) == "nn.attend":
                call.keywords = [
                    word
                    for word in call.keywords
                    if word.arg != "scale"
                    or ast.unparse(word.value) not in scales
                    and not re.fullmatch(default, ast.unparse(word.value))
                ]


def _drop_missing_arrays(body: Sequence[ast.stmt]) -> None:
    """Removes branches that need a parameter which no model of the port has."""
    for node in body:
        if not isinstance(node, ast.ClassDef):
            continue
        assigned: dict[str, list[str]] = {}
        for item in ast.walk(node):
            if isinstance(item, ast.Assign) and own_attribute(item.targets[0]):
                value = ast.unparse(item.value)
                assigned.setdefault(own_attribute(item.targets[0]), []).append(value)
        missing = {n for n, values in assigned.items() if set(values) == {"nnx.data(None)"}}
        for name in missing:
            for function in node.body:
                if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                    continue
                function.body = [
                    item
                    for item in function.body
                    if not (
                        isinstance(item, ast.If)
                        and not item.orelse
                        and any(f"self.{name}[...]" in ast.unparse(line) for line in item.body)
                    )
                ] or [ast.Pass()]
            if not any(
                own_attribute(inner) == name and isinstance(inner.ctx, ast.Load)  # type: ignore[attr-defined]
                for inner in ast.walk(node)
            ):
                constructor = node.body[0]
                if isinstance(constructor, ast.FunctionDef):
                    constructor.body = [
                        item
                        for item in constructor.body
                        if ast.unparse(item) != f"self.{name} = nnx.data(None)"
                    ] or [ast.Pass()]


def _name_arguments(body: Sequence[ast.stmt]) -> None:
    """Passes constants to constructors by name."""
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in body:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or dotted(call.func) not in classes:
                continue
            init = method(classes[dotted(call.func)], "__init__")
            if init is None:
                continue
            names = [arg.arg for arg in init.args.args[1:]]
            optional = set(names[len(names) - len(init.args.defaults) :])
            for position, value in enumerate(call.args):
                if isinstance(value, ast.Constant) and names[position : position + 1]:
                    if names[position] in optional:
                        words = [
                            ast.keyword(name, argument)
                            for name, argument in zip(
                                names[position:], call.args[position:], strict=False
                            )
                        ]
                        call.args = call.args[:position]
                        call.keywords = [*words, *call.keywords]
                        break


def _name_elements(body: Sequence[ast.stmt]) -> None:
    """Reads outputs of models by name: `outputs.last_hidden_state` instead of `outputs[0]`."""
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    fields: dict[str, list[str]] = {}

    def parts(node: ast.ClassDef) -> dict[str, str]:
        return {
            own_attribute(item.targets[0]): dotted(item.value.func)
            for item in ast.walk(node)
            if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
        }

    for name, node in classes.items():
        call = method(node, "__call__")
        results = [n.value for n in ast.walk(call) if isinstance(n, ast.Return)] if call else []
        if len(results) != 1 or not isinstance(results[0], ast.Call):
            continue
        result = results[0]
        if re.match(r"out\.FlaxBaseModelOutput", dotted(result.func)):
            fields[name] = [
                str(word.arg) for word in result.keywords
                if word.arg in ("last_hidden_state", "pooler_output")
            ]  # fmt: skip
        elif parts(node).get(own_attribute(result.func)) in fields:
            fields[name] = fields[parts(node)[own_attribute(result.func)]]
    for node in classes.values():
        own = parts(node)
        for function in node.body:
            if not isinstance(function, ast.FunctionDef):
                continue
            outputs = {
                dotted(item.targets[0]): fields[own[own_attribute(item.value.func)]]
                for item in ast.walk(function)
                if isinstance(item, ast.Assign)
                and isinstance(item.value, ast.Call)
                and own.get(own_attribute(item.value.func)) in fields
            }
            if outputs:
                visitor = _Fields(outputs)
                function.body = [visitor.visit(item) for item in function.body]


class _Fields(ast.NodeTransformer):
    def __init__(self, outputs: dict[str, list[str]]):
        self.outputs = outputs

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        names = self.outputs.get(dotted(node.value), [])
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(index, int) and index < len(names):
            return ast.Attribute(node.value, names[index], ast.Load())
        if ast.unparse(node.slice) == ":2" and len(names) == 2:
            fields: list[ast.expr] = [ast.Attribute(node.value, n, ast.Load()) for n in names]
            return ast.Tuple(fields, ast.Load())
        return node


def _reachable(body: Sequence[ast.stmt], public: Collection[str]) -> list[ast.stmt]:
    """Removes functions, classes and constants that the port does not use."""
    nodes: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign):
            nodes[dotted(node.targets[0])] = node
    names, open_names = set(), [name for name in public if name in nodes]
    while open_names:
        name = open_names.pop()
        if name not in names:
            names.add(name)
            read = {n.id for n in ast.walk(nodes[name]) if isinstance(n, ast.Name)}
            open_names += [other for other in read if other in nodes]
    return [node for node in body if not any(node is nodes[n] for n in nodes.keys() - names)]


class Parameters:
    """Removes parameters of functions and modules that all calls of the port leave out.

    A parameter that no statement reads is removed together with its arguments. A parameter that is
    equal to the same constant in all calls is replaced with the constant.

    Args:
        body: The definitions of the port.
        public: The names of the classes that the model classes of hfseq call.
    """

    def __init__(self, body: Sequence[ast.stmt], public: Collection[str]):
        self.body, self.public = body, public
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        self.bases = {dotted(base) for node in self.classes.values() for base in node.bases}
        self.walks: dict[int, list[ast.AST]] = {}

    def walk(self, item: ast.stmt) -> list[ast.AST]:
        """Returns all nodes of a definition. The list is reused until a parameter is removed."""
        if id(item) not in self.walks:
            self.walks[id(item)] = list(ast.walk(item))
        return self.walks[id(item)]

    def simplify(self) -> None:
        """Changes the definitions and the calls in place."""
        nodes = [node for item in self.body for node in ast.walk(item)]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        references: dict[str, int] = {}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                references[node.id] = references.get(node.id, 0) + 1
        attributes = collections.Counter(n.attr for n in nodes if isinstance(n, ast.Attribute))
        for node in self.body:
            if isinstance(node, ast.FunctionDef):
                own = [call for call in calls if dotted(call.func) == node.name]
                if len(own) == references.get(node.name, 0):
                    self.reduce(node, own, 0)
        for name, owner in self.classes.items():
            derived = any(dotted(base) in self.classes for base in owner.bases)
            if name in self.bases or derived:
                continue
            methods = {item.name: item for item in owner.body if isinstance(item, ast.FunctionDef)}
            constructor = methods.get("__init__")
            own = [call for call in calls if dotted(call.func) == name]
            if constructor is not None and len(own) == references.get(name, 0):
                kept: set[str] = set()
                if name in self.public:  # hfseq passes the first two arguments
                    own, kept = [*own, ast.Call(ast.Name(name), [], [])], {"config", "rngs"}
                self.reduce(constructor, own, 1, kept)
            for method_name, function in methods.items():
                if method_name.startswith("__") or function.decorator_list:
                    continue
                path = f"self.{method_name}"
                own = [call for call in self.walk(owner) if isinstance(call, ast.Call)]
                own = [call for call in own if dotted(call.func) == path]
                count = sum(dotted(inner) == path for inner in self.walk(owner))
                if len(own) == count == attributes[method_name]:
                    self.reduce(function, own, 1)
            call = methods.get("__call__")
            if call is None:
                continue
            found = self.calls_of(name)
            if name not in self.public:
                if found:
                    self.reduce(call, found, 1)
                continue
            # Models for images have no mask, and models without a mask token do not need masks.
            names = [arg.arg for arg in call.args.args[1:]]
            for unused in ("attention_mask", "bool_masked_pos"):
                if names[:1] == ["pixel_values"] and unused in names and found is not None:
                    if not _reads(call.body, unused):
                        self.remove(call, found, unused, 1)

    def calls_of(self, name: str) -> list[ast.Call] | None:
        """Returns all calls of the modules of a class, or `None` if they are not known."""
        attributes: set[str] = set()
        constructed = 0
        total = sum(
            isinstance(node, ast.Call) and dotted(node.func) == name
            for item in self.body
            for node in self.walk(item)
        )
        for owner in self.classes.values():
            for item in self.walk(owner):
                if not isinstance(item, ast.Assign) or not own_attribute(item.targets[0]):
                    continue
                value = item.value
                options = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                for option in options:
                    listed = re.fullmatch(
                        rf"(nn\.Layers|nnx\.List)\(\[{name}\(.*\) for \w+ in .*\]\)",
                        ast.unparse(option),
                    )
                    direct = isinstance(option, ast.Call) and dotted(option.func) == name
                    if listed or direct:
                        attributes.add(own_attribute(item.targets[0]))
                        constructed += 1
        if constructed != total:
            return None
        calls: list[ast.Call] = []
        for item in self.body:
            variables: set[str] = set()
            for node in self.walk(item):
                if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                    if isinstance(node.iter, ast.Attribute) and node.iter.attr in attributes:
                        variables.add(node.target.id)
            allowed = 0
            for node in self.walk(item):
                if isinstance(node, ast.For) and isinstance(node.iter, ast.Attribute):
                    allowed += node.iter.attr in attributes
                if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute):
                    allowed += node.left.attr in attributes and is_none(node.comparators[0])
                if not isinstance(node, ast.Call):
                    continue
                function = node.func
                if isinstance(function, ast.Attribute) and function.attr in attributes:
                    calls.append(node)
                    allowed += 1
                elif isinstance(function, ast.Name) and function.id in variables:
                    calls.append(node)
                elif isinstance(function, ast.Subscript):
                    inner = function.value
                    if isinstance(inner, ast.Attribute) and inner.attr in attributes:
                        calls.append(node)
                        allowed += 1
                elif dotted(function) == "nn.run_layers" and len(node.args) == 2:
                    first = node.args[0]
                    if isinstance(first, ast.Attribute) and first.attr in attributes:
                        calls.append(node)
                        allowed += 1
            loads = sum(
                isinstance(node, ast.Attribute)
                and node.attr in attributes
                and isinstance(node.ctx, ast.Load)
                for node in self.walk(item)
            )
            nested = sum(
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr in attributes
                and isinstance(node.value.ctx, ast.Load)
                for node in self.walk(item)
            )
            if loads - nested > allowed:
                return None
        return calls

    def reduce(
        self,
        function: ast.FunctionDef,
        calls: Sequence[ast.Call],
        skip: int,
        kept: Collection[str] = (),
    ) -> None:
        """Removes parameters of one function.

        Args:
            function: The function.
            calls: All calls of the function.
            skip: The number of parameters that calls do not pass, such as `self`.
            kept: The names of parameters that stay.
        """
        arguments = function.args
        if arguments.vararg or arguments.kwarg or not calls:
            return
        if any(isinstance(arg, ast.Starred) for call in calls for arg in call.args):
            return
        if any(word.arg is None for call in calls for word in call.keywords):
            return
        for name in [arg.arg for arg in (*arguments.args[skip:], *arguments.kwonlyargs)]:
            if name in kept or name in ("rngs", "return_weights") and function.name == "__call__":
                continue
            layers = any(dotted(call.func) == "nn.run_layers" for call in calls)
            position = _position(function, name, skip, layers)
            values = [argument(call, position, name) for call in calls]
            if not _reads(function.body, name):
                if layers and position == 0:
                    continue
                self.remove(function, calls, name, skip)
                continue
            default = default_values(function).get(name)
            if all(getattr(value, "not_none", False) for value in values):
                function.not_none = getattr(function, "not_none", set()) | {name}  # type: ignore[attr-defined]
            if is_none(default) and not any(values) and _use_default(function, name):
                self.remove(function, calls, name, skip)
                continue
            constants = {ast.unparse(v if v is not None else default or ast.Name("?"))
                         for v in values}  # fmt: skip
            if len(constants) != 1 or name in names_written(function.body):
                if all(value is not None for value in values) and default is not None:
                    self.require(function, name)
                continue
            value = next(iter(constants))
            if not re.fullmatch(r"None|True|False|-?\d+(\.\d+)?|'[^']*'", value):
                if all(v is not None for v in values) and default is not None:
                    self.require(function, name)
                continue
            function.body = [replace(item, {name: value}) for item in function.body]  # type: ignore[misc]
            self.remove(function, calls, name, skip)

    def require(self, function: ast.FunctionDef, name: str) -> None:
        """Removes the default `None` of a parameter that all calls pass, if that is possible."""
        arguments = function.args
        if re.search(rf"\b{name} is (not )?None", ast.unparse(function)):
            return
        first = len(arguments.args) - len(arguments.defaults)
        names = [arg.arg for arg in arguments.args]
        if name in names and names.index(name) == first and is_none(arguments.defaults[0]):
            if name != "attention_mask":
                self.walks.clear()
                arguments.defaults.pop(0)

    def remove(
        self, function: ast.FunctionDef, calls: Sequence[ast.Call], name: str, skip: int
    ) -> None:
        """Removes a parameter and its arguments."""
        self.walks.clear()
        arguments = function.args
        for call in calls:
            layers = dotted(call.func) == "nn.run_layers"
            position = _position(function, name, skip, layers)
            if position is not None and position < len(call.args):
                call.args.pop(position)
            call.keywords = [word for word in call.keywords if word.arg != name]
        for number, arg in enumerate(arguments.args):
            if arg.arg == name:
                offset = number - (len(arguments.args) - len(arguments.defaults))
                arguments.args.pop(number)
                if offset >= 0:
                    arguments.defaults.pop(offset)
                return
        for number, arg in enumerate(arguments.kwonlyargs):
            if arg.arg == name:
                arguments.kwonlyargs.pop(number)
                arguments.kw_defaults.pop(number)
                return


def _use_default(function: ast.FunctionDef, name: str) -> bool:
    """Replaces the statement `if name is None: name = value` with the assignment.

    Args:
        function: The function.
        name: A parameter of the function that no call passes.

    Returns:
        Whether the statement was replaced. It is not replaced if an earlier statement reads the
        parameter.
    """
    for number, item in enumerate(function.body):
        if isinstance(item, ast.If) and ast.unparse(item.test) == f"{name} is None":
            first = item.body[0]
            if item.orelse or name not in names_written([first]) and _reads([first], name):
                return False
            if name in names_written(item.body):
                function.body[number : number + 1] = item.body
                return True
        if _reads([item], name) or name in names_written([item]):
            return False
    return False


def _position(function: ast.FunctionDef, name: str, skip: int, layers: bool) -> int | None:
    names = [arg.arg for arg in function.args.args[skip:]]
    return names.index(name) + layers if name in names else None

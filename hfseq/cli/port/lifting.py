"""Replaces common classes, statements and calls of model files with code that uses `hfseq.nn`.

Each replacement is a lift, which is a function with the decorator `class_lift`, `statement_lift` or
`call_lift`. A lift gets a piece of PyTorch code. It returns the translation, or `None` if the code
is not exactly of the form that the lift supports. All other code is translated operator by
operator.
"""

from __future__ import annotations

import ast
import copy
import re

from hfseq.cli.port.scope import (
    Scope,
    Substitute,
    Visitor,
    call_lift,
    class_lift,
    statement_lift,
)
from hfseq.cli.port.source import SourceClass, is_pair, is_shared_attention
from hfseq.cli.port.syntax import (
    argument,
    assign,
    bind,
    call,
    default_values,
    dotted,
    expression,
    is_none,
    keyword,
    names_read,
    own_attribute,
    parameters,
    replace,
    statement,
    statements,
)

# -- classes


def _body_text(function: ast.FunctionDef | None) -> str:
    if function is None:
        return ""
    body = [item for item in function.body if not _is_docstring(item)]
    return "\n".join(ast.unparse(item) for item in body)


def _is_docstring(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)


def _call_first(function: ast.expr, args: list[ast.expr], _: dict[str, ast.expr]) -> ast.expr:
    return ast.Call(function, args[:1], [])


def _call_with_keys(function: ast.expr, args: list[ast.expr], _: dict[str, ast.expr]) -> ast.expr:
    return ast.Call(function, [*args[:1], expression("rngs")], [])


@class_lift
def lift_rms_norm(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates an RMSNorm class to `nn.RMSNorm`.

    The class may store the scale minus one, as in Gemma. Then 1 is passed as `offset`.
    """
    if set(owner.methods) - {"__init__", "forward", "extra_repr", "_norm"} or owner.parent:
        return None
    constructor = owner.methods.get("__init__")
    built = _body_text(constructor)
    body = _body_text(owner.forward) + _body_text(owner.methods.get("_norm"))
    is_norm = re.search(r"\.pow\(2\)\.mean\(-1, keepdim=True\)", body) and "torch.rsqrt(" in body
    if not is_norm or len(owner.forward.args.args) != 2 or constructor is None:  # type: ignore[union-attr]
        return None
    if re.search(r"\.mean\(-1, keepdim=True\)[\s\S]*\.mean\(-1|view|reshape|silu|bias", body):
        return None
    names = parameters(constructor)
    if len(names) != 2 or len(re.findall(r"nn\.Parameter", built)) != 1:
        return None
    size, epsilon = names
    if re.search(rf"self\.weight = nn\.Parameter\(torch\.ones\({size}\)\)", built):
        if not re.search(
            r"self\.weight \* hidden_states\b|self\.weight\.to\(torch\.float32\) \* hidden_states"
            r"|self\.weight \* x\b|output \* self\.weight|self\._norm\(x\.float\(\)\)",
            body,
        ) or re.search(r"1(\.0)? \+ self\.weight", body):
            return None
        offset = None
    elif f"self.weight = nn.Parameter(torch.zeros({size}))" in built:
        if "1.0 + self.weight" not in body:
            return None
        offset = "1.0"
    else:
        return None
    default = dict(default_values(constructor))

    def construct(scope: Scope, node: ast.Call) -> ast.expr:
        values = bind(node, names)
        value = values.get(epsilon) or default.get(epsilon) or expression("1e-6")
        extra = {} if offset is None else {"leaf": "'weight'", "offset": offset}
        return call("nn.RMSNorm", values[size], value, **extra)

    return Substitute(construct, _call_first)


def _construct_drop_path(scope: Scope, node: ast.Call) -> ast.expr:
    values = [*node.args, *(word.value for word in node.keywords)]
    return call("nn.DropPath", values[0] if values else "0.0")


#: Replaces a class of stochastic depth with `nn.DropPath`.
DROP_PATH = Substitute(_construct_drop_path, _call_with_keys)


@class_lift
def lift_drop_path(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates a class that calls `drop_path` (stochastic depth) to `nn.DropPath`."""
    if not owner.name.endswith(("DropPath", "StochasticDepth")) or owner.forward is None:
        return None
    if "drop_path(" not in _body_text(owner.forward):
        return None

    return DROP_PATH


@class_lift
def lift_gelu(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates a GELU with a gradient of its own to the activation of hfseq."""
    functions = getattr(owner.file, "functions", {})
    text = _body_text(owner.forward)
    match = re.fullmatch(r"return (\w*gelu_function)\(\w+\)", text)
    if match is None or set(owner.methods) - {"__init__", "forward"}:
        return None
    called = ast.unparse(functions.get(match[1], ast.Pass()))
    names = re.findall(r"\b(\w*gelu\w*)\(", called)
    bodies = [_body_text(functions[name]) for name in names if name in functions]
    form = "x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))"
    if f"return {form}" not in bodies:
        return None

    def construct(scope: Scope, node: ast.Call) -> ast.expr:
        return call("nn.activation", "'gelu_new'")

    return Substitute(construct, _call_first)


@class_lift
def lift_rotary(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates a class of rotary position embeddings to `nn.Rotary`.

    If the class computes the embeddings of several layer types, the result is a dictionary with one
    `nn.Rotary` for each layer type.
    """
    if rotary_kind(owner) is None:
        return None
    default = owner.methods["compute_default_rope_parameters"]
    typed = "layer_type" in parameters(owner.forward)  # type: ignore[arg-type]
    values = {
        dotted(item.targets[0]): item.value for item in default.body if isinstance(item, ast.Assign)
    }
    if "dim" not in values:
        return None

    def construct(scope: Scope, node: ast.Call) -> ast.expr:
        config = argument(node, 0, "config") or expression("config")
        size: ast.AST = expression(ast.unparse(values["dim"]))
        for _ in range(4):
            texts = {n: v for n, v in values.items() if n in names_read([size]) - {"dim", "config"}}
            size = replace(size, texts)
        size = replace(size, {"config": config})
        if not typed:
            return call("nn.Rotary", config, size)  # type: ignore[arg-type]
        name = ast.unparse(config)
        return expression(
            f"{{layer_type: nn.Rotary({name}, {ast.unparse(size)}, layer_type) "
            f"for layer_type in sorted(set({name}.layer_types))}}"
        )

    def use(function: ast.expr, args: list[ast.expr], words: dict[str, ast.expr]) -> ast.expr:
        positions = words.get("position_ids") or args[1]
        if typed:
            kind_name = words.get("layer_type") or args[2]
            function = ast.Subscript(function, kind_name, ast.Load())
        return ast.Call(function, [positions], [])

    return Substitute(construct, use)


@statement_lift
def lift_rotary_loop(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces the loop that computes the rotary embeddings of each layer type."""
    pattern = (
        r"for (\w+) in .*layer_types\)?:\s+(\w+)\[\1\] = "
        r"self\.(\w+)\(\w+, (?:position_ids=)?(\w+), (?:layer_type=)?\1\)"
    )
    text = ast.unparse(item)
    if scope.own.forward is None:
        return None
    if match := re.fullmatch(pattern, text):
        name, rotary, positions = match[2], match[3], match[4]
        return statements(
            f"{name} = {{layer_type: rotary({positions}) "
            f"for layer_type, rotary in self.{rotary}.items()}}"
        )
    if match := re.fullmatch(r"(\w+) = (?:\{\}|dict\(\))", text):
        if re.search(rf"\b{match[1]}\[\w+\] = self\.rotary\w*\(", ast.unparse(scope.own.forward)):
            return []
    return None


def rotary_kind(owner: SourceClass) -> str | None:
    """Returns how a class of rotary embeddings arranges the angles of a pair of features.

    Returns:
        "split" if the angles are in both halves of the features, "interleaved" if they are at
        adjacent features, "complex" if the class returns complex numbers. `None` if the class is
        not a supported class of rotary embeddings.
    """
    if "compute_default_rope_parameters" not in owner.methods or owner.forward is None:
        return None
    text = _body_text(owner.forward)
    if ".float() * " not in text:
        return None
    if "recomposition_frequencies" in text:
        return _text_rotary_kind(owner)
    if "position_ids.expand" in text:
        return None
    if re.search(r"torch\.cat\([\[(]freqs, freqs[\])], dim=-1\)", text):
        return "split"
    if re.search(r"torch\.polar\(torch\.ones_like\((\w+)\), \1\)", text):
        return "complex"
    return "interleaved" if "torch.repeat_interleave(freqs, 2, dim=-1)" in text else None


def _text_rotary_kind(owner: SourceClass) -> str | None:
    """Returns the result of `rotary_kind` for embeddings with temporal and spatial positions.

    Such embeddings divide the frequencies into sections that use different positions. A port gets
    only text, and the three positions of a text token are equal, so the sections have no effect.
    """
    body = _body_text(owner.methods.get("recomposition_frequencies"))
    if "mrope_section" not in body:
        return None
    if re.search(r"return torch\.cat\([\[(](\w+), \1[\])], dim=-1\)$", body):
        return "split"
    return "interleaved" if re.search(r"repeat_interleave\(2, dim=-1\)$", body) else None


def rotation_kind(scope: Scope) -> str | None:
    """Returns which features `apply_rotary_pos_emb` rotates together.

    Returns:
        "split" for feature `i` of each half, "reversed" for the same pairs with the opposite
        direction, "interleaved" for adjacent features, or `None` for any other rotation.
    """
    functions = scope.translator.file.functions
    apply = functions.get("apply_rotary_pos_emb")
    names = set(re.findall(r"\b(rotate_\w+)\(", _body_text(apply)))
    half = functions.get(next(iter(names), ""))
    if half is None or apply is None or len(names) != 1:
        return None
    text, body = _body_text(half), _body_text(apply)
    if re.search(r"\(-x2, x1\), dim=-1\)$", text) and "x.shape[-1] // 2" in text:
        return "split" if "repeat_interleave" not in body else None
    if re.search(r"\(x2, -x1\), dim=-1\)$", text) and "x.shape[-1] // 2" in text:
        return "reversed" if "repeat_interleave" not in body else None
    if re.search(r"\[\.\.\., 0?::2\]", text) and re.search(r"stack\([\[(]-x2, x1[\])]", text):
        return "interleaved"
    return None


# -- attention


def remove_layerdrop(function: ast.FunctionDef) -> None:
    """Removes the code that skips random layers in training (LayerDrop).

    Instead, the port raises an error in training if the rate in the configuration is not 0.
    """

    class Remove(ast.NodeTransformer):
        rates: list[str] = []

        def visit_For(self, node: ast.For) -> list[ast.stmt] | ast.For:
            self.rates = []
            self.generic_visit(node)
            checks = [
                f"if self.training and {rate} > 0:\n"
                f'    raise NotImplementedError("{rate.split(".")[-1]} must be 0 in training")'
                for rate in dict.fromkeys(self.rates)
            ]
            return [*(statement(text) for text in checks), node] if checks else node

        def visit_If(self, node: ast.If) -> ast.stmt | None:
            matching = re.search(r"self(\.config)?\.\w*layer_?drop\w*", ast.unparse(node))
            if (
                matching
                and "self.training" in ast.unparse(node.test)
                and "rand" in ast.unparse(node)
            ):
                self.rates = [*self.rates, matching[0]]
                return None
            self.generic_visit(node)
            return node

        def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
            text = ast.unparse(node.value)
            matching = re.search(r"self(\.config)?\.\w*layer_?drop\w*", text)
            if matching and "self.training" in text:
                self.rates = [*self.rates, matching[0]]
                node.value = ast.Constant(False)
            name = dotted(node.targets[0])
            if re.fullmatch(r"torch\.rand\(\[\]\)", text) and "dropout_probability" in name:
                return None
            return node

    Remove().visit(function)


_CACHE = re.compile(r"^(curr_)?(cache|past_key_values?|layer_past)$")


def mark_cache_updates(function: ast.FunctionDef) -> None:
    """Replaces updates of the cache with `key, value = extend_cache(key, value)`.

    This happens before folding, which removes the code that uses the cache argument.
    """

    class Mark(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.If | list[ast.Assign]:
            self.generic_visit(node)
            names = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
            if any(_CACHE.match(name) for name in names) and "is not None" in ast.unparse(
                node.test
            ):
                marks = [
                    item
                    for item in node.body
                    if isinstance(item, ast.Assign) and "extend_cache(" in ast.unparse(item)
                ]
                if marks and isinstance(node.test, ast.Compare):
                    return marks
                if marks and re.match(
                    r"cache is not None and \(?not is_cross_attention\)? or ",
                    ast.unparse(node.test),
                ):  # the second part concerns cross-attention
                    node.test, node.body = expression("not is_cross_attention"), list(marks)
            return node

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            value = node.value
            if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
                return node
            if value.func.attr == "update" and _CACHE.match(dotted(value.func.value)):
                if isinstance(node.targets[0], ast.Tuple):
                    node.value = ast.Call(expression("extend_cache"), value.args[:2], [])
            return node

    Mark().visit(function)


_UPDATE = re.compile(
    r"(\w+), (\w+)\)? = (?:curr_)?(?:cache|past_key_values?|layer_past)\.update\(\1, \2, "
)


def extends_cache(owner: SourceClass) -> bool:
    """Returns whether a class caches keys and values, and computes the softmax itself."""
    if owner.forward is None or owner.kind != "module" or owner.file.encoder_only:
        return False
    if "attention_mask" not in parameters(owner.forward) or may_attend_across(owner):
        return False
    found = _UPDATE.findall(_body_text(owner.forward))
    # Such a mask takes its rows relative to the last key. If the cache is not full, the last key is
    # not the current token, so these rows would be wrong.
    if re.search(r"\[(:, )*(\w+) - \w+:\2, :\2\]", owner.text):
        return False
    uses_masks = re.search(r"\bcreate_causal_mask\(", owner.file.text) is not None
    return len(found) == 1 and uses_masks


@statement_lift
def lift_cache_update(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Translates the cache update of a class that computes the softmax itself.

    Such a class adds a mask to the scores, so the mask is translated too.
    """
    if not isinstance(item, ast.Assign) or not isinstance(item.value, ast.Call):
        return None
    if dotted(item.value.func) != "extend_cache" or not extends_cache(scope.own):
        return None
    key, value = (ast.unparse(arg) for arg in item.value.args)
    mask = f"F.additive_mask(mask, causal=causal, shape=(length, {key}.shape[1]))"
    if scope.translator.file.hides_with_booleans:
        mask = f"{mask} < 0"
    return statements(
        f"length = {key}.shape[2]\n"
        f"{key}, {value}, mask, causal = nn.extend_cache("
        f"self, {key}.swapaxes(1, 2), {value}.swapaxes(1, 2), attention_mask)\n"
        f"attention_mask = {mask}\n"
        f"{key}, {value} = ({key}.swapaxes(1, 2), {value}.swapaxes(1, 2))"
    )


_ACROSS = ("key_value_states", "encoder_hidden_states")


def unpassed_states(owner: SourceClass) -> list[str]:
    """Returns the cross-attention arguments of an attention class that are always `None`.

    Either the port does not support the argument, or no call in the model file passes it.
    """
    arguments = [name for name in parameters(owner.forward) if name in _ACROSS]  # type: ignore[arg-type]
    methods = [m for other in owner.file.classes.values() for m in other.methods.values()]
    passed = {
        word.arg
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Call)
        for word in node.keywords
    }
    return [name for name in arguments if name in owner.file.absent or name not in passed]


def may_attend_across(owner: SourceClass) -> bool:
    """Returns whether an attention class is also used for cross-attention."""
    arguments = [name for name in parameters(owner.forward) if name in _ACROSS]  # type: ignore[arg-type]
    return arguments != unpassed_states(owner)


def is_cached(owner: SourceClass) -> bool:
    """Returns whether an attention class caches keys and values of past tokens."""
    forward = owner.forward
    if is_pair(owner.file) and is_shared_attention(owner):
        return True
    if owner.file.encoder_only:
        return False
    if forward is None or not re.search(
        r"\b(curr_)?(cache|past_key_values?|layer_past)\.update\(", owner.text
    ):
        return False
    if may_attend_across(owner):
        return False
    constructor = owner.methods.get("__init__")
    text = ast.unparse(constructor) if constructor else ""
    matching = re.search(r"self\.is_causal = ([^\n]+)", text)
    return matching is not None and matching[1] != "False"


def heads_last_variables(body: list[ast.stmt]) -> bool:
    """Returns whether the layout `(batch, length, heads, head_dim)` can be used everywhere.

    This is the case if the code between the projections and the attention function does not depend
    on the order of the two middle axes.
    """
    text = "\n".join(ast.unparse(item) for item in body)
    projection_text = text.split("attention_interface(self")[0]
    moved = re.findall(r"(\w+(?:, \w+)*) = .*\.transpose\(1, 2\)", projection_text)
    names = {name.strip() for group in moved for name in group.split(",")}
    for name in names:
        if re.search(
            rf"\b{name}\.shape\[(1|2|-2|-3|:)|\b{name}\.(size|expand|view|reshape)\(",
            projection_text,
        ):
            return False
        if re.search(rf"\b{name}[^\n]*dim=(1|2|-2|-3)\b", projection_text):
            return False
        if re.search(rf"\b{name} [*+] (?!self\.\w+$)\w+\(", projection_text, re.MULTILINE):
            return False  # arithmetic with the result of another function
    return "transpose(2, 3)" not in projection_text and "expand(" not in projection_text


class _DropTransposes(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "transpose":
            if [ast.unparse(arg) for arg in node.args] == ["1", "2"]:
                return function.value
        return node


def lift_attention_body(scope: Scope, body: list[ast.stmt]) -> list[ast.stmt]:
    """Translates the rotations, the cache update and the softmax of an attention class."""
    rotates_itself = "apply_rotary" in _body_text(scope.own.forward) and not _has_rotary(scope)
    keeps_layout = heads_last_variables(body) and not rotates_itself
    keeps_layout = keeps_layout and not _calls_transposing_method(scope, body)
    lines: list[ast.stmt] = []
    for item in body:
        lines += _attention_statement(scope, item, keeps_layout)
    if keeps_layout:
        lines = [_DropTransposes().visit(item) for item in lines]
    return lines


def lift_rotations(scope: Scope, body: list[ast.stmt]) -> list[ast.stmt]:
    """Translates the rotations of a class that computes the softmax itself."""
    lines: list[ast.stmt] = []
    for item in body:
        if isinstance(item, ast.If):
            item.body = lift_rotations(scope, item.body) or [ast.Pass()]
            item.orelse = lift_rotations(scope, item.orelse)
        text = ast.unparse(item)
        is_rotation = re.match(r"[^\n]* = apply_rotary_pos_emb\([^\n]*$", text)
        if is_rotation or re.match(r"\(?cos, sin\)? = ", text):
            lines += _attention_statement(scope, item, keeps=False)
        else:
            lines.append(item)
    return lines


def _calls_transposing_method(scope: Scope, body: list[ast.stmt]) -> bool:
    """Returns whether the statements call a method that moves the head axis before the tokens."""
    text = "\n".join(ast.unparse(item) for item in body)
    return any(
        f"self.{name}(" in text and ".transpose(1, 2)" in ast.unparse(method)
        for name, method in scope.own.methods.items()
    )


def _swap(node: ast.expr | str, keeps_layout: bool) -> str:
    text = node if isinstance(node, str) else ast.unparse(node)
    return text if keeps_layout else f"{text}.swapaxes(1, 2)"


def _attention_statement(scope: Scope, item: ast.stmt, keeps: bool) -> list[ast.stmt]:
    text = ast.unparse(item)
    if re.match(r"attention_interface\b", text):
        return []
    if re.match(r"\(?cos, sin\)? = position_embeddings$", text) and _has_rotary(scope):
        return []
    match = re.match(r"\(?cos, sin\)? = self\.(\w+)\([^=]*$", text)
    part = scope.own.parts.get(match[1]) if match else None
    if isinstance(part, SourceClass) and rotary_kind(part) and isinstance(item, ast.Assign):
        return [assign("position_embeddings", item.value)]
    if isinstance(item, ast.If):
        if re.search(r"apply_rotary|extend_cache\(|attention_interface\(", text):
            item.body = [
                line for sub in item.body for line in _attention_statement(scope, sub, keeps)
            ]
            item.orelse = [
                line for sub in item.orelse for line in _attention_statement(scope, sub, keeps)
            ]
        return [item]
    if not (isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)):
        return [item]
    name = dotted(item.value.func)
    targets = item.targets[0].elts if isinstance(item.targets[0], ast.Tuple) else []
    if name == "apply_rotary_emb" and len(targets) == 2 and len(item.value.args) == 3:
        return _rotate_complex(scope, item, targets, keeps)
    if name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave") and _has_rotary(scope):
        return _rotate(scope, item, targets, keeps)
    if name == "extend_cache":
        scope.translator.cache_targets[scope.own.name] = [ast.unparse(t) for t in targets]
        return []
    if name == "attention_interface":
        return _attend(scope, item, keeps)
    return [item]


def _has_rotary(scope: Scope) -> bool:
    """Returns whether `nn.Rotary` replaces a class of the file."""
    return any(rotary_kind(owner) for owner in scope.translator.file.classes.values())


def _rotate(scope: Scope, item: ast.Assign, targets: list[ast.expr], keeps: bool) -> list[ast.stmt]:
    node = item.value
    assert isinstance(node, ast.Call)
    count = max(1, len(targets))
    kind_name, angles = rotation_kind(scope), [ast.unparse(v) for v in node.args[count : count + 2]]
    words = {word.arg for word in node.keywords} - {"unsqueeze_dim"}
    if dotted(node.func) == "apply_rotary_pos_emb_interleave":
        # This function also reorders the features. Queries and keys are reordered in the same way,
        # so their products do not change.
        function = _body_text(scope.translator.file.functions.get(dotted(node.func)))
        reorders = ".view(b, h, s, d // 2, 2).transpose(4, 3)" in function or all(
            part in function
            for part in (
                "q1, q2 = (q[..., 0::2], q[..., 1::2])",
                "cos[..., :cos.shape[-1] // 2]",
                "torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)",
                "torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)",
            )
        )
        kind_name = "interleaved" if reorders and kind_name == "split" and count == 2 else None
    if (
        kind_name is None
        or angles != ["cos", "sin"]
        or node.args[count + 2 :]
        or words
        or count > 2
    ):
        scope.report(item, "rotary embeddings in an unsupported form")
        return [item]
    dimension = keyword(node, "unsqueeze_dim")
    heads_last = keeps or dimension is not None and ast.unparse(dimension) == "2"
    suffix = ", interleaved=True" if kind_name == "interleaved" else ""
    angles_text = "position_embeddings"
    if kind_name == "reversed":
        angles_text = "(position_embeddings[0], -position_embeddings[1])"
    lines: list[ast.stmt] = []
    for target, value in zip(targets or item.targets, node.args[:count], strict=True):
        rotated = f"nn.rotate({_swap(value, heads_last)}, {angles_text}{suffix})"
        lines.append(assign(ast.unparse(target), _swap(rotated, heads_last)))
    return lines


def _rotate_complex(
    scope: Scope, item: ast.Assign, targets: list[ast.expr], keeps: bool
) -> list[ast.stmt]:
    """Translates a rotation that multiplies complex numbers made of adjacent features."""
    node = item.value
    assert isinstance(node, ast.Call)
    function = _body_text(scope.translator.file.functions.get("apply_rotary_emb"))
    is_complex = function.count(".shape[:-1], -1, 2)") == 2 == function.count("view_as_complex(")
    heads_last = "freqs_cis[:, :, None, :]" in function
    if not is_complex or not (heads_last or "freqs_cis.unsqueeze(1)" in function):
        scope.report(item, "rotary embeddings in an unsupported form")
        return [item]
    angles = ast.unparse(node.args[2]).split(".to(")[0]
    lines: list[ast.stmt] = []
    for target, value in zip(targets, node.args[:2], strict=True):
        rotated = f"nn.rotate({_swap(value, keeps or heads_last)}, {angles}, interleaved=True)"
        lines.append(assign(ast.unparse(target), _swap(rotated, keeps or heads_last)))
    return lines


_KNOWN_WORDS = {
    "position_bias",
    "dropout",
    "scaling",
    "softcap",
    "sliding_window",
    "attention_mask",
    "is_causal",
    "s_aux",
}


def _attend(scope: Scope, item: ast.Assign, keeps: bool) -> list[ast.stmt]:
    node = item.value
    assert isinstance(node, ast.Call)
    query, key, value = (_swap(arg, keeps) for arg in node.args[1:4])
    words: dict[str, ast.expr | str] = {}
    unknown = {word.arg for word in node.keywords if word.arg} - _KNOWN_WORDS
    present = {n for n in unknown if not is_none(keyword(node, n))} - _IGNORED_WORDS
    if present:
        scope.report(item, f"attention with the unsupported argument {', '.join(sorted(present))}")
    position_bias = keyword(node, "position_bias")
    alibi = isinstance(position_bias, ast.Call) and dotted(position_bias.func) == "nn.alibi_slopes"
    if position_bias is not None and not is_none(position_bias) and not alibi:
        words["bias"] = position_bias
    sinks = keyword(node, "s_aux")
    if sinks is not None and not is_none(sinks):
        words["sinks"] = sinks
    mask = argument(node, 4, "attention_mask")
    mask_text = "None" if mask is None else ast.unparse(mask)
    lines: list[ast.stmt] = []
    if is_cached(scope.own) and scope.translator.is_pair:
        scope.ported.attributes["causal"] = "is_causal"
        lines += cache_lines(key, value, mask_text)
        key, value, words["mask"], words["causal"] = "key", "value", "mask", "causal"
    elif is_cached(scope.own):
        bare = [ast.unparse(arg) for arg in node.args[2:4]]
        targets = f"{bare[0]}, {bare[1]}" if keeps else "key, value"
        text = f"{targets}, mask, causal = nn.extend_cache(self, {key}, {value}, {mask_text})"
        if pads_values(scope.own):
            bare_value = value
            width = "self.qk_head_dim - self.v_head_dim"
            padded = f"jnp.pad({bare_value}, [(0, 0)] * 3 + [(0, {width})])"
            lines.append(statement(f"value = {padded}"))
            text = f"key, value, mask, causal = nn.extend_cache(self, {key}, value, {mask_text})"
            targets = "key, value"
        lines.append(statement(text))
        key, value = targets.split(", ")
        words["mask"], words["causal"] = "mask", "causal"
        if alibi and position_bias is not None:  # the keys include those in the cache
            slopes = f"{ast.unparse(position_bias)}[None, :, None, None]"
            words["bias"] = f"{slopes} * jnp.arange({key}.shape[1])"
    elif mask_text != "None":
        words["mask"] = mask_text
    scale, rate = keyword(node, "scaling"), keyword(node, "dropout")
    if scale is not None:
        words["scale"] = scale
    softcap = keyword(node, "softcap")
    if softcap is not None and not is_none(softcap):
        words["softcap"] = softcap
    if rate is not None:
        if isinstance(rate, ast.IfExp):
            rate = rate.orelse if "not" in ast.unparse(rate.test) else rate.body
        if not (isinstance(rate, ast.Constant) and rate.value == 0):
            rate_text = ast.unparse(rate)
            part = scope.own.parts.get(rate_text.split(".")[1]) if "." in rate_text else None
            if part == "nn.Dropout":  # the module, or its attribute `p`
                rate_text = f"{rate_text.removesuffix('.p')}.rate"
            words["dropout_rate"] = rate_text
            words["rngs"] = "rngs"
    words["return_weights"] = "return_weights"
    lines.append(assign(item.targets[0], call("nn.attend", query, key, value, **words)))
    if is_cached(scope.own) and pads_values(scope.own) and isinstance(item.targets[0], ast.Tuple):
        output = ast.unparse(item.targets[0].elts[0])
        lines.append(statement(f"{output} = {output}[..., : self.v_head_dim]"))
    return lines


def cache_lines(key: str, value: str, mask: str) -> list[ast.stmt]:
    """Returns the statements that read and extend the caches of a shared attention class."""
    return statements(
        f"key, value, mask, causal = ({key}, {value}, {mask}, self.causal)\n"
        "if self.cross:\n"
        "    new_key, new_value = (key, value)\n"
        "    key, value = nn.encoder_cache(self, lambda: (new_key, new_value))\n"
        "if causal:\n"
        "    key, value, mask, causal = nn.extend_cache(self, key, value, mask)"
    )


def pads_values(owner: SourceClass) -> bool:
    """Returns whether values have fewer features than keys (multi-head latent attention)."""
    return "self.v_head_dim" in owner.text and "self.qk_head_dim" in owner.text


#: Arguments that eager attention ignores. Only PyTorch's other attention implementations read them.
_IGNORED_WORDS = {
    "deterministic",
    "output_attentions",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


# -- statements of models

MASK_FUNCTIONS = {
    "create_causal_mask": "full",
    "create_bidirectional_mask": "full",
    "create_sliding_window_causal_mask": "causal window",
    "create_bidirectional_sliding_window_mask": "window",
}


@statement_lift
def lift_default_positions(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces default position IDs with positions that start at 0 in each packed document."""
    if not isinstance(item, ast.If) or not scope.is_model:
        return None
    text = ast.unparse(item)
    if ast.unparse(item.test) != "position_ids is None" or "torch.arange(" not in text:
        return None
    if item.orelse and not re.fullmatch(
        r"if position_ids\.ndim == 2:\s+"
        r"position_ids = position_ids\[None, \.\.\.\]\.expand\([^\n]*\)",
        "\n".join(ast.unparse(line) for line in item.orelse),
    ):
        return None
    if re.search(r"cumsum|attention_mask|\+ (?!past)\d", text):
        return None
    ids = parameters(scope.own.forward)[0]  # type: ignore[arg-type]
    return statements(
        "if position_ids is None:\n"
        f"    documents = jnp.ones_like({ids}) if segment_ids is None else segment_ids\n"
        "    position_ids = nn.positions_in_segments(documents)"
    )


@statement_lift
def lift_text_positions(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces the choice between text and image positions with the text positions."""
    if not isinstance(item, ast.If) or "text_position_ids" not in ast.unparse(item):
        return None
    if not re.match(
        r"position_ids\.ndim == 3 and position_ids\.shape\[0\] == 4", ast.unparse(item.test)
    ):
        return None
    return statements("text_position_ids = position_ids")


@statement_lift
def lift_default_token_types(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces default token type IDs with zeros."""
    if not isinstance(item, ast.If) or ast.unparse(item.test) != "token_type_ids is None":
        return None
    function = scope.own.methods[scope.method]
    if "buffered_token_type_ids" not in ast.unparse(item) or item.orelse:
        return None
    if "input_ids" not in parameters(function):
        return None
    return statements("if token_type_ids is None:\n    token_type_ids = jnp.zeros_like(input_ids)")


@statement_lift
def lift_mask_arguments(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Records and removes a dictionary of arguments that is passed to several mask functions."""
    if isinstance(item, ast.Assign) and isinstance(item.value, ast.Dict):
        if re.fullmatch(r"\w*mask_kwargs", dotted(item.targets[0])):
            masks = [
                value
                for name, value in zip(item.value.keys, item.value.values, strict=True)
                if isinstance(name, ast.Constant) and name.value == "attention_mask"
            ]
            scope.translator.mask_arguments[dotted(item.targets[0])] = masks[0] if masks else None
            odd = [ast.unparse(n) for n in item.value.keys if n and "function" in ast.unparse(n)]
            if odd:
                scope.report(item, f"a mask with the unsupported argument {', '.join(odd)}")
            return []
    return None


@statement_lift
def lift_mask_choice(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Translates the choice of a mask function by the configuration, and the call of the function.

    The choice has the form `mask_function = a if config.sliding_window is None else b`.
    """
    if not isinstance(item, ast.Assign):
        return None
    target, value = dotted(item.targets[0]), item.value
    if target == "mask_function" and isinstance(value, ast.IfExp):
        names = {dotted(value.body), dotted(value.orelse)}
        if names == {"create_causal_mask", "create_sliding_window_causal_mask"} and re.fullmatch(
            r"self\.(config\.)?sliding_window is None", ast.unparse(value.test)
        ):
            scope.masks[target] = ""
            return []
    if isinstance(value, ast.Name) and value.id in MASK_FUNCTIONS:
        scope.masks[target] = value.id
        return []
    if isinstance(value, ast.Call) and scope.masks.get(dotted(value.func)) == "":
        mask = argument(value, 2, "attention_mask")
        scope.ported.attributes["window"] = window_expression(scope, causal=True)
        text = ast.unparse(mask or expression("attention_mask"))
        return statements(f"{target} = nn.visible({text}, segment_ids, window=self.window)")
    return None


def sliding_window(scope: Scope) -> str:
    """Returns the expression that reads the attention window from the configuration."""
    return "config.sliding_window"


@call_lift
def lift_hidden_mask(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates `create_causal_mask(...).to(torch.bool)`, which is true where a key is masked."""
    function = node.func
    if not (isinstance(function, ast.Attribute) and function.attr == "to"):
        return None
    if [ast.unparse(arg) for arg in node.args] != ["torch.bool"]:
        return None
    if not scope.translator.file.hides_with_booleans or not isinstance(function.value, ast.Call):
        return None
    if dotted(function.value.func) != "create_causal_mask":
        return None
    return visitor.visit(function.value)


@call_lift
def lift_mask(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Replaces calls of Transformers' mask functions with calls of `nn.visible`."""
    name = scope.masks.get(dotted(node.func)) or dotted(node.func)
    kind_name = MASK_FUNCTIONS.get(scope.translator.file.imported.get(name, ""))
    if kind_name is None:
        if re.fullmatch(r"create_\w*mask", name) and name in scope.translator.file.imported:
            scope.report(node, f"{name} has no translation")
            return node
        return None
    names = ["config", "inputs_embeds", "attention_mask", "encoder_hidden_states"]
    values = bind(node, names)
    packed = values.get("and_mask_function")
    if (
        isinstance(packed, ast.Call)
        and dotted(packed.func) == "packed_sequence_mask_function"
        and name == "create_bidirectional_mask"
        and is_none(values.get("attention_mask", ast.Constant(None)))
    ):  # tokens with the same sequence number attend to each other
        return call("nn.visible", "None", visitor.visit(packed.args[0]))
    for odd in (
        "or_mask_function",
        "and_mask_function",
        "block_sequence_ids",
        "encoder_hidden_states",
    ):
        if odd in values and not is_none(values[odd]):
            scope.report(node, f"a mask with the unsupported argument {odd}")
    mask = values.get("attention_mask")
    for word in node.keywords:
        if word.arg is None and dotted(word.value) in scope.translator.mask_arguments:
            mask = scope.translator.mask_arguments[dotted(word.value)]
    if scope.is_vision and is_none(mask):  # all patches of all images are visible
        return ast.Constant(None)
    text = "attention_mask" if mask is None else ast.unparse(visitor.visit(mask))
    classes = scope.translator.file.classes.values()
    if not any(o.kind == "attention" for o in classes):
        updating = [o for o in classes if o.forward and _UPDATE.search(_body_text(o.forward))]
        if (
            updating
            and all(map(extends_cache, updating))
            and kind_name == "full"
            and "causal" in name
        ):
            return call("nn.visible", text, "segment_ids")
        if name == "create_bidirectional_mask":  # the classes of the file add it to the scores
            return call("F.additive_mask", call("nn.attention_mask", text, "segment_ids"))
        scope.report(node, "a mask for attention code that does not call attention_interface")
        return node
    if "window" not in kind_name:
        # Attention with a cache is causal without the mask.
        is_causal = "causal" in name and not _has_cached_attention(scope)
        return call("nn.visible", text, "segment_ids", **({"causal": "True"} if is_causal else {}))
    scope.ported.attributes["window"] = window_expression(scope, "causal" in kind_name)
    return call("nn.visible", text, "segment_ids", window="self.window")


def _has_cached_attention(scope: Scope) -> bool:
    classes = scope.translator.file.classes.values()
    return any(owner.kind == "attention" and is_cached(owner) for owner in classes)


def window_expression(scope: Scope, causal: bool) -> str:
    """Returns the expression for the argument `window` of `nn.visible`."""
    field = sliding_window(scope)
    if not causal:
        return f"({field}, {field})"
    return f"({field} - 1, 0) if {field} else None"


@statement_lift
def lift_layer_loop(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces `for layer in self.layers: x = layer(x, ...)` with `nn.run_layers`."""
    loop = layer_loop(scope.own, item)
    if loop is None or loop.layer not in scope.translator.scanned:
        return None
    layer, node, state = loop.layer, loop.node, loop.state
    assert layer.forward is not None
    ported = scope.translator.port(layer)
    names = parameters(layer.forward)
    values = bind(node, names)
    for name, value in values.items():
        if name in scope.translator.per_type.get(layer.name, {}) and isinstance(
            value, ast.Subscript
        ):
            values[name] = value.value
    words = {}
    for name in ported.arguments[1:]:
        if name in values and not is_none(values[name]):
            words[name] = values[name]
        elif name == "segment_ids":
            words[name] = expression("segment_ids")
    index = loop.index
    used = {n.id for v in words.values() for n in ast.walk(v) if isinstance(n, ast.Name)}
    varies = index in used or loop.variable in used
    if varies and layer not in scope.translator.unrolled:
        scope.report(item, "a loop over layers whose arguments depend on the index of the layer")
    first = values.get(ported.arguments[0]) if ported.arguments else None
    if first is None or ast.unparse(first) != state:
        scope.report(item, "a loop over layers in an unsupported form")
    scope.runs_layers = True
    if layer in scope.translator.unrolled:
        return _unrolled_loop(scope, loop, words)
    run = call(
        "nn.run_layers",
        f"self.{loop.name}",
        state,
        **words,
        rngs="rngs",
        collect="output_hidden_states",
        return_weights="output_attentions",
    )
    lines = [assign(f"{state}, attentions, inputs", run)]
    if scope.translator.is_pair and "encoder_attn" in layer.parts:
        lines += statements("attentions, cross_attentions = zip(*attentions, strict=True)")  # type: ignore[arg-type]
    if not scope.ties_last:
        states = f"(*inputs, {state}) if output_hidden_states else None"
        lines.append(assign("all_hidden_states", states))
    return list(lines)


def _unrolled_loop(scope: Scope, loop: LayerLoop, words: dict[str, ast.expr]) -> list[ast.stmt]:
    """Returns a Python loop over layers, because `nn.run_layers` passes equal arguments to all."""
    state, index = loop.state, loop.index or "number"
    words = {name: replace(value, {loop.variable: "layer"}) for name, value in words.items()}  # type: ignore[misc]
    node = call(
        "layer",
        state,
        **words,
        rngs=f"None if keys is None else keys.fold_in({index})",
        return_weights="output_attentions",
    )
    lines = statements(
        "keys = None if rngs is None else rngs.child()\n"
        "inputs, attentions = ((), ())\n"
        f"for {index}, layer in enumerate(self.{loop.name}):\n"
        f"    inputs = (*inputs, {state})\n"
        f"    {state}, weights = {ast.unparse(node)}\n"
        "    attentions = (*attentions, weights)"
    )
    if not scope.ties_last:
        states = f"(*inputs, {state}) if output_hidden_states else None"
        lines.append(assign("all_hidden_states", states))
    return lines


class LayerLoop:
    """A loop over a list of layers that `layer_loop` recognizes.

    Args:
        name: The attribute that holds the list.
        layer: The class of the layers.
        node: The call of a layer.
        state: The variable that is passed through the layers.
        index: The variable with the index of the layer, or an empty string.
        variable: The variable with the layer.
    """

    def __init__(
        self,
        name: str,
        layer: SourceClass,
        node: ast.Call,
        state: str,
        index: str,
        variable: str,
    ):
        self.name, self.layer, self.node = name, layer, node
        self.state, self.index, self.variable = state, index, variable


def layer_loop(owner: SourceClass, item: ast.stmt) -> LayerLoop | None:
    """Recognizes a loop that passes one variable through the layers of a list.

    Args:
        owner: The class that contains the statement.
        item: A statement of `forward`.

    Returns:
        The loop, or `None` if the statement is not such a loop.
    """
    if not isinstance(item, ast.For) or item.orelse:
        return None
    target, index, source = item.target, "", item.iter
    if isinstance(source, ast.Call) and dotted(source.func) == "enumerate":
        if not isinstance(target, ast.Tuple):
            return None
        index, target, source = dotted(target.elts[0]), target.elts[1], source.args[0]
    if isinstance(source, ast.Subscript) and isinstance(source.slice, ast.Slice):
        if not re.fullmatch(r":self\.config\.\w+|:self\.\w*num\w*", ast.unparse(source.slice)):
            return None
        source = source.value
    name, variable = own_attribute(source), dotted(target)
    layer = owner.lists.get(name)
    if not isinstance(layer, SourceClass) or layer.forward is None or layer.kind != "layer":
        return None
    body = [line for line in item.body if not isinstance(line, ast.Pass)]
    while len(body) > 1 and isinstance(body[0], ast.Assign):
        value = body[0].value
        if isinstance(value, ast.Call) and dotted(value.func) == variable:
            break
        if not isinstance(body[0].targets[0], ast.Name) or not isinstance(value, ast.Subscript):
            return None
        texts = {body[0].targets[0].id: value}
        body = [replace(copy.deepcopy(line), texts) for line in body[1:]]  # type: ignore[misc]
    if not body or not isinstance(body[0], ast.Assign) or not isinstance(body[0].value, ast.Call):
        return None
    node, result = body[0].value, body[0].targets[0]
    if dotted(node.func) != variable:
        return None
    if isinstance(result, ast.Tuple):
        if any(dotted(element) != "_" for element in result.elts[1:]) or len(result.elts) > 2:
            return None
        result = result.elts[0]
    state = dotted(result)
    if len(body) == 2:
        text = ast.unparse(body[1])
        is_tuple = rf"(?: if isinstance\({state}, tuple\) else {state})?"
        match = re.fullmatch(rf"(\w+) = {state}\[0\]{is_tuple}", text)
        if match is None:
            return None
        state = match[1]
    elif len(body) > 2:
        return None
    return LayerLoop(name, layer, node, state, index, variable)


# -- calls


@call_lift
def lift_own_functions(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Keeps calls of hfseq and JAX that other lifts have inserted, and translates the arguments."""
    name = dotted(node.func)
    if not re.fullmatch(
        r"(F\.additive_mask|nn\.[a-z]\w*|jnp\.\w+|jax(\.\w+)+|out\.\w+|extend_cache)", name
    ):
        return None
    args = [visitor.visit(arg) for arg in node.args]
    words = [ast.keyword(word.arg, visitor.visit(word.value)) for word in node.keywords]
    return ast.Call(node.func, args, words)


@call_lift
def lift_dropout(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates calls of dropout layers and functions."""
    name = dotted(node.func)
    if re.fullmatch(r"(torch\.)?(nn\.functional|F)\.dropout|torch\.dropout", name):
        x, rate = node.args[0], argument(node, 1, "p") or expression("0.5")
        if isinstance(rate, ast.Constant) and rate.value == 0:
            return visitor.visit(x)
        return call("nn.dropout", visitor.visit(x), visitor.visit(rate), "rngs")
    part = scope.own.parts.get(own_attribute(node.func))
    if isinstance(part, str) and re.fullmatch(r"nn\.Dropout\d?d?", part):
        if part == "nn.Dropout":
            return call(node.func, visitor.visit(node.args[0]), "rngs")
    return None


@call_lift
def lift_part_call(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates a call of a submodule, without arguments that the translated submodule ignores."""
    name = own_attribute(node.func)
    part: SourceClass | str | None = scope.own.parts.get(name) if name else None
    if part == "nn.Linear" and name in ("lm_head", "embed_out") and scope.is_model:
        return call("nn.vocabulary_logits", node.func, visitor.visit(node.args[0]))
    if part is None:
        part = nested_part(scope.own, dotted(node.func))
    if part is None:
        part = scope.translator.loop_variables.get(dotted(node.func))
        if part is None and isinstance(node.func, ast.Subscript):
            part = scope.own.lists.get(own_attribute(node.func.value))
            if part is not None:
                visitor.visit(node.func.slice)
    if not isinstance(part, SourceClass) or part.base_layer and part.forward is None:
        return None
    substitute = scope.translator.substitute(part)
    if substitute is not None:
        args = [visitor.visit(arg) for arg in node.args]
        words = {word.arg: visitor.visit(word.value) for word in node.keywords if word.arg}
        if not args and words:
            args = list(words.values())
        return substitute.call(node.func, args, words)
    return part_call(scope, visitor, node, part)


def nested_part(owner: SourceClass, path: str) -> SourceClass | None:
    """Returns the class of a submodule of a submodule, such as `self.model.decoder`."""
    names = path.split(".")
    if names[0] != "self" or len(names) < 3:
        return None
    part: SourceClass | str | None = owner
    for name in names[1:]:
        part = part.parts.get(name) if isinstance(part, SourceClass) else None
    return part if isinstance(part, SourceClass) else None


def part_call(
    scope: Scope, visitor: Visitor, node: ast.Call, part: SourceClass, method: str = "forward"
) -> ast.expr:
    """Builds the call of a translated submodule."""
    from hfseq.cli.port.lift_heads import tied_embeddings

    ported = scope.translator.port(part)
    if scope.translator.passes_all(scope, part):
        return expression(f"{dotted(node.func)}(*args, **kwargs)")
    signature = parameters(part.methods[method]) if method in part.methods else []
    if part.forward is None and part.parent is not None and part.parent.forward is not None:
        signature = parameters(part.parent.forward)
    values = bind(node, signature)
    has_rest = any(word.arg is None for word in node.keywords)
    args: list[ast.expr] = []
    words: list[ast.keyword] = []
    for name in ported.arguments:
        position = len(args)
        if name == "tied_embeddings":
            value = tied_embeddings(scope.own) if scope.is_model else name
            words.append(ast.keyword(name, expression(value)))
        elif name in ("rngs", "segment_ids", "output_attentions", "output_hidden_states"):
            words.append(ast.keyword(name, expression(name)))
        elif name == "return_weights":
            if not scope.is_model and not scope.runs_layers:
                words.append(ast.keyword(name, expression(name)))
        elif name in values:
            value = visitor.visit(values[name])
            if is_none(value) and position:
                continue
            if not words and (position == 0 or position < len(node.args)):
                args.append(value)
            else:
                words.append(ast.keyword(name, value))
        elif scope.translator.is_pair and name in _ACROSS:
            continue
        elif has_rest and scope.own.kind in ("layer", "module", "attention"):
            scope.translator.extra_arguments.setdefault(scope.own.name, []).append(name)
            words.append(ast.keyword(name, expression(name)))
    return ast.Call(node.func, args, words)


OUTPUT_CLASSES = {
    "MoeModelOutputWithPast": "BaseModelOutputWithPast",
    "MoeModelOutput": "BaseModelOutput",
    "MoeCausalLMOutputWithPast": "CausalLMOutputWithCrossAttentions",
    "CausalLMOutputWithPast": "CausalLMOutputWithCrossAttentions",
    "CausalLMOutput": "CausalLMOutputWithCrossAttentions",
    "SequenceClassifierOutputWithPast": "SequenceClassifierOutput",
    "ImageClassifierOutput": "SequenceClassifierOutput",
    "ImageClassifierOutputWithNoAttention": "SequenceClassifierOutput",
    "BaseModelOutputWithNoAttention": "BaseModelOutput",
    "BaseModelOutputWithPoolingAndNoAttention": "BaseModelOutputWithPooling",
    "BaseModelOutputWithPoolingAndCrossAttentions": "BaseModelOutputWithPooling",
    "BaseModelOutputWithPastAndCrossAttentions": "BaseModelOutputWithPast",
}
_DROPPED_FIELDS = {
    "cache",
    "past_key_values",
    "loss",
    "router_logits",
    "aux_loss",
    "cross_attentions",
}


@call_lift
def lift_output(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates output classes that `hfseq.nn.outputs` contains."""
    from hfseq.nn import outputs

    name = dotted(node.func)
    if not re.search(r"Output(With\w+)?$", name):
        return None
    name = scope.translator.file.imported.get(name, name)
    target = OUTPUT_CLASSES.get(name, name)
    if scope.translator.is_pair and hasattr(outputs, f"Flax{name}"):
        target = name
    if not hasattr(outputs, f"Flax{target}"):
        scope.report(node, f"the output class {name} has no counterpart in hfseq.nn.outputs")
        return node
    if any(word.arg is None for word in node.keywords):
        scope.report(node, "a call of an output class with ** arguments")
        return node
    fields = bind(node, ["last_hidden_state", "pooler_output"] if "Base" in name else ["logits"])
    words: dict[str, ast.expr | str] = {}
    for field, value in fields.items():
        if field not in _DROPPED_FIELDS and not is_none(value):
            words[field] = visitor.visit(value)
    add_collected(scope, words)
    if scope.translator.is_pair and "CrossAttentions" in target:
        words["cross_attentions"] = "cross_attentions if output_attentions else None"
    if "NoAttention" in name and not scope.runs_layers:
        words.pop("attentions", None)
    return call(f"out.Flax{target}", **words)


def add_collected(scope: Scope, words: dict[str, ast.expr | str]) -> None:
    """Adds hidden states and attention weights to the fields of an output."""
    if scope.runs_layers:
        last = words.get("last_hidden_state")
        states = "all_hidden_states"
        if scope.ties_last and last is not None:
            text = last if isinstance(last, str) else ast.unparse(last)
            states = f"(*inputs, {text}) if output_hidden_states else None"
        words.setdefault("hidden_states", states)
        words.setdefault("attentions", "attentions if output_attentions else None")
    elif scope.outputs:
        words.setdefault("hidden_states", f"{scope.outputs}.hidden_states")
        words.setdefault("attentions", f"{scope.outputs}.attentions")


@call_lift
def lift_small_helpers(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Replaces calls of helper functions of Transformers that a port does not need."""
    name = dotted(node.func)
    if name == "slice_logits_to_keep":
        return visitor.visit(node.args[0])
    if name == "apply_chunking_to_forward":
        return visitor.visit(ast.Call(node.args[0], node.args[3:], []))
    return None


@statement_lift
def lift_training_noise(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Removes noise that PyTorch adds only in training. The port raises an error in training."""
    if (
        not isinstance(item, ast.If)
        or item.orelse
        or "rngs is not None" not in ast.unparse(item.test)
    ):
        return None
    draws_noise = re.search(r"uniform_\(|normal_\(|torch\.randn?\w*\(", ast.unparse(item))
    fields = re.findall(r"self\.(\w*(?:noise|jitter)\w*)", ast.unparse(item.test))
    if not draws_noise or not fields:
        return None
    item.body = statements(f'raise NotImplementedError("{fields[0]} must be 0 in training")')
    return [item]


@statement_lift
def lift_required_gradients(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Removes `x.requires_grad = True`, because JAX needs no marks for gradient checkpointing."""
    if not isinstance(item, ast.If) or item.orelse:
        return None
    is_mark = (re.fullmatch(r"\w+\.requires_grad = True", ast.unparse(line)) for line in item.body)
    return [] if all(is_mark) else None

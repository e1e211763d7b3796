"""Rewrites older forms of Transformers' model files to the form that current files have.

Older files compute the softmax of attention themselves, return tuples from their layers, and
collect hidden states and attention weights in a loop. Newer files call an attention function, and
their layers return arrays. Only the newer form is lifted to `nn.attend` and `nn.run_layers`
(`hfseq.cli.port.lifting`). Each function of this module recognizes one complete pattern, and leaves
all other code as it is.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Mapping, Sequence

from hfseq.cli.port.folding import ENCODER_INPUTS, ENCODER_TESTS, fold
from hfseq.cli.port.syntax import (
    dotted,
    expression,
    located,
    method,
    names_read,
    names_written,
    statement,
    statements,
)

#: The variable with the attention weights.
_WEIGHTS = "attn_weights"


def modernize(tree: ast.Module) -> None:
    """Rewrites the classes of a model file in place."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    text = ast.unparse(tree)
    encoder_only = "config.add_cross_attention" in text and "config.is_decoder" in text
    changed: set[str] = set()
    rotates = False
    for node in classes.values():
        forward = method(node, "forward")
        if forward is not None and alibi_attention(node, forward):
            changed.add(node.name)
            _drop_alibi(classes.values())
        if forward is None or ".update(" in ast.unparse(forward) and not encoder_only:
            continue
        if attention_function(forward):
            rotates |= _shared_rotation(node, forward)
            changed.add(node.name)
    for node in classes.values():
        forward = method(node, "forward")
        if forward is not None and changed and node.name not in changed:
            if encoder_only:
                forward.body = fold(forward.body, dict.fromkeys(ENCODER_INPUTS), ENCODER_TESTS)
            if unpack_results(node, forward, changed):
                changed.add(node.name)
    for node in classes.values():
        forward = method(node, "forward")
        layer = "" if forward is None else collecting_loop(node, forward, classes, changed)
        if layer and not _is_layer(classes[layer]):
            classes[layer].bases = [expression("GradientCheckpointingLayer")]
        if layer and rotates and forward is not None:
            forward.body = [line for item in forward.body for line in _angles(item)]
    _rotate_adjacent(tree)
    _relative_positions(classes.values())
    ast.fix_missing_locations(tree)


def join_projections(tree: ast.Module, source: str, names: tuple[str, str]) -> None:
    """Replaces two projections of the same input with the one whose weight the files contain.

    Args:
        tree: The model file.
        source: The name of the projection in checkpoint files.
        names: The names of the two projections in PyTorch.
    """
    for node in (item for item in tree.body if isinstance(item, ast.ClassDef)):
        constructor, forward = method(node, "__init__"), method(node, "forward")
        if constructor is None or forward is None:
            continue
        made = [
            item
            for item in constructor.body
            if isinstance(item, ast.Assign)
            and dotted(item.targets[0]) in [f"self.{name}" for name in names]
            and isinstance(item.value, ast.Call)
            and dotted(item.value.func) == "nn.Linear"
        ]
        if len(made) != 2 or ast.unparse(made[0].value) != ast.unparse(made[1].value):
            continue
        for number, item in enumerate(forward.body):
            uses = [re.search(rf"self\.{name}\((\w+)\)", ast.unparse(item)) for name in names]
            if not uses[0] or not uses[1] or uses[0][1] != uses[1][1]:
                continue
            call = made[0].value
            assert isinstance(call, ast.Call)
            call.args[1] = ast.BinOp(ast.Constant(2), ast.Mult(), call.args[1])
            target = statement(f"self.{source} = None")
            assert isinstance(target, ast.Assign)
            made[0].targets = target.targets
            constructor.body.remove(made[1])
            first, second = (name.removesuffix("_proj") for name in names)
            split = f"{first}, {second} = torch.chunk(self.{source}({uses[0][1]}), 2, dim=-1)"
            text = ast.unparse(item)
            for name, short in zip(names, (first, second), strict=True):
                text = text.replace(f"self.{name}({uses[0][1]})", short)
            forward.body[number : number + 1] = [
                located(statement(line), item) for line in (split, text)
            ]
            ast.fix_missing_locations(tree)
            break


def _is_layer(node: ast.ClassDef) -> bool:
    return "GradientCheckpointingLayer" in [ast.unparse(base) for base in node.bases]


def attention_function(forward: ast.FunctionDef) -> bool:
    """Replaces matrix products and a softmax with a call of `attention_interface`.

    Returns:
        Whether the method contains the pattern.
    """
    body = forward.body
    texts = [ast.unparse(item) for item in body]
    start = re.compile(r"(\w+) = torch\.matmul\((\w+), (\w+)\.transpose\(-1, -2\)\)")
    for number, text in enumerate(texts):
        match = start.fullmatch(text)
        if match is None:
            continue
        scores, query, key = match.groups()
        words: dict[str, str] = {}
        position = number + 1

        def accept(pattern: str, scores: str = scores) -> re.Match[str] | None:
            nonlocal position
            text = texts[position] if position < len(texts) else ""
            found = re.fullmatch(pattern.replace("S", scores), text)
            position += found is not None
            return found

        scale = accept(r"S = S / math\.sqrt\((self\.\w+)\)")
        if scale is None:
            return False
        words["scaling"] = f"{scale[1]} ** -0.5"
        if accept(r"if position_bias is not None:\n    S \+= position_bias"):
            words["position_bias"] = "position_bias"
        if not accept(r"if attention_mask is not None:\n    S = S \+ attention_mask"):
            return False
        softmax = accept(r"(\w+) = nn\.functional\.softmax\(S, dim=-1\)") or accept(
            r"(\w+) = nn\.Softmax\(dim=-1\)\(S\)"
        )
        if softmax is None:
            return False
        weights = softmax[1]
        rate = accept(rf"{weights} = self\.(\w+)\({weights}\)")
        if rate is None:
            return False
        words["dropout"] = f"0.0 if not self.training else self.{rate[1]}.p"
        product = accept(rf"(\w+) = torch\.matmul\({weights}, (\w+)\)")
        if product is None:
            return False
        output, value = product.groups()
        if not accept(rf"{output} = {output}\.permute\(0, 2, 1, 3\)\.contiguous\(\)"):
            return False
        shape = accept(rf"(\w+) = {output}\.size\(\)\[:-2\] \+ \(self\.(\w+),\)")
        if shape is None or not accept(rf"{output} = {output}\.view\(\*?{shape[1]}\)"):
            return False
        if re.search(rf"\b{weights}\b", "\n".join(texts[position:])) is None:
            weights = "_"
        arguments = ", ".join(f"{name}={value}" for name, value in words.items())
        lines = statements(
            f"{output}, {weights} = attention_interface("
            f"self, {query}, {key}, {value}, attention_mask, {arguments})\n"
            f"{output} = {output}.reshape(*hidden_states.shape[:-1], -1)"
        )
        if "hidden_states" not in [arg.arg for arg in forward.args.args]:
            return False
        body[number:position] = [located(line, body[number]) for line in lines]
        rename = {weights: _WEIGHTS} if weights != "_" else {}
        if _WEIGHTS not in names_read([forward]):
            _rename(forward, rename)
        return True
    return False


_ALIBI_ATTENTION = """\
query_layer = query_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
key_layer = key_layer.reshape(batch_size * self.num_heads, -1, self.head_dim).transpose(-1, -2)
value_layer = value_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
attention_scores = alibi.baddbmm(batch1=query_layer, batch2=key_layer, beta=self.beta, \
alpha=self.inv_norm_factor)
attn_weights = attention_scores.view(batch_size, self.num_heads, q_length, -1)
if attention_mask is not None:
    attn_weights = attn_weights + attention_mask
attention_probs = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_layer.dtype)
attention_probs = self.attention_dropout(attention_probs)
attention_probs_reshaped = attention_probs.view(batch_size * self.num_heads, q_length, -1)
context_layer = torch.bmm(attention_probs_reshaped, value_layer)
context_layer = self._merge_heads(context_layer)"""


def alibi_attention(node: ast.ClassDef, forward: ast.FunctionDef) -> bool:
    """Replaces the attention of BLOOM, whose scores are added to the bias of the positions.

    The bias is computed from the positions of all keys, which is equal to the bias from the
    attention mask up to a constant for each row. The softmax does not depend on the constant.

    Returns:
        Whether the method contains the pattern.
    """
    constructor = method(node, "__init__")
    texts = [ast.unparse(item) for item in forward.body]
    count = len(ast.parse(_ALIBI_ATTENTION).body)
    for start in range(len(texts) - count):
        if "\n".join(texts[start : start + count]) == _ALIBI_ATTENTION and constructor:
            break
    else:
        return False
    lines = statements(
        "context_layer, attn_weights = attention_interface(self, query_layer, key_layer, "
        "value_layer, attention_mask, scaling=self.inv_norm_factor, "
        "dropout=0.0 if not self.training else self.attention_dropout.p, "
        "position_bias=nn.alibi_slopes(self.num_heads))\n"
        "context_layer = context_layer.reshape(hidden_states.shape)"
    )
    first = forward.body[start]
    forward.body[start : start + count] = [located(line, first) for line in lines]
    forward.args.args = [arg for arg in forward.args.args if arg.arg != "alibi"]
    _rename(forward, {"attention_probs": _WEIGHTS})
    constructor.body.append(ast.copy_location(statement("self.is_causal = True"), node))
    reshape = method(node, "_reshape")
    if reshape is not None:
        _use_heads_last(forward, reshape, node)
    return True


def _use_heads_last(forward: ast.FunctionDef, reshape: ast.FunctionDef, node: ast.ClassDef) -> None:
    """Inlines the method that splits the fused projection into heads."""
    call = r"\(?query_layer, key_layer, value_layer\)? = self\._reshape\(fused_qkv\)"
    for number, item in enumerate(forward.body):
        if re.fullmatch(call, ast.unparse(item)):
            lines = [
                line
                for line in copy.deepcopy(reshape.body)
                if not isinstance(line, ast.Return | ast.Expr)
            ]
            forward.body[number : number + 1] = lines
            node.body.remove(reshape)
            return


def _drop_alibi(classes: Collection[ast.ClassDef]) -> None:
    """Removes the position bias that the model passes to its layers."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            branches = [*node.body, *node.orelse]
            written = [item for item in branches if "alibi" in names_written([item])]
            if written and ast.unparse(node.test) == "attention_mask is None":
                return []
            return node

        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            node.keywords = [word for word in node.keywords if word.arg != "alibi"]
            return node

        def visit_arguments(self, node: ast.arguments) -> ast.AST:
            node.args = [arg for arg in node.args if arg.arg != "alibi"]
            return node

    for node in classes:
        Drop().visit(node)


def _rename(node: ast.AST, names: Mapping[str, str]) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in names:
            inner.id = names[inner.id]


def unpack_results(node: ast.ClassDef, forward: ast.FunctionDef, attention: set[str]) -> bool:
    """Gives names to the elements of the tuple that a submodule with attention returns.

    `outputs = self.attention(x)` becomes `attention_output, attn_weights = self.attention(x)`, if
    the method reads only `outputs[0]` and `outputs[1:]`.

    Args:
        node: The class.
        forward: The method to change.
        attention: The names of the classes that return attention weights.

    Returns:
        Whether the method was changed.
    """
    parts = {
        dotted(item.targets[0]): dotted(item.value.func)
        for item in ast.walk(node)
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
    }
    for number, item in enumerate(forward.body):
        if not isinstance(item, ast.Assign) or not isinstance(item.value, ast.Call):
            continue
        variable = dotted(item.targets[0])
        if not variable or parts.get(dotted(item.value.func)) not in attention:
            continue
        rest = copy.deepcopy(forward.body[number + 1 :])
        nodes = [inner for line in rest for inner in ast.walk(line)]
        reads = [inner for inner in nodes if dotted(inner) == variable]
        elements = [
            inner
            for inner in nodes
            if isinstance(inner, ast.Subscript)
            and dotted(inner.value) == variable
            and ast.unparse(inner.slice) in ("0", "1:")
        ]
        if not elements or len(reads) != len(elements):
            continue
        visitor = _Elements(variable, "attention_output")
        lines = _join_tuples([visitor.visit(line) for line in rest])
        if lines is None:
            continue
        target = statement(f"attention_output, {_WEIGHTS} = x")
        assert isinstance(target, ast.Assign)
        item.targets = target.targets
        forward.body[number + 1 :] = lines
        return True
    return False


class _Elements(ast.NodeTransformer):
    """Replaces `outputs[0]` with a variable, and `outputs[1:]` with `(attn_weights,)`."""

    def __init__(self, variable: str, output: str):
        self.variable, self.output = variable, output

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if dotted(node.value) != self.variable:
            return node
        text = self.output if ast.unparse(node.slice) == "0" else f"({_WEIGHTS},)"
        return ast.copy_location(expression(text), node)


class _Join(ast.NodeTransformer):
    """Evaluates sums of tuples."""

    def __init__(self, tuples: dict[str, ast.expr]):
        self.tuples = tuples

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = isinstance(node.ctx, ast.Load) and node.id in self.tuples
        return copy.deepcopy(self.tuples[node.id]) if known else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(node.op, ast.Add) and isinstance(left, ast.Tuple):
            if isinstance(right, ast.Tuple):
                return ast.Tuple([*left.elts, *right.elts], ast.Load())
        return node


def _join_tuples(body: list[ast.stmt]) -> list[ast.stmt] | None:
    """Replaces variables that hold a tuple with the tuple, and drops assignments `x = x`.

    Returns:
        The statements, or `None` if such a variable changes in a branch or a loop.
    """
    lines: list[ast.stmt] = []
    join = _Join({})
    for item in body:
        nested = isinstance(item, ast.If | ast.For | ast.While | ast.With)
        if nested and (names_read([item]) | names_written([item])) & join.tuples.keys():
            return None
        item = join.visit(item)
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            join.tuples.pop(name, None)
            if isinstance(item.value, ast.Tuple):
                join.tuples[name] = item.value
                continue
            if dotted(item.value) == name:
                continue
        lines.append(item)
    return lines


def collecting_loop(
    node: ast.ClassDef,
    forward: ast.FunctionDef,
    classes: Mapping[str, ast.ClassDef],
    changed: Collection[str],
) -> str:
    """Removes the statements that collect hidden states and attention weights in a loop.

    Args:
        node: The class.
        forward: The method to change.
        classes: The classes of the file.
        changed: The names of the classes that return a pair of hidden states and weights.

    Returns:
        The class of the layers, or an empty string if the method has no such loop.
    """
    loops = [item for item in forward.body if isinstance(item, ast.For)]
    if len(loops) != 1:
        return ""
    loop = loops[0]
    state = r"(\w+) = \1 \+ \((\w+),\)"
    weights = r"(\w+) = \1 \+ \((\w+)\[[12]\],\)"
    collected: set[str] = set()
    variable = ""
    lines: list[ast.stmt] = []
    for item in loop.body:
        text = ast.unparse(item)
        if match := re.fullmatch(rf"if output_hidden_states:\n    {state}", text):
            collected.add(match[1])
            variable = match[2]
        elif match := re.fullmatch(rf"if output_attentions:\n    {weights}", text):
            collected.add(match[1])
        elif match := re.fullmatch(
            rf"if output_attentions:\n    {weights}\n    if self\.config\.add_cross_attention:\n"
            r"        (\w+) = \3 \+ \((\w+)\[[12]\],\)",
            text,
        ):
            collected |= {match[1], match[3]}
        else:
            lines.append(item)
    if len(lines) != 2 or not variable:
        return ""
    first, second = lines
    if not isinstance(first, ast.Assign) or not isinstance(first.value, ast.Call):
        return ""
    if ast.unparse(second) != f"{variable} = {dotted(first.targets[0])}[0]":
        return ""
    source = loop.iter.args[0] if isinstance(loop.iter, ast.Call) else loop.iter
    pattern = rf"{re.escape(ast.unparse(source))} = nn\.ModuleList\(\[(\w+)\("
    match = re.search(pattern, ast.unparse(node))
    layer = match[1] if match else ""
    if layer not in classes or not (layer in changed or _is_layer(classes[layer])):
        return ""
    start = forward.body.index(loop)
    before: list[ast.stmt] = []
    after: list[ast.stmt] = []
    empty = r"(\w+) = \(\)( if output_\w+( and self\.config\.add_cross_attention)? else None)?"
    for item in forward.body[:start]:
        match = re.fullmatch(empty, ast.unparse(item))
        if match is None or match[1] not in collected:
            before.append(item)
    ended = False
    for item in forward.body[start + 1 :]:
        match = re.fullmatch(rf"if output_hidden_states:\n    {state}", ast.unparse(item))
        if match is not None and match[1] in collected:
            ended = True
            continue
        written = isinstance(item, ast.Assign) and dotted(item.targets[0]) == variable
        if ended and written:
            return ""
        after.append(item)
    if not ended:
        return ""
    for number, item in enumerate(after):
        if isinstance(item, ast.If) and ast.unparse(item.test) == "not return_dict":
            after[number] = ast.copy_location(ast.Pass(), item)
    results = copy.deepcopy(after)
    for item in results:
        if isinstance(item, ast.Return) and isinstance(item.value, ast.Call):
            words = item.value.keywords
            item.value.keywords = [word for word in words if dotted(word.value) not in collected]
    if any(names_read([item]) & collected for item in [*before, *lines, *results]):
        return ""
    loop.body = lines
    forward.body = [*before, loop, *results]
    return layer


_REPEATED_ROTATION = """\
sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
return tensor * cos + rotate_every_two(tensor) * sin"""
_PARTIAL_ROTATION = """\
if self.rotary_dim is not None:
    k_rot = key[:, :, :, :self.rotary_dim]
    k_pass = key[:, :, :, self.rotary_dim:]
    q_rot = query[:, :, :, :self.rotary_dim]
    q_pass = query[:, :, :, self.rotary_dim:]
    k_rot = apply_rotary_pos_emb(k_rot, sin, cos)
    q_rot = apply_rotary_pos_emb(q_rot, sin, cos)
    key = torch.cat([k_rot, k_pass], dim=-1)
    query = torch.cat([q_rot, q_pass], dim=-1)
else:
    key = apply_rotary_pos_emb(key, sin, cos)
    query = apply_rotary_pos_emb(query, sin, cos)"""
_TABLE_LOOKUP = """\
sincos = self.embed_positions[position_ids].to(x.dtype)
sin, cos = torch.split(sincos, sincos.shape[-1] // 2, dim=-1)
return (sin, cos)"""
_TABLE = """\
inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.int64) / dim)
sinusoid_inp = torch.arange(num_pos, dtype=torch.int64).float()[:, None] * inv_freq
return torch.cat((torch.sin(sinusoid_inp), torch.cos(sinusoid_inp)), dim=1)"""


def _text(body: Sequence[ast.stmt]) -> str:
    return "\n".join(ast.unparse(item) for item in body)


def _rotate_adjacent(tree: ast.Module) -> None:
    """Uses `nn.rotate` for the rotation of adjacent features (GPT-J).

    `nn.rotate` keeps the features after the rotated ones, so they need not be split off. The sines
    and cosines are computed for the positions of the batch, and not for all positions.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    apply = functions.get("apply_rotary_pos_emb")
    half = functions.get("rotate_every_two")
    if apply is None or half is None or _text(apply.body) != _REPEATED_ROTATION:
        return
    if not re.search(r"stack\(\(-x2, x1\), dim=-1\)", ast.unparse(half)):
        return
    angles = "(cos[:, :, None], sin[:, :, None])"
    line = statement(f"return nn.rotate(tensor, {angles}, interleaved=True)")
    apply.body = [located(line, apply)]
    table = functions.get("create_sinusoidal_positions")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            for number, item in enumerate(node.body):
                if ast.unparse(item) == _PARTIAL_ROTATION and isinstance(item, ast.If):
                    node.body[number : number + 1] = item.orelse
                    break
        if isinstance(node, ast.ClassDef) and table is not None and _text(table.body) == _TABLE:
            forward = method(node, "forward")
            match = re.search(
                r"self\.embed_positions = nn\.Buffer\(create_sinusoidal_positions\("
                r"([\w.]+), (self\.\w+)\), persistent=False\)",
                ast.unparse(node),
            )
            if forward is not None and match and _text(forward.body) == _TABLE_LOOKUP:
                lines = statements(
                    f"inv_freq = 1.0 / 10000 ** (torch.arange(0, {match[2]}, 2) / {match[2]})\n"
                    "angles = position_ids[..., None] * inv_freq\n"
                    "return (torch.sin(angles), torch.cos(angles))"
                )
                forward.body = [located(item, forward) for item in lines]


def _relative_positions(classes: Collection[ast.ClassDef]) -> None:
    """Uses `nn.relative_position_bias` for the relative positions of T5 and MPNet."""
    for node in classes:
        compute, bucket = (
            method(node, name) for name in ("compute_position_bias", "relative_position_bucket")
        )
        forward = method(node, "forward")
        if compute is None or bucket is None or forward is None:
            continue
        text = ast.unparse(bucket)
        defaults = [ast.unparse(value) for value in bucket.args.defaults]
        known = "max_exact = num_buckets // 2" in text and "n = -relative_position" in text
        if not known or defaults != ["32", "128"] or "bidirectional" in text:
            continue
        if "relative_position = memory_position - context_position" not in ast.unparse(compute):
            continue
        for item in forward.body:
            if ast.unparse(item) == "position_bias = self.compute_position_bias(hidden_states)":
                assert isinstance(item, ast.Assign)
                length = "hidden_states.shape[1]"
                item.value = expression(
                    f"nn.relative_position_bias(self.relative_attention_bias.weight, {length}, "
                    f"{length}, bidirectional=True, max_distance=128)"
                )


_ROTATION = "apply_rotary_position_embeddings"


def _shared_rotation(node: ast.ClassDef, forward: ast.FunctionDef) -> bool:
    """Replaces the rotation of adjacent features by one method with `nn.rotate`."""
    rotation = method(node, _ROTATION)
    if rotation is None or ".chunk(2, dim=-1)" not in ast.unparse(rotation):
        return False
    if "[-query_layer[..., 1::2], query_layer[..., ::2]]" not in ast.unparse(rotation):
        return False

    class Rotate(ast.NodeTransformer):
        def visit_Assign(self, item: ast.Assign) -> ast.AST | list[ast.stmt]:
            value = item.value
            if not isinstance(value, ast.Call) or dotted(value.func) != f"self.{_ROTATION}":
                return item
            assert isinstance(item.targets[0], ast.Tuple)
            return [
                ast.copy_location(
                    statement(
                        f"{dotted(name)} = nn.rotate({dotted(name)}.transpose(1, 2), "
                        "sinusoidal_pos, interleaved=True).transpose(1, 2)"
                    ),
                    item,
                )
                for name in item.targets[0].elts
            ]

    Rotate().visit(forward)
    node.body.remove(rotation)
    return True


def _angles(item: ast.stmt) -> list[ast.stmt]:
    """Splits a table of sines and cosines for `nn.rotate`."""
    if not isinstance(item, ast.Assign) or dotted(item.targets[0]) != "sinusoidal_pos":
        return [item]
    value = item.value.value if isinstance(item.value, ast.Subscript) else item.value
    lines = statements(
        f"sin, cos = torch.chunk({ast.unparse(value)}, 2, dim=-1)\n"
        "sinusoidal_pos = (cos[None, :, None], sin[None, :, None])"
    )
    return [located(line, item) for line in lines]

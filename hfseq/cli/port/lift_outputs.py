"""Defines the output classes of a model file that `hfseq.nn.outputs` does not contain."""

from __future__ import annotations

import ast
import functools
import re

from hfseq.cli.port import lifting
from hfseq.cli.port.scope import CALL_LIFTS, Scope, Visitor
from hfseq.cli.port.source import transformers_folder
from hfseq.cli.port.syntax import bind, call, dotted, is_none, statement

#: Fields that a port does not set. The model class adds caches, and the objective computes losses.
_DROPPED_FIELDS = frozenset({"loss", "cache", "past_key_values", "router_logits", "aux_loss"})


@functools.cache
def _shared_outputs() -> dict[str, ast.ClassDef]:
    """Returns the output classes that all models of Transformers share."""
    path = transformers_folder() / "modeling_outputs.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def output_fields(scope: Scope, name: str) -> list[str] | None:
    """Returns the fields of an output class in order, or `None` if the class is not known."""
    owner = scope.translator.file.classes.get(name)
    node = owner.node if owner is not None else _shared_outputs().get(name)
    if name == "ModelOutput":
        return []
    if node is None:
        return None
    fields: list[str] = []
    for base in node.bases:
        inherited = output_fields(scope, dotted(base))
        if inherited is None:
            return None
        fields += inherited
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if item.target.id not in fields:
                fields.append(item.target.id)
    return fields


def lift_own_output(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates output classes that hfseq does not contain. The port defines them."""
    from hfseq.nn import outputs

    name = dotted(node.func)
    if not re.search(r"Output(With\w+)?$", name) or "." in name:
        return None
    alias = scope.translator.file.constants.get(name)  # NewOutput = OtherOutput
    name = dotted(alias) or name
    name = scope.translator.file.imported.get(name, name)
    if name != dotted(node.func):
        node.func = ast.Name(name, ast.Load())
    if hasattr(outputs, f"Flax{lifting.OUTPUT_CLASSES.get(name, name)}"):
        return None
    fields = output_fields(scope, name)
    if fields is None:
        return None
    values: dict[str, ast.expr] = {}
    for word in node.keywords:
        if word.arg is None and not _passes_base_output(word.value, scope):
            scope.report(node, "a call of an output class with ** arguments")
            return node
    if any(isinstance(value, ast.Starred) for value in node.args):
        scope.report(node, "a call of an output class with * arguments")
        return node
    for field, value in bind(node, fields).items():
        if field not in _DROPPED_FIELDS and not is_none(value):
            values[field] = visitor.visit(value)
    if any(word.arg is None for word in node.keywords):
        base = scope.outputs
        for field in fields:
            if field not in values and field not in _DROPPED_FIELDS:
                values[field] = ast.Call(
                    ast.Attribute(ast.Name(base, ast.Load()), "get", ast.Load()),
                    [ast.Constant(field)],
                    [],
                )
    _define(
        scope,
        name,
        [field for field in fields if field not in _DROPPED_FIELDS - {"past_key_values"}],
    )
    words: dict[str, ast.expr | str] = dict(values)
    if "hidden_states" in fields and "attentions" in fields:
        lifting.add_collected(scope, words)
    return call(f"Flax{name}", **words)


def _passes_base_output(value: ast.expr, scope: Scope) -> bool:
    """Returns whether the value of a `**` argument is the output of a submodule."""
    return bool(scope.outputs) and dotted(value) == scope.outputs


def _define(scope: Scope, name: str, fields: list[str]) -> None:
    """Adds the definition of an output class to the port."""
    lines = "\n".join(f"    {field}: Any = None" for field in fields)
    text = f"@dataclasses.dataclass\nclass Flax{name}(out.FlaxModelOutput):\n{lines}"
    scope.translator.constants.setdefault(f"Flax{name}", statement(text))


CALL_LIFTS.insert(0, lift_own_output)

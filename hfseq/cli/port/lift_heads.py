"""Translates projections to the vocabulary whose kernel may be the embedding matrix."""

from __future__ import annotations

import ast
import dataclasses

from hfseq.cli.port.scope import CALL_LIFTS, Scope, Visitor
from hfseq.cli.port.source import SourceClass, SourceFile
from hfseq.cli.port.syntax import (
    argument,
    call,
    calls,
    dotted,
    expression,
    own_attribute,
    statement,
)


@dataclasses.dataclass(frozen=True)
class TiedHead:
    """A projection to the vocabulary whose kernel may be the embedding matrix.

    Attributes:
        name: The attribute that holds the projection.
        embeddings: The expression that reads the embeddings in the class with the projection.
        has_bias: Whether the projection can have a bias that is not tied.
        bias: The attribute of the parameter to which the bias is tied, or an empty string.
        bias_varies: Whether the configuration decides if that untied bias exists.
    """

    name: str
    embeddings: str
    has_bias: bool = False
    bias: str = ""
    bias_varies: bool = False


def tied_heads(file: SourceFile) -> dict[str, dict[str, TiedHead]]:
    """Returns the projections of each class that may be tied, by the name of the attribute."""
    heads: dict[str, dict[str, TiedHead]] = {}
    for owner in file.classes.values():
        keys = owner.literal("_tied_weights_keys", {})
        if not isinstance(keys, dict):
            continue
        for source, target in keys.items():
            *path, name, leaf = source.split(".")
            holder: SourceClass | str | None = owner
            for part in path:
                holder = holder.parts.get(part) if isinstance(holder, SourceClass) else None
            if leaf != "weight" or not isinstance(holder, SourceClass):
                continue
            if holder.parts.get(name) != "nn.Linear" or not target.endswith(".weight"):
                continue
            bias = keys.get(source.removesuffix("weight") + "bias", "").split(".")[-1]
            embeddings = "tied_embeddings" if path else f"self.{target.removesuffix('.weight')}"
            option = _bias_option(holder, name)
            has_bias = not bias and not (isinstance(option, ast.Constant) and not option.value)
            varies = has_bias and not isinstance(option, ast.Constant)
            head = TiedHead(name, embeddings, has_bias, bias, varies)
            heads.setdefault(holder.name, {})[name] = head
    return heads


def tied_embeddings(owner: SourceClass) -> str:
    """Returns the expression of the embeddings to which the projection of a model is tied."""
    keys = owner.literal("_tied_weights_keys", {})
    targets = [
        target for target in keys.values() if target.endswith(".weight")
    ] if isinstance(keys, dict) else []  # fmt: skip
    return f"self.{targets[0].removesuffix('.weight')}" if targets else "None"


def _bias_option(owner: SourceClass, name: str) -> ast.expr:
    """Returns the value of the argument `bias` of a linear layer."""
    for node in ast.walk(owner.methods["__init__"]):
        if isinstance(node, ast.Assign) and own_attribute(node.targets[0]) == name:
            for inner in calls(node.value):
                if dotted(inner.func).endswith("nn.Linear"):
                    return argument(inner, 2, "bias") or ast.Constant(True)
    return ast.Constant(False)


def lift_tied_logits(scope: Scope, visitor: Visitor, node: ast.Call) -> ast.expr | None:
    """Translates the call of a projection that may be tied to the embeddings."""
    name = own_attribute(node.func)
    head = scope.translator.heads_of(scope.own).get(name)
    if head is None:
        return None
    x = visitor.visit(node.args[0])
    attend = f"{head.embeddings}.attend"
    if head.has_bias:
        bias = f"self.{name}.bias[...]"
        if head.bias_varies:
            bias = f"None if self.{name}.bias is None else {bias}"
        tied = f"partial({attend}, bias={bias})"
        function = f"{tied} if self.{name}.kernel is None else self.{name}"
    else:
        function = f"self.{name} or {attend}"
    if scope.is_model:
        return call("nn.vocabulary_logits", function, x)
    logits = ast.Call(expression(function), [x], [])
    return call("nn.add_bias", logits, f"self.{head.bias}[...]") if head.bias else logits


def tie(head: TiedHead, item: ast.Assign) -> list[ast.stmt]:
    """Returns the statements that create a projection, without its kernel if that is tied."""
    if head.has_bias:
        check = f"if config.tie_word_embeddings:\n    self.{head.name}.kernel = nnx.data(None)"
        return [item, statement(check)]
    if head.bias and isinstance(item.value, ast.Call):
        words = [word for word in item.value.keywords if word.arg != "use_bias"]
        item.value.keywords = [*words, ast.keyword("use_bias", ast.Constant(False))]
    item.value = ast.IfExp(
        expression("config.tie_word_embeddings"), expression("nnx.data(None)"), item.value
    )
    return [item]


CALL_LIFTS.insert(0, lift_tied_logits)

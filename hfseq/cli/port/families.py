"""Finds the differences between a model file and a decoder family that hfseq has.

A file `modular_*.py` of Transformers derives its classes from the model files of other families. If
one of these families is a decoder of `hfseq_plugins.decoder`, and only attention and feed-forward
block differ from it, the port contains these two classes and derives everything else from the
family. The comparison uses the translations of both model files. Two classes are equal if their
translations are equal, apart from the prefix of the class names.
"""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import importlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from hfseq.cli.port.scope import PortedClass, Translator
from hfseq.cli.port.source import SourceClass, SourceFile
from hfseq.cli.port.syntax import dotted

#: The heads of `hfseq_plugins.decoder.modeling`, and the names of their classes there.
HEADS = {
    "ForCausalLM": "CausalLM",
    "ForSequenceClassification": "SequenceClassification",
    "ForTokenClassification": "TokenClassification",
    "ForQuestionAnswering": "QuestionAnswering",
}
#: The attributes of a layer whose classes may differ, and the class attributes of
#: `hfseq_plugins.decoder.modeling.Layer` that hold these classes.
REPLACEABLE = {"self_attn": "attention_class", "mlp": "mlp_class"}
#: The arguments with which `hfseq_plugins.decoder.modeling.Layer` calls its attention, in order.
_ATTENTION = ["hidden_states", "position_embeddings", "attention_mask", "rngs", "return_weights"]
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The differences between a model file and the family from which it derives.

    Attributes:
        family: The model type of the family.
        title: The name of the family, as in its class names.
        layer: The class of the layers.
        classes: The name of the class for each class attribute in `REPLACEABLE` that differs.
        parts: The names of all classes and functions that the port must contain.
        has_options: Whether `hfseq_plugins.decoder.options` has options for the model type itself.
    """

    family: str
    title: str
    layer: SourceClass
    classes: Mapping[str, str]
    parts: frozenset[str]
    has_options: bool


def find_difference(
    translator: Translator, heads: Mapping[str, SourceClass], used: Collection[str]
) -> tuple[Difference | None, str]:
    """Compares a translated model file with the native families from which it derives.

    Args:
        translator: The translator, after it has translated all heads.
        heads: The class of each head.
        used: The names of the classes and functions that the heads use.

    Returns:
        The differences, or `None` if the port must be a complete file. The second value is the
        reason for a complete file. It is empty if the file derives from no native family.
    """
    reason = ""
    options: Any = importlib.import_module("hfseq_plugins.decoder.options").FAMILY_OPTIONS
    for parent in native_parents(translator.file, options):
        result = _compare(translator, heads, used, parent)
        if isinstance(result, Difference):
            is_native = translator.file.model_type in options
            return dataclasses.replace(result, has_options=is_native), ""
        reason = reason or result
    return None, reason


def native_parents(file: SourceFile, options: Mapping[str, Any]) -> list[str]:
    """Returns the native decoders from which the modular file derives, the most frequent first."""
    path = file.path.with_name(file.path.name.replace("modeling_", "modular_"))
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    origins = {
        alias.name: item.module.rpartition("modeling_")[2]
        for item in ast.walk(tree)
        if isinstance(item, ast.ImportFrom) and item.module and "modeling_" in item.module
        for alias in item.names
    }
    bases = (dotted(base) for node in tree.body if isinstance(node, ast.ClassDef)
             for base in node.bases)  # fmt: skip
    families = collections.Counter(origins[name] for name in bases if name in origins)
    return [
        family
        for family, _ in families.most_common()
        if family in options and options[family].experts is None and family != "falcon"
    ]


def _compare(
    translator: Translator, heads: Mapping[str, SourceClass], used: Collection[str], parent: str
) -> Difference | str:
    """Returns the differences from a family, or the reason why the port is a complete file."""
    family = type(translator)(SourceFile(parent))
    family.run()
    title = family.file.prefix
    other_heads = {task for task in heads if task not in HEADS and task != "Model"}
    if other_heads:
        return f"{title} has no head {min(other_heads)}"
    for owner in heads.values():
        keys = owner.literal("_tied_weights_keys", {})
        if keys not in ({}, _TIED):
            return f"the tied weights differ from {title}"
    if translator.joined_weights(used) or translator.renamed_weights():
        return f"the names in checkpoints differ from {title}"
    layers = {loop for loop in translator.scanned if loop.name in used}
    if len(layers) != 1:
        return f"the layers differ from {title}"
    (layer,) = layers
    classes = {
        attribute: part
        for name, attribute in REPLACEABLE.items()
        if isinstance(part := layer.parts.get(name), SourceClass)
    }
    family_classes = {_plain(port): port for port in family.ports.values()}
    different = [
        port
        for name, port in translator.ports.items()
        if name in used and _text(port) != _text(family_classes.get(_plain(port)))
    ]
    replaced = {
        attribute: part for attribute, part in classes.items()
        if any(port.source is part for port in different)
    }  # fmt: skip
    parts = frozenset().union(*(translator._closure(part) for part in replaced.values()))
    remaining_names = [port.name for port in different if port.source.name not in parts]
    if remaining_names:
        return (
            f"{', '.join(remaining_names)} differ{'s' * (len(remaining_names) == 1)} from {title}"
        )
    for attribute, part in replaced.items():
        ported = translator.ports[part.name]
        if not _fits(ported, attribute):
            return f"the arguments of {ported.name} differ from {title}"
    names = {attribute: translator.ports[part.name].name for attribute, part in replaced.items()}
    return Difference(parent, title, layer, names, parts, has_options=False)


def _plain(port: PortedClass) -> str:
    """Returns the name of a class without the prefix of its file."""
    return port.name.removeprefix(port.source.file.prefix)


def _text(port: PortedClass | None) -> str:
    """Returns the translation of a class without the prefix of its file."""
    if port is None or port.node is None:
        return ""
    return re.sub(rf"\b{port.source.file.prefix}(?=[A-Z]|\b)", "", ast.unparse(port.node))


def _fits(port: PortedClass, attribute: str) -> bool:
    """Returns whether a layer of `hfseq_plugins.decoder` can create and call a class."""
    if port.constructor_arguments != ["config"] or not port.takes_rngs:
        return False
    if attribute == "attention_class":
        return set(port.arguments) == set(_ATTENTION)
    return len(port.arguments) == 1


def adapted_class(port: PortedClass) -> PortedClass:
    """Returns a class whose attention has the arguments that the layer of the family passes."""
    if set(port.arguments) != set(_ATTENTION):
        return port
    node = copy.deepcopy(port.node)
    assert node is not None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__call__":
            item.args = ast.parse(f"def f(self, {', '.join(_ATTENTION)}=False): pass").body[0].args  # type: ignore[attr-defined]
    return dataclasses.replace(port, node=node)

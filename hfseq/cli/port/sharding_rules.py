"""Writes the sharding rules of a port for the parameters that it has.

The rules shard pairs of projections over columns and rows, as in Megatron-LM. A tensor parallelism
plan of the configuration decides the pairs. Without a plan, the names of the projections do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from hfseq.cli.port.syntax import dotted, method, own_attribute

#: The rule of each style of Transformers' tensor parallelism plans.
_STYLES = {
    "colwise": "column",
    "colwise_gather_output": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
}
_COLUMN = re.compile(
    r"([qkv]|query|key|value|[qkv]_proj|[qkv]_lin|query_key_value|qkv|qkv_proj|c_attn|c_fc|Wqkv"
    r"|fc1|fc_in|lin1|linear1|ffn|up_proj|gate_proj|gate_up_proj|dense_h_to_4h|intermediate/dense)"
)
_ROW = re.compile(
    r"(o|o_proj|out_lin|fc2|fc_out|lin2|linear2|ffn_output|down_proj|dense_4h_to_h|c_proj"
    r"|output/dense)"
)
_CLASSIFIERS = re.compile(r"classifier|qa_outputs|score|out_proj|seq_relationship|fc_norm")
_VOCABULARY = re.compile(r"lm_head|decoder|vocab_projector|embed_out")


class _Parameter:
    """A layer with parameters: its path, the name of the layer class, and its class in the port."""

    def __init__(self, path: str, layer: str, owner: ast.ClassDef, has_bias: bool, is_row: bool):
        self.path, self.layer, self.owner, self.has_bias = path, layer, owner, has_bias
        #: Whether the parameter is an array whose first axis has the size 1, such as a class token.
        self.is_row = is_row


def _layers(classes: Mapping[str, ast.ClassDef]) -> Iterator[_Parameter]:
    attributes: dict[str, set[str]] = {}
    for node in classes.values():
        for item in ast.walk(node):
            if isinstance(item, ast.Assign) and own_attribute(item.targets[0]):
                for inner in ast.walk(item.value):
                    if isinstance(inner, ast.Call) and dotted(inner.func) in classes:
                        name = own_attribute(item.targets[0])
                        attributes.setdefault(dotted(inner.func), set()).add(name)
    for node in classes.values():
        constructor = method(node, "__init__")
        for item in ast.walk(constructor) if constructor else ():
            if not isinstance(item, ast.Assign):
                continue
            target = item.targets[0]
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            for name in filter(None, map(own_attribute, elements)):
                for inner in ast.walk(item.value):
                    if not isinstance(inner, ast.Call):
                        continue
                    match = re.fullmatch(
                        r"nn\.(Linear|Conv1D|Conv|Embed|LayerNorm|RMSNorm|BatchNorm|GroupNorm)"
                        r"|nnx\.Param",
                        dotted(inner.func),
                    )
                    base = [
                        dotted(b) for b in getattr(classes.get(dotted(inner.func)), "bases", [])
                    ]
                    layer = match[0] if match else base[0] if base[:1] == ["nn.Embed"] else ""
                    if not layer:
                        continue
                    holders = sorted(attributes.get(node.name, ()))
                    generic = re.fullmatch(r"dense|projection|fc|kernel|weight", name)
                    single = holders[0] if len(holders) == 1 else f"({'|'.join(holders)})"
                    path = f"{single}/{name}" if generic and holders else name
                    bias = "use_bias=False" not in ast.unparse(inner)
                    if "nn.Sequential" in ast.unparse(item.value):
                        path = rf"{name}/\d+"
                    is_row = re.search(r"\(\(?1, ", ast.unparse(inner)) is not None
                    yield _Parameter(path, layer, node, bias, is_row)


def _tactic(layer: _Parameter, in_attention: bool) -> str:
    path = layer.path
    if layer.layer in ("nn.LayerNorm", "nn.RMSNorm", "nn.BatchNorm", "nn.GroupNorm"):
        return "vector"
    if layer.layer == "nn.Conv":
        return "channels"
    if layer.layer == "nn.Embed":
        words = re.search(r"word|embed_tokens|wte|token_embed|^embeddings$", path)
        return "embedding" if words and "type" not in path else "table"
    if layer.layer == "nnx.Param":
        return "parameter"
    if _COLUMN.fullmatch(path):
        return "column"
    if _ROW.fullmatch(path) or in_attention and re.fullmatch(r"\w+/dense|out_proj", path):
        return "row"
    if _VOCABULARY.fullmatch(path):
        return "vocab_column"
    return "row_table" if _CLASSIFIERS.search(path) else "table"


def sharding_rules(
    nodes: Sequence[ast.stmt], plan: Mapping[str, str], generic_layers: Sequence[str] = ()
) -> str:
    """Returns the text of the sharding rules.

    Args:
        nodes: The definitions of the port.
        plan: The tensor parallelism plan of the configuration, which may be empty.
        generic_layers: The names of linear layers in heads that all decoders share.
    """
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    layers = list(_layers(classes))
    groups: dict[tuple[str, str], list[str]] = {}
    biases = {layer.path.split("/")[-1] for layer in layers if layer.has_bias}
    planned = _planned(plan, groups, biases)

    def add(leaf: str, tactic: str, path: str) -> None:
        paths = groups.setdefault((leaf, tactic), [])
        if path not in paths:
            paths.append(path)

    for layer in layers:
        in_attention = bool(re.search(r"nn\.(attend|extend_cache)\(", ast.unparse(layer.owner)))
        tactic = _tactic(layer, in_attention)
        if tactic == "vector":
            add("(scale|bias)", "vector", layer.path)
        elif tactic == "parameter":
            if layer.is_row:
                add("", "replicated", layer.path)
            continue
        elif tactic in ("embedding", "table") and layer.layer == "nn.Embed":
            add("embedding", tactic, layer.path)
        else:
            if layer.path.split("/")[-1] in planned:
                continue
            if tactic == "row" and re.search(r"[|]", layer.path):
                tactic = "table"
            add("kernel", tactic, layer.path)
            if layer.has_bias:
                small = {"column": "column_bias", "row_table": "replicated"}
                add("bias", small.get(tactic, "vector"), layer.path)
    for name in generic_layers:
        add("kernel", "row_table", name)
        add("bias", "replicated", name)
    order = ["embedding", "table", "column", "column_bias", "row", "channels", "vocab_column",
             "row_table", "row_parameter", "replicated", "vector"]  # fmt: skip
    rows = sorted(
        groups.items(), key=lambda row: order.index(row[0][1]) if row[0][1] in order else 4
    )
    lines = [
        f'    (r"{_joined(paths)}/{leaf}$", "{tactic}"),\n' if leaf else
        f'    (r"{_joined(paths)}$", "{tactic}"),\n'
        for (leaf, tactic), paths in rows
        if tactic != "vector"
    ]  # fmt: skip
    return f'RULES = [\n{"".join(lines)}    (r".*", "vector"),  # norms and all other parameters\n]'


def planned_rules(plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the sharding rules of a tensor parallelism plan, as pairs of a path and a tactic."""
    groups: dict[tuple[str, str], list[str]] = {}
    _planned(plan, groups, {pattern.split(".")[-1] for pattern in plan})
    return [
        (f"{path}/{leaf}$" if leaf else f"{path}$", tactic)
        for (leaf, tactic), paths in groups.items()
        for path in paths
    ]


def _joined(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"({'|'.join(paths)})"


def _planned(
    plan: Mapping[str, str], groups: dict[tuple[str, str], list[str]], biases: set[str]
) -> set[str]:
    """Adds the rules of a plan, and returns the names of the layers that it contains."""
    names: set[str] = set()
    by_parent: dict[tuple[str, str], list[str]] = {}
    for pattern, style in plan.items():
        tactic = _STYLES.get(style)
        *parents, leaf = re.sub(r"^layers\.\*\.", "", pattern).split(".")
        joined = "experts" in parents and leaf in ("gate_up_proj", "down_proj")
        if tactic is not None and not joined and "*" not in pattern.replace("layers.*.", ""):
            by_parent.setdefault((tactic, "/".join(parents)), []).append(leaf)
            names.add(leaf)
        elif "experts" in pattern and leaf in ("gate_up_proj", "down_proj"):
            groups[("", "row_table")] = ["experts/(gate_up_proj|down_proj)"]
    for (tactic, parent), leaves in by_parent.items():
        path = f"{parent}/{_joined(leaves)}" if parent else _joined(leaves)
        groups.setdefault(("kernel", tactic), []).append(path)
        if tactic == "column" and biases.intersection(leaves):
            groups.setdefault(("bias", "column_bias"), []).append(path)
    return names

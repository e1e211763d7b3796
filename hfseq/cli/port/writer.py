"""Writes the plugin file of a port with its imports, classes, sharding rules and hook."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hfseq.cli.port.families import HEADS, Difference, adapted_class
from hfseq.cli.port.lifting import extends_cache, is_cached
from hfseq.cli.port.scope import Marker, PortedClass, Translator
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import parameters
from hfseq.modeling.base import MEDIA_INPUTS

LINE_LENGTH = 100

_CALL = """
    def __call__(self, input_ids, *args, **kwargs):
        outputs = self.{prefix}(input_ids, *args, **kwargs)
"""
#: Heads that Transformers defines once for all decoders, in `modeling_layers`. The values are the
#: name and the text of the class in the port.
GENERIC_HEADS: dict[str, tuple[str, str]] = {
    "ForSequenceClassification": (
        "SequenceClassifier",
        '''
class SequenceClassifier(nnx.Module):
    """Sequence classification or regression, from the last token that is not padding."""

    def __init__(self, config, rngs):
        init = nn.normal({std})
        self.pad_token_id = config.pad_token_id
        self.{prefix} = {base}(config, rngs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, init, rngs, use_bias=False)

    def __call__(self, input_ids, *args, **kwargs):  # (batch, length)
        outputs = self.{prefix}(input_ids, *args, **kwargs)
        columns = jnp.arange(input_ids.shape[1])
        last_token = jnp.argmax(jnp.where(input_ids != self.pad_token_id, columns, 0), axis=-1)
        rows = jnp.arange(input_ids.shape[0])
        return out.FlaxSequenceClassifierOutput(
            logits=self.score(outputs.last_hidden_state[rows, last_token]),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
''',
    ),
    "ForTokenClassification": (
        "TokenClassifier",
        '''
class TokenClassifier(nnx.Module):
    """Classification of each token."""

    def __init__(self, config, rngs):
        init = nn.normal({std})
        self.{prefix} = {base}(config, rngs)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels, init, rngs)

    def __call__(self, *args, rngs=None, **kwargs):
        outputs = self.{prefix}(*args, rngs=rngs, **kwargs)
        return out.FlaxTokenClassifierOutput(
            logits=self.score(self.dropout(outputs.last_hidden_state, rngs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
''',
    ),
    "ForQuestionAnswering": (
        "QuestionAnswerer",
        '''
class QuestionAnswerer(nnx.Module):
    """Logits of the first and the last token of the answer."""

    def __init__(self, config, rngs):
        init = nn.normal({std})
        self.{prefix} = {base}(config, rngs)
        self.qa_outputs = nn.Linear(config.hidden_size, 2, init, rngs)

    def __call__(self, *args, **kwargs):
        outputs = self.{prefix}(*args, **kwargs)
        start_logits, end_logits = jnp.unstack(self.qa_outputs(outputs.last_hidden_state), axis=-1)
        return out.FlaxQuestionAnsweringModelOutput(
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
''',
    ),
}
#: Shapes of arguments, for the comments in the port.
SHAPES = {
    "input_ids": "(batch, length)",
    "attention_mask": "(batch, length)",
    "token_type_ids": "(batch, length)",
    "position_ids": "(batch, length)",
    "segment_ids": "(batch, length)",
    "pixel_values": "(batch, channels, height, width)",
    "input_values": "(batch, samples)",
    "input_features": "(batch, features, frames)",
    "hidden_states": "(batch, length, hidden)",
}


def write(
    translator: Translator,
    heads: Mapping[str, SourceClass],
    used: Collection[str],
    markers: Sequence[Marker],
) -> tuple[str, dict[str, str]]:
    """Returns the text of the plugin file and the name of the model class of each head.

    Args:
        translator: The translator of the file.
        heads: The class of each head.
        used: The names of the classes and functions that the heads use.
        markers: The statements without a translation.
    """
    file = translator.file
    ported = [port for port in translator.order if port.source.name in used]
    base = translator.ports[heads["Model"].name]
    prefix = str(file.abstract.literal("base_model_prefix", "model"))
    prefix = str(heads["Model"].literal("base_model_prefix", prefix))
    blocks = [ast.unparse(node) for node in translator.constants.values()]
    blocks += [_block(helper) for name, helper in translator.helpers.items() if name in used]
    blocks += [_class_block(translator, port) for port in ported]
    modules = {name: translator.ports[owner.name].name for name, owner in heads.items()
               if owner.name in translator.ports}  # fmt: skip
    for name, owner in heads.items():
        if owner.kind == "generic":
            own_prefix = str(owner.literal("base_model_prefix", "model"))
            module, text = GENERIC_HEADS[name]
            std = (
                "config.initializer_range" if translator.has_field("initializer_range") else "0.02"
            )
            blocks.append(text.strip().format(prefix=own_prefix, base=base.name, std=std))
            modules[name] = module
    flax_names = {name: f"Flax{owner.name}" for name, owner in heads.items()}
    blocks += _model_classes(translator, heads, modules, flax_names, prefix, used)
    blocks.append(_rules(translator))
    blocks.append(_hook(translator, flax_names))
    if markers:
        blocks += ["\n".join(translator.missing)] if translator.missing else []
        blocks.append("refuse_untranslated(__file__)")
    return _file(translator, "\n\n\n".join(blocks), bool(markers)), flax_names


def _file(translator: Translator, body: str, has_markers: bool = False, note: str = "") -> str:
    """Returns the text of a file with a docstring, the imports and a body."""
    file, version = translator.file, importlib.metadata.version("transformers")
    title = f"{file.prefix} for hfseq, ported from Transformers {version} by `hfseq port`."
    head = f'"""{title}\n\n{note}Source: {file.relative_path}\n"""'
    return format_text(f"{head}\n\n{_imports(translator, body, has_markers)}\n\n\n{body}\n")


def write_difference(
    translator: Translator, heads: Mapping[str, SourceClass], difference: Difference
) -> str:
    """Returns the text of a plugin file that derives its classes from a family of hfseq.

    Args:
        translator: The translator of the file.
        heads: The class of each head.
        difference: The differences between the file and the family.
    """
    model_type, title = translator.file.model_type, difference.title
    base = translator.ports[heads["Model"].name].name
    blocks = [
        _block(helper) for name, helper in translator.helpers.items() if name in difference.parts
    ]
    blocks += [
        _class_block(translator, adapted_class(port))
        for port in translator.order
        if port.source.name in difference.parts
    ]
    constants = [ast.unparse(node) for name, node in translator.constants.items()
                 if any(re.search(rf"\b{name}\b", block) for block in blocks)]  # fmt: skip
    blocks[:0] = constants
    if not difference.has_options:
        blocks.insert(0, f'FAMILY_OPTIONS["{model_type}"] = FAMILY_OPTIONS["{difference.family}"]')
    modules = {"Model": "decoder.Decoder"}
    if difference.classes:
        layer = translator.ports[difference.layer.name].name
        lines = [f"    {name} = {value}" for name, value in difference.classes.items()]
        names = " and ".join(difference.classes.values())
        described = f'    """A layer of {title} with another {names}."""\n\n'
        blocks.append(f"class {layer}(decoder.Layer):\n{described}" + "\n".join(lines))
        blocks.append(
            f'class {base}(decoder.Decoder):\n    """{translator.file.prefix} without a head."""'
            f"\n\n    layer_class = {layer}"
        )
        modules["Model"] = base
    for task, owner in heads.items():
        if task == "Model":
            continue
        name = HEADS[task]
        lines = [f"    decoder_class = {base}"] if difference.classes else []
        prefix = owner.literal("base_model_prefix", "model")
        if prefix != ("transformer" if task == "ForQuestionAnswering" else "model"):
            lines.append(f'    decoder_name = "{prefix}"')
        if lines:
            blocks.append(f"class {name}(decoder.{name}):\n" + "\n".join(lines))
        modules[task] = name if lines else f"decoder.{name}"
    flax_names = {task: f"Flax{owner.name}" for task, owner in heads.items()}
    for task, owner in heads.items():
        parents = "decoder.FlaxDecoderPreTrainedModel" if task == "Model" else flax_names["Model"]
        mixin = "CausalGeneration, " if task == "ForCausalLM" else ""
        lines = [f"    module_class = {modules[task]}"]
        if task == "Model":
            lines = [f"    config_class, module_class = {translator.config_name}, {modules[task]}"]
        elif (prefix := owner.literal("base_model_prefix", "model")) != "model":
            lines.append(f'    base_model_prefix = "{prefix}"')
        blocks.append(f"class {flax_names[task]}({mixin}{parents}):\n" + "\n".join(lines))
    extra = _rules_outside_family(translator)
    if extra:
        text = "".join(f'    (r"{path}", "{tactic}"),\n' for path, tactic in extra)
        blocks.append(f"RULES = [\n{text}    *FAMILY_RULES,\n]")
    blocks.append(_hook(translator, flax_names, "RULES" if extra else "FAMILY_RULES"))
    changed = f", except for {' and '.join(difference.classes.values())}" * bool(difference.classes)
    note = textwrap.fill(f"The classes are those of {title}{changed}.", LINE_LENGTH) + "\n\n"
    return _file(translator, "\n\n\n".join(blocks), note=note)


def _rules_outside_family(translator: Translator) -> list[tuple[str, str]]:
    """Returns the sharding rules of the configuration that the family's rules do not contain."""
    family = importlib.import_module("hfseq_plugins.decoder.sharding").RULES
    rules = [rule for rule in _rule_list(translator) if rule not in _COMMON_RULES]
    paths = {path: [path.replace("$", "")] for path, _ in rules}
    for path in paths:
        if match := re.fullmatch(r"(.*)\((.*)\)(.*)\$", path):
            paths[path] = [f"{match[1]}{leaf}{match[3]}" for leaf in match[2].split("|")]
    return [
        (path, tactic)
        for path, tactic in rules
        if not all(any(re.search(rule, leaf) for rule, _ in family) for leaf in paths[path])
    ]


def undefined_names(text: str) -> set[str]:
    """Returns the names that a Python module reads and does not define."""
    top = symtable.symtable(text, "port", "exec")
    defined = {*dir(builtins), "__file__", "__name__"}
    for name in top.get_identifiers():
        symbol = top.lookup(name)
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            defined.add(name)
    missing: set[str] = set()

    def walk(table: symtable.SymbolTable) -> None:
        for name in table.get_identifiers():
            symbol = table.lookup(name)
            if symbol.is_referenced() and symbol.is_global() and name not in defined:
                missing.add(name)
        for child in table.get_children():
            walk(child)

    walk(top)
    return missing


def _block(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    return re.sub(r"^( *return) \((.*)\)$", _without_parentheses, text, flags=re.MULTILINE)


def _without_parentheses(match: re.Match[str]) -> str:
    """Returns `return a, b` for `return (a, b)`."""
    value = ast.parse(f"({match[2]})", mode="eval").body if _parses(match[2]) else None
    if isinstance(value, ast.Tuple) and value.elts:
        return f"{match[1]} {match[2]}"
    return match[0]


def _parses(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def _class_block(translator: Translator, port: PortedClass) -> str:
    """Returns the text of a class with a docstring and with comments that give the input shapes."""
    assert port.node is not None
    lines = _block(port.node).split("\n")
    docstring = describe(translator, port)
    if docstring:
        lines[1:1] = [f'    """{docstring}"""', ""]
    for number, line in enumerate(lines):
        if line.startswith("    def __call__(") and "*args" not in line:
            lines[number] = _call_signature(port, line)
    return "\n".join(lines)


def _call_signature(port: PortedClass, line: str) -> str:
    match = re.fullmatch(r"    def __call__\((.*)\):", line)
    if match is None:
        return line
    arguments = match[1].split(", ")
    names = [argument.split("=")[0] for argument in arguments]
    shapes = dict(SHAPES)
    if port.source.kind != "model":
        shapes.pop("attention_mask")
    shape_names = [name for name in names if name in shapes]
    first = names[1] if len(names) > 1 else ""
    if not shape_names:
        return line
    if shape_names == [first]:
        commented = f"{line}  # {shapes[first]}"
        if len(commented) <= LINE_LENGTH:
            return commented
    lines = ["    def __call__("]
    for name, argument in zip(names, arguments, strict=True):
        comment = f"  # {shapes[name]}" if name in shapes else ""
        lines.append(f"        {argument},{comment}")
    return "\n".join([*lines, "    ):"])


def describe(translator: Translator, port: PortedClass) -> str:
    """Returns a docstring for a class, or `""` if there is none for this kind of class."""
    owner = port.source
    task = next((task for task, head in translator.file.heads().items() if head is owner), "")
    if task == "Model":
        return f"{translator.file.prefix} without a head."
    if task == "ForCausalLM":
        return "The decoder with a language modeling head, which may be tied to the embeddings."
    if task == "ForMaskedLM":
        return "The encoder with a masked language modeling head."
    if owner.kind == "attention" or extends_cache(owner):
        if not is_cached(owner) and not extends_cache(owner):
            return "Multi-head self-attention."
        if "num_key_value_heads" in owner.text:
            return "Grouped-query attention, in which several query heads share a key-value head."
        return "Causal multi-head attention with a key-value cache."
    if owner.kind == "layer":
        return "One layer: attention and feed-forward block with their norms and residuals."
    endings = {
        "Experts": "The feed-forward blocks of all experts.",
        "MLP": "The feed-forward block of a layer.",
        "Router": "Chooses the experts of each token.",
        "MoeBlock": "Routes each token to the experts that the router chooses.",
        "MoE": "Routes each token to the experts that the router chooses.",
        "Embeddings": "The input embeddings.",
        "Pooler": "The representation of a whole sequence.",
    }
    return next((text for ending, text in endings.items() if port.name.endswith(ending)), "")


def _model_classes(
    translator: Translator,
    heads: Mapping[str, SourceClass],
    modules: Mapping[str, str],
    flax_names: Mapping[str, str],
    prefix: str,
    used: Collection[str],
) -> list[str]:
    """Returns the text of the model classes, one per head, that users load and train."""
    config, base_name = translator.config_name, flax_names["Model"]
    arguments = translator.ports[heads["Model"].name].arguments
    main = arguments[0] if arguments else "input_ids"
    is_video = any("num_frames" in owner.text for owner in translator.file.classes.values())
    is_image = main == "pixel_values"
    parent = "FlaxVisionPreTrainedModel" if is_image else "FlaxPreTrainedModel"
    if translator.is_pair:
        parent = "FlaxSeq2SeqPreTrainedModel"
    lines = [
        f"class {base_name}({parent}):",
        f"    config_class, module_class, base_model_prefix = {config}, {modules['Model']}, "
        f'"{prefix}"',
    ]
    if is_video:
        lines.append("    is_video_model = True")
    if main != "input_ids" and not is_image:
        lines.append(f'    main_input_name = "{main}"')
    aliases: dict[str, str] = {}
    for owner in heads.values():
        keys = owner.literal("_tied_weights_keys", {})
        if translator.is_pair and owner is not heads["Model"]:
            continue
        aliases |= keys if isinstance(keys, dict) else {}
    if aliases:
        lines.append(f"    weight_aliases = {aliases!r}")
    if joined_tensors := translator.joined_weights(used):
        lines.append("    joined_weights = {")
        for target, (sources, axis) in joined_tensors.items():
            suffix = f", axis={axis}" if axis else ""
            lines.append(f'        "{target}": JoinedTensor({sources!r}{suffix}),')
        lines.append("    }")
    if renamed := translator.renamed_weights():
        lines.append(f"    weight_templates = {renamed!r}")
        lines.append("    weight_synonyms = weight_templates  # PyTorch's names in memory")
    lines += translator.class_attributes
    lines += _frame_counts(translator)
    ids = "self.config.pad_token_id, self.config.decoder_start_token_id"
    shift = f"shift_tokens_right(input_ids, {ids})"
    base_forward = heads["Model"].forward
    if translator.is_pair and base_forward is not None and shift in ast.unparse(base_forward):
        lines += [
            "",
            "    def default_decoder_input_ids(self, input_ids):",
            f"        return {shift}",
        ]
    media = [name for name in arguments if name in MEDIA_INPUTS and name != main]
    if media or main != "input_ids" and not is_image:
        lines += _call_of_model([main, *media])
    lines += _stored_collections(translator)
    blocks = ["\n".join(lines)]
    for name in heads:
        if name != "Model":
            mixin = "CausalGeneration, " if name == "ForCausalLM" else ""
            own_prefix = heads[name].literal("base_model_prefix", prefix)
            if translator.is_pair:
                mixin = "Seq2SeqGeneration, "
            text = f"class {flax_names[name]}({mixin}{base_name}):\n"
            text += f"    module_class = {modules[name]}"
            if translator.is_pair:
                tied = {f"{prefix}.{key}": f"{prefix}.{aliases[key]}" for key in aliases}
                own_keys = heads[name].literal("_tied_weights_keys", {})
                tied |= own_keys if isinstance(own_keys, dict) else {}
                text += f"\n    weight_aliases = {tied!r}"
            if own_prefix != prefix:
                text += f'\n    base_model_prefix = "{own_prefix}"'
            forward = heads[name].forward
            first = parameters(forward)[0] if forward is not None else main
            if first != main and first in MEDIA_INPUTS:
                text += f'\n    main_input_name = "{first}"\n'
                text += "\n".join(_call_of_model([first]))
            blocks.append(text)
    return blocks


def _call_of_model(names: Sequence[str]) -> list[str]:
    """Returns the lines of a method `__call__` whose inputs are not token IDs."""
    defaults = ", ".join(f"{name}=None" for name in names)
    passed = ", ".join(f"{name}={name}" for name in names)
    return [
        "",
        f"    def __call__(self, {defaults}, **others):",
        f"        return super().__call__({passed}, **others)",
        "",
    ]


def _frame_counts(translator: Translator) -> list[str]:
    """Returns the method that counts the frames of audio, which CTC needs, or no lines.

    The method is known if the feature encoder of the model file consists of convolutions only.
    """
    method = translator.file.abstract.methods.get("_get_feat_extract_output_lengths")
    text = "" if method is None else ast.unparse(method)
    loop = "in zip(self.config.conv_kernel, self.config.conv_stride)"
    if loop not in text or "adapter" in text:
        return []
    return [
        "",
        "    def _get_feat_extract_output_lengths(self, input_lengths, add_adapter=None):",
        f"        for kernel_size, stride {loop}:",
        "            input_lengths = (input_lengths - kernel_size) // stride + 1",
        "        return input_lengths",
        "",
    ]


def _stored_collections(translator: Translator) -> list[str]:
    """Returns the line that declares untrained arrays of checkpoints, or no line without them."""
    text = "\n".join(ast.unparse(port.node) for port in translator.order if port.node)
    collections: dict[str, tuple[str, ...]] = {}
    if "nn.BatchNorm(" in text:
        collections["batch_stats"] = ("mean", "var")
    ports = [port for port in translator.order if port.node is not None]
    if buffers := dict.fromkeys(name for port in ports for name in port.source.stored_buffers):
        collections["buffers"] = tuple(buffers)
    return [f"    stored_collections = {collections!r}"] if collections else []


_TACTICS = {
    "colwise": "column",
    "colwise_gather_output": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
}


#: Sharding rules that every port has.
_COMMON_RULES = [
    (r"(embed_tokens|word_embeddings|wte)/embedding$", "embedding"),
    (r"lm_head/kernel$", "vocab_column"),
]


def _rules(translator: Translator) -> str:
    """Returns the text of the sharding rules."""
    rules = [*_rule_list(translator), (r".*", "vector")]
    lines = "".join(f'    (r"{path}", "{tactic}"),\n' for path, tactic in rules)
    return f"RULES = [\n{lines}]"


def _rule_list(translator: Translator) -> list[tuple[str, str]]:
    """Returns the sharding rules, which follow the tensor parallelism plan of the configuration."""
    plan = getattr(translator.config_class, "base_model_tp_plan", None) or {}
    rules: list[tuple[str, str]] = [*_COMMON_RULES]
    grouped: dict[str, dict[str, list[str]]] = {}
    for pattern, style in plan.items():
        tactic = _TACTICS.get(style)
        *parents, leaf = re.sub(r"^layers\.\*\.", "", pattern).split(".")
        if tactic is not None and "*" not in pattern.replace("layers.*.", ""):
            grouped.setdefault(tactic, {}).setdefault("/".join(parents), []).append(leaf)
        elif style in ("packed_colwise", "grouped_gemm") or "experts" in pattern:
            path = r"experts/(gate_up_proj|down_proj)$"
            if (path, "row_table") not in rules and "experts" in pattern:
                rules.append((path, "row_table"))
    for tactic, by_parent in grouped.items():
        for parent, leaves in by_parent.items():
            names = leaves[0] if len(leaves) == 1 else f"({'|'.join(leaves)})"
            path = f"{parent}/{names}" if parent else names
            rules.append((rf"{path}/kernel$", tactic))
            if tactic == "column":
                rules.append((rf"{path}/bias$", "column_bias"))
    return rules


def _hook(translator: Translator, flax_names: Mapping[str, str], rules: str = "RULES") -> str:
    heads = "".join(f'        "{name}": {flax},\n' for name, flax in flax_names.items())
    return (
        "@hookimpl\n"
        "def register_architectures(register):\n"
        f"    heads = {{\n{heads}    }}\n"
        f'    register("{translator.file.model_type}", config={translator.config_name}, '
        f"heads=heads, sharding={rules})"
    )


def _imports(translator: Translator, body: str, has_markers: bool) -> str:
    """Returns the import statements for the names that the port reads."""

    def reads(name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\b", body) is not None

    groups: list[list[str]] = [[], [], []]
    for name in ("dataclasses", "math"):
        if reads(rf"{name}\."):
            groups[0].append(f"import {name}")
    if reads("partial"):
        groups[0].append("from functools import partial")
    if reads("Any"):
        groups[0].append("from typing import Any")
    if reads(r"jax\."):
        groups[1].append("import jax")
    if reads(r"jnp\."):
        groups[1].append("import jax.numpy as jnp")
    if reads(r"np\."):
        groups[1].append("import numpy as np")
    if reads(r"nnx\.") or not reads("decoder"):
        groups[1].append("from flax import nnx")
    groups[1].append(f"from {_config_module(translator)} import {translator.config_name}")
    names = [n for n in ("FlaxPreTrainedModel",) if reads(n)]
    names += ["hookimpl", *(["nn"] if reads(r"nn\.") or not reads("decoder") else [])]
    groups[2].append(f"from hfseq import {', '.join(names)}")
    if reads("UsageError"):
        groups[2].append("from hfseq.errors import UsageError")
    if reads("CausalGeneration"):
        groups[2].append("from hfseq.generation import CausalGeneration")
    names = ["FlaxSeq2SeqPreTrainedModel", "FlaxVisionPreTrainedModel", "JoinedTensor"]
    names += ["Seq2SeqGeneration", "shift_tokens_right"]
    modeling = [n for n in names if reads(n) and f"def {n}" not in body]
    if modeling:
        groups[2].append(f"from hfseq.modeling import {', '.join(modeling)}")
    if reads(r"F\."):
        groups[2].append("from hfseq.nn import functional as F")
    if reads(r"out\."):
        groups[2].append("from hfseq.nn import outputs as out")
    if has_markers:
        groups[2].append("from hfseq.plugins import NotTranslated, refuse_untranslated")
    if reads(r"decoder\."):
        groups[2].append("from hfseq_plugins.decoder import modeling as decoder")
        if reads("FAMILY_OPTIONS"):
            groups[2].append("from hfseq_plugins.decoder.options import FAMILY_OPTIONS")
        groups[2].append("from hfseq_plugins.decoder.sharding import RULES as FAMILY_RULES")
    return "\n\n".join("\n".join(group) for group in groups if group)


def _config_module(translator: Translator) -> str:
    import transformers

    if hasattr(transformers, translator.config_name):
        return "transformers"
    return type(translator.config_class).__module__


def format_text(text: str) -> str:
    """Formats Python code with ruff. Returns it unchanged if ruff is missing or fails."""
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    command = [ruff, "format", "--config", f"line-length={LINE_LENGTH}", "--isolated", "-"]
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return text
    return result.stdout

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

from hfseq.cli.port.annotations import Annotator
from hfseq.cli.port.constructors import initial_deviation
from hfseq.cli.port.families import HEADS, Difference, adapted_class
from hfseq.cli.port.scope import Marker, Translator
from hfseq.cli.port.sharding_rules import planned_rules, sharding_rules
from hfseq.cli.port.simplify import simplify
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import parameters
from hfseq.modeling.base import MEDIA_INPUTS

LINE_LENGTH = 100

#: Heads that Transformers defines once for all decoders, in `modeling_layers`. The values are the
#: name and the text of the class in the port.
GENERIC_HEADS: dict[str, tuple[str, str]] = {
    "ForSequenceClassification": (
        "SequenceClassifier",
        '''
class SequenceClassifier(nnx.Module):
    """Sequence classification or regression, from the last token that is not padding."""

    def __init__(self, config: {config}, rngs: nnx.Rngs):
        init = nn.normal({std})
        self.pad_token_id = config.pad_token_id
        self.{prefix} = {base}(config, rngs)
        self.score = nn.Linear(config.hidden_size, config.num_labels, init, rngs, use_bias=False)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        *args: Any,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
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

    def __init__(self, config: {config}, rngs: nnx.Rngs):
        init = nn.normal({std})
        self.{prefix} = {base}(config, rngs)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels, init, rngs)

    def __call__(
        self, *args: Any, rngs: Keys | None = None, **kwargs: Any
    ) -> out.FlaxModelOutput:
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

    def __init__(self, config: {config}, rngs: nnx.Rngs):
        init = nn.normal({std})
        self.{prefix} = {base}(config, rngs)
        self.qa_outputs = nn.Linear(config.hidden_size, 2, init, rngs)

    def __call__(self, *args: Any, **kwargs: Any) -> out.FlaxModelOutput:
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
    modules = {name: translator.ports[owner.name].name for name, owner in heads.items()
               if owner.name in translator.ports}  # fmt: skip
    definitions: list[ast.stmt] = list(translator.constants.values())
    definitions += [helper for name, helper in translator.helpers.items() if name in used]
    definitions += [port.node for port in ported if port.node is not None]
    definitions = simplify(definitions, {*modules.values(), base.name})
    annotator = Annotator(translator, definitions)
    blocks = [annotator.write(node) for node in definitions]
    generic_layers: list[str] = []
    for name, owner in heads.items():
        if owner.kind == "generic":
            own_prefix = str(owner.literal("base_model_prefix", "model"))
            module, text = GENERIC_HEADS[name]
            std, config = initial_deviation(translator), translator.config_name
            blocks.append(
                text.strip().format(prefix=own_prefix, base=base.name, std=std, config=config)
            )
            modules[name] = module
            generic_layers.append("qa_outputs" if name == "ForQuestionAnswering" else "score")
    flax_names = {name: f"Flax{owner.name}" for name, owner in heads.items()}
    blocks += _model_classes(translator, heads, modules, flax_names, prefix, used)
    plan = getattr(translator.config_class, "base_model_tp_plan", None) or {}
    blocks.append(sharding_rules(definitions, plan, list(dict.fromkeys(generic_layers))))
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
    helpers: list[ast.stmt] = [
        helper for name, helper in translator.helpers.items() if name in difference.parts
    ]
    ports = [
        adapted_class(port) for port in translator.order if port.source.name in difference.parts
    ]
    definitions = [*helpers, *(port.node for port in ports if port.node is not None)]
    annotator = Annotator(translator, definitions)
    blocks = [annotator.write(helper) for helper in helpers]
    blocks += [annotator.write_class(port.node, port) for port in ports if port.node is not None]
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
    rules = planned_rules(getattr(translator.config_class, "base_model_tp_plan", None) or {})
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
        f'    """{translator.file.prefix} without a head."""',
        "",
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
            text += f'    """{translator.file.prefix} for {_task_name(name)}."""\n\n'
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


def _task_name(head: str) -> str:
    """Returns the words of a head, such as "causal language modeling" for `ForCausalLM`."""
    names = {
        "ForCausalLM": "causal language modeling",
        "ForMaskedLM": "masked language modeling",
        "ForPreTraining": "pre-training",
        "ForCTC": "speech recognition with CTC",
    }
    words = re.findall(r"[A-Z][a-z]+|[A-Z]+(?![a-z])", head.removeprefix("For"))
    spelled = " ".join(word if word.isupper() and len(word) > 1 else word.lower() for word in words)
    return names.get(head, spelled)


def _call_of_model(names: Sequence[str]) -> list[str]:
    """Returns the lines of a method `__call__` whose inputs are not token IDs."""
    defaults = ", ".join(f"{name}: Any = None" for name in names)
    passed = ", ".join(f"{name}={name}" for name in names)
    return [
        "",
        f"    def __call__(self, {defaults}, **others: Any) -> Any:",
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


def _hook(translator: Translator, flax_names: Mapping[str, str], rules: str = "RULES") -> str:
    heads = "".join(f'        "{name}": {flax},\n' for name, flax in flax_names.items())
    return (
        "@hookimpl\n"
        "def register_architectures(register: RegisterArchitecture) -> None:\n"
        f'    """Registers {translator.file.prefix} and its heads."""\n'
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
    if reads("functools"):
        groups[0].append("import functools")
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
    names = [n for n in ("FlaxPreTrainedModel", "RegisterArchitecture") if reads(n)]
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
    if reads("Keys"):
        groups[2].append("from hfseq.nn import Keys")
    if reads(r"F\."):
        groups[2].append("from hfseq.nn import functional as F")
    if reads(r"out\."):
        groups[2].append("from hfseq.nn import outputs as out")
    if reads("Mask"):
        groups[2].append("from hfseq.nn.visible import Mask")
    if has_markers:
        groups[2].append("from hfseq.plugins import NotTranslated, refuse_untranslated")
    if reads(r"decoder\."):
        groups[2].append("from hfseq_plugins.decoder import modeling as decoder")
        if reads("FAMILY_OPTIONS"):
            groups[2].append("from hfseq_plugins.decoder.options import FAMILY_OPTIONS")
        groups[2].append("from hfseq_plugins.decoder.sharding import RULES as FAMILY_RULES")
    groups.insert(0, ["from __future__ import annotations"])
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

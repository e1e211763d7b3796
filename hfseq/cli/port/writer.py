"""Writes the plugin file of a port with its imports, classes, sharding rules and hook."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import re
import shutil
import subprocess
import symtable
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hfseq.cli.port.annotations import Annotator
from hfseq.cli.port.constructors import initial_deviation
from hfseq.cli.port.scope import Marker, Translator
from hfseq.cli.port.sharding_rules import sharding_rules
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
    body = "\n\n\n".join(blocks)
    version = importlib.metadata.version("transformers")
    title = f"{file.prefix} for hfseq, ported from Transformers {version} by `hfseq port`."
    head = f'"""{title}\n\nSource: {file.relative_path}\n"""'
    text = f"{head}\n\n{_imports(translator, body, bool(markers))}\n\n\n{body}\n"
    return format_text(text), flax_names


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
    media = [name for name in arguments if name in MEDIA_INPUTS and name != main]
    if media or main != "input_ids" and not is_image:
        lines += _call_of_model([main, *media])
    lines += _stored_collections(translator)
    blocks = ["\n".join(lines)]
    for name in heads:
        if name != "Model":
            mixin = "CausalGeneration, " if name == "ForCausalLM" else ""
            own_prefix = heads[name].literal("base_model_prefix", prefix)
            text = f"class {flax_names[name]}({mixin}{base_name}):\n"
            text += f'    """{translator.file.prefix} for {_task_name(name)}."""\n\n'
            text += f"    module_class = {modules[name]}"
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


def _hook(translator: Translator, flax_names: Mapping[str, str]) -> str:
    heads = "".join(f'        "{name}": {flax},\n' for name, flax in flax_names.items())
    return (
        "@hookimpl\n"
        "def register_architectures(register: RegisterArchitecture) -> None:\n"
        f'    """Registers {translator.file.prefix} and its heads."""\n'
        f"    heads = {{\n{heads}    }}\n"
        f'    register("{translator.file.model_type}", config={translator.config_name}, '
        "heads=heads, sharding=RULES)"
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
    groups[1].append("from flax import nnx")
    groups[1].append(f"from {_config_module(translator)} import {translator.config_name}")
    names = [n for n in ("FlaxPreTrainedModel", "RegisterArchitecture") if reads(n)]
    groups[2].append(f"from hfseq import {', '.join([*names, 'hookimpl', 'nn'])}")
    if reads("UsageError"):
        groups[2].append("from hfseq.errors import UsageError")
    if reads("CausalGeneration"):
        groups[2].append("from hfseq.generation import CausalGeneration")
    modeling = [n for n in ("FlaxVisionPreTrainedModel", "JoinedTensor") if reads(n)]
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

"""JAX/Flax sequence models on Hugging Face Transformers 5.

Public names are imported on first use (PEP 562), so that ``import hfseq`` imports neither JAX nor
Transformers. Importing hfseq has one side effect: it installs an import hook
(`hfseq.plugins.transformers_hook`). When a program imports the Auto classes of Transformers, this
hook registers hfseq's additional architectures with them. Programs for Transformers 4 import
`hfseq.v4`, which restores the old import paths.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from hfseq.plugins import __version__ as __version__
from hfseq.plugins import transformers_hook
from hfseq.plugins.registry import (
    FALLBACK_TASKS,
    TASKS,
    ArchitectureSpec,
    auto_class_name,
    target_name,
)

if TYPE_CHECKING:
    from types import FrameType

    from hfseq.generation import *  # noqa: F403
    from hfseq.modeling import FlaxPreTrainedModel as FlaxPreTrainedModel
    from hfseq.modeling.auto import *  # noqa: F403
    from hfseq.modeling.sentence import CrossEncoder as CrossEncoder
    from hfseq.modeling.sentence import MultiVectorEncoder as MultiVectorEncoder
    from hfseq.modeling.sentence import RetrievalModel as RetrievalModel
    from hfseq.modeling.sentence import SentenceEncoder as SentenceEncoder
    from hfseq.modeling.sentence import SparseEncoder as SparseEncoder
    from hfseq.nn.outputs import *  # noqa: F403
    from hfseq.pipelines.factory import pipeline as pipeline
    from hfseq.plugins import hookimpl as hookimpl
    from hfseq.plugins import register_auto_classes as register_auto_classes
    from hfseq.plugins.hookspecs import RegisterArchitecture as RegisterArchitecture
    from hfseq.training.api import train as train

#: Public names by module. The classes of architectures are in the plugins.
_PUBLIC = {
    "hfseq.plugins.hookspecs": ["RegisterArchitecture", "hookimpl"],
    "hfseq.plugins.transformers_hook": ["register_auto_classes"],
    "hfseq.generation": ["CausalGeneration", "FlaxGenerationMixin"],
    "hfseq.modeling": ["FlaxPreTrainedModel", "FlaxVisionPreTrainedModel"],
    "hfseq.modeling.seq2seq": ["FlaxSeq2SeqPreTrainedModel", "shift_tokens_right"],
    "hfseq.modeling.auto": [
        *(f"Flax{auto_class_name(task)}" for task in TASKS),
        *(f"Flax{auto_class_name(task)}" for task in FALLBACK_TASKS),
        *TASKS.values(),
        "FlaxAutoModelForImageTextToText",
        "FLAX_MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    ],
    "hfseq.modeling.sentence": [
        "CrossEncoder",
        "MultiVectorEncoder",
        "RetrievalModel",
        "SentenceEncoder",
        "SparseEncoder",
    ],
    "hfseq.modeling.pytorch_utils": [
        "convert_pytorch_state_dict_to_flax",
        "load_flax_checkpoint_in_pytorch_model",
        "load_flax_weights_in_pytorch_model",
        "load_pytorch_checkpoint_in_flax_state_dict",
        "rename_key_and_reshape_tensor",
    ],
    # Classes that the example scripts of Transformers 4 defined.
    "hfseq.objectives.collators": [
        "FlaxDataCollatorForBartDenoisingLM",
        "FlaxDataCollatorForLanguageModeling",
        "FlaxDataCollatorForT5MLM",
    ],
    "hfseq.data.sentencepiece": ["SentencePieceUnigramTokenizer"],
    "hfseq.objectives.span_mlm": ["compute_input_and_target_lengths"],
    "hfseq.pipelines.factory": ["pipeline"],
    "hfseq.training.api": ["train"],
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

#: Modules with many similar public classes. A class is public if its name starts with ``Flax`` and
#: contains one of the substrings.
_CLASS_MODULES = {
    "hfseq.nn.outputs": ("Output",),
    "hfseq.generation": ("Output", "Logit", "LengthPenalty"),
}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # computed on use, since it loads the plugins
        return _public_names()
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name.startswith("Flax"):
        value = _flax_class(name)
        if value is None:
            raise _unknown(name, sys._getframe(1))
        return value  # not cached: a plugin that is loaded later may replace it
    elif name.islower() and name[0] != "_" and importlib.util.find_spec(f"hfseq.{name}"):
        value = importlib.import_module(f"hfseq.{name}")
    else:
        raise _unknown(name, sys._getframe(1))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})


def _public_names() -> list[str]:
    heads = {target_name(target) for spec in _architectures() for target in spec.heads.values()}
    class_names = {
        name for module in _CLASS_MODULES if module in sys.modules for name in _class_names(module)
    }
    return sorted({*_MODULES, *heads, *class_names})


def _class_names(module: str) -> list[str]:
    """Returns the names of the public classes of a module in `_CLASS_MODULES`."""
    names = vars(importlib.import_module(module))
    parts = _CLASS_MODULES[module]
    return [n for n in names if n.startswith("Flax") and any(part in n for part in parts)]


def _flax_class(name: str) -> type | None:
    """Returns the output class, logits processor or model class with this name, or `None`.

    Model classes with a head are found by their names in the registry of architectures. Other
    classes of an architecture, such as ``FlaxBertPreTrainedModel``, are looked up in the modules
    that define its heads.
    """
    for module_name, parts in _CLASS_MODULES.items():
        if any(part in name for part in parts) and name in _class_names(module_name):
            return getattr(importlib.import_module(module_name), name)
    for spec in _architectures():
        for task, target in spec.heads.items():
            if target_name(target) == name:
                return spec.load_head(task)
    for spec in _architectures():
        if name.startswith("Flax" + spec.config_name.removesuffix("Config")):
            for task in spec.heads:
                module = sys.modules[spec.load_head(task).__module__]
                if hasattr(module, name):
                    return getattr(module, name)
    return None


def _architectures() -> list[ArchitectureSpec]:
    from hfseq.plugins import load

    return [entry.target for entry in load().architectures.entries()]


def _unknown(name: str, frame: FrameType) -> Exception:
    """Returns the error for an unknown name, with a "did you mean" suggestion.

    The result is an AttributeError, or an ImportError if ``frame`` executes the statement ``from
    hfseq import name``. In that statement, Python would replace an AttributeError by an ImportError
    that does not contain the suggestion.
    """
    message = f"module 'hfseq' has no attribute '{name}'"
    if name.startswith("__"):  # many tools query dunder names: do not discover plugins for them
        return AttributeError(message)
    import opcode

    from hfseq.errors import did_you_mean
    from hfseq.plugins import load

    hint = did_you_mean(name, __dir__()) + load().broken_message()
    if frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name '{name}' from 'hfseq'{hint}", name=name)
    return AttributeError(message + hint)


transformers_hook.install()

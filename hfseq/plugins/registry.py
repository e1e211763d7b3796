"""Tables of what plugins register: a name, whose it is, and a target resolved when asked for."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfseq.errors import PluginConflict, PluginError, UsageError, did_you_mean

__version__ = "0.1.0"

#: ``"package.module:name"``, or the object itself.
Target = object

#: What a head can be for: the suffix of an Auto class, and the name v4 gave its mapping.
TASKS = {
    "Model": "FLAX_MODEL_MAPPING",
    "ForPreTraining": "FLAX_MODEL_FOR_PRETRAINING_MAPPING",
    "ForMaskedLM": "FLAX_MODEL_FOR_MASKED_LM_MAPPING",
    "ForCausalLM": "FLAX_MODEL_FOR_CAUSAL_LM_MAPPING",
    "ForSeq2SeqLM": "FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "ForSequenceClassification": "FLAX_MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "ForTokenClassification": "FLAX_MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "ForQuestionAnswering": "FLAX_MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "ForMultipleChoice": "FLAX_MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
    "ForNextSentencePrediction": "FLAX_MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING",
    "ForImageClassification": "FLAX_MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "ForVision2Seq": "FLAX_MODEL_FOR_VISION_2_SEQ_MAPPING",
    "ForSpeechSeq2Seq": "FLAX_MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
}
#: Auto classes that Transformers 5 calls otherwise.
_RENAMED = {"ForVision2Seq": "AutoModelForImageTextToText"}


def auto_class_name(task: str) -> str:
    """Return the name of the Auto class of ``task`` without its prefix ``Flax``."""
    return "AutoModel" + task.removeprefix("Model")


def torch_auto_class_name(task: str) -> str:
    """Return the name of Transformers 5's own Auto class of ``task``."""
    return _RENAMED.get(task, auto_class_name(task))


def describe_error(error: BaseException) -> str:
    """Return ``TypeName: message`` on one line; hfseq's own errors say it all in their message."""
    message = " ".join(str(error).split())
    return message if isinstance(error, PluginError) else f"{type(error).__name__}: {message}"


def check_target(target: Target, plugin: str, what: str) -> Target:
    """Return ``target``, an object or ``"module:name"``; PluginError if it is neither."""
    if target is None or isinstance(target, str) and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise PluginError(
            f"plugin '{plugin}': the target of {what} is {target!r}; "
            "give an object or a string like 'package.module:name'"
        )
    return target


def target_name(target: Target) -> str:
    """Return the name of the class or function behind ``target`` without importing it."""
    if isinstance(target, str):
        return re.split(r"[.:]", target)[-1]
    return getattr(target, "__name__", type(target).__name__)


def resolve(target: Target, plugin: str) -> Any:
    """Return the object behind ``target``, importing it if need be; PluginError if that fails."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        raise PluginError(
            f"plugin '{plugin}': '{target}' cannot be loaded: {describe_error(error)}"
        ) from error


@dataclass(frozen=True)
class Entry:
    """One registered name; ``target`` may still be a lazy string."""

    name: str
    plugin: str
    target: Any  # a Target; of architectures their ArchitectureSpec
    replaced: Entry | None = None

    def resolve(self) -> Any:
        """Return the object behind the target."""
        return resolve(self.target, self.plugin)


class Registry:
    """Names of one kind, for instance of optimizers, in the order of their registration.

    ``broken`` maps plugins that could not be loaded to the reason: an unknown name may be theirs,
    so the error says so. A name that two plugins claim is usable by neither, and asking for it
    tells why.
    """

    def __init__(self, kind: str, broken: Mapping[str, BaseException]) -> None:
        self.kind = kind
        self._broken = broken
        self._entries: dict[str, Entry] = {}
        self._conflicts: dict[str, PluginConflict] = {}

    def add(
        self, name: str, plugin: str, target: Target, replaceable: Collection[str] = ()
    ) -> None:
        """Register ``target`` under ``name`` for ``plugin``; PluginConflict if it is taken.

        An entry of a plugin that ``over`` names gives way.
        """
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"plugin '{plugin}': the {self.kind} name {name!r} is empty or not text"
            )
        present = self._entries.get(name)
        if present is not None and present.plugin not in replaceable:
            owners = sorted({present.plugin, plugin})
            self._conflicts[name] = PluginConflict(
                f"the {self.kind} '{name}' is registered by both plugin '{owners[0]}' and plugin "
                f"'{owners[1]}'; disable one with HFSEQ_DISABLE_PLUGINS"
                if len(owners) == 2
                else f"plugin '{plugin}' registers the {self.kind} '{name}' twice"
            )
            raise self._conflicts[name]
        self._entries[name] = Entry(name, plugin, target, present)

    def discard(self, plugin: str) -> None:
        """Forget what ``plugin`` registered; what had given way to it is back."""
        kept = {n: e.replaced if e.plugin == plugin else e for n, e in self._entries.items()}
        self._entries = {name: entry for name, entry in kept.items() if entry is not None}

    def get(self, name: str) -> Any:
        """Return the object registered under ``name``, importing it if need be."""
        return self[name].resolve()

    def names(self, plugin: str | None = None) -> list[str]:
        """Return the names, all or those of ``plugin``."""
        return [e.name for e in self._entries.values() if plugin in (None, e.plugin)]

    def entries(self) -> list[Entry]:
        """Return all entries."""
        return list(self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        if name in self._conflicts:
            raise self._conflicts[name]
        if name not in self._entries:
            raise UsageError(self.unknown_message(name))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def unknown_message(self, name: str) -> str:
        """Return the message for a name nobody registered."""
        known = ", ".join(sorted(self._entries)) or "none"
        return (
            f"unknown {self.kind} '{name}'; available: {known}{did_you_mean(name, self._entries)}"
            + broken_plugins_message(self._broken)
        )


def broken_plugins_message(errors: Mapping[str, BaseException]) -> str:
    """Return a clause on plugins that could not be loaded, or an empty string."""
    if not errors:
        return ""
    return "; not loaded: " + "; ".join(f"[{describe_error(error)}]" for error in errors.values())


@dataclass(frozen=True)
class ArchitectureSpec:
    """What a plugin says about one architecture; nothing in it is imported until it is asked for.

    ``heads`` maps tasks (see ``TASKS``) to model classes; a class that no Auto class loads stands
    under the end of its name (``"WithProjection"``). ``sharding`` is a list of rules, or None where
    the architecture has none; ``card`` is a line on it and ``citation`` the BibTeX of its papers,
    both for model cards.
    """

    model_type: str
    config: Target
    heads: Mapping[str, Target] = field(default_factory=dict)
    sharding: Target = None
    card: str | None = None
    citation: str = ""
    plugin: str = ""

    def __post_init__(self) -> None:
        what = f"architecture '{self.model_type}'"
        check_target(self.config, self.plugin, f"the config of {what}")
        if self.sharding is not None:
            check_target(self.sharding, self.plugin, f"the sharding of {what}")
        for task, target in self.heads.items():
            if task not in TASKS and not (task and target_name(target).endswith(task)):
                raise PluginError(
                    f"plugin '{self.plugin}': {what} has a head for the unknown task '{task}', "
                    f"which is not the end of its class's name either; "
                    f"tasks: {', '.join(TASKS)}{did_you_mean(task, TASKS)}"
                )
            check_target(target, self.plugin, f"{task} of {what}")

    @property
    def config_name(self) -> str:
        """The name of the configuration class."""
        return target_name(self.config)

    def load_config(self) -> Any:
        """Return the configuration class."""
        return resolve(self.config, self.plugin)

    def load_head(self, task: str) -> Any:
        """Return the model class for ``task``; UsageError if the architecture has none."""
        if task not in self.heads:
            raise UsageError(
                f"architecture '{self.model_type}' has no '{task}'; it has: {', '.join(self.heads)}"
            )
        return resolve(self.heads[task], self.plugin)

    def load_sharding(self) -> Any:
        """Return the sharding rules, or None."""
        return resolve(self.sharding, self.plugin)

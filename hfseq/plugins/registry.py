"""Registries of the names that plugins register, whose targets are imported on first use."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfseq.errors import PluginConflict, PluginError, UsageError, did_you_mean
from hfseq.plugins.import_hooks import prepare_jax

__version__ = "0.1.0"

#: An object, or a string ``"package.module:name"`` that refers to it.
Target = object

#: Tasks, which are suffixes of Auto classes, and the names of their mappings in Transformers 4.
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
#: Other tasks of Transformers, which had no Flax classes in Transformers 4. Plugins and the hook
#: `fallback_architecture` can provide architectures for these tasks.
FALLBACK_TASKS = (
    *("ForCTC", "ForRNNT", "ForTDT", "ForAudioClassification", "ForAudioFrameClassification"),
    *("ForAudioXVector", "ForTextToSpectrogram", "ForTextToWaveform", "ForAudioTokenization"),
    *("ForObjectDetection", "ForZeroShotObjectDetection", "ForImageSegmentation"),
    *("ForSemanticSegmentation", "ForInstanceSegmentation", "ForUniversalSegmentation"),
    *("ForMaskGeneration", "ForImageMatting", "ForDepthEstimation", "ForNormalEstimation"),
    *("ForPointmapEstimation", "ForPoseEstimation", "ForKeypointDetection", "ForKeypointMatching"),
    *("ForMaskedImageModeling", "ForImageToImage", "ForZeroShotImageClassification"),
    *("ForVideoClassification", "ForTextRecognition", "ForTableRecognition", "ForMultimodalLM"),
    *("ForVisualQuestionAnswering", "ForDocumentQuestionAnswering", "ForTableQuestionAnswering"),
    *("ForTextEncoding", "ForTimeSeriesPrediction", "ForDecision"),
)
#: Auto classes that have another name in Transformers 5.
_RENAMED = {"ForVision2Seq": "AutoModelForImageTextToText"}


def auto_class_name(task: str) -> str:
    """Returns the name of the Auto class of a task, without the prefix ``Flax``."""
    return "AutoModel" + task.removeprefix("Model")


def torch_auto_class_name(task: str) -> str:
    """Returns the name of the Auto class of a task in Transformers 5."""
    return _RENAMED.get(task, auto_class_name(task))


def describe_error(error: BaseException) -> str:
    """Returns ``TypeName: message`` on one line, or only the message of a `PluginError`."""
    message = " ".join(str(error).split())
    return message if isinstance(error, PluginError) else f"{type(error).__name__}: {message}"


def check_target(target: Target, plugin: str, description: str) -> Target:
    """Returns a target unchanged, or raises `PluginError` if it is not valid.

    Args:
        target: An object or a string ``"module:name"``.
        plugin: Name of the plugin, for the message.
        description: Description of the registered item, for the message.
    """
    if target is None or isinstance(target, str) and not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise PluginError(
            f"plugin '{plugin}': the target of {description} is {target!r}; "
            "use an object or a string such as 'package.module:name'"
        )
    return target


def target_name(target: Target) -> str:
    """Returns the name of the class or function of a target, without importing it."""
    if isinstance(target, str):
        return re.split(r"[.:]", target)[-1]
    return getattr(target, "__name__", type(target).__name__)


def resolve(target: Target, plugin: str) -> Any:
    """Returns the object of a target, and imports it if necessary.

    Args:
        target: An object or a string ``"module:name"``.
        plugin: Name of the plugin, for the message.

    Raises:
        PluginError: The object cannot be imported.
    """
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    prepare_jax()
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:
        raise PluginError(
            f"plugin '{plugin}': '{target}' cannot be loaded: {describe_error(error)}"
        ) from error


@dataclass(frozen=True)
class Entry:
    """A registered name and its target.

    Attributes:
        name: The name.
        plugin: Name of the plugin that registered the name.
        target: The registered object, a string that refers to it, or an `ArchitectureSpec`.
        replaced: The in-tree entry that this one replaces, or `None`.
    """

    name: str
    plugin: str
    target: Any
    replaced: Entry | None = None

    def resolve(self) -> Any:
        """Returns the object of the target, and imports it if necessary."""
        return resolve(self.target, self.plugin)


class Registry:
    """The registered names of one kind, for example of optimizers, in order of registration.

    If two plugins register the same name, using the name is an error.

    Args:
        item_kind: Type of the registered items, e.g. ``"optimizer"``, for messages.
        broken: The error of each broken plugin. Messages about unknown names include them, because
            a broken plugin may have registered the name.
    """

    def __init__(self, item_kind: str, broken: Mapping[str, BaseException]) -> None:
        self.kind = item_kind
        self._broken = broken
        self._entries: dict[str, Entry] = {}
        self._conflicts: dict[str, PluginConflict] = {}

    def add(
        self, name: str, plugin: str, target: Target, replaceable: Collection[str] = ()
    ) -> None:
        """Registers a name.

        Args:
            name: The name.
            plugin: Name of the plugin that registers it.
            target: The target.
            replaceable: Plugins whose entries may be replaced.

        Raises:
            PluginConflict: Another plugin has registered the name.
            PluginError: The name is not valid.
        """
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"plugin '{plugin}': the {self.kind} name {name!r} is not a non-empty string"
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
        """Removes the entries of a plugin and restores the entries that they replaced."""
        entries = {n: e.replaced if e.plugin == plugin else e for n, e in self._entries.items()}
        self._entries = {name: entry for name, entry in entries.items() if entry is not None}

    def get(self, name: str) -> Any:
        """Returns the object that is registered under a name, and imports it if necessary."""
        return self[name].resolve()

    def names(self, plugin: str | None = None) -> list[str]:
        """Returns all names, or only the names that one plugin registered."""
        return [e.name for e in self._entries.values() if plugin in (None, e.plugin)]

    def entries(self) -> list[Entry]:
        """Returns all entries."""
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
        """Returns the error message for a name that is not registered."""
        names = ", ".join(sorted(self._entries)) or "none"
        return (
            f"unknown {self.kind} '{name}'; available: {names}{did_you_mean(name, self._entries)}"
            + broken_plugins_message(self._broken)
        )


def broken_plugins_message(errors: Mapping[str, BaseException]) -> str:
    """Returns a clause about broken plugins for error messages, or an empty string."""
    if not errors:
        return ""
    return "; not loaded: " + "; ".join(f"[{describe_error(error)}]" for error in errors.values())


@dataclass(frozen=True)
class ArchitectureSpec:
    """The registration of an architecture, whose classes are imported on first use.

    Attributes:
        model_type: The model type.
        config: The configuration class.
        heads: Model classes by task (see `TASKS`). If a class has no Auto class, its key is the
            end of the class name, such as ``"WithProjection"``.
        sharding: List of sharding rules, or `None`.
        card: One line about the architecture for model cards, or `None`.
        citation: BibTeX entries of the papers about the architecture, for model cards.
        plugin: Name of the plugin that registers the architecture.
    """

    model_type: str
    config: Target
    heads: Mapping[str, Target] = field(default_factory=dict)
    sharding: Target = None
    card: str | None = None
    citation: str = ""
    plugin: str = ""

    def __post_init__(self) -> None:
        description = f"architecture '{self.model_type}'"
        check_target(self.config, self.plugin, f"the config of {description}")
        if self.sharding is not None:
            check_target(self.sharding, self.plugin, f"the sharding of {description}")
        for task, target in self.heads.items():
            is_task = task in TASKS or task in FALLBACK_TASKS
            if not is_task and not (task and target_name(target).endswith(task)):
                raise PluginError(
                    f"plugin '{self.plugin}': {description} has a head for the unknown task "
                    f"'{task}', which is also not the end of the class name "
                    f"{target_name(target)}; "
                    f"tasks: {', '.join(TASKS)}{did_you_mean(task, TASKS)}"
                )
            check_target(target, self.plugin, f"{task} of {description}")

    @property
    def config_name(self) -> str:
        """Name of the configuration class."""
        return target_name(self.config)

    def load_config(self) -> Any:
        """Returns the configuration class."""
        return resolve(self.config, self.plugin)

    def load_head(self, task: str) -> Any:
        """Returns the model class for a task. Raises `UsageError` if the architecture has none."""
        if task not in self.heads:
            raise UsageError(
                f"architecture '{self.model_type}' has no '{task}'; it has: {', '.join(self.heads)}"
            )
        return resolve(self.heads[task], self.plugin)

    def load_sharding(self) -> Any:
        """Returns the sharding rules, or `None`."""
        return resolve(self.sharding, self.plugin)

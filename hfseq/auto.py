"""``FlaxAutoModel*``: from a configuration or a checkpoint to the Flax class of its architecture.

They are transformers' Auto classes over mappings that read hfseq's plugin registry, so they
download, override and trust remote code as people know it. The base class is private in
transformers; this module and `hfseq.transformers_hook` are the only ones that touch such names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from transformers.models.auto.auto_factory import _BaseAutoModelClass

from hfseq import config_checks, plugins
from hfseq.errors import CheckpointError, HfseqError, UsageError
from hfseq.registry import ArchitectureSpec, auto_class_name, describe
from hfseq.resolve import native_description, require_config

#: Arguments that say where and how to download; the configuration and the weights need them both.
HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "local_files_only", "proxies"),
    *("revision", "subfolder", "token"),
)
#: Arguments on code that the checkpoint ships.
CODE_ARGUMENTS = ("trust_remote_code", "code_revision")
#: Arguments of the model that the configuration must not swallow or copy.
MODEL_ARGUMENTS = (
    *("dtype", "attn_implementation", "precision", "scan_layers", "gradient_checkpointing"),
    *("input_shape", "seed", "param_dtype", "remat_policy", "sharding", "_do_init"),
)


class ArchitectureMapping(MutableMapping[type, Any]):
    """Configuration class -> model class for one task, read from the plugin registry.

    A configuration class is recognised by its ``model_type`` and its name, so asking imports
    nothing. ``wanted`` selects architectures, ``value`` makes what is returned for one; the
    defaults are all of them and their model classes.
    """

    def __init__(
        self,
        task: str,
        wanted: Callable[[ArchitectureSpec], bool] = lambda spec: True,
        value: Callable[[ArchitectureSpec, str], Any] = ArchitectureSpec.load_head,
    ) -> None:
        self.task = task
        self._wanted, self._value = wanted, value
        self._registered: dict[type, Any] = {}
        self._values: dict[str, tuple[ArchitectureSpec, Any]] = {}

    def specs(self) -> list[ArchitectureSpec]:
        """Return the registered architectures that have a head for the task."""
        specs = [entry.target for entry in plugins.load().architectures.entries()]
        return [spec for spec in specs if self.task in spec.heads and self._wanted(spec)]

    def register(self, key: type, value: Any, exist_ok: bool = False) -> None:
        """Add a model class for a configuration class, as ``FlaxAutoModel.register`` does."""
        if key in self and not exist_ok:
            raise UsageError(f"{key.__name__} already has a class for {self.task}: {self[key]}")
        self[key] = value

    def _find(self, key: Any) -> ArchitectureSpec | None:
        model_type, name = getattr(key, "model_type", None), getattr(key, "__name__", None)
        for spec in self.specs():
            if spec.model_type == model_type and spec.config_name == name:
                return spec
        return None

    def __getitem__(self, key: type) -> Any:
        if key in self._registered:
            return self._registered[key]
        spec = self._find(key)
        if spec is None:
            raise KeyError(key)
        of, value = self._values.get(spec.model_type, (None, None))
        if of is not spec:
            value = self._value(spec, self.task)
            self._values[spec.model_type] = (spec, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._registered or self._find(key) is not None

    def __setitem__(self, key: type, value: Any) -> None:
        self._registered[key] = value

    def __delitem__(self, key: type) -> None:
        del self._registered[key]

    def __iter__(self) -> Iterator[type]:
        """Yield the configuration classes; one that does not import is left out with a warning."""
        for spec in self.specs():
            try:
                yield spec.load_config()
            except HfseqError as error:
                plugins.logger.warning("%s", describe(error))
        yield from list(self._registered)

    def __len__(self) -> int:
        return len(self.specs()) + len(self._registered)


class _FlaxAutoModel(_BaseAutoModelClass):
    _model_mapping: ArchitectureMapping  # type: ignore[assignment]

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Return a freshly initialised model of the architecture of ``config``."""
        if cls._has_remote_code(config):
            return super().from_config(config, **kwargs)
        kwargs.pop("trust_remote_code", None)
        return cls._model_class(config)._from_config(config, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Any:
        """Load a model from a directory or from the Hub.

        Arguments that are attributes of the configuration override it, the others go to the model
        class. Where config.json names a native architecture under ``hfseq``, that one is loaded.

        **Raises:** CheckpointError where there is no such directory, UsageError (a ValueError) for
        an architecture that has no Flax class for this task.
        """
        name = os.path.expanduser(os.fspath(pretrained_model_name_or_path))
        _check_directory(name)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        held = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        trust = {key: kwargs.pop(key) for key in CODE_ARGUMENTS if key in kwargs}
        trust["trust_remote_code"] = bool(trust.get("trust_remote_code"))  # never a question
        config, kwargs = _load_config(name, hub, trust, kwargs)
        if cls._has_remote_code(config):
            if not trust["trust_remote_code"] and type(config) not in cls._model_mapping:
                config_checks.refuse_code(config.auto_map, name)
            return super().from_pretrained(
                name, *model_args, config=config, **hub, **trust, **held, **kwargs
            )
        load = cls._model_class(config).from_pretrained
        return load(name, *model_args, config=config, **hub, **held, **kwargs)

    @classmethod
    def register(cls, config_class: type, model_class: Any, exist_ok: bool = False) -> None:
        """Make ``model_class`` what this class returns for ``config_class``, in this process."""
        remote = model_class.__module__.startswith("transformers_modules.")
        if remote and config_class.__module__.startswith("transformers."):
            return  # trusted for one checkpoint, which is no reason to use it for all of that type
        super().register(config_class, model_class, exist_ok=exist_ok)

    @classmethod
    def _has_remote_code(cls, config: Any) -> bool:
        return cls.__name__ in (getattr(config, "auto_map", None) or {})

    @classmethod
    def _model_class(cls, config: Any) -> Any:
        mapping = cls._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
        known = [spec.model_type for spec in mapping.specs()]
        known += [key.__name__ for key in mapping._registered]
        raise UsageError(
            f"Unrecognized configuration class {type(config)} for this kind of AutoModel: "
            f"{cls.__name__}. Its model type is '{getattr(config, 'model_type', '')}'; known are: "
            f"{', '.join(sorted(known)) or 'none'}{plugins.load().broken()}"
        )


def _check_directory(name: str) -> None:
    """Tell an absent directory from a name on the Hub, which transformers does not."""
    looks_local = os.path.isabs(name) or name.startswith(".") or name.count("/") > 1
    if looks_local and not os.path.exists(name):
        raise CheckpointError(
            f"there is no directory '{name}' (in '{Path.cwd()}'); give an existing directory or "
            "the name of a model on the Hub, such as 'FacebookAI/roberta-base'"
        )


def _load_config(
    name: str, hub: dict[str, Any], trust: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, with overrides from ``kwargs``, and the arguments left over."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils.hub import resolve_revision

    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, kwargs
    if config is None:
        require_config(name, hub)
        # everything that follows, the weights too, comes from one commit
        known = {key: hub[key] for key in ("token", "local_files_only", "cache_dir") if key in hub}
        hub["revision"] = resolve_revision(name, hub.get("revision"), **known)
    source = name if config is None else config
    place = str(source)
    with config_checks.reading(place):
        stored, _ = PreTrainedConfig.get_config_dict(source, **hub)
        config_checks.check_mapping(stored, place)
        native = stored.get("hfseq")
        if native is None:
            kwargs["return_unused_kwargs"] = True
            refuse_untrusted_config(stored, trust["trust_remote_code"], place)
            made, unused = AutoConfig.from_pretrained(source, **hub, **trust, **kwargs)
        else:
            made, unused = _native_config(name, stored, native, kwargs)
    config_checks.check_numbers(made, place)
    return made, unused


def refuse_untrusted_config(stored: Mapping[str, Any], trusted: bool, place: str) -> None:
    """Refuse a configuration that only code of its checkpoint can read, unless that is trusted.

    **Raises:** ConfigError that names the code.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto_map = stored.get("auto_map")
    wants_code = isinstance(auto_map, Mapping) and "AutoConfig" in auto_map
    if wants_code and not trusted and stored.get("model_type") not in CONFIG_MAPPING:
        config_checks.refuse_code(auto_map, place)


def _native_config(
    name: str, stored: dict[str, Any], native: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Build the native configuration of a checkpoint that is stored as its stock twin."""
    if not isinstance(native, dict) or not isinstance(native.get("model_type"), str):
        raise CheckpointError(f"{name}/config.json: 'hfseq' is {native!r}, without a model_type")
    try:
        spec = plugins.load().architectures.get(native["model_type"])
    except UsageError as error:
        raise UsageError(f"{name}/config.json names a native architecture: {error}") from None
    described = native_description(stored)
    return spec.load_config().from_dict(described, return_unused_kwargs=True, **kwargs)


def _auto_class(task: str) -> type[_FlaxAutoModel]:
    name = f"Flax{auto_class_name(task)}"
    what = "without a head" if task == "Model" else f"with the head of ``{auto_class_name(task)}``"
    doc = f"Loads or makes the Flax model {what} that fits a configuration."
    content = {"__doc__": doc, "__module__": __name__, "_model_mapping": ArchitectureMapping(task)}
    return type(name, (_FlaxAutoModel,), content)


FlaxAutoModel = _auto_class("Model")
FlaxAutoModelForPreTraining = _auto_class("ForPreTraining")
FlaxAutoModelForMaskedLM = _auto_class("ForMaskedLM")
FlaxAutoModelForCausalLM = _auto_class("ForCausalLM")
FlaxAutoModelForSeq2SeqLM = _auto_class("ForSeq2SeqLM")
FlaxAutoModelForSequenceClassification = _auto_class("ForSequenceClassification")
FlaxAutoModelForTokenClassification = _auto_class("ForTokenClassification")
FlaxAutoModelForQuestionAnswering = _auto_class("ForQuestionAnswering")
FlaxAutoModelForMultipleChoice = _auto_class("ForMultipleChoice")
FlaxAutoModelForNextSentencePrediction = _auto_class("ForNextSentencePrediction")

FLAX_MODEL_MAPPING = FlaxAutoModel._model_mapping
FLAX_MODEL_FOR_PRETRAINING_MAPPING = FlaxAutoModelForPreTraining._model_mapping
FLAX_MODEL_FOR_MASKED_LM_MAPPING = FlaxAutoModelForMaskedLM._model_mapping
FLAX_MODEL_FOR_CAUSAL_LM_MAPPING = FlaxAutoModelForCausalLM._model_mapping
FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING = FlaxAutoModelForSeq2SeqLM._model_mapping
FLAX_MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING = (
    FlaxAutoModelForSequenceClassification._model_mapping
)
FLAX_MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING = FlaxAutoModelForTokenClassification._model_mapping
FLAX_MODEL_FOR_QUESTION_ANSWERING_MAPPING = FlaxAutoModelForQuestionAnswering._model_mapping
FLAX_MODEL_FOR_MULTIPLE_CHOICE_MAPPING = FlaxAutoModelForMultipleChoice._model_mapping
FLAX_MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING = (
    FlaxAutoModelForNextSentencePrediction._model_mapping
)

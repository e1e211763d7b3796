"""``FlaxAutoModel*``: the Auto classes, which select the Flax class for a checkpoint.

They are subclasses of Transformers' private base class of Auto classes, so downloads, overrides of
the configuration and remote code work as in Transformers. The mappings from configuration classes
to model classes read hfseq's plugin registry.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, overload

from transformers.models.auto.auto_factory import _BaseAutoModelClass

from hfseq import plugins
from hfseq.checkpoints import config as configs
from hfseq.checkpoints.config import (
    check_directory,
    check_trusted_config,
    class_names,
    model_type,
    native_config_dict,
    require_config,
)
from hfseq.errors import CheckpointError, HfseqError, UsageError, did_you_mean, first_line
from hfseq.modeling.keywords import translate_keywords
from hfseq.plugins import FALLBACK_TASKS, ArchitectureSpec
from hfseq.plugins.registry import auto_class_name, describe_error, target_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger("hfseq")

#: Download arguments, which are used for the configuration and for the weights.
HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "local_files_only", "proxies"),
    *("revision", "subfolder", "token"),
)


#: Arguments that concern custom code in the repository of the checkpoint.
CODE_ARGUMENTS = ("trust_remote_code", "code_revision")


#: Arguments of the model that must not be passed to the configuration.
MODEL_ARGUMENTS = (
    *("dtype", "attn_implementation", "precision", "scan_layers", "gradient_checkpointing"),
    *("input_shape", "seed", "param_dtype", "remat_policy", "sharding", "_do_init"),
    *("extra_sharding", "mesh", "output_loading_info", "from_pt", "from_flax"),
)


class ArchitectureMapping(MutableMapping[type, Any]):
    """Maps configuration classes to the model classes of a task in the plugin registry.

    Configuration classes are identified by ``model_type`` and class name, so that lookups do not
    import modules.

    Args:
        task: The task, such as "ForMaskedLM".
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self._registered: dict[type, Any] = {}
        self._values: dict[str, tuple[ArchitectureSpec, Any]] = {}

    def specs(self) -> list[ArchitectureSpec]:
        """Returns the registered architectures that have a head for the task."""
        specs = [entry.target for entry in plugins.load().architectures.entries()]
        return [spec for spec in specs if self.task in spec.heads]

    def register(self, key: type, value: type, exist_ok: bool = False) -> None:
        """Adds a model class for a configuration class. ``FlaxAutoModel.register`` calls this."""
        if key in self and not exist_ok:
            raise UsageError(f"{key.__name__} already has a class for {self.task}: {self[key]}")
        self[key] = value

    def _find(self, key: object) -> ArchitectureSpec | None:
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
        cached_spec, value = self._values.get(spec.model_type, (None, None))
        if cached_spec is not spec:
            value = spec.load_head(self.task)
            self._values[spec.model_type] = (spec, value)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._registered or self._find(key) is not None

    def __setitem__(self, key: type, value: type) -> None:
        self._registered[key] = value

    def __delitem__(self, key: type) -> None:
        del self._registered[key]

    def __iter__(self) -> Iterator[type]:
        """Yields the configuration classes. Classes that cannot be imported cause a warning."""
        for spec in self.specs():
            try:
                yield spec.load_config()
            except HfseqError as error:
                logger.warning("%s", describe_error(error))
        yield from list(self._registered)

    def __len__(self) -> int:
        return len(self.specs()) + len(self._registered)


class _FlaxAutoModel(_BaseAutoModelClass):
    _model_mapping: ArchitectureMapping  # type: ignore[assignment]

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        bridge: bool | Literal["auto"] = False,
        **kwargs: Any,
    ) -> FlaxPreTrainedModel:
        """Returns a newly initialized model of the architecture of ``config``.

        Args:
            config: The configuration.
            bridge: See :meth:`from_pretrained`.
            **kwargs: Arguments of the model class.
        """
        if cls._has_remote_code(config) and not bridge:
            return super().from_config(config, **kwargs)
        trust_remote_code = kwargs.pop("trust_remote_code", None)
        if bridge:
            _check_bridge(bool(trust_remote_code), config)
        return cls._model_class(config, bridge)._from_config(config, **kwargs)

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        _do_init: Literal[False],
        **kwargs: Any,
    ) -> tuple[FlaxPreTrainedModel, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        output_loading_info: Literal[True],
        **kwargs: Any,
    ) -> tuple[FlaxPreTrainedModel, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> FlaxPreTrainedModel: ...

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        bridge: bool | Literal["auto"] = False,
        **kwargs: Any,
    ) -> Any:
        """Loads a model from a directory or from the Hub.

        If config.json has an entry ``hfseq``, this entry contains the ``model_type`` of an
        architecture of hfseq, which is loaded instead of the architecture of Transformers.

        Args:
            pretrained_model_name_or_path: A directory or a repository.
            *model_args: Positional arguments of the model class.
            bridge: ``True`` runs the PyTorch code of Transformers in JAX (docs/bridge.md), which
                needs PyTorch. ``"auto"`` uses the bridge only if hfseq has no Flax class for the
                checkpoint. The default is ``False``, except for a directory that contains programs
                of ``hfseq bridge export`` and for which hfseq has no Flax class.
            **kwargs: Arguments that are attributes of the configuration override these attributes.
                All other arguments are passed to the model class.

        Raises:
            CheckpointError: The directory does not exist.
            UsageError: The architecture has no Flax class for this task. ``UsageError`` is a
                subclass of ``ValueError``.
        """
        name = os.path.expanduser(os.fspath(pretrained_model_name_or_path))
        check_directory(name)
        kwargs = translate_keywords(kwargs)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        model_options = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        code_options = {key: kwargs.pop(key) for key in CODE_ARGUMENTS if key in kwargs}
        # A missing trust_remote_code means False. Transformers would prompt the user.
        code_options["trust_remote_code"] = bool(code_options.get("trust_remote_code"))
        from hfseq.modeling import lora  # imports jax, which the mappings do not need

        adapter, base, base_options = lora.find_base(name, hub)
        config, kwargs = _load_config(base, base_options, code_options, kwargs)
        if adapter is None:
            hub = base_options  # contains the commit from which the configuration was loaded
        bridge = bridge or _has_programs(base) and type(config) not in cls._model_mapping
        if bridge:
            _check_bridge(code_options["trust_remote_code"], config)
        elif cls._has_remote_code(config):
            if not code_options["trust_remote_code"] and type(config) not in cls._model_mapping:
                configs.raise_untrusted_code(config.auto_map, name)
            return super().from_pretrained(
                name, *model_args, config=config, **hub, **code_options, **model_options, **kwargs
            )
        load = cls._model_class(config, bridge, base).from_pretrained
        return load(name, *model_args, config=config, **hub, **model_options, **kwargs)

    @classmethod
    def register(cls, config_class: type, model_class: type, exist_ok: bool = False) -> None:
        """Registers ``model_class`` for ``config_class`` in this process."""
        remote = model_class.__module__.startswith("transformers_modules.")
        if remote and config_class.__module__.startswith("transformers."):
            return  # custom code of one checkpoint must not apply to other checkpoints of this type
        super().register(config_class, model_class, exist_ok=exist_ok)

    @classmethod
    def _has_remote_code(cls, config: PreTrainedConfig) -> bool:
        auto_map = getattr(config, "auto_map", None)
        return isinstance(auto_map, Mapping) and cls.__name__ in auto_map

    @classmethod
    def _model_class(
        cls, config: PreTrainedConfig, bridge: bool | str = False, source: str | None = None
    ) -> Any:
        mapping = cls._model_mapping
        if bridge and not (bridge == "auto" and type(config) in mapping._registered):
            spec = plugins.load().find_architecture(config.model_type, mapping.task, bridge)
            return spec.load_head(mapping.task)
        if type(config) in mapping:
            return mapping[type(config)]
        model_types = [spec.model_type for spec in mapping.specs()]
        model_types += [key.__name__ for key in mapping._registered]
        raise UsageError(
            f"Unrecognized configuration class {type(config)} for this kind of AutoModel: "
            f"{cls.__name__}. Its model type is '{getattr(config, 'model_type', '')}'. "
            f"Known types: "
            f"{', '.join(sorted(model_types)) or 'none'}{plugins.load().broken_message()}. "
            "With bridge=True, hfseq runs the PyTorch code of other model types in JAX "
            "(docs/bridge.md)"
        )


def _has_programs(source: str) -> bool:
    """Returns whether a directory contains programs that ``hfseq bridge export`` wrote."""
    return os.path.isfile(os.path.join(source, "bridge", "index.json"))


def _check_bridge(trust_remote_code: bool, config: PreTrainedConfig) -> None:
    """Raises a UsageError for a checkpoint with remote code, which the bridge does not run."""
    name = getattr(config, "_name_or_path", "") or type(config).__name__
    if trust_remote_code or type(config).__module__.startswith("transformers_modules."):
        raise UsageError(
            f"bridge=True runs the code of Transformers, not the code in {name}: remove "
            "trust_remote_code, or load the model without the bridge if it has a Flax class"
        )


def _load_config(
    name: str, hub: dict[str, Any], code_options: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration with overrides from ``kwargs``, and the remaining arguments."""
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils.hub import resolve_revision

    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return config, kwargs
    if config is None:
        require_config(name, hub)
        # load everything, including the weights, from one commit
        resolve_options = {
            key: hub[key] for key in ("token", "local_files_only", "cache_dir") if key in hub
        }
        hub["revision"] = resolve_revision(name, hub.get("revision"), **resolve_options)
    source = name if config is None else config
    check_directory(source)
    with configs.wrap_read_errors(str(source)):
        stored, _ = PreTrainedConfig.get_config_dict(source, **hub)
        configs.check_mapping(stored, str(source))
        native = stored.get("hfseq")
        if native is None:
            kwargs["return_unused_kwargs"] = True
            check_trusted_config(stored, code_options["trust_remote_code"], str(source))
            loaded, unused = AutoConfig.from_pretrained(source, **hub, **code_options, **kwargs)
        else:
            if not isinstance(native, dict) or not isinstance(native.get("model_type"), str):
                raise CheckpointError(
                    f"{name}/config.json: the entry 'hfseq' is {native!r}, which has no model_type"
                )
            try:
                spec = plugins.load().architectures.get(native["model_type"])
            except UsageError as error:
                raise UsageError(
                    f"{name}/config.json: the entry 'hfseq' has an unknown model_type: {error}"
                ) from None
            # The rest of config.json describes the equivalent architecture of Transformers.
            loaded, unused = spec.load_config().from_dict(
                native_config_dict(stored), return_unused_kwargs=True, **kwargs
            )
    configs.check_numbers(loaded, str(source))
    return loaded, unused


def _auto_class(task: str) -> type[_FlaxAutoModel]:
    name = f"Flax{auto_class_name(task)}"
    description = (
        "without a head" if task == "Model" else f"with the head of ``{auto_class_name(task)}``"
    )
    doc = f"Loads or creates the Flax model {description} that belongs to a configuration."
    namespace = {
        "__doc__": doc,
        "__module__": __name__,
        "_model_mapping": ArchitectureMapping(task),
    }
    return type(name, (_FlaxAutoModel,), namespace)


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
FlaxAutoModelForImageClassification = _auto_class("ForImageClassification")
FlaxAutoModelForVision2Seq = _auto_class("ForVision2Seq")
FlaxAutoModelForSpeechSeq2Seq = _auto_class("ForSpeechSeq2Seq")
#: The name in Transformers 5 of the Auto class with the task ForVision2Seq.
FlaxAutoModelForImageTextToText = type(
    "FlaxAutoModelForImageTextToText", (FlaxAutoModelForVision2Seq,), {"__module__": __name__}
)
FlaxAutoModelForCTC = _auto_class("ForCTC")
FlaxAutoModelForAudioClassification = _auto_class("ForAudioClassification")
for _task in FALLBACK_TASKS:
    globals().setdefault(f"Flax{auto_class_name(_task)}", _auto_class(_task))


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
FLAX_MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING = FlaxAutoModelForImageClassification._model_mapping
FLAX_MODEL_FOR_VISION_2_SEQ_MAPPING = FlaxAutoModelForVision2Seq._model_mapping
FLAX_MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING = FlaxAutoModelForSpeechSeq2Seq._model_mapping
# Transformers 4 has no Auto class for this task.
FLAX_MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING = FlaxAutoModelForAudioClassification._model_mapping


def load(auto_class: Any, name: str, **options: Any) -> Any:
    """Calls ``auto_class.from_pretrained(name)`` and converts errors to hfseq's error classes.

    Raises:
        CheckpointError: Transformers cannot load the object, or a package is missing.
    """
    check_directory(name)
    try:
        return auto_class.from_pretrained(name, **options)
    except HfseqError:
        raise
    except ImportError as error:
        package = error.name if isinstance(error, ModuleNotFoundError) else None
        if re.search("requires the sentencepiece", str(error), re.I):
            package = "sentencepiece"
        problem = (
            f"is not installed: pip install {package}"
            if package
            else f"cannot be imported: {first_line(error)}"
        )
        raise CheckpointError(f"'{name}' requires a package that {problem}") from error
    except Exception as error:  # tokenizers raises plain exceptions
        first = first_line(error)
        raise CheckpointError(f"{auto_class.__name__} cannot load '{name}': {first}") from error


def find_class(
    config_dict: Mapping[str, Any],
    source: str,
    *,
    task: str | None = None,
    model_class: str | None = None,
) -> Any:
    """Returns the Flax class of a checkpoint.

    Args:
        config_dict: The content of config.json.
        source: The checkpoint, for messages.
        task: A task of :data:`hfseq.plugins.TASKS` that selects the class.
        model_class: The name of the class, with or without the prefix ``Flax``. Without ``task``
            and ``model_class``, ``architectures`` in config.json selects the class.

    Raises:
        CheckpointError: config.json has no ``model_type``.
        UsageError: The class is unknown, or neither config.json nor the arguments select one.
    """
    native_type = model_type(config_dict)
    if native_type is None:
        raise CheckpointError(f"{source}/config.json has no model_type")
    registry = plugins.load().architectures
    spec: ArchitectureSpec = registry.get(native_type)
    if task is not None:
        return spec.load_head(task)
    if model_class is not None:
        tasks = {target_name(target): task for task, target in spec.heads.items()}
        class_name = model_class if model_class.startswith("Flax") else f"Flax{model_class}"
        if class_name not in tasks:
            raise UsageError(
                f"--model_class {model_class} is not a class of '{spec.model_type}', which has "
                f"{', '.join(tasks)}{did_you_mean(class_name, tasks)}"
            )
        return spec.load_head(tasks[class_name])
    names = class_names(config_dict)
    # config.json may contain the configuration of an equivalent architecture of Transformers. Its
    # class name is then that of the Transformers architecture.
    stock_type = str(config_dict.get("model_type"))
    stock_spec = registry.get(stock_type) if stock_type in registry else spec
    for head in spec.heads:
        classes = [owner.load_head(head) for owner in (spec, stock_spec) if head in owner.heads]
        if {name for cls in classes for name in (cls.torch_class_name(), cls.__name__)} & {*names}:
            return spec.load_head(head)
    raise UsageError(
        f"the architectures of {source}/config.json ({', '.join(names) or 'none'}) do not include "
        f"a class of '{native_type}': pass --task, one of {', '.join(spec.heads)}"
    )

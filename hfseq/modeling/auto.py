"""``FlaxAutoModel*``: from a configuration or a checkpoint to the Flax class of its architecture.

They are transformers' Auto classes over mappings that read hfseq's plugin registry, so they
download, override and trust remote code as people know it. The base class is private in
transformers; this module and `hfseq.plugins.transformers_hook` alone touch such names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from hfseq.plugins import ArchitectureSpec
from hfseq.plugins.registry import auto_class_name, target_name
from hfseq.plugins.transformers_hook import ArchitectureMapping

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


class _FlaxAutoModel(_BaseAutoModelClass):
    _model_mapping: ArchitectureMapping  # type: ignore[assignment]

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
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
        check_directory(name)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        held = {key: kwargs.pop(key) for key in MODEL_ARGUMENTS if key in kwargs}
        trust = {key: kwargs.pop(key) for key in CODE_ARGUMENTS if key in kwargs}
        trust["trust_remote_code"] = bool(trust.get("trust_remote_code"))  # never a question
        from hfseq.modeling import lora  # imports jax, which the mappings do without

        adapter = lora.find_adapter(name, hub)
        base = name if adapter is None else adapter.base
        config, kwargs = _load_config(base, hub, trust, kwargs)
        if cls._has_remote_code(config):
            if not trust["trust_remote_code"] and type(config) not in cls._model_mapping:
                configs.raise_untrusted_code(config.auto_map, name)
            return super().from_pretrained(
                name, *model_args, config=config, **hub, **trust, **held, **kwargs
            )
        load = cls._model_class(config).from_pretrained
        return load(name, *model_args, config=config, **hub, **held, **kwargs)

    @classmethod
    def register(cls, config_class: type, model_class: type, exist_ok: bool = False) -> None:
        """Make ``model_class`` what this class returns for ``config_class``, in this process."""
        remote = model_class.__module__.startswith("transformers_modules.")
        if remote and config_class.__module__.startswith("transformers."):
            return  # trusted for one checkpoint, which is no reason to use it for all of that type
        super().register(config_class, model_class, exist_ok=exist_ok)

    @classmethod
    def _has_remote_code(cls, config: PreTrainedConfig) -> bool:
        auto_map = getattr(config, "auto_map", None)
        return isinstance(auto_map, Mapping) and cls.__name__ in auto_map

    @classmethod
    def _model_class(cls, config: PreTrainedConfig) -> Any:
        mapping = cls._model_mapping
        if type(config) in mapping:
            return mapping[type(config)]
        known = [spec.model_type for spec in mapping.specs()]
        known += [key.__name__ for key in mapping._registered]
        raise UsageError(
            f"Unrecognized configuration class {type(config)} for this kind of AutoModel: "
            f"{cls.__name__}. Its model type is '{getattr(config, 'model_type', '')}'; known are: "
            f"{', '.join(sorted(known)) or 'none'}{plugins.load().broken_message()}"
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
    with configs.wrap_read_errors(str(source)):
        stored, _ = PreTrainedConfig.get_config_dict(source, **hub)
        configs.check_mapping(stored, str(source))
        native = stored.get("hfseq")
        if native is None:
            kwargs["return_unused_kwargs"] = True
            check_trusted_config(stored, trust["trust_remote_code"], str(source))
            made, unused = AutoConfig.from_pretrained(source, **hub, **trust, **kwargs)
        else:
            if not isinstance(native, dict) or not isinstance(native.get("model_type"), str):
                raise CheckpointError(
                    f"{name}/config.json: 'hfseq' is {native!r}, without a model_type"
                )
            try:
                spec = plugins.load().architectures.get(native["model_type"])
            except UsageError as error:
                raise UsageError(
                    f"{name}/config.json names a native architecture: {error}"
                ) from None
            # It is stored as its stock twin.
            made, unused = spec.load_config().from_dict(
                native_config_dict(stored), return_unused_kwargs=True, **kwargs
            )
    configs.check_numbers(made, str(source))
    return made, unused


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
FlaxAutoModelForImageClassification = _auto_class("ForImageClassification")
FlaxAutoModelForVision2Seq = _auto_class("ForVision2Seq")
FlaxAutoModelForSpeechSeq2Seq = _auto_class("ForSpeechSeq2Seq")


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
# Transformers 4 had no Auto class of it.
FLAX_MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING = ArchitectureMapping("ForAudioClassification")


def load(auto: Any, name: str, **options: Any) -> Any:
    """Return ``auto.from_pretrained(name)``; what Transformers raises becomes one of our errors."""
    try:
        return auto.from_pretrained(name, **options)
    except HfseqError:
        raise
    except ImportError as error:
        package = "sentencepiece" if "sentencepiece" in str(error).lower() else error.name
        hint = f": pip install {package}" if package else f": {first_line(error)}"
        raise CheckpointError(f"'{name}' needs a package that is not installed{hint}") from error
    except Exception as error:  # transformers' and tokenizers' own; the latter are no more exact
        first = first_line(error)
        raise CheckpointError(f"{auto.__name__} cannot load '{name}': {first}") from error


def find_class(
    stored: Mapping[str, Any],
    place: str,
    *,
    task: str | None = None,
    model_class: str | None = None,
) -> Any:
    """Return the Flax class that a checkpoint's config.json, or the user, names.

    ``task`` is a task of :data:`hfseq.plugins.TASKS`; ``model_class`` a class with or without its
    prefix ``Flax``.

    **Raises:** UsageError where nothing or an unknown name is named.
    """
    kind = model_type(stored)
    if kind is None:
        raise CheckpointError(f"{place}/config.json names no model_type")
    registry = plugins.load().architectures
    spec: ArchitectureSpec = registry.get(kind)
    if task is not None:
        return spec.load_head(task)
    if model_class is not None:
        tasks = {target_name(target): task for task, target in spec.heads.items()}
        wanted = model_class if model_class.startswith("Flax") else f"Flax{model_class}"
        if wanted not in tasks:
            raise UsageError(
                f"--model_class {model_class} is no class of '{spec.model_type}'; it has "
                f"{', '.join(tasks)}{did_you_mean(wanted, tasks)}"
            )
        return spec.load_head(tasks[wanted])
    names = class_names(stored)
    # Stored as its stock twin, a model has the name of the twin's class.
    stock = str(stored.get("model_type"))
    twin = registry.get(stock) if stock in registry else spec
    for head in spec.heads:
        classes = [one.load_head(head) for one in (spec, twin) if head in one.heads]
        if {name for cls in classes for name in (cls.torch_class_name(), cls.__name__)} & {*names}:
            return spec.load_head(head)
    raise UsageError(
        f"{place}/config.json names {', '.join(names) or 'no architecture'}, which is no class of "
        f"'{kind}': give --task, one of {', '.join(spec.heads)}"
    )

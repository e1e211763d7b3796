"""Reads, validates and writes config.json, including files from untrusted sources."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq.checkpoints import files, hub
from hfseq.checkpoints.hub import check_directory
from hfseq.checkpoints.quantized import record_dequantization
from hfseq.checkpoints.weights import Tensor
from hfseq.errors import (
    CheckpointError,
    ConfigError,
    HfseqError,
    UsageError,
    WeightsError,
    did_you_mean,
    first_line,
    one_line,
    parse_json,
    write_atomically,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("hfseq.checkpoints.config")

MAX_SIZE = 2**31 - 1  # sizes of models fit into int32
MAX_LAYERS = 2048  # the deepest published transformers have 1,000 layers
# A model is rejected if its configuration is out of proportion to its weight file. Up to these
# limits it is always accepted, because building it takes negligible time and memory.
FREE_LAYERS = 256  # number of layers
FREE_POSITIONS = 2**20  # values in the position embeddings
FREE_NEW_VALUES = 2**24  # newly initialized values
_SIZES = re.compile(
    r"layers?$|heads$|_size$|_dim$|positions$|position_embeddings$|buckets$|^d_|^n_|^num_"
)
_LAYERS = re.compile(r"(^|_|\.)layers?$")
#: Sizes whose default -1 is not an attribute of the configuration class (DeBERTa-v2).
_NEGATIVE_DEFAULTS = {"position_buckets"}
WEIGHT_FILES = (".safetensors", ".msgpack", ".bin", ".index.json")


@dataclasses.dataclass(frozen=True)
class Source:
    """The location of a checkpoint.

    Attributes:
        location: Directory or Hub name.
        file: Path of the weight file, if a single file was given.
    """

    location: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> Source:
        """Parses a directory, a Hub name, or the path of a weight file next to its config.json.

        Raises:
            UsageError: The file is not a weight file.
            CheckpointError: The directory does not exist.
        """
        expanded = os.path.expanduser(name)
        if os.path.isfile(expanded):
            if not expanded.endswith(WEIGHT_FILES):
                raise UsageError(
                    f"{name} is not a weight file ({', '.join(WEIGHT_FILES)}): use a directory"
                )
            return cls(os.path.dirname(expanded) or ".", expanded)
        if os.path.isdir(expanded):
            return cls(expanded)
        check_directory(name)
        return cls(name)

    @property
    def weights(self) -> str:
        """The weight file if a single file was given, otherwise the directory or Hub name."""
        return self.file or self.location


@contextlib.contextmanager
def wrap_read_errors(location: str) -> Iterator[None]:
    """Converts errors that the `with` block raises while it reads a configuration to `ConfigError`.

    Configuration classes of Transformers validate little, so they may raise any exception. Errors
    of hfseq, `ImportError` and errors for missing files keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except OSError as error:
        if type(error) is not OSError:
            raise
        # Transformers raises a plain OSError for invalid JSON.
        raise ConfigError(
            f"cannot read the configuration of {location}: {_reason(error)}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"cannot read the configuration of {location}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return one_line(error, 600) or type(error).__name__


@contextlib.contextmanager
def wrap_build_errors(location: str) -> Iterator[None]:
    """Converts errors that a model class raises for invalid sizes to `ConfigError`.

    Errors of hfseq, and errors for unexpected arguments, keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "argument" in str(error):
            raise
        raise ConfigError(
            f"the configuration of {location} is not valid: {_reason(error)}"
        ) from error


def check_mapping(stored: object, location: str) -> None:
    """Raises `ConfigError` if a configuration is not a JSON object with allowed names.

    Names that start with ``__``, such as ``__class__``, are not allowed, because they would replace
    attributes of the configuration class.
    """
    if not isinstance(stored, Mapping):
        raise ConfigError(f"cannot read the configuration of {location}: it is not a JSON object")
    strange = [name for name in stored if not isinstance(name, str) or name.startswith("__")]
    if strange:
        raise ConfigError(
            f"the configuration of {location} has the invalid name {strange[0]!r:.80}: remove it"
        )


def raise_untrusted_code(auto_map: object, location: str) -> None:
    """Raises a `ConfigError` that lists the code of a checkpoint and explains how to trust it."""
    references = auto_map.items() if isinstance(auto_map, Mapping) else ()
    listing = ", ".join(
        f"{name} from {str(target).rpartition('.')[0] or target}.py ({target})"
        for name, target in references
    )
    raise ConfigError(
        f"{location} requires code from the checkpoint, which is not run unless you trust it: "
        f"{listing}. Read this code, then pass trust_remote_code=True (--trust_remote_code)"
    )


def check_numbers(config: PreTrainedConfig, location: str) -> None:
    """Checks that the numbers of a configuration are plausible.

    Raises:
        ConfigError: Numbers are not finite, sizes are negative, integers do not fit into int32, or
            there are more than `MAX_LAYERS` layers. The message lists them.
    """
    problems = []
    for name, value, default in _attributes(config):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        # If the default of the class is negative, negative values are indices or mean "no limit".
        may_be_negative = name in _NEGATIVE_DEFAULTS or (isinstance(default, int) and default < 0)
        is_size = _SIZES.search(name) and not may_be_negative
        limit = MAX_LAYERS if _LAYERS.search(name) else MAX_SIZE
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} is {value}")
        elif isinstance(value, int) and abs(value) > limit:
            problems.append(f"{name} is {value:.3g}, which exceeds {limit}")
        elif is_size and value < 0:
            problems.append(f"{name} is {value}, but sizes must not be negative")
    if problems:
        raise ConfigError(
            f"the configuration of {location} is not valid: {'; '.join(problems[:6])}"
        )


def _attributes(config: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, value and class default of all attributes, including sub-configurations."""
    for name, value in vars(config).items():
        yield name, value, getattr(type(config), name, None)
        if name in getattr(config, "sub_configs", {}) and hasattr(value, "__dict__"):
            yield from ((f"{name}.{inner}", *rest) for inner, *rest in _attributes(value))


def check_against_file(
    config: PreTrainedConfig, tensors: Mapping[str, Tensor], location: str
) -> None:
    """Checks that the model of a configuration is not far larger than its weight file.

    Without this check, hfseq would spend time and memory on building the layers and position
    embeddings before it could report the first missing tensor.

    Raises:
        WeightsError: The configuration has far more layers or positions than the weights.
    """
    numbers = {n: v for n, v, _ in _attributes(config) if isinstance(v, int) and v is not True}
    layers = max((value for name, value in numbers.items() if _LAYERS.search(name)), default=0)
    if layers > max(FREE_LAYERS, len(tensors)):
        raise WeightsError(
            f"the configuration of {location} has {layers} layers, but the weights only have "
            f"{len(tensors)} tensors: they belong to different models"
        )
    num_values = sum(math.prod(tensor.shape) for tensor in tensors.values())
    # Models with rotary embeddings have no position embedding matrix.
    has_position_table = not hasattr(type(config), "rope_parameters")
    for name, positions in numbers.items():
        if not has_position_table or not name.endswith("max_position_embeddings"):
            continue
        width = numbers.get(name.replace("max_position_embeddings", "hidden_size"))
        width = getattr(config, "hidden_size", 0) if width is None else width
        if positions * (width if isinstance(width, int) else 0) > max(
            FREE_POSITIONS, 4 * num_values
        ):
            raise WeightsError(
                f"the configuration of {location} has {positions} positions of {width} values, but "
                f"the weights only have {num_values} values: they belong to different models"
            )


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parses ``a=1,b=gelu,c=[2,3]`` into a dictionary. Values are YAML, and thus also JSON."""
    import yaml

    overrides: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?![^\[]*\])", text or "")):  # not within a list
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--config_overrides {item}: use name=value, separated by commas")
        try:
            overrides[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--config_overrides {item}: {one_line(error, 600)}") from None
    return overrides


def preset_values(
    config_class: type | None, preset: str | None, model_type: str
) -> Mapping[str, Any]:
    """Returns the configuration values of ``--preset``, or an empty dictionary without a preset.

    Args:
        config_class: The configuration class, or `None` if it is unknown.
        preset: The name of the preset, or `None`.
        model_type: The model type, for the message.

    Raises:
        UsageError: The class has no such preset.
    """
    if not preset:
        return {}
    presets = getattr(config_class, "presets", {})
    if preset not in presets:
        raise UsageError(
            f"--preset {preset}: '{model_type}' has "
            + (
                f"{', '.join(presets)}{did_you_mean(preset, presets)}"
                if presets
                else "no named sizes"
            )
        )
    return presets[preset]


def apply_overrides(config: PreTrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Sets values of a configuration, and the attributes that its class derives from these values.

    For example, T5's configuration class sets ``is_gated_act`` for
    ``feed_forward_proj=gated-gelu``. Configuration classes derive such attributes in their
    constructor only, so that setting ``feed_forward_proj`` later would not update them.

    Args:
        config: The configuration, which is modified.
        overrides: New values by name.

    Raises:
        UsageError: The configuration has no such name, or the value has an invalid type.
    """
    for name in overrides:
        if not hasattr(config, name):
            raise UsageError(
                f"--config_overrides: {config.model_type} has no {name}"
                + did_you_mean(name, list(config.to_dict()))
            )
    config_class = type(config)
    try:
        default_values, new_values = (
            vars(config_class(**values)) for values in ({}, copy.deepcopy(dict(overrides)))
        )
    except Exception as error:  # strict configurations raise their own types
        raise UsageError(f"--config_overrides: {one_line(error, 600)}") from error
    derived = {
        name: value for name, value in new_values.items() if default_values.get(name, ...) != value
    }
    # Set the value that the class stores for the override. For tie_word_embeddings, for example, T5
    # stores a different value from the given one.
    requested = {name: new_values.get(name, value) for name, value in overrides.items()}
    for name, value in {**requested, **derived}.items():
        setattr(config, name, value)


_DOWNLOAD = (
    *("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder"),
    "proxies",
)
_IGNORED = (
    "resume_download",
    "trust_remote_code",
    "_commit_hash",
    "_from_auto",
    "_from_pipeline",
    "adapter_kwargs",
    "use_safetensors",
    "low_cpu_mem_usage",
)


def pop_download_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes the download options from ``kwargs`` and returns them.

    ``use_auth_token`` is an alias of ``token``. Options that have no effect are removed.

    Raises:
        ValueError: Both ``token`` and ``use_auth_token`` are given.
    """
    for name in _IGNORED:
        kwargs.pop(name, None)
    old = kwargs.pop("use_auth_token", None)
    if old is not None:
        if kwargs.get("token") is not None:
            raise ValueError("`token` and `use_auth_token` are both specified: use only `token`")
        kwargs["token"] = old
    return {name: kwargs.pop(name) for name in _DOWNLOAD if name in kwargs}


def load_config(
    cls: Any,
    source: str,
    config: PreTrainedConfig | str | Path | None,
    download: Mapping[str, Any],
    kwargs: dict[str, Any],
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Loads the configuration of a model.

    Args:
        cls: The model class.
        source: Directory, Hub name or weight file of the model.
        config: A configuration, or the location of one. Default: the configuration in ``source``.
        download: Download options.
        kwargs: Values that override values in config.json, and other keyword arguments.

    Returns:
        The configuration, and the keyword arguments that are not configuration values.

    Raises:
        UsageError: ``cls`` has a different model type, or ``source`` is a weight file and
            ``config`` is not given.
        CheckpointError: The configuration does not exist.
        ConfigError: The configuration is not valid.
    """
    if config is not None and not isinstance(config, (str, Path)):
        _check_family(cls, config.model_type, source)
        return config, kwargs
    location = str(config or source)
    if Path(location).is_file() and not location.endswith(".json"):
        raise UsageError(f"{location} is a weight file: pass its configuration too (config=...)")
    check_directory(location)
    require_config(location, download)
    with wrap_read_errors(location):
        stored, _ = cls.config_class.get_config_dict(location, **download)
        check_mapping(stored, location)
        if native_model_type(stored) == cls.config_class.model_type:
            stored = native_config_dict(stored)
        stored = select_sub_config(cls.config_class, stored)
        _check_family(cls, stored.get("model_type"), location)
        new_config, unused = cls.config_class.from_dict(stored, return_unused_kwargs=True, **kwargs)
    check_numbers(new_config, location)
    return new_config, unused


def select_sub_config(config_class: Any, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the sub-configuration for a class from a composite config.json.

    If config.json is not a composite configuration, or has the model type of the class itself, it
    is returned unchanged.
    """
    part = stored.get(getattr(config_class, "base_config_key", "") or "")
    if stored.get("model_type") == config_class.model_type or not isinstance(part, Mapping):
        return stored
    # The weights of all parts are quantized with the same settings.
    shared = {name: stored[name] for name in ("quantization_config",) if name in stored}
    return {"model_type": config_class.model_type, **shared, **part}


def native_model_type(stored: Mapping[str, Any]) -> str | None:
    """Returns the hfseq model type of a config.json that Transformers can load as well, or `None`.

    Some architectures of hfseq, which this module calls native, are equivalent to an architecture
    of Transformers. Their config.json describes the architecture of Transformers, so that
    Transformers can load the checkpoint. The key ``hfseq`` in config.json contains the values of
    the native configuration.
    """
    native = stored.get("hfseq")
    name = native.get("model_type") if isinstance(native, Mapping) else None
    return name if isinstance(name, str) else None


def native_config_dict(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the native architecture, from the key ``hfseq`` of ``stored``."""
    native = {**stored, **stored["hfseq"]}
    del native["hfseq"]
    return native


def native_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the hfseq configuration that the attribute ``hfseq`` of ``config`` describes.

    ``transformers.AutoConfig`` loads the configuration of the Transformers architecture for a
    checkpoint whose config.json describes two equivalent architectures (see
    :func:`native_model_type`). Configurations without this attribute are returned unchanged.

    Raises:
        UsageError: No plugin registers the native architecture.
    """
    native = native_model_type({"hfseq": getattr(config, "hfseq", None)})
    if native is None:
        return config
    from hfseq import plugins

    spec = plugins.load().architectures.get(native)
    native_cfg = spec.load_config().from_dict(native_config_dict(config.to_dict()))
    native_cfg._name_or_path = getattr(config, "_name_or_path", "")
    return native_cfg


def _check_family(cls: Any, model_type: str | None, location: str) -> None:
    expected = getattr(cls.config_class, "model_type", None)
    if expected and model_type and model_type != expected and not _is_head_of(cls, model_type):
        raise UsageError(
            f"{location} contains a configuration of type '{model_type}', but {cls.__name__} "
            f"requires '{expected}'. The FlaxAutoModel classes select the class by configuration"
        )


def _is_head_of(cls: Any, model_type: str) -> bool:
    """Returns whether a class is registered for this model type too.

    For example, the class of GTE models is also registered for the model type `new`. Classes of the
    bridge are not registered, and have the method `is_class_of`.
    """
    if (is_class_of := getattr(cls, "is_class_of", None)) is not None:
        return is_class_of(model_type)
    from hfseq import plugins

    architectures = plugins.load().architectures
    if model_type not in architectures:
        return False
    return f"{cls.__module__}:{cls.__name__}" in architectures.get(model_type).heads.values()


_NO_CONFIG = "{} has no config.json. Use a directory that a model was saved to"


def require_config(location: str, download: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for a directory without config.json.

    Without this check, Transformers would look for a Hub repository with the name of the directory.
    """
    folder = Path(location) / (download.get("subfolder") or "")
    if Path(location).is_dir() and not (folder / "config.json").is_file():
        message = _NO_CONFIG.format(folder)
        if (folder / "router_config.json").is_file():
            message += (
                ". Its router has the transformer in a subfolder: save the model again with "
                "hfseq.RetrievalModel.from_pretrained(…).save_pretrained(…), which moves the "
                "transformer to the directory itself"
            )
        elif (folder / "modules.json").is_file():
            message += (
                ". If its first module is a StaticEmbedding, use hfseq.SentenceEncoder, which does "
                "not require config.json"
            )
        raise CheckpointError(message)


def open_checkpoint(
    source: str, download: Mapping[str, Any], *, from_pt: bool = False, from_flax: bool = False
) -> files.OpenedWeights:
    """Opens the weights of a directory, a file or a repository on the Hub.

    Args:
        source: Directory, file or Hub name.
        download: Download options.
        from_pt: Whether to prefer ``pytorch_model.bin`` to ``flax_model.msgpack``.
        from_flax: Whether to read ``flax_model.msgpack`` and no other file.
    """
    if Path(source).is_file():
        return files.open_file(source)
    location = "/".join(filter(None, (source, download.get("subfolder"))))
    fetch = fetcher(source, download)
    return files.open_weights(fetch, location, from_pt=from_pt, from_flax=from_flax)


def fetcher(source: str, download: Mapping[str, Any]) -> files.Fetch:
    """Returns a function that maps a file name of ``source`` to a local path, or to `None`."""
    if Path(source).is_dir():
        folder = Path(source, download.get("subfolder") or "")
        return lambda name: str(folder / name) if (folder / name).is_file() else None
    options = {name: value for name, value in download.items() if name != "proxies"}
    return hub.Repository(source, **options)


def check_trusted_config(stored: Mapping[str, Any], trust_remote_code: bool, location: str) -> None:
    """Checks that loading a configuration does not require untrusted code from the checkpoint.

    Args:
        stored: The contents of config.json.
        trust_remote_code: Whether the user trusts code from the checkpoint.
        location: Directory or Hub name, for the message.

    Raises:
        ConfigError: The configuration requires untrusted code. The message lists its files.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto_map = stored.get("auto_map")
    needs_code = isinstance(auto_map, Mapping) and "AutoConfig" in auto_map
    if needs_code and not trust_remote_code and stored.get("model_type") not in CONFIG_MAPPING:
        raise_untrusted_code(auto_map, location)


def auto_config(
    location: str, trust_remote_code: bool = False, **download: Any
) -> PreTrainedConfig:
    """Loads and checks a configuration with the class for its model type.

    Args:
        location: Directory, JSON file or Hub name.
        trust_remote_code: Whether code from the checkpoint may run.
        **download: Download options.

    Raises:
        CheckpointError: The configuration does not exist or cannot be read.
        ConfigError: The configuration is not valid or requires untrusted code.
    """
    from transformers import AutoConfig, PreTrainedConfig

    check_directory(location)
    try:
        with wrap_read_errors(location):
            stored, _ = PreTrainedConfig.get_config_dict(location, **download)
            check_mapping(stored, location)
            check_trusted_config(stored, trust_remote_code, location)
            config = native_config(
                AutoConfig.from_pretrained(
                    location, trust_remote_code=trust_remote_code, **download
                )
            )
    except HfseqError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot load the configuration '{location}': {error}") from error
    check_numbers(config, location)
    return config


def read_config(location: str, download: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads the config.json of a directory or Hub name as a dictionary.

    Args:
        location: Directory or Hub name.
        download: Download options.

    Raises:
        CheckpointError: config.json does not exist or is not a JSON object.
    """
    path = fetcher(location, download or {})("config.json")
    if path is None:
        raise CheckpointError(_NO_CONFIG.format(location))
    try:
        stored = parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {first_line(error)}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return stored


def model_type(stored: Mapping[str, Any]) -> str | None:
    """Returns the model type of a config.json, or `None`.

    If config.json also describes a native architecture (see `native_model_type`), its model type is
    returned.
    """
    names = (native_model_type(stored), stored.get("model_type"))
    return next((name for name in names if isinstance(name, str) and name), None)


def class_names(stored: Mapping[str, Any]) -> list[str]:
    """Returns the ``architectures`` of a config.json, or ``[]`` if they are not valid."""
    names = stored.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


#: Keys of rotary embeddings in Transformers 4. They are removed before new values are written.
_ROPE_KEYS = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"),
)
_UNKNOWN_TO_4 = (
    "config.json of this {} has no keys for Transformers 4, because that version cannot represent "
    "the rotary embeddings or the layer order of this model. Transformers 4, and converters that "
    "read its keys, would compute different outputs from these weights"
)


def write_config(config: PreTrainedConfig, folder: str | Path) -> None:
    """Writes config.json with the keys of Transformers 5 and, where they differ, of Transformers 4.

    Transformers 5 writes the options of rotary embeddings as ``rope_parameters`` only. Transformers
    4 ignores this key and uses the defaults of the configuration class instead, which changes the
    outputs of the model. The same applies to converters and servers that read the keys of
    Transformers 4. For reading, nothing has to be done: the configuration classes of Transformers 5
    accept both kinds of keys.

    An existing file is unchanged if writing fails.
    """
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        # Files other than config.json contain the code of custom classes that the user registered
        # with `register_for_auto_class`.
        shutil.copytree(
            temporary, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json")
        )
        text = Path(temporary, "config.json").read_text(encoding="utf-8")
    config_dict = json.loads(text)
    # Saved weights are never quantized.
    config_dict = record_dequantization(config_dict, getattr(config, "_name_or_path", None))
    with_both = add_legacy_keys(config_dict)
    reloaded = [
        type(config).from_dict(config._decode_special_floats(copy.deepcopy(stored)))
        for stored in (config_dict, with_both)
    ]
    if reloaded[0].__dict__.get("rope_parameters") != reloaded[1].__dict__.get("rope_parameters"):
        logger.warning("%s", _UNKNOWN_TO_4.format(config.model_type))
    else:
        config_dict = with_both
    text = json.dumps(config_dict, indent=2, sort_keys=True) + "\n"
    write_atomically(Path(folder, "config.json"), text)


def add_legacy_keys(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the keys of Transformers 4 to a config.json of Transformers 5.

    Sub-configurations such as ``text_config`` get these keys too.
    """
    result = {
        name: add_legacy_keys(value)
        if name != "hfseq" and isinstance(value, Mapping) and "model_type" in value
        else value
        for name, value in config_dict.items()
    }
    if isinstance(config_dict.get("dtype"), str):
        result["torch_dtype"] = config_dict["dtype"]
    if rope := config_dict.get("rope_parameters"):
        result = {name: value for name, value in result.items() if name not in _ROPE_KEYS}
        result |= _legacy_rope(config_dict, rope)
    return result


def _legacy_rope(config_dict: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of Transformers 4 for the rotary embeddings ``rope``.

    If Transformers 4 cannot represent them, logs a warning and returns ``{}``.
    """

    def scaling(part: Mapping[str, Any]) -> dict[str, Any] | None:
        # Keeps rope_theta in the dictionary, because some converters read it from rope_scaling.
        return None if part["rope_type"] == "default" else dict(part)

    if "rope_type" in rope:
        keys = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling(rope)}
        partial_key = "partial_rotary_factor"
        return keys | {name: rope[name] for name in (partial_key,) if name in rope}
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    layer_types = config_dict.get("layer_types") or []
    full_layers = [
        index for index, layer_type in enumerate(layer_types) if layer_type == "full_attention"
    ]
    period = full_layers[1] if len(full_layers) > 1 else len(layer_types)
    model_type = config_dict.get("model_type")
    if full and sliding and not scaling(sliding):
        if model_type == "gemma3_text":
            return {
                "rope_theta": full["rope_theta"],
                "rope_local_base_freq": sliding["rope_theta"],
                "rope_scaling": scaling(full),
            }
        regular = full_layers == list(range(0, len(layer_types), period or 1)) and not scaling(full)
        # In Transformers 4, all layers of this type use the first rope_theta.
        if model_type == "modernbert-decoder":
            regular = regular and full["rope_theta"] == sliding["rope_theta"]
        if model_type in ("modernbert", "modernbert-decoder") and regular:
            return {
                "global_rope_theta": full["rope_theta"],
                "local_rope_theta": sliding["rope_theta"],
                "global_attn_every_n_layers": period,
            }
    logger.warning("%s", _UNKNOWN_TO_4.format(model_type))
    return {}

"""Configurations that strangers wrote: read without surprises, refused where they are absurd."""

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

from hfseq.checkpoints import files
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

MAX_SIZE = 2**31 - 1  # no size of a model is a number that int32 does not hold
MAX_LAYERS = 2048  # the deepest published transformers have 1,000
FREE_LAYERS = 256  # these take no noticeable time to lay out, whatever a file holds of them
FREE_POSITIONS = 2**20  # numbers of a table of positions, whatever a file holds
FREE_NEW_VALUES = 2**24  # numbers that may be initialised beside those of a file, whatever it holds
_SIZES = re.compile(
    r"layers?$|heads$|_size$|_dim$|positions$|position_embeddings$|buckets$|^d_|^n_|^num_"
)
_LAYERS = re.compile(r"(^|_|\.)layers?$")
WEIGHT_FILES = (".safetensors", ".msgpack", ".bin", ".index.json")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint: where its files are, and the one weight file of it, if it is one file."""

    location: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> Source:
        """Take ``name`` apart: a directory, a Hub name, or a weight file beside its config.json."""
        expanded = os.path.expanduser(name)
        if os.path.isfile(expanded):
            if not expanded.endswith(WEIGHT_FILES):
                raise UsageError(
                    f"{name} is no weight file ({', '.join(WEIGHT_FILES)}): give a directory"
                )
            return cls(os.path.dirname(expanded) or ".", expanded)
        if os.path.isdir(expanded):
            return cls(expanded)
        check_directory(name)
        return cls(name)

    @property
    def weights(self) -> str:
        """What the weights are loaded from."""
        return self.file or self.location


@contextlib.contextmanager
def wrap_read_errors(place: str) -> Iterator[None]:
    """Turn what the body raises at a configuration that it cannot read into a ConfigError.

    Configuration classes of transformers check little, so anything may be raised; errors of hfseq,
    absent packages and an absent file keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except OSError as error:
        if type(error) is not OSError:
            raise
        # how transformers calls invalid JSON
        raise ConfigError(f"cannot read the configuration of {place}: {_reason(error)}") from error
    except Exception as error:
        raise ConfigError(f"cannot read the configuration of {place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return one_line(error, 600) or type(error).__name__


@contextlib.contextmanager
def wrap_build_errors(place: str) -> Iterator[None]:
    """Turn what a model class raises at sizes that make no model into a ConfigError.

    Errors of hfseq, and of arguments that the class does not know, keep their type.
    """
    try:
        yield
    except (HfseqError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "argument" in str(error):
            raise
        raise ConfigError(
            f"the configuration of {place} describes no model: {_reason(error)}"
        ) from error


def check_mapping(stored: object, place: str) -> None:
    """Refuse a configuration that is no JSON object, or would replace attributes of its class."""
    if not isinstance(stored, Mapping):
        raise ConfigError(f"cannot read the configuration of {place}: it is no JSON object")
    strange = [name for name in stored if not isinstance(name, str) or name.startswith("__")]
    if strange:
        raise ConfigError(
            f"the configuration of {place} has the name {strange[0]!r:.80}: remove it"
        )


def raise_untrusted_code(auto_map: object, place: str) -> None:
    """Say which code of a checkpoint would run if it were trusted, and how to trust it."""
    named = auto_map.items() if isinstance(auto_map, Mapping) else ()
    listing = ", ".join(
        f"{name} from {str(target).rpartition('.')[0] or target}.py ({target})"
        for name, target in named
    )
    raise ConfigError(
        f"{place} is a model of its own code, which is not run unless you trust it: {listing}. "
        "Read that code; then pass trust_remote_code=True (--trust_remote_code)"
    )


def check_numbers(config: PreTrainedConfig, place: str) -> None:
    """Refuse a configuration with numbers that no model has.

    Those are what is not finite, sizes below 0, anything that int32 does not hold, and more than
    ``MAX_LAYERS`` layers. **Raises:** :class:`~hfseq.errors.ConfigError` that names them all.
    """
    problems = []
    for name, value in _attributes(config):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        size = _SIZES.search(name)
        most = MAX_LAYERS if _LAYERS.search(name) else MAX_SIZE
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} is {value}")
        elif isinstance(value, int) and abs(value) > most:
            problems.append(f"{name} is {value:.3g}, at most {most} is possible")
        elif size and value < 0:
            problems.append(f"{name} is {value}, a size")
    if problems:
        raise ConfigError(
            f"the configuration of {place} describes no model: {'; '.join(problems[:6])}"
        )


def _attributes(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a configuration and of its parts, such as CLIP's two."""
    for name, value in vars(config).items():
        yield name, value
        if name in getattr(config, "sub_configs", {}) and hasattr(value, "__dict__"):
            yield from ((f"{name}.{inner}", part) for inner, part in _attributes(value))


def check_against_file(config: PreTrainedConfig, tensors: Mapping[str, Tensor], place: str) -> None:
    """Refuse a configuration of a model that is out of all proportion to its file.

    Laying out layers and computing tables of places takes time and memory by the configuration
    alone, before a tensor is found missing.
    """
    numbers = {n: v for n, v in _attributes(config) if isinstance(v, int) and v is not True}
    layers = max((value for name, value in numbers.items() if _LAYERS.search(name)), default=0)
    if layers > max(FREE_LAYERS, len(tensors)):
        raise WeightsError(
            f"the configuration beside {place} has {layers} layers, and the file {len(tensors)} "
            "tensors: they do not belong together"
        )
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    tabulated = not hasattr(type(config), "rope_parameters")  # rotary positions have no table
    for name, positions in numbers.items():
        if not tabulated or not name.endswith("max_position_embeddings"):
            continue
        width = numbers.get(name.replace("max_position_embeddings", "hidden_size"))
        width = getattr(config, "hidden_size", 0) if width is None else width
        if positions * (width if isinstance(width, int) else 0) > max(FREE_POSITIONS, 4 * held):
            raise WeightsError(
                f"the configuration beside {place} has {positions} places of {width} numbers, and "
                f"the file holds {held} numbers in all: they do not belong together"
            )


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Turn ``a=1,b=gelu,c=[2,3]`` into a dictionary; values are YAML (so JSON too)."""
    import yaml

    overrides: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?![^\[]*\])", text or "")):  # not within a list
        name, sign, value = item.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"--config_overrides {item}: write name=value, separated by commas")
        try:
            overrides[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--config_overrides {item}: {one_line(error, 600)}") from None
    return overrides


def preset_values(kind: type | None, preset: str | None, model_type: str) -> Mapping[str, Any]:
    """Return what ``--preset`` sets in a configuration of the class ``kind``: nothing without one.

    **Raises:** UsageError for a size that the class does not name.
    """
    if not preset:
        return {}
    presets = getattr(kind, "presets", {})
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
    """Set ``overrides`` on ``config``, and the attributes that its class derives from them.

    T5's ``feed_forward_proj=gated-gelu`` makes ``is_gated_act`` true, for example: a configuration
    computes such things when it is made, not when an attribute is set.

    **Raises:** UsageError for a name that the configuration has not, or a value of another type.
    """
    for name in overrides:
        if not hasattr(config, name):
            raise UsageError(
                f"--config_overrides: {config.model_type} has no {name}"
                + did_you_mean(name, list(config.to_dict()))
            )
    kind = type(config)
    try:
        before, after = (vars(kind(**values)) for values in ({}, copy.deepcopy(dict(overrides))))
    except Exception as error:  # strict configurations raise their own types
        raise UsageError(f"--config_overrides: {one_line(error, 600)}") from error
    derived = {name: value for name, value in after.items() if before.get(name, ...) != value}
    # What the class makes of a value counts (T5 reads tie_word_embeddings as something else).
    kept = {name: after.get(name, value) for name, value in overrides.items()}
    for name, value in {**kept, **derived}.items():
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
    """Take the download options out; ``use_auth_token`` is the old name of ``token``."""
    for name in _IGNORED:
        kwargs.pop(name, None)
    old = kwargs.pop("use_auth_token", None)
    if old is not None:
        if kwargs.get("token") is not None:
            raise ValueError("`token` and `use_auth_token` are both specified: give only `token`")
        kwargs["token"] = old
    return {name: kwargs.pop(name) for name in _DOWNLOAD if name in kwargs}


def load_config(
    cls: Any,
    source: str,
    config: PreTrainedConfig | str | Path | None,
    download: Mapping[str, Any],
    kwargs: dict[str, Any],
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration, and the keywords that it did not take."""
    if config is not None and not isinstance(config, (str, Path)):
        _check_family(cls, config.model_type, source)
        return config, kwargs
    place = str(config or source)
    if Path(place).is_file() and not place.endswith(".json"):
        raise UsageError(f"{place} is a weight file: pass its configuration too (config=...)")
    require_config(place, download)
    with wrap_read_errors(place):
        stored, _ = cls.config_class.get_config_dict(place, **download)
        check_mapping(stored, place)
        if native_model_type(stored) == cls.config_class.model_type:
            stored = native_config_dict(stored)
        stored = select_sub_config(cls.config_class, stored)
        _check_family(cls, stored.get("model_type"), place)
        made, unused = cls.config_class.from_dict(stored, return_unused_kwargs=True, **kwargs)
    check_numbers(made, place)
    return made, unused


def select_sub_config(kind: Any, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a composite's config.json that a configuration class is for, if any."""
    part = stored.get(getattr(kind, "base_config_key", "") or "")
    if stored.get("model_type") == kind.model_type or not isinstance(part, Mapping):
        return stored
    return {"model_type": kind.model_type, **part}


def native_model_type(stored: Mapping[str, Any]) -> str | None:
    """Return the native architecture that config.json names beside its stock twin, if any."""
    native = stored.get("hfseq")
    name = native.get("model_type") if isinstance(native, Mapping) else None
    return name if isinstance(name, str) else None


def native_config_dict(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as the native architecture reads it (docs/checkpoints.md)."""
    described = {**stored, **stored["hfseq"]}
    del described["hfseq"]
    return described


def native_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the native architecture that ``config`` is the stock twin of.

    ``transformers.AutoConfig`` reads such a directory as its twin, with an attribute ``hfseq``. Any
    other configuration comes back as it is.

    **Raises:** :class:`~hfseq.errors.UsageError` if no plugin registers the architecture.
    """
    native = native_model_type({"hfseq": getattr(config, "hfseq", None)})
    if native is None:
        return config
    from hfseq import plugins

    spec = plugins.load().architectures.get(native)
    described = spec.load_config().from_dict(native_config_dict(config.to_dict()))
    described._name_or_path = getattr(config, "_name_or_path", "")
    return described


def _check_family(cls: Any, model_type: str | None, place: str) -> None:
    expected = getattr(cls.config_class, "model_type", None)
    if expected and model_type and model_type != expected:
        raise UsageError(
            f"{place} holds a configuration of type '{model_type}', {cls.__name__} is for "
            f"'{expected}': the FlaxAutoModel classes choose by configuration"
        )


def check_directory(name: str) -> None:
    """Tell an absent directory from a name on the Hub, which transformers does not."""
    path = os.path.expanduser(name)
    looks_local = os.path.isabs(path) or name.startswith(".") or name.count("/") > 1
    if looks_local and not os.path.exists(path):
        raise CheckpointError(
            f"there is no directory '{name}' (in '{Path.cwd()}'); give an existing directory or "
            "the name of a model on the Hub, such as 'FacebookAI/roberta-base'"
        )


_NO_CONFIG = "{} has no config.json: is it a directory that a model was saved to?"


def require_config(place: str, download: Mapping[str, Any]) -> None:
    """Refuse a directory without ``config.json``, which Transformers would look up on the Hub."""
    folder = Path(place) / (download.get("subfolder") or "")
    if Path(place).is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(_NO_CONFIG.format(folder))


def open_checkpoint(source: str, download: Mapping[str, Any], from_pt: bool) -> files.OpenedWeights:
    """Open the weights of a directory, a file or a repository on the Hub."""
    if Path(source).is_file():
        return files.open_file(source)
    return files.open_weights(fetcher(source, download), source, from_pt=from_pt)


def fetcher(source: str, download: Mapping[str, Any]) -> files.Fetch:
    """Return a function from a file name to its local path, or None where it does not exist."""
    if Path(source).is_dir():
        folders = [Path(source) / (download.get("subfolder") or ""), Path(source)]

        def local(name: str) -> str | None:
            paths = (folder / name for folder in folders)
            return next((str(path) for path in paths if path.is_file()), None)

        return local
    from hfseq.checkpoints import hub

    options = {name: value for name, value in download.items() if name != "proxies"}
    return lambda name: hub.resolve_file(source, name, **options)


def check_trusted_config(stored: Mapping[str, Any], trust_remote_code: bool, place: str) -> None:
    """Refuse a configuration that only code of its checkpoint can read, unless that is trusted.

    **Raises:** ConfigError that names the code.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    auto_map = stored.get("auto_map")
    wants_code = isinstance(auto_map, Mapping) and "AutoConfig" in auto_map
    if wants_code and not trust_remote_code and stored.get("model_type") not in CONFIG_MAPPING:
        raise_untrusted_code(auto_map, place)


def auto_config(place: str, trust_remote_code: bool = False, **download: Any) -> PreTrainedConfig:
    """Return the configuration at ``place`` by the class that it names, its numbers checked.

    **Raises:** CheckpointError where there is none, or it cannot be read; ConfigError for one that
    describes no model, or needs code that is not ``trusted``.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        with wrap_read_errors(place):
            stored, _ = PreTrainedConfig.get_config_dict(place, **download)
            check_mapping(stored, place)
            check_trusted_config(stored, trust_remote_code, place)
            config = native_config(
                AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **download)
            )
    except HfseqError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot load the configuration '{place}': {error}") from error
    check_numbers(config, place)
    return config


def read_config(place: str) -> dict[str, Any]:
    """Return config.json of a directory or a Hub name.

    **Raises:** :class:`~hfseq.errors.CheckpointError` where there is none, or it is no JSON object.
    """
    path = fetcher(place, {})("config.json")
    if path is None:
        raise CheckpointError(_NO_CONFIG.format(place))
    try:
        stored = parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {first_line(error)}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return stored


def model_type(stored: Mapping[str, Any]) -> str | None:
    """Return the architecture that a config.json names: the native one, where it names both."""
    names = (native_model_type(stored), stored.get("model_type"))
    return next((name for name in names if isinstance(name, str) and name), None)


def class_names(stored: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config.json names; of anything but a list of names, none."""
    names = stored.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


#: What Transformers 4 calls rotary positions; what a file of its still says is written anew.
_ROPE_KEYS = (
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers"),
)
_UNKNOWN_TO_4 = (
    "config.json of this {} has no keys for Transformers 4, which cannot express its rotary "
    "positions or order of layers: it, and converters that read as it does, would compute another "
    "model from these weights"
)


def write_config(config: PreTrainedConfig, folder: str | Path) -> None:
    """Write ``config.json`` with the keys of Transformers 5 and, where they differ, those of 4.

    Transformers 5 has ``rope_parameters`` alone. Transformers 4, and converters and servers that
    read as it does, ignore those and take the defaults of the class, without a word: the same
    weights are another model. Reading needs nothing here: configuration classes of Transformers 5
    take both spellings, and ``rope_parameters`` is what a model reads. A failure leaves the file
    that was there.
    """
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory() as written:
        config.save_pretrained(written)
        # What else there is: the code of a class that asks for its being saved.
        shutil.copytree(
            written, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json")
        )
        text = Path(written, "config.json").read_text(encoding="utf-8")
    described = json.loads(text)
    both = add_legacy_keys(described)
    read = [type(config).from_dict(copy.deepcopy(stored)) for stored in (described, both)]
    if read[0].__dict__.get("rope_parameters") != read[1].__dict__.get("rope_parameters"):
        logger.warning("%s", _UNKNOWN_TO_4.format(config.model_type))
    else:
        text = json.dumps(both, indent=2, sort_keys=True) + "\n"
    write_atomically(Path(folder, "config.json"), text)


def add_legacy_keys(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of Transformers 5 with what Transformers 4 calls otherwise beside it.

    Parts that are configurations themselves (``text_config``) get theirs.
    """
    both = {
        name: add_legacy_keys(value)
        if name != "hfseq" and isinstance(value, Mapping) and "model_type" in value
        else value
        for name, value in described.items()
    }
    if isinstance(described.get("dtype"), str):
        both["torch_dtype"] = described["dtype"]
    if rope := described.get("rope_parameters"):
        both = {name: value for name, value in both.items() if name not in _ROPE_KEYS}
        both |= _legacy_rope(described, rope)
    return both


def _legacy_rope(described: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Transformers 4 for ``rope``; none, and a warning, where it has none."""

    def scaling(part: Mapping[str, Any]) -> dict[str, Any] | None:
        # With the base inside, too: converters look there.
        return None if part["rope_type"] == "default" else dict(part)

    if "rope_type" in rope:
        keys = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling(rope)}
        partial = "partial_rotary_factor"
        return keys | {name: rope[name] for name in (partial,) if name in rope}
    full, windowed = rope.get("full_attention"), rope.get("sliding_attention")
    kinds = described.get("layer_types") or []
    whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    period = whole[1] if len(whole) > 1 else len(kinds)
    model_type = described.get("model_type")
    if full and windowed and not scaling(windowed):
        if model_type == "gemma3_text":
            return {
                "rope_theta": full["rope_theta"],
                "rope_local_base_freq": windowed["rope_theta"],
                "rope_scaling": scaling(full),
            }
        regular = whole == list(range(0, len(kinds), period or 1)) and not scaling(full)
        if model_type == "modernbert-decoder":  # whose layers all turn by the first base there
            regular = regular and full["rope_theta"] == windowed["rope_theta"]
        if model_type in ("modernbert", "modernbert-decoder") and regular:
            return {
                "global_rope_theta": full["rope_theta"],
                "local_rope_theta": windowed["rope_theta"],
                "global_attn_every_n_layers": period,
            }
    logger.warning("%s", _UNKNOWN_TO_4.format(model_type))
    return {}

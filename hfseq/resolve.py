"""From the name of a checkpoint (directory, file or repository) to its configuration and files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfseq import checkpoint_files as files
from hfseq import config_checks
from hfseq.errors import CheckpointError, UsageError

_DOWNLOAD = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "proxies",
)
_IGNORED = (
    "resume_download", "trust_remote_code", "_commit_hash", "_from_auto", "_from_pipeline",
    "adapter_kwargs", "use_safetensors", "low_cpu_mem_usage",
)  # fmt: skip


def download_options(kwargs: dict[str, Any]) -> dict[str, Any]:
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
    cls: Any, source: str, config: Any, download: dict, kwargs: dict
) -> tuple[Any, dict]:
    """Return the configuration, and the keywords that it did not take."""
    if config is not None and not isinstance(config, (str, Path)):
        _check_family(cls, config.model_type, source)
        return config, kwargs
    place = str(config or source)
    if Path(place).is_file() and not place.endswith(".json"):
        raise UsageError(f"{place} is a weight file: pass its configuration too (config=...)")
    require_config(place, download)
    with config_checks.reading(place):
        stored, _ = cls.config_class.get_config_dict(place, **download)
        config_checks.check_mapping(stored, place)
        if native_type(stored) == cls.config_class.model_type:
            stored = native_description(stored)
        _check_family(cls, stored.get("model_type"), place)
        made, unused = cls.config_class.from_dict(stored, return_unused_kwargs=True, **kwargs)
    config_checks.check_numbers(made, place)
    return made, unused


def native_type(stored: Mapping[str, Any]) -> str | None:
    """Return the native architecture that config.json names beside its stock twin, if any."""
    native = stored.get("hfseq")
    return native.get("model_type") if isinstance(native, Mapping) else None


def native_description(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as the native architecture reads it (docs/checkpoints.md)."""
    described = {**stored, **stored["hfseq"]}
    del described["hfseq"]
    return described


def native_config(config: Any) -> Any:
    """Return the configuration of the native architecture that ``config`` is the stock twin of.

    ``transformers.AutoConfig`` reads such a directory as its twin, with an attribute ``hfseq``. Any
    other configuration comes back as it is.

    **Raises:** :class:`~hfseq.errors.UsageError` if no plugin registers the architecture.
    """
    native = native_type({"hfseq": getattr(config, "hfseq", None)})
    if native is None:
        return config
    from hfseq import plugins

    spec = plugins.load().architectures.get(native)
    found = spec.load_config().from_dict(native_description(config.to_dict()))
    found._name_or_path = getattr(config, "_name_or_path", "")
    return found


def _check_family(cls: Any, found: str | None, place: str) -> None:
    expected = getattr(cls.config_class, "model_type", None)
    if expected and found and found != expected:
        raise UsageError(
            f"{place} holds a configuration of type '{found}', {cls.__name__} is for '{expected}': "
            "the FlaxAutoModel classes choose by configuration"
        )


def require_config(place: str, download: dict[str, Any]) -> None:
    """Refuse a directory without ``config.json``, which Transformers would look up on the Hub."""
    folder = Path(place) / (download.get("subfolder") or "")
    if Path(place).is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json: is it a directory that a model was saved to?"
        )


def open_source(source: str, download: dict[str, Any], from_pt: bool) -> files.OpenedWeights:
    """Open the weights of a directory, a file or a repository on the Hub."""
    if Path(source).is_file():
        return files.open_file(source)
    return files.open_weights(fetcher(source, download), source, from_pt=from_pt)


def fetcher(source: str, download: dict[str, Any]) -> files.Fetch:
    """Return a function from a file name to its local path, or None where it does not exist."""
    if Path(source).is_dir():
        folders = [Path(source) / (download.get("subfolder") or ""), Path(source)]

        def local(name: str) -> str | None:
            return next(
                (str(folder / name) for folder in folders if (folder / name).is_file()), None
            )

        return local
    from hfseq import hub

    options = {name: value for name, value in download.items() if name != "proxies"}
    return lambda name: hub.resolve_file(source, name, **options)

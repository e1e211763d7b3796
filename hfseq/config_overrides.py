"""``--config_overrides name=value,…`` and ``--preset``: changes to a configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hfseq.errors import UsageError, nearest


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Turn ``a=1,b=gelu`` into a dictionary; values are YAML (so JSON too)."""
    import yaml

    overrides: dict[str, Any] = {}
    for item in filter(None, (text or "").split(",")):
        name, sign, value = item.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"--config_overrides {item}: write name=value, separated by commas")
        try:
            overrides[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--config_overrides {item}: {' '.join(str(error).split())}") from None
    return overrides


def preset_values(kind: Any, preset: str | None, model_type: str) -> Mapping[str, Any]:
    """Return what ``--preset`` sets in a configuration of the class ``kind``: nothing without one.

    **Raises:** UsageError for a size that the class does not name.
    """
    if not preset:
        return {}
    presets = getattr(kind, "presets", {})
    if preset not in presets:
        raise UsageError(
            f"--preset {preset}: '{model_type}' has "
            + (f"{', '.join(presets)}{nearest(preset, presets)}" if presets else "no named sizes")
        )
    return presets[preset]


def override(config: Any, overrides: Mapping[str, Any]) -> None:
    """Set ``overrides`` on ``config``, and the attributes that its class derives from them.

    T5's ``feed_forward_proj=gated-gelu`` makes ``is_gated_act`` true, for example: a configuration
    computes such things when it is made, not when an attribute is set.

    **Raises:** UsageError for a name that the configuration has not, or a value of another type.
    """
    for name in overrides:
        if not hasattr(config, name):
            raise UsageError(
                f"--config_overrides: {config.model_type} has no {name}"
                + nearest(name, list(config.to_dict()))
            )
    kind = type(config)
    try:
        before, after = (vars(kind(**values)) for values in ({}, copy.deepcopy(dict(overrides))))
    except Exception as error:  # strict configurations raise their own types
        raise UsageError(f"--config_overrides: {' '.join(str(error).split())}") from error
    derived = {name: value for name, value in after.items() if before.get(name, ...) != value}
    # What the class makes of a value counts (T5 reads tie_word_embeddings as something else).
    kept = {name: after.get(name, value) for name, value in overrides.items()}
    for name, value in {**kept, **derived}.items():
        setattr(config, name, value)


__all__ = ["override", "parse_overrides"]

"""Configurations of GTE models that were published before Transformers supported GTE."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import GteConfig

#: Options of these configurations for which hfseq supports only one value.
REQUIRED = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}
#: Other options of these configurations. They do not affect the outputs of a model.
UNUSED = ("auto_map", "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")


class NewConfig(PreTrainedConfig):
    """Configuration of GTE models with the model type `new`.

    PyTorch runs these models with code from their repositories. hfseq's model classes convert the
    configuration to `transformers.GteConfig` with `to_gte`. This class is not a subclass of
    `GteConfig`, because Transformers cannot import `GteConfig` while it imports its Auto classes.
    """

    model_type = "new"
    rope_parameters: dict[str, Any] | None = None


def to_gte(config: PreTrainedConfig) -> GteConfig:
    """Converts a configuration to a `GteConfig` with which Transformers computes the same outputs.

    In the published code, the position scaling `ntk` with a factor `s` multiplies the base by `s`
    and divides all frequencies by `s ** (2 / head_dim)`. Transformers has no such scaling type, but
    `linear` with the new base has the same effect.

    Args:
        config: A `NewConfig`, or a `GteConfig`. A `GteConfig` without `ntk` scaling is returned
            unchanged.

    Raises:
        UsageError: An option has a value that Transformers' class does not support.
    """
    from transformers import GteConfig

    from hfseq.nn import rope_parameters

    for option, required in REQUIRED.items():
        value = getattr(config, option, required)
        if value != required:
            raise UsageError(
                f"{option}={value!r} in the configuration is not supported (supported: "
                f"{required!r})"
            )
    rope = rope_parameters(config)
    if isinstance(config, GteConfig) and rope["rope_type"] != "ntk":
        return config
    values: dict[str, Any] = copy.deepcopy(config.to_dict())
    for name in ("model_type", "rope_theta", "rope_scaling", *REQUIRED, *UNUSED):
        values.pop(name, None)
    if rope["rope_type"] == "ntk":
        factor, width = float(rope["factor"]), config.hidden_size // config.num_attention_heads
        rope = {
            "rope_type": "linear",
            "rope_theta": rope["rope_theta"] * factor,
            "factor": factor ** (2 / width),
        }
    rope.pop("type", None)
    return GteConfig(**{**values, "rope_parameters": rope})

"""Configurations of GTE models that were published before Transformers supported GTE."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from hfseq.errors import UsageError

if TYPE_CHECKING:
    from transformers import GteConfig

#: Options of these configurations that must have these values.
REQUIRED = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "pack_qkv": True,
    "logn_attention_scale": False,
}
#: Options of these configurations that have no effect on outputs, besides those in `REQUIRED`.
UNUSED = ("auto_map", "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")


class NewConfig(PreTrainedConfig):
    """Configuration of GTE models with the model type `new`, for which PyTorch needs their code.

    Model classes convert it to `transformers.GteConfig`, see `to_gte`. It does not derive from this
    class, because Transformers cannot import it while the Auto classes are imported.
    """

    model_type = "new"
    rope_parameters: dict[str, Any] | None = None


def to_gte(config: PreTrainedConfig) -> GteConfig:
    """Returns the configuration of the same model for Transformers' class.

    In the published code, the position scaling `ntk` with a factor `s` multiplies the base by `s`
    and divides all frequencies by `s ** (2 / head_dim)`. The latter is the scaling type `linear`.

    Args:
        config: A `GteConfig`, which is returned unchanged if it has no such scaling, or a
            `NewConfig`.

    Raises:
        UsageError: The model has options that Transformers' class does not have.
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

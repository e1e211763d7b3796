"""Restores class methods of configuration classes that Transformers 5 removed.

The methods build a composite configuration from the configurations of its parts, for example
`CLIPConfig.from_text_vision_configs(text_config, vision_config, projection_dim=8)`.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

_BASE = "transformers.configuration_utils"
_QFORMER = ("from_vision_qformer_text_configs", "vision_config qformer_config text_config")
_PARTS = ("from_sub_models_config", "text_encoder audio_encoder decoder")
_BACKBONE, _BACKBONES = (
    (method, "backbone_config") for method in ("from_backbone_config", "from_backbone_configs")
)

#: The methods of each configuration class, and the fields that they set.
_METHODS = {
    "bark.BarkConfig": (
        "from_sub_model_configs",
        "semantic_config coarse_acoustics_config fine_acoustics_config codec_config",
    ),
    "blip_2.Blip2Config": _QFORMER,
    "clvp.ClvpConfig": ("from_sub_model_configs", "text_config speech_config decoder_config"),
    "d_fine.DFineConfig": _BACKBONES,
    "detr.DetrConfig": _BACKBONE,
    "flava.FlavaConfig": (
        "from_configs",
        "image_config text_config multimodal_config image_codebook_config",
    ),
    "instructblip.InstructBlipConfig": _QFORMER,
    "instructblipvideo.InstructBlipVideoConfig": _QFORMER,
    "mask2former.Mask2FormerConfig": _BACKBONE,
    "maskformer.MaskFormerConfig": (
        "from_backbone_and_decoder_configs",
        "backbone_config decoder_config",
    ),
    "musicgen.MusicgenConfig": _PARTS,
    "musicgen_melody.MusicgenMelodyConfig": _PARTS,
    "parakeet.ParakeetCTCConfig": ("from_encoder_config", "encoder_config"),
    "rt_detr.RTDetrConfig": _BACKBONES,
    "rt_detr_v2.RTDetrV2Config": _BACKBONES,
    "tvp.TvpConfig": _BACKBONE,
}

#: The configuration classes of each module, with their methods.
MODULES: dict[str, list[tuple[str, str, str]]] = {
    _BASE: [
        ("PreTrainedConfig", f"from_text_{part}_configs", f"text_config {part}_config")
        for part in ("vision", "audio")
    ]
}
for _path, (_method, _fields) in _METHODS.items():
    _folder, _, _class_name = _path.partition(".")
    _module = f"transformers.models.{_folder}.configuration_{_folder}"
    MODULES[_module] = [(_class_name, _method, _fields)]


def add_methods(module: ModuleType) -> None:
    """Adds the class methods in `MODULES` to the configuration classes of a module.

    Methods that Transformers still has are not replaced.
    """
    for class_name, method, fields in MODULES[module.__name__]:
        config_class = getattr(module, class_name, None)
        if config_class is not None and not hasattr(config_class, method):
            setattr(config_class, method, _constructor(method, fields.split()))


def _constructor(name: str, fields: list[str]) -> classmethod[Any, Any, Any]:
    """Returns a class method that creates a configuration from the configurations of its parts.

    The class method passes each of its arguments to the class as a field. The names of the
    arguments end with `_config`: the argument for a field `decoder` is `decoder_config`.
    """
    parameter = inspect.Parameter
    parameters = [
        parameter(f"{field.removesuffix('_config')}_config", parameter.POSITIONAL_OR_KEYWORD)
        for field in fields
    ]
    if name == "from_vision_qformer_text_configs":
        parameters[-1] = parameters[-1].replace(default=None)
    signature = inspect.Signature([*parameters, parameter("kwargs", parameter.VAR_KEYWORD)])

    def construct(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments.pop("kwargs")
        parts = zip(fields, bound.arguments.values(), strict=True)
        return cls(**{field: _as_dict(config) for field, config in parts}, **options)

    construct.__name__ = name
    construct.__doc__ = (
        f"Creates a configuration from the configurations of its parts: {', '.join(fields)}."
    )
    self_parameter = parameter("cls", parameter.POSITIONAL_ONLY)
    construct.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *signature.parameters.values()]
    )
    return classmethod(construct)


def _as_dict(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else config

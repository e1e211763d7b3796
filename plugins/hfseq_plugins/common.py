"""Helpers that several plugins share: presets, and saving in the format of a Transformers class.

Some of hfseq's own model classes compute the same function as a class of Transformers with other
options. The configuration of this Transformers model is called the *twin*. A model whose
configuration has a twin is saved in the format of the twin, so that PyTorch's Auto classes can load
it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from hfseq.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

    _Model = FlaxPreTrainedModel
else:
    _Model = object  # a mixin: subclasses also derive from a model class

logger = logging.getLogger(__name__)


def num_labels(config: PreTrainedConfig) -> int:
    """Returns the number of labels as an `int` (`PreTrainedConfig` declares it as optional)."""
    return cast("int", config.num_labels)


class Presets:
    """Mixin for configuration classes with named presets, such as model sizes.

    Attributes:
        presets: The options of each preset, by name.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Creates the configuration of a preset.

        Args:
            name: A key of `presets`.
            **changes: Options that override those of the preset.

        Returns:
            The configuration.

        Raises:
            UsageError: The preset does not exist.
        """
        if name not in cls.presets:
            names = ", ".join(cls.presets)
            raise UsageError(
                f"no preset '{name}'{did_you_mean(name, list(cls.presets))} (known: {names})"
            )
        return cls(**{**cls.presets[name], **changes})


def invalid_choices(config: PreTrainedConfig, choices: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns an error message for each option with a value that is not allowed.

    Args:
        config: The configuration to check.
        choices: The valid values of each option, by the option's name.
    """
    values = {name: getattr(config, name) for name in choices}
    return [
        f"{name}='{value}' is unknown{did_you_mean(value, choices[name])} "
        f"(known: {', '.join(choices[name])})"
        for name, value in values.items()
        if value not in choices[name]
    ]


class StoredAsTwin(_Model):
    """Mixin for model classes that are saved in the format of a class in Transformers.

    The configuration class must provide `twin()`, `twin_type` and `twin_problems()`. If the
    configuration has no twin, the model is saved in hfseq's own format, with a warning that names
    the reasons.

    Attributes:
        twin_names: The name of the PyTorch class for each `twin_type`.
    """

    twin_names: ClassVar[Mapping[str, str]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._warned = False
        # The name of the PyTorch class depends on the configuration, so it is set on the instance.
        self.torch_class_name = self._stored_class_name  # type: ignore[method-assign]

    def _stored_class_name(self) -> str:
        if self.config.twin_problems():
            return type(self).__name__.removeprefix("Flax")
        return self.twin_names[self.config.twin_type]

    def stored_config(self) -> PreTrainedConfig:
        """Returns the twin's configuration.

        Without a twin this is the model's own configuration, and the first call logs a warning.
        """
        problems = self.config.twin_problems()
        if not problems:
            return self.config.twin()
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is saved in hfseq's own format, which PyTorch's AutoModel classes cannot load: "
                "no class of Transformers computes the same function, since %s",
                type(self).__name__,
                "; and ".join(problems),
            )
        return self.config


def options_not_in_twin(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `config` that its twin does not have or sets to another value.

    Args:
        config: The configuration of the hfseq model.
        stored: The twin's configuration as a dictionary.
    """
    options = config.to_diff_dict()
    options.pop("transformers_version", None)
    return {
        name: value
        for name, value in options.items()
        if name not in stored or stored[name] != value
    }

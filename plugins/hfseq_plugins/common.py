"""What several plugins share: named sizes, and checkpoints that are stored as a stock twin's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hfseq.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)


class Presets:
    """Named sizes of a configuration class, in ``presets``."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the configuration of a preset, with ``changes``.

        **Raises:** UsageError for a name that is no preset.
        """
        if name not in cls.presets:
            known = ", ".join(cls.presets)
            raise UsageError(
                f"no preset '{name}'{did_you_mean(name, list(cls.presets))} (known: {known})"
            )
        return cls(**{**cls.presets[name], **changes})


def invalid_choices(config: PreTrainedConfig, choices: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each field of ``config`` whose value is none of its ``choices``."""
    given = {name: getattr(config, name) for name in choices}
    return [
        f"{name}='{value}' is unknown{did_you_mean(value, choices[name])} "
        f"(known: {', '.join(choices[name])})"
        for name, value in given.items()
        if value not in choices[name]
    ]


class StoredAsTwin:
    """Saving under the name of a stock class that computes the same, for a model class.

    Its configuration has ``twin()``, ``twin_type`` and ``twin_problems()``; ``twin_names`` gives
    PyTorch's class for each type of twin. Configurations without a twin are written natively, with
    a warning that says why.
    """

    twin_names: ClassVar[Mapping[str, str]]

    def __init__(self: FlaxPreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._warned = False
        # Which class PyTorch has for it depends on the configuration.
        self.torch_class_name = self._stored_class_name

    def _stored_class_name(self: FlaxPreTrainedModel) -> str:
        if self.config.twin_problems():
            return type(self).__name__.removeprefix("Flax")
        return self.twin_names[self.config.twin_type]

    def stored_config(self: FlaxPreTrainedModel) -> PreTrainedConfig:
        """Return the configuration of the stock twin, or the model's own with a warning."""
        problems = self.config.twin_problems()
        if not problems:
            return self.config.twin()
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s is saved in hfseq's own format, which PyTorch's AutoModel classes cannot load: "
                "it has no exact twin among the stock classes of transformers, since %s",
                type(self).__name__,
                "; and ".join(problems),
            )
        return self.config


def options_not_in_twin(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``stored``, the description of the twin, does not say about ``config``."""
    options = config.to_diff_dict()
    options.pop("transformers_version", None)
    return {name: v for name, v in options.items() if name not in stored or stored[name] != v}

"""Models that are made of others, each under its own name in the tree and in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hfseq import plugins
from hfseq.checkpoints.weights import DerivedTensor, ParamPath, WeightMap
from hfseq.modeling.pretrained import FlaxPreTrainedModel
from hfseq.nn import sharding, trees

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CompositeWeightMap(WeightMap):
    """The names of a composite: those that each of its ``parts`` has, behind the part's name."""

    def __init__(
        self,
        shapes: Mapping[ParamPath, tuple[int, ...]],
        parts: Mapping[str, WeightMap],
        stacked: Mapping[ParamPath, Sequence[ParamPath]] | None = None,
    ):
        self.parts = dict(parts)
        aliases, fallbacks = (
            {
                f"{part}.{name}": f"{part}.{other}"
                for part, names in self.parts.items()
                for name, other in getattr(names, kind).items()
            }
            for kind in ("aliases", "fallbacks")
        )
        super().__init__(shapes, aliases=aliases, fallbacks=fallbacks, stacked=stacked)

    def torch_name(self, path: ParamPath) -> str:
        """Return the PyTorch name of the parameter at ``path``."""
        part = self.parts.get(path[0])
        return f"{path[0]}.{part.torch_name(path[1:])}" if part else super().torch_name(path)

    def apply_synonyms(self, name: str, native: bool = False) -> str:
        """Return the name that is written of one that is read."""
        head, _, rest = name.partition(".")
        if head not in self.parts:
            return name
        part = self.parts[head]
        return f"{head}.{part.apply_synonyms(rest, native) if native else part.resolve_name(rest)}"

    def _known(self, name: str, names: Mapping[str, Any]) -> bool:
        head, _, rest = name.partition(".")
        inside = head in self.parts and self.parts[head]._known(rest, names)
        return inside or super()._known(name, names)


class FlaxCompositePreTrainedModel(FlaxPreTrainedModel):
    """Base of models that are made of others.

    ``part_configs`` maps the name of each part, in the tree and in files, to the attribute of the
    configuration that describes it. The module gets the part models, which have no parameters, as
    ``parts`` and makes theirs of them.
    """

    part_configs: ClassVar[Mapping[str, str]] = {}
    # The tasks of parts that have a head.
    part_tasks: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        scan = kwargs.get("scan_layers", False)
        self.parts: dict[str, FlaxPreTrainedModel] = {
            name: self.part_class(name, part)(part, _do_init=False, scan_layers=scan)
            for name, attribute in self.part_configs.items()
            for part in [getattr(config, attribute)]
        }
        super().__init__(config, *args, parts=self.parts, **kwargs)

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Return the model class of a part: that without a head, or with that of its task."""
        task = cls.part_tasks.get(name, "Model")
        return plugins.load().architectures.get(config.model_type).load_head(task)

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> WeightMap:
        inside = {
            name: part._names({p[1:]: shape for p, shape in shapes.items() if p[0] == name})
            for name, part in self.parts.items()
        }
        return CompositeWeightMap(shapes, inside, self._stacked)

    def derived_weights(self) -> Mapping[str, DerivedTensor]:
        """Return what PyTorch's class stores beside the parameters of each part."""
        found = {}
        for part, model in self.parts.items():
            for name, entry in model.derived_weights().items():
                value = f"{part}.{entry.value}" if isinstance(entry.value, str) else entry.value
                found[f"{part}.{name}"] = dataclasses.replace(entry, value=value)
        return found

    def sharding_rules(self) -> sharding.Rules:
        """Return the rules of each part below its name, then the architecture's own."""
        inside = [
            (f"^{name}/.*(?:{pattern.removeprefix('^')})", tactic)
            for name, part in self.parts.items()
            for pattern, tactic in part.sharding_rules() or sharding.DEFAULT_RULES
        ]
        return [*inside, *(super().sharding_rules() or ())]

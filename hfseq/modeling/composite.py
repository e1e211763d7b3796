"""Models that consist of other models, such as a text encoder and an image encoder.

The models that a composite model consists of are its parts. Each part has a name, which is the
first component of its parameter paths and of its tensor names in files.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from flax import nnx

from hfseq import plugins
from hfseq.checkpoints.weights import DerivedTensor, ParamPath, Tensor, WeightMap
from hfseq.modeling.pretrained import FlaxPreTrainedModel
from hfseq.nn import sharding, trees

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CompositeWeightMap(WeightMap):
    """The weight map of a composite model.

    A tensor name is the name of a part, a dot, and the name of the tensor in the weight map of this
    part.

    Args:
        shapes: Shapes of all parameters.
        parts: Weight maps of the parts, by name.
        stacked: Maps the path of each stacked layer to the paths of the layers that it contains.
    """

    def __init__(
        self,
        shapes: Mapping[ParamPath, tuple[int, ...]],
        parts: Mapping[str, WeightMap],
        stacked: Mapping[ParamPath, Sequence[ParamPath]] | None = None,
    ):
        self.parts = dict(parts)
        aliases = {
            f"{part}.{name}": f"{part}.{other}"
            for part, names in self.parts.items()
            for name, other in names.aliases.items()
        }
        fallbacks = {
            f"{part}.{name}": [f"{part}.{other}" for other in others]
            for part, names in self.parts.items()
            for name, others in names.fallbacks.items()
        }
        joined = {
            name: entry for names in self.parts.values() for name, entry in names.joined.items()
        }
        super().__init__(
            shapes, aliases=aliases, fallbacks=fallbacks, stacked=stacked, joined=joined
        )

    def torch_name(self, path: ParamPath) -> str:
        """Returns the PyTorch name of the parameter at ``path``."""
        part = self.parts.get(path[0])
        return f"{path[0]}.{part.torch_name(path[1:])}" if part else super().torch_name(path)

    def module_name(self, name: str) -> str:
        """Converts a tensor name in PyTorch files to the name in PyTorch's module tree.

        The files of adapters use the names in the module tree.
        """
        head, _, part_name = name.partition(".")
        return f"{head}.{self.parts[head].module_name(part_name)}" if head in self.parts else name

    def apply_synonyms(self, name: str, native: bool = False) -> str:
        """Replaces old spellings in a tensor name by the spellings that hfseq writes."""
        head, _, part_name = name.partition(".")
        if head not in self.parts:
            return name
        part = self.parts[head]
        saved_name = (
            part.apply_synonyms(part_name, native) if native else part.resolve_name(part_name)
        )
        return f"{head}.{saved_name}"

    def _is_ignored(self, name: str) -> bool:
        head, _, part_name = name.partition(".")
        inside = head in self.parts and self.parts[head]._is_ignored(part_name)
        return inside or super()._is_ignored(name)

    def _is_copy(self, name: str) -> bool:
        head, _, part_name = name.partition(".")
        inside = head in self.parts and self.parts[head]._is_copy(part_name)
        return inside or super()._is_copy(name)


class FlaxCompositePreTrainedModel(FlaxPreTrainedModel):
    """Base class of models that consist of other models, which are called parts.

    The constructor creates a model object for each part. These objects do not contain parameters,
    because the composite model contains the parameters of all parts. The constructor passes the
    objects to the NNX module as the argument ``parts``, and the NNX module creates its submodules
    from them.

    Args:
        config: The configuration of the composite model.
        *args: Other positional arguments of :class:`FlaxPreTrainedModel`.
        part_options: Maps the name of a part to constructor arguments for the model of this part.
        **kwargs: Other keyword arguments of :class:`FlaxPreTrainedModel`.

    Attributes:
        part_configs: Maps the name of each part to the name of the attribute of ``config`` that
            contains the configuration of this part.
        part_tasks: Maps the name of a part to its task, such as "ForCausalLM". Parts without an
            entry are base models without a task head.
    """

    part_configs: ClassVar[Mapping[str, str]] = {}
    part_tasks: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        config: PreTrainedConfig,
        *args: Any,
        part_options: Mapping[str, Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ):
        scan, part_options = kwargs.get("scan_layers", False), dict(part_options or {})
        for name, attribute in self.part_configs.items():
            part = getattr(config, attribute)
            part_class = self.part_class(name, part)
            if part_class._saves_tied_tensor(part, kwargs.get("peft_config"), f"{name}."):
                part_options[name] = {**part_options.get(name, {}), "untied": True}
        self.parts: dict[str, FlaxPreTrainedModel] = {
            name: self.part_class(name, part)(
                part, _do_init=False, scan_layers=scan, **part_options.get(name, {})
            )
            for name, attribute in self.part_configs.items()
            for part in [getattr(config, attribute)]
        }
        if part_options:  # the constructor of a part may change the configuration of the part
            config = copy.copy(config)
            for name in part_options:
                setattr(config, self.part_configs[name], self.parts[name].config)
        self._part_options = part_options
        super().__init__(config, *args, parts=self.parts, **kwargs)

    @classmethod
    def checkpoint_options(
        cls, tensors: Mapping[str, Tensor], config: PreTrainedConfig
    ) -> dict[str, Any]:
        """Returns the constructor arguments that depend on the tensors of the checkpoint.

        The method collects them from the model classes of the parts.
        """
        part_options = {}
        for name, attribute in cls.part_configs.items():
            part = getattr(config, attribute)
            inside = {
                key.removeprefix(f"{name}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{name}.")
            }
            if options := cls.part_class(name, part).checkpoint_options(inside, part):
                part_options[name] = options
        return {"part_options": part_options} if part_options else {}

    @property
    def checkpoint_arguments(self) -> dict[str, Any]:
        """The constructor arguments from :meth:`checkpoint_options` that this model received."""
        return {"part_options": self._part_options} if self._part_options else {}

    @classmethod
    def part_class(cls, name: str, config: PreTrainedConfig) -> Any:
        """Returns the model class of a part for its task in ``part_tasks``.

        A part without a task has the class of the base model.
        """
        task = cls.part_tasks.get(name, "Model")
        return plugins.load().architectures.get(config.model_type).load_head(task)

    def _apply_is_causal(self, module: nnx.Module) -> None:
        for name, part in self.parts.items():
            part._apply_is_causal(getattr(module, name))

    def _names(self, shapes: Mapping[trees.Path, tuple[int, ...]]) -> WeightMap:
        inside = {
            name: part._names({p[1:]: shape for p, shape in shapes.items() if p[0] == name})
            for name, part in self.parts.items()
        }
        return CompositeWeightMap(shapes, inside, self._stacked)

    def derived_weights(self) -> Mapping[str, DerivedTensor]:
        """Returns the additional tensors that PyTorch's classes store, for all parts."""
        derived = {}
        for part, model in self.parts.items():
            for name, entry in model.derived_weights().items():
                value = f"{part}.{entry.value}" if isinstance(entry.value, str) else entry.value
                derived[f"{part}.{name}"] = dataclasses.replace(entry, value=value)
        return derived

    def sharding_rules(self) -> sharding.Rules:
        """Returns the sharding rules of all parts, followed by the rules of the composite model.

        The patterns of a part only match paths that begin with the name of the part.
        """
        inside = [
            (f"^{name}/.*(?:{pattern.removeprefix('^')})", tactic)
            for name, part in self.parts.items()
            for pattern, tactic in part.sharding_rules() or sharding.DEFAULT_RULES
        ]
        return [*inside, *(super().sharding_rules() or ())]

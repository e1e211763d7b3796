"""The parameters and buffers of a PyTorch model, and the hfseq layers that hold them.

The PyTorch model is built once per configuration, without weights. hfseq's layers replace its
`Linear`, `Conv1D`, `Embedding` and `LayerNorm` modules, so that adapters, precision recipes and
sharding apply to them. All other parameters are attributes of plain NNX modules, with their names
in PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import torch
from flax import nnx
from transformers.pytorch_utils import Conv1D

from hfseq import nn
from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.nn.trees import Path
from hfseq_plugins.bridge import modules
from hfseq_plugins.bridge.names import FileNames
from hfseq_plugins.bridge.variables import Holder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LayerType = Literal["linear", "conv1d", "embedding", "table", "layer_norm", "plain"]

#: Names of variables that the weight maps of hfseq translate to other names in files.
_RESERVED_LEAVES = ("kernel", "scale", "embedding", "mean", "var")
#: For the types of hfseq layers, maps the names of parameters in PyTorch to those in hfseq.
_LAYER_LEAVES = {
    "linear": {"weight": "kernel"},
    "conv1d": {"weight": "kernel"},
    "embedding": {"weight": "embedding"},
    "table": {"weight": "embedding"},
    "layer_norm": {"weight": "scale"},
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A PyTorch module that has parameters itself, not only in its submodules.

    Attributes:
        name: Name of the module in PyTorch.
        layer_type: The type of the hfseq layer that replaces the module. For two types, PyTorch's
            code runs instead of the hfseq layer: `"table"` is an embedding with its own forward
            pass, and `"plain"` is any other module.
        leaves: Maps the names of the module's parameters in PyTorch to their names in hfseq.
    """

    name: str
    layer_type: LayerType
    leaves: Mapping[str, str]


class Structure:
    """The modules, parameters and buffers of a PyTorch model.

    Args:
        config: The configuration.
        class_name: Name of the PyTorch class in Transformers.

    Attributes:
        module: The PyTorch module. Its parameters have no values.
        layers: The PyTorch modules that have parameters themselves, in PyTorch's order.
        names: The PyTorch name of each variable by its path in hfseq.
        aliases: Maps the other names of tied parameters to the name in `names`.
        shapes: The shape of each parameter by PyTorch name.
        frozen: The PyTorch names of parameters that are not trained.
        statistics: The initial values of floating-point buffers that checkpoints contain, and of
            integer buffers whose values only checkpoints contain, by PyTorch name.
        tables: The paths in hfseq of these integer buffers.
        files: Converts between the names of tensors in PyTorch and in checkpoint files.
        constants: The values of other integer buffers that checkpoints contain, by PyTorch name.
            They follow from the configuration and are not variables of the NNX module.
    """

    #: The compiled initialization, which `hfseq_plugins.bridge.initialization` sets.
    initialize: Any = None
    #: Initial values of parameters that only PyTorch's constructors set, by name.
    constructed: dict[str, np.ndarray] | None = None
    #: The `hfseq_plugins.bridge.generation.CachePlan`, which is set on first use.
    cache_plan: Any = None

    def __init__(self, config: PreTrainedConfig, class_name: str):
        self.module: Any
        try:
            self.module = modules.build(config, class_name)
        except HfseqError:
            raise
        except ImportError as error:
            package = re.search(r"requires? the (\w+) library", str(error))
            remedy = f": pip install {package[1]}" if package else f" ({first_line(error)})"
            raise UsageError(
                f"Transformers' {class_name} needs a package that is not installed{remedy}"
            ) from error
        except Exception as error:
            raise UsageError(
                f"PyTorch's {class_name} cannot be built with this configuration: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        self.layers: list[Layer] = []
        self.names: dict[Path, str] = {}
        self.aliases: dict[str, str] = {}
        self.frozen: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        owners: dict[int, str] = {}
        for name, part in self.module.named_modules(remove_duplicate=False):
            own_names = []
            for leaf, parameter in part._parameters.items():
                if parameter is None:
                    continue
                full = f"{name}.{leaf}" if name else leaf
                if id(parameter) in owners:
                    if owners[id(parameter)] != full:
                        self.aliases[full] = owners[id(parameter)]
                    continue
                owners[id(parameter)] = full
                own_names.append(leaf)
                self.shapes[full] = tuple(parameter.shape)
                if not parameter.requires_grad:
                    self.frozen.add(full)
            if own_names:
                layer_type = _layer_type(part, own_names)
                renamed = _LAYER_LEAVES.get(layer_type)
                leaves = {
                    leaf: _plain_leaf(leaf) if renamed is None else renamed.get(leaf, leaf)
                    for leaf in own_names
                }
                self.layers.append(Layer(name, layer_type, leaves))
                for leaf, path_leaf in leaves.items():
                    self.names[(*_path(name), path_leaf)] = f"{name}.{leaf}" if name else leaf
        self.files = FileNames(self.module)
        stored = set(self.module.state_dict(keep_vars=True))
        values = {n: v for n, v in modules.buffers(self.module).items() if n in stored}
        self.statistics = {
            n: v for n, v in values.items() if np.issubdtype(v.dtype, np.floating) or _is_table(v)
        }
        self.constants = {
            name: np.asarray(buffer.numpy())
            for name, buffer in self.module.named_buffers()
            if name in values and name not in self.statistics
        }
        self.buffer_paths = {
            name: (*_path(name.rpartition(".")[0]), _plain_leaf(name.rpartition(".")[2]))
            for name in self.statistics
        }
        self.names |= {path: name for name, path in self.buffer_paths.items()}
        self.tables = {
            self.buffer_paths[n] for n, v in self.statistics.items() if v.dtype.kind == "i"
        }

    @property
    def parameters(self) -> inspect.Signature:
        """The signature of the forward pass of the PyTorch class, without `self`."""
        return forward_signature(type(self.module))

    @functools.cached_property
    def has_dropout(self) -> bool:
        """Whether a dropout rate in the modules or in the configuration is positive."""
        rates = [getattr(m, "p", 0.0) for m in self.module.modules() if "Dropout" in repr(type(m))]
        rates += _rates(self.module.config.to_dict())
        return any(rate > 0 for rate in rates)

    @functools.cached_property
    def packs(self) -> bool:
        """Whether a row can contain several packed documents that do not attend to each other.

        This requires that tokens only interact through attention, that Transformers' registry
        builds the masks, and that positions are an input of the model.
        """
        torch_class, config = type(self.module), self.module.config
        source = vars(sys.modules[torch_class.__module__])
        makes_masks = any(n.startswith("create_") and n.endswith("_mask") for n in source)
        layer_types = set(getattr(config.get_text_config(), "layer_types", None) or ())
        mixes_otherwise = any(isinstance(m, torch.nn.Conv1d) for m in self.module.modules())
        return (
            bool(getattr(torch_class, "_supports_attention_backend", False))
            and makes_masks
            and not getattr(torch_class, "_is_stateful", False)
            and not mixes_otherwise
            and layer_types <= {"full_attention", "sliding_attention", "chunked_attention"}
            and not getattr(config, "is_encoder_decoder", False)
            and {"input_ids", "position_ids"} <= set(self.parameters.parameters)
        )

    def first_position(self) -> int:
        """Returns the position number of the first token.

        It is 0, except in RoBERTa and similar models, which reserve positions for padding.
        """
        source = vars(sys.modules[type(self.module).__module__])
        helper = "create_position_ids_from_input_ids"
        methods = [vars(type(part)) for part in self.module.modules()]
        if helper not in source and not any(helper in names for names in methods):
            return 0
        for name, part in self.module.named_modules():
            if "position" in name.rpartition(".")[2] and isinstance(part, torch.nn.Embedding):
                if part.padding_idx is not None:
                    return int(part.padding_idx) + 1
        return 0


def structure_of(config: PreTrainedConfig, class_name: str) -> Structure:
    """Returns the structure of a model. Models with equal configurations share one structure."""
    text = json.dumps(config.to_dict(), default=str, sort_keys=True)
    key = (class_name, type(config).__name__, text)
    if key not in _structures:
        while len(_structures) >= 32:
            _structures.pop(next(iter(_structures)))
        _structures[key] = Structure(config, class_name)
    return _structures[key]


_structures: dict[tuple[str, str, str], Structure] = {}


def forward_signature(torch_class: type) -> inspect.Signature:
    """Returns the signature of the forward pass of a PyTorch class, without `self`."""
    signature = inspect.signature(torch_class.forward)  # type: ignore[attr-defined]
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _is_table(value: np.ndarray) -> bool:
    """Returns whether only a checkpoint has the values of an integer buffer.

    An example is `tid2eid`, the table of the experts of each token in DeepSeek-V4.
    """
    return value.ndim > 0 and not value.any() and np.issubdtype(value.dtype, np.integer)


def _layer_type(part: Any, names: list[str]) -> LayerType:
    exact = type(part)
    if len(names) < sum(parameter is not None for parameter in part._parameters.values()):
        return "plain"  # the other parameters are tied to those of a module before this one
    if exact is torch.nn.Linear and "weight" in names:
        return "linear"
    if exact is Conv1D and "weight" in names:
        return "conv1d"
    if isinstance(part, torch.nn.Embedding) and names == ["weight"]:
        return "embedding" if exact is torch.nn.Embedding and not part.max_norm else "table"
    if exact is torch.nn.LayerNorm and len(part.normalized_shape) == 1 and "weight" in names:
        return "layer_norm"
    return "plain"


def _plain_leaf(name: str) -> str:
    """Returns the name in hfseq of a parameter of a plain module.

    Names that have another meaning in hfseq, such as `kernel` and `scale`, get a suffix.
    """
    return f"{name}_" if name in _RESERVED_LEAVES or name.startswith("lora_") else name


def _path(name: str) -> Path:
    return tuple(name.split(".")) if name else ()


def _rates(values: Any) -> list[float]:
    """Returns the values of all dropout rates in a nested configuration."""
    if not isinstance(values, dict):
        return []
    rates = [rate for value in values.values() for rate in _rates(value)]
    for name, value in values.items():
        is_rate = (
            "drop" in str(name) and isinstance(value, float | int) and not isinstance(value, bool)
        )
        if is_rate and math.isfinite(value):
            rates.append(float(value))
    return rates


def new_layer(part: torch.nn.Module, layer: Layer, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the hfseq layer that holds the parameters of a PyTorch module, filled with zeros."""
    zeros = jax.nn.initializers.zeros
    has_bias = "bias" in layer.leaves
    match layer.layer_type:
        case "linear":
            assert isinstance(part, torch.nn.Linear)
            return nn.Linear(part.in_features, part.out_features, zeros, rngs, use_bias=has_bias)
        case "conv1d":
            assert isinstance(part, Conv1D)
            inner, outer = part.weight.shape
            return nn.Conv1D(inner, outer, zeros, rngs, use_bias=has_bias)
        case "embedding" | "table":
            assert isinstance(part, torch.nn.Embedding)
            return nn.Embed(part.num_embeddings, part.embedding_dim, zeros, rngs)
        case "layer_norm":
            assert isinstance(part, torch.nn.LayerNorm)
            return nn.LayerNorm(part.normalized_shape[0], part.eps, use_bias=has_bias)
        case _:
            return Holder()

"""Models as attributes of NNX modules.

The models of Transformers 4 were not pytrees, so NNX modules accepted them as attributes. hfseq's
models are pytrees, which NNX only accepts if their class is registered as data.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

BASE = "hfseq.modeling.base"


def register_models(module: ModuleType) -> None:
    """Registers all subclasses of `FlaxModel` in the module `BASE`, and future subclasses."""
    from flax import nnx

    model_class = module.FlaxModel
    original = vars(model_class)["__init_subclass__"]
    if getattr(original, "registers_data", False):
        return

    def init_subclass(cls: type, /, **kwargs: Any) -> None:
        original.__get__(None, cls)(**kwargs)
        nnx.register_data_type(cls)

    method: Any = classmethod(init_subclass)
    method.registers_data = True
    model_class.__init_subclass__ = method
    classes = [model_class]
    while classes:
        subclass = classes.pop()
        nnx.register_data_type(subclass)
        classes += subclass.__subclasses__()

"""The module classes of Transformers 4: ``FlaxBertModule(config).apply({"params": p}, ids)``.

They are Linen's ``init`` and ``apply`` of a model without parameters of its own, for programs
that worked below ``FlaxPreTrainedModel``. Each model class has one, under v4's name, in its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class FlaxModule:
    """A model's structure: pure functions of the variables that the caller keeps."""

    model_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, dtype: DTypeLike = jnp.float32, **options: Any):
        self.model = self.model_class(config, dtype=dtype, _do_init=False, **options)

    @classmethod
    def of(cls, model: Any) -> FlaxModule:
        """Wrap an existing model."""
        module = cls.__new__(cls)
        module.model = model
        return module

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def dtype(self) -> Any:
        """The type of computation."""
        return self.model.dtype

    def init(self, rngs: jax.Array | Mapping[str, jax.Array], *_: Any, **__: Any) -> dict[str, Any]:
        """Return fresh variables, ``{"params": tree}``; example inputs are not needed."""
        key = rngs["params"] if isinstance(rngs, Mapping) else rngs
        return {"params": self.model.init_weights(key)}

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: jax.Array | Mapping[str, jax.Array] | None = None,
        mutable: bool | Sequence[str] = False,
        deterministic: bool = True,
        method: str | Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on ``variables`` ({"params": ..., "cache": ...}).

        ``rngs`` is a key or ``{"dropout": key}``; ``method`` is ``"encode"`` or ``"decode"``, or a
        function of that name; with ``mutable=["cache"]`` the result is a pair with the new cache.
        """
        entry = method if isinstance(method, str) else getattr(method, "__name__", "__call__")
        if variables.get("cache"):
            kwargs["past_key_values"] = variables["cache"]
        key = rngs.get("dropout") if isinstance(rngs, Mapping) else rngs
        output = getattr(self.model, entry)(
            *args, params=variables["params"], train=not deterministic, dropout_rng=key, **kwargs
        )
        return (output, {"cache": output["past_key_values"]}) if mutable else output


def linen_class(model_class: type) -> type[FlaxModule]:
    """Return the module class of a model class, under v4's name."""
    name = f"{model_class.__name__.removesuffix('Model')}Module"
    content = {
        "__doc__": f"The structure of {model_class.__name__} (see hfseq.modeling.linen).",
        "__module__": model_class.__module__,
        "model_class": model_class,
    }
    return type(name, (FlaxModule,), content)

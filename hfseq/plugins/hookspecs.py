"""The hooks that a plugin can implement.

Registration hooks receive a ``register`` callable and may call it any number of times. A *target*
is an object or a string ``"package.module:name"``, which is imported on first use. Prefer strings,
because they keep the discovery of plugins fast. docs/plugins.md has a section with a runnable
example for each hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from hfseq.plugins.registry import Target

if TYPE_CHECKING:
    import datasets

hookspec = pluggy.HookspecMarker("hfseq")
hookimpl = pluggy.HookimplMarker("hfseq")


class Register(Protocol):
    """The callable that a registration hook receives."""

    def __call__(self, name: str, target: Target) -> None:
        """Registers ``target`` under ``name``. A name that is already registered is an error."""


class RegisterArchitecture(Protocol):
    """The callable that ``register_architectures`` receives."""

    def __call__(
        self,
        model_type: str,
        *,
        config: Target,
        heads: Mapping[str, Target],
        sharding: Target = None,
        card: str | None = None,
        citation: str = "",
    ) -> None:
        """Registers an architecture.

        Args:
            model_type: The model type.
            config: The Transformers configuration class.
            heads: Maps the suffix of an Auto class (``"Model"``, ``"ForMaskedLM"``, ...) to a model
                class.
            sharding: List of sharding rules (regular expression, tactic), or `None`.
            card: One line about the architecture for the model card.
            citation: BibTeX entries of the papers about the architecture.
        """


@hookspec
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers architectures, each with a configuration, model classes and sharding rules."""


@hookspec(firstresult=True)
def fallback_architecture(model_type: str, task: str) -> Mapping[str, Any] | None:
    """Describes an architecture that no plugin registers, or that is requested with ``--bridge``.

    The first result that is not `None` is used. The bridge implements this hook for every model
    type of Transformers.

    Args:
        model_type: The model type.
        task: The task, which is a suffix of an Auto class such as ``"ForObjectDetection"``.

    Returns:
        The keyword arguments of ``register`` in ``register_architectures``, or `None`.
    """


@hookspec
def register_objectives(register: Register) -> None:
    """Registers training objectives.

    A target is a subclass of ``hfseq.objectives.base.Objective``.
    """


@hookspec
def register_optimizers(register: Register) -> None:
    """Registers optimizers.

    A target is called as ``target(learning_rate, arguments, decay_mask)`` and returns an
    ``optax.GradientTransformation``. ``learning_rate`` is an Optax schedule, ``arguments`` are the
    ``TrainingArguments``, and ``decay_mask`` is a function that maps the parameters to a tree of
    booleans. A boolean is true if weight decay applies to the parameter.
    """


@hookspec
def register_tokenizers(register: Register) -> None:
    """Registers the special tokens of model types, as ``hfseq.data.tokenizers.TokenizerFamily``."""


@hookspec
def register_attention(register: Register) -> None:
    """Registers attention functions with the signature of ``jax.nn.dot_product_attention``."""


@hookspec
def register_precisions(register: Register) -> None:
    """Registers precisions: ``hfseq.nn.precision.Precision`` objects or their factories."""


@hookspec
def register_trackers(register: Register) -> None:
    """Registers experiment trackers.

    A target is called as ``target(run_directory, arguments, run_config)`` and returns an object
    with the methods ``log(metrics, step)``, ``text(tag, text, step)`` and ``close()``.
    """


@hookspec(firstresult=True)
def load_dataset(
    name: str, arguments: Any
) -> datasets.DatasetDict | dict[str, datasets.Dataset] | None:
    """Returns the splits of a dataset, or `None` if this plugin does not provide it.

    The first result that is not `None` is used.

    Args:
        name: The name of the dataset.
        arguments: The data arguments of the run.
    """


@hookspec
def model_card_sections(context: dict[str, Any]) -> str | None:
    """Returns Markdown that is added to the model card, or `None`.

    Args:
        context: The variables of the model card template.
    """

"""What a plugin can add to hfseq: nine hooks, one docstring each.

Registration hooks receive a ``register`` callable and may call it any number of times. A *target*
is an object or, better, a string ``"package.module:name"`` that is imported when it is first used,
so that listing plugins stays instant. Every hook has a section with a runnable example in
docs/plugins.md.
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
    """What a registration hook calls, once for each thing it adds."""

    def __call__(self, name: str, target: Target) -> None:
        """Add ``target`` under ``name``; a name that is taken is an error."""


class RegisterArchitecture(Protocol):
    """What ``register_architectures`` calls, once for each architecture."""

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
        """Add an architecture.

        ``config`` is its Transformers configuration class, ``heads`` maps the suffix of an Auto
        class (``"Model"``, ``"ForMaskedLM"``...) to a model class, ``sharding`` is a list of rules
        (regular expression, tactic), ``card`` a line on the architecture for the model card,
        ``citation`` the BibTeX of its papers.
        """


@hookspec
def register_architectures(register: RegisterArchitecture) -> None:
    """Add model families: a configuration class, a model class for each task, sharding rules."""


@hookspec
def register_objectives(register: Register) -> None:
    """Add training objectives; the target is a subclass of ``hfseq.objectives.base.Objective``."""


@hookspec
def register_optimizers(register: Register) -> None:
    """Add optimizers.

    The target is called as ``target(learning_rate, arguments, decay_mask)`` with an optax schedule,
    the TrainingArguments and a function from parameters to a mask; it returns a
    GradientTransformation.
    """


@hookspec
def register_tokenizers(register: Register) -> None:
    """Add the special tokens of a model family: a ``hfseq.data.tokenizers.TokenizerFamily``."""


@hookspec
def register_attention(register: Register) -> None:
    """Add attention functions with the signature of ``jax.nn.dot_product_attention``."""


@hookspec
def register_precisions(register: Register) -> None:
    """Add precision recipes: ``hfseq.nn.precision.Precision`` objects or their factories."""


@hookspec
def register_trackers(register: Register) -> None:
    """Add metric sinks.

    The target is called as ``target(run_directory, arguments, run_config)`` and returns an object
    with ``log(metrics, step)``, ``text(tag, text, step)`` and ``close()``.
    """


@hookspec(firstresult=True)
def load_dataset(
    name: str, arguments: Any
) -> datasets.DatasetDict | dict[str, datasets.Dataset] | None:
    """Return the splits of the dataset ``name``, or None to leave it to others.

    ``arguments`` are the data arguments of the run. The first answer that is not None is used.
    """


@hookspec
def model_card_sections(context: dict[str, Any]) -> str | None:
    """Return Markdown for the model card, or None; ``context`` is what its template sees."""

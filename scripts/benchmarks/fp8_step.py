"""The training step that the FP8 benchmarks run or compile: any architecture, any size, any recipe.

Shapes first: nothing is allocated before :func:`Prepared.state` is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import contestants
import models

TASKS = ("ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM")
HEAD = 64  # features of a head of attention
RATES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"),
    *("attn_pdrop", "dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)
# What the sizes below do not say of an architecture.
OWN: dict[str, dict[str, Any]] = {
    "vq_transformer": {
        "num_attention_heads": 1, "head_dim": HEAD, "num_codes": 64, "block_size": 16,
        "window_size": 16,
    },
}  # fmt: skip
# Linears that read a constant: there is no gradient of their input. The VQ Transformer's sinusoids.
CONSTANT_INPUT = ("r_proj",)


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a model and of its batch."""

    width: int
    layers: int
    rows: int
    length: int
    vocab_size: int

    def values(self) -> dict[str, int]:
        """Return it under the names that the configurations have."""
        heads, wide = max(1, self.width // HEAD), 4 * self.width
        return (
            dict.fromkeys(("hidden_size", "n_embd", "d_model"), self.width)
            | dict.fromkeys(("intermediate_size", "n_inner", "d_ff"), wide)
            | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), wide)
            | dict.fromkeys(models._LAYERS, self.layers)
            | {"n_layer": self.layers, "n_head": heads}
            | dict.fromkeys(("num_attention_heads", "num_heads"), heads)
            | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
            | {"d_kv": self.width // heads, "vocab_size": self.vocab_size}
            | dict.fromkeys(("max_position_embeddings", "n_positions"), self.length + 8)
        )


def architectures() -> list[str]:
    """Return the architectures that can be trained on text."""
    from hfseq import plugins

    found = plugins.load().architectures
    return [name for name in found if any(task in found.get(name).heads for task in TASKS)]


def configuration(name: str, size: Size, dropout: float) -> Any:
    """Return the configuration of an architecture at ``size``."""
    from hfseq import plugins

    kind = plugins.load().architectures.get(name).load_config()
    own = kind().to_dict()
    # Identifiers of special tokens that a small vocabulary has; T5 names no start of its own.
    special = {key: i for i, key in enumerate(models._SPECIAL) if own.get(key) is not None}
    special |= {"decoder_start_token_id": 0} if own.get("is_encoder_decoder") else {}
    given = size.values() | dict.fromkeys(RATES, dropout) | special | OWN.get(name, {})
    return kind(**{key: value for key, value in given.items() if key in own or key in special})


def subject(name: str) -> str:
    """Make the architecture known to :mod:`models`, which makes batches; returns its head."""
    from hfseq import plugins

    heads = plugins.load().architectures.get(name).heads
    head = next((task for task in TASKS if task in heads), None)
    if head is None:
        raise ValueError(f"{name} has none of {', '.join(TASKS)}")
    # The mask is the last id of the vocabulary, whatever its size.
    made = models.Subject(name, "", head, (), 0, 0, mask_id=10**9)
    models.SUBJECTS.setdefault(name, made)
    return head


@dataclasses.dataclass
class Prepared:
    """A training step of the loop, and what it is called with."""

    module: Any
    objective: Any
    optimizer: Any
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[dict[str, Any]]

    def state(self) -> Any:
        """Make the state of step 0 on the device."""
        import jax

        return jax.jit(self._state)(jax.random.key(0))

    def abstract(self) -> Any:
        """Return the shapes of the state."""
        import jax

        return jax.eval_shape(self._state, jax.random.key(0))

    def _state(self, rng: Any) -> Any:
        from hfseq.training import state

        names = tuple(sorted({"loss", "count", *self.objective.sums}))
        return state.make_state(
            self.module.init_weights(rng), self.optimizer, self.module.init_extra(rng),
            state.zero_window(names),
        )  # fmt: skip


def prepare(
    name: str, recipe: Any, size: Size, *, dropout: float = 0.0, batches: int = 1, **options: Any
) -> Prepared:
    """Build the step of architecture ``name`` under a recipe; ``options`` go to the model class."""
    import jax
    import optax

    from hfseq import plugins
    from hfseq.training import optimizers, state

    config = configuration(name, size, dropout)
    head = plugins.load().architectures.get(name).load_head(subject(name))
    module = head(config, _do_init=False, precision=recipe, **options)
    targets = size.length if models.SUBJECTS[name].objective == "seq2seq" else 0
    objective = models.objective(name, config, targets)
    getattr(objective, "prepare", lambda model: None)(module)
    optimizer = optimizers.make_optimizer(
        optimizers.adamw, contestants.adamw_flags(), optax.constant_schedule(1e-4)
    )
    made = []
    for number in range(batches):
        batch, random = models.host_batch(name, config, number, size.rows, size.length, targets)
        collated = objective.collate(batch, random, 1)
        collated["row"] = jax.numpy.arange(size.rows)
        made.append({key: leaf[None] for key, leaf in collated.items()})
    step = state.make_step(objective, module, optimizer, 0, False)
    return Prepared(module, objective, optimizer, step, made)


@functools.cache
def sites(name: str, size: Size) -> tuple[str, ...]:
    """Return the paths of the Linears with FP8 products; fused projections are one product.

    Each has one scale of its input under ``fp8_delayed``.
    """
    from hfseq.nn import trees

    module = prepare(name, "fp8_delayed", size).module
    paths = trees.flatten(module.extra_shape_tree["fp8_params"])
    return tuple("/".join(path[:-2]) for path in paths if path[-1] == "input_scale")


def targeted(name: str, size: Size) -> int:
    """Return how many products of a training step should be FP8.

    Three a site: forward, and the gradients of kernel and input.
    """
    paths = sites(name, size)
    return 3 * len(paths) - sum(path.endswith(CONSTANT_INPUT) for path in paths)

"""A toy decoder with a memory of fixed size and a non-parameter collection."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import PretrainedConfig

from hfseq import nn
from hfseq.generation import FixedStateGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out

EMPTY = 0.5  # the value of an empty memory


class Tally(nnx.Variable):
    """A collection of statistics that are updated during training."""


nnx.register_variable_name("tally", Tally)


class RecurrentConfig(PretrainedConfig):
    model_type = "toy_recurrent"

    def __init__(self, vocab_size=17, hidden_size=8, num_hidden_layers=2, slots=3, **kwargs):
        self.vocab_size, self.hidden_size, self.slots = vocab_size, hidden_size, slots
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**{"pad_token_id": 0, "eos_token_id": 1, **kwargs})


class Memory(nn.StateAttention):
    """A layer whose memory is a decaying sum of its inputs.

    The statistics in `sums` shift the values that are added to the memory. In training, these
    values are also added to `new_sums`.
    """

    entries = ("total", "position")

    def __init__(self, config: Any, rngs: nnx.Rngs):
        super().__init__()
        self.width = config.hidden_size
        self.dense = nn.Linear(self.width, self.width, nn.normal(0.5), rngs)
        self.sums = Tally(jax.random.normal(rngs.params(), (config.slots, self.width)))
        self.new_sums = Tally(jnp.zeros((config.slots, self.width)))

    def empty_cache(self, batch_size: int, dtype: Any) -> dict[str, jax.Array]:
        total = jnp.full((batch_size, self.width), EMPTY, dtype)
        return {"total": total, "position": jnp.zeros(batch_size, jnp.int32)}

    def __call__(self, x: jax.Array, mask: jax.Array, *, rngs: Any = None) -> Any:
        state = self.read_cache() or self.empty_cache(len(x), x.dtype)
        added = jnp.tanh(self.dense(x) + self.sums[...].mean(0))
        if rngs is not None:
            self.new_sums[...] += (added * mask[..., None]).sum((0, 1))

        def step(total: jax.Array, token: Any) -> Any:
            new, real = token
            total = jnp.where(real[:, None] > 0, 0.8 * total + new, total)
            return total, total

        last, totals = jax.lax.scan(step, state["total"], (added.swapaxes(0, 1), mask.T))
        self.write_cache({"total": last, "position": state["position"] + mask.sum(1)})
        return x + totals.swapaxes(0, 1), None


class Recurrent(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.embed = nn.Embed(config.vocab_size, config.hidden_size, nn.normal(1.0), rngs)
        layers = range(config.num_hidden_layers)
        self.layers = nn.Layers([Memory(config, rngs) for _ in layers])
        self.norm = nn.LayerNorm(config.hidden_size, 1e-5)

    def __call__(self, input_ids: Any, attention_mask: Any = None, *, rngs: Any = None) -> Any:
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        x, _, _ = nn.run_layers(self.layers, self.embed(input_ids), mask, rngs=rngs)
        return self.norm(x)


class RecurrentLM(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        self.model = Recurrent(config, rngs)
        sizes = (config.hidden_size, config.vocab_size)
        self.lm_head = nn.Linear(*sizes, nn.normal(1.0), rngs, use_bias=False)

    def __call__(self, input_ids: Any, attention_mask: Any = None, *, rngs: Any = None) -> Any:
        hidden = self.model(input_ids, attention_mask, rngs=rngs)
        return out.FlaxCausalLMOutputWithPast(logits=self.lm_head(hidden))


class FlaxRecurrentForCausalLM(FixedStateGeneration, FlaxPreTrainedModel):
    config_class = RecurrentConfig
    module_class = RecurrentLM
    base_model_prefix = "model"
    fixed_state = True
    stored_collections = {"tally": ("sums",)}

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        params=None,
        past_key_values=None,
        dropout_rng=None,
        train=False,
        return_dict=None,
        *,
        extra=None,
    ):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self.run(
            inputs, params, dropout_rng, train, False, False, return_dict, past_key_values, extra
        )

    def finalize_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Adds `new_sums` to `sums`, and resets `new_sums` to zero."""

        def settle(tree: dict[str, Any]) -> dict[str, Any]:
            if "new_sums" in tree:
                zeros = jnp.zeros_like(tree["new_sums"])
                return {"sums": tree["sums"] + tree["new_sums"], "new_sums": zeros}
            return {name: settle(part) for name, part in tree.items()}

        return {"tally": settle(extra["tally"])}


def model(**options: Any) -> FlaxRecurrentForCausalLM:
    """Returns a toy model with two layers."""
    return FlaxRecurrentForCausalLM(RecurrentConfig(), seed=3, **options)

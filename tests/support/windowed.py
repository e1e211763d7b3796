"""A toy decoder whose layers differ.

The first layer has no layer norm, and some layers have a small attention window.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from transformers import PretrainedConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import outputs as out


class WindowedConfig(PretrainedConfig):
    model_type = "toy_windowed"

    def __init__(self, vocab_size=16, hidden_size=8, windows=(99, 3, 99, 3, 99), **kwargs):
        self.vocab_size, self.hidden_size, self.windows = vocab_size, hidden_size, list(windows)
        super().__init__(**{"pad_token_id": 0, "tie_word_embeddings": False, **kwargs})


class Layer(nn.CachedAttention):
    """Self-attention with a residual connection."""

    kv_heads, head_dim = 2, 4

    def __init__(self, config: Any, rngs: nnx.Rngs, number: int):
        super().__init__()
        width, init = config.hidden_size, nn.normal(0.3)
        self.norm = nn.LayerNorm(width, 1e-5) if number else nnx.data(None)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, init, rngs) for _ in range(4)
        )
        self.dropout, self.window = nn.Dropout(0.1), config.windows[number]

    def __call__(self, x: Any, mask: Any, *, rngs: Any = None) -> Any:
        h = x if self.norm is None else self.norm(x)
        parts = (dense(h) for dense in (self.query, self.key, self.value))
        query, key, value = (part.reshape(*x.shape[:2], 2, 4) for part in parts)
        start = 0 if self.cached_key is None else self.cache_index[...]
        key, value, mask, causal = nn.extend_cache(self, key, value, mask)
        at, of = start + jnp.arange(x.shape[1]), jnp.arange(key.shape[1])
        near = (at[:, None] - of < self.window)[None, None]
        mask = near if mask is None else mask & near
        mixed, _ = nn.attend(query, key, value, mask=mask, causal=causal)
        return x + self.dropout(self.output(mixed.reshape(x.shape)), rngs), None


class Windowed(nnx.Module):
    def __init__(self, config: Any, rngs: nnx.Rngs):
        sizes, init = (config.vocab_size, config.hidden_size), nn.normal(1.0)
        self.embed = nn.Embed(*sizes, init, rngs)
        self.layers = nn.Layers([Layer(config, rngs, n) for n in range(len(config.windows))])
        self.head = nn.Linear(*sizes[::-1], init, rngs)

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        rngs: Any = None,
        output_hidden_states: bool = False,
    ) -> Any:
        x, _, states = nn.run_layers(
            self.layers,
            self.embed(input_ids),
            nn.attention_mask(attention_mask),
            rngs=rngs,
            collect=output_hidden_states,
        )
        states = (*states, x) if output_hidden_states else None
        return out.FlaxCausalLMOutputWithPast(logits=self.head(x), hidden_states=states)


class FlaxWindowedLM(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = WindowedConfig, Windowed, "model"

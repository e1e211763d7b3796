"""Qwen3 MoE (Yang et al., 2025, https://arxiv.org/abs/2505.09388) in one file for hfseq.

The kernels of all experts of a layer are one parameter with a leading expert axis. Checkpoints
contain a separate tensor for each expert. `joined_weights` maps these tensors to the parameter.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from transformers import Qwen3MoeConfig

from hfseq import hookimpl, nn
from hfseq.generation import CausalGeneration
from hfseq.modeling import JoinedTensor
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)
from hfseq_plugins.decoder.sharding import RULES


class Experts(nnx.Module):
    """The gated feed-forward blocks of all experts.

    Every expert processes every token. The score of an expert is 0 for tokens that do not use it.
    """

    def __init__(self, config, rngs):
        experts, width, inner = (
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )
        init = nn.normal(config.initializer_range)
        self.gate_up_proj = nnx.Param(init(rngs.params(), (experts, 2 * inner, width), jnp.float32))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, width, inner), jnp.float32))
        self.act = nn.activation(config.hidden_act)

    def __call__(self, x, scores):  # (batch, length, hidden), (batch, length, experts)
        weights = self.gate_up_proj[...].astype(x.dtype)
        gate, up = jnp.split(jnp.einsum("blh,eih->blei", x, weights), 2, axis=-1)
        inner = self.act(gate) * up * scores[..., None]
        return jnp.einsum("blei,ehi->blh", inner, self.down_proj[...].astype(x.dtype))


class SparseBlock(nnx.Module):
    """Routes each token to the experts with the highest probabilities. No token is dropped."""

    def __init__(self, config, rngs):
        self.experts_per_token, self.normalize = config.num_experts_per_tok, config.norm_topk_prob
        init, sizes = nn.normal(config.initializer_range), (config.hidden_size, config.num_experts)
        self.gate = nn.Linear(*sizes, init, rngs, use_bias=False)
        self.experts = Experts(config, rngs)

    def __call__(self, x):  # (batch, length, hidden)
        # The softmax is in float32, because half precision rounds close scores to the same value.
        probabilities = jax.nn.softmax(self.gate(x).astype(jnp.float32))
        best, indices = jax.lax.top_k(probabilities, self.experts_per_token)
        if self.normalize:
            best = best / best.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(indices, probabilities.shape[-1])
        scores = jnp.einsum("blk,blke->ble", best, chosen)
        return self.experts(x, scores.astype(x.dtype))


class SparseDecoder(Decoder):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        for number, layer in enumerate(self.layers):
            period = (number + 1) % config.decoder_sparse_step == 0
            if period and number not in config.mlp_only_layers:
                layer.mlp, layer.is_sparse = SparseBlock(config, rngs), False


class SparseCausalLM(CausalLM):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.model = SparseDecoder(config, rngs)


class FlaxQwen3MoeModel(FlaxDecoderPreTrainedModel):
    config_class, module_class = Qwen3MoeConfig, SparseDecoder
    joined_weights = {
        "experts.gate_up_proj": JoinedTensor(
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
        ),
        "experts.down_proj": JoinedTensor(("experts.{}.down_proj.weight",)),
    }


class FlaxQwen3MoeForCausalLM(CausalGeneration, FlaxQwen3MoeModel):
    module_class = SparseCausalLM


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxQwen3MoeModel, "ForCausalLM": FlaxQwen3MoeForCausalLM}
    rules = [(r"experts/(gate_up|down)_proj$", "row_table"), (r"gate/kernel$", "table"), *RULES]
    card = "A causal decoder with a mixture of experts (Yang et al., 2025)."
    register("qwen3_moe", config=Qwen3MoeConfig, heads=heads, sharding=rules, card=card)

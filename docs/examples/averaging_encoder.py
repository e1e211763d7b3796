"""A complete hfseq architecture in one file: an encoder that averages tokens in place of attention.

Load the file with `--plugin averaging_encoder.py` or `HFSEQ_PLUGIN_FILES=averaging_encoder.py`.
`hfseq.FlaxAutoModelForMaskedLM` and the scripts then support the model type `averaging`.
"""

import jax.numpy as jnp
from flax import nnx
from transformers import PreTrainedConfig

from hfseq import FlaxPreTrainedModel, hookimpl, nn
from hfseq.nn.outputs import FlaxBaseModelOutput, FlaxMaskedLMOutput


class AveragingConfig(PreTrainedConfig):
    model_type = "averaging"
    vocab_size: int = 32000
    hidden_size: int = 256
    num_hidden_layers: int = 4
    max_position_embeddings: int = 512
    hidden_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


class Layer(nnx.Module):
    """A feed-forward block on each token and the average of all tokens visible to it."""

    def __init__(self, config, rngs):
        width, init = config.hidden_size, nn.normal(config.initializer_range)
        self.norm = nn.LayerNorm(width, 1e-5)
        self.wide = nn.Linear(2 * width, 4 * width, init, rngs)
        self.narrow = nn.Linear(4 * width, width, init, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x, weights, *, rngs=None):
        # x: (batch, length, hidden), weights of the average: (batch, 1 or length, length)
        h = self.norm(x)
        average = jnp.broadcast_to(weights.astype(h.dtype) @ h, h.shape)
        h = nn.activation("gelu")(self.wide(jnp.concatenate([h, average], -1)))
        return x + self.dropout(self.narrow(h), rngs), None


class Averaging(nnx.Module):
    """Embeddings and layers. `segment_ids` separates the documents of packed rows."""

    def __init__(self, config, rngs):
        width, init = config.hidden_size, nn.normal(config.initializer_range)
        self.word_embeddings = nn.Embed(config.vocab_size, width, init, rngs)
        self.position_embeddings = nn.Embed(config.max_position_embeddings, width, init, rngs)
        self.layer = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(width, 1e-5)

    def __call__(
        self,
        input_ids,  # (batch, length)
        attention_mask=None,  # (batch, length)
        token_type_ids=None,  # (batch, length)
        position_ids=None,  # (batch, length)
        segment_ids=None,  # (batch, length)
        *,
        rngs=None,
        output_hidden_states=False,
        output_attentions=False,
    ):
        documents = jnp.ones_like(input_ids) if segment_ids is None else segment_ids
        if position_ids is None:
            position_ids = nn.positions_in_segments(documents)
        mask = nn.attention_mask(attention_mask, documents)[:, 0].astype(jnp.float32)
        weights = mask / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        x, _, states = nn.run_layers(
            self.layer, x, weights, rngs=rngs, collect=output_hidden_states
        )
        return FlaxBaseModelOutput(self.norm(x), (*states, x) if output_hidden_states else None)


class AveragingForMaskedLM(nnx.Module):
    """A masked language model with a tied head, which is computed only at `masked_positions`."""

    def __init__(self, config, rngs):
        self.averaging = Averaging(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(self, *args, masked_positions=None, **kwargs):
        outputs = self.averaging(*args, **kwargs)
        x = nn.gather_positions(outputs.last_hidden_state, masked_positions)
        logits = self.averaging.word_embeddings.attend(x) + self.bias[...].astype(x.dtype)
        return FlaxMaskedLMOutput(logits, outputs.hidden_states)


class FlaxAveragingModel(FlaxPreTrainedModel):
    config_class, module_class, base_model_prefix = AveragingConfig, Averaging, "averaging"


class FlaxAveragingForMaskedLM(FlaxAveragingModel):
    module_class = AveragingForMaskedLM


@hookimpl
def register_architectures(register):
    heads = {"Model": FlaxAveragingModel, "ForMaskedLM": FlaxAveragingForMaskedLM}
    rules = [("word_embeddings", "embedding"), ("wide/kernel", "column")]
    rules += [("narrow/kernel", "row"), (".*", "replicated")]
    register("averaging", config=AveragingConfig, heads=heads, sharding=rules)

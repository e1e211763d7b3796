"""A custom classification head on Llama.

The head classifies the mean of the hidden states of a sentence. The example shows where a head
reads `num_labels`, which output class it returns, and when it does not accept `segment_ids`.
"""

import jax.numpy as jnp
from flax import nnx
from transformers import LlamaConfig

from hfseq import hookimpl, nn
from hfseq.nn import outputs as out
from hfseq_plugins.decoder.modeling import Decoder
from hfseq_plugins.decoder.sharding import RULES
from hfseq_plugins.llama.modeling import FlaxLlamaForCausalLM, FlaxLlamaModel


class MeanPoolingConfig(LlamaConfig):
    model_type = "llama_mean"
    classifier_dropout: float = 0.1


class MeanPoolingClassifier(nnx.Module):
    """Classifies the mean of the hidden states of the tokens."""

    def __init__(self, config, rngs):
        self.model = Decoder(config, rngs)  # the attribute is named like `base_model_prefix`
        self.dropout = nn.Dropout(config.classifier_dropout)
        # `num_labels` is the number of entries in `id2label`. It is 1 for regression.
        init = nn.normal(config.initializer_range)
        self.score = nn.Linear(config.hidden_size, config.num_labels, init, rngs)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):  # the inputs are (batch, length)
        # Each row has one label, so rows are not packed, and `segment_ids` is not needed.
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        x = outputs.last_hidden_state
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask[..., None].astype(x.dtype)
        pooled = (x * mask).sum(1) / jnp.maximum(mask.sum(1), 1)
        return out.FlaxSequenceClassifierOutput(
            logits=self.score(self.dropout(pooled, rngs)),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class FlaxLlamaMeanModel(FlaxLlamaModel):
    config_class = MeanPoolingConfig


class FlaxLlamaMeanForCausalLM(FlaxLlamaForCausalLM):
    config_class = MeanPoolingConfig


class FlaxLlamaMeanForSequenceClassification(FlaxLlamaMeanModel):
    module_class = MeanPoolingClassifier


@hookimpl
def register_architectures(register):
    heads = {
        "Model": FlaxLlamaMeanModel,
        "ForCausalLM": FlaxLlamaMeanForCausalLM,
        "ForSequenceClassification": FlaxLlamaMeanForSequenceClassification,
    }
    rules = [(r"score/(kernel|bias)$", "replicated"), *RULES]
    register("llama_mean", config=MeanPoolingConfig, heads=heads, sharding=rules)

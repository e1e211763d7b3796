"""BEiT (Bao et al., 2022) on Flax NNX: ViT with relative positions, which may hide patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import BeitConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import outputs as out
from hfseq_plugins.dinov2 import modeling as dinov2
from hfseq_plugins.vit import modeling as vit
from hfseq_plugins.vit.modeling import dense

Grid = tuple[int, int]


class Embeddings(dinov2.Embeddings):
    """Those of DINOv2, zero at the start; mostly without vectors of places."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.patch = nn.height_and_width(config.patch_size)
        self.picture = nn.height_and_width(config.image_size)
        height, breadth = self.grid(self.picture)

        def zeros(there: bool, places: int) -> nnx.Param | None:
            shape = (1, places, config.hidden_size)
            return nnx.Param(jnp.zeros(shape)) if there else nnx.data(None)

        self.cls_token = zeros(True, 1)
        self.mask_token = zeros(config.use_mask_token, 1)
        absolute = config.use_absolute_position_embeddings
        self.position_embeddings = zeros(absolute, height * breadth + 1)
        self.patch_embeddings = vit.PatchEmbeddings(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class RelativePositionBias(nnx.Module):
    """What is added to the scores of two patches, by how far apart they are in either direction."""

    def __init__(self, config: BeitConfig):
        patch, picture = map(nn.height_and_width, (config.patch_size, config.image_size))
        self.grid = picture[0] // patch[0], picture[1] // patch[1]
        height, breadth = (2 * patches - 1 for patches in self.grid)
        shape = (height * breadth + 3, config.num_attention_heads)
        self.relative_position_bias_table = nnx.Param(jnp.zeros(shape))

    def __call__(self, grid: Grid) -> jax.Array:
        """Return the bias (1, heads, places, places) of a picture of so many patches."""
        table = self.relative_position_bias_table[...]
        if grid != self.grid:
            height, breadth = (2 * patches - 1 for patches in self.grid)
            known = table[:-3].reshape(height, breadth, -1)
            wanted = (2 * grid[0] - 1, 2 * grid[1] - 1)
            known = nn.resize_grid(known, wanted, "linear").reshape(-1, table.shape[-1])
            table = jnp.concatenate([known, table[-3:]])
        return table[relative_position_index(grid)].transpose(2, 0, 1)[None]


def relative_position_index(grid: Grid) -> np.ndarray:
    """Return the row of the table for each pair of places; the last three are of the first place.

    They are of what it sees, of what sees it, and of itself.
    """
    rows, columns = (axis.ravel() for axis in np.indices(grid))
    down, across = (axis[:, None] - axis[None] for axis in (rows, columns))
    height, breadth = grid
    last = (2 * height - 1) * (2 * breadth - 1) + 2
    index = np.full((rows.size + 1, rows.size + 1), last)
    index[0, 1:], index[1:, 0] = last - 2, last - 1
    index[1:, 1:] = (down + height - 1) * (2 * breadth - 1) + across + breadth - 1
    return index


class SelfAttention(vit.SelfAttention):
    """That of ViT, whose keys have no bias, with relative positions of its own or none."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key, self.value = (
            dense(config, width, width, rngs, use_bias=biased) for biased in (True, False, True)
        )
        own = config.use_relative_position_bias
        self.relative_position_bias = RelativePositionBias(config) if own else nnx.data(None)

    def __call__(self, x, rngs, return_weights, shared=None, grid=None):
        bias = shared
        if self.relative_position_bias is not None:
            own = self.relative_position_bias(grid)
            bias = own if shared is None else own + shared
        return super().__call__(x, rngs, return_weights, bias)


class Attention(nnx.Module):
    """Attention and its output projection."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.output = vit.Output(config, config.hidden_size, rngs)

    def __call__(self, x, rngs, return_weights, shared, grid):
        mixed, weights = self.attention(x, rngs, return_weights, shared, grid)
        return self.output(mixed, rngs), weights


class Layer(nnx.Module):
    """Attention and feed-forward, each behind a norm; their results may be scaled."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.layernorm_before = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, rngs)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.intermediate = vit.Intermediate(config, rngs)
        self.output = vit.Output(config, config.intermediate_size, rngs)
        self.drop_path = nn.DropPath(config.drop_path_rate)
        scale = float(config.layer_scale_init_value)
        self.lambda_1, self.lambda_2 = (
            nnx.Param(jnp.full(config.hidden_size, scale)) if scale > 0 else nnx.data(None)
            for _ in range(2)
        )

    def __call__(self, x, shared, grid, *, drop_rate, rngs, return_weights=False):
        def branch(y: jax.Array, scale: nnx.Param | None) -> jax.Array:
            y = y if scale is None else y * scale[...].astype(y.dtype)
            return self.drop_path(y, rngs, drop_rate)

        mixed, weights = self.attention(
            self.layernorm_before(x), rngs, return_weights, shared, grid
        )
        x = x + branch(mixed, self.lambda_1)
        wide = self.output(self.intermediate(self.layernorm_after(x)), rngs)
        return x + branch(wide, self.lambda_2), weights


class Encoder(nnx.Module):
    """The stack of layers, of which the later are dropped more often while training."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))
        shared = config.use_shared_relative_position_bias
        self.relative_position_bias = RelativePositionBias(config) if shared else nnx.data(None)
        self.rates = (config.drop_path_rate, config.num_hidden_layers)

    def __call__(self, x, grid, rngs, output_attentions, output_hidden_states):
        bias = self.relative_position_bias
        last, depth = self.rates
        return nn.run_layers(
            self.layer,
            x,
            None if bias is None else bias(grid),
            grid,
            rngs=rngs,
            per_layer={"drop_rate": jnp.linspace(0, last, depth)},
            collect=output_hidden_states,
            return_weights=output_attentions,
        )


class Pooler(nnx.Module):
    """The normed mean of the patches, or the first place as it is."""

    def __init__(self, config: BeitConfig):
        norm = config.use_mean_pooling
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if norm else nnx.data(None)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x[:, 0] if self.layernorm is None else self.layernorm(x[:, 1:].mean(1))


class Beit(nnx.Module):
    """The encoder without a head."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        # Where the mean is taken, the norm is behind it.
        norm = not config.use_mean_pooling
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if norm else nnx.data(None)
        )
        self.pooler = Pooler(config) if add_pooling_layer else nnx.data(None)

    def __call__(
        self,
        pixel_values,
        bool_masked_pos=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        x, weights, inputs = self.encoder(
            self.embeddings(pixel_values, rngs, bool_masked_pos),
            self.embeddings.grid(pixel_values.shape[2:]),
            rngs,
            output_attentions,
            output_hidden_states,
        )
        states = (*inputs, x) if output_hidden_states else None
        x = x if self.layernorm is None else self.layernorm(x)
        pooled = None if self.pooler is None else self.pooler(x)
        weights = weights if output_attentions else None
        return out.FlaxBeitModelOutputWithPooling(x, pooled, states, weights)


class ImageClassification(nnx.Module):
    """A label for the picture, from what the pooler returns."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.beit = Beit(config, rngs)
        self.classifier = dense(config, config.hidden_size, config.num_labels, rngs)

    def __call__(
        self,
        pixel_values,
        bool_masked_pos=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        encoded = self.beit(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(encoded.pooler_output)
        return out.FlaxSequenceClassifierOutput(logits, encoded.hidden_states, encoded.attentions)


class MaskedImageModeling(nnx.Module):
    """Logits of the visual token of each patch."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.beit = Beit(config, rngs, add_pooling_layer=False)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = dense(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(
        self,
        pixel_values,
        bool_masked_pos=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        encoded = self.beit(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.lm_head(self.layernorm(encoded.last_hidden_state)[:, 1:])
        return out.FlaxMaskedLMOutput(logits, encoded.hidden_states, encoded.attentions)


class FlaxBeitPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base of the BEiT classes: configuration, checkpoint names, the call of Transformers 4."""

    config_class = BeitConfig
    base_model_prefix = "beit"
    any_image_size = True
    # Old files number the rows of the table for each pair of places.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"relative_position_index$")
    # The names that PyTorch's classes have in memory since Transformers 5, not in files.
    weight_synonyms = {
        **vit.FlaxViTPreTrainedModel.weight_synonyms,
        "shared_position_bias": "encoder.relative_position_bias",
        "layer.{}.relative_position_bias": "layer.{}.attention.attention.relative_position_bias",
    }

    def __call__(
        self,
        pixel_values: Input,
        bool_masked_pos: Input = None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        *,
        extra=None,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``bool_masked_pos`` (batch, patches) tells which patches are hidden.
        """
        given = {"pixel_values": pixel_values, "bool_masked_pos": bool_masked_pos}
        return self.run(
            given,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )


class FlaxBeitModel(FlaxBeitPreTrainedModel):
    """BEiT without a head: hidden states and the mean of the patches, or the first place."""

    module_class = Beit


class FlaxBeitForImageClassification(FlaxBeitPreTrainedModel):
    """BEiT with a classifier of pictures."""

    module_class = ImageClassification


class FlaxBeitForMaskedImageModeling(FlaxBeitPreTrainedModel):
    """BEiT with the head of its pre-training: the visual token of each patch."""

    module_class = MaskedImageModeling

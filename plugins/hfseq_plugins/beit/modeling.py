"""BEiT (Bao et al., 2022) on Flax NNX: ViT with relative position biases and masked patches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import BeitConfig

from hfseq import nn
from hfseq.modeling import FlaxPreTrainedModel, FlaxVisionPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels
from hfseq_plugins.dinov2 import modeling as dinov2
from hfseq_plugins.vit import modeling as vit
from hfseq_plugins.vit.modeling import dense

Grid = tuple[int, int]


class Embeddings(dinov2.Embeddings):
    """Embeddings as in DINOv2, but with zero initialization and optional positions."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.patch_size = nn.height_and_width(config.patch_size)
        self.image_size = nn.height_and_width(config.image_size)
        grid_height, grid_width = self.grid(self.image_size)

        def zeros(enabled: bool, num_positions: int) -> nnx.Param | None:
            shape = (1, num_positions, config.hidden_size)
            return nnx.Param(jnp.zeros(shape)) if enabled else nnx.data(None)

        self.cls_token = zeros(True, 1)  # type: ignore[assignment]  # `None` if disabled
        self.mask_token = zeros(config.use_mask_token, 1)
        absolute = config.use_absolute_position_embeddings
        self.position_embeddings = zeros(absolute, grid_height * grid_width + 1)  # type: ignore[assignment]  # `None` if disabled
        self.patch_embeddings = vit.PatchEmbeddings(config, rngs)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class RelativePositionBias(nnx.Module):
    """Learned bias of attention scores for each vertical and horizontal offset of two patches."""

    def __init__(self, config: BeitConfig):
        patch, image_size = map(nn.height_and_width, (config.patch_size, config.image_size))
        self.grid = image_size[0] // patch[0], image_size[1] // patch[1]
        grid_height, grid_width = (2 * patches - 1 for patches in self.grid)
        shape = (grid_height * grid_width + 3, config.num_attention_heads)
        self.relative_position_bias_table = nnx.Param(jnp.zeros(shape))

    def __call__(self, grid: Grid) -> jax.Array:
        """Returns the bias, `(1, heads, patches + 1, patches + 1)`.

        If the size of the grid differs from the configuration, the biases are interpolated.

        Args:
            grid: Number of patches in height and width.
        """
        table = self.relative_position_bias_table[...]
        if grid != self.grid:
            grid_height, grid_width = (2 * patches - 1 for patches in self.grid)
            patch_rows = table[:-3].reshape(grid_height, grid_width, -1)
            table_size = (2 * grid[0] - 1, 2 * grid[1] - 1)
            patch_rows = nn.resize_grid(patch_rows, table_size, "linear").reshape(
                -1, table.shape[-1]
            )
            table = jnp.concatenate([patch_rows, table[-3:]])
        return table[relative_position_index(grid)].transpose(2, 0, 1)[None]


def relative_position_index(grid: Grid) -> np.ndarray:
    """Returns the index of the position bias for each pair of a query and a key.

    Position 0 is the class token. The last three biases are for pairs in which the class token is
    the query, the key, or both.

    Args:
        grid: Number of patches in height and width.

    Returns:
        An integer array, `(patches + 1, patches + 1)`.
    """
    rows, columns = (axis.ravel() for axis in np.indices(grid))
    down, across = (axis[:, None] - axis[None] for axis in (rows, columns))
    grid_height, grid_width = grid
    last_row = (2 * grid_height - 1) * (2 * grid_width - 1) + 2
    index = np.full((rows.size + 1, rows.size + 1), last_row)
    index[0, 1:], index[1:, 0] = last_row - 2, last_row - 1
    index[1:, 1:] = (down + grid_height - 1) * (2 * grid_width - 1) + across + grid_width - 1
    return index


class SelfAttention(vit.SelfAttention):
    """ViT attention without a bias of the key projection.

    If `config.use_relative_position_bias` is set, each layer has its own relative position bias.
    """

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        width = config.hidden_size
        self.heads, self.rate = config.num_attention_heads, config.attention_probs_dropout_prob
        self.query, self.key, self.value = (
            dense(config, width, width, rngs, use_bias=biased) for biased in (True, False, True)
        )
        use_bias_table = config.use_relative_position_bias
        self.relative_position_bias = (
            RelativePositionBias(config) if use_bias_table else nnx.data(None)
        )

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
        return_weights: bool,
        shared_bias: jax.Array | None = None,  # (1, heads, patches + 1, patches + 1)
        grid: Grid | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        bias = shared_bias
        if self.relative_position_bias is not None:
            layer_bias = self.relative_position_bias(grid)  # type: ignore[arg-type]  # the encoder passes the grid
            bias = layer_bias if shared_bias is None else layer_bias + shared_bias
        return super().__call__(x, rngs, return_weights, bias)


class Attention(nnx.Module):
    """Attention and its output projection."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.output = vit.Output(config, config.hidden_size, rngs)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        rngs: Keys | None,
        return_weights: bool,
        shared_bias: jax.Array | None,  # (1, heads, patches + 1, patches + 1)
        grid: Grid,
    ) -> tuple[jax.Array, jax.Array | None]:
        attn_output, weights = self.attention(x, rngs, return_weights, shared_bias, grid)
        return self.output(attn_output, rngs), weights


class Layer(nnx.Module):
    """Pre-norm layer: attention and feed-forward, optionally with layer scale."""

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

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        shared_bias: jax.Array | None,  # (1, heads, patches + 1, patches + 1)
        grid: Grid,
        *,
        drop_rate: jax.Array,  # ()
        rngs: Keys | None,
        return_weights: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        def branch(y: jax.Array, scale: nnx.Param | None) -> jax.Array:
            y = y if scale is None else y * scale[...].astype(y.dtype)
            return self.drop_path(y, rngs, drop_rate)

        attn_output, weights = self.attention(
            self.layernorm_before(x), rngs, return_weights, shared_bias, grid
        )
        x = x + branch(attn_output, self.lambda_1)
        ffn_output = self.output(self.intermediate(self.layernorm_after(x)), rngs)
        return x + branch(ffn_output, self.lambda_2), weights


class Encoder(nnx.Module):
    """Stack of layers. The rate of stochastic depth increases linearly with the layer index."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.layer = nn.Layers(Layer(config, rngs) for _ in range(config.num_hidden_layers))
        shared = config.use_shared_relative_position_bias
        self.relative_position_bias = RelativePositionBias(config) if shared else nnx.data(None)
        self.drop_path = (config.drop_path_rate, config.num_hidden_layers)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        grid: Grid,
        rngs: Keys | None,
        output_attentions: bool,
        output_hidden_states: bool,
    ) -> tuple[jax.Array, Any, tuple[jax.Array, ...] | None]:
        bias = self.relative_position_bias
        max_rate, depth = self.drop_path
        return nn.run_layers(
            self.layer,
            x,
            None if bias is None else bias(grid),
            grid,
            rngs=rngs,
            per_layer={"drop_rate": jnp.linspace(0, max_rate, depth)},
            collect=output_hidden_states,
            return_weights=output_attentions,
        )


class Pooler(nnx.Module):
    """Returns the normalized mean of the patches, or the class token."""

    def __init__(self, config: BeitConfig):
        norm = config.use_mean_pooling
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if norm else nnx.data(None)
        )

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, hidden)
        return x[:, 0] if self.layernorm is None else self.layernorm(x[:, 1:].mean(1))


class Beit(nnx.Module):
    """BEiT encoder without a head."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs, add_pooling_layer: bool = True):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)
        # With mean pooling, the pooler contains the norm.
        norm = not config.use_mean_pooling
        self.layernorm = (
            nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if norm else nnx.data(None)
        )
        self.pooler = Pooler(config) if add_pooling_layer else nnx.data(None)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        x, attentions, layer_inputs = self.encoder(
            self.embeddings(pixel_values, rngs, bool_masked_pos),
            self.embeddings.grid(pixel_values.shape[2:]),
            rngs,
            output_attentions,
            output_hidden_states,
        )
        states = (*layer_inputs, x) if layer_inputs is not None else None
        x = x if self.layernorm is None else self.layernorm(x)
        pooler_output = None if self.pooler is None else self.pooler(x)
        attentions = attentions if output_attentions else None
        return out.FlaxBeitModelOutputWithPooling(x, pooler_output, states, attentions)


class ImageClassification(nnx.Module):
    """Image classification, from the pooled output."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.beit = Beit(config, rngs)
        self.classifier = dense(config, config.hidden_size, num_labels(config), rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.beit(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.classifier(outputs.pooler_output)
        return out.FlaxSequenceClassifierOutput(logits, outputs.hidden_states, outputs.attentions)


class MaskedImageModeling(nnx.Module):
    """Masked image modeling: predicts the visual token of each patch."""

    def __init__(self, config: BeitConfig, rngs: nnx.Rngs):
        self.beit = Beit(config, rngs, add_pooling_layer=False)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.lm_head = dense(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(
        self,
        pixel_values: jax.Array,  # (batch, channels, height, width)
        bool_masked_pos: jax.Array | None = None,  # (batch, patches)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        outputs = self.beit(
            pixel_values,
            bool_masked_pos,
            rngs=rngs,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
        )
        logits = self.lm_head(self.layernorm(outputs.last_hidden_state)[:, 1:])
        return out.FlaxMaskedLMOutput(logits, outputs.hidden_states, outputs.attentions)


class FlaxBeitPreTrainedModel(FlaxVisionPreTrainedModel):
    """Base class of the BEiT models: configuration, checkpoint names and call signature."""

    config_class = BeitConfig
    base_model_prefix = "beit"
    any_image_size = True
    # Older files contain the bias indices, which hfseq computes.
    ignored_weights = (*FlaxPreTrainedModel.ignored_weights, r"relative_position_index$")
    # Transformers 5 renamed the modules of the PyTorch classes. The tensors in checkpoint files
    # keep the old names.
    weight_synonyms = {
        **vit.FlaxViTPreTrainedModel.weight_synonyms,
        "shared_position_bias": "encoder.relative_position_bias",
        "layer.{}.relative_position_bias": "layer.{}.attention.attention.relative_position_bias",
    }
    module_templates = vit.FlaxViTPreTrainedModel.module_templates

    def __call__(  # type: ignore[override]  # signature of Transformers 4
        self,
        pixel_values: Input,
        bool_masked_pos: Input = None,  # type: ignore[override]  # signature of Transformers 4
        params: trees.Params | None = None,  # type: ignore[override]  # signature of Transformers 4
        dropout_rng: jax.Array | Keys | None = None,  # type: ignore[override]  # signature of Transformers 4
        train: bool = False,  # type: ignore[override]  # signature of Transformers 4
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model, see `FlaxPreTrainedModel.run`.

        `pixel_values` is `(batch, channels, height, width)`. `bool_masked_pos`, `(batch, patches)`,
        is true for masked patches.
        """
        model_inputs = {"pixel_values": pixel_values, "bool_masked_pos": bool_masked_pos}
        return self.run(
            model_inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            extra=extra,
        )


class FlaxBeitModel(FlaxBeitPreTrainedModel):
    """BEiT without a head.

    Returns hidden states and the mean of the patches, or the class token.
    """

    module_class = Beit


class FlaxBeitForImageClassification(FlaxBeitPreTrainedModel):
    """BEiT for image classification."""

    module_class = ImageClassification


class FlaxBeitForMaskedImageModeling(FlaxBeitPreTrainedModel):
    """BEiT with a masked image modeling head."""

    module_class = MaskedImageModeling

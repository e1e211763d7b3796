"""The public classes of the WMT Transformer, which are stored as PEGASUS or Marian."""

from __future__ import annotations

import numpy as np

from hfseq.modeling import Derived, Seq2SeqGeneration
from hfseq_plugins.bart.modeling import FlaxBartModel, FlaxBartPreTrainedModel
from hfseq_plugins.bart.positions import sinusoids
from hfseq_plugins.common import StoredAsTwin
from hfseq_plugins.wmt_transformer import layers
from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig

SIDES = ("encoder", "decoder")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class FlaxWMTTransformerPreTrainedModel(StoredAsTwin, FlaxBartPreTrainedModel):
    """Base of the WMT Transformer's classes.

    ``save_pretrained`` writes the stock twin of the configuration (PEGASUS for ``norm="pre"``,
    Marian for ``norm="post"``) with its tensors, so that PyTorch's Auto classes load it. Options
    without an exact twin are written natively, with a warning that names them.
    """

    config_class = WMTTransformerConfig

    def derived_weights(self) -> dict[str, Derived]:
        """Return what the twin stores beside our parameters: zero biases, copies, places."""
        if self.config.twin_problems():
            return {}
        found = {**self._zero_biases(), **self._copies()}
        has_head = self.module_class is layers.ConditionalGeneration
        kept = self.config.norm == "pre" or not has_head  # Marian's head leaves them out
        if kept and self.config.positions == "sinusoidal":
            table = sinusoids(self.config.max_position_embeddings, self.config.d_model)
            remedy = "load it with positions='learned'"
            for side in SIDES:
                found[f"model.{side}.embed_positions.weight"] = Derived(table, remedy)
        if has_head:
            return found
        bare = {n.removeprefix("model."): one for n, one in found.items() if n[:5] == "model"}
        for name, one in bare.items():
            if isinstance(one.value, str):
                bare[name] = Derived(one.value.removeprefix("model."), one.remedy)
        return bare

    def _zero_biases(self) -> dict[str, Derived]:
        if self.config.attention_bias:
            return {}
        zeros = Derived(
            np.zeros(self.config.d_model, np.float32), "load it with attention_bias=True"
        )
        return {
            f"model.{side}.layers.{number}.{attention}.{projection}.bias": zeros
            for side in SIDES
            for number in range(getattr(self.config, f"{side}_layers"))
            for attention in ("self_attn", *(("encoder_attn",) if side == "decoder" else ()))
            for projection in PROJECTIONS
        }

    def _copies(self) -> dict[str, Derived]:
        """Return the tables that the twin has several times."""
        config, tables = self.config, [f"model.{side}.embed_tokens.weight" for side in SIDES]
        if config.tied:
            return {}
        if config.share_embeddings:
            remedy = "load it with share_embeddings=False"
            return {table: Derived("model.shared.weight", remedy) for table in tables}
        if config.norm == "post":
            return {}
        copies = {"model.shared.weight": Derived(tables[0])}
        if config.logits_via_embedding:
            remedy = "load it with logits_via_embedding=False"
            copies["lm_head.weight"] = Derived(tables[1], remedy)
        return copies


class FlaxWMTTransformerModel(FlaxWMTTransformerPreTrainedModel):
    """The WMT Transformer without a head: hidden states of decoder and encoder."""

    module_class = layers.WMTTransformerModule
    twin_names = {"pegasus": "PegasusModel", "marian": "MarianModel"}
    weight_aliases = FlaxBartModel.weight_aliases
    weight_fallbacks = FlaxBartModel.weight_fallbacks


class FlaxWMTTransformerForConditionalGeneration(
    Seq2SeqGeneration, FlaxWMTTransformerPreTrainedModel
):
    """The WMT Transformer with its head: translation."""

    module_class = layers.ConditionalGeneration
    twin_names = {"pegasus": "PegasusForConditionalGeneration", "marian": "MarianMTModel"}

"""The base class of models that read pictures: the call of Transformers 4."""

from __future__ import annotations

from typing import Any

import jax

from hfseq.modeling.base import Input
from hfseq.modeling.pretrained import FlaxPreTrainedModel
from hfseq.nn import trees
from hfseq.nn.random import Keys


class FlaxVisionPreTrainedModel(FlaxPreTrainedModel):
    """Base of the models of pictures, whose module takes ``pixel_values`` as users give them.

    They are floats (batch, channels, height, width), the layout of PyTorch and of the image
    processors; ``nn.embed_patches`` turns them to channels last, which convolutions take.
    """

    main_input_name = "pixel_values"

    def __call__(  # type: ignore[override]
        self,
        pixel_values: Input,
        params: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        extra: trees.Params | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the model; see :meth:`FlaxPreTrainedModel.run`."""
        return self.run(
            {"pixel_values": pixel_values, **inputs}, params, dropout_rng, train,
            output_attentions, output_hidden_states, return_dict, extra=extra,
        )  # fmt: skip

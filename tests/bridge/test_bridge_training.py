"""Training of architectures that hfseq does not implement, with the scripts and --bridge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.training.conftest import check_resume

SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
CLM = {"max_seq_length": None, "block_size": 32}
SEQ2SEQ = (
    "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
    "decoder_attention_heads=4,encoder_ffn_dim=48,decoder_ffn_dim=48,max_position_embeddings=200"
)

#: The flags of each family: objective, model type, configuration, further flags.
FAMILIES = {
    "mpnet": ("mlm", f"{SIZES},max_position_embeddings=64", {"line_by_line": True}),
    "olmo2": ("clm", f"{SIZES},num_key_value_heads=2,max_position_embeddings=64", CLM),
    "mixtral": (
        "clm",
        f"{SIZES},num_key_value_heads=2,num_local_experts=4,max_position_embeddings=64",
        CLM,
    ),
    "mamba": ("clm", "hidden_size=32,num_hidden_layers=2,state_size=8", CLM | {"line_by_line": True}),
    "m2m_100": ("translation", SEQ2SEQ, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bridged_family_trains_resumes_and_opens_in_torch(model_type, train):
    objective, sizes, options = FAMILIES[model_type]

    def run(output="run", callbacks=(), **changes):
        return train(
            output,
            devices=1,
            objective=objective,
            callbacks=callbacks,
            model_type=model_type,
            config_overrides=sizes,
            bridge=True,
            **(options | changes),
        )

    whole, _ = check_resume(run)
    assert whole.run.model.structure.module is not None
    auto_class = getattr(transformers, f"AutoModel{whole.run.objective.auto_class}")
    reference = auto_class.from_pretrained(whole.folder).eval()
    ids = np.random.default_rng(0).integers(5, 200, (2, 12)).astype(np.int32)
    inputs = {"input_ids": ids}
    if reference.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :6]
    with torch.no_grad():
        expected = reference(**{n: torch.from_numpy(x).long() for n, x in inputs.items()}).logits
    model = type(whole.run.model).from_pretrained(whole.folder)
    np.testing.assert_allclose(model(**inputs).logits, expected.numpy(), atol=2e-5)

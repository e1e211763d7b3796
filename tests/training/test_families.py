"""Every text family of Transformers 4 can be trained with the scripts for its heads."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests.training.conftest import SIDES, TWO_LAYERS, losses, stop_at

BART = f"d_model=32,max_position_embeddings=40,{SIDES}"
T5 = "d_model=32,d_kv=8,d_ff=64,num_layers=1,num_heads=4"
XGLM = "d_model=32,num_layers=1,attention_heads=4,ffn_dim=64,max_position_embeddings=40"
GROUPED = f"{TWO_LAYERS},num_key_value_heads=2"
#: Model type, objective, sizes, and the tokenizer if it is not the default of the objective.
TRAINED = [
    ("xlm-roberta", "mlm", TWO_LAYERS, None),
    ("xlm-roberta", "clm", TWO_LAYERS, None),
    ("roberta-prelayernorm", "mlm", TWO_LAYERS, None),
    ("roberta-prelayernorm", "clm", TWO_LAYERS, None),
    ("mt5", "span_mlm", T5, None),
    ("mt5", "translation", T5, None),
    ("mbart", "denoising", BART, None),
    ("mbart", "translation", BART, None),
    ("blenderbot", "denoising", BART, None),
    ("blenderbot", "translation", BART, None),
    ("blenderbot-small", "denoising", BART, None),
    ("blenderbot-small", "translation", BART, None),
    ("xglm", "clm", XGLM, "tokenizer"),
    ("gptj", "clm", "n_embd=32,n_layer=1,n_head=4,n_positions=40,rotary_dim=4", "tokenizer"),
    ("llama", "clm", GROUPED, "tokenizer"),
    ("mistral", "clm", f"{GROUPED},sliding_window=6", "tokenizer"),
    ("gemma", "clm", f"{GROUPED},head_dim=12", "tokenizer"),
    ("qwen3", "clm", f"{GROUPED},head_dim=12", "tokenizer"),
    ("gemma2", "clm", f"{GROUPED},head_dim=12,sliding_window=6", "tokenizer"),
    ("gemma3_text", "clm", f"{GROUPED},head_dim=12,sliding_window=6", "tokenizer"),
    ("eurobert", "mlm", GROUPED, None),
    ("modernbert", "mlm", f"{TWO_LAYERS},local_attention=6", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective", "sizes", "tokenizer"), TRAINED)
def test_mesh_matches_single_device_and_resume_is_bit_exact(
    train, corpus, name, objective, sizes, tokenizer
):
    options = {"model_type": name, "config_overrides": sizes, "do_train": True, "save_steps": 2}
    if tokenizer is not None:
        options["tokenizer_name"] = corpus / tokenizer
    single = losses(train("one", 1, objective, **options).folder)
    meshed = {"mesh": "data=2,tensor=2", **options}
    loop = train("many", 4, objective, **meshed)
    train_losses = losses(loop.folder)
    assert train_losses.keys() == single.keys() and np.isfinite(list(train_losses.values())).all()
    for step, value in single.items():
        assert train_losses[step] == pytest.approx(value, rel=2e-5), step
    assert train_losses[6] < train_losses[1]
    with pytest.raises(SystemExit):
        train("parts", 4, objective, callbacks=[stop_at(3)], **meshed)
    assert losses(train("parts", 4, objective, **meshed).folder) == train_losses
    config = json.loads((loop.folder / "config.json").read_text())
    assert config["model_type"] == name and math.isfinite(train_losses[6])
    assert_pytorch_opens(loop, config, objective)


def assert_pytorch_opens(loop, config, objective):
    """The PyTorch class computes the same logits from the saved model."""
    torch = pytest.importorskip("torch")
    import transformers

    theirs = getattr(transformers, config["architectures"][0]).from_pretrained(loop.folder).eval()
    ids = np.arange(5, 25, dtype=np.int32)[None]
    paired = objective in ("span_mlm", "denoising", "translation")
    model_inputs = {"input_ids": ids} | ({"decoder_input_ids": ids[:, ::-1]} if paired else {})
    actual = loop.run.model(**model_inputs, params=loop.state.params).logits
    with torch.no_grad():
        expected = theirs(
            **{name: torch.tensor(array.copy()) for name, array in model_inputs.items()}
        )
    np.testing.assert_allclose(actual, expected.logits.numpy(), rtol=0, atol=1e-4)

"""Training of models whose checkpoint is quantized."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

import hfseq
from hfseq.errors import WeightsError
from tests.support.quantized import quantize_directory
from tests.training.conftest import losses

pytestmark = pytest.mark.slow

LLAMA = {
    "objective": "clm",
    "model_type": "llama",
    "config_overrides": "hidden_size=64,intermediate_size=96,num_hidden_layers=1,"
    "num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=40",
    "max_seq_length": None,
    "block_size": 32,
}
TUNED = LLAMA | {"model_type": None, "config_overrides": None, "do_train": True}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "learning_rate": 1e-2}


@pytest.fixture
def quantized(train, tmp_path):
    """A quantized model, and the same model with float32 weights."""
    base = train("base", max_steps=2, **LLAMA).folder
    values = quantize_directory(base, tmp_path / "gptq", "gptq")
    shutil.copytree(base, tmp_path / "plain")
    tensors = load_file(base / "model.safetensors") | values
    save_file(tensors, tmp_path / "plain/model.safetensors", {"format": "pt"})
    return tmp_path / "gptq", tmp_path / "plain"


@pytest.mark.parametrize("changes", [{}, LORA, LORA | {"load_in_4bit": True}])
def test_training_equals_that_of_the_dequantized_model(train, quantized, changes):
    if "load_in_4bit" in changes:
        pytest.importorskip("qwix")
    run, expected = (
        train(folder.name + "-tuned", model_name_or_path=folder, max_steps=3, **TUNED, **changes)
        for folder in quantized
    )
    assert losses(run.folder) == pytest.approx(losses(expected.folder), rel=1e-6)
    row = "| Base weights dequantized from | gptq, bits 4, group_size 32 |"
    assert row in (run.folder / "README.md").read_text()
    assert "dequantized" not in (expected.folder / "README.md").read_text()
    if changes:
        model = hfseq.FlaxAutoModelForCausalLM.from_pretrained(run.folder)
        assert model.config.dequantized_from["model"] == "gptq"
    else:
        config = json.loads((run.folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dequantized_from"]["quant_method"] == "gptq"


def test_unknown_methods_are_refused_before_training(train, quantized):
    path = quantized[0] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "vptq"}}))
    with pytest.raises(WeightsError, match="quantized with 'vptq'"):
        train("tuned", model_name_or_path=quantized[0], **TUNED)

"""Loading damaged and incomplete checkpoints, and those of other architectures."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from hfseq.cli.convert import convert
from hfseq.cli.inspect import inspect_checkpoint
from hfseq.errors import CheckpointError, UsageError, WeightsError
from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM, FlaxBertModel
from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM, FlaxRobertaModel
from tests.support import saved_bert
from tests.support.models import bert_config, rewrite_tensors, roberta_config, trees_equal

model, saved = saved_bert.model, saved_bert.saved


def test_missing_directory_and_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json.*directory that a model was"):
        FlaxBertModel.from_pretrained(tmp_path)


def test_config_without_weights(tmp_path):
    bert_config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no file named model.safetensors"):
        FlaxBertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"vocab_size": "many"}'])
def test_broken_config_is_named(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot read the configuration of"):
        FlaxBertForMaskedLM.from_pretrained(saved)


def test_config_of_another_model_type(tmp_path):
    FlaxRobertaModel(roberta_config()).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match="of type 'roberta', .*FlaxBertModel requires 'bert'.*AutoModel"
    ):
        FlaxBertModel.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="of type 'roberta', .*FlaxBertModel requires 'bert'"):
        FlaxBertModel.from_pretrained(tmp_path, config=roberta_config())


def test_checkpoint_of_another_architecture(saved):
    rewrite_tensors(
        saved / "model.safetensors", lambda _: {"h.0.ln_1.weight": np.ones(3, np.float32)}
    )
    with pytest.raises(WeightsError, match=r"no tensor of FlaxBertForMaskedLM .*h\.0"):
        FlaxBertForMaskedLM.from_pretrained(saved)


QUERY = "bert.encoder.layer.0.attention.self.query."


def quantize(saved, method, parts, keep=False):
    """Replaces the weight of a query by tensors of a quantized format."""

    def change(tensors):
        if not keep:
            del tensors[f"{QUERY}weight"]
        return tensors | {f"{QUERY}{name}": value for name, value in parts.items()}

    rewrite_tensors(saved / "model.safetensors", change)
    if method is not None:
        set_key(saved, {"quant_method": method, "bits": 4})


def set_key(saved, value):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": value}))


PACKED, SCALES = np.zeros((4, 32), np.int32), np.ones((1, 32), np.float32)


@pytest.mark.parametrize(
    ("method", "parts", "keep"),
    [
        ("gptq", {"qweight": PACKED, "scales": SCALES}, False),
        ("bitsandbytes", {"weight": np.zeros((512, 1), np.uint8)}, False),
        ("aqlm", {"codes": PACKED, "codebooks": SCALES}, False),
        (None, {"qweight": PACKED, "scales": SCALES}, False),
        (None, {"weight_scale": SCALES}, True),
    ],
)
def test_weights_that_cannot_be_dequantized_are_refused(saved, method, parts, keep, tmp_path):
    quantize(saved, method, parts, keep)
    named = {"aqlm": "quantized with 'aqlm'", None: "quantized with an unknown.*query"}
    message = named.get(method, "cannot dequantize bert.encoder.*query.weight")
    with pytest.raises(WeightsError, match=message):
        FlaxBertForMaskedLM.from_pretrained(saved)
    with pytest.raises(WeightsError, match=message):
        convert(str(saved), tmp_path / "converted")
    problems = inspect_checkpoint(str(saved))["problems"]
    assert any("quer" in problem or "aqlm" in problem for problem in problems)


def test_dequantized_weights_are_saved_without_the_key(saved, model, tmp_path):
    set_key(saved, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert trees_equal(loaded.params, model.params)
    loaded.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


def test_checkpoint_of_another_family_is_rejected(tmp_path):
    FlaxRobertaForMaskedLM(roberta_config()).save_pretrained(tmp_path)
    bert_config().save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="is it a checkpoint of another architecture"):
        FlaxBertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["int64", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_wrong_types_are_named(saved, dtype):
    numpy_dtype = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)

    def change(tensors):
        tensors["bert.pooler"] = np.zeros(2, np.float32)
        name = "cls.predictions.transform.dense.bias"
        tensors[name] = tensors[name].astype(numpy_dtype)

    rewrite_tensors(saved / "model.safetensors", change)
    with pytest.raises((WeightsError, CheckpointError)) as error:
        FlaxBertForMaskedLM.from_pretrained(saved)
    assert "transform.dense.bias" in str(error.value) or "damaged" in str(error.value)
    assert "float32" in str(error.value) or "damaged" in str(error.value)


@pytest.mark.slow
def test_wrong_shapes_are_listed_together(saved):
    with pytest.raises(WeightsError) as error:
        FlaxBertForMaskedLM.from_pretrained(saved, vocab_size=99)
    message = str(error.value)
    assert "word_embeddings.weight: (64, 32) in the file, (99, 32)" in message
    assert "cls.predictions.bias: (64,) in the file, (99,)" in message

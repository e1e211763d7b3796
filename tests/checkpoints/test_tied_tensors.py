"""Tied tensors of which a file contains several versions: the outputs are PyTorch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hfseq
from hfseq.cli.convert import convert
from hfseq.cli.inspect import inspect_checkpoint
from hfseq.errors import WeightsError
from tests.support import models
from tests.support.models import close, ids, rewrite_tensors
from tests.support.saved_bert import capture_warnings
from tests.support.torch_counterparts import tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

INPUTS = {"input_ids": ids()}
PAIRS = {"input_ids": ids(), "decoder_input_ids": ids(length=5, seed=1)}
SPEECH = {
    "input_features": models.spectrograms(),
    "decoder_input_ids": PAIRS["decoder_input_ids"],
}
EVERY_TABLE = [f"{part}embed_tokens.weight" for part in ("model.encoder.", "model.decoder.")]
BERT_HEAD = "cls.predictions.decoder"
slow = pytest.mark.slow

#: Class, configuration, inputs, tensors to add to a file with tied tensors.
CASES = {
    "llama": ("LlamaForCausalLM", "llama", INPUTS, ["lm_head.weight"]),
    "gpt2": ("GPT2LMHeadModel", "gpt2", INPUTS, ["lm_head.weight"]),
    "opt": ("OPTForCausalLM", "opt", INPUTS, ["lm_head.weight"]),
    "bloom": ("BloomForCausalLM", "bloom", INPUTS, ["lm_head.weight"]),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", INPUTS, ["lm_head.weight"]),
    "modernbert": ("ModernBertForMaskedLM", "modernbert", INPUTS, ["decoder.weight"]),
    "bert": ("BertForMaskedLM", "bert", INPUTS, [f"{BERT_HEAD}.weight"]),
    "bert-bias": ("BertForMaskedLM", "bert", INPUTS, [f"{BERT_HEAD}.bias"]),
    "roberta": ("RobertaForMaskedLM", "roberta", INPUTS, ["lm_head.decoder.weight"]),
    "albert": ("AlbertForMaskedLM", "albert", INPUTS, ["predictions.decoder.weight"]),
    "electra": ("ElectraForMaskedLM", "electra", INPUTS, ["generator_lm_head.weight"]),
    "bart-head": ("BartForConditionalGeneration", "bart", PAIRS, ["lm_head.weight"]),
    "bart-encoder": ("BartForConditionalGeneration", "bart", PAIRS, EVERY_TABLE[:1]),
    "bart-all": (
        "BartForConditionalGeneration",
        "bart",
        PAIRS,
        ["model.shared.weight", *EVERY_TABLE, "lm_head.weight"],
    ),
    "marian": ("MarianMTModel", "marian", PAIRS, [*EVERY_TABLE, "lm_head.weight"]),
    "whisper": ("WhisperForConditionalGeneration", "whisper", SPEECH, ["proj_out.weight"]),
    "encoder-decoder": (
        "EncoderDecoderModel",
        "encoder_decoder",
        PAIRS,
        [f"decoder.{BERT_HEAD}.weight"],
    ),
}
IN_DEFAULT_SUITE = ("llama", "bert-bias", "bart-all", "encoder-decoder")


def save_pytorch_model(class_name: str, config: Any, folder: Path) -> Any:
    """Saves a PyTorch model with large random parameters."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def add_tensors(folder: Path, names: list[str], remove: list[str] = []) -> None:  # noqa: B006
    """Adds random word embeddings, or biases, of a model with 64 tokens and 32 features."""
    path, generator = folder / "model.safetensors", np.random.default_rng(0)
    content = {name: v for name, v in load_file(path).items() if name not in remove}
    for name in names:
        tables = (v for n, v in load_file(path).items() if v.shape[0] == 64 and v.ndim == 2)
        shape = (64,) if name.endswith("bias") else next(tables).shape
        content[name] = generator.normal(size=shape).astype(np.float32)
    save_file(content, path, {"format": "pt"})


def torch_logits(class_name: str, folder: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    model = getattr(transformers, class_name).from_pretrained(folder).eval()
    return model(**tensors(**inputs))[0].detach().numpy()


@pytest.mark.parametrize(
    "name", [n if n in IN_DEFAULT_SUITE else pytest.param(n, marks=slow) for n in CASES]
)
def test_different_copies_are_separate_parameters(name, tmp_path, caplog):
    class_name, config_name, inputs, added = CASES[name]
    config = getattr(models, f"{config_name}_config")(
        **{"tie_word_embeddings": True} if config_name != "encoder_decoder" else {}
    )
    if config_name == "encoder_decoder":
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
    save_pytorch_model(class_name, config, tmp_path)
    add_tensors(tmp_path, added)
    expected = torch_logits(class_name, tmp_path, inputs)
    with capture_warnings(caplog):
        model = getattr(hfseq, f"Flax{class_name}").from_pretrained(tmp_path)
    assert close(jax.jit(model)(**inputs)[0], expected, 1e-4)
    assert added[-1].removeprefix("decoder.") in caplog.text
    model.save_pretrained(tmp_path / "saved")
    assert close(torch_logits(class_name, tmp_path / "saved", inputs), expected, 1e-4)
    again = getattr(hfseq, f"Flax{class_name}").from_pretrained(tmp_path / "saved")
    assert models.trees_equal(again.params, model.params)


TABLES = {
    "shared": ["shared.weight"],
    "encoder": ["encoder.embed_tokens.weight"],
    "decoder": ["decoder.embed_tokens.weight"],
    "head": ["lm_head.weight"],
}


@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(
    "tables",
    [
        "decoder head",
        "encoder decoder",
        *(
            pytest.param(tables, marks=slow)
            for tables in (
                *("shared head", "shared encoder", "shared decoder", "encoder head", "decoder"),
                *("encoder decoder head", "shared encoder decoder head", "head"),
            )
        ),
    ],
)
def test_t5_reads_the_tables_that_pytorch_reads(tables, scaled, tmp_path):
    """MADLAD-400 has `decoder.embed_tokens` and a separate `lm_head`, but no `shared`."""
    class_name = "T5ForConditionalGeneration"
    config = models.t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=scaled)
    save_pytorch_model(class_name, config, tmp_path)
    add_tensors(tmp_path, [n for t in tables.split() for n in TABLES[t]], ["shared.weight"])
    expected = torch_logits(class_name, tmp_path, PAIRS)
    model = hfseq.FlaxT5ForConditionalGeneration.from_pretrained(tmp_path)
    assert close(jax.jit(model)(**PAIRS)[0], expected, 1e-4)
    model.save_pretrained(tmp_path / "saved")
    assert close(torch_logits(class_name, tmp_path / "saved", PAIRS), expected, 1e-4)
    again = hfseq.FlaxT5ForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert models.trees_equal(again.params, model.params)


@pytest.fixture
def two_tables(tmp_path):
    """A tied Llama whose file contains another head."""
    config = models.llama_config(tie_word_embeddings=True)
    save_pytorch_model("LlamaForCausalLM", config, tmp_path / "two")
    add_tensors(tmp_path / "two", ["lm_head.weight"])
    return tmp_path / "two"


def test_commands_keep_both_tensors(two_tables, tmp_path):
    converted = convert(str(two_tables), tmp_path / "converted", strict=True)
    assert converted.tensors == len(load_file(two_tables / "model.safetensors"))
    assert inspect_checkpoint(str(two_tables))["names"]["missing"] == 0
    expected = torch_logits("LlamaForCausalLM", two_tables, INPUTS)
    assert close(torch_logits("LlamaForCausalLM", tmp_path / "converted", INPUTS), expected, 1e-4)


def test_commands_report_tensors_that_are_not_read(tmp_path):
    """A bias that PyTorch does not use, and rotary frequencies that the model computes."""
    save_pytorch_model("BertForMaskedLM", models.bert_config(), tmp_path / "bert")
    add_tensors(tmp_path / "bert", [f"{BERT_HEAD}.bias"])
    hfseq.FlaxEsmForMaskedLM(models.esm_config()).save_pretrained(tmp_path / "esm")
    name = "esm.rotary_embeddings.inv_freq"
    rewrite_tensors(
        tmp_path / "esm" / "model.safetensors", lambda tensors: {**tensors, name: tensors[name] * 2}
    )
    for source, dropped in (("bert", "cls.predictions.bias"), ("esm", name)):
        folder = str(tmp_path / source)
        with pytest.raises(WeightsError, match=dropped):
            convert(folder, tmp_path / "strict", strict=True)
        assert convert(folder, tmp_path / f"{source}-converted").dropped == [dropped]
        assert any(dropped in problem for problem in inspect_checkpoint(folder)["problems"])


def test_the_head_of_another_class_is_reported(two_tables, caplog):
    with capture_warnings(caplog):
        hfseq.FlaxLlamaModel.from_pretrained(two_tables)
    assert "not used" in caplog.text and "lm_head.weight" in caplog.text


def test_equal_copies_are_tied_without_a_message(tmp_path, caplog):
    config = models.llama_config(tie_word_embeddings=True)
    save_pytorch_model("LlamaForCausalLM", config, tmp_path)
    path = tmp_path / "model.safetensors"
    content = load_file(path)
    content["lm_head.weight"] = content["model.embed_tokens.weight"]
    save_file(content, path, {"format": "pt"})
    with capture_warnings(caplog):
        model = hfseq.FlaxLlamaForCausalLM.from_pretrained(tmp_path)
    assert "lm_head" not in model.params and "lm_head" not in caplog.text


def test_a_class_that_cannot_untie_names_both_tensors(two_tables):
    class AlwaysTied(hfseq.FlaxLlamaForCausalLM):
        def __init__(self, config, *args, untied=False, **kwargs):
            super().__init__(config, *args, **kwargs)

    with pytest.raises(WeightsError, match="model.embed_tokens.weight and lm_head.weight"):
        AlwaysTied.from_pretrained(two_tables)


def test_two_spellings_of_one_name_are_an_error(tmp_path):
    save_pytorch_model("BertForMaskedLM", models.bert_config(), tmp_path)
    path = tmp_path / "model.safetensors"
    content = load_file(path)
    name = "bert.embeddings.LayerNorm.weight"
    content[name.replace("weight", "gamma")] = content[name] + 1
    save_file(content, path, {"format": "pt"})
    with pytest.raises(WeightsError, match="LayerNorm.gamma"):
        hfseq.FlaxBertForMaskedLM.from_pretrained(tmp_path)
    problems = inspect_checkpoint(str(tmp_path))["problems"]
    assert any("LayerNorm.gamma" in problem for problem in problems)

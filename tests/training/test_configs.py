"""The argument files of published experiments: their flags, their sizes and short runs."""

from __future__ import annotations

import math
import os

import pytest
import yaml

from hfseq import FlaxAutoModelForCausalLM, FlaxAutoModelForSeq2SeqLM
from hfseq.checkpoints.config import apply_overrides, parse_overrides
from hfseq.errors import UsageError
from hfseq.training.arguments import CONFIGS, parse
from hfseq.training.setup import new_config
from tests.data.test_tfds import prepare
from tests.support.runs import train

OBJECTIVES = {"wmt17": "translation", "te": "classification", "vq-enwik8": "clm"}
#: Values in the guides: configs/default.py of the WMT example, the examples of Transformer Engine,
#: and the experiment on enwik8 of Transformer-VQ.
WMT17 = {
    **{"d_model": 1024, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 16},
    **{"decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096},
    **{"dropout": 0.1, "attention_dropout": 0.1, "share_embeddings": True, "norm": "pre"},
    **{"logits_via_embedding": True, "attention_bias": False, "positions": "sinusoidal"},
    **{"vocab_size": 32000, "max_source_length": 256, "max_target_length": 256, "num_beams": 4},
    **{"max_corpus_chars": 10**7, "label_smoothing_factor": 0.1, "max_steps": 100_000},
    **{"per_device_train_batch_size": 32, "adam_beta2": 0.98, "adam_epsilon": 1e-9},
    **{"weight_decay": 0.0, "eval_steps": 1000, "save_steps": 10_000, "max_eval_batches": 20},
    **{"precision": "bfloat16", "length_penalty": 0.6, "lr_scheduler_type": "inverse_sqrt"},
    # These differ: the reference has 0.002 and 1000, for embeddings with unit variance.
    **{"learning_rate": 5e-4, "warmup_steps": 4000},
}
TE = {
    **{"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8},
    **{"intermediate_size": 1024, "flatten_length": 32, "hidden_act": "gelu_pytorch_tanh"},
    **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "use_bias": False},
    **{"max_seq_length": 32, "global_batch_size": 64, "num_train_epochs": 3},
    **{"learning_rate": 1e-4, "weight_decay": 1e-4, "precision": "bfloat16"},
}
VQ = {
    **{"hidden_size": 768, "num_hidden_layers": 24, "head_dim": 128, "value_dim": 1536},
    **{"num_codes": 512, "window_size": 512, "head_type": "shga", "vocab_size": 259},
    **{"residual_dropout": 0.5, "layer_dropout": 0.3, "sinusoid_dropout": 0.2},
    **{"update_length": 2048, "global_batch_size": 128, "max_steps": 125_000},
    **{"learning_rate": 4e-4, "warmup_steps": 10_000, "max_grad_norm": 0.1, "weight_decay": 2e-4},
    **{"adam_beta2": 0.98, "adam_epsilon": 1e-9, "eval_steps": 1000, "max_eval_batches": 100},
}


class Vocabulary:
    """A tokenizer that only has a size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def read(name):
    """Returns the flags and the configuration of an included file."""
    arguments = parse([f"configs/{name}.yaml", "--output_dir", "out"], objective=OBJECTIVES[name])
    size = {"wmt17": 32_000, "vq-enwik8": 259}.get(name, 99)
    config = new_config(arguments.model.model_type, Vocabulary(size), arguments.model.preset)
    apply_overrides(config, parse_overrides(arguments.model.config_overrides))
    return arguments, config


def test_every_included_file_is_tested():
    assert {path.stem for path in CONFIGS.iterdir()} == set(OBJECTIVES)


@pytest.mark.parametrize(("name", "expected"), [("wmt17", WMT17), ("te", TE), ("vq-enwik8", VQ)])
def test_values_are_those_of_the_guide(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without a folder configs
    arguments, config = read(name)
    values = vars(arguments.model) | vars(arguments.data) | vars(arguments.training)
    found = {key: getattr(config, key, values.get(key)) for key in expected}
    assert found == expected
    keys = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(keys) <= set(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "auto_class", "millions"),
    [("wmt17", FlaxAutoModelForSeq2SeqLM, 209), ("vq-enwik8", FlaxAutoModelForCausalLM, 185)],
)
def test_models_have_the_size_of_the_guide(name, auto_class, millions):
    import jax

    model = auto_class.from_config(read(name)[1], _do_init=False)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract_params))
    assert round(count / 1e6) == millions


def test_a_file_in_the_current_directory_takes_precedence(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "te.yaml").write_text("output_dir: mine\nseed: 3\n")
    monkeypatch.chdir(tmp_path)
    assert parse(["configs/te.yaml"]).training.seed == 3
    with pytest.raises(UsageError, match="configs/tee.yaml.*configs/te.yaml, configs/vq-enwik8"):
        parse(["configs/tee.yaml"])
    (tmp_path / "configs" / "te.yaml").write_text("output_dir: mine\nlearning_rte: 3\n")
    with pytest.raises(UsageError, match="configs/te.yaml has .*'learning_rte'.*'learning_rate'"):
        parse(["configs/te.yaml"])


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Changes to directory with small data for each file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "TFDS_DATA_DIR", str(tmp_path))
    prepare(tmp_path, split="train")
    rows = "".join(f"A sentence number {i}.,{i % 2}\n" for i in range(16))
    (tmp_path / "cola.csv").write_text(f"sentence,label\n{rows}")
    (tmp_path / "enwik8").write_bytes(bytes(range(32, 96)) * 64)
    return tmp_path


SMALL = {
    "wmt17": {
        "dataset_name": "tfds:tiny/de-en",
        "validation_file": "tfds:tiny/de-en#train",
        "vocab_size": 60,
        "preset": "tiny",
        "max_source_length": 64,
        "max_target_length": 64,
        "max_new_tokens": 8,
        "generation_batch_size": 8,
        "per_device_train_batch_size": 2,
        "global_batch_size": 4,
    },
    "te": {
        "task_name": None,
        "train_file": "cola.csv",
        "validation_file": "cola.csv",
        "global_batch_size": 8,
    },
    "vq-enwik8": {
        "config_overrides": "hidden_size=32,num_hidden_layers=2,head_dim=16,value_dim=32,"
        "num_codes=8,window_size=8,block_size=8",
        "block_size": 64,
        "update_length": 32,
        "global_batch_size": 4,
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_small_version_trains_for_two_steps(name, data):
    if name == "vq-enwik8":
        from hfseq.cli import main

        command = "tokenizer --model_type vq_transformer --vocabulary bytes --output_dir bytes"
        assert main(command.split()) == 0
    keys = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    short = {
        "max_steps": 2,
        "warmup_steps": 1,
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
    }
    values = keys | SMALL[name] | short | {"eval_strategy": "steps", "save_strategy": "steps"}
    (data / "small.yaml").write_text(yaml.safe_dump(values))
    result = train(["small.yaml", "--output_dir", "out"], OBJECTIVES[name], devices=1)
    assert result.progress.step == 2
    assert (data / "out" / "model.safetensors").exists()
    assert any(key.startswith("eval_") for key in result.metrics)

"""Training of adapters only: the state, the saved files, and resumption."""

from __future__ import annotations

import json
import re
import shutil

import jax
import numpy as np
import pytest
import transformers

import hfseq
from hfseq.errors import UsageError
from hfseq.nn import trees
from tests.support.models import roberta_config
from tests.training.conftest import losses, stop_at

LORA = {
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "model_type": None,
    "config_overrides": None,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory):
    """The directory of a new model and its tokenizer."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus / "tokenizer")
    tokenizer.save_pretrained(folder)
    config = roberta_config(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    hfseq.FlaxRobertaForMaskedLM(config).save_pretrained(folder)
    return folder


def test_only_adapters_are_trained_and_saved(train, base, tmp_path):
    options = {"model_name_or_path": base, "do_train": True, "save_steps": 3, **LORA}
    loop = train("lora", 1, **options)
    leaves = trees.flatten(loop.state.params)
    assert leaves and all("lora_" in trees.join(path) for path in leaves)
    assert len(jax.tree.leaves(loop.state.opt_state)) < 3 * len(leaves) + 6
    files = {path.name for path in (tmp_path / "lora").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert "config.json" not in files
    assert all(np.any(leaf) for leaf in leaves.values()), "what begins at zero has moved"
    base_params = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(base).params
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(loop.folder)
    new_params = trees.flatten(model.params)
    for path, leaf in trees.flatten(base_params).items():
        assert np.array_equal(new_params[path], leaf), path
    for path, leaf in leaves.items():
        assert np.array_equal(new_params[path], leaf), path
    card = (loop.folder / "README.md").read_text()
    assert "library_name: peft" in card and "LoRA of rank 4 for base, 1,024 of" in card
    assert "lora_alpha" in card and "peft package" in card
    record = json.loads((loop.folder / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str(base)
    assert record["target_modules"] == ["query", "value"]
    assert (record["r"], record["lora_alpha"], record["lora_dropout"]) == (4, 8, 0.05)


@pytest.mark.slow
def test_resume_is_bit_exact(train, base):
    options = {"model_name_or_path": base, "do_train": True, "save_steps": 2, **LORA}
    uninterrupted = losses(train("whole", 1, **options).folder)
    with pytest.raises(SystemExit):
        train("cut", 1, callbacks=[stop_at(4)], **options)
    assert losses(train("cut", 1, **options).folder) == uninterrupted
    judged = train("cut", 1, do_eval=True, model_type=None, config_overrides=None)
    assert np.isfinite(judged.metrics["eval_loss"])
    longer = {**options, "max_steps": 8, "model_name_or_path": judged.folder}
    again = train("again", 1, **longer)
    assert losses(again.folder)[1] < uninterrupted[1]
    with pytest.raises(UsageError, match="is an adapter: .*--use_peft"):
        train("plain", 1, **{**longer, "use_peft": False})


FEW_BITS = {"load_in_4bit": "uint4", "load_in_8bit": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize("flag", FEW_BITS)
def test_a_base_in_few_bits_trains_as_one_that_was_rounded_to_them(train, base, tmp_path, flag):
    """The reference is a base model with rounded weights, trained without quantization."""
    qwix = pytest.importorskip("qwix")
    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(base)
    stored = model.quantize(model.params, "nf4" if flag == "load_in_4bit" else "int8")
    quantized = {
        path: leaf for path, leaf in trees.flatten(stored).items() if hasattr(leaf, "qvalue")
    }
    assert len(quantized) == 6 * 2 + 1, "six Linears a layer, and that of the head"
    assert all(path[-1] == "kernel" for path in quantized)
    dequantized = {path: qwix.dequantize(leaf) for path, leaf in quantized.items()}
    shifts = [
        abs(dequantized[p] - leaf).max()
        for p, leaf in trees.flatten(model.params).items()
        if p in dequantized
    ]
    assert min(shifts) > 0
    rounded = trees.unflatten(trees.flatten(stored) | dequantized)
    model.save_pretrained(tmp_path / "rounded", params=rounded)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "rounded" / name)
    options = {"do_train": True, "do_eval": True, "save_steps": 2, **LORA}
    expected = train("plain", 1, model_name_or_path=tmp_path / "rounded", **options)
    options |= {"model_name_or_path": base, flag: True}
    run = train("few", 1, **options)
    assert losses(run.folder) == pytest.approx(losses(expected.folder), rel=1e-6)
    assert run.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], rel=1e-6)
    types = [
        leaf.qvalue.dtype
        for leaf in trees.flatten(run.run.frozen).values()
        if hasattr(leaf, "qvalue")
    ]
    assert list(map(str, types)) == [FEW_BITS[flag]] * len(quantized)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.run.frozen)
    assert shapes == jax.tree.map(lambda s: (s.shape, s.dtype), run.run.abstract_frozen())
    with pytest.raises(SystemExit):
        train("cut", 1, callbacks=[stop_at(4)], **options)
    assert losses(train("cut", 1, **options).folder) == losses(run.folder)


def test_few_bits_are_for_a_base_that_is_not_trained(train, base):
    with pytest.raises(UsageError, match="--load_in_4bit .* --use_peft"):
        train("none", do_train=True, model_name_or_path=base, load_in_4bit=True)
    with pytest.raises(UsageError, match="--load_in_4bit and --load_in_8bit"):
        train("both", model_name_or_path=base, load_in_4bit=True, load_in_8bit=True, **LORA)
    with pytest.raises(UsageError, match="--load_in_8bit .*--precision fp8_current"):
        fp8 = {"precision": "fp8_current", "load_in_8bit": True}
        train("fp8", model_name_or_path=base, **fp8, **LORA)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_mesh_matches_single_device(train, base, scan):
    options = {
        "model_name_or_path": base,
        "do_train": True,
        "lora_target_modules": "all-linear",
        **LORA,
    }
    single = losses(train("one", 1, **options).folder)
    mesh = {"mesh": "data=2,fsdp=2,tensor=2", "scan_layers": scan, "gradient_checkpointing": scan}
    distributed = losses(train("many", 8, **mesh, **options).folder)
    for step, value in single.items():
        assert distributed[step] == pytest.approx(value, rel=2e-5), step
    options["load_in_4bit"] = True
    single = losses(train("one_in_4", 1, **options).folder)
    distributed = train("many_in_4", 8, **mesh, **options)
    for step, value in single.items():
        assert losses(distributed.folder)[step] == pytest.approx(value, rel=2e-5), step
    leaves = trees.flatten(distributed.run.frozen)
    kernel = next(v for path, v in leaves.items() if path[-2:] == ("query", "kernel"))
    assert kernel.qvalue.sharding.shard_shape(kernel.shape)[-2:] == (16, 16)


def test_unsupported_adapter_targets_are_rejected(train, base, tmp_path):
    with pytest.raises(UsageError, match="--use_peft .*--model_name_or_path"):
        train("none", do_train=True, **{**LORA, "model_type": "roberta"})
    with pytest.raises(UsageError, match="target_modules q_proj: no layer of this model"):
        train("other", model_name_or_path=base, lora_target_modules="q_proj", **LORA)


@pytest.mark.slow
def test_no_gradient_of_a_kernel_is_ever_computed(train, base):
    """The compiled step does not contain products with the shape (in, out) or (out, in)."""
    shapes = {"query": (32, 32), "intermediate": (32, 64), "output": (64, 32)}
    texts, observed = [], []
    adapted = {"model_name_or_path": base, "lora_target_modules": "all-linear", **LORA}
    for number, options in enumerate(({}, adapted)):
        keep = [lambda info: observed.append(info.batch)]
        run = train(f"program{number}", 1, max_steps=2, callbacks=keep, **options).run
        step_inputs = run.abstract_state(), run.abstract_frozen(), observed[-1]
        texts.append(run.step_function().lower(*step_inputs).as_text())

    def products(text, shape):
        sizes = "x".join(map(str, shape))
        return len(re.findall(rf"dot_general.*-> tensor<{sizes}xf32>", text))

    for name, shape in shapes.items():
        uninterrupted, few = (products(text, shape) + products(text, shape[::-1]) for text in texts)
        assert uninterrupted and not few, name

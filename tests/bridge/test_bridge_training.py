"""Training of architectures that hfseq does not implement, with the scripts and --bridge."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers

import hfseq
from hfseq.errors import UsageError
from tests.support.audio import write_words
from tests.support.images import draw_digits
from tests.support.stored_runs import STORED
from tests.training.conftest import check_resume, check_two_devices, make_runner

SIZES = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
CLM = {"max_seq_length": None, "block_size": 32}
SEQ2SEQ = (
    "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
    "decoder_attention_heads=4,encoder_ffn_dim=48,decoder_ffn_dim=48,max_position_embeddings=200,"
    "encoder_layerdrop=0,decoder_layerdrop=0"
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
    "mamba": (
        "clm",
        "hidden_size=32,num_hidden_layers=2,state_size=8",
        CLM | {"line_by_line": True},
    ),
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

    uninterrupted, _ = check_resume(run)
    assert uninterrupted.run.model.structure.module is not None
    auto_class = getattr(transformers, f"AutoModel{uninterrupted.run.objective.auto_class}")
    reference = auto_class.from_pretrained(uninterrupted.folder).eval()
    ids = np.random.default_rng(0).integers(5, 120, (2, 12)).astype(np.int32)
    inputs = {"input_ids": ids}
    if reference.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :6]
    with torch.no_grad():
        expected = reference(**{n: torch.from_numpy(x).long() for n, x in inputs.items()}).logits
    model = type(uninterrupted.run.model).from_pretrained(uninterrupted.folder)
    np.testing.assert_allclose(model(**inputs).logits, expected.numpy(), atol=2e-5)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_number_of_devices(train):
    objective, sizes, options = FAMILIES["mpnet"]

    def run(output, devices, **changes):
        flags = {"model_type": "mpnet", "config_overrides": sizes, "bridge": True, **options}
        return train(output, devices=devices, objective=objective, **(flags | changes))

    check_two_devices(run, max_steps=3)


def check_torch(uninterrupted, inputs):
    """Asserts that PyTorch opens the output directory of a run and computes the same logits.

    The reference is float64. The logits may differ from it by four times PyTorch's float32 error.
    """
    auto_class = getattr(transformers, transformers_name(uninterrupted))
    reference = auto_class.from_pretrained(uninterrupted.folder).eval()
    tensors = {n: torch.from_numpy(x) for n, x in inputs.items()}
    with torch.no_grad():
        rounded = reference(**tensors).logits.numpy()
        exact = reference.double()(**{n: x.double() for n, x in tensors.items()}).logits.numpy()
    model = type(uninterrupted.run.model).from_pretrained(uninterrupted.folder)
    tolerance = max(1e-5, 4 * np.abs(rounded - exact).max())
    np.testing.assert_allclose(model(**inputs).logits, exact, rtol=0, atol=tolerance)


def transformers_name(uninterrupted):
    return uninterrupted.run.model.torch_class_name()


VISION = {
    "deit": f"{SIZES},patch_size=8",
    "swin": "embed_dim=16,depths=[1,1],num_heads=[2,2],window_size=4,patch_size=4",
    "mobilenet_v2": "depth_multiplier=0.25,min_depth=8,depth_divisible_by=8",
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", VISION)
def test_bridged_image_classifier_trains_resumes_and_opens_in_torch(model_type, tmp_path):
    pytest.importorskip("PIL")
    draw_digits(tmp_path / "digits" / "train", 12)
    draw_digits(tmp_path / "digits" / "validation", 4, seed=1)
    run = make_runner(
        "image_classification",
        tmp_path,
        model_type=model_type,
        bridge=True,
        config_overrides=VISION[model_type],
        train_dir=tmp_path / "digits" / "train",
        validation_dir=tmp_path / "digits" / "validation",
        image_size=32,
        augment=False,
        decode_workers=0,
        global_batch_size=8,
        max_steps=4,
    )
    uninterrupted, _ = check_resume(run, step=2)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    check_torch(uninterrupted, {"pixel_values": pixels})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")  # PyTorch
@pytest.mark.parametrize("model_type", ["hubert", "wavlm"])
def test_bridged_speech_model_trains_resumes_and_opens_in_torch(model_type, tmp_path):
    pytest.importorskip("soundfile")
    for split, count in (("train", 16), ("validation", 4)):
        words = write_words(tmp_path / "spoken" / split, count, 0)
        rows = [f"{split}/{n:03}.wav,{word.upper()}\n" for n, word in enumerate(words)]
        (tmp_path / "spoken" / f"{split}.csv").write_text("audio,text\n" + "".join(rows))
    sizes = (
        "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48,"
        "conv_dim=[16,16,16],conv_stride=[10,10,4],conv_kernel=[20,10,4],num_feat_extract_layers=3,"
        "feat_extract_norm=layer,do_stable_layer_norm=true,num_conv_pos_embeddings=4,"
        "num_conv_pos_embedding_groups=2,layerdrop=0,apply_spec_augment=false"
    )
    run = make_runner(
        "ctc",
        tmp_path,
        model_type=model_type,
        bridge=True,
        config_overrides=sizes,
        train_file=tmp_path / "spoken" / "train.csv",
        validation_file=tmp_path / "spoken" / "validation.csv",
        max_duration_in_seconds=1.0,
        decode_workers=0,
        pad_to_multiple_of=100,
        global_batch_size=8,
        max_steps=4,
    )
    uninterrupted, _ = check_resume(run, step=2)
    check_torch(
        uninterrupted, {"input_values": np.random.default_rng(0).normal(size=(2, 6000)).astype("f")}
    )
    with pytest.raises(UsageError, match="apply_spec_augment"):
        run("masked", config_overrides=sizes.replace("augment=false", "augment=true"))


@pytest.mark.slow
def test_bridged_captioner_trains_resumes_and_opens_in_torch(tmp_path):
    pytest.importorskip("PIL")
    pytest.importorskip("rouge_score")
    data, sizes = STORED / "data", {"hidden_size": 16, "intermediate_size": 24}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GitConfig(
        vocab_size=300,
        max_position_embeddings=64,
        vision_config={**sizes, **layers, "image_size": 8, "patch_size": 4},
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **sizes,
        **layers,
    )
    model = hfseq.FlaxAutoModelForImageTextToText.from_config(config, bridge=True)
    model.save_pretrained(tmp_path / "git")
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(data / "writer" / name, tmp_path / "git" / name)
    run = make_runner(
        "image_to_text",
        tmp_path,
        model_name_or_path=tmp_path / "git",
        bridge=True,
        train_file=data / "captions.jsonl",
        validation_file=data / "captions.jsonl",
        max_target_length=8,
        augment=False,
        decode_workers=0,
        global_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=4,
        generation_batch_size=8,
    )
    uninterrupted, resumed = check_resume(run, step=2)
    assert uninterrupted.metrics["eval_rouge1"] == resumed.metrics["eval_rouge1"]
    reference = transformers.GitForCausalLM.from_pretrained(uninterrupted.folder).eval()
    random = np.random.default_rng(0)
    ids = random.integers(5, 300, (2, 6)).astype(np.int32)
    pixels = random.normal(size=(2, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = reference(
            input_ids=torch.from_numpy(ids).long(), pixel_values=torch.from_numpy(pixels)
        ).logits
    trained = type(uninterrupted.run.model).from_pretrained(uninterrupted.folder)
    logits = trained(input_ids=ids, pixel_values=pixels).logits
    np.testing.assert_allclose(logits, expected.numpy(), atol=3e-5)

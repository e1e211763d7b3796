"""Programs for Transformers 4's Flax classes, in the style of the projects that use them.

The programs in the folder `programs` import only Transformers, JAX and Flax. They run unchanged in
a subprocess with tiny local checkpoints, which PyTorch has written, and save their inputs and
results. The tests compute the same results with PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from tests.support import models
from tests.support.models import close

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
WORDS = "the small dog reads a big book photo of".split()

IMPORTED = (
    "import hfseq.v4, runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], {}, '__main__')"
)


def run(program: str, folder: Path, *start: str) -> dict[str, np.ndarray]:
    """Runs a program with a checkpoint folder. Returns the arrays that it saved."""
    output = folder / f"{program}.npz"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins"))),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.run(
        [
            sys.executable,
            *("-W", "error::DeprecationWarning:__main__", *(start or ("-m", "hfseq.v4"))),
            *(str(PROGRAMS / f"{program}.py"), str(folder), str(output)),
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    with np.load(output) as arrays:
        return dict(arrays)


def save(folder: Path, class_name: str, config: Any, **options: Any) -> Any:
    """Saves a new PyTorch model. Returns it in evaluation mode."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).eval()
    model.save_pretrained(folder, **options)
    return model


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "<unk>": 20}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_clip_tokenizer(folder: Path) -> None:
    letters = sorted(set("".join(WORDS)))
    entries = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    transformers.CLIPTokenizer(
        vocab={name: number for number, name in enumerate(entries)}, merges=[]
    ).save_pretrained(folder)


def forward(model: Any, **arrays: Any) -> Any:
    """Calls a PyTorch model with arrays and other arguments. Integers become int64."""
    inputs = {}
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            tensor = torch.from_numpy(value.copy())
            value = tensor if value.dtype.kind in "fb" else tensor.long()
        inputs[name] = value
    with torch.no_grad():
        return model(**inputs)


LOADED = {
    "albert": ("AlbertForMaskedLM", models.albert_config),
    "bart": ("BartForCausalLM", models.bart_config),
    "bert": ("BertForMaskedLM", models.bert_config),
    "bloom": ("BloomForCausalLM", models.bloom_config),
    "clip": ("CLIPModel", models.clip_config),
    "dinov2": ("Dinov2ForImageClassification", models.dinov2_config),
    "distilbert": ("DistilBertForMaskedLM", models.distilbert_config),
    "electra": ("ElectraForMaskedLM", models.electra_config),
    "gpt2": ("GPT2LMHeadModel", models.gpt2_config),
    "gpt_neo": ("GPTNeoForCausalLM", models.gpt_neo_config),
    "mistral": ("MistralForCausalLM", models.mistral_config),
    "opt": ("OPTForCausalLM", models.opt_config),
    "resnet": ("ResNetForImageClassification", models.resnet_config),
    "roberta": ("RobertaForSequenceClassification", models.roberta_config),
    "t5": ("T5ForConditionalGeneration", models.t5_config),
    "vit": ("ViTForImageClassification", models.vit_config),
    "xglm": ("XGLMForCausalLM", models.xglm_config),
}


@pytest.mark.parametrize("start", [("-m", "hfseq.v4"), ("-c", IMPORTED)], ids=["run", "imported"])
def test_loaders_with_jax_tensors_give_the_logits_of_pytorch(start, tmp_path):
    reference: dict[str, Any] = {}
    processor = transformers.ViTImageProcessorPil(size={"height": 12, "width": 12})
    for name, (class_name, make_config) in LOADED.items():
        reference[name] = save(tmp_path / name, class_name, make_config())
        save_tokenizer(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    arrays = run("loaders", tmp_path, *start)
    for name, model in reference.items():
        inputs = {
            key.removeprefix(f"{name}/"): value
            for key, value in arrays.items()
            if key.startswith(f"{name}/") and not key.endswith(("/result", "/bfloat16"))
        }
        outputs = forward(model, **inputs)
        logits = outputs["logits_per_image" if name == "clip" else "logits"]
        mask = inputs.get("attention_mask", np.ones(1))
        visible = mask.astype(bool) if mask.shape == logits.shape[:2] else slice(None)
        assert close(arrays[f"{name}/result"][visible], logits[visible], 2e-5), name
        if f"{name}/bfloat16" in arrays:
            assert close(arrays[f"{name}/bfloat16"][visible], logits[visible], 0.05), name


@pytest.fixture
def encoders(tmp_path) -> tuple[Path, dict[str, Any]]:
    """Saves the text encoders of a diffusion pipeline, with their tokenizers."""
    save_clip_tokenizer(tmp_path / "tokenizer")
    save_tokenizer(tmp_path / "tokenizer_2")
    text = models.clip_text_model_config(vocab_size=64, eos_token_id=1, projection_dim=24)
    gemma = models.gemma3_text_config()
    reference = {
        "clip": save(tmp_path / "clip", "CLIPTextModel", text),
        "projected": save(tmp_path / "projected", "CLIPTextModelWithProjection", text),
        "t5": save(tmp_path / "t5", "T5EncoderModel", models.t5_config()),
        "gemma3": save(tmp_path / "gemma3", "Gemma3TextModel", gemma),
    }
    return tmp_path, reference


def test_text_encoders_give_the_states_of_pytorch(encoders):
    folder, reference = encoders
    arrays = run("text_encoders", folder)
    clip = forward(reference["clip"], input_ids=arrays["clip_ids"], output_hidden_states=True)
    projected = forward(
        reference["projected"], input_ids=arrays["clip_ids"], output_hidden_states=True
    )
    embeds = torch.cat([clip.hidden_states[-2], projected.hidden_states[-2]], dim=-1)
    assert close(arrays["pooled"], clip.pooler_output)
    assert close(arrays["embeds"], embeds)
    assert close(arrays["text_embeds"], projected.text_embeds)
    t5 = forward(reference["t5"], input_ids=arrays["t5_ids"])
    assert close(arrays["prompt"], t5.last_hidden_state)
    mask = arrays["gemma_mask"]
    gemma = forward(
        reference["gemma3"],
        input_ids=arrays["t5_ids"],
        attention_mask=mask,
        output_hidden_states=True,
    )
    visible = mask.astype(bool)
    for ours, theirs in zip(arrays["gemma"], gemma.hidden_states, strict=True):
        assert close(ours[visible], theirs[visible], 0.05)


def test_an_embedder_in_an_nnx_module_gives_the_states_of_pytorch(encoders):
    folder, reference = encoders
    arrays = run("embedder", folder)
    clip = forward(reference["clip"], input_ids=arrays["clip_ids"])
    t5 = forward(reference["t5"], input_ids=arrays["t5_ids"])
    assert close(arrays["pooled"], clip.pooler_output)
    assert close(arrays["prompt"], t5.last_hidden_state)


def test_a_transcription_pipeline_gives_the_tokens_of_pytorch(tmp_path):
    config = models.whisper_config(init_std=0.4, max_source_positions=50)
    reference = save(tmp_path, "WhisperForConditionalGeneration", config)
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(tmp_path)
    arrays = run("transcription", tmp_path)
    features, tokens = arrays["features"], arrays["tokens"]
    assert len(tokens) == 8 and (tokens[:, 1:3] == [7, 9]).all()
    outputs = forward(reference, input_features=features, decoder_input_ids=tokens[:, :-1])
    expected = outputs.logits.argmax(-1).numpy()[:, 2:]
    ended = np.cumsum(tokens == config.eos_token_id, axis=1)[:, 2:-1] > 0
    assert np.array_equal(tokens[:, 3:][~ended], expected[~ended])
    assert close(arrays["logits"], outputs.logits[:2, :6], 2e-5)
    assert close(arrays["encoded"], outputs.encoder_last_hidden_state[:2], 0.1)


def test_a_pmap_training_loop_gives_the_losses_of_pytorch(tmp_path):
    config = models.bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = save(tmp_path / "bert", "BertForMaskedLM", config)
    arrays = run("pmap_training", tmp_path)
    ids, labels = (torch.from_numpy(arrays[name]) for name in ("ids", "labels"))
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        (rest if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=1)
    losses = []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - step / 4)
        loss = model(ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert close(arrays["losses"], losses, 1e-5) and losses[-1] < losses[0]
    logits = forward(model.eval(), input_ids=arrays["ids"]).logits
    assert close(arrays["logits"], logits, 1e-5)
    trained = transformers.BertForMaskedLM.from_pretrained(tmp_path / "trained").eval()
    assert close(forward(trained, input_ids=arrays["ids"]).logits, logits, 1e-5)


def test_late_initialization_and_own_logits_processors(tmp_path):
    gpt2 = save(tmp_path / "gpt2", "GPT2LMHeadModel", models.gpt2_config(initializer_range=0.4))
    bert = save(tmp_path / "bert", "BertModel", models.bert_config())
    arrays = run("late_initialization", tmp_path)

    def only_even(input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, -float("inf"))

    expected = gpt2.generate(
        torch.from_numpy(arrays["ids"]),
        max_length=12,
        min_length=8,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        logits_processor=transformers.LogitsProcessorList([only_even]),
    ).numpy()
    assert np.array_equal(arrays["sequences"][:, : expected.shape[1]], expected)
    assert close(arrays["warped"], 2 * arrays["scores"])
    assert close(arrays["scores"], forward(gpt2, input_ids=arrays["ids"]).logits[:, -1])
    classifier = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "transferred"
    ).eval()
    logits = forward(classifier, input_ids=arrays["bert_ids"]).logits
    assert close(arrays["logits"], logits)
    ours, theirs = classifier.bert.state_dict(), bert.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_speech_pretraining_with_the_old_helpers(tmp_path):
    config = models.wav2vec2_config(num_adapter_layers=3)
    model = save(tmp_path, "Wav2Vec2ForPreTraining", config)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    arrays = run("speech_pretraining", tmp_path)
    outputs = forward(
        model,
        input_values=arrays["values"],
        mask_time_indices=arrays["mask"],
        sampled_negative_indices=arrays["negatives"].reshape(*arrays["mask"].shape, -1),
    )
    assert close(arrays["projected"], outputs.projected_states, 2e-5)
    assert close(arrays["quantized"], outputs.projected_quantized_states, 2e-5)
    assert np.isfinite(arrays["loss"])


COMPOSED: list[tuple[str, str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    ("clip", "CLIPModel", lambda a: {"input_ids": a["ids"], "pixel_values": a["pixels"]}),
    (
        "dual",
        "VisionTextDualEncoderModel",
        lambda a: {"input_ids": a["ids"], "pixel_values": a["pixels"]},
    ),
    (
        "text",
        "EncoderDecoderModel",
        lambda a: {"input_ids": a["ids"], "decoder_input_ids": a["ids"]},
    ),
    (
        "images",
        "VisionEncoderDecoderModel",
        lambda a: {"pixel_values": a["pixels"], "decoder_input_ids": a["ids"]},
    ),
    (
        "speech",
        "SpeechEncoderDecoderModel",
        lambda a: {"input_values": a["audio"], "decoder_input_ids": a["ids"]},
    ),
]


def test_models_composed_from_configurations_load_in_pytorch(tmp_path):
    for name, make_config in [
        ("bert", models.bert_config),
        ("gpt2", models.gpt2_config),
        ("vit", models.vit_config),
        ("clip", models.clip_config),
        ("wav2vec2", models.wav2vec2_config),
    ]:
        make_config().save_pretrained(tmp_path / name)
    processor = transformers.ViTImageProcessorPil(size={"height": 12, "width": 12})
    processor.save_pretrained(tmp_path / "vit")
    arrays = run("composed_models", tmp_path)
    for name, class_name, inputs in COMPOSED:
        model_class = getattr(transformers, class_name)
        model = model_class.from_pretrained(tmp_path / f"composed-{name}").eval()
        outputs = forward(model, **inputs(arrays))
        key = "logits_per_image" if "logits_per_image" in outputs else "logits"
        assert close(arrays[name], outputs[key], 2e-5), name

"""Tiny models with random weights and their tokenizers, for tests of the pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import transformers

import hfseq
from hfseq.data.tokenizers import train_tokenizer
from tests.data.test_audio import tones
from tests.plugins.test_whisper import ENTRIES
from tests.support import models

TEXTS = [
    "The old law of every land is read by all who live there.",
    "Some, who do not yet know it, write to the editor in Paris!",
    "Anna lives in Berlin and works for a small company, near the river Spree.",
    "It was never read.",
    "Whoever lives by the river knows the law of the river: it rises, it falls, and it does not "
    "ask anybody before it does so, as the people of the town have learned over the years.",
]
CHAT = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 130,
    "initializer_range": 0.6,
}
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NAMES = {
    "tags": {"id2label": dict(enumerate(TAGS)), "label2id": {t: n for n, t in enumerate(TAGS)}},
    "nli": {
        "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
        "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
    },
}
#: The model class, the family of the tokenizer and configuration values, by directory.
MADE = {
    "masked": ("RobertaForMaskedLM", "roberta", {}),
    "classes": ("RobertaForSequenceClassification", "roberta", {"num_labels": 4}),
    "grade": ("BertForSequenceClassification", "bert", {"num_labels": 1}),
    "nli": ("BertForSequenceClassification", "bert", NAMES["nli"]),
    "tags": ("BertForTokenClassification", "bert", NAMES["tags"]),
    "tags-bytes": ("RobertaForTokenClassification", "roberta", NAMES["tags"]),
    "answers": ("BertForQuestionAnswering", "bert", {}),
    "answers-bytes": ("RobertaForQuestionAnswering", "roberta", {}),
    "features": ("BertModel", "bert", {"initializer_range": 0.1}),
    "causal": ("GPT2LMHeadModel", "gpt2", {}),
    "seq2seq": ("T5ForConditionalGeneration", "t5", {}),
}


def make(root: Path, name: str) -> Path:
    """Saves the model `name` of MADE in the directory `root / name`, which is returned."""
    variant, family, changes = MADE[name]
    texts = [text for text in TEXTS for _ in range(3)]
    extra = {"lowercase": True} if family == "bert" else {}
    extra |= {"model_max_length": 40} if name == "tags" else {}
    tokenizer = train_tokenizer([texts], family, None, 330, root / name, **extra)
    ids = {
        f"{item}_token_id": getattr(tokenizer, f"{item}_token_id") for item in ("pad", "bos", "eos")
    }
    build = getattr(models, f"{family}_config")
    sizes = SIZES if family in ("bert", "roberta") else {}
    if family == "t5":
        ids["decoder_start_token_id"], sizes = ids["pad_token_id"], {"initializer_factor": 8.0}
        changes = {
            "task_specific_params": {
                "summarization": {"prefix": "short: ", "max_length": 18, "num_beams": 3},
                "translation_en_to_de": {"prefix": "in German: ", "max_length": 14},
            }
        }
    if family == "gpt2":
        sizes = {"initializer_range": 0.5, "n_positions": 128, "n_layer": 1}
        (root / name / "chat_template.jinja").write_text(CHAT)
    config = build(vocab_size=len(tokenizer), **{**sizes, **ids, **changes})
    getattr(hfseq, f"Flax{variant}")(config, seed=1).save_pretrained(root / name)
    return root / name


def save_media_models(root: Path) -> None:
    """Saves models for images and audio, their processors, and some image and audio files."""
    import soundfile
    from PIL import Image

    from hfseq.data.tokenizers import train_tokenizer

    root.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(5):
        pixels = random.integers(0, 256, (20 + number, 24, 3), np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        soundfile.write(root / f"{number}.wav", tones(16000, 0.6 + number / 4, number), 16000)
    size = {"height": 12, "width": 12}
    for name in ("vit", "features", "clip"):
        transformers.ViTImageProcessorPil(size=size).save_pretrained(root / name)
    vit = {"image_size": 12, "patch_size": 4, "initializer_range": 0.5, "num_hidden_layers": 1}
    hfseq.FlaxViTForImageClassification(
        models.vit_config(num_labels=7, **vit), seed=1
    ).save_pretrained(root / "vit")
    hfseq.FlaxViTModel(models.vit_config(**vit), seed=1).save_pretrained(root / "features")
    tokenizer = train_tokenizer([TEXTS * 3], "roberta", None, 300, root / "clip")
    clip = models.clip_config()
    clip.text_config.vocab_size = len(tokenizer)
    clip.text_config.max_position_embeddings = 60
    clip.text_config.eos_token_id = tokenizer.eos_token_id
    clip.vision_config.image_size, clip.vision_config.patch_size = 12, 4
    hfseq.FlaxCLIPModel(clip, seed=1).save_pretrained(root / "clip")
    letters = {
        name: number
        for number, name in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"])
    }
    (root / "vocab.json").write_text(json.dumps(letters))
    for name, norm in (("ctc", "layer"), ("ctc-group", "group")):
        transformers.Wav2Vec2CTCTokenizer(str(root / "vocab.json")).save_pretrained(root / name)
        extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=norm == "layer")
        extractor.save_pretrained(root / name)
        config = models.wav2vec2_config(
            vocab_size=len(letters),
            num_hidden_layers=1,
            initializer_range=0.5,
            pad_token_id=0,
            feat_extract_norm=norm,
            do_stable_layer_norm=norm == "layer",
        )
        hfseq.FlaxWav2Vec2ForCTC(config, seed=1).save_pretrained(root / name)
    save_whisper(root / "whisper")
    (root / "broken.png").write_bytes(b"no image")
    (root / "broken.wav").write_bytes(b"no audio")


def save_whisper(folder: Path) -> None:
    """Saves a Whisper model with inputs of one second, and a tokenizer whose tokens are letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    names = ["<unk>", "<pad>", "</s>", "<|startoftranscript|>", *letters]
    vocabulary = {name: number for number, name in enumerate(names)}
    vocabulary |= {f"x{number}": number for number in range(len(names), 40)}
    vocabulary |= ENTRIES["lang_to_id"]
    vocabulary |= {f"<|{name}|>": number for name, number in ENTRIES["task_to_id"].items()}
    vocabulary |= {"<|startofprev|>": 45, "<|nospeech|>": 46, "<|notimestamps|>": 47}
    prompts = [name for name in vocabulary if name.startswith("<|")]
    vocabulary |= {f"<|{number * 0.02:.2f}|>": 48 + number for number in range(16)}
    transformers.WhisperTokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<pad>",
        bos_token="<|startoftranscript|>",
        additional_special_tokens=prompts,
    ).save_pretrained(folder)
    model = hfseq.FlaxWhisperForConditionalGeneration(
        models.whisper_config(init_std=0.4, max_source_positions=50)
    )
    tokens = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 1}
    model.generation_config = transformers.GenerationConfig(
        **tokens, **ENTRIES, alignment_heads=[[0, 1], [1, 0], [1, 3]]
    )
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)

"""Tiny random models with heads, and tokenizers, for the pipelines."""

from __future__ import annotations

from pathlib import Path

import hfseq
from hfseq.data.tokenizers import train_tokenizer
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
    "num_hidden_layers": 2,
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
#: By directory: model class, family of the tokenizer, and configuration values.
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
    """Saves a model of MADE under its name, and returns its directory."""
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
        sizes = {"initializer_range": 0.5, "n_positions": 128}
        (root / name / "chat_template.jinja").write_text(CHAT)
    config = build(vocab_size=len(tokenizer), **{**sizes, **ids, **changes})
    getattr(hfseq, f"Flax{variant}")(config, seed=1).save_pretrained(root / name)
    return root / name

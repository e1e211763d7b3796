"""How a card says to use the model: a few lines for JAX and for PyTorch, by task."""

from __future__ import annotations

import re

PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForSeq2SeqLM": "translation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
ENDINGS = {"ForConditionalGeneration": "ForSeq2SeqLM", "LMHeadModel": "ForCausalLM"}

JAX_HEAD = """\
from transformers import AutoTokenizer

from hfseq import FlaxAutoModel{task}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = FlaxAutoModel{task}.from_pretrained("{name}")
"""
TORCH_HEAD = """\
from transformers import AutoModel{task}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModel{task}.from_pretrained("{name}"{trust})
"""
CALL = """\
outputs = model(**tokenizer("Some text", return_tensors="{tensors}"))"""
FILL_MASK = """\
inputs = tokenizer(f"One word is {{tokenizer.mask_token}}.", return_tensors="{tensors}")
logits = model(**inputs).logits[0]
best = logits[inputs["input_ids"][0] == tokenizer.mask_token_id].argmax(-1)
print(tokenizer.decode(best.tolist()))"""
CLASSIFY = """\
logits = model(**tokenizer("Some text", return_tensors="{tensors}")).logits[0]
print(model.config.id2label[int(logits.argmax())])"""
GENERATE = """\
inputs = tokenizer("Some text", return_tensors="{tensors}")
generated = model.generate(**inputs, max_new_tokens=40){sequences}
print(tokenizer.batch_decode(generated, skip_special_tokens=True))"""
BODIES = {
    "ForMaskedLM": FILL_MASK,
    "ForSequenceClassification": CLASSIFY,
    "ForCausalLM": GENERATE,
    "ForSeq2SeqLM": GENERATE,
}


def task_of(architecture: str) -> str:
    """Return the Auto class suffix of a class name: "ForMaskedLM" of RobertaForMaskedLM."""
    for ending, task in ENDINGS.items():
        if architecture.endswith(ending):
            return task
    match = re.search(r"For[A-Z]\w*$", architecture)
    return match[0] if match else ""


def jax_snippet(task: str, name: str) -> str:
    """Return the lines that load and call the model ``name`` with hfseq."""
    return _fill(JAX_HEAD, task, name, tensors="np", sequences=".sequences")


def torch_snippet(task: str, name: str, custom_code: bool = False) -> str:
    """Return the lines that load and call the model ``name`` with plain transformers.

    ``custom_code`` is for checkpoints that bring their PyTorch classes along.
    """
    trust = ", trust_remote_code=True" if custom_code else ""
    return _fill(TORCH_HEAD, task, name, tensors="pt", sequences="", trust=trust)


def _fill(head: str, task: str, name: str, **values: str) -> str:
    return (head + BODIES.get(task, CALL)).format(task=task, name=name, **values)

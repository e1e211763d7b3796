"""A tiny language model for conversations, with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from tests.support import models

#: A turn consists of the role, the content and EOS. The content "refuse" raises an error.
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('not that') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT = "the law of every land is read by all who live there, blåbær user: system: assistant:"


def save_tiny_chat(folder: Path, positions: int = 128) -> None:
    """Saves a GPT-2 model with random weights and a context of `positions` tokens."""
    import hfseq
    from hfseq.data.tokenizers import train_tokenizer

    tokenizer = train_tokenizer([[f"{TEXT} {i}" for i in range(30)]], "gpt2", None, 320, folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = models.gpt2_config(
        vocab_size=len(tokenizer), n_positions=positions, n_layer=1, initializer_range=0.4, **ids
    )
    hfseq.FlaxGPT2LMHeadModel(config, seed=3).save_pretrained(folder)

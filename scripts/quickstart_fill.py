#!/usr/bin/env python
"""Load a masked language model and let it fill the masks of a few sentences.

    python scripts/quickstart_fill.py quickstart/model "Raises an <mask> if it fails."
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SENTENCES = (
    "Return the <mask> of items in the list.",
    "If the file does not <mask>, an OSError is raised.",
    "A dictionary maps <mask> to values.",
)


def fill(directory: str, sentences: Sequence[str], top: int = 5) -> None:
    """Print each sentence with the likeliest tokens at its mask."""
    from transformers import AutoTokenizer

    import hfseq

    model = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for sentence in sentences:
        inputs = tokenizer(sentence, return_tensors="np")
        place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        logits = model(**inputs).logits[0, place]
        best = logits.argsort()[::-1][:top]
        print(sentence, "->", ", ".join(tokenizer.decode([i]).strip() for i in best.tolist()))


if __name__ == "__main__":
    fill(sys.argv[1], sys.argv[2:] or SENTENCES)

"""Texts from a language model: a checkpoint, its tokenizer, and prompts of any length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hfseq.errors import UsageError
from hfseq.modeling.auto import load

DEFAULT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Text:
    """What was written: the text, its number of tokens, and whether it came to an end."""

    text: str
    tokens: int
    ended: bool


class TextGenerator:
    """A causal language model, or an encoder-decoder, that writes for one prompt after the other.

    ``continues`` tells whether what it writes follows the prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "the model"):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.continues = not getattr(model.config, "is_encoder_decoder", False)

    @classmethod
    def from_pretrained(cls, name: str, precision: str = "float32") -> TextGenerator:
        """Load a directory or a model on the Hub with its tokenizer.

        **Raises:** CheckpointError for what cannot be read, UsageError for a model that does not
        write, or without a tokenizer.
        """
        from transformers import AutoTokenizer

        import hfseq
        from hfseq.data.tokenizers import check_vocabulary
        from hfseq.modeling import auto as auto_module

        place = auto_module.Source.of(name).place
        stored = auto_module.read_config(place)
        kind = auto_module.model_type(stored)
        spec = hfseq.plugins.load().architectures.get(str(kind))
        tasks = [task for task in ("ForSeq2SeqLM", "ForCausalLM") if task in spec.heads]
        decoder = [task for task in tasks if spec.load_head(task).can_generate()]
        if not decoder:
            raise UsageError(f"'{name}' is of type '{kind}', which has no class that writes texts")
        auto = getattr(hfseq, f"FlaxAutoModel{_wanted(decoder, stored, name)}")
        model = load(auto, name, precision=precision)
        tokenizer = load(AutoTokenizer, place)
        check_vocabulary(tokenizer, model.config)
        return cls(model, tokenizer, name)

    def write(self, prompt: str, **options: Any) -> list[Text]:
        """Return the texts for a prompt; ``options`` are those of ``model.generate``."""
        inputs = self._inputs(prompt)
        options = self._limited(inputs, options)
        found = self.model.generate(**inputs, **options)
        start = inputs["input_ids"].shape[1] if self.continues else 1
        return [self._text(row[start:]) for row in np.asarray(found.sequences)]

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield the text for a prompt piece by piece, whole characters each."""
        inputs = self._inputs(prompt)
        options = self._limited(inputs, options)
        ids: list[int] = []
        shown = ""
        for tokens in self.model.stream_generate(**inputs, **options):
            ids.append(int(tokens[0]))
            text = self._text(np.asarray(ids)).text
            if len(text) > len(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
        rest = self._text(np.asarray(ids)).text[len(shown) :] if ids else ""
        if rest:
            yield rest

    def _inputs(self, prompt: str) -> dict[str, Any]:
        inputs = self.tokenizer(prompt, return_tensors="np")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.continues and not ids.size:
            start = self.tokenizer.bos_token_id
            if start is None:
                start = self.tokenizer.eos_token_id
            if start is None:
                raise UsageError("the prompt is empty, and the tokenizer has no start token")
            ids = np.array([[start]])
            mask = np.ones_like(ids)
        return {"input_ids": np.asarray(ids, np.int32), "attention_mask": np.asarray(mask)}

    def _limited(self, inputs: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Say how long the text may become, where nobody did."""
        room, length = self.model.max_length(), inputs["input_ids"].shape[1]
        if room is not None and length >= room + (not self.continues):
            raise UsageError(
                f"the prompt has {length} tokens, and {self.name} reads {room}: give a shorter one"
            )
        own = getattr(self.model.generation_config, "max_length", None)
        chosen = {"max_new_tokens", "max_length"} & options.keys()
        if chosen or own not in (None, 20):  # 20 is what Transformers has where nobody chose
            return options
        left = DEFAULT_TOKENS if room is None else room - (length if self.continues else 1)
        return {**options, "max_new_tokens": max(1, min(DEFAULT_TOKENS, left))}

    def _text(self, ids: np.ndarray) -> Text:
        config = self.model.generation_config
        ends = np.atleast_1d(config.eos_token_id if config.eos_token_id is not None else -1)
        places = np.flatnonzero(np.isin(ids, ends))
        kept = ids[: places[0]] if len(places) else ids
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Text(text, len(kept), bool(len(places)))


def _wanted(tasks: list[str], stored: dict[str, Any], name: str) -> str:
    """Of the heads that write, the one that the checkpoint has."""
    names = " ".join(map(str, stored.get("architectures") or ()))
    if "ForSeq2SeqLM" in tasks and "CausalLM" not in names:
        return "ForSeq2SeqLM"
    if names and "LM" not in names and "PreTraining" not in names:
        raise UsageError(
            f"'{name}' holds {names}, which has no language-modelling head: it cannot write"
        )
    return "ForCausalLM"


__all__ = ["Text", "TextGenerator"]

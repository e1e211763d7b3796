"""Texts from a language model: a checkpoint, its tokenizer, and prompts of any length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import plugins
from hfseq.checkpoints.config import Source, class_names, model_type, read_config
from hfseq.errors import UsageError
from hfseq.pipelines import encode, load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

DEFAULT_MAX_NEW_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """What was written: the text, its number of tokens, and whether it came to an end."""

    text: str
    tokens: int
    ended: bool


class TextGenerator:
    """A causal language model, or an encoder-decoder, that writes for one prompt after the other.

    ``continues`` tells whether what it writes follows the prompt.
    """

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "the model",
    ):
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.is_decoder_only = not getattr(model.config, "is_encoder_decoder", False)

    @classmethod
    def from_pretrained(cls, name: str, precision: str = "float32") -> TextGenerator:
        """Load a directory or a model on the Hub, an adapter too, with its tokenizer.

        **Raises:** CheckpointError for what cannot be read, UsageError for a model that does not
        write, or without a tokenizer.
        """
        from hfseq.modeling import auto, lora

        source = Source.parse(name)
        adapter = lora.find_adapter(source.weights, {})
        stored = read_config(source.location if adapter is None else adapter.base)
        kind = model_type(stored)
        spec = plugins.load().architectures.get(str(kind))
        tasks = [task for task in ("ForSeq2SeqLM", "ForCausalLM") if task in spec.heads]
        writing = [task for task in tasks if spec.load_head(task).can_generate()]
        if not writing:
            raise UsageError(f"'{name}' is of type '{kind}', which has no class that writes texts")
        names = " ".join(class_names(stored))
        if "ForSeq2SeqLM" in writing and "CausalLM" not in names:
            task = "ForSeq2SeqLM"
        elif names and "LM" not in names and "PreTraining" not in names:
            raise UsageError(
                f"'{name}' holds {names}, which has no language-modelling head: it cannot write"
            )
        else:
            task = "ForCausalLM"
        auto_class = getattr(auto, f"FlaxAutoModel{task}")
        beside = None if source.file is None else source.location
        return cls(*load(auto_class, source.weights, tokenizer=beside, precision=precision), name)

    def generate(self, prompt: str, **options: Any) -> list[GeneratedText]:
        """Return the texts for a prompt; ``options`` are those of ``model.generate``."""
        inputs = self._inputs(prompt)
        output = self.model.generate(**inputs, **self._limited(inputs, options))
        start = inputs["input_ids"].shape[1] if self.is_decoder_only else 1
        return [self._text(row[start:]) for row in np.asarray(output.sequences)]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """Yield the text for a prompt, or for its ids, piece by piece, whole characters each."""
        inputs = self._inputs(prompt)
        ids: list[int] = []
        text = shown = ""
        for tokens in self.model.stream_generate(**inputs, **self._limited(inputs, options)):
            ids.append(int(tokens[0]))
            text = self._text(np.asarray(ids)).text
            if len(text) > len(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
        if len(text) > len(shown):
            yield text[len(shown) :]

    def _inputs(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        if not isinstance(prompt, str):
            given = np.array([prompt], np.int32)
            return {"input_ids": given, "attention_mask": np.ones_like(given)}
        inputs = encode(self.tokenizer, [prompt])
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if self.is_decoder_only and not ids.size:
            start = self.tokenizer.bos_token_id
            if start is None:
                start = self.tokenizer.eos_token_id
            if start is None:
                raise UsageError("the prompt is empty, and the tokenizer has no start token")
            ids = np.array([[start]], np.int32)
            mask = np.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask}

    def _limited(self, inputs: dict[str, np.ndarray], options: dict[str, Any]) -> dict[str, Any]:
        """Say how long the text may become, where nobody did."""
        room, length = self.model.max_length(), inputs["input_ids"].shape[1]
        if room is not None and length >= room + (not self.is_decoder_only):
            raise UsageError(
                f"the prompt has {length} tokens, and {self.name} reads {room}: give a shorter one"
            )
        default = getattr(self.model.generation_config, "max_length", None)
        given = {"max_new_tokens", "max_length"} & options.keys()
        if given or default not in (None, 20):  # 20 is what Transformers has where nobody chose
            return options
        left = (
            DEFAULT_MAX_NEW_TOKENS
            if room is None
            else room - (length if self.is_decoder_only else 1)
        )
        return {**options, "max_new_tokens": max(1, min(DEFAULT_MAX_NEW_TOKENS, left))}

    def _text(self, ids: np.ndarray) -> GeneratedText:
        config = self.model.generation_config
        ends = np.atleast_1d(config.eos_token_id if config.eos_token_id is not None else -1)
        stops = np.flatnonzero(np.isin(ids, ends))
        kept = ids[: stops[0]] if len(stops) else ids
        text = str(self.tokenizer.decode(kept, skip_special_tokens=True))
        return GeneratedText(text, len(kept), bool(len(stops)))

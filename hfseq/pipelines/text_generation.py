"""Text generation with a checkpoint and its tokenizer, one prompt at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import plugins
from hfseq.checkpoints.config import Source, class_names, model_type, read_config
from hfseq.errors import UsageError
from hfseq.generation.request import end_token_ids, until_end
from hfseq.pipelines import encode, load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

DEFAULT_MAX_NEW_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class GeneratedText:
    """A generated text.

    Attributes:
        text: The text.
        tokens: Number of tokens.
        ended: Whether it ends with an end token.
    """

    text: str
    tokens: int
    ended: bool


class TextGenerator:
    """Generates text with a causal language model or an encoder-decoder, one prompt at a time.

    Attributes:
        is_decoder_only: Whether the generated text continues the prompt.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: Name of the model in messages.
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
        """Loads a directory, Hub checkpoint or adapter with its tokenizer.

        Args:
            name: Directory or Hub name.
            precision: Precision recipe.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            UsageError: The model cannot generate text or has no tokenizer.
        """
        from hfseq.modeling import auto, lora

        source = Source.parse(name)
        adapter = lora.find_adapter(source.weights, {})
        config = read_config(source.location if adapter is None else adapter.base)
        architecture = model_type(config)
        spec = plugins.load().architectures.get(str(architecture))
        tasks = [task for task in ("ForSeq2SeqLM", "ForCausalLM") if task in spec.heads]
        generating_tasks = [task for task in tasks if spec.load_head(task).can_generate()]
        if not generating_tasks:
            raise UsageError(
                f"'{name}' has the model type '{architecture}', which cannot generate text"
            )
        names = " ".join(class_names(config))
        if "ForSeq2SeqLM" in generating_tasks and "CausalLM" not in names:
            task = "ForSeq2SeqLM"
        elif names and "LM" not in names and "PreTraining" not in names:
            raise UsageError(f"'{name}' contains {names}, which has no language modeling head")
        else:
            task = "ForCausalLM"
        auto_class = getattr(auto, f"FlaxAutoModel{task}")
        tokenizer_location = None if source.file is None else source.location
        return cls(
            *load(auto_class, source.weights, tokenizer=tokenizer_location, precision=precision),
            name,
        )

    def generate(self, prompt: str, **options: Any) -> list[GeneratedText]:
        """Returns the generated texts for a prompt.

        Args:
            prompt: The prompt.
            **options: Options of ``model.generate``.
        """
        inputs = self._inputs(prompt)
        output = self.model.generate(**inputs, **self._limited(inputs, options))
        start = inputs["input_ids"].shape[1] if self.is_decoder_only else 1
        end_ids = end_token_ids(self.model, options)
        return [self._text(row[start:], end_ids) for row in np.asarray(output.sequences)]

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """Yields the generated text for a prompt in pieces of whole characters.

        Args:
            prompt: The prompt, or its token IDs.
            **options: Options of ``model.generate``.
        """
        inputs = self._inputs(prompt)
        ids: list[int] = []
        end_ids = end_token_ids(self.model, options)
        text = yielded = ""
        for tokens in self.model.stream_generate(**inputs, **self._limited(inputs, options)):
            ids.append(int(tokens[0]))
            text = self._text(np.asarray(ids), end_ids).text
            if len(text) > len(yielded) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(yielded) :]
                yielded = text
        if len(text) > len(yielded):
            yield text[len(yielded) :]

    def _inputs(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        if not isinstance(prompt, str):
            ids_row = np.array([prompt], np.int32)
            return {"input_ids": ids_row, "attention_mask": np.ones_like(ids_row)}
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
        """Adds a default for the maximum length to ``options``."""
        max_positions, length = self.model.max_length(), inputs["input_ids"].shape[1]
        if max_positions is not None and length >= max_positions + (not self.is_decoder_only):
            raise UsageError(
                f"the prompt has {length} tokens, but {self.name} has {max_positions} positions. "
                "Use a shorter prompt."
            )
        default = getattr(self.model.generation_config, "max_length", None)
        length_options = {"max_new_tokens", "max_length"} & options.keys()
        # 20 is Transformers' default.
        if length_options or default not in (
            None,
            20,
        ):
            return options
        num_free = (
            DEFAULT_MAX_NEW_TOKENS
            if max_positions is None
            else max_positions - (length if self.is_decoder_only else 1)
        )
        return {**options, "max_new_tokens": max(1, min(DEFAULT_MAX_NEW_TOKENS, num_free))}

    def _text(self, ids: np.ndarray, end_ids: Sequence[int]) -> GeneratedText:
        text_ids = until_end(ids, end_ids)
        text = str(self.tokenizer.decode(text_ids, skip_special_tokens=True))
        return GeneratedText(text, len(text_ids), len(text_ids) < len(ids))

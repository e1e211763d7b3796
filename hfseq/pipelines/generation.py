"""Pipelines that generate text: continuations, summaries and translations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.request import (
    SMALLEST_ENCODER_BUCKET,
    bucket_length,
    end_token_ids,
    until_end,
)
from hfseq.pipelines.base import (
    Options,
    Outputs,
    Pipeline,
    RejectedInput,
    Row,
    distribute,
    input_text,
)
from hfseq.pipelines.translation import Direction, find_direction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

#: Default maximum of new tokens if neither the call nor the model sets one, as in Transformers.
MAX_NEW_TOKENS = 256


class GenerationPipeline(Pipeline):
    """Base class of the pipelines that generate text; accepts the options of ``generate``."""

    defaults = None
    #: Options that are not passed to ``generate``.
    extra_options: ClassVar[tuple[str, ...]] = ("truncation",)
    #: Names of the columns that may contain the text of an input.
    text_columns: ClassVar[tuple[str, ...]] = ("text",)

    def padded_width(self, length: int) -> int:
        """Returns the width, of a few only: programs that generate take long to compile."""
        return bucket_length(length, self.max_positions, SMALLEST_ENCODER_BUCKET)

    def max_rows(self, width: int, size: int) -> int:
        """Returns ``size``: larger batches are faster, since each step reads all weights."""
        return size

    def _generation(self, options: Options, num_used: int) -> dict[str, Any]:
        """Returns the options of ``generate``.

        Args:
            options: The options of the call.
            num_used: Number of positions that the prompt uses.
        """
        config, max_positions = self.model.generation_config, self.model.max_length()
        generate_options = {
            name: value for name, value in options.items() if name not in self.extra_options
        }
        # 20 is Transformers' default.
        if not {"max_new_tokens", "max_length"} & generate_options.keys() and (
            config.max_new_tokens is None and config.max_length in (None, 20)
        ):
            max_new_tokens = (
                MAX_NEW_TOKENS
                if max_positions is None
                else min(MAX_NEW_TOKENS, max_positions - num_used)
            )
            generate_options["max_new_tokens"] = max(1, max_new_tokens)
        return generate_options

    def _text(self, item: Any) -> str | RejectedInput:
        """Returns the text of an input: the input itself, or its first text column."""
        names = self.text_columns
        if isinstance(item, Mapping):
            return input_text(item, next((name for name in names if name in item), names[0]))
        return input_text(item, "text")

    def _sequences(
        self, inputs: Mapping[str, np.ndarray], generate_options: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        params = self.model.params
        distributed = dict(distribute({"input_ids": inputs["input_ids"]}, params))
        output = self.model.generate(
            distributed["input_ids"],
            attention_mask=inputs["attention_mask"],
            params=params,
            compact_finished=not generate_options.get(
                "do_sample", self.model.generation_config.do_sample
            ),
            **generate_options,
        )
        sequences = np.asarray(output.sequences)
        return {"sequences": sequences.reshape(len(inputs["input_ids"]), -1, sequences.shape[1])}


class TextGeneration(GenerationPipeline):
    """Continues a prompt: ``[{"generated_text": …}]``.

    A prompt is a text or a chat. A chat is a list of messages with ``role`` and ``content``, and is
    returned together with the answer. ``return_full_text=False`` omits the prompt. Other options
    are those of ``generate``. Unlike in Transformers, search is greedy unless ``do_sample`` is set.
    """

    head = "ForCausalLM"
    extra_options = ("truncation", "return_full_text")

    def is_single_input(self, inputs: Any) -> bool:
        """Returns whether ``inputs`` is one prompt. A list of messages is one chat."""
        chat = isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping)
        return super().is_single_input(inputs) or bool(chat and "role" in inputs[0])

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per prompt or chat."""
        encoded_inputs: list[list[Row] | RejectedInput] = []
        for item in inputs:
            chat = item.get("messages") if isinstance(item, Mapping) else item
            if isinstance(chat, list):
                encoded_inputs.append(self._chat(chat))
                continue
            text = self._text(item)
            if isinstance(text, RejectedInput):
                encoded_inputs.append(text)
                continue
            encoded = self.tokenize([text], truncation=options.get("truncation", False))
            ids = list(encoded["input_ids"][0])
            if not ids:  # the start token, or the token between texts
                starts = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
                ids = [token_id for token_id in starts if token_id is not None][:1]
            encoded_inputs.append([Row(ids, metadata=text)])
        return encoded_inputs

    def _chat(self, messages: list[Any]) -> list[Row] | RejectedInput:
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                return RejectedInput(f"a message must have a role and a content: {message!r:.60}")
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                "the tokenizer has no chat_template. Use a text prompt, or a model with a chat "
                "template."
            )
        continues_answer = messages[-1]["role"] == "assistant"
        ids: Any = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not continues_answer,
            continue_final_message=continues_answer,
            tokenize=True,
            return_dict=False,
        )
        return [Row(list(ids), metadata=messages)]

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns whether two prompts may share a batch.

        With ``max_length`` they must be equally long.
        """
        if "max_new_tokens" in self._generation(options, len(first.ids)):
            return super().can_share_batch(first, row, options)
        return len(first.ids) == len(row.ids)

    def token_columns(self, length: int, width: int) -> slice:
        """Aligns rows to the right, next to the generated tokens."""
        return slice(width - length, width)

    def padded_width(self, length: int) -> int:
        """Returns the longest row. ``generate`` pads to its own buckets."""
        return length

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generates the continuations."""
        width = inputs["input_ids"].shape[1]
        outputs = self._sequences(inputs, self._generation(options, width))
        return {"new": outputs["sequences"][:, :, width:]}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Decodes prompt and continuation together: some tokenizers drop a leading space."""
        (row,), (output,), answers = rows, outputs, []
        prompt_length = len(str(self.tokenizer.decode(list(row.ids), skip_special_tokens=True)))
        end_ids = end_token_ids(self.model, self._generation(options, len(row.ids)))
        for new_ids in output["new"]:
            ids = [*row.ids, *until_end(new_ids, end_ids).tolist()]
            text: Any = str(self.tokenizer.decode(ids, skip_special_tokens=True))[prompt_length:]
            if options.get("return_full_text", True):
                if isinstance(row.metadata, str):
                    text = row.metadata + text
                elif row.metadata[-1]["role"] == "assistant":
                    last = row.metadata[-1]
                    text = [*row.metadata[:-1], {**last, "content": last["content"] + text}]
                else:
                    text = [*row.metadata, {"role": "assistant", "content": text}]
            answers.append({"generated_text": text})
        return answers


class Text2Text(GenerationPipeline):
    """Generates a text from another with an encoder-decoder: ``[{"generated_text": …}]``.

    Options are those of ``generate``. The model's ``task_specific_params`` apply, including its
    prefix. As in Transformers 4, the default is beam search with four beams.
    """

    head = "ForSeq2SeqLM"
    extra_options = ("truncation", "src_lang", "tgt_lang")
    output_key = "generated_text"

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: str = "",
        **options: Any,
    ):
        super().__init__(model, tokenizer, task, **options)
        all_task_params = getattr(model.config, "task_specific_params", None) or {}
        self.task_defaults = dict(all_task_params.get(task) or {})
        prefix = self.task_defaults.pop("prefix", None)
        # Inputs are limited by the encoder, whose limit may differ from the decoder's.
        self.max_positions = model.max_source_length()
        if prefix is None:
            prefix = getattr(model.config, "source_prefix", None)
        self.direction = Direction(prefix or "")
        # Marian's tokenizer has two vocabularies.
        has_two_vocabularies = hasattr(tokenizer, "spm_target")
        self._decoding: dict[str, Any] = (
            {"use_source_tokenizer": False} if has_two_vocabularies else {}
        )

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text, with the prefix."""
        self.set_direction(options)
        texts = [self._text(item) for item in inputs]
        prefix = self.direction.source_prefix
        prefixed_texts = [prefix + text for text in texts if not isinstance(text, RejectedInput)]
        ids: Iterator[Any] = iter(())
        if prefixed_texts:
            truncation = options.get("truncation", False)
            ids = iter(self.tokenize(prefixed_texts, truncation=truncation)["input_ids"])
        return [
            text if isinstance(text, RejectedInput) else [Row(list(next(ids)))] for text in texts
        ]

    def set_direction(self, options: Options) -> None:
        """Sets the languages. Only for translation."""

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generates the outputs."""
        lengths = {"max_new_tokens", "max_length"}
        defaults = {
            n: v
            for n, v in self.task_defaults.items()
            if not (n in lengths and lengths & {*options})
        }
        generate_options = self._generation({"num_beams": 4, **defaults, **options}, 1)
        if self.direction.forced_bos_token_id is not None:
            generate_options.setdefault("forced_bos_token_id", self.direction.forced_bos_token_id)
        return self._sequences(inputs, generate_options)

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Decodes the outputs, without the start token."""
        end_ids = end_token_ids(self.model, self._generation({**self.task_defaults, **options}, 1))
        text_ids = [until_end(ids[1:], end_ids).tolist() for ids in outputs[0]["sequences"]]
        texts = self.tokenizer.batch_decode(text_ids, skip_special_tokens=True, **self._decoding)
        return [{self.output_key: text} for text in texts]

    def format_list(self, answers: list[Any], options: Options) -> list[Any]:
        """Returns one dictionary per text, if each has exactly one."""
        return (
            [results[0] for results in answers]
            if all(len(results) == 1 for results in answers)
            else answers
        )


class Summarization(Text2Text):
    """Summarizes a text: ``[{"summary_text": …}]``."""

    output_key = "summary_text"
    text_columns = ("text", "document", "article")


class Translation(Text2Text):
    """Translates a text: ``[{"translation_text": …}]``.

    ``src_lang`` and ``tgt_lang``, or a task name ``translation_xx_to_yy``, choose the languages of
    a multilingual model.
    """

    output_key = "translation_text"
    text_columns = ("text", "source")

    def set_direction(self, options: Options) -> None:
        """Sets the language codes, prefix and first token that the model uses."""
        source, target = options.get("src_lang"), options.get("tgt_lang")
        task_parts = self.task.split("_")
        if source is None and target is None and len(task_parts) == 4:
            source, target = task_parts[1], task_parts[3]
        config, name = self.model.config, getattr(self.model.config, "_name_or_path", "")
        try:
            self.direction = find_direction(config, self.tokenizer, name, source, target)
        except UsageError:
            # Models with one language pair may not define the languages, so a task name alone may
            # fail to match. Explicit options must match.
            if options.get("src_lang") or options.get("tgt_lang"):
                raise
            if find_direction(config, self.tokenizer, name, source_prefix="") != Direction(""):
                raise
        if self.direction.tokenizer_source is not None:
            self.tokenizer.src_lang = self.direction.tokenizer_source

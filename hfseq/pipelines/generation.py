"""Pipelines that generate text: continuations, summaries and translations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hfseq.errors import UsageError, first_line
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
from hfseq.pipelines.translation import Direction, SourceEncoder, find_direction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

#: Default maximum of new tokens if neither the call nor the model sets one, as in Transformers.
MAX_NEW_TOKENS = 256

#: A translation has at most twice as many tokens as its padded source, plus this number.
EXTRA_TOKENS = 16

LENGTH_OPTIONS = ("max_new_tokens", "max_length")

#: Options that are passed to the chat template. ``tokenizer_encode_kwargs`` is Transformers' name
#: of ``chat_template_kwargs``.
CHAT_OPTIONS = ("tools", "documents", "chat_template_kwargs", "tokenizer_encode_kwargs")


NO_OPTIONS: Options = MappingProxyType({})


def skips_special_tokens(options: Options) -> bool:
    """Returns whether special tokens are omitted from texts, which is the default."""
    return bool(options.get("skip_special_tokens", True))


class GenerationPipeline(Pipeline):
    """Base class of the pipelines that generate text. They accept the options of ``generate``.

    Without ``max_new_tokens`` and ``max_length``, the maximum length is that of the model's
    generation configuration, or 256 new tokens.

    ``skip_special_tokens=False`` keeps special tokens in the text. ``return_details=True`` adds
    ``num_tokens`` and ``ended`` to each output. ``ended`` is whether the text ends with an end
    token before the maximum length. Outputs of beam search also have a ``score``.
    """

    defaults = None
    #: Options that are not passed to ``generate``.
    extra_options: ClassVar[tuple[str, ...]] = ()
    #: Names of the columns that may contain the text of an input.
    text_columns: ClassVar[tuple[str, ...]] = ("text",)
    #: Number of beams if neither the call nor the model sets one.
    num_beams: ClassVar[int] = 1
    #: Whether models may force an end token at the maximum length. An end token at that position
    #: does not show that the text is complete.
    forces_end: ClassVar[bool] = True
    #: Key of the text in an output.
    output_key: ClassVar[str] = "generated_text"
    #: Options of ``generate`` from the ``task_specific_params`` of the model's configuration.
    task_defaults: Mapping[str, Any] = {}

    def padded_width(self, length: int) -> int:
        """Returns one of a few widths, because programs that generate text compile slowly."""
        return bucket_length(length, self.max_positions, SMALLEST_ENCODER_BUCKET)

    def max_rows(self, width: int, size: int) -> int:
        """Returns ``size``: larger batches are faster, since each step reads all weights."""
        return size

    def generation_options(
        self, options: Options, prompt_length: int = 1, source_width: int | None = None
    ) -> dict[str, Any]:
        """Returns the options of ``generate`` with the defaults of the task.

        Args:
            options: The options of the call.
            prompt_length: Number of decoder positions that the prompt uses. It is 1 for an
                encoder-decoder.
            source_width: Padded length of the input, for a task whose output is at most about twice
                as long as its input.
        """
        config, max_positions = self.model.generation_config, self.model.max_length()
        values = {**options, **(options.get("generate_kwargs") or {})}
        extra = (
            *("truncation", "return_details", "generate_kwargs", "skip_special_tokens"),
            *self.extra_options,
        )
        # For options that are None, the value of the model applies.
        values = {n: v for n, v in values.items() if n not in extra and v is not None}
        has_length = any(name in values for name in LENGTH_OPTIONS)
        task_defaults = {
            name: value for name, value in self.task_defaults.items() if name not in LENGTH_OPTIONS
        }
        if config.num_beams is None and self.num_beams > 1 and not values.get("do_sample"):
            task_defaults = {"num_beams": self.num_beams, **task_defaults}
        values = {**task_defaults, **values}
        if values.get("stop_strings") or config.stop_strings:
            values.setdefault("tokenizer", self.tokenizer)
        if has_length:
            return values
        new_tokens, length = (
            self.task_defaults.get(name, getattr(config, name)) for name in LENGTH_OPTIONS
        )
        has_max_length = length not in (None, 20)  # 20 is the default of Transformers
        if new_tokens is None and has_max_length:
            new_tokens = length - prompt_length
            if source_width is None:
                return {**values, "max_length": length}
        new_tokens = MAX_NEW_TOKENS if new_tokens is None else new_tokens
        if source_width is not None:
            new_tokens = min(new_tokens, bucket_length(2 * source_width + EXTRA_TOKENS) - 1)
        if max_positions is not None:
            new_tokens = min(new_tokens, max_positions - prompt_length)
        new_tokens = max(1, new_tokens)
        if not has_max_length:
            return {**values, "max_new_tokens": new_tokens}
        # With both options, `generate` would log a warning.
        return {**values, "max_new_tokens": None, "max_length": prompt_length + new_tokens}

    def stream_text(self, prompt: Any, **options: Any) -> Iterator[str]:
        """Yields the generated text for one input in pieces, while it is generated.

        Each piece consists of complete characters.

        Args:
            prompt: An input of the pipeline, or token IDs.
            **options: Options of the task.

        Raises:
            UsageError: The input is invalid.
        """
        all_options = {**self.options, **options}
        rows: list[Row] | RejectedInput
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], int):
            rows = [Row(prompt)]
        else:
            (rows,) = self.encode([prompt], all_options)
        if isinstance(rows, RejectedInput) or (problem := self.find_problem(rows)):
            reason = rows if isinstance(rows, RejectedInput) else problem
            raise UsageError(f"{self.task}: {reason}")
        if not rows:
            return
        inputs, prompt_length = self.collate(rows[:1], 1), self._prompt_length(rows[0])
        generate_options = self.generation_options(all_options, prompt_length)
        end_ids = end_token_ids(self.model, generate_options)
        ids: list[int] = []
        text = yielded = ""
        for tokens in self.model.stream_generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            params=self.params,
            **generate_options,
        ):
            ids.append(int(tokens[0]))
            text = self._decode(rows[0], until_end(np.asarray(ids), end_ids), all_options)
            if len(text) > len(yielded) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(yielded) :]
                yielded = text
        if len(text) > len(yielded):
            yield text[len(yielded) :]

    def _prompt_length(self, row: Row) -> int:
        """Returns the number of decoder positions that the prompt of a row uses."""
        return 1

    def _decode(self, row: Row, new_ids: Any, options: Options = NO_OPTIONS) -> str:
        """Returns the text of new tokens."""
        skips = skips_special_tokens(options)
        return str(self.tokenizer.decode(np.asarray(new_ids).tolist(), skip_special_tokens=skips))

    def _text(self, item: Any) -> str | RejectedInput:
        """Returns the text of an input: the input itself, or its first text column."""
        names = self.text_columns
        if isinstance(item, Mapping):
            return input_text(item, next((name for name in names if name in item), names[0]))
        return input_text(item, "text")

    def generate(
        self, inputs: Mapping[str, Any], generate_options: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Generates texts for a batch.

        Args:
            inputs: The inputs of the model. The main input must be the first entry.
            generate_options: Options of ``generate``.

        Returns:
            "sequences", `(rows, num_return_sequences, length)`, and for beam search "scores",
            `(rows, num_return_sequences)`.
        """
        names = list(inputs)
        main = distribute({names[0]: inputs[names[0]]}, self.params)[names[0]]
        is_sampled = generate_options.get("do_sample", self.model.generation_config.do_sample)
        output: Any = self.model.generate(
            main,
            **{name: inputs[name] for name in names[1:]},
            params=self.params,
            compact_finished=not is_sampled,
            **generate_options,
        )
        sequences, rows = np.asarray(output.sequences), len(inputs[names[0]])
        outputs: dict[str, np.ndarray] = {
            "sequences": sequences.reshape(rows, -1, sequences.shape[1])
        }
        scores = getattr(output, "sequences_scores", None)
        if scores is not None:
            outputs["scores"] = np.asarray(scores, np.float64).reshape(rows, -1)
        return outputs

    def details(
        self, new_ids: np.ndarray, end_ids: Sequence[int], output: Outputs, rank: int
    ) -> dict[str, Any]:
        """Returns the values that ``return_details`` adds to an output."""
        length = len(until_end(new_ids, end_ids))
        details = {"num_tokens": length, "ended": length < len(new_ids) - self.forces_end}
        return details | ({"score": float(output["scores"][rank])} if "scores" in output else {})


def template_options(options: Options, chat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `TextGeneration.chat_ids` for the chat template.

    Args:
        options: The options of the call.
        chat: The dictionary that contains the chat. Its values take precedence.
    """
    variables: dict[str, Any] = {}
    for source in (options, chat):
        for name in ("tokenizer_encode_kwargs", "chat_template_kwargs"):
            variables |= source.get(name) or {}
        variables |= {
            name: source[name] for name in ("tools", "documents") if source.get(name) is not None
        }
    return variables


def message_problem(message: object) -> str | None:
    """Returns why a chat cannot contain a message, or `None`."""
    if not isinstance(message, Mapping) or "role" not in message:
        return "a message must have a role and a content"
    has_calls = message["role"] == "assistant" and message.get("tool_calls")
    if message.get("content") is None and not has_calls:
        return "a message must have a role and a content (or tool_calls, if it is the assistant's)"
    return None


def continues_answer(messages: Sequence[Mapping[str, Any]], continues: bool | None) -> bool:
    """Returns whether the generated text continues the last message of a chat.

    Args:
        messages: The messages.
        continues: The option ``continue_final_message``. The default is true if the last message
            has the role "assistant" and contains no tool calls.
    """
    last = messages[-1]
    if continues is None:
        return last["role"] == "assistant" and not last.get("tool_calls")
    return continues


class TextGeneration(GenerationPipeline):
    """Continues a prompt: ``[{"generated_text": …}]``.

    A prompt is a text or a chat, which is a list of messages with ``role`` and ``content``.
    Messages of the assistant may also have ``reasoning_content`` and ``tool_calls``, and results of
    tools have the role ``tool``. The output consists of the prompt and the generated text or
    message. If the tokenizer has a ``response_template``, it divides the generated text into
    ``content``, ``reasoning_content`` and ``tool_calls``, as in Transformers. Unlike in
    Transformers, decoding is greedy unless ``do_sample`` is set. In addition to the options of
    ``generate``, the pipeline accepts:

    - ``return_full_text=False`` omits the prompt from the output.
    - ``return_tensors=True`` returns ``generated_token_ids`` instead of the text.
    - ``prefix`` is added before each text.
    - ``tools`` is a list of JSON schemas or functions that the chat template describes to the
      model. A chat that is a dictionary may have its own ``tools``.
    - ``documents`` is a list of documents for the chat template.
    - ``chat_template_kwargs`` are variables of the chat template, such as ``enable_thinking``. A
      chat that is a dictionary may have its own.
    - ``continue_final_message`` is whether the output continues the last message. By default, it
      continues a message of the assistant.
    """

    head = "ForCausalLM"
    forces_end = False
    input_description = "a text, a chat"
    extra_options = (
        *("return_full_text", "return_tensors", "prefix", "continue_final_message"),
        *CHAT_OPTIONS,
    )

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
                template = template_options(options, item if isinstance(item, Mapping) else {})
                encoded_inputs.append(self._chat(chat, template, options))
                continue
            text = self._text(item)
            if isinstance(text, RejectedInput):
                encoded_inputs.append(text)
                continue
            prompt = (options.get("prefix") or "") + text
            encoded = self.tokenize([prompt], truncation=options.get("truncation", False))
            ids = list(encoded["input_ids"][0])
            if not ids:  # replace an empty prompt by the BOS token, or by EOS without a BOS token
                starts = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
                ids = [token_id for token_id in starts if token_id is not None][:1]
            encoded_inputs.append([Row(ids, metadata=text)])
        return encoded_inputs

    def _chat(
        self, messages: list[Any], template: Mapping[str, Any], options: Options
    ) -> list[Row] | RejectedInput:
        for message in messages:
            if problem := message_problem(message):
                return RejectedInput(f"{problem}: {message!r:.60}")
        if not messages:
            return RejectedInput("a chat must contain a message")
        continues = continues_answer(messages, options.get("continue_final_message"))
        ids = self.chat_ids(messages, continues, **template)
        return [Row(ids, metadata=messages)]

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        continues: bool | None = None,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> list[int]:
        """Returns the token IDs of a chat, followed by the start of an answer.

        Args:
            messages: The messages, with ``role`` and ``content``.
            continues: Whether the answer continues the last message. Default: `True` if the last
                message is from the assistant and has no tool calls.
            tools: JSON schemas or functions that the model may call.
            documents: Documents for the chat template.
            **template_variables: Variables of the chat template, such as ``enable_thinking``.

        Raises:
            UsageError: The tokenizer has no chat template, or the template rejects the messages.
        """
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                "the tokenizer has no chat_template. Use a text prompt, or a model with a chat "
                "template."
            )
        continues = continues_answer(messages, continues)
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                list(messages),  # type: ignore[arg-type]
                tools=None if tools is None else list(tools),
                documents=None if documents is None else list(documents),  # type: ignore[arg-type]
                add_generation_prompt=not continues,
                continue_final_message=continues,
                tokenize=True,
                return_dict=True,
                **template_variables,
            )
        except (TemplateError, TypeError, ValueError) as error:
            name = self.model.name_or_path or "the tokenizer"
            raise UsageError(f"the chat template of {name} fails: {first_line(error)}") from error
        return list(encoded["input_ids"])

    @property
    def parses_responses(self) -> bool:
        """Whether the tokenizer can divide an answer into content, reasoning and tool calls."""
        return getattr(self.tokenizer, "response_template", None) is not None

    def parse_answer(
        self, prompt_ids: Sequence[int], text: str, tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Returns a generated text as a message of the assistant.

        If the tokenizer has a ``response_template``, the message may have ``reasoning_content`` and
        ``tool_calls``. Otherwise, its content is the whole text.

        Args:
            prompt_ids: Token IDs of the chat. Templates may start the answer, for example with
                ``<think>``.
            text: The generated text, which includes special tokens if the tokenizer has a
                ``response_template``.
            tools: The tools of the chat, whose schemas determine the types of arguments.
        """
        if not self.parses_responses:
            return {"role": "assistant", "content": text}
        prefix = str(self.tokenizer.decode(list(prompt_ids)))
        tools = None if tools is None else list(tools)
        try:
            message: dict[str, Any] = self.tokenizer.parse_response(
                text, prefix=prefix, tools=tools
            )
        except ValueError:  # the answer is incomplete, or has a tool call that is not valid JSON
            message = {"content": text}
        return {"role": "assistant", **message}

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns whether two prompts may share a batch.

        If the maximum length includes the prompt, the prompts must be equally long.
        """
        generate_options = self.generation_options(options, len(first.ids))
        if generate_options.get("max_new_tokens") is not None:
            return super().can_share_batch(first, row, options)
        return len(first.ids) == len(row.ids)

    def token_columns(self, length: int, width: int) -> slice:
        """Aligns rows to the right, next to the generated tokens."""
        return slice(width - length, width)

    def padded_width(self, length: int) -> int:
        """Returns the length itself, because ``generate`` pads batches to its own sizes."""
        return length

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generates the continuations of a batch of prompts."""
        width = inputs["input_ids"].shape[1]
        outputs = self.generate(inputs, self.generation_options(options, width))
        return outputs | {"sequences": outputs["sequences"][:, :, width:]}

    def _prompt_length(self, row: Row) -> int:
        return len(row.ids)

    def _decode(self, row: Row, new_ids: Any, options: Options = NO_OPTIONS) -> str:
        """Returns the text of a continuation.

        It is decoded together with the prompt. Decoded alone, it would lose its leading space with
        some tokenizers.
        """
        skips = skips_special_tokens(options)
        prompt_length = len(str(self.tokenizer.decode(list(row.ids), skip_special_tokens=skips)))
        ids = [*row.ids, *np.asarray(new_ids).tolist()]
        return str(self.tokenizer.decode(ids, skip_special_tokens=skips))[prompt_length:]

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the continuations, by default together with the prompt."""
        (row,), (output,), answers = rows, outputs, []
        end_ids = end_token_ids(self.model, self.generation_options(options, len(row.ids)))
        for rank, new_ids in enumerate(output["sequences"]):
            details = (
                self.details(new_ids, end_ids, output, rank)
                if options.get("return_details")
                else {}
            )
            if options.get("return_tensors"):
                answers.append({"generated_token_ids": [*row.ids, *new_ids.tolist()], **details})
                continue
            answer_ids = until_end(new_ids, end_ids)
            text: Any = self._decode(row, answer_ids, options)
            if isinstance(row.metadata, str):
                text = row.metadata + text if options.get("return_full_text", True) else text
            else:
                chat = self._chat_with_answer(inputs, row, answer_ids, options)
                if options.get("return_full_text", True):
                    text = chat
                elif options.get("return_details"):
                    details["message"] = chat[-1]
            answers.append({self.output_key: text, **details})
        return answers

    def _chat_with_answer(
        self, inputs: Any, row: Row, answer_ids: np.ndarray, options: Options
    ) -> list[Any]:
        """Returns the messages of a chat, followed by the generated message."""
        messages: list[Any] = row.metadata
        if continues_answer(messages, options.get("continue_final_message")):
            text, last = self._decode(row, answer_ids, options), messages[-1]
            return [*messages[:-1], {**last, "content": last["content"] + text}]
        skips = skips_special_tokens(options) and not self.parses_responses
        text = self._decode(row, answer_ids, {"skip_special_tokens": skips})
        tools = template_options(options, inputs if isinstance(inputs, Mapping) else {}).get(
            "tools"
        )
        return [*messages, self.parse_answer(row.ids, text, tools)]


class Text2Text(GenerationPipeline):
    """Generates a text from an input text with an encoder-decoder: ``[{"generated_text": …}]``.

    The options of ``generate`` and the ``task_specific_params`` of the model apply. As in
    Transformers 4, the default is beam search with four beams. Additional options:

    - ``source_prefix`` replaces the prefix that ``task_specific_params`` defines.
    - ``truncation=True`` truncates long texts to the model's maximum length, or to
      ``max_source_length`` tokens. ``truncation="split"`` splits long texts at sentences and joins
      the outputs for the parts.
    """

    head = "ForSeq2SeqLM"
    extra_options = ("src_lang", "tgt_lang", "source_prefix", "max_source_length")
    num_beams = 4

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        task: str = "",
        **options: Any,
    ):
        super().__init__(model, tokenizer, task, **options)
        all_task_params = getattr(model.config, "task_specific_params", None) or {}
        self.task_defaults = dict(all_task_params.get(task) or {})
        prefix = self.task_defaults.pop("prefix", None)
        # The encoder limits the length of inputs. Its limit may differ from that of the decoder.
        self.max_positions = model.max_source_length()
        if prefix is None:
            prefix = getattr(model.config, "source_prefix", None)
        self.direction = Direction(prefix or "")

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text, including the prefix.

        A text that is split has one row per part, and a text without words has no rows.
        """
        self.set_direction(options)
        prefix = options.get("source_prefix")
        encoder = SourceEncoder(
            self.tokenizer,
            self.max_positions,
            options.get("max_source_length"),
            self.direction.source_prefix if prefix is None else prefix,
            options.get("truncation", False),
        )
        texts = [self._text(item) for item in inputs]
        encoded = iter(encoder([text for text in texts if not isinstance(text, RejectedInput)]))
        encoded_inputs: list[list[Row] | RejectedInput] = []
        for text in texts:
            if isinstance(text, RejectedInput):
                encoded_inputs.append(text)
                continue
            parts, separators, warning, error = next(encoded)
            if error is not None:
                encoded_inputs.append(RejectedInput(error))
                continue
            rows = [
                Row(ids, metadata=separator)
                for ids, separator in zip(parts, ["", *separators], strict=False)
            ]
            if rows:
                rows[0].warning = warning
            encoded_inputs.append(rows)
        return encoded_inputs

    def find_problem(self, rows: Sequence[Row]) -> str | None:
        """Returns why the model cannot process a text. A text without words is not a problem."""
        return super().find_problem(rows) if rows else None

    def set_direction(self, options: Options) -> None:
        """Sets the languages of the model. Only translation pipelines override this method."""

    def source_width(self, width: int) -> int | None:
        """Returns ``width`` if it limits the length of the outputs, and otherwise `None`."""
        return None

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generates the outputs for a batch of texts."""
        width = self.source_width(inputs["input_ids"].shape[1])
        generate_options = self.generation_options(options, 1, width)
        if self.direction.forced_bos_token_id is not None:
            generate_options.setdefault("forced_bos_token_id", self.direction.forced_bos_token_id)
        return self.generate(inputs, generate_options)

    def _decode(self, row: Row, new_ids: Any, options: Options = NO_OPTIONS) -> str:
        # Marian's tokenizer has two vocabularies, and decodes with that of the source by default.
        has_two_vocabularies = hasattr(self.tokenizer, "spm_target")
        decoding = {"use_source_tokenizer": False} if has_two_vocabularies else {}
        ids, skips = np.asarray(new_ids).tolist(), skips_special_tokens(options)
        return str(self.tokenizer.decode(ids, skip_special_tokens=skips, **decoding))

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Decodes the outputs.

        If a text was split, the outputs of equal rank for its parts are joined.
        """
        generate_options = self.generation_options(options)
        end_ids = end_token_ids(self.model, generate_options)
        with_details = options.get("return_details")
        if not rows:
            blank = {self.output_key: ""} | (
                {"num_tokens": 0, "ended": True} if with_details else {}
            )
            return [blank] * generate_options.get("num_return_sequences", 1)
        answers = []
        for rank in range(len(outputs[0]["sequences"])):
            text, parts = "", []
            for row, output in zip(rows, outputs, strict=True):
                new_ids = output["sequences"][rank][1:]  # without the start token
                text += row.metadata + self._decode(row, until_end(new_ids, end_ids), options)
                parts.append(self.details(new_ids, end_ids, output, rank))
            answer: dict[str, Any] = {self.output_key: text}
            if with_details:
                answer["num_tokens"] = sum(part["num_tokens"] for part in parts)
                answer["ended"] = all(part["ended"] for part in parts)
                if "score" in parts[0]:
                    answer["score"] = sum(part["score"] for part in parts) / len(parts)
            answers.append(answer)
        return answers

    def format_list(self, answers: list[Any], options: Options) -> list[Any]:
        """Returns one dictionary per text, or one list per text if texts have several outputs."""
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

    For a multilingual model, the options ``src_lang`` and ``tgt_lang``, or a task name
    ``translation_xx_to_yy``, select the languages. By default, a translation may have slightly more
    than twice as many tokens as its source. Longer outputs are almost always repetitions.
    """

    output_key = "translation_text"
    text_columns = ("text", "source")

    def source_width(self, width: int) -> int | None:
        """Returns ``width``, because the length of the source limits that of the translation."""
        return width

    def set_direction(self, options: Options) -> None:
        """Sets the prefix, the first output token and the tokenizer's source language."""
        source, target = options.get("src_lang"), options.get("tgt_lang")
        task_parts = self.task.split("_")
        if source is None and target is None and len(task_parts) == 4:
            source, target = task_parts[1], task_parts[3]
        config, name = self.model.config, getattr(self.model.config, "_name_or_path", "")
        prefix = options.get("source_prefix")
        try:
            self.direction = find_direction(config, self.tokenizer, name, source, target, prefix)
        except UsageError:
            # A model with one language pair may not define its languages. Languages that only come
            # from the task name are then ignored, but explicit options must match.
            if options.get("src_lang") or options.get("tgt_lang"):
                raise
            if find_direction(config, self.tokenizer, name, source_prefix="") != Direction(""):
                raise
        if self.direction.tokenizer_source is not None:
            self.tokenizer.src_lang = self.direction.tokenizer_source

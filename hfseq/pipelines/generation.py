"""Pipelines that write: texts that go on with a prompt, and texts made of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.request import SMALLEST_ENCODER_BUCKET, bucket_length
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

#: Tokens that a text may have where neither the call nor the model says, as in Transformers.
MAX_NEW_TOKENS = 256


class GenerationPipeline(Pipeline):
    """What all that write share: options of ``generate`` and the room that is left."""

    defaults = None
    #: Options that are no options of ``generate``.
    own: ClassVar[tuple[str, ...]] = ("truncation",)
    #: The columns of an input that may hold its text.
    columns_of_text: ClassVar[tuple[str, ...]] = ("text",)

    def width(self, longest: int) -> int:
        """Pad to fewer widths: programs that generate take long to compile."""
        return bucket_length(longest, self.room, SMALLEST_ENCODER_BUCKET)

    def rows(self, width: int, size: int) -> int:
        """Let all rows be continued together, as every step reads all weights."""
        return size

    def _generation(self, options: Options, taken: int) -> dict[str, Any]:
        """Return the options of ``generate``; ``taken`` positions are no longer free."""
        config, room = self.model.generation_config, self.model.max_length()
        chosen = {name: value for name, value in options.items() if name not in self.own}
        if not {"max_new_tokens", "max_length"} & chosen.keys() and (
            config.max_new_tokens is None and config.max_length in (None, 20)
        ):  # 20 is what Transformers has where nobody chose
            most = MAX_NEW_TOKENS if room is None else min(MAX_NEW_TOKENS, room - taken)
            chosen["max_new_tokens"] = max(1, most)
        return chosen

    def _text(self, given: Any) -> str | RejectedInput:
        """Return the text of an input: itself, or the first of its columns that there is."""
        names = self.columns_of_text
        if isinstance(given, Mapping):
            return input_text(given, next((name for name in names if name in given), names[0]))
        return input_text(given, "text")

    def _sequences(
        self, inputs: Mapping[str, np.ndarray], chosen: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        params = self.model.params
        given = dict(distribute({"input_ids": inputs["input_ids"]}, params))
        output = self.model.generate(
            given["input_ids"],
            attention_mask=inputs["attention_mask"],
            params=params,
            compact_finished=not chosen.get("do_sample", self.model.generation_config.do_sample),
            **chosen,
        )
        sequences = np.asarray(output.sequences)
        return {"sequences": sequences.reshape(len(inputs["input_ids"]), -1, sequences.shape[1])}

    def _until_end(self, ids: np.ndarray) -> list[int]:
        config = self.model.generation_config
        ends = np.ravel(config.eos_token_id if config.eos_token_id is not None else -1)
        stops = np.flatnonzero(np.isin(ids, ends))
        return ids[: stops[0]].tolist() if len(stops) else ids.tolist()


class TextGeneration(GenerationPipeline):
    """What follows a prompt: ``[{"generated_text": …}]``.

    A prompt is a text, or a chat: a list of messages with ``role`` and ``content``, which comes
    back with the answer. ``return_full_text=False`` leaves the prompt out; other options are those
    of ``generate``. Unlike Transformers it is greedy unless ``do_sample`` says otherwise.
    """

    head = "ForCausalLM"
    own = ("truncation", "return_full_text")

    def is_one(self, inputs: Any) -> bool:
        """A list of messages is one chat."""
        chat = isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping)
        return super().is_one(inputs) or bool(chat and "role" in inputs[0])

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each prompt or chat."""
        made: list[list[Row] | RejectedInput] = []
        for given in inputs:
            chat = given.get("messages") if isinstance(given, Mapping) else given
            if isinstance(chat, list):
                made.append(self._chat(chat))
                continue
            text = self._text(given)
            if isinstance(text, RejectedInput):
                made.append(text)
                continue
            encoded = self.tokenize([text], truncation=options.get("truncation", False))
            ids = list(encoded["input_ids"][0])
            if not ids:  # a start token, or what separates texts
                starts = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
                ids = [one for one in starts if one is not None][:1]
            made.append([Row(ids, notes=text)])
        return made

    def _chat(self, messages: list[Any]) -> list[Row] | RejectedInput:
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                return RejectedInput(f"a message has a role and a content, and not {message!r:.60}")
        if not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                "the tokenizer has no chat_template: give a text, or a model that was trained to "
                "chat"
            )
        goes_on = messages[-1]["role"] == "assistant"
        ids: Any = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            tokenize=True,
            return_dict=False,
        )
        return [Row(list(ids), notes=messages)]

    def together(self, first: Row, row: Row, options: Options) -> bool:
        """Let prompts share a batch; where ``max_length`` counts them, only equally long ones."""
        if "max_new_tokens" in self._generation(options, len(first.ids)):
            return super().together(first, row, options)
        return len(first.ids) == len(row.ids)

    def columns(self, length: int, width: int) -> slice:
        """Put rows to the right, beside what follows."""
        return slice(width - length, width)

    def width(self, longest: int) -> int:
        """Leave the width to ``generate``, which has buckets of its own."""
        return longest

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generate."""
        width = inputs["input_ids"].shape[1]
        made = self._sequences(inputs, self._generation(options, width))
        return {"new": made["sequences"][:, :, width:]}

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Decode behind the prompt: alone, some tokenizers would drop a space."""
        (row,), (output,), answers = rows, outputs, []
        before = len(str(self.tokenizer.decode(list(row.ids), skip_special_tokens=True)))
        for new in output["new"]:
            ids = [*row.ids, *self._until_end(new)]
            text: Any = str(self.tokenizer.decode(ids, skip_special_tokens=True))[before:]
            if options.get("return_full_text", True):
                if isinstance(row.notes, str):
                    text = row.notes + text
                elif row.notes[-1]["role"] == "assistant":
                    last = row.notes[-1]
                    text = [*row.notes[:-1], {**last, "content": last["content"] + text}]
                else:
                    text = [*row.notes, {"role": "assistant", "content": text}]
            answers.append({"generated_text": text})
        return answers


class Text2Text(GenerationPipeline):
    """A text made of another by an encoder-decoder: ``[{"generated_text": …}]``.

    Options are those of ``generate``; the model's ``task_specific_params`` hold, its prefix too.
    Four beams are searched, as in Transformers 4, unless it is said otherwise.
    """

    head = "ForSeq2SeqLM"
    own = ("truncation", "src_lang", "tgt_lang")
    result = "generated_text"

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: str = "",
        **options: Any,
    ):
        super().__init__(model, tokenizer, task, **options)
        every = getattr(model.config, "task_specific_params", None) or {}
        self.usual = dict(every.get(task) or {})
        prefix = self.usual.pop("prefix", None)
        # A decoder of its own reads; what an encoder reads has its own limit.
        self.room = model.max_source_length()
        if prefix is None:
            prefix = getattr(model.config, "source_prefix", None)
        self.direction = Direction(prefix or "")
        # Marian's tokenizer has two vocabularies.
        two = hasattr(tokenizer, "spm_target")
        self._decoding: dict[str, Any] = {"use_source_tokenizer": False} if two else {}

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each text, behind the prefix."""
        self.direct(options)
        texts = [self._text(given) for given in inputs]
        prefix = self.direction.source_prefix
        good = [prefix + one for one in texts if not isinstance(one, RejectedInput)]
        ids: Iterator[Any] = iter(())
        if good:
            cut = options.get("truncation", False)
            ids = iter(self.tokenize(good, truncation=cut)["input_ids"])
        return [one if isinstance(one, RejectedInput) else [Row(list(next(ids)))] for one in texts]

    def direct(self, options: Options) -> None:
        """Choose the languages; for translation."""

    def run_batch(self, inputs: Mapping[str, np.ndarray], options: Options) -> Outputs:
        """Generate."""
        lengths = {"max_new_tokens", "max_length"}
        usual = {n: v for n, v in self.usual.items() if not (n in lengths and lengths & {*options})}
        chosen = self._generation({"num_beams": 4, **usual, **options}, 1)
        if self.direction.forced_bos_token_id is not None:
            chosen.setdefault("forced_bos_token_id", self.direction.forced_bos_token_id)
        return self._sequences(inputs, chosen)

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Decode, without the start token."""
        kept = [self._until_end(ids[1:]) for ids in outputs[0]["sequences"]]
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True, **self._decoding)
        return [{self.result: text} for text in texts]

    def several(self, answers: list[Any], options: Options) -> list[Any]:
        """Return one dictionary a text, where each has one."""
        return [one[0] for one in answers] if all(len(one) == 1 for one in answers) else answers


class Summarization(Text2Text):
    """A summary: ``[{"summary_text": …}]``."""

    result = "summary_text"
    columns_of_text = ("text", "document", "article")


class Translation(Text2Text):
    """A translation: ``[{"translation_text": …}]``.

    ``src_lang`` and ``tgt_lang`` choose where the model has several languages; so does a task
    that is called ``translation_xx_to_yy``.
    """

    result = "translation_text"
    columns_of_text = ("text", "source")

    def direct(self, options: Options) -> None:
        """Find the model's own names of the languages, its prefix and its first token."""
        source, target = options.get("src_lang"), options.get("tgt_lang")
        named = self.task.split("_")
        if source is None and target is None and len(named) == 4:
            source, target = named[1], named[3]
        config, name = self.model.config, getattr(self.model.config, "_name_or_path", "")
        try:
            self.direction = find_direction(config, self.tokenizer, name, source, target)
        except UsageError:
            # A model of one pair need not say which; of a name nothing has to come.
            if options.get("src_lang") or options.get("tgt_lang"):
                raise
            if find_direction(config, self.tokenizer, name, source_prefix="") != Direction(""):
                raise
        if self.direction.tokenizer_source is not None:
            self.tokenizer.src_lang = self.direction.tokenizer_source

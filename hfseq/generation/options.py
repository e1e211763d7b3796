"""The options of ``generate``: one table, from which checks, processors and the page come.

:class:`Options` has a field for each option that a compiled program depends on. Beside its default
a field says what the option means, what its value has to be, how it is read, and which processor or
warper it makes; the order of the fields is the order of the processors. ``documentation`` prints
the table of docs/generation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation import logits_process as p
from hfseq.generation.logits_process import FlaxLogitsProcessor, Length, token_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig

Tokens = tuple[int, ...]
Processor = Callable[[jax.Array, jax.Array, Length], jax.Array]
Criterion = Callable[[jax.Array, Length], jax.Array]
#: A test of an option's value, and what the value has to be.
Rule = tuple[Callable[[Any], bool], str]


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known about an option beside its default.

    ``differs`` says how it differs from PyTorch; ``off`` is a value that changes nothing, for which
    nothing is compiled; ``read`` makes a hashable value of what a configuration holds. A value
    other than the default makes a ``processor``, of (value, options, operands), or when sampling a
    ``warper``, of (value, ``min_tokens_to_keep``).
    """

    meaning: str
    differs: str = "no"
    rule: Rule | None = None
    off: int | None = None
    read: Callable[[str, Any], Any] = lambda name, value: value
    processor: Callable[[Any, Options, Operands], Processor | None] | None = None
    warper: Callable[[Any, int], Processor] | None = None


def _option(default: bool | float | str | Tokens | None, meaning: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"option": Option(meaning, **more)})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


_COUNT: Rule = (lambda n: isinstance(n, int) and n >= 1, "a positive integer")
_SIZE: Rule = (lambda n: isinstance(n, int) and n >= 0, "0 (off) or a positive integer")
_PENALTY: Rule = (lambda x: isinstance(x, float) and x > 0, "a float above 0")
_PART: Rule = (lambda x: _is_number(x) and 0 < x <= 1, "above 0 and at most 1")
_CUTOFF: Rule = (lambda x: _is_number(x) and 0 < x < 1, "between 0 and 1")


def _read_sequences(name: str, value: Any) -> tuple[Tokens, ...]:
    rows = list(value) if isinstance(value, (list, tuple)) else []
    if not rows or any(not isinstance(row, (list, tuple)) or not row for row in rows):
        raise UsageError(
            f"{name}={value!r} has to be a list of non-empty lists of token ids, "
            "such as [[13], [198, 198]]"
        )
    return tuple(token_ids(name, tuple(row)) for row in rows)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the compiled program depends on: hashable, and checked. Names as in GenerationConfig."""

    do_sample: bool = _option(
        False, "draw tokens instead of taking the best", read=lambda name, value: bool(value)
    )
    num_beams: int = _option(1, "beam search with so many hypotheses", rule=_COUNT)
    num_return_sequences: int = _option(1, "samples or best beams of each row", rule=_COUNT)
    early_stopping: bool | str = _option(False, 'when beam search ends: `True`, `False`, `"never"`')
    length_penalty: float = _option(
        1.0,
        "above 0 longer beams score higher",
        rule=(lambda x: _is_number(x) and not isinstance(x, bool), "a number"),
    )
    length_penalty_type: str = _option(
        "transformers",
        '`"transformers"` or `"gnmt"`, [below](#length-penalties)',
        differs="PyTorch has only the first",
        rule=(lambda kind: kind in ("transformers", "gnmt"), '"transformers" or "gnmt"'),
    )
    # Warpers, in PyTorch's order.
    temperature: float | None = _option(
        None,
        "scores are divided by it: below 1 sharper, above 1 flatter",
        off=1,
        rule=(_PENALTY[0], "a float above 0; for greedy search set do_sample=False"),
        warper=lambda value, keep: p.FlaxTemperatureLogitsWarper(value),
    )
    top_h: float | None = _option(
        None,
        "sample up to this part of the entropy",
        rule=_PART,
        warper=lambda value, keep: p.FlaxTopHLogitsWarper(value),
    )
    top_k: int | None = _option(
        None,
        "sample from so many tokens; 50 unless you say 0",
        off=0,
        rule=_SIZE,
        differs="of scores equal to the last only as many as fit stay",
        warper=lambda value, keep: p.FlaxTopKLogitsWarper(value, min_tokens_to_keep=keep),
    )
    top_p: float | None = _option(
        None,
        "sample from the fewest tokens with this probability",
        off=1,
        rule=_PART,
        warper=lambda value, keep: p.FlaxTopPLogitsWarper(value, min_tokens_to_keep=keep),
    )
    min_p: float | None = _option(
        None,
        "sample from tokens with this part of the best one's probability",
        rule=(lambda x: _is_number(x) and 0 <= x <= 1, "between 0 and 1"),
        warper=lambda value, keep: p.FlaxMinPLogitsWarper(value, min_tokens_to_keep=keep),
    )
    typical_p: float | None = _option(
        None,
        "sample from tokens of a surprise near the entropy, up to this mass",
        off=1,
        rule=_PART,
        warper=lambda value, keep: p.FlaxTypicalLogitsWarper(value, min_tokens_to_keep=keep),
    )
    epsilon_cutoff: float | None = _option(
        None,
        "no token of a lower probability",
        off=0,
        rule=_CUTOFF,
        warper=lambda value, keep: p.FlaxEpsilonLogitsWarper(value, min_tokens_to_keep=keep),
    )
    eta_cutoff: float | None = _option(
        None,
        "no token below a probability that falls with the entropy",
        off=0,
        rule=_CUTOFF,
        warper=lambda value, keep: p.FlaxEtaLogitsWarper(value, min_tokens_to_keep=keep),
    )
    # Processors, in PyTorch's order.
    sequence_bias: tuple[tuple[Tokens, float], ...] | None = _option(
        None,
        "what is added to the scores of sequences",
        read=lambda name, value: tuple(
            p.FlaxSequenceBiasLogitsProcessor(value).sequence_bias.items()
        ),
        processor=lambda value, o, x: p.FlaxSequenceBiasLogitsProcessor(dict(value)),
    )
    encoder_repetition_penalty: float | None = _option(
        None,
        "more of what is in the input",
        off=1,
        rule=_PENALTY,
        processor=lambda value, o, x: p.FlaxEncoderRepetitionPenaltyLogitsProcessor(
            value, *x.source()
        ),
    )
    repetition_penalty: float | None = _option(
        None,
        "less of what is there",
        off=1,
        rule=_PENALTY,
        processor=lambda value, o, x: p.FlaxRepetitionPenaltyLogitsProcessor(
            value, x.padding(o.rows_per_input)
        ),
    )
    no_repeat_ngram_size: int = _option(
        0,
        "no n-gram of this size twice",
        rule=_SIZE,
        processor=lambda value, o, x: p.FlaxNoRepeatNGramLogitsProcessor(value),
    )
    encoder_no_repeat_ngram_size: int = _option(
        0,
        "no n-gram of this size from the input",
        rule=_SIZE,
        processor=lambda value, o, x: p.FlaxEncoderNoRepeatNGramLogitsProcessor(value, *x.source()),
    )
    bad_words_ids: tuple[Tokens, ...] | None = _option(
        None,
        "sequences of tokens that must not come",
        processor=lambda value, o, x: p.FlaxNoBadWordsLogitsProcessor(
            list(value), o.eos_token_id or None
        ),
    )
    has_min_length: bool = _option(
        False,
        "",
        processor=lambda value, o, x: (
            o.eos_token_id and p.FlaxMinLengthLogitsProcessor(x.min_length, o.eos_token_id)
        ),
    )
    min_new_tokens: int = _option(
        0,
        "no end before so many new tokens",
        differs="too large ones are an error",
        processor=lambda value, o, x: (
            o.eos_token_id
            and p.FlaxMinNewTokensLengthLogitsProcessor(x.prompt_length, value, o.eos_token_id)
        ),
    )
    forced_bos_token_id: int | None = _option(
        None,
        "the first token after the decoder's start",
        processor=lambda value, o, x: p.FlaxForcedBOSTokenLogitsProcessor(value),
    )
    forced_eos_token_id: Tokens | None = _option(
        None,
        "the last token where `max_length` is reached",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxForcedEOSTokenLogitsProcessor(x.stop_length, value),
    )
    remove_invalid_values: bool = _option(
        False,
        "repair NaN and infinite scores",
        processor=lambda value, o, x: p.FlaxInfNanRemoveLogitsProcessor(),
    )
    exponential_decay_length_penalty: tuple[int, float] | None = _option(
        None,
        "hurry to the end: (after so many new tokens, factor)",
        read=lambda name, value: (int(value[0]), float(value[1])),
        processor=lambda value, o, x: p.FlaxExponentialDecayLengthPenalty(
            value, o.eos_token_id, x.prompt_length
        ),
    )
    suppress_tokens: Tokens | None = _option(
        None,
        "tokens that must not come",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxSuppressTokensLogitsProcessor(value),
    )
    begin_suppress_tokens: Tokens | None = _option(
        None,
        "tokens that must not come first",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxSuppressTokensAtBeginLogitsProcessor(
            value, o.first_free(x.prompt_length)
        ),
    )
    forced_decoder_ids: tuple[tuple[int, int | None], ...] | None = _option(
        None,
        "tokens that must come: pairs (place, token)",
        differs="an option of Transformers 4 only",
        read=lambda name, value: tuple(map(tuple, value)) or None,
        processor=lambda value, o, x: p.FlaxForceTokensLogitsProcessor(value, x.prompt_length - 1),
    )
    timestamp_rules: tuple[int, int, int | None] | None = _option(
        None,
        "",  # Whisper's: <|notimestamps|>, the end, how late the first may be
        processor=lambda value, o, x: p.whisper_timestamps(value, x.prompt_length),
    )
    # The last one, after the warpers too.
    renormalize_logits: bool = _option(False, "make the scores log-probabilities")
    output_scores: bool = _option(
        False,
        "keep the scores of each step",
        differs="`return_dict_in_generate` is not needed: results are always objects",
    )
    output_logits: bool = _option(False, "keep the scores of each step before the processors")
    pad_token_id: int | None = _option(None, "fills rows that have ended; by default the first end")
    eos_token_id: Tokens = _option((), "what ends a row: one token or several", read=token_ids)
    stop_token_sequences: tuple[Tokens, ...] = _option(
        (),
        "stop after any of these lists of tokens: `[[13], [198, 198]]`",
        differs="PyTorch has it not",
        read=_read_sequences,
    )

    @property
    def rows_per_input(self) -> int:
        """Rows that decoding needs for each row of the input."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    def first_free(self, prompt_length: Length) -> Length:
        """Return where the first token comes that no option forces."""
        begin = prompt_length
        if self.forced_bos_token_id is not None:
            begin = begin + jnp.where(begin > 1, 0, 1)
        if self.forced_decoder_ids:
            begin = begin + self.forced_decoder_ids[-1][0]
        return begin

    def check(self, vocab_size: int) -> None:
        """Raise one UsageError that lists the values and combinations that cannot work."""
        problems = [
            f"{name}={value!r} has to be {option.rule[1]}"
            for name, option in TABLE.items()
            if option.rule and (value := getattr(self, name)) is not None
            if not option.rule[0](value)
        ]
        beams, wanted = self.num_beams, self.num_return_sequences
        if _COUNT[0](beams) and _COUNT[0](wanted):
            candidates = max(2, 1 + len(self.eos_token_id)) * beams
            of_beams = {
                f"num_beams={beams} is more than the vocabulary's {vocab_size} tokens: there are "
                "not so many first tokens; lower num_beams": beams > vocab_size,
                f"the vocabulary of {vocab_size} is too small for beam search": beams > 1
                and candidates > beams * vocab_size,
                f"num_return_sequences={wanted} is more than num_beams={beams}: raise num_beams": 1
                < beams
                < wanted,
                f"num_return_sequences={wanted} needs do_sample=True or num_beams>={wanted}: "
                "greedy search finds only one": beams == 1 < wanted and not self.do_sample,
            }
            problems += [text for text, wrong in of_beams.items() if wrong]
        ids = {"forced_bos_token_id": self.forced_bos_token_id}
        if self.stop_token_sequences or any(token < vocab_size for token in self.eos_token_id):
            ids["pad_token_id"] = self.pad_token_id  # rows that end are filled up with it
        problems += [
            f"{name}={token} is outside of the vocabulary of {vocab_size}"
            for name, token in ids.items()
            if token is not None and token >= vocab_size
        ]
        if self.exponential_decay_length_penalty is not None and not self.eos_token_id:
            problems.append("exponential_decay_length_penalty needs eos_token_id: pass one")
        if problems:
            raise UsageError("generate: " + "; ".join(problems))

    def processors(self, operands: Operands, user: Sequence[Processor]) -> list[Processor]:
        """Return the processors of a run, without warpers: those of the options, then the user's.

        The lengths in ``operands`` may be traced. UsageError if the user passes one of a type that
        the options make already.
        """
        made = [
            processor
            for name, value in self._changed()
            if (make := TABLE[name].processor) and (processor := make(value, self, operands))
        ]
        types = {type(processor) for processor in made}
        for processor in user:
            if type(processor) in types:
                raise UsageError(
                    f"A custom logits processor of type {type(processor).__name__} was passed to "
                    "`generate`, but the options make one already: drop the processor or the option"
                )
        return [*made, *user]

    def warpers(self) -> list[Processor]:
        """Return what comes after them: the warpers of sampling, and the normalisation."""
        keep = 1
        if self.num_beams > 1:  # at least one token beside the ends must stay
            keep = len(self.eos_token_id) + 1 if self.eos_token_id else 2
        made = [
            make(value, keep)
            for name, value in self._changed()
            if self.do_sample and (make := TABLE[name].warper)
        ]
        return [*made, p.FlaxLogitNormalization()] if self.renormalize_logits else made

    def _changed(self) -> list[tuple[str, Any]]:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(field.name, value) for field, value in values if value != field.default]


TABLE: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(Options)
}

#: Options that say what a row begins with and how long it may become: meaning, what differs.
LENGTH_AND_PROMPT_OPTIONS = {
    "max_new_tokens": ("how many new tokens", "wins over `max_length`, as there"),
    "max_length": (
        "how long, the prompt counted",
        "20 where nobody says anything, as in Transformers 4 (PyTorch: 20 new ones)",
    ),
    "min_length": ("no end before that, the prompt counted", "too large ones are an error"),
    "bos_token_id": ("begins where there is no prompt", "no"),
    "decoder_start_token_id": ("begins the output of encoder-decoders", "none is an error"),
    "stop_strings": (
        "with `tokenizer`: stop where a string was written",
        "matches begin and end anywhere, in text that the tokenizer can decode token by token",
    ),
    "use_cache": ("no effect", "the cache is always used"),
    "cache_implementation": ("no effect", "the cache is always static"),
    "compile_config": ("no effect", "the loop is always compiled"),
}

#: Options that hfseq has no part for: what they must be left at, and what would work instead.
UNSUPPORTED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "constraints": ((None,), "bias tokens with sequence_bias, or use a logits_processor"),
    "force_words_ids": ((None,), "bias tokens with sequence_bias, or use a logits_processor"),
    "penalty_alpha": ((None, 0, 0.0), "use do_sample=True with top_k, or repetition_penalty"),
    "dola_layers": ((None,), "leave it out"),
    "num_beam_groups": ((None, 1), "use do_sample=True with num_beams for diverse beams"),
    "diversity_penalty": ((None, 0, 0.0), "use do_sample=True with num_beams for diverse beams"),
    "guidance_scale": ((None, 1, 1.0), "use a logits_processor that calls the model"),
    "watermarking_config": ((None,), "use a logits_processor"),
    "token_healing": ((None, False), "cut the last token off the prompt yourself"),
    "max_time": ((None,), "loop over stream_generate and stop when the time is over"),
    "prompt_lookup_num_tokens": ((None,), "leave it out: the text is the same, only slower"),
    "assistant_early_exit": ((None,), "leave it out: the text is the same, only slower"),
    "is_assistant": ((None, False), "leave it out"),
    "use_mtp": ((None, False), "leave it out: the text is the same, only slower"),
    "speculation_type": ((None,), "leave it out: the text is the same, only slower"),
    "assistant_ensemble_weight": ((None,), "leave it out"),
}

#: The same, where a model's own configuration may ask for it without harm.
UNSUPPORTED_IF_REQUESTED = {
    name: ((None, False), "call the model on the sequences that generate returns")
    for name in ("output_attentions", "output_hidden_states")
}


def options_table() -> str:
    """Return the table of options in docs/generation.md."""
    rows = {name: (option.meaning, option.differs) for name, option in TABLE.items()}
    rows = {name: row for name, row in {**LENGTH_AND_PROMPT_OPTIONS, **rows}.items() if row[0]}
    lines = [f"| `{name}` | {' | '.join(row)} |" for name, row in rows.items()]
    return "\n".join(["| option | meaning | differs from PyTorch? |", "|---|---|---|", *lines])


def resolve_options(config: GenerationConfig, extras: Mapping[str, Any]) -> Options:
    """Turn a complete GenerationConfig, and what goes beyond it, into :class:`Options`.

    Options that GenerationConfig lacks come from ``extras``, or from a file that has them anyway.
    """
    given = {**vars(config), "stop_token_sequences": None, **extras}
    given["has_min_length"] = bool(config.min_length)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        value: Any = given.get(field.name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is not None:
            option = TABLE[field.name]
            value = option.read(field.name, value)
            changes_nothing = option.off is not None and value == option.off
            if changes_nothing or option.warper and not config.do_sample:
                value = None
        values[field.name] = field.default if value is None else value
    ends = values["eos_token_id"]
    if values["pad_token_id"] is None and ends:
        values["pad_token_id"] = ends[0]
    if values["bad_words_ids"] is not None:
        words = p.FlaxNoBadWordsLogitsProcessor(values["bad_words_ids"], ends)
        values["bad_words_ids"] = tuple(words.sequence_bias) or None
    return Options(**values)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part: a program is compiled for each plan (and for the shapes of operands).

    ``buffer`` is the width of the token buffer and of the cache; ``steps`` the number of steps
    whose scores are recorded (0: none).
    """

    options: Options
    buffer: int
    steps: int = 0
    encoder_decoder: bool = False
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    @property
    def pad(self) -> int:
        """What fills rows after their end; never seen where nothing ends a row early."""
        return 0 if self.options.pad_token_id is None else self.options.pad_token_id

    def key(self) -> tuple[Any, ...]:
        """Return what tells plans apart: processors of equal type and settings are equal."""

        def settings(part: Callable[..., jax.Array]) -> Any:
            if not isinstance(part, FlaxLogitsProcessor):
                return part  # functions stand for themselves
            try:
                key = type(part), _frozen(vars(part))
                hash(key)
            except TypeError:  # an attribute that is not a plain value, or a tracer
                return part
            return key

        parts = [tuple(map(settings, held)) for held in (self.processors, self.criteria)]
        return self.options, self.buffer, self.steps, self.encoder_decoder, *parts


def _frozen(value: object) -> Any:
    """Return lists, dicts and arrays as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.shape, np.asarray(value).tobytes()
    return value


class Operands(NamedTuple):
    """The arrays that a program is called with.

    ``prompt`` and ``mask`` are (batch, prefill width), of which ``prompt_length`` columns are real;
    ``encoder`` holds the arguments of ``encode``, or ``encoder_outputs`` made by the caller;
    ``extra`` the model's collections.
    """

    params: Mapping[str, Any]
    prompt: jax.Array
    mask: jax.Array | None
    key: jax.Array
    prompt_length: Length
    stop_length: Length
    min_length: Length
    encoder: dict[str, jax.Array]
    encoder_outputs: Any
    encoder_length: Length
    model_kwargs: dict[str, Any]
    extra: dict[str, Any]

    def source(self) -> tuple[jax.Array, Length]:
        """Return the tokens that were put in and how many columns of them are real."""
        if "input_ids" in self.encoder:
            return self.encoder["input_ids"], self.encoder_length
        return self.prompt, self.prompt_length

    def padding(self, times: int) -> jax.Array | None:
        """Return how many columns are padding before the prompt, (rows * times,), if any are."""
        if self.mask is None:
            return None
        return jnp.repeat(jnp.argmax(self.mask != 0, axis=1), times)

"""The options of ``generate``, defined in one table.

:class:`Options` has a field for each option that a compiled program depends on. In addition to the
default, a field defines the description of the option, the allowed values, the conversion of the
value, and the logits processor or warper that the option creates. The processors are applied in the
order of the fields. :func:`options_table` generates the table in docs/generation.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
#: A test of an option's value, and a description of the allowed values.
Rule = tuple[Callable[[Any], bool], str]


@dataclasses.dataclass(frozen=True)
class Option:
    """The definition of an option, except for its default.

    Attributes:
        meaning: Description for the documentation. It is empty for internal options.
        differs: How the option differs from PyTorch, for the documentation.
        rule: A test of the value, and a description of the allowed values.
        off: A value that disables the option, so that no processor is created.
        read: A function of ``(name, value)`` that converts the value to a hashable one.
        processor: A function of ``(value, options, operands)`` that creates a processor. It is
            called if the value is not the default.
        warper: A function of ``(value, min_tokens_to_keep)`` that creates a warper. It is called
            in sampling, if the value is not the default.
    """

    meaning: str
    differs: str = "no"
    rule: Rule | None = None
    off: int | None = None
    read: Callable[[str, Any], Any] = lambda name, value: value
    processor: Callable[[Any, Options, Operands], Processor | None] | None = None
    warper: Callable[[Any, int], Processor] | None = None


def _option(default: bool | float | str | Tokens | None, meaning: str, **fields: Any) -> Any:
    return dataclasses.field(default=default, metadata={"option": Option(meaning, **fields)})


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
            f"{name}={value!r} must be a list of non-empty lists of token IDs, "
            "such as [[13], [198, 198]]"
        )
    return tuple(token_ids(name, tuple(row)) for row in rows)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that a compiled program depends on.

    The object is hashable. Options have the same names as in GenerationConfig.
    """

    do_sample: bool = _option(
        False,
        "sample tokens instead of selecting the most probable one",
        read=lambda name, value: bool(value),
    )
    num_beams: int = _option(1, "number of beams; above 1 beam search is used", rule=_COUNT)
    num_return_sequences: int = _option(1, "number of samples or best beams per input", rule=_COUNT)
    early_stopping: bool | str = _option(
        False, 'when beam search stops: `True`, `False` or `"never"`'
    )
    length_penalty: float = _option(
        1.0,
        "exponent of the length; values above 0 favor longer beams",
        rule=(lambda x: _is_number(x) and not isinstance(x, bool), "a number"),
    )
    length_penalty_type: str = _option(
        "transformers",
        '`"transformers"` or `"gnmt"`, see [below](#length-penalties)',
        differs='PyTorch has only `"transformers"`',
        rule=(lambda name: name in ("transformers", "gnmt"), '"transformers" or "gnmt"'),
    )
    # Warpers, in PyTorch's order.
    temperature: float | None = _option(
        None,
        "divisor of the scores: the distribution is sharper below 1 and flatter above 1",
        off=1,
        rule=(_PENALTY[0], "a float above 0; for greedy search set do_sample=False"),
        warper=lambda value, keep: p.FlaxTemperatureLogitsWarper(value),
    )
    top_h: float | None = _option(
        None,
        "sample from the most probable tokens that contribute up to this fraction of the entropy",
        rule=_PART,
        warper=lambda value, keep: p.FlaxTopHLogitsWarper(value),
    )
    top_k: int | None = _option(
        None,
        "sample from the k most probable tokens; the default is 50, and 0 disables it",
        off=0,
        rule=_SIZE,
        differs="if several scores equal the k-th, only as many as needed for k tokens are kept",
        warper=lambda value, keep: p.FlaxTopKLogitsWarper(value, min_tokens_to_keep=keep),
    )
    top_p: float | None = _option(
        None,
        "sample from the smallest set of tokens whose probabilities add up to this value",
        off=1,
        rule=_PART,
        warper=lambda value, keep: p.FlaxTopPLogitsWarper(value, min_tokens_to_keep=keep),
    )
    min_p: float | None = _option(
        None,
        "sample from tokens with at least this fraction of the highest probability",
        rule=(lambda x: _is_number(x) and 0 <= x <= 1, "between 0 and 1"),
        warper=lambda value, keep: p.FlaxMinPLogitsWarper(value, min_tokens_to_keep=keep),
    )
    typical_p: float | None = _option(
        None,
        "sample from the tokens whose information content is nearest to the entropy and whose "
        "probabilities add up to this value",
        off=1,
        rule=_PART,
        warper=lambda value, keep: p.FlaxTypicalLogitsWarper(value, min_tokens_to_keep=keep),
    )
    epsilon_cutoff: float | None = _option(
        None,
        "sample only from tokens with at least this probability",
        off=0,
        rule=_CUTOFF,
        warper=lambda value, keep: p.FlaxEpsilonLogitsWarper(value, min_tokens_to_keep=keep),
    )
    eta_cutoff: float | None = _option(
        None,
        "sample only from tokens above a threshold that decreases with the entropy",
        off=0,
        rule=_CUTOFF,
        warper=lambda value, keep: p.FlaxEtaLogitsWarper(value, min_tokens_to_keep=keep),
    )
    # Processors, in PyTorch's order.
    sequence_bias: tuple[tuple[Tokens, float], ...] | None = _option(
        None,
        "biases that are added to the scores of token sequences",
        read=lambda name, value: tuple(
            p.FlaxSequenceBiasLogitsProcessor(value).sequence_bias.items()
        ),
        processor=lambda value, o, x: p.FlaxSequenceBiasLogitsProcessor(dict(value)),
    )
    encoder_repetition_penalty: float | None = _option(
        None,
        "values above 1 make tokens of the input more probable",
        off=1,
        rule=_PENALTY,
        processor=lambda value, o, x: p.FlaxEncoderRepetitionPenaltyLogitsProcessor(
            value, *x.source()
        ),
    )
    repetition_penalty: float | None = _option(
        None,
        "values above 1 make tokens that already occur less probable",
        off=1,
        rule=_PENALTY,
        processor=lambda value, o, x: p.FlaxRepetitionPenaltyLogitsProcessor(
            value, x.padding(o.rows_per_input)
        ),
    )
    no_repeat_ngram_size: int = _option(
        0,
        "size of n-grams that must not occur twice",
        rule=_SIZE,
        processor=lambda value, o, x: p.FlaxNoRepeatNGramLogitsProcessor(value),
    )
    encoder_no_repeat_ngram_size: int = _option(
        0,
        "size of n-grams of the input that must not occur in the output",
        rule=_SIZE,
        processor=lambda value, o, x: p.FlaxEncoderNoRepeatNGramLogitsProcessor(value, *x.source()),
    )
    bad_words_ids: tuple[Tokens, ...] | None = _option(
        None,
        "token sequences that must not be generated",
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
        "minimum number of new tokens",
        differs="an error if it exceeds the maximum",
        processor=lambda value, o, x: (
            o.eos_token_id
            and p.FlaxMinNewTokensLengthLogitsProcessor(x.prompt_length, value, o.eos_token_id)
        ),
    )
    forced_bos_token_id: int | None = _option(
        None,
        "first token after the decoder start token",
        processor=lambda value, o, x: p.FlaxForcedBOSTokenLogitsProcessor(value),
    )
    forced_eos_token_id: Tokens | None = _option(
        None,
        "last token of outputs that reach `max_length`",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxForcedEOSTokenLogitsProcessor(x.stop_length, value),
    )
    remove_invalid_values: bool = _option(
        False,
        "replace NaN and infinite scores by finite values",
        processor=lambda value, o, x: p.FlaxInfNanRemoveLogitsProcessor(),
    )
    exponential_decay_length_penalty: tuple[int, float] | None = _option(
        None,
        "(start, factor): the score of the end token grows exponentially after `start` new tokens",
        read=lambda name, value: (int(value[0]), float(value[1])),
        processor=lambda value, o, x: p.FlaxExponentialDecayLengthPenalty(
            value, o.eos_token_id, x.prompt_length
        ),
    )
    suppress_tokens: Tokens | None = _option(
        None,
        "tokens that must not be generated",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxSuppressTokensLogitsProcessor(value),
    )
    begin_suppress_tokens: Tokens | None = _option(
        None,
        "tokens that must not be the first generated token",
        read=token_ids,
        processor=lambda value, o, x: p.FlaxSuppressTokensAtBeginLogitsProcessor(
            value, o.first_free(x.prompt_length)
        ),
    )
    forced_decoder_ids: tuple[tuple[int, int | None], ...] | None = _option(
        None,
        "tokens that are forced at positions of the output: pairs (position, token)",
        differs="not in PyTorch; an option of Transformers 4",
        read=lambda name, value: tuple(map(tuple, value)) or None,
        processor=lambda value, o, x: p.FlaxForceTokensLogitsProcessor(value, x.prompt_length - 1),
    )
    timestamp_rules: tuple[int, int, int | None] | None = _option(
        None,
        "",  # for Whisper: arguments of p.whisper_timestamps
        processor=lambda value, o, x: p.whisper_timestamps(value, x.prompt_length),
    )
    # Applied last, after the warpers.
    renormalize_logits: bool = _option(False, "normalize the scores to log-probabilities")
    output_scores: bool = _option(
        False,
        "return the scores of each step",
        differs="`return_dict_in_generate` is not needed: the result is always an output object",
    )
    output_logits: bool = _option(False, "return the scores of each step before the processors")
    pad_token_id: int | None = _option(
        None, "token that pads finished sequences; the default is the first end token"
    )
    eos_token_id: Tokens = _option((), "end token, or several end tokens", read=token_ids)
    stop_token_sequences: tuple[Tokens, ...] = _option(
        (),
        "stop after any of these token sequences, such as `[[13], [198, 198]]`",
        differs="not in PyTorch",
        read=_read_sequences,
    )

    @property
    def rows_per_input(self) -> int:
        """Number of decoded rows per input."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    def first_free(self, prompt_length: Length) -> Length:
        """Returns the position of the first token that no option forces."""
        begin = prompt_length
        if self.forced_bos_token_id is not None:
            begin = begin + jnp.where(begin > 1, 0, 1)
        if self.forced_decoder_ids:
            begin = begin + self.forced_decoder_ids[-1][0]
        return begin

    def check(self, vocab_size: int) -> None:
        """Raises a UsageError that lists all invalid values and combinations."""
        problems = [
            *self._value_problems(),
            *self._beam_problems(vocab_size),
            *self._token_problems(vocab_size),
        ]
        if problems:
            raise UsageError("generate: " + "; ".join(problems))

    def _value_problems(self) -> Iterator[str]:
        """Yields a message for each value that violates the rule of its option."""
        for name, option in TABLE.items():
            value = getattr(self, name)
            if option.rule is not None and value is not None:
                is_valid, allowed = option.rule
                if not is_valid(value):
                    yield f"{name}={value!r} must be {allowed}"

    def _beam_problems(self, vocab_size: int) -> Iterator[str]:
        """Yields a message for each problem of ``num_beams`` and ``num_return_sequences``."""
        beams, returned = self.num_beams, self.num_return_sequences
        if not (_COUNT[0](beams) and _COUNT[0](returned)):
            return
        if beams > vocab_size:
            yield (
                f"num_beams={beams} exceeds the vocabulary of {vocab_size} tokens, so there are "
                "not enough first tokens; lower num_beams"
            )
        if beams > 1 and max(2, 1 + len(self.eos_token_id)) > vocab_size:
            yield f"the vocabulary of {vocab_size} tokens is too small for beam search"
        if 1 < beams < returned:
            yield f"num_return_sequences={returned} exceeds num_beams={beams}: raise num_beams"
        if beams == 1 < returned and not self.do_sample:
            yield (
                f"num_return_sequences={returned} requires do_sample=True or "
                f"num_beams>={returned}: greedy search finds only one sequence"
            )

    def _token_problems(self, vocab_size: int) -> Iterator[str]:
        """Yields a message for each invalid special token.

        A special token is invalid if it is outside of the vocabulary, or if an option requires it
        and it is missing.
        """
        ids = {"forced_bos_token_id": self.forced_bos_token_id}
        if self.stop_token_sequences or any(token < vocab_size for token in self.eos_token_id):
            ids["pad_token_id"] = self.pad_token_id  # pads finished rows
        for name, token in ids.items():
            if token is not None and token >= vocab_size:
                yield f"{name}={token} is outside of the vocabulary of {vocab_size}"
        if self.exponential_decay_length_penalty is not None and not self.eos_token_id:
            yield "exponential_decay_length_penalty requires eos_token_id: pass eos_token_id"

    def processors(self, operands: Operands, user: Sequence[Processor]) -> list[Processor]:
        """Returns the processors of the options, followed by the processors of the user.

        Warpers are not included.

        Args:
            operands: The arrays of the program. The lengths that they include may be traced.
            user: Processors that the user passed.

        Raises:
            UsageError: The user passed a processor of a type that the options create too.
        """
        created = [
            processor
            for name, value in self._changed()
            if (make := TABLE[name].processor) and (processor := make(value, self, operands))
        ]
        types = {type(processor) for processor in created}
        for processor in user:
            if type(processor) in types:
                raise UsageError(
                    f"A custom logits processor of type {type(processor).__name__} was passed to "
                    "`generate`, but the options already create one: drop the processor or the "
                    "option"
                )
        return [*created, *user]

    def warpers(self) -> list[Processor]:
        """Returns the warpers and the final normalization, which are applied after processors."""
        keep = 1
        if self.num_beams > 1:  # keep at least one token that is not an end token
            keep = len(self.eos_token_id) + 1 if self.eos_token_id else 2
        warpers = [
            make(value, keep)
            for name, value in self._changed()
            if self.do_sample and (make := TABLE[name].warper)
        ]
        return [*warpers, p.FlaxLogitNormalization()] if self.renormalize_logits else warpers

    def _changed(self) -> list[tuple[str, Any]]:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(field.name, value) for field, value in values if value != field.default]


TABLE: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(Options)
}

#: Options of lengths and of the prompt. Each value is a pair: the description of the option, and
#: how the option differs from PyTorch.
LENGTH_AND_PROMPT_OPTIONS = {
    "max_new_tokens": (
        "maximum number of new tokens",
        "takes precedence over `max_length`, as in PyTorch",
    ),
    "max_length": (
        "maximum length, including the prompt",
        "the default is 20, as in Transformers 4 (PyTorch's default is 20 new tokens)",
    ),
    "min_length": ("minimum length, including the prompt", "an error if it exceeds the maximum"),
    "bos_token_id": ("first token if there is no prompt", "no"),
    "decoder_start_token_id": (
        "first token of the output of encoder-decoders",
        "an error if it is not set",
    ),
    "stop_strings": (
        "stop after any of these strings; requires `tokenizer`",
        "matches can begin and end inside of a token; each token must be decodable separately",
    ),
    "use_cache": ("no effect", "the cache is always used"),
    "cache_implementation": ("no effect", "the cache is always static"),
    "compile_config": ("no effect", "the loop is always compiled"),
}

#: The advice for options that only change the speed.
SLOWER_ONLY = "leave it out: it makes generation faster, but does not change the text"
#: Unsupported options. Each value is a pair: the values of the option that are accepted because
#: they have no effect, and what to use instead.
UNSUPPORTED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "constraints": ((None,), "bias tokens with sequence_bias, or use a logits_processor"),
    "force_words_ids": ((None,), "bias tokens with sequence_bias, or use a logits_processor"),
    "penalty_alpha": ((None, 0, 0.0), "use do_sample=True with top_k, or repetition_penalty"),
    "dola_layers": ((None,), "leave it out"),
    "num_beam_groups": ((None, 1), "use do_sample=True with num_beams for diverse beams"),
    "diversity_penalty": ((None, 0, 0.0), "use do_sample=True with num_beams for diverse beams"),
    "guidance_scale": ((None, 1, 1.0), "use a logits_processor that calls the model"),
    "watermarking_config": ((None,), "use a logits_processor"),
    "token_healing": ((None, False), "remove the last token of the prompt before the call"),
    "max_time": ((None,), "loop over stream_generate and stop after the time limit"),
    "prompt_lookup_num_tokens": ((None,), SLOWER_ONLY),
    "assistant_early_exit": ((None,), SLOWER_ONLY),
    "is_assistant": ((None, False), "leave it out"),
    "use_mtp": ((None, False), SLOWER_ONLY),
    "speculation_type": ((None,), SLOWER_ONLY),
    "assistant_ensemble_weight": ((None,), "leave it out"),
}

#: Options that are ignored if only the model's configuration sets them, but raise an error if the
#: user sets them.
UNSUPPORTED_IF_REQUESTED = {
    name: ((None, False), "call the model on the sequences that generate returns")
    for name in ("output_attentions", "output_hidden_states")
}


def options_table() -> str:
    """Returns the table of options for docs/generation.md."""
    rows = {name: (option.meaning, option.differs) for name, option in TABLE.items()}
    rows = {name: row for name, row in {**LENGTH_AND_PROMPT_OPTIONS, **rows}.items() if row[0]}
    lines = [f"| `{name}` | {' | '.join(row)} |" for name, row in rows.items()]
    return "\n".join(["| option | meaning | differs from PyTorch? |", "|---|---|---|", *lines])


def resolve_options(config: GenerationConfig, extras: Mapping[str, Any]) -> Options:
    """Converts a complete GenerationConfig and additional arguments to :class:`Options`.

    Args:
        config: A complete GenerationConfig. It may also have entries that only hfseq defines.
        extras: Options that GenerationConfig does not define. They take precedence over `config`.
    """
    values_by_name = {**vars(config), "stop_token_sequences": None, **extras}
    values_by_name["has_min_length"] = bool(config.min_length)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        value: Any = values_by_name.get(field.name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is not None:
            option = TABLE[field.name]
            value = option.read(field.name, value)
            changes_nothing = option.off is not None and value == option.off
            if changes_nothing or option.warper and not config.do_sample:
                value = None
        values[field.name] = field.default if value is None else value
    eos_token_ids = values["eos_token_id"]
    if values["pad_token_id"] is None and eos_token_ids:
        values["pad_token_id"] = eos_token_ids[0]
    if values["bad_words_ids"] is not None:
        words = p.FlaxNoBadWordsLogitsProcessor(values["bad_words_ids"], eos_token_ids)
        values["bad_words_ids"] = tuple(words.sequence_bias) or None
    return Options(**values)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a program. One program is compiled per plan and operand shapes.

    Attributes:
        options: The options.
        buffer: Number of tokens in the token buffer and in the cache.
        steps: Number of steps whose scores are recorded and returned.
        encoder_decoder: Whether the model is an encoder-decoder model.
        processors: Logits processors that the user passed.
        criteria: Stopping criteria, including one for ``stop_strings``.
    """

    options: Options
    buffer: int
    steps: int = 0
    encoder_decoder: bool = False
    processors: tuple[Processor, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    @property
    def pad(self) -> int:
        """The token that pads finished rows. It is not used if no row ends early."""
        return 0 if self.options.pad_token_id is None else self.options.pad_token_id

    def key(self) -> tuple[Any, ...]:
        """Returns a hashable key for the cache of compiled programs.

        Logits processors of the same type with equal attributes have equal keys.
        """

        def settings(part: Callable[..., jax.Array]) -> Any:
            if not isinstance(part, FlaxLogitsProcessor):
                return part  # functions are compared by identity
            try:
                key = type(part), _frozen(vars(part))
                hash(key)
            except TypeError:  # an attribute is not hashable, or a tracer
                return part
            return key

        parts = [tuple(map(settings, functions)) for functions in (self.processors, self.criteria)]
        return self.options, self.buffer, self.steps, self.encoder_decoder, *parts


def _frozen(value: object) -> Any:
    """Converts lists, dicts and arrays to tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.shape, np.asarray(value).tobytes()
    return value


class Operands(NamedTuple):
    """The arrays that a program is called with.

    Attributes:
        params: Parameters of the model.
        prompt: Token IDs, `(batch, width)`. The width is a bucket. Only the first
            ``prompt_length`` columns contain the prompt.
        mask: Attention mask of ``prompt``, same shape.
        key: PRNG key.
        prompt_length: Length of the prompt.
        stop_length: Maximum length of the output, including the prompt.
        min_length: Length before which no end token is generated.
        encoder: Arguments of ``encode``.
        encoder_outputs: Encoder outputs that the caller passed, if any.
        encoder_length: Number of columns of the encoder's token IDs without the padding to a
            bucket.
        model_kwargs: Other inputs of the model.
        extra: Collections of the model.
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
        """Returns the tokens of the input, and the number of columns without the bucket padding.

        The input is the encoder's input, or the prompt if the model has no encoder.
        """
        if "input_ids" in self.encoder:
            return self.encoder["input_ids"], self.encoder_length
        return self.prompt, self.prompt_length

    def padding(self, times: int) -> jax.Array | None:
        """Returns the number of padding tokens at the start of each prompt.

        Args:
            times: Number of rows per prompt.

        Returns:
            An array `(batch * times,)`, or `None` without a mask.
        """
        if self.mask is None:
            return None
        return jnp.repeat(jnp.argmax(self.mask != 0, axis=1), times)

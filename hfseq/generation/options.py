"""From ``GenerationConfig`` and keyword arguments to one checked, hashable set of options."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import plugins
from hfseq.errors import UsageError, nearest
from hfseq.generation import logits_process as p
from hfseq.generation.logits_process import FlaxLogitsProcessor, token_ids
from hfseq.plugins.registry import target_name

logger = logging.getLogger(__name__)

#: Options that hfseq has no part for: what they must be left at, and what would work instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
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
}  # fmt: skip


#: The same, where a model's own configuration may ask for it without harm.
UNSUPPORTED_IF_ASKED = {
    name: ((None, False), "call the model on the sequences that generate returns")
    for name in ("output_attentions", "output_hidden_states")
}


#: Arguments of PyTorch's ``generate`` that have no counterpart.
NO_ARGUMENTS = {
    "assistant_model": "leave it out: the text is the same, only slower",
    "prefix_allowed_tokens_fn": "use a logits_processor, which is traced with the loop",
    "inputs_embeds": "pass input_ids",
    "inputs": "pass input_ids",
    "negative_prompt_ids": "use a logits_processor that calls the model",
    "negative_prompt_attention_mask": "use a logits_processor that calls the model",
    "synced_gpus": "leave it out: sharded models need no such flag in JAX",
    "past_key_values": "pass the whole prompt; its cache is made inside",
    "custom_generate": "call your function directly",
}


#: Attributes of any configuration that do not mean generation.
_NOT_EDITS = (
    "use_cache", "output_attentions", "output_hidden_states", "return_dict_in_generate",
    "transformers_version",
)  # fmt: skip


Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the compiled program depends on: hashable, and checked. Names as in GenerationConfig."""

    do_sample: bool = False
    num_beams: int = 1
    num_return_sequences: int = 1
    early_stopping: Any = False
    length_penalty: float = 1.0
    length_penalty_type: str = "transformers"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[Tokens, ...] | None = None
    sequence_bias: tuple[tuple[Tokens, float], ...] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Tokens | None = None
    forced_decoder_ids: tuple[tuple[int, int | None], ...] | None = None
    suppress_tokens: Tokens | None = None
    begin_suppress_tokens: Tokens | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    min_new_tokens: int = 0
    has_min_length: bool = False
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    output_scores: bool = False
    output_logits: bool = False
    pad_token_id: int | None = None
    eos_token_id: Tokens = ()
    stop_token_sequences: tuple[Tokens, ...] = ()

    @property
    def rows_per_input(self) -> int:
        """Rows that decoding needs for each row of the input."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences


def merge(model: Any, given: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """Return a complete GenerationConfig, the keyword arguments that are none of its options, and
    whether ``max_length`` is nobody's choice.

    What ``kwargs`` say comes first, then ``given``, then the model's own configuration, then the
    defaults of Transformers. As in Transformers 4, edits of ``model.config`` count as long as the
    model's generation configuration still is what was made of it.
    """
    from transformers import GenerationConfig

    own = model.generation_config or GenerationConfig()
    if given is None and getattr(own, "_from_model_config", False):
        own = _follow_model_config(model, own)
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    explicit = {name for name, value in vars(config).items() if value is not None} | set(kwargs)
    config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    default_length = config.max_length is None and kwargs.get("max_length") is None
    defaults = GenerationConfig._get_default_generation_params()
    config.update(**defaults, defaults_only=True)
    rest = config.update(**kwargs)
    for name in ("max_length", "min_length"):
        if getattr(config, name) is None:
            setattr(config, name, defaults[name])
    _refuse_unsupported(config, explicit)
    return config, rest, default_length


def _follow_model_config(model: Any, own: Any) -> Any:
    """Return ``own`` with what was changed in ``model.config`` since it was made."""
    if getattr(own, "_original_object_hash", None) != hash(own):
        return own
    edits = {}
    for name in vars(own):
        if name.startswith("_") or name in _NOT_EDITS or not hasattr(model.config, name):
            continue
        value = getattr(model.config, name)
        if value != getattr(own, name) and (value is not None or name.endswith("token_id")):
            edits[name] = value
    if not edits:
        return own
    logger.warning(
        "You have modified the pretrained model configuration to control generation (%s). This is "
        "a deprecated strategy: change model.generation_config instead.",
        ", ".join(edits),
    )
    fresh = copy.deepcopy(own)
    fresh.update(**edits)
    fresh._original_object_hash = hash(fresh)
    model.generation_config = fresh
    return fresh


def _refuse_unsupported(config: Any, explicit: set[str]) -> None:
    asked = {name: rule for name, rule in UNSUPPORTED_IF_ASKED.items() if name in explicit}
    problems = [
        f"{name}={getattr(config, name)!r} is not supported: {hint}"
        for name, (allowed, hint) in {**UNSUPPORTED, **asked}.items()
        if hasattr(config, name) and getattr(config, name) not in allowed
    ]
    if problems:
        raise UsageError("generate: " + "; ".join(problems))


def resolve(config: Any, extras: Mapping[str, Any]) -> Options:
    """Turn a complete GenerationConfig, and what goes beyond it, into :class:`Options`."""
    eos = config.eos_token_id
    eos = () if eos is None else token_ids("eos_token_id", _plain(eos))
    pad = _plain(config.pad_token_id)
    if pad is None and eos:
        pad = eos[0]
    forced = _own("forced_decoder_ids", config, extras)
    values = {
        "do_sample": bool(config.do_sample),
        "pad_token_id": pad,
        "eos_token_id": eos,
        "forced_eos_token_id": _tokens("forced_eos_token_id", config),
        "suppress_tokens": _tokens("suppress_tokens", config),
        "begin_suppress_tokens": _tokens("begin_suppress_tokens", config),
        "bad_words_ids": _bad_words(config.bad_words_ids, eos),
        "sequence_bias": _bias(config.sequence_bias),
        "forced_decoder_ids": tuple(map(tuple, forced)) if forced else None,
        "exponential_decay_length_penalty": _pair(config.exponential_decay_length_penalty),
        "min_new_tokens": config.min_new_tokens or 0,
        "has_min_length": bool(config.min_length),
        "length_penalty_type": _own("length_penalty_type", config, extras) or "transformers",
        "stop_token_sequences": _sequences(extras.get("stop_token_sequences")),
    }
    for field in dataclasses.fields(Options):
        if field.name not in values:
            value = _plain(getattr(config, field.name))
            values[field.name] = field.default if value is None else value
    return Options(**_neutral(values))


def _own(name: str, config: Any, extras: Mapping[str, Any]) -> Any:
    """Return an option that GenerationConfig lacks: from the call, or a file that has it anyway."""
    return extras.get(name, getattr(config, name, None))


def _neutral(values: dict[str, Any]) -> dict[str, Any]:
    """Turn values that change nothing into ``None``, so that nothing is compiled for them."""
    nothing = {
        "temperature": 1, "top_k": 0, "top_p": 1, "typical_p": 1, "epsilon_cutoff": 0,
        "eta_cutoff": 0, "repetition_penalty": 1, "encoder_repetition_penalty": 1,
    }  # fmt: skip
    neutral = {name: None for name, value in nothing.items() if values[name] == value}
    if not values["do_sample"]:
        warpers = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p")
        neutral |= dict.fromkeys((*warpers, "epsilon_cutoff", "eta_cutoff"))
    return {**values, **neutral}


def _plain(value: Any) -> Any:
    """Turn NumPy and JAX scalars and arrays into Python's numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _tokens(name: str, config: Any) -> Tokens | None:
    value = _plain(getattr(config, name))
    return None if value is None else token_ids(name, value)


def _pair(value: Any) -> tuple[int, float] | None:
    return None if value is None else (int(value[0]), float(value[1]))


def _bad_words(words: Any, eos: Tokens) -> tuple[Tokens, ...] | None:
    from hfseq.generation.logits_process import FlaxNoBadWordsLogitsProcessor

    if words is None:
        return None
    return tuple(FlaxNoBadWordsLogitsProcessor(words, eos).sequence_bias)


def _bias(bias: Any) -> tuple[tuple[Tokens, float], ...] | None:
    from hfseq.generation.logits_process import FlaxSequenceBiasLogitsProcessor

    if bias is None:
        return None
    return tuple(FlaxSequenceBiasLogitsProcessor(bias).sequence_bias.items())


def _sequences(sequences: Any) -> tuple[Tokens, ...]:
    if sequences is None:
        return ()
    rows = list(sequences) if isinstance(sequences, (list, tuple)) else []
    if not rows or any(not isinstance(row, (list, tuple)) or not row for row in rows):
        raise UsageError(
            f"stop_token_sequences={sequences!r} has to be a list of non-empty lists of token ids, "
            "such as [[13], [198, 198]]"
        )
    return tuple(token_ids("stop_token_sequences", tuple(row)) for row in rows)


Criterion = Callable[[jax.Array, Any], jax.Array]


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
    processors: tuple[Any, ...] = ()
    criteria: tuple[Criterion, ...] = ()

    @property
    def pad(self) -> int:
        """What fills rows after their end; never seen where nothing ends a row early."""
        return 0 if self.options.pad_token_id is None else self.options.pad_token_id

    def key(self) -> Any:
        """Return what tells plans apart: processors of equal type and settings are equal."""
        parts = tuple(_freeze(part) for part in (*self.processors, *self.criteria))
        count = len(self.processors)
        return self.options, self.buffer, self.steps, self.encoder_decoder, count, parts


class Operands(NamedTuple):
    """The arrays that a program is called with.

    ``prompt`` and ``mask`` are (batch, prefill width), of which ``prompt_length`` columns are real;
    ``encoder`` holds the arguments of ``encode``, or ``encoder_outputs`` made by the caller;
    ``extra`` the model's collections.
    """

    params: Any
    prompt: Any
    mask: Any
    key: Any
    prompt_length: Any
    stop_length: Any
    min_length: Any
    encoder: dict[str, Any]
    encoder_outputs: Any
    encoder_length: Any
    model_kwargs: dict[str, Any]
    extra: dict[str, Any]

    def source(self) -> tuple[Any, Any]:
        """Return the tokens that were put in and how many columns of them are real."""
        if "input_ids" in self.encoder:
            return self.encoder["input_ids"], self.encoder_length
        return self.prompt, self.prompt_length


def _freeze(part: Any) -> Any:
    """Return a hashable stand-in for a processor or criterion; functions stand for themselves."""
    if not isinstance(part, FlaxLogitsProcessor):
        return part
    try:
        key = type(part), tuple((name, _frozen(value)) for name, value in vars(part).items())
        hash(key)
    except TypeError:  # an attribute that is not a plain value, or a tracer
        return part
    return key


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.shape, np.asarray(value).tobytes()
    return value


Processor = Callable[[jax.Array, jax.Array, Any], jax.Array]


def build_processors(
    options: Options, operands: Operands, user: Sequence[Processor]
) -> list[Processor]:
    """Return the processors of a run, without warpers: those of the options, then the user's.

    The lengths in ``operands`` may be traced. UsageError if the user passes one of a type that the
    options make already.
    """
    made = [*_biases(options), *_repetition(options, operands), *_lengths(options, operands)]
    made += _cleaning(options, operands)
    types = {type(processor) for processor in made}
    for processor in user:
        if type(processor) in types:
            raise UsageError(
                f"A custom logits processor of type {type(processor).__name__} was passed to "
                "`generate`, but the options make one already: drop the processor or the option"
            )
    return [*made, *user]


def build_warpers(options: Options) -> list[Processor]:
    """Return what comes after them: the warpers of sampling, and the normalisation."""
    last = [p.FlaxLogitNormalization()] if options.renormalize_logits else []
    return [*_warpers(options), *last] if options.do_sample else [*last]


def _warpers(options: Options) -> list[Processor]:
    keep: dict[str, Any] = {"min_tokens_to_keep": 1}
    if options.num_beams > 1:  # at least one token beside the ends must stay
        keep = {"min_tokens_to_keep": len(options.eos_token_id) + 1 if options.eos_token_id else 2}
    makers: list[tuple[Any, Callable[[Any], Any]]] = [
        (options.temperature, p.FlaxTemperatureLogitsWarper),
        (options.top_h, p.FlaxTopHLogitsWarper),
        (options.top_k, lambda k: p.FlaxTopKLogitsWarper(k, **keep)),
        (options.top_p, lambda mass: p.FlaxTopPLogitsWarper(mass, **keep)),
        (options.min_p, lambda part: p.FlaxMinPLogitsWarper(part, **keep)),
        (options.typical_p, lambda mass: p.FlaxTypicalLogitsWarper(mass, **keep)),
        (options.epsilon_cutoff, lambda least: p.FlaxEpsilonLogitsWarper(least, **keep)),
        (options.eta_cutoff, lambda least: p.FlaxEtaLogitsWarper(least, **keep)),
    ]
    return [make(value) for value, make in makers if value is not None]


def _biases(options: Options) -> list[Processor]:
    bias = options.sequence_bias
    return [] if bias is None else [p.FlaxSequenceBiasLogitsProcessor(dict(bias))]


def _repetition(options: Options, operands: Operands) -> list[Processor]:
    made: list[Processor] = []
    source, length = operands.source()
    if options.encoder_repetition_penalty is not None:
        penalty = options.encoder_repetition_penalty
        made.append(p.FlaxEncoderRepetitionPenaltyLogitsProcessor(penalty, source, length))
    if options.repetition_penalty is not None:
        ignored = None
        if operands.mask is not None:
            ignored = jnp.repeat(jnp.argmax(operands.mask != 0, axis=1), options.rows_per_input)
        made.append(p.FlaxRepetitionPenaltyLogitsProcessor(options.repetition_penalty, ignored))
    if options.no_repeat_ngram_size:
        made.append(p.FlaxNoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size))
    if options.encoder_no_repeat_ngram_size:
        size = options.encoder_no_repeat_ngram_size
        made.append(p.FlaxEncoderNoRepeatNGramLogitsProcessor(size, source, length))
    return made


def _lengths(options: Options, operands: Operands) -> list[Processor]:
    made: list[Processor] = []
    eos = options.eos_token_id
    if options.bad_words_ids:
        made.append(p.FlaxNoBadWordsLogitsProcessor(list(options.bad_words_ids), eos or None))
    if options.has_min_length and eos:
        made.append(p.FlaxMinLengthLogitsProcessor(operands.min_length, eos))
    if options.min_new_tokens and eos:
        new, prompt = options.min_new_tokens, operands.prompt_length
        made.append(p.FlaxMinNewTokensLengthLogitsProcessor(prompt, new, eos))
    if options.forced_bos_token_id is not None:
        made.append(p.FlaxForcedBOSTokenLogitsProcessor(options.forced_bos_token_id))
    if options.forced_eos_token_id is not None:
        stop, forced = operands.stop_length, options.forced_eos_token_id
        made.append(p.FlaxForcedEOSTokenLogitsProcessor(stop, forced))
    return made


def _cleaning(options: Options, operands: Operands) -> list[Processor]:
    made: list[Processor] = []
    prompt = operands.prompt_length
    if options.remove_invalid_values:
        made.append(p.FlaxInfNanRemoveLogitsProcessor())
    if options.exponential_decay_length_penalty is not None:
        decay = options.exponential_decay_length_penalty
        made.append(p.FlaxExponentialDecayLengthPenalty(decay, options.eos_token_id, prompt))
    if options.suppress_tokens is not None:
        made.append(p.FlaxSuppressTokensLogitsProcessor(options.suppress_tokens))
    if options.begin_suppress_tokens is not None:
        begin = prompt
        if options.forced_bos_token_id is not None:
            begin = prompt + jnp.where(prompt > 1, 0, 1)
        if options.forced_decoder_ids:
            begin = begin + options.forced_decoder_ids[-1][0]
        tokens = options.begin_suppress_tokens
        made.append(p.FlaxSuppressTokensAtBeginLogitsProcessor(tokens, begin))
    if options.forced_decoder_ids:
        offset = prompt - 1
        made.append(p.FlaxForceTokensLogitsProcessor(options.forced_decoder_ids, offset))
    return made


#: How the score of a beam depends on its length: length ** penalty, ((5 + length) / 6) ** penalty.
LENGTH_PENALTIES = ("transformers", "gnmt")


#: Arguments of a model's call that ``generate`` sets itself.
_OWN = {
    "self", "params", "train", "dropout_rng", "return_dict", "output_attentions", "extra",
    "output_hidden_states", "past_key_values", "input_ids", "kwargs", "inputs", "args",
}  # fmt: skip


def check_class(model: Any) -> None:
    """Raise TypeError for a class without a head, naming those that have one."""
    if model.can_generate():
        return
    architectures, model_type = plugins.load().architectures, model.config.model_type
    heads = architectures.get(model_type).heads if model_type in architectures else {}
    tasks = ("ForCausalLM", "ForSeq2SeqLM")
    names = sorted({target_name(heads[task]) for task in tasks if task in heads})
    hint = f" Please use one of the following classes instead: {', '.join(names)}" if names else ""
    raise TypeError(
        f"The current model class ({type(model).__name__}) is not compatible with `.generate()`, "
        f"as it doesn't have a language model head.{hint}"
    )


def check_arguments(model: Any, inputs: dict[str, Any], encoder_decoder: bool) -> None:
    """Refuse arguments that neither an option nor the model knows, all at once."""
    refused = [f"{name}: {NO_ARGUMENTS[name]}" for name in inputs if name in NO_ARGUMENTS]
    if refused:
        raise UsageError(f"generate does not support {'; '.join(refused)}")
    known = _inputs(model.prepare_inputs_for_generation)
    if encoder_decoder:
        known |= {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs"}
        known |= _inputs(model.encode)
    known = known - _OWN - {"max_length"}
    unknown = [name for name in inputs if name not in known]
    if unknown:
        from transformers import GenerationConfig

        options = [*known, *vars(GenerationConfig())]
        raise UsageError(
            f"The following `model_kwargs` are not used by the model: {unknown} (note: typos in "
            f"the generate arguments will also show up in this list){nearest(unknown[0], options)}"
        )


def _inputs(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def check_options(options: Options, vocab_size: int) -> None:
    """Refuse values and combinations that cannot work, all at once."""
    problems = [*_counts(options, vocab_size), *_length_penalty(options), *_numbers(options)]
    problems += _token_problems(options, vocab_size)
    if problems:
        raise UsageError("generate: " + "; ".join(problems))


def _counts(options: Options, vocab_size: int) -> list[str]:
    beams, wanted = options.num_beams, options.num_return_sequences
    for name, value in (("num_beams", beams), ("num_return_sequences", wanted)):
        if not isinstance(value, int) or value < 1:
            return [f"{name}={value!r} has to be a positive integer"]
    problems = []
    if beams > vocab_size:
        problems.append(
            f"num_beams={beams} is more than the vocabulary's {vocab_size} tokens: there are not "
            "so many first tokens; lower num_beams"
        )
    ends = max(2, 1 + len(options.eos_token_id))
    if beams > 1 and ends * beams > beams * vocab_size:
        problems.append(f"the vocabulary of {vocab_size} is too small for beam search")
    if beams > 1 and wanted > beams:
        problems.append(
            f"num_return_sequences={wanted} is more than num_beams={beams}: raise num_beams"
        )
    if beams == 1 and wanted > 1 and not options.do_sample:
        problems.append(
            f"num_return_sequences={wanted} needs do_sample=True or num_beams>={wanted}: greedy "
            "search finds only one"
        )
    return problems


def _length_penalty(options: Options) -> list[str]:
    kind, penalty = options.length_penalty_type, options.length_penalty
    problems = []
    if kind not in LENGTH_PENALTIES:
        known = " or ".join(f'"{name}"' for name in LENGTH_PENALTIES)
        problems.append(f"length_penalty_type={kind!r} has to be {known}")
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)):
        problems.append(f"length_penalty={penalty!r} has to be a number")
    return problems


def _positive_float(value: Any) -> bool:
    return isinstance(value, float) and value > 0


def _natural(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


_PART = (lambda value: 0 < value <= 1, "above 0 and at most 1")


_CUTOFF = (lambda value: 0 < value < 1, "between 0 and 1")


_PENALTY = (_positive_float, "a float above 0")


_SIZE = (_natural, "0 (off) or a positive integer")


#: What the numbers of the options have to be.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_positive_float, "a float above 0; for greedy search set do_sample=False"),
    "top_k": _SIZE,
    "top_p": _PART,
    "top_h": _PART,
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "typical_p": _PART,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "repetition_penalty": _PENALTY,
    "encoder_repetition_penalty": _PENALTY,
    "no_repeat_ngram_size": _SIZE,
    "encoder_no_repeat_ngram_size": _SIZE,
}


def _numbers(options: Options) -> list[str]:
    values = {name: getattr(options, name) for name in RULES}
    return [
        f"{name}={value!r} has to be {RULES[name][1]}"
        for name, value in values.items()
        if value is not None and not _is_right(name, value)
    ]


def _is_right(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and RULES[name][0](value)


def _token_problems(options: Options, vocab_size: int) -> list[str]:
    problems = []
    ids = {"forced_bos_token_id": options.forced_bos_token_id}
    if options.stop_token_sequences or any(token < vocab_size for token in options.eos_token_id):
        ids["pad_token_id"] = options.pad_token_id  # rows that end are filled up with it
    for name, token in ids.items():
        if token is not None and token >= vocab_size:
            problems.append(f"{name}={token} is outside of the vocabulary of {vocab_size}")
    if options.exponential_decay_length_penalty is not None and not options.eos_token_id:
        problems.append("exponential_decay_length_penalty needs eos_token_id: pass one")
    return problems

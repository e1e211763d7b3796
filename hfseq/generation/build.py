"""From options to processors, in PyTorch's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError
from hfseq.generation import processors as p
from hfseq.generation.options import Options
from hfseq.generation.plan import Operands

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

"""What ``generate`` refuses: unknown arguments, and options that contradict each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hfseq import plugins
from hfseq.errors import UsageError, nearest
from hfseq.generation.options import NO_ARGUMENTS, Options
from hfseq.registry import target_name

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
    problems += _tokens(options, vocab_size)
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


def _tokens(options: Options, vocab_size: int) -> list[str]:
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

"""From ``GenerationConfig`` and keyword arguments to one checked, hashable set of options."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from hfseq.errors import UsageError
from hfseq.generation.processors.base import token_ids

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
    from hfseq.generation.processors import FlaxNoBadWordsLogitsProcessor

    if words is None:
        return None
    return tuple(FlaxNoBadWordsLogitsProcessor(words, eos).sequence_bias)


def _bias(bias: Any) -> tuple[tuple[Tokens, float], ...] | None:
    from hfseq.generation.processors import FlaxSequenceBiasLogitsProcessor

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

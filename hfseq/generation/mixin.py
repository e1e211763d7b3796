"""``generate`` of every model with a language-modelling head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.checks import check_class
from hfseq.generation.compaction import can_compact, run_compacted
from hfseq.generation.programs import run, run_compiled, run_eagerly, search, steps
from hfseq.generation.requests import Request, make_request


class FlaxGenerationMixin:
    """Adds ``generate`` to models that prepare and update inputs for generation."""

    def generate(
        self,
        input_ids: Any = None,
        generation_config: Any = None,
        prng_key: Any = None,
        trace: bool = True,
        params: Any = None,
        logits_processor: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Continue a batch of prompts, or write the output of an encoder-decoder.

        ``input_ids`` (batch, length) are prompts, or the input of the encoder. Options are those
        of ``generation_config`` (``transformers.GenerationConfig``), and each may be given as a
        keyword; ``attention_mask`` (batch, length) hides padding, on whichever side it is;
        ``prng_key`` is a key or a seed; ``trace=False`` runs the loop in Python, for debugging;
        ``logits_processor`` and ``stopping_criteria`` are lists of traceable functions
        ``(input_ids, scores, cur_len)`` and ``(input_ids, cur_len)``; ``streamer`` gets tokens as
        they come; ``compact_finished=True`` keeps finished rows out of the work of greedy and beam
        search; ``extra`` are collections to use instead of the model's own. Returns
        :class:`FlaxGreedySearchOutput`, :class:`FlaxSampleOutput` or :class:`FlaxBeamSearchOutput`,
        whose ``sequences`` are padded to ``max_length``. The loop is compiled once for a bucket of
        lengths; under ``jax.jit`` and ``pmap`` it is traced.

        **Raises:** TypeError for a class without a head; UsageError (a ValueError) for unknown or
        contradictory options and inputs that cannot be continued, saying what would work.
        """
        check_class(self)
        request = make_request(
            self, input_ids, generation_config, prng_key, params, logits_processor, kwargs
        )
        if request.streamer is not None:
            return self._stream_to(request)
        if not trace:
            return _cut(run_eagerly(self, request.plan, request.operands), request)
        if request.static:
            return run(self, request.plan, request.operands)
        plan, operands = request.plan, request.operands
        compact = request.compact and can_compact(plan, operands)
        return _cut((run_compacted if compact else run_compiled)(self, plan, operands), request)

    def stream_generate(
        self,
        input_ids: Any = None,
        generation_config: Any = None,
        prng_key: Any = None,
        params: Any = None,
        logits_processor: Any = None,
        **kwargs: Any,
    ) -> Iterator[np.ndarray]:
        """Yield the tokens (batch,) of each step as soon as they are known.

        Arguments are those of :meth:`generate`; rows that have ended yield ``pad_token_id``. The
        tokens are the same that :meth:`generate` returns.
        """
        check_class(self)
        request = make_request(
            self, input_ids, generation_config, prng_key, params, logits_processor, kwargs
        )
        _check_streaming(request)
        return (tokens for tokens, _ in steps(self, request.plan, request.operands))

    def _stream_to(self, request: Request) -> Any:
        _check_streaming(request)
        plan, operands = request.plan, request.operands
        prompt = np.asarray(operands.prompt)[:, : request.lengths.prompt]
        request.streamer.put(np.repeat(prompt, plan.options.rows_per_input, axis=0))
        state: Any = None
        for tokens, new in steps(self, plan, operands):
            request.streamer.put(tokens)
            state = new
        request.streamer.end()
        return _cut(search(self, plan, operands).result(state), request)

    def _adapt_logits_for_beam_search(self, logits: jax.Array) -> jax.Array:
        """Change logits before beam search scores them; for subclasses."""
        return logits


class CausalGeneration:
    """The first and the next step of generation, for decoders with a language-modelling head."""

    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, max_length: int, attention_mask: Any = None
    ) -> dict[str, Any]:
        """Return the keyword arguments of the first call; the cache holds ``max_length`` tokens.

        ``input_ids`` and ``attention_mask`` are (batch, length).
        """
        batch, length = input_ids.shape
        mask = jnp.ones((batch, max_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        if attention_mask is not None:
            given = jnp.asarray(attention_mask, jnp.int32)
            mask = jax.lax.dynamic_update_slice(mask, given, (0, 0))
            positions = jnp.maximum(given.cumsum(-1) - 1, 0)
        return {
            "past_key_values": self.init_cache(batch, max_length),
            "attention_mask": mask,
            "position_ids": positions,
        }

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments of the next call: the new cache, one position further on."""
        return {
            **model_kwargs,
            "past_key_values": model_outputs.past_key_values,
            "position_ids": model_kwargs["position_ids"][:, -1:] + 1,
        }


class FixedStateGeneration:
    """The first and the next step of generation, for models whose cache is a fixed-size state.

    Nothing that they carry from step to step is as wide as the text is long.
    """

    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, max_length: int, attention_mask: Any = None
    ) -> dict[str, Any]:
        """Return the keyword arguments of the first call, which reads ``input_ids`` into the state.

        ``input_ids`` and ``attention_mask`` are (batch, length).
        """
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        return {
            "past_key_values": self.init_cache(input_ids.shape[0], max_length),
            "attention_mask": jnp.asarray(mask, jnp.int32),
        }

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments of the next call, which reads one real token a row."""
        rows = model_kwargs["attention_mask"].shape[0]
        return {
            **model_kwargs,
            "past_key_values": model_outputs.past_key_values,
            "attention_mask": jnp.ones((rows, 1), jnp.int32),
        }


def _check_streaming(request: Request) -> None:
    if request.plan.options.num_beams > 1:
        raise UsageError(
            f"generate: a streamer cannot follow num_beams={request.plan.options.num_beams}: beams "
            "change what was written; set num_beams=1"
        )
    if request.static:
        raise UsageError("generate: streaming needs arrays, not tracers: call it outside of jit")


def _cut(output: Any, request: Request) -> Any:
    """Cut what the buckets added."""
    sequences = output.sequences
    if sequences.shape[1] > request.lengths.stop:
        # On the host: a slice on the device would be compiled for every length.
        sequences = jax.device_put(np.asarray(sequences)[:, : request.lengths.stop])
    new = request.lengths.stop - request.lengths.prompt
    changes = {"sequences": sequences}
    for name in ("scores", "logits", "step_scores"):
        if getattr(output, name, None) is not None and getattr(output, name).ndim == 3:
            changes[name] = getattr(output, name)[:new]
    if getattr(output, "beam_indices", None) is not None:
        changes["beam_indices"] = output.beam_indices[:, :new]
    return output.replace(**changes)

"""Beam search, with and without sampling, by the rules of PyTorch's ``generate``."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.generation.logits_process import FlaxLogitsProcessor, Length
from hfseq.generation.options import Operands, Options, Plan
from hfseq.generation.search import (
    FlaxBeamSearchOutput,
    GenerativeModel,
    Search,
    empty_record_buffers,
    ended_rows,
    record_step,
    row_keys,
    sample_without_replacement,
    take_column,
)
from hfseq.nn import cpu, kv_cache

#: Added to the score of a beam that must not be chosen.
NEVER = -1.0e9


class Beams(NamedTuple):
    """``num_beams`` hypotheses of each row: (batch, beams, …). ``parents`` only if recorded."""

    sequences: jax.Array
    scores: jax.Array
    parents: jax.Array


class BeamState(NamedTuple):
    """Running and finished beams; ``improvable`` (batch, 1): could running ones still win?"""

    length: jax.Array
    running: Beams
    finished: Beams
    is_finished: jax.Array
    improvable: jax.Array
    all_ended: jax.Array
    inputs: dict[str, Any]
    recorded: dict[str, jax.Array]


class Candidates(NamedTuple):
    """The best continuations, (batch, candidates): score, parent beam, token, does it end?"""

    scores: jax.Array
    beams: jax.Array
    tokens: jax.Array
    ended: jax.Array


class BeamSearch(Search):
    """Keeps ``num_beams`` hypotheses a row, extends them, and collects those that end."""

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        super().__init__(model, plan, operands)
        self.options = plan.options
        self.processors += plan.options.warpers()
        self.beams, self.batch = plan.options.num_beams, operands.prompt.shape[0]
        # So many that num_beams of them go on even if all others end.
        self.candidates = max(2, 1 + len(plan.options.eos_token_id)) * self.beams
        self.norms = jnp.asarray(length_norms(plan.options, plan.buffer + 1))
        self.keeps_parents = plan.options.output_scores or plan.options.output_logits

    def begin(self) -> BeamState:
        """Return the state before the first token: only the first beam of each row counts."""
        rows = self.rows()
        sequences = rows.reshape(self.batch, self.beams, -1)
        words = self.model.vocab_size("decoder_input_ids")
        width = self.plan.buffer if self.keeps_parents else 0
        parents = jnp.full((self.batch, self.beams, width), -1, jnp.int32)
        first = jnp.where(jnp.arange(self.beams) == 0, 0.0, NEVER)
        scores = jnp.broadcast_to(first, (self.batch, self.beams)).astype(jnp.float32)
        return BeamState(
            length=jnp.asarray(self.operands.prompt_length, jnp.int32),
            running=Beams(sequences, scores, parents),
            finished=Beams(sequences, jnp.full_like(scores, NEVER), parents),
            is_finished=jnp.zeros((self.batch, self.beams), bool),
            improvable=jnp.ones((self.batch, 1), bool),
            all_ended=jnp.zeros((), bool),
            inputs=self.first_inputs(),
            recorded=empty_record_buffers(self.plan, len(rows), words),
        )

    def unfinished(self, state: BeamState) -> jax.Array:
        """Tell whether a better result is possible."""
        improvable = state.improvable.any()
        if self.options.early_stopping is True:
            improvable &= ~state.is_finished.all()
        return improvable & ~state.all_ended

    def done(self, state: BeamState) -> jax.Array:
        """Tell for each row of the input (batch,) that nothing will change its best beams."""
        done = ~state.improvable[:, 0]
        return done | state.is_finished.all(-1) if self.options.early_stopping is True else done

    def advance(self, state: BeamState) -> BeamState:
        """Add one token to every running beam and move those that end to the finished ones."""
        step = state.length - self.operands.prompt_length
        scores, maxima, inputs, recorded = self._score(state, step)
        found = self._candidates(state, scores, maxima, step)
        running, parents = self._continue(state, found, step)
        rows = (jnp.arange(self.batch)[:, None] * self.beams + parents).reshape(-1)
        inputs |= {"past_key_values": kv_cache.reorder(inputs["past_key_values"], rows)}
        finished, is_finished = self._finish(state, found, step)
        improvable = state.improvable & self._can_improve(running, finished, is_finished, step + 1)
        ended = found.ended.all()
        return BeamState(
            state.length + 1, running, finished, is_finished, improvable, ended, inputs, recorded
        )

    def result(self, state: BeamState) -> FlaxBeamSearchOutput:
        """Return the best beams; sequences still have the width of the buffer."""
        best = self.options.num_return_sequences
        kept = jax.tree.map(
            lambda leaf: leaf[:, :best].reshape(self.batch * best, *leaf.shape[2:]), state.finished
        )
        return FlaxBeamSearchOutput(
            sequences=kept.sequences,
            scores=kept.scores,
            sequences_scores=kept.scores,
            step_scores=state.recorded.get("scores"),
            logits=state.recorded.get("logits"),
            beam_indices=kept.parents if self.keeps_parents else None,
        )

    def _score(
        self, state: BeamState, step: Length
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any], dict[str, jax.Array]]:
        """Return processed log-probabilities (rows, vocabulary) of the next tokens.

        With them the maxima of their blocks, if of use, the model's inputs and what is recorded.
        """
        flat = state.running.sequences.reshape(self.batch * self.beams, -1)
        logits, inputs = self.next_logits(take_column(flat, state.length - 1), state.inputs)
        logits = self.model._adapt_logits_for_beam_search(logits)
        width = None if self.options.do_sample else cpu.block_width(logits.shape[-1])
        maxima = None
        if width is None:
            scores = jax.nn.log_softmax(logits, axis=-1)
        else:
            top, mass, maxima = cpu.log_softmax_parts(logits, width)
            scores, maxima = logits - top - mass, maxima - top - mass
        for processor in self.processors:
            scores = processor(flat, scores, state.length)
        if width is not None and maxima is not None:
            changed = cpu.changed_blocks(self.processors, scores.shape[-1], width)
            if changed is None:
                maxima = cpu.block_maxima(scores, width)
            else:
                known = cast(list[FlaxLogitsProcessor], self.processors)  # else nothing is known
                maxima = cpu.update_block_maxima(known, maxima, scores, state.length, changed)
        recorded = record_step(state.recorded, step, scores=scores, logits=logits)
        return scores, maxima, inputs, recorded

    def _candidates(
        self, state: BeamState, scores: jax.Array, maxima: jax.Array | None, step: Length
    ) -> Candidates:
        vocab = scores.shape[-1]

        def totals(scores: jax.Array) -> jax.Array:
            apart = scores.reshape(self.batch, self.beams, -1) + state.running.scores[..., None]
            return apart.reshape(self.batch, -1)

        total = totals(scores)
        if self.options.do_sample:
            keys = row_keys(self.operands.key, self.batch, step)
            best, places = sample_without_replacement(keys, total, self.candidates)
        elif maxima is None:
            best, places = jax.lax.top_k(total, self.candidates)
        else:
            best, places = cpu.top_k(total, self.candidates, totals(maxima))
        beams, tokens = places // vocab, (places % vocab).astype(jnp.int32)
        length = state.length + 1
        if self.plan.criteria or self.options.stop_token_sequences:
            sequences = _write(_pick(state.running.sequences, beams), tokens, state.length)
            flat = sequences.reshape(-1, sequences.shape[-1])
            ended = ended_rows(self.plan, flat, tokens.reshape(-1), length).reshape(tokens.shape)
        else:
            ended = ended_rows(self.plan, tokens, tokens, length)
        ended |= length >= self.operands.stop_length
        return Candidates(best, beams, tokens, ended)

    def _continue(
        self, state: BeamState, found: Candidates, step: Length
    ) -> tuple[Beams, jax.Array]:
        """Return the best beams that do not end, and the beams that they continue."""
        scores, order = jax.lax.top_k(found.scores + found.ended * NEVER, self.beams)
        parents, tokens = _pick(found.beams, order), _pick(found.tokens, order)
        sequences = _write(_pick(state.running.sequences, parents), tokens, state.length)
        history = state.running.parents
        if self.keeps_parents:  # append the rows that were continued
            rows = (jnp.arange(self.batch)[:, None] * self.beams + parents).astype(jnp.int32)
            history = _write(_pick(history, parents), rows, step)
        return Beams(sequences, scores, history), parents

    def _finish(self, state: BeamState, found: Candidates, step: Length) -> tuple[Beams, jax.Array]:
        """Merge what just ended with what had ended, and keep the best."""
        top = jnp.arange(self.candidates) < self.beams
        ended = found.ended & top
        scores = found.scores / self.norms[step + 1]
        full = state.is_finished.all(-1, keepdims=True) & (self.options.early_stopping is True)
        # One after the other, as PyTorch adds them: sums of float32 depend on the order.
        scores = scores + full * NEVER
        scores = scores + ~state.improvable * NEVER
        scores = scores + ~ended * NEVER
        merged = jnp.concatenate([state.finished.scores, scores], axis=1)
        scores, order = jax.lax.top_k(merged, self.beams)
        new = order >= self.beams
        parents, tokens = (
            _pick(jnp.pad(part, ((0, 0), (self.beams, 0))), order)
            for part in (found.beams, found.tokens)
        )
        places = jnp.where(new, self.beams + parents, order)

        def merge(old: jax.Array, running: jax.Array) -> jax.Array:
            return _pick(jnp.concatenate([old, running], axis=1), places)

        sequences = merge(state.finished.sequences, state.running.sequences)
        sequences = _write(sequences, tokens, state.length, new)
        history = merge(state.finished.parents, state.running.parents)
        if self.keeps_parents:
            rows = jnp.arange(self.batch)[:, None] * self.beams + parents
            history = _write(history, rows.astype(jnp.int32), step, new)
        is_finished = _pick(jnp.concatenate([state.is_finished, ended], axis=1), order)
        return Beams(sequences, scores, history), is_finished

    def _can_improve(
        self, running: Beams, finished: Beams, is_finished: jax.Array, new: Length
    ) -> jax.Array:
        """Tell where (batch, 1) the best running beam may still beat a finished one.

        By PyTorch's heuristic, or for certain with ``early_stopping="never"`` and in GNMT's search.
        ``new`` is the number of new tokens.
        """
        patient = self.options.early_stopping == "never"
        if self.options.length_penalty_type == "gnmt":
            patient = self.options.early_stopping is not True
        # Sums of log-probabilities only fall: divided by the largest norm they are a bound.
        longest = patient and self.options.length_penalty > 0
        place = self.operands.stop_length - self.operands.prompt_length if longest else new
        best = running.scores[:, :1] / self.norms[place]
        worst = jnp.where(is_finished, finished.scores.min(-1, keepdims=True), NEVER)
        return (best > worst).any(-1, keepdims=True)


def length_norms(options: Options, count: int) -> np.ndarray:
    """Return what the score of a beam with 0 to ``count`` - 1 new tokens is divided by, float32."""
    # Python's floats, rounded once, as PyTorch does: at half a unit in the last place less.
    lengths = np.maximum(np.arange(count, dtype=np.float64), 1)
    if options.length_penalty_type == "gnmt":
        lengths = (5 + lengths) / 6
    return (lengths**options.length_penalty).astype(np.float32)


def _pick(values: jax.Array, places: jax.Array) -> jax.Array:
    """Pick beams: ``values`` (batch, beams, …) at ``places`` (batch, picks)."""
    places = places.reshape(*places.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, places, axis=1)


def _write(
    sequences: jax.Array, tokens: jax.Array, place: Length, where: bool | jax.Array = True
) -> jax.Array:
    """Write ``tokens`` (batch, beams) into the column ``place``, in beams ``where`` it is True."""
    here = jnp.arange(sequences.shape[-1]) == place
    wanted = here & jnp.broadcast_to(where, tokens.shape)[..., None]
    return jnp.where(wanted, tokens[..., None], sequences)

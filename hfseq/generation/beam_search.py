"""Beam search, with and without sampling, with the same rules as PyTorch's ``generate``."""

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

#: Added to the score of a beam that must not be selected.
NEVER = -1.0e9


class Beams(NamedTuple):
    """``num_beams`` hypotheses of each input.

    Attributes:
        sequences: Token buffers, `(batch, num_beams, buffer)`.
        scores: Sums of log-probabilities, `(batch, num_beams)`. The scores of finished beams are
            divided by the length penalty.
        parents: For each step, the index of the beam that the hypothesis continued, `(batch,
            num_beams, buffer)`. The index counts all `batch * num_beams` beams. The last axis is
            empty if parents are not recorded.
    """

    sequences: jax.Array
    scores: jax.Array
    parents: jax.Array


class BeamState(NamedTuple):
    """The state of the search between two steps.

    Attributes:
        length: Number of filled columns.
        running: Hypotheses that can be extended.
        finished: The best hypotheses that have ended.
        is_finished: Which entries of ``finished`` are in use, `(batch, num_beams)`.
        improvable: Whether a running beam can still get a better score than the worst finished
            beam, `(batch, 1)`.
        all_ended: Whether all candidates of the last step ended.
        inputs: Keyword arguments of the next call of the model.
        recorded: Scores and logits of all steps, if they were requested.
    """

    length: jax.Array
    running: Beams
    finished: Beams
    is_finished: jax.Array
    improvable: jax.Array
    all_ended: jax.Array
    inputs: dict[str, Any]
    recorded: dict[str, jax.Array]


class Candidates(NamedTuple):
    """The best continuations in a step. All arrays have the shape `(batch, candidates)`.

    Attributes:
        scores: Sums of log-probabilities.
        beams: Index of the beam that is continued.
        tokens: The new token.
        ended: Whether the hypothesis ends with this token.
    """

    scores: jax.Array
    beams: jax.Array
    tokens: jax.Array
    ended: jax.Array


class BeamSearch(Search):
    """Extends the ``num_beams`` best hypotheses of each input and collects finished hypotheses."""

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        super().__init__(model, plan, operands)
        self.options = plan.options
        self.processors += plan.options.warpers()
        self.beams, self.batch = plan.options.num_beams, operands.prompt.shape[0]
        # With this many candidates, at least num_beams of them do not end with an end token.
        self.num_candidates = max(2, 1 + len(plan.options.eos_token_id)) * self.beams
        self.norms = jnp.asarray(length_norms(plan.options, plan.buffer + 1))
        self.keeps_parents = plan.options.output_scores or plan.options.output_logits

    def begin(self) -> BeamState:
        """Returns the state before the first token.

        All beams of an input are equal here, so all except the first get the score ``NEVER``.
        """
        rows = self.token_buffer()
        sequences = rows.reshape(self.batch, self.beams, -1)
        vocab_size = self.model.vocab_size("decoder_input_ids")
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
            recorded=empty_record_buffers(self.plan, len(rows), vocab_size),
        )

    def unfinished(self, state: BeamState) -> jax.Array:
        """Returns a boolean scalar: whether the search can still find a better result."""
        improvable = state.improvable.any()
        if self.options.early_stopping is True:
            improvable &= ~state.is_finished.all()
        return improvable & ~state.all_ended

    def done(self, state: BeamState) -> jax.Array:
        """Returns, for each input, whether its best beams are final, `(batch,)`."""
        is_done = ~state.improvable[:, 0]
        return (
            is_done | state.is_finished.all(-1) if self.options.early_stopping is True else is_done
        )

    def advance(self, state: BeamState) -> BeamState:
        """Adds one token to every running beam and collects the beams that end."""
        step = state.length - self.operands.prompt_length
        scores, maxima, inputs, recorded = self._score(state, step)
        candidates = self._candidates(state, scores, maxima, step)
        running, parents = self._continue(state, candidates, step)
        rows = (jnp.arange(self.batch)[:, None] * self.beams + parents).reshape(-1)
        inputs |= {"past_key_values": kv_cache.reorder(inputs["past_key_values"], rows)}
        finished, is_finished = self._finish(state, candidates, step)
        improvable = state.improvable & self._can_improve(running, finished, is_finished, step + 1)
        ended = candidates.ended.all()
        return BeamState(
            state.length + 1, running, finished, is_finished, improvable, ended, inputs, recorded
        )

    def result(self, state: BeamState) -> FlaxBeamSearchOutput:
        """Returns the best beams. Sequences still have the length of the token buffer."""
        num_returned = self.options.num_return_sequences
        finished = jax.tree.map(
            lambda leaf: leaf[:, :num_returned].reshape(self.batch * num_returned, *leaf.shape[2:]),
            state.finished,
        )
        return FlaxBeamSearchOutput(
            sequences=finished.sequences,
            scores=finished.scores,
            sequences_scores=finished.scores,
            step_scores=state.recorded.get("scores"),
            logits=state.recorded.get("logits"),
            beam_indices=finished.parents if self.keeps_parents else None,
        )

    def _score(
        self, state: BeamState, step: Length
    ) -> tuple[jax.Array, jax.Array | None, dict[str, Any], dict[str, jax.Array]]:
        """Scores the next tokens.

        Returns:
            A tuple with four entries:

            - The processed log-probabilities, `(rows, vocab_size)`.
            - The maxima of their blocks (:mod:`hfseq.nn.cpu`), or `None` if they are not used.
            - The next inputs of the model.
            - The recorded values.
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
                # For processors of other classes, changed_blocks would have returned None.
                processors = cast(list[FlaxLogitsProcessor], self.processors)
                maxima = cpu.update_block_maxima(processors, maxima, scores, state.length, changed)
        recorded = record_step(state.recorded, step, scores=scores, logits=logits)
        return scores, maxima, inputs, recorded

    def _candidates(
        self, state: BeamState, scores: jax.Array, maxima: jax.Array | None, step: Length
    ) -> Candidates:
        vocab = scores.shape[-1]

        def totals(scores: jax.Array) -> jax.Array:
            per_beam = scores.reshape(self.batch, self.beams, -1) + state.running.scores[..., None]
            return per_beam.reshape(self.batch, -1)

        total = totals(scores)
        if self.options.do_sample:
            keys = row_keys(self.operands.key, self.batch, step)
            best, indices = sample_without_replacement(keys, total, self.num_candidates)
        elif maxima is None:
            best, indices = jax.lax.top_k(total, self.num_candidates)
        else:
            best, indices = cpu.top_k(total, self.num_candidates, totals(maxima))
        beams, tokens = indices // vocab, (indices % vocab).astype(jnp.int32)
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
        self, state: BeamState, candidates: Candidates, step: Length
    ) -> tuple[Beams, jax.Array]:
        """Returns the best beams that do not end, and the indices of their parent beams."""
        scores, order = jax.lax.top_k(candidates.scores + candidates.ended * NEVER, self.beams)
        parents, tokens = _pick(candidates.beams, order), _pick(candidates.tokens, order)
        sequences = _write(_pick(state.running.sequences, parents), tokens, state.length)
        history = state.running.parents
        if self.keeps_parents:  # record which rows are continued
            rows = (jnp.arange(self.batch)[:, None] * self.beams + parents).astype(jnp.int32)
            history = _write(_pick(history, parents), rows, step)
        return Beams(sequences, scores, history), parents

    def _finish(
        self, state: BeamState, candidates: Candidates, step: Length
    ) -> tuple[Beams, jax.Array]:
        """Merges the beams that end in this step with the finished beams, and keeps the best."""
        top = jnp.arange(self.num_candidates) < self.beams
        ended = candidates.ended & top
        scores = candidates.scores / self.norms[step + 1]
        full = state.is_finished.all(-1, keepdims=True) & (self.options.early_stopping is True)
        # These are added one after the other as in PyTorch, because float32 sums depend on the
        # order.
        scores = scores + full * NEVER
        scores = scores + ~state.improvable * NEVER
        scores = scores + ~ended * NEVER
        merged = jnp.concatenate([state.finished.scores, scores], axis=1)
        scores, order = jax.lax.top_k(merged, self.beams)
        is_new = order >= self.beams
        parents, tokens = (
            _pick(jnp.pad(part, ((0, 0), (self.beams, 0))), order)
            for part in (candidates.beams, candidates.tokens)
        )
        indices = jnp.where(is_new, self.beams + parents, order)

        def merge(old: jax.Array, running: jax.Array) -> jax.Array:
            return _pick(jnp.concatenate([old, running], axis=1), indices)

        sequences = merge(state.finished.sequences, state.running.sequences)
        sequences = _write(sequences, tokens, state.length, is_new)
        history = merge(state.finished.parents, state.running.parents)
        if self.keeps_parents:
            rows = jnp.arange(self.batch)[:, None] * self.beams + parents
            history = _write(history, rows.astype(jnp.int32), step, is_new)
        is_finished = _pick(jnp.concatenate([state.is_finished, ended], axis=1), order)
        return Beams(sequences, scores, history), is_finished

    def _can_improve(
        self, running: Beams, finished: Beams, is_finished: jax.Array, num_new: Length
    ) -> jax.Array:
        """Returns whether the best running beam can still get better than the worst finished beam.

        By default the result comes from PyTorch's heuristic, which divides by the penalty of the
        current length. The result is exact with ``early_stopping="never"``. It is also exact with
        GNMT's length penalty, unless ``early_stopping`` is True.

        Args:
            running: The running beams.
            finished: The finished beams.
            is_finished: Which finished beams are in use, `(batch, num_beams)`.
            num_new: Number of new tokens.

        Returns:
            A boolean array, `(batch, 1)`.
        """
        patient = self.options.early_stopping == "never"
        if self.options.length_penalty_type == "gnmt":
            patient = self.options.early_stopping is not True
        # Sums of log-probabilities are negative and only decrease. So the current sum divided by
        # the largest penalty is an upper bound of all later scores.
        longest = patient and self.options.length_penalty > 0
        num_tokens = self.operands.stop_length - self.operands.prompt_length if longest else num_new
        best = running.scores[:, :1] / self.norms[num_tokens]
        worst = jnp.where(is_finished, finished.scores.min(-1, keepdims=True), NEVER)
        return (best > worst).any(-1, keepdims=True)


def length_norms(options: Options, count: int) -> np.ndarray:
    """Returns the length penalties, by which beam scores are divided, for each length.

    Args:
        options: Options with ``length_penalty`` and ``length_penalty_type``.
        count: Number of lengths.

    Returns:
        The penalties for 0 to ``count - 1`` new tokens, float32 `(count,)`.
    """
    # Compute in float64 and round once, as PyTorch does with Python floats.
    lengths = np.maximum(np.arange(count, dtype=np.float64), 1)
    if options.length_penalty_type == "gnmt":
        lengths = (5 + lengths) / 6
    return (lengths**options.length_penalty).astype(np.float32)


def _pick(values: jax.Array, indices: jax.Array) -> jax.Array:
    """Selects beams from ``values`` `(batch, beams, ...)` by ``indices`` `(batch, picks)`."""
    indices = indices.reshape(*indices.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, indices, axis=1)


def _write(
    sequences: jax.Array, tokens: jax.Array, column: Length, mask: bool | jax.Array = True
) -> jax.Array:
    """Writes ``tokens`` `(batch, beams)` into one column of the beams where ``mask`` is true."""
    is_column = jnp.arange(sequences.shape[-1]) == column
    is_written = is_column & jnp.broadcast_to(mask, tokens.shape)[..., None]
    return jnp.where(is_written, tokens[..., None], sequences)

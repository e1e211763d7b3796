"""Greedy search and sampling: one token a step for every row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hfseq.generation import blocks
from hfseq.generation.build import build_processors, build_warpers
from hfseq.generation.outputs import FlaxGreedySearchOutput, FlaxSampleOutput
from hfseq.generation.plan import Operands, Plan
from hfseq.generation.processors import FlaxTopKLogitsWarper
from hfseq.generation.processors.tokens import ends_with
from hfseq.generation.sampling import row_keys, sample, sample_top_k
from hfseq.generation.session import Session
from hfseq.nn.reductions import first_maximum


class SearchState(NamedTuple):
    """``length`` columns of ``sequences`` (rows, buffer) are filled; ``inputs`` the model's."""

    length: jax.Array
    sequences: jax.Array
    finished: jax.Array
    inputs: dict[str, Any]
    recorded: dict[str, jax.Array]


class TokenSearch:
    """Greedy search, or sampling where the options say so."""

    def __init__(self, model: Any, plan: Plan, operands: Operands):
        self.plan, self.operands = plan, operands
        self.session = Session(model, plan, operands)
        self.processors = build_processors(plan.options, operands, plan.processors)
        self.warpers = build_warpers(plan.options)
        self.late: list[Any] = []
        kinds = [type(warper) for warper in self.warpers]
        if FlaxTopKLogitsWarper in kinds and not plan.options.output_scores:
            # Those after top-k look at its candidates only.
            place = kinds.index(FlaxTopKLogitsWarper)
            self.warpers, self.late = self.warpers[:place], self.warpers[place:]

    def begin(self) -> SearchState:
        """Return the state before the first token."""
        sequences = self.session.rows()
        return SearchState(
            length=jnp.asarray(self.operands.prompt_length, jnp.int32),
            sequences=sequences,
            finished=jnp.zeros(len(sequences), bool),
            inputs=self.session.first_inputs(),
            recorded=empty_records(self.plan, len(sequences), self.session.model.config),
        )

    def unfinished(self, state: SearchState) -> jax.Array:
        """Tell whether a row still needs a token."""
        return (state.length < self.operands.stop_length) & ~state.finished.all()

    def done(self, state: SearchState) -> jax.Array:
        """Tell for each row (rows,) that nothing will change it."""
        return state.finished

    def advance(self, state: SearchState) -> SearchState:
        """Add one token to every row."""
        step = state.length - self.operands.prompt_length
        tokens = column(state.sequences, state.length - 1)
        logits, inputs = self.session.next_logits(tokens, state.inputs)
        scores = logits
        for processor in (*self.processors, *self.warpers):
            scores = processor(state.sequences, scores, state.length)
        chosen = self._choose(logits, scores, state.length)
        chosen = jnp.where(state.finished, self.plan.pad, chosen)
        sequences = jax.lax.dynamic_update_slice_in_dim(
            state.sequences, chosen[:, None], state.length, axis=1
        )
        length = state.length + 1
        finished = state.finished | ends(self.plan, sequences, chosen, length)
        recorded = record(state.recorded, step, scores=scores, logits=logits)
        return SearchState(length, sequences, finished, inputs, recorded)

    def result(self, state: SearchState) -> FlaxGreedySearchOutput | FlaxSampleOutput:
        """Return the output; sequences still have the width of the buffer."""
        kind = FlaxSampleOutput if self.plan.options.do_sample else FlaxGreedySearchOutput
        return kind(sequences=state.sequences, **state.recorded)

    def _choose(self, logits: jax.Array, scores: jax.Array, length: Any) -> jax.Array:
        """Return a token for each row by ``scores``, which are the processed ``logits``."""
        if not self.plan.options.do_sample:
            return self._best(logits, scores, length)
        keys = row_keys(self.operands.key, len(scores), length - self.operands.prompt_length)
        if not self.late:
            return sample(keys, scores)
        top_k, *warpers = self.late
        return sample_top_k(keys, scores, top_k.top_k, warpers)

    def _best(self, logits: jax.Array, scores: jax.Array, length: Any) -> jax.Array:
        width = blocks.block_width(scores.shape[-1])
        if width is None or self.warpers:
            return first_maximum(scores)
        changed = blocks.changed_blocks(self.processors, scores.shape[-1], width)
        if changed is None:
            return first_maximum(scores)
        before = blocks.block_maxima(logits, width)
        maxima = blocks.maxima_of_processed(self.processors, before, scores, length, changed)
        return blocks.first_best(scores, maxima)


def column(sequences: jax.Array, place: Any) -> jax.Array:
    """Return one column of ``sequences``."""
    return jax.lax.dynamic_slice_in_dim(sequences, place, 1, axis=1)[:, 0]


def ends(plan: Plan, sequences: jax.Array, tokens: jax.Array, length: Any) -> jax.Array:
    """Tell which rows end with the last of their ``length`` tokens."""
    finished = jnp.zeros(tokens.shape, bool)
    for token in plan.options.eos_token_id:
        finished |= tokens == token
    for stop in plan.options.stop_token_sequences:
        finished |= ends_with(sequences, length, jnp.asarray([stop], jnp.int32))[:, 0]
    for criterion in plan.criteria:
        finished |= jnp.broadcast_to(jnp.asarray(criterion(sequences, length), bool), tokens.shape)
    return finished


def empty_records(plan: Plan, rows: int, config: Any) -> dict[str, jax.Array]:
    """Return buffers (steps, rows, vocabulary) for the scores that the user wants to see."""
    options = plan.options
    wanted = {"scores": options.output_scores, "logits": options.output_logits}
    shape = (plan.steps, rows, config.vocab_size)
    return {name: jnp.zeros(shape, jnp.float32) for name, want in wanted.items() if want}


def record(buffers: dict[str, jax.Array], step: Any, **values: jax.Array) -> dict[str, jax.Array]:
    """Write the values of this step into those buffers that exist."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(buffer, values[name], step, axis=0)
        for name, buffer in buffers.items()
    }

"""``generate`` of every model with a language-modelling head: whole, stepwise, eager, compacted."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.beam_search import BeamSearch, BeamState
from hfseq.generation.options import Operands, Plan, Processor
from hfseq.generation.request import Request, TokenRows, make_request
from hfseq.generation.search import (
    FlaxBeamSearchOutput,
    FlaxGreedySearchOutput,
    GenerativeModel,
    SearchState,
    TokenSearch,
    pick_rows,
)
from hfseq.nn import kv_cache

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

Output = FlaxGreedySearchOutput | FlaxBeamSearchOutput
State = SearchState | BeamState
T = TypeVar("T")

#: Compiled programs that a model keeps; the oldest goes when there are more plans than this.
MAX_PROGRAMS = 64

#: Fewer sentences than this stay together: reading the weights takes all the time then.
SMALLEST_BATCH = 8


class FlaxGenerationMixin:
    """Adds ``generate`` to models that prepare and update inputs for generation."""

    def generate(
        self,
        input_ids: TokenRows | None = None,
        generation_config: GenerationConfig | None = None,
        prng_key: jax.Array | int | None = None,
        trace: bool = True,
        params: Mapping[str, Any] | None = None,
        logits_processor: Sequence[Processor] | Processor | None = None,
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
        model = cast(GenerativeModel, self)
        request = make_request(
            model, input_ids, generation_config, prng_key, params, logits_processor, kwargs
        )
        plan, operands = request.plan, request.operands
        if request.streamer is not None:
            _check_streaming(request)
            prompt = np.asarray(operands.prompt)[:, : request.lengths.prompt]
            request.streamer.put(np.repeat(prompt, plan.options.rows_per_input, axis=0))
            state: Any = None
            for tokens, new in run_steps(model, plan, operands):
                request.streamer.put(tokens)
                state = new
            request.streamer.end()
            return _trim_output(make_search(model, plan, operands).result(state), request)
        if not trace:  # each operation at once: a debugger can look at everything
            chosen = make_search(model, plan, operands)
            state = chosen.begin()
            while chosen.unfinished(state):
                state = chosen.advance(state)
            return _trim_output(chosen.result(state), request)
        if request.traced:
            return run_traced(model, plan, operands)
        # Rows may leave without chance, recorded steps and several devices.
        devices = getattr(getattr(operands.prompt, "sharding", None), "device_set", (None,))
        alone = not plan.options.do_sample and not plan.steps and len(devices) == 1
        compact = request.compact and alone
        return _trim_output(
            (run_compacted if compact else run_compiled)(model, plan, operands), request
        )

    def stream_generate(
        self,
        input_ids: TokenRows | None = None,
        generation_config: GenerationConfig | None = None,
        prng_key: jax.Array | int | None = None,
        params: Mapping[str, Any] | None = None,
        logits_processor: Sequence[Processor] | Processor | None = None,
        **kwargs: Any,
    ) -> Iterator[np.ndarray]:
        """Yield the tokens (batch,) of each step as soon as they are known.

        Arguments are those of :meth:`generate`; rows that have ended yield ``pad_token_id``. The
        tokens are the same that :meth:`generate` returns.
        """
        model = cast(GenerativeModel, self)
        request = make_request(
            model, input_ids, generation_config, prng_key, params, logits_processor, kwargs
        )
        _check_streaming(request)
        return (tokens for tokens, _ in run_steps(model, request.plan, request.operands))

    def _adapt_logits_for_beam_search(self, logits: jax.Array) -> jax.Array:
        """Change logits before beam search scores them; for subclasses."""
        return logits


def _check_streaming(request: Request) -> None:
    if request.plan.options.num_beams > 1:
        raise UsageError(
            f"generate: a streamer cannot follow num_beams={request.plan.options.num_beams}: beams "
            "change what was written; set num_beams=1"
        )
    if request.traced:
        raise UsageError("generate: streaming needs arrays, not tracers: call it outside of jit")


def _trim_output(output: Output, request: Request) -> Output:
    """Cut what the buckets added."""
    sequences, stop = output.sequences, request.lengths.stop
    if sequences is not None and sequences.shape[1] > stop:
        # On the host: a slice on the device would be compiled for every length.
        sequences = jax.device_put(np.asarray(sequences)[:, :stop])
    new, changes = stop - request.lengths.prompt, {"sequences": sequences}
    for name in ("scores", "logits", "step_scores"):
        if getattr(output.get(name), "ndim", 0) == 3:
            changes[name] = output.get(name)[:new]
    if "beam_indices" in output:
        changes["beam_indices"] = output["beam_indices"][:, :new]
    return output.replace(**changes)


# -- ways to run a search


def make_search(model: GenerativeModel, plan: Plan, operands: Operands) -> Any:
    """Return the search that the options ask for."""
    kind = BeamSearch if plan.options.num_beams > 1 else TokenSearch
    return kind(model, plan, operands)


def run_traced(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Search with one ``lax.while_loop``; everything is traced."""
    chosen = make_search(model, plan, operands)
    return chosen.result(jax.lax.while_loop(chosen.unfinished, chosen.advance, chosen.begin()))


def run_compiled(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Search with a program that is compiled once for a plan and the shapes of the operands."""
    return get_program(
        model, plan, "run", lambda: jax.jit(lambda operands: run_traced(model, plan, operands))
    )(operands)


def run_steps(
    model: GenerativeModel, plan: Plan, operands: Operands
) -> Iterator[tuple[np.ndarray, SearchState]]:
    """Search step by step: yield the new tokens (rows,) and the state after each step."""

    def begin(operands: Operands) -> SearchState:
        return TokenSearch(model, plan, operands).begin()

    def advance(operands: Operands, state: SearchState) -> tuple[SearchState, jax.Array]:
        new = TokenSearch(model, plan, operands).advance(state)
        place = state.length
        return new, jax.lax.dynamic_slice_in_dim(new.sequences, place, 1, axis=1)[:, 0]

    first, following = get_program(
        model, plan, "steps", lambda: (jax.jit(begin), jax.jit(advance, donate_argnums=1))
    )
    state = first(operands)
    while bool(state.length < operands.stop_length) and not np.asarray(state.finished).all():
        state, tokens = following(operands, state)
        yield np.asarray(tokens), state


class Programs(dict):
    """The compiled programs of one model. Copies and pickles of the model start without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return Programs()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Programs, ()


def get_program(model: GenerativeModel, plan: Plan, kind: str, make: Callable[[], T]) -> T:
    """Return what the model keeps as ``kind`` for a plan, made if need be."""
    programs = vars(model).setdefault("_generation_programs", Programs())
    key = kind, plan.key(), getattr(model, "_options", None)
    if key not in programs:
        while len(programs) >= MAX_PROGRAMS:
            del programs[next(iter(programs))]
        programs[key] = make()
    return programs[key]


# -- finished sentences leave the work


def next_batch_size(batch: int) -> int:
    """Return the number of sentences after the next move; the same number if there is none."""
    return (batch + 1) // 2 if batch > SMALLEST_BATCH else batch


def run_compacted(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Search like ``run_compiled``, with the same result; finished sentences leave the work."""
    begin, go_on, shrink = get_program(
        model, plan, "compacted", lambda: _compacting_programs(model, plan)
    )
    count = operands.prompt.shape[0]
    rows, state = np.arange(count), begin(operands)
    results: dict[str, np.ndarray] = {}  # of each sentence as it was when last looked at
    while True:
        state, output, done, ended = go_on(operands, state)
        for name, value in output.items():
            new = np.asarray(value)
            times = len(new) // len(rows)
            if name not in results:
                results[name] = np.zeros((count * times, *new.shape[1:]), new.dtype)
            results[name][_rows_of(rows, times)] = new
        if ended:
            return dataclasses.replace(output, **jax.device_put(results))
        done = np.asarray(done)
        # Finished ones fill up what is spare: they stay as they are.
        places = np.argsort(done, kind="stable")[: next_batch_size(len(rows))].astype(np.int32)
        logger.debug("%d of %d sentences go on", int((~done).sum()), len(rows))
        operands, state = shrink(operands, state, places)
        rows = rows[places]


def _compacting_programs(model: GenerativeModel, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> State:
        return make_search(model, plan, operands).begin()

    def go_on(operands: Operands, state: State) -> tuple[State, Output, jax.Array, jax.Array]:
        chosen = make_search(model, plan, operands)
        batch = operands.prompt.shape[0]
        fewer = next_batch_size(batch)

        def crowded(state: State) -> jax.Array:
            many = (~chosen.done(state)).sum() > fewer if fewer < batch else True
            return chosen.unfinished(state) & many

        state = jax.lax.while_loop(crowded, chosen.advance, state)
        return state, chosen.result(state), chosen.done(state), ~chosen.unfinished(state)

    def shrink(operands: Operands, state: State, places: jax.Array) -> tuple[Operands, State]:
        batch, times = operands.prompt.shape[0], plan.options.rows_per_input
        names = ("prompt", "mask", "encoder", "encoder_outputs", "model_kwargs")
        fewer = {name: pick_rows(getattr(operands, name), batch, places) for name in names}
        rows = _rows_of(places, times)
        inputs = {}
        for name, value in state.inputs.items():
            if name == "past_key_values":
                inputs[name] = kv_cache.select_rows(value, rows, places)
            elif name.startswith("encoder"):
                inputs[name] = pick_rows(value, batch, places)
            else:
                inputs[name] = pick_rows(value, batch * times, rows)
        kept = {"inputs", "length", "recorded"}
        picked = {
            name: pick_rows(value, batch, places)
            for name, value in state._asdict().items()
            if name not in kept
        }
        return operands._replace(**fewer), state._replace(inputs=inputs, **picked)

    return jax.jit(begin), jax.jit(go_on, donate_argnums=1), jax.jit(shrink)


def _rows_of(sentences: Any, times: int) -> Any:
    """Return the places of the ``times`` beams of each of ``sentences``."""
    return (sentences[:, None] * times + np.arange(times, dtype=sentences.dtype)).reshape(-1)


# -- first and next inputs


class CausalGeneration:
    """The first and the next step of generation, for decoders with a language-modelling head."""

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
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
            "past_key_values": cast(GenerativeModel, self).init_cache(batch, max_length),
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
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Return the keyword arguments of the first call, which reads ``input_ids`` into the state.

        ``input_ids`` and ``attention_mask`` are (batch, length).
        """
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        cache = cast(GenerativeModel, self).init_cache(input_ids.shape[0], max_length)
        return {"past_key_values": cache, "attention_mask": jnp.asarray(mask, jnp.int32)}

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

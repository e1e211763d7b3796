"""``generate`` for every model with a language-modeling head.

There are four ways to run a search: as one compiled loop (the default), step by step for streaming,
without compilation for debugging, or as a compiled loop that is interrupted to remove finished rows
from the batch.

In this package, a row is one decoded sequence of the batch. With beam search or several returned
samples, each input has several rows.
"""

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
from hfseq.nn import kv_cache, sharding

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)

Output = FlaxGreedySearchOutput | FlaxBeamSearchOutput
State = SearchState | BeamState
T = TypeVar("T")

#: Maximum number of compiled programs per model. The oldest program is dropped first.
MAX_PROGRAMS = 64

#: Finished rows are only removed from batches that are larger than this. In smaller batches, most
#: of the time is spent on reading the weights.
SMALLEST_BATCH = 8


class FlaxGenerationMixin:
    """Adds ``generate`` to models.

    The models must implement ``prepare_inputs_for_generation`` and
    ``update_inputs_for_generation``.
    """

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
        """Continues a batch of prompts, or generates the output of an encoder-decoder model.

        Prompts and outputs are padded to one of a few lengths, called buckets. The loop is compiled
        once per combination of buckets. Under ``jax.jit`` and ``pmap`` it is traced as a part of
        the caller's program.

        Args:
            input_ids: Prompts, or the input of the encoder, `(batch, length)`.
            generation_config: A ``transformers.GenerationConfig``. Every option can also be passed
                as a keyword argument.
            prng_key: A PRNG key or an integer seed. The default is seed 0.
            trace: Whether to trace the loop. ``False`` runs it in Python, for debugging.
            params: Parameters to use instead of the model's own.
            logits_processor: Traceable functions ``(input_ids, scores, cur_len)`` that return new
                scores.
            **kwargs: Options of ``GenerationConfig`` and inputs of the model. These arguments are
                accepted as well:

                * ``attention_mask``, `(batch, length)`: hides padding on either side.
                * ``stopping_criteria``: a list of traceable functions ``(input_ids, cur_len)``.
                * ``streamer``: an object that receives tokens as they are generated.
                * ``compact_finished=True``: removes finished rows from the batch in greedy search
                  and beam search.
                * ``extra``: collections to use instead of the model's own.

        Returns:
            A :class:`FlaxGreedySearchOutput`, :class:`FlaxSampleOutput` or
            :class:`FlaxBeamSearchOutput`. Its ``sequences`` are padded to ``max_length``. They are
            a NumPy array, because tokenizers do not decode JAX arrays. Under a transformation, or
            if the inputs are distributed over processes, they are a JAX array.

        Raises:
            TypeError: The class has no head that can generate.
            UsageError: Options are unknown or contradictory, or the inputs cannot be continued. The
                message says what would work. ``UsageError`` is a subclass of ``ValueError``.
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
        if not trace:  # one operation at a time, so that a debugger can inspect everything
            search = make_search(model, plan, operands)
            state = search.begin()
            while search.unfinished(state):
                state = search.advance(state)
            return _trim_output(search.result(state), request)
        if request.traced:
            return run_traced(model, plan, operands)
        # Finished rows can be removed only without sampling, without recorded scores of steps, and
        # on a single device.
        devices = getattr(getattr(operands.prompt, "sharding", None), "device_set", (None,))
        can_compact = not plan.options.do_sample and not plan.steps and len(devices) == 1
        can_compact &= not any(map(sharding.is_distributed, jax.tree.leaves(operands.params)))
        compact = request.compact and can_compact
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
        """Yields the tokens of each step as soon as they are known.

        Args:
            input_ids: See :meth:`generate`.
            generation_config: See :meth:`generate`.
            prng_key: See :meth:`generate`.
            params: See :meth:`generate`.
            logits_processor: See :meth:`generate`.
            **kwargs: See :meth:`generate`.

        Returns:
            An iterator over arrays `(batch,)`. They contain the tokens that :meth:`generate`
            returns. Rows that have ended yield ``pad_token_id``.

        Raises:
            UsageError: ``num_beams`` is greater than 1, or the method is called under a
                transformation.
        """
        model = cast(GenerativeModel, self)
        request = make_request(
            model, input_ids, generation_config, prng_key, params, logits_processor, kwargs
        )
        _check_streaming(request)
        return (tokens for tokens, _ in run_steps(model, request.plan, request.operands))

    def check_generation_lengths(self, prompt_length: int, stop_length: int) -> None:
        """Raises an error if the model cannot continue prompts of this length.

        Args:
            prompt_length: Number of tokens of the longest prompt.
            stop_length: Maximum number of tokens of prompt and continuation.
        """

    def _adapt_logits_for_beam_search(self, logits: jax.Array) -> jax.Array:
        """Changes logits before beam search scores them. Subclasses can override this."""
        return logits


def _check_streaming(request: Request) -> None:
    if request.plan.options.num_beams > 1:
        raise UsageError(
            f"generate: streaming does not support num_beams={request.plan.options.num_beams}, "
            "because beam search revises earlier tokens; set num_beams=1"
        )
    if request.traced:
        raise UsageError("generate: streaming requires arrays, not tracers: call it outside of jit")


def _trim_output(output: Output, request: Request) -> Output:
    """Removes the columns and steps that the buckets added."""
    sequences, stop = output.sequences, request.lengths.stop
    if sequences is not None and (
        not sharding.is_distributed(sequences) or getattr(sequences, "is_fully_replicated", False)
    ):
        # Use NumPy, because tokenizers do not decode JAX arrays, and because a slice on the device
        # would be compiled for every length.
        sequences = np.asarray(sequences)[:, :stop]
    new, changes = stop - request.lengths.prompt, {"sequences": sequences}
    for name in ("scores", "logits", "step_scores"):
        if getattr(output.get(name), "ndim", 0) == 3:
            changes[name] = output.get(name)[:new]
    if "beam_indices" in output:
        changes["beam_indices"] = output["beam_indices"][:, :new]
    return output.replace(**changes)


# -- ways to run a search


def make_search(model: GenerativeModel, plan: Plan, operands: Operands) -> Any:
    """Returns the search that the options select."""
    search_class = BeamSearch if plan.options.num_beams > 1 else TokenSearch
    return search_class(model, plan, operands)


def run_traced(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Searches with one ``lax.while_loop``, in a program that the caller traces."""
    search = make_search(model, plan, operands)
    return search.result(jax.lax.while_loop(search.unfinished, search.advance, search.begin()))


def run_compiled(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Searches with a program that is compiled once per plan and operand shapes."""
    program = get_program(
        model, plan, "run", lambda: jax.jit(lambda operands: run_traced(model, plan, operands))
    )
    return sharding.replicate(program(operands))


def run_steps(
    model: GenerativeModel, plan: Plan, operands: Operands
) -> Iterator[tuple[np.ndarray, SearchState]]:
    """Searches step by step.

    Yields:
        The new tokens, `(rows,)`, and the state after each step.
    """

    def begin(operands: Operands) -> SearchState:
        return TokenSearch(model, plan, operands).begin()

    def advance(operands: Operands, state: SearchState) -> tuple[SearchState, jax.Array]:
        new = TokenSearch(model, plan, operands).advance(state)
        column = state.length
        return new, jax.lax.dynamic_slice_in_dim(new.sequences, column, 1, axis=1)[:, 0]

    first, following = get_program(
        model, plan, "steps", lambda: (jax.jit(begin), jax.jit(advance, donate_argnums=1))
    )
    state = first(operands)
    while bool(state.length < operands.stop_length) and not np.asarray(state.finished).all():
        state, tokens = following(operands, state)
        yield np.asarray(tokens), state


class Programs(dict):
    """The compiled programs of one model. They are not part of copies and pickles of the model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Programs:
        return Programs()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Programs, ()


def get_program(model: GenerativeModel, plan: Plan, name: str, make: Callable[[], T]) -> T:
    """Returns the model's cached program ``name`` for a plan, and creates it if needed."""
    programs = vars(model).setdefault("_generation_programs", Programs())
    key = name, plan.key(), getattr(model, "_options", None)
    if key not in programs:
        while len(programs) >= MAX_PROGRAMS:
            del programs[next(iter(programs))]
        programs[key] = make()
    return programs[key]


# -- removing finished rows


def next_batch_size(batch: int) -> int:
    """Returns the batch size after the next removal of finished rows.

    Batches of up to ``SMALLEST_BATCH`` rows keep their size.
    """
    return (batch + 1) // 2 if batch > SMALLEST_BATCH else batch


def run_compacted(model: GenerativeModel, plan: Plan, operands: Operands) -> Output:
    """Searches like :func:`run_compiled`, but removes finished rows from the batch.

    When the unfinished rows fit into half of the batch, the loop is interrupted and continues with
    this smaller batch.
    """
    begin, advance_until_smaller, shrink = get_program(
        model, plan, "compacted", lambda: _compacting_programs(model, plan)
    )
    count = operands.prompt.shape[0]
    rows, state = np.arange(count), begin(operands)
    results: dict[str, np.ndarray] = {}  # the latest values of each input row
    while True:
        state, output, is_done, all_ended = advance_until_smaller(operands, state)
        for name, value in output.items():
            new = np.asarray(value)
            times = len(new) // len(rows)
            if name not in results:
                results[name] = np.zeros((count * times, *new.shape[1:]), new.dtype)
            results[name][_rows_of(rows, times)] = new
        if all_ended:
            return dataclasses.replace(output, **jax.device_put(results))
        is_done = np.asarray(is_done)
        # If fewer rows continue than the smaller batch has, finished rows fill the rest of it. The
        # search does not change them.
        kept_rows = np.argsort(is_done, kind="stable")[: next_batch_size(len(rows))].astype(
            np.int32
        )
        logger.debug("%d of %d rows continue", int((~is_done).sum()), len(rows))
        operands, state = shrink(operands, state, kept_rows)
        rows = rows[kept_rows]


def _compacting_programs(model: GenerativeModel, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> State:
        return make_search(model, plan, operands).begin()

    def advance_until_smaller(
        operands: Operands, state: State
    ) -> tuple[State, Output, jax.Array, jax.Array]:
        search = make_search(model, plan, operands)
        batch = operands.prompt.shape[0]
        smaller_batch = next_batch_size(batch)

        def needs_this_batch(state: State) -> jax.Array:
            is_crowded = (
                (~search.done(state)).sum() > smaller_batch if smaller_batch < batch else True
            )
            return search.unfinished(state) & is_crowded

        state = jax.lax.while_loop(needs_this_batch, search.advance, state)
        return state, search.result(state), search.done(state), ~search.unfinished(state)

    def shrink(operands: Operands, state: State, kept_rows: jax.Array) -> tuple[Operands, State]:
        batch, times = operands.prompt.shape[0], plan.options.rows_per_input
        names = ("prompt", "mask", "encoder", "encoder_outputs", "model_kwargs")
        smaller_operands = {
            name: pick_rows(getattr(operands, name), batch, kept_rows) for name in names
        }
        rows = _rows_of(kept_rows, times)
        inputs = {}
        for name, value in state.inputs.items():
            if name == "past_key_values":
                inputs[name] = kv_cache.select_rows(value, rows, kept_rows)
            elif name.startswith("encoder"):
                inputs[name] = pick_rows(value, batch, kept_rows)
            else:
                inputs[name] = pick_rows(value, batch * times, rows)
        unchanged_fields = {"inputs", "length", "recorded"}
        picked = {
            name: pick_rows(value, batch, kept_rows)
            for name, value in state._asdict().items()
            if name not in unchanged_fields
        }
        return operands._replace(**smaller_operands), state._replace(inputs=inputs, **picked)

    return jax.jit(begin), jax.jit(advance_until_smaller, donate_argnums=1), jax.jit(shrink)


def _rows_of(inputs: Any, times: int) -> Any:
    """Returns the indices of all rows of some inputs. Each input has ``times`` adjacent rows."""
    return (inputs[:, None] * times + np.arange(times, dtype=inputs.dtype)).reshape(-1)


# -- first and next inputs


class CausalGeneration:
    """Prepares and updates the inputs of generation for decoders with a language-modeling head."""

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the first call.

        Args:
            input_ids: Prompts, `(batch, length)`.
            max_length: Number of tokens that the cache can contain.
            attention_mask: Mask of the prompts, `(batch, length)`.
        """
        batch, length = input_ids.shape
        mask = jnp.ones((batch, max_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        if attention_mask is not None:
            prompt_mask = jnp.asarray(attention_mask, jnp.int32)
            mask = jax.lax.dynamic_update_slice(mask, prompt_mask, (0, 0))
            positions = jnp.maximum(prompt_mask.cumsum(-1) - 1, 0)
        return {
            "past_key_values": cast(GenerativeModel, self).init_cache(batch, max_length),
            "attention_mask": mask,
            "position_ids": positions,
        }

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the next call, with the new cache and next positions."""
        return {
            **model_kwargs,
            "past_key_values": model_outputs.past_key_values,
            "position_ids": model_kwargs["position_ids"][:, -1:] + 1,
        }


class FixedStateGeneration:
    """Prepares and updates the inputs of generation for models whose cache is a fixed-size state.

    The sizes of the arrays that are passed from step to step do not depend on the length of the
    text.
    """

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the first call, which processes the whole prompts.

        Args:
            input_ids: Prompts, `(batch, length)`.
            max_length: Maximum number of tokens.
            attention_mask: Mask of the prompts, `(batch, length)`.
        """
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        cache = cast(GenerativeModel, self).init_cache(input_ids.shape[0], max_length)
        return {"past_key_values": cache, "attention_mask": jnp.asarray(mask, jnp.int32)}

    def update_inputs_for_generation(
        self, model_outputs: Any, model_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the keyword arguments of the next call, which processes one token per row."""
        rows = model_kwargs["attention_mask"].shape[0]
        return {
            **model_kwargs,
            "past_key_values": model_outputs.past_key_values,
            "attention_mask": jnp.ones((rows, 1), jnp.int32),
        }

"""``generate`` of every model with a language-modelling head."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.beam_search import BeamSearch
from hfseq.generation.options import Operands, Plan, check_class
from hfseq.generation.request import Request, make_request
from hfseq.generation.search import SearchState, TokenSearch
from hfseq.nn import kv_cache

logger = logging.getLogger(__name__)

#: Compiled programs that a model keeps; the oldest goes when there are more plans than this.
KEPT_PROGRAMS = 64


class Programs(dict):
    """The compiled programs of one model. Copies and pickles of the model start without any."""

    def __deepcopy__(self, memo: Any) -> Programs:
        return Programs()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Programs, ()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the program under ``key``, made if need be."""
        if key not in self:
            while len(self) >= KEPT_PROGRAMS:
                del self[next(iter(self))]
            self[key] = make()
        return self[key]


def search(model: Any, plan: Plan, operands: Operands) -> TokenSearch | BeamSearch:
    """Return the search that the options ask for."""
    kind = BeamSearch if plan.options.num_beams > 1 else TokenSearch
    return kind(model, plan, operands)


def run(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with one ``lax.while_loop``; everything is traced."""
    chosen: Any = search(model, plan, operands)
    return chosen.result(jax.lax.while_loop(chosen.unfinished, chosen.advance, chosen.begin()))


def run_eagerly(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with a Python loop, each operation at once: a debugger can look at everything."""
    chosen: Any = search(model, plan, operands)
    state = chosen.begin()
    while chosen.unfinished(state):
        state = chosen.advance(state)
    return chosen.result(state)


def run_compiled(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with a program that is compiled once for a plan and the shapes of the operands."""
    program = find_program(
        model, plan, "run", lambda: jax.jit(lambda operands: run(model, plan, operands))
    )
    return program(operands)


def steps(model: Any, plan: Plan, operands: Operands) -> Iterator[tuple[np.ndarray, SearchState]]:
    """Search step by step: yield the new tokens (rows,) and the state after each step."""
    begin, advance, unfinished = find_program(model, plan, "steps", lambda: _stepwise(model, plan))
    state = begin(operands)
    while unfinished(operands, state):
        state, tokens = advance(operands, state)
        yield np.asarray(tokens), state


def _stepwise(model: Any, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> SearchState:
        return TokenSearch(model, plan, operands).begin()

    def advance(operands: Operands, state: SearchState) -> tuple[SearchState, jax.Array]:
        new = TokenSearch(model, plan, operands).advance(state)
        place = state.length
        return new, jax.lax.dynamic_slice_in_dim(new.sequences, place, 1, axis=1)[:, 0]

    def unfinished(operands: Operands, state: SearchState) -> bool:
        return bool(state.length < operands.stop_length) and not np.asarray(state.finished).all()

    return jax.jit(begin), jax.jit(advance, donate_argnums=1), unfinished


def find_program(model: Any, plan: Plan, kind: str, make: Callable[[], Any]) -> Any:
    """Return what the model keeps as ``kind`` for a plan, made if need be."""
    programs = vars(model).setdefault("_generation_programs", Programs())
    return programs.find((kind, plan.key(), getattr(model, "_options", None)), make)


#: Fewer sentences than this stay together: reading the weights takes all the time then.
SMALLEST_BATCH = 8


def can_compact(plan: Plan, operands: Operands) -> bool:
    """Tell whether rows may leave: without chance, recorded steps and several devices."""
    devices = getattr(getattr(operands.prompt, "sharding", None), "device_set", (None,))
    return not plan.options.do_sample and not plan.steps and len(devices) == 1


def halved(batch: int) -> int:
    """Return the number of sentences after the next move; the same number if there is none."""
    return (batch + 1) // 2 if batch > SMALLEST_BATCH else batch


def run_compacted(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search like ``run_compiled``, with the same result; finished sentences leave the work."""
    begin, go_on, shrink = find_program(model, plan, "compacted", lambda: _programs(model, plan))
    rows = np.arange(operands.prompt.shape[0])
    state, found = begin(operands), _Found(len(rows))
    while True:
        state, output, done, ended = go_on(operands, state)
        found.keep(rows, output)
        if ended:
            return found.output()
        done = np.asarray(done)
        # Finished ones fill up what is spare: they stay as they are.
        places = np.argsort(done, kind="stable")[: halved(len(rows))].astype(np.int32)
        logger.debug("%d of %d sentences go on", int((~done).sum()), len(rows))
        operands, state = shrink(operands, state, places)
        rows = rows[places]


class _Found:
    """The results of all sentences, each as it was when its arrays were last looked at."""

    def __init__(self, count: int):
        self.count = count
        self.latest: Any = None
        self.fields: dict[str, np.ndarray] = {}

    def keep(self, rows: np.ndarray, output: Any) -> None:
        """Note the fields of ``output``, whose rows are those of the sentences ``rows``."""
        self.latest = output
        for name, value in output.items():
            new = np.asarray(value)
            times = len(new) // len(rows)
            if name not in self.fields:
                self.fields[name] = np.zeros((self.count * times, *new.shape[1:]), new.dtype)
            self.fields[name][_beams_of(rows, times)] = new

    def output(self) -> Any:
        """Return them as an output of generation."""
        return dataclasses.replace(self.latest, **jax.device_put(self.fields))


def _programs(model: Any, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> Any:
        return search(model, plan, operands).begin()

    def go_on(operands: Operands, state: Any) -> Any:
        chosen: Any = search(model, plan, operands)
        batch = operands.prompt.shape[0]
        fewer = halved(batch)

        def crowded(state: Any) -> jax.Array:
            many = (~chosen.done(state)).sum() > fewer if fewer < batch else True
            return chosen.unfinished(state) & many

        state = jax.lax.while_loop(crowded, chosen.advance, state)
        return state, chosen.result(state), chosen.done(state), ~chosen.unfinished(state)

    def shrink(operands: Operands, state: Any, places: jax.Array) -> tuple[Operands, Any]:
        return _pick_operands(operands, places), _pick_state(plan, state, places)

    return jax.jit(begin), jax.jit(go_on, donate_argnums=1), jax.jit(shrink)


def _pick_operands(operands: Operands, places: jax.Array) -> Operands:
    batch = operands.prompt.shape[0]
    names = ("prompt", "mask", "encoder", "encoder_outputs", "model_kwargs")
    return operands._replace(**{n: _pick(getattr(operands, n), batch, places) for n in names})


def _pick_state(plan: Plan, state: Any, places: jax.Array) -> Any:
    """Pick sentences from every array of a state, the model's inputs among them."""
    times = plan.options.rows_per_input
    rows = _beams_of(places, times)
    batch = len(state.sequences if times == 1 else state.hopeful)
    inputs = {}
    for name, value in state.inputs.items():
        if name == "past_key_values":
            inputs[name] = kv_cache.select(value, rows, places)
        elif name.startswith("encoder"):
            inputs[name] = _pick(value, batch, places)
        else:
            inputs[name] = _pick(value, batch * times, rows)
    rest = {n: v for n, v in state._asdict().items() if n not in ("inputs", "length", "recorded")}
    picked = {name: _pick(value, batch, places) for name, value in rest.items()}
    return state._replace(inputs=inputs, **picked)


def _pick(tree: Any, batch: int, places: jax.Array) -> Any:
    """Pick from the leaves that have a row for each of ``batch``."""

    def pick(leaf: Any) -> Any:
        ours = getattr(leaf, "ndim", 0) and leaf.shape[0] == batch
        return jnp.take(leaf, places, axis=0, mode="clip") if ours else leaf

    return jax.tree.map(pick, tree)


def _beams_of(rows: Any, times: int) -> Any:
    """Return the places of the ``times`` beams of each of ``rows``."""
    return (rows[:, None] * times + np.arange(times, dtype=rows.dtype)).reshape(-1)


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

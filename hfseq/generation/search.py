"""Greedy search and sampling, and what all searches share: outputs, the model as they see it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

from hfseq.generation.logits_process import (
    FlaxLogitsProcessor,
    FlaxTopKLogitsWarper,
    Length,
    ends_with,
)
from hfseq.generation.options import Operands, Plan, Processor
from hfseq.nn import cpu, kv_cache
from hfseq.nn.outputs import FlaxModelOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig


T = TypeVar("T")


@dataclasses.dataclass
class FlaxGreedySearchOutput(FlaxModelOutput):
    """Tokens of greedy search.

    ``sequences`` is (batch, max_length): the prompt, the new tokens, then ``pad_token_id``. With
    ``output_scores`` and ``output_logits``, ``scores`` and ``logits`` are (steps, batch,
    vocabulary): after and before the processors, zeros after the last step.
    """

    sequences: jax.Array | None = None
    scores: jax.Array | None = None
    logits: Any = None


@dataclasses.dataclass
class FlaxSampleOutput(FlaxGreedySearchOutput):
    """Sampled tokens, ``num_return_sequences`` rows for each row of the input, next to each other.

    Fields are those of :class:`FlaxGreedySearchOutput`.
    """


@dataclasses.dataclass
class FlaxBeamSearchOutput(FlaxModelOutput):
    """The best beams, best first, ``num_return_sequences`` rows for each row of the input.

    ``scores`` (batch * num_return_sequences,) are, as in Transformers 4, the scores of the beams:
    the sum of log-probabilities divided by ``length ** length_penalty``; ``sequences_scores`` is
    PyTorch's name for the same. With ``output_scores`` and ``output_logits``: ``step_scores`` and
    ``logits`` (steps, batch * num_beams, vocabulary), which PyTorch calls ``scores`` and
    ``logits``, and ``beam_indices`` (batch * num_return_sequences, steps), the row of each step
    that a token was chosen from, -1 after the end.
    """

    sequences: jax.Array | None = None
    scores: jax.Array | None = None
    sequences_scores: jax.Array | None = None
    step_scores: jax.Array | None = None
    logits: Any = None
    beam_indices: jax.Array | None = None


def row_keys(key: jax.Array, rows: int, step: Length) -> jax.Array:
    """Return a key for each row at this step."""
    at_step = jax.random.fold_in(key, step)
    return jax.vmap(jax.random.fold_in, (None, 0))(at_step, jnp.arange(rows))


def sample(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw a token for each row of ``scores`` (rows, vocabulary) from their softmax.

    Two numbers a row instead of one for each token: the first picks a chunk of the vocabulary by
    its mass, the second a token in it.
    """
    rows, size = scores.shape
    width = math.isqrt(size - 1) + 1
    wide = jnp.pad(scores, ((0, 0), (0, -size % width)), constant_values=-jnp.inf)
    mass = jnp.exp(wide - wide.max(-1, keepdims=True)).reshape(rows, -1, width)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    chunk = _pick(uniform[:, 0], mass.sum(-1))
    place = _pick(uniform[:, 1], jnp.take_along_axis(mass, chunk[:, None, None], axis=1)[:, 0])
    return (chunk * width + place).astype(jnp.int32)


def _pick(uniform: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the place in each row of ``weights`` (rows, n) that a number in [0, 1) falls on."""
    total = jnp.cumsum(weights, axis=-1)
    places = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
    return jnp.minimum(places, weights.shape[-1] - 1)


def sample_top_k(
    keys: jax.Array, scores: jax.Array, k: int, warpers: Sequence[Callable[..., jax.Array]]
) -> jax.Array:
    """Draw from the ``k`` highest scores of each row, filtered by ``warpers``.

    Filters look at ``k`` numbers instead of the vocabulary. Of scores equal to the ``k``-th only as
    many as fit are candidates, where :class:`FlaxTopKLogitsWarper` keeps all.
    """
    best, tokens = jax.lax.top_k(scores, min(k, scores.shape[-1]))
    for warper in warpers:
        best = warper(None, best, None)
    places = sample(keys, best)[:, None]
    return jnp.take_along_axis(tokens, places, axis=1)[:, 0].astype(jnp.int32)


def sample_without_replacement(
    keys: jax.Array, scores: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Draw ``count`` different places in each row: (rows, count) scores and places.

    The Gumbel-top-k trick (Kool et al., 2019): the largest perturbed scores are such a sample.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    places = jax.lax.top_k(scores + noise, count)[1]
    return jnp.take_along_axis(scores, places, axis=1), places


class GenerativeModel(Protocol):
    """What generation asks of a model; encoder-decoders have ``encode`` and ``decode`` too."""

    config: Any
    generation_config: GenerationConfig | None
    params: Mapping[str, Any]
    extra: dict[str, Any]
    fixed_state: ClassVar[bool]
    main_input_name: ClassVar[str]
    encode: Callable[..., Any]
    decode: Callable[..., Any]
    init_cache: Callable[..., dict[str, Any]]
    prepare_inputs_for_generation: Callable[..., dict[str, Any]]
    update_inputs_for_generation: Callable[..., dict[str, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of decoding."""

    def can_generate(self) -> bool:
        """Tell whether the class has a head to generate with."""

    def max_length(self) -> int | None:
        """Return the number of positions, if there is a limit."""

    def max_source_length(self) -> int | None:
        """Return the number of positions of an encoder, if there is a limit."""

    def vocab_size(self, name: str = "input_ids") -> int:
        """Return the number of tokens that inputs of this name may hold."""

    def _adapt_logits_for_beam_search(self, logits: jax.Array) -> jax.Array: ...


class Search:
    """A model with the plan and the operands of one run; everything here is traced."""

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        self.plan, self.operands, self.model = plan, operands, model
        if operands.extra:
            # The collections are operands of the compiled search, not constants in it.
            self.model = copy.copy(model)
            self.model.extra = operands.extra
        self.rows_per_input = plan.options.rows_per_input
        self.processors = plan.options.processors(operands, plan.processors)

    def first_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for decoding the last token of the prompt.

        The cache holds the tokens before it. The prompt runs once per row of the input; the rows
        of beams and samples are made of the result.
        """
        operands, times = self.operands, self.rows_per_input
        if operands.prompt.shape[1] == 1:
            mask = operands.mask
            repeated = None if mask is None else jnp.repeat(mask, times, axis=0)
            return self._prepare(jnp.repeat(operands.prompt, times, axis=0), repeated)
        last = operands.prompt_length - 1
        if self.model.fixed_state:
            # A state forgets nothing: the last column and the bucket's spare ones are hidden.
            prompt, mask = operands.prompt, operands.mask
            mask = jnp.ones_like(prompt) if mask is None else jnp.asarray(mask)
            before = jnp.where(jnp.arange(prompt.shape[1]) < last, mask, 0)
            inputs = self._prepare(prompt, before)
            following = self.model.update_inputs_for_generation(self._call(prompt, inputs), inputs)
            visible = jax.lax.dynamic_slice_in_dim(mask, last, 1, axis=1)
            inputs = {**following, "attention_mask": visible}
        else:
            inputs, places = self._prepare(operands.prompt, operands.mask), {}
            for name in {"position_ids", "decoder_position_ids"} & inputs.keys():
                places[name] = jax.lax.dynamic_slice_in_dim(inputs[name], last, 1, axis=1)
                # The bucket's spare columns make no row longer: angles may depend on the longest.
                inputs[name] = jnp.minimum(inputs[name], places[name])
            cache = self._call(operands.prompt, inputs).past_key_values
            # The spare columns were cached too: the next tokens overwrite them.
            inputs = {**inputs, **places, "past_key_values": kv_cache.rewind(cache, last)}
        if times == 1:
            return inputs
        # The decoder's rows are repeated; what belongs to the encoder is shared by the beams.
        batch = len(operands.prompt)
        rows = jnp.repeat(jnp.arange(batch), times)
        expanded = {
            name: value if name.startswith("encoder") else pick_rows(value, batch, rows)
            for name, value in inputs.items()
            if name != "past_key_values"
        }
        return expanded | {"past_key_values": kv_cache.reorder(inputs["past_key_values"], rows)}

    def next_logits(
        self, tokens: jax.Array, inputs: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Decode ``tokens`` (rows,); return float32 logits (rows, vocabulary) and new inputs."""
        outputs = self._call(tokens[:, None], inputs)
        following = self.model.update_inputs_for_generation(outputs, inputs)
        return outputs.logits[:, -1].astype(jnp.float32), following

    def rows(self) -> jax.Array:
        """Return the token buffer (rows, width) with the prompt in its first columns."""
        prompt = jnp.repeat(self.operands.prompt, self.rows_per_input, axis=0)
        spare = self.plan.buffer - prompt.shape[1]
        sequences = jnp.pad(prompt, ((0, 0), (0, spare)), constant_values=self.plan.pad)
        real = jnp.arange(self.plan.buffer) < self.operands.prompt_length
        return jnp.where(real, sequences, self.plan.pad)

    def _prepare(self, prompt: jax.Array, mask: jax.Array | None) -> dict[str, Any]:
        model, operands = self.model, self.operands
        given = dict(operands.model_kwargs)
        if not self.plan.encoder_decoder:
            given["attention_mask"] = mask
            return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **given)
        outputs = operands.encoder_outputs
        if outputs is None:
            outputs = model.encode(**operands.encoder, params=operands.params, return_dict=True)
        given["encoder_outputs"] = outputs
        given["attention_mask"] = operands.encoder.get("attention_mask")
        given["decoder_attention_mask"] = mask
        parameters = inspect.signature(model.prepare_inputs_for_generation).parameters
        if "params" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given["params"] = operands.params
        return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **given)

    def _call(self, tokens: jax.Array, inputs: dict[str, Any]) -> Any:
        call = self.model.decode if self.plan.encoder_decoder else self.model
        return call(tokens, **{"params": self.operands.params, "return_dict": True, **inputs})


def pick_rows(tree: T, batch: int, rows: jax.Array) -> T:
    """Pick from the leaves that have a row for each of ``batch``."""

    def pick(leaf: jax.Array) -> jax.Array:
        has_rows = getattr(leaf, "ndim", 0) and leaf.shape[0] == batch
        return jnp.take(leaf, rows, axis=0, mode="clip") if has_rows else leaf

    return jax.tree.map(pick, tree)


class SearchState(NamedTuple):
    """``length`` columns of ``sequences`` (rows, buffer) are filled; ``inputs`` the model's."""

    length: jax.Array
    sequences: jax.Array
    finished: jax.Array
    inputs: dict[str, Any]
    recorded: dict[str, jax.Array]


class TokenSearch(Search):
    """Greedy search, or sampling where the options say so."""

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        super().__init__(model, plan, operands)
        self.warpers, self.late = plan.options.warpers(), list[Processor]()
        self.top_k: int | None = None
        kinds = [type(warper) for warper in self.warpers]
        if FlaxTopKLogitsWarper in kinds and not plan.options.output_scores:
            # Those after top-k look at its candidates only.
            place = kinds.index(FlaxTopKLogitsWarper)
            self.top_k = self.warpers[place].top_k  # type: ignore[attr-defined]
            self.warpers, self.late = self.warpers[:place], self.warpers[place + 1 :]

    def begin(self) -> SearchState:
        """Return the state before the first token."""
        sequences, words = self.rows(), self.model.vocab_size("decoder_input_ids")
        return SearchState(
            length=jnp.asarray(self.operands.prompt_length, jnp.int32),
            sequences=sequences,
            finished=jnp.zeros(len(sequences), bool),
            inputs=self.first_inputs(),
            recorded=empty_record_buffers(self.plan, len(sequences), words),
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
        tokens = take_column(state.sequences, state.length - 1)
        logits, inputs = self.next_logits(tokens, state.inputs)
        scores = logits
        for processor in (*self.processors, *self.warpers):
            scores = processor(state.sequences, scores, state.length)
        if not self.plan.options.do_sample:
            chosen = self._best(logits, scores, state.length)
        else:
            keys = row_keys(self.operands.key, len(scores), step)
            if self.top_k is None:
                chosen = sample(keys, scores)
            else:
                chosen = sample_top_k(keys, scores, self.top_k, self.late)
        chosen = jnp.where(state.finished, self.plan.pad, chosen)
        sequences = jax.lax.dynamic_update_slice_in_dim(
            state.sequences, chosen[:, None], state.length, axis=1
        )
        length = state.length + 1
        finished = state.finished | ended_rows(self.plan, sequences, chosen, length)
        recorded = record_step(state.recorded, step, scores=scores, logits=logits)
        return SearchState(length, sequences, finished, inputs, recorded)

    def result(self, state: SearchState) -> FlaxGreedySearchOutput | FlaxSampleOutput:
        """Return the output; sequences still have the width of the buffer."""
        kind = FlaxSampleOutput if self.plan.options.do_sample else FlaxGreedySearchOutput
        return kind(sequences=state.sequences, **state.recorded)

    def _best(self, logits: jax.Array, scores: jax.Array, length: Length) -> jax.Array:
        """Return the best token of each row by ``scores``, which are the processed ``logits``."""
        size = scores.shape[-1]
        width = None if self.warpers else cpu.block_width(size)
        changed = None if width is None else cpu.changed_blocks(self.processors, size, width)
        if width is None or changed is None:
            return cpu.fast_argmax(scores)
        before = cpu.block_maxima(logits, width)
        known = cast(list[FlaxLogitsProcessor], self.processors)  # else nothing is known
        return cpu.argmax_from_maxima(
            scores, cpu.update_block_maxima(known, before, scores, length, changed)
        )


def take_column(sequences: jax.Array, place: Length) -> jax.Array:
    """Return one column of ``sequences``."""
    return jax.lax.dynamic_slice_in_dim(sequences, place, 1, axis=1)[:, 0]


def ended_rows(plan: Plan, sequences: jax.Array, tokens: jax.Array, length: Length) -> jax.Array:
    """Tell which rows end with the last of their ``length`` tokens."""
    finished = jnp.zeros(tokens.shape, bool)
    for token in plan.options.eos_token_id:
        finished |= tokens == token
    for stop in plan.options.stop_token_sequences:
        finished |= ends_with(sequences, length, jnp.asarray([stop], jnp.int32))[:, 0]
    for criterion in plan.criteria:
        finished |= jnp.broadcast_to(jnp.asarray(criterion(sequences, length), bool), tokens.shape)
    return finished


def empty_record_buffers(plan: Plan, rows: int, vocab_size: int) -> dict[str, jax.Array]:
    """Return buffers (steps, rows, vocabulary) for the scores that the user wants to see."""
    options = plan.options
    wanted = {"scores": options.output_scores, "logits": options.output_logits}
    shape = (plan.steps, rows, vocab_size)
    return {name: jnp.zeros(shape, jnp.float32) for name, want in wanted.items() if want}


def record_step(
    buffers: dict[str, jax.Array], step: Length, **values: jax.Array
) -> dict[str, jax.Array]:
    """Write the values of this step into those buffers that exist."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(buffer, values[name], step, axis=0)
        for name, buffer in buffers.items()
    }

"""Greedy search and sampling, and the code that all searches share.

A row is one decoded sequence of the batch. With beam search or several returned samples, each input
has several rows. Prompts are padded to one of a few lengths, which are called buckets. The token
buffer is an array `(rows, buffer)` that contains the prompts and the tokens generated so far.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

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
    """Output of greedy search.

    Attributes:
        sequences: The prompts and the new tokens, padded with ``pad_token_id``, `(batch,
            max_length)`.
        scores: The scores of each step after the logits processors, `(steps, batch, vocab_size)`,
            if ``output_scores`` is set. Steps after the end of generation contain zeros.
        logits: The scores of each step before the logits processors, with the same shape, if
            ``output_logits`` is set.
    """

    sequences: np.ndarray | jax.Array | None = None
    scores: jax.Array | None = None
    logits: Any = None


@dataclasses.dataclass
class FlaxSampleOutput(FlaxGreedySearchOutput):
    """Output of sampling, with ``num_return_sequences`` consecutive sequences per prompt.

    The fields have the same meaning as in :class:`FlaxGreedySearchOutput`.
    """


@dataclasses.dataclass
class FlaxBeamSearchOutput(FlaxModelOutput):
    """Output of beam search: the ``num_return_sequences`` best beams of each input, best first.

    Attributes:
        sequences: The prompts and the new tokens, padded with ``pad_token_id``, `(batch *
            num_return_sequences, max_length)`.
        scores: Scores of the beams, as in Transformers 4: the sum of log-probabilities divided by
            ``length ** length_penalty``, `(batch * num_return_sequences,)`.
        sequences_scores: The same array under the name that PyTorch uses.
        step_scores: The scores of each step after the logits processors, `(steps, batch *
            num_beams, vocab_size)`, if ``output_scores`` is set. PyTorch calls them ``scores``.
        logits: The scores of each step before the logits processors, with the same shape, if
            ``output_logits`` is set.
        beam_indices: For each new token, the index of the beam to which it was appended, `(batch *
            num_return_sequences, steps)`, if ``output_scores`` or ``output_logits`` is set. The
            index counts all `batch * num_beams` beams. It is -1 after the end of a sequence.
    """

    sequences: np.ndarray | jax.Array | None = None
    scores: jax.Array | None = None
    sequences_scores: jax.Array | None = None
    step_scores: jax.Array | None = None
    logits: Any = None
    beam_indices: jax.Array | None = None


def row_keys(key: jax.Array, rows: int, step: Length) -> jax.Array:
    """Returns a PRNG key for each row, which is different at each step."""
    at_step = jax.random.fold_in(key, step)
    return jax.vmap(jax.random.fold_in, (None, 0))(at_step, jnp.arange(rows))


def sample(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draws a token for each row from the softmax of the scores.

    The function draws two random numbers per row instead of one per token. The first number selects
    a chunk of the vocabulary by the total probability of the chunk. The second number selects a
    token of the chunk.

    Args:
        keys: One PRNG key per row.
        scores: Scores, `(rows, vocab_size)`.

    Returns:
        Tokens, int32 `(rows,)`.
    """
    rows, size = scores.shape
    width = math.isqrt(size - 1) + 1
    wide = jnp.pad(scores, ((0, 0), (0, -size % width)), constant_values=-jnp.inf)
    mass = jnp.exp(wide - wide.max(-1, keepdims=True)).reshape(rows, -1, width)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    chunk = _pick(uniform[:, 0], mass.sum(-1))
    offset = _pick(uniform[:, 1], jnp.take_along_axis(mass, chunk[:, None, None], axis=1)[:, 0])
    return (chunk * width + offset).astype(jnp.int32)


def _pick(uniform: jax.Array, weights: jax.Array) -> jax.Array:
    """Selects an index in each row of ``weights`` with a probability proportional to the weight.

    Args:
        uniform: Uniform random numbers in [0, 1), `(rows,)`.
        weights: Unnormalized probabilities, `(rows, n)`.
    """
    total = jnp.cumsum(weights, axis=-1)
    indices = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
    return jnp.minimum(indices, weights.shape[-1] - 1)


def sample_top_k(
    keys: jax.Array, scores: jax.Array, k: int, warpers: Sequence[Callable[..., jax.Array]]
) -> jax.Array:
    """Draws a token from the ``k`` highest scores of each row, filtered by ``warpers``.

    The warpers process ``k`` scores per row instead of the whole vocabulary. There are always ``k``
    candidates. In contrast, :class:`FlaxTopKLogitsWarper` also keeps all further tokens whose
    scores equal the ``k``-th highest score.

    Args:
        keys: One PRNG key per row.
        scores: Scores, `(rows, vocab_size)`.
        k: Number of candidates.
        warpers: The warpers that are applied after top-k.

    Returns:
        Tokens, int32 `(rows,)`.
    """
    best, tokens = jax.lax.top_k(scores, min(k, scores.shape[-1]))
    for warper in warpers:
        best = warper(None, best, None)
    indices = sample(keys, best)[:, None]
    return jnp.take_along_axis(tokens, indices, axis=1)[:, 0].astype(jnp.int32)


def sample_without_replacement(
    keys: jax.Array, scores: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Draws ``count`` different indices in each row.

    The function uses the Gumbel-top-k trick (Kool et al., 2019): it adds Gumbel noise to the scores
    and selects the largest sums.

    Args:
        keys: One PRNG key per row.
        scores: Unnormalized log-probabilities, `(rows, n)`.
        count: Number of indices per row.

    Returns:
        The scores without noise and the indices, both `(rows, count)`.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:]))(keys)
    indices = jax.lax.top_k(scores + noise, count)[1]
    return jnp.take_along_axis(scores, indices, axis=1), indices


class GenerativeModel(Protocol):
    """The interface that generation requires of a model.

    Only encoder-decoder models have ``encode`` and ``decode``.
    """

    config: Any
    generation_config: GenerationConfig | None
    original_generation_values: dict[str, Any]
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
        """Runs the model."""

    def can_generate(self) -> bool:
        """Returns whether the class has a head that can generate."""

    def max_length(self) -> int | None:
        """Returns the maximum length in the configuration, or `None` if it contains none."""

    def position_limit(self) -> int | None:
        """Returns the number of position embeddings, or `None` if the model has none."""

    def max_source_length(self) -> int | None:
        """Returns the maximum length of the encoder's input, or `None` without a limit."""

    def check_generation_lengths(self, prompt_length: int, stop_length: int) -> None:
        """Raises an error if the model cannot continue prompts of this length."""

    def vocab_size(self, name: str = "input_ids") -> int:
        """Returns the size of the vocabulary of the input ``name``."""

    def _adapt_logits_for_beam_search(self, logits: jax.Array) -> jax.Array: ...


class Search:
    """Base class of searches.

    A search combines a model with the plan (the static part of the compiled program) and the
    operands (the arrays) of one call of ``generate``. All methods are traced.
    """

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        self.plan, self.operands, self.model = plan, operands, model
        if operands.extra:
            # The collections are arguments of the compiled program instead of constants.
            self.model = copy.copy(model)
            self.model.extra = operands.extra
        self.rows_per_input = plan.options.rows_per_input
        self.processors = plan.options.processors(operands, plan.processors)

    def first_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments for decoding the last token of the prompt.

        The cache in these arguments contains the tokens before the last one. The model processes
        each prompt once. Then the result is repeated for all beams or samples of the prompt.
        """
        operands, times = self.operands, self.rows_per_input
        if operands.prompt.shape[1] == 1:
            mask = operands.mask
            repeated = None if mask is None else jnp.repeat(mask, times, axis=0)
            return self._prepare(jnp.repeat(operands.prompt, times, axis=0), repeated)
        last = operands.prompt_length - 1
        if self.model.fixed_state:
            # A state cannot be rewound, so the mask hides the last token of the prompt and the
            # columns after it, which pad the prompt to its bucket.
            prompt, mask = operands.prompt, operands.mask
            mask = jnp.ones_like(prompt) if mask is None else jnp.asarray(mask)
            mask_before_last = jnp.where(jnp.arange(prompt.shape[1]) < last, mask, 0)
            inputs = self._prepare(prompt, mask_before_last)
            following = self.model.update_inputs_for_generation(self._call(prompt, inputs), inputs)
            visible = jax.lax.dynamic_slice_in_dim(mask, last, 1, axis=1)
            inputs = {**following, "attention_mask": visible}
        else:
            inputs, last_positions = self._prepare(operands.prompt, operands.mask), {}
            for name in {"position_ids", "decoder_position_ids"} & inputs.keys():
                last_positions[name] = jax.lax.dynamic_slice_in_dim(inputs[name], last, 1, axis=1)
                # The columns that pad the prompt to its bucket must not increase the largest
                # position, because rotary embeddings may depend on it.
                inputs[name] = jnp.minimum(inputs[name], last_positions[name])
            cache = self._call(operands.prompt, inputs).past_key_values
            # The columns that pad the prompt are in the cache too. The next tokens overwrite them.
            inputs = {**inputs, **last_positions, "past_key_values": kv_cache.rewind(cache, last)}
        if times == 1:
            return inputs
        # Repeat the arrays of the decoder. All beams of an input share the arrays of the encoder.
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
        """Decodes one token per row.

        Args:
            tokens: Tokens, `(rows,)`.
            inputs: Keyword arguments of this call of the model.

        Returns:
            Logits, float32 `(rows, vocab_size)`, and the keyword arguments of the next call.
        """
        outputs = self._call(tokens[:, None], inputs)
        following = self.model.update_inputs_for_generation(outputs, inputs)
        return outputs.logits[:, -1].astype(jnp.float32), following

    def token_buffer(self) -> jax.Array:
        """Returns the initial token buffer, `(rows, buffer)`.

        The first columns contain the prompt. The other columns contain padding.
        """
        prompt = jnp.repeat(self.operands.prompt, self.rows_per_input, axis=0)
        spare = self.plan.buffer - prompt.shape[1]
        sequences = jnp.pad(prompt, ((0, 0), (0, spare)), constant_values=self.plan.pad)
        real = jnp.arange(self.plan.buffer) < self.operands.prompt_length
        return jnp.where(real, sequences, self.plan.pad)

    def _prepare(self, prompt: jax.Array, mask: jax.Array | None) -> dict[str, Any]:
        model, operands = self.model, self.operands
        arguments = dict(operands.model_kwargs)
        if not self.plan.encoder_decoder:
            arguments["attention_mask"] = mask
            return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **arguments)
        outputs = operands.encoder_outputs
        if outputs is None:
            outputs = model.encode(**operands.encoder, params=operands.params, return_dict=True)
        arguments["encoder_outputs"] = outputs
        arguments["attention_mask"] = operands.encoder.get("attention_mask")
        arguments["decoder_attention_mask"] = mask
        parameters = inspect.signature(model.prepare_inputs_for_generation).parameters
        if "params" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments["params"] = operands.params
        return model.prepare_inputs_for_generation(prompt, self.plan.buffer, **arguments)

    def _call(self, tokens: jax.Array, inputs: dict[str, Any]) -> Any:
        call = self.model.decode if self.plan.encoder_decoder else self.model
        return call(tokens, **{"params": self.operands.params, "return_dict": True, **inputs})


def pick_rows(tree: T, batch: int, rows: jax.Array) -> T:
    """Selects ``rows`` in all leaves of ``tree`` whose first axis has the size ``batch``."""

    def pick(leaf: jax.Array) -> jax.Array:
        has_rows = getattr(leaf, "ndim", 0) and leaf.shape[0] == batch
        return jnp.take(leaf, rows, axis=0, mode="clip") if has_rows else leaf

    return jax.tree.map(pick, tree)


class SearchState(NamedTuple):
    """The state of the search between two steps.

    Attributes:
        length: Number of filled columns of ``sequences``.
        sequences: Token buffer, `(rows, buffer)`.
        finished: Which rows have ended, `(rows,)`.
        inputs: Keyword arguments of the next call of the model.
        recorded: Scores and logits of all steps, if they were requested.
    """

    length: jax.Array
    sequences: jax.Array
    finished: jax.Array
    inputs: dict[str, Any]
    recorded: dict[str, jax.Array]


class TokenSearch(Search):
    """Greedy search, or sampling with ``do_sample``."""

    def __init__(self, model: GenerativeModel, plan: Plan, operands: Operands):
        super().__init__(model, plan, operands)
        self.warpers, self.late = plan.options.warpers(), list[Processor]()
        self.top_k: int | None = None
        warper_classes = [type(warper) for warper in self.warpers]
        if FlaxTopKLogitsWarper in warper_classes and not plan.options.output_scores:
            # The warpers after top-k only process the k best candidates.
            top_k_index = warper_classes.index(FlaxTopKLogitsWarper)
            self.top_k = self.warpers[top_k_index].top_k  # type: ignore[attr-defined]
            self.warpers, self.late = self.warpers[:top_k_index], self.warpers[top_k_index + 1 :]

    def begin(self) -> SearchState:
        """Returns the state before the first token."""
        sequences, vocab_size = self.token_buffer(), self.model.vocab_size("decoder_input_ids")
        return SearchState(
            length=jnp.asarray(self.operands.prompt_length, jnp.int32),
            sequences=sequences,
            finished=jnp.zeros(len(sequences), bool),
            inputs=self.first_inputs(),
            recorded=empty_record_buffers(self.plan, len(sequences), vocab_size),
        )

    def unfinished(self, state: SearchState) -> jax.Array:
        """Returns a boolean scalar: whether any row still needs a token."""
        return (state.length < self.operands.stop_length) & ~state.finished.all()

    def done(self, state: SearchState) -> jax.Array:
        """Returns for each row whether it needs no further tokens, `(rows,)`."""
        return state.finished

    def advance(self, state: SearchState) -> SearchState:
        """Adds one token to every row."""
        step = state.length - self.operands.prompt_length
        tokens = take_column(state.sequences, state.length - 1)
        logits, inputs = self.next_logits(tokens, state.inputs)
        scores = logits
        for processor in (*self.processors, *self.warpers):
            scores = processor(state.sequences, scores, state.length)
        if not self.plan.options.do_sample:
            next_tokens = self._best(logits, scores, state.length)
        else:
            keys = row_keys(self.operands.key, len(scores), step)
            if self.top_k is None:
                next_tokens = sample(keys, scores)
            else:
                next_tokens = sample_top_k(keys, scores, self.top_k, self.late)
        next_tokens = jnp.where(state.finished, self.plan.pad, next_tokens)
        sequences = jax.lax.dynamic_update_slice_in_dim(
            state.sequences, next_tokens[:, None], state.length, axis=1
        )
        length = state.length + 1
        finished = state.finished | ended_rows(self.plan, sequences, next_tokens, length)
        recorded = record_step(state.recorded, step, scores=scores, logits=logits)
        return SearchState(length, sequences, finished, inputs, recorded)

    def result(self, state: SearchState) -> FlaxGreedySearchOutput | FlaxSampleOutput:
        """Returns the output. Sequences still have the length of the token buffer."""
        output_class = FlaxSampleOutput if self.plan.options.do_sample else FlaxGreedySearchOutput
        return output_class(sequences=state.sequences, **state.recorded)

    def _best(self, logits: jax.Array, scores: jax.Array, length: Length) -> jax.Array:
        """Returns the token with the highest score of each row.

        Args:
            logits: Scores before the processors, `(rows, vocab_size)`.
            scores: Scores after the processors, same shape.
            length: Number of filled columns.
        """
        size = scores.shape[-1]
        width = None if self.warpers else cpu.block_width(size)
        changed = None if width is None else cpu.changed_blocks(self.processors, size, width)
        if width is None or changed is None:
            return cpu.fast_argmax(scores)
        block_maxima = cpu.block_maxima(logits, width)
        # For processors of other classes, changed_blocks would have returned None.
        processors = cast(list[FlaxLogitsProcessor], self.processors)
        return cpu.argmax_from_maxima(
            scores, cpu.update_block_maxima(processors, block_maxima, scores, length, changed)
        )


def take_column(sequences: jax.Array, index: Length) -> jax.Array:
    """Returns one column of ``sequences``."""
    return jax.lax.dynamic_slice_in_dim(sequences, index, 1, axis=1)[:, 0]


def ended_rows(plan: Plan, sequences: jax.Array, tokens: jax.Array, length: Length) -> jax.Array:
    """Returns which rows are finished after ``length`` tokens.

    Args:
        plan: The plan, with end tokens and stopping criteria.
        sequences: Token buffer, `(rows, buffer)`.
        tokens: The last token of each row, `(rows,)`.
        length: Number of filled columns.
    """
    finished = jnp.zeros(tokens.shape, bool)
    for token in plan.options.eos_token_id:
        finished |= tokens == token
    for stop in plan.options.stop_token_sequences:
        finished |= ends_with(sequences, length, jnp.asarray([stop], jnp.int32))[:, 0]
    for criterion in plan.criteria:
        finished |= jnp.broadcast_to(jnp.asarray(criterion(sequences, length), bool), tokens.shape)
    return finished


def empty_record_buffers(plan: Plan, rows: int, vocab_size: int) -> dict[str, jax.Array]:
    """Returns empty buffers, `(steps, rows, vocab_size)`, for scores and logits if requested."""
    options = plan.options
    requested = {"scores": options.output_scores, "logits": options.output_logits}
    shape = (plan.steps, rows, vocab_size)
    return {
        name: jnp.zeros(shape, jnp.float32)
        for name, is_requested in requested.items()
        if is_requested
    }


def record_step(
    buffers: dict[str, jax.Array], step: Length, **values: jax.Array
) -> dict[str, jax.Array]:
    """Writes the values of this step into the buffers that exist."""
    return {
        name: jax.lax.dynamic_update_index_in_dim(buffer, values[name], step, axis=0)
        for name, buffer in buffers.items()
    }

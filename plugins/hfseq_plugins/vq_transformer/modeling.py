"""The VQ Transformer (Lingle, 2024, Transformer-VQ) on Flax NNX.

:mod:`hfseq_plugins.vq_transformer.blocks` explains the symbols in shapes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import FixedStateGeneration
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.modeling.base import Input
from hfseq.nn import Keys, trees
from hfseq.nn import outputs as out
from hfseq_plugins.common import num_labels
from hfseq_plugins.vq_transformer.codebook import perplexities, update_codebooks
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
from hfseq_plugins.vq_transformer.layers import Layer, Norm, TokenInfo, linear
from hfseq_plugins.vq_transformer.positions import sinusoids
from hfseq_plugins.vq_transformer.state import STATE_RANKS

#: The keys of a nested dict on the path from the root to a leaf.
KeyPath = tuple[str, ...]
#: PyTorch modules that are saved with every checkpoint, so that Transformers can load it without
#: hfseq.
TORCH_FILES = Path(__file__).parent / "torch_files"
CONFIGURATION = "configuration_vq_transformer"
MODELING = "modeling_vq_transformer"
#: The entry `auto_map` in `config.json`, by which Transformers finds the PyTorch classes with
#: trust_remote_code=True.
AUTO_MAP = {
    "AutoConfig": f"{CONFIGURATION}.VQTransformerConfig",
    "AutoModel": f"{MODELING}.VQTransformerModel",
    "AutoModelForCausalLM": f"{MODELING}.VQTransformerForCausalLM",
    "AutoModelForSequenceClassification": f"{MODELING}.VQTransformerForSequenceClassification",
}


def copy_torch_files(folder: Path) -> None:
    """Copies the PyTorch modules, which do not depend on hfseq, to a checkpoint folder."""
    for file in sorted(TORCH_FILES.glob("*_vq_transformer.py")):
        shutil.copyfile(file, Path(folder) / file.name)


class StateLayout(NamedTuple):
    """The layout of a model's state.

    Attributes:
        stacked: Whether the states of all layers are stacked on a leading axis.
        root: The path of the module that contains the layers.
    """

    stacked: bool = False
    root: tuple[str, ...] = ("model",)


def check_call(
    config: VQTransformerConfig,
    inputs: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    layout: StateLayout,
) -> None:
    """Checks that the inputs, the state and the model match.

    It also checks the configuration again, because options may have changed after its creation.

    Args:
        config: The configuration.
        inputs: The inputs of the call, by name.
        state: The state, or `None`.
        layout: The layout of the model's states.

    Raises:
        UsageError: The inputs, the state and the model do not match. The message lists all
            problems.
    """
    config.check()
    problems = []
    if state and inputs["segment_ids"] is not None:
        problems.append(
            "past_key_values continue a document, but segment_ids split rows into several "
            "documents. Pass only one of the two. To start a new document in some rows, pass "
            "past_key_values and reset_rows"
        )
    if inputs["reset_rows"] is not None and not state:
        problems.append("reset_rows needs past_key_values: without a state all rows start empty")
    ids = inputs["input_ids"]
    # The base class reports inputs that are not arrays.
    shape = None if ids is None or isinstance(ids, (str, list, tuple)) else np.shape(ids)
    if shape is not None and (len(shape) != 2 or not shape[1]):
        problems.append(
            f"input_ids have shape {shape} instead of (batch, length) with at least one token"
        )
    elif shape is not None:
        expected = dict.fromkeys(("attention_mask", "segment_ids", "code_mask"), shape)
        problems += [
            f"{name} has shape {np.shape(inputs[name])} instead of {size} (input_ids: {shape})"
            for name, size in {**expected, "reset_rows": shape[:1]}.items()
            if inputs[name] is not None and np.shape(inputs[name]) != size
        ]
    problems += [] if not state else dict.fromkeys(_wrong_state(config, state, layout))
    if problems:
        raise UsageError("; ".join(problems))


def _wrong_state(
    config: VQTransformerConfig, state: Mapping[str, Any], layout: StateLayout
) -> Iterator[str]:
    """Yields the differences between a state and the configuration."""
    parts: dict[KeyPath, dict[str, Any]] = {}
    for path, leaf in flatten_dict(dict(state)).items() if isinstance(state, Mapping) else ():
        parts.setdefault(path[:-1], {})[path[-1]] = leaf
    if not parts or any(
        part.keys() != STATE_RANKS.keys()
        # Either all arrays have their usual rank, or all of them have an additional axis for
        # layers.
        or {np.ndim(part[name]) - rank for name, rank in STATE_RANKS.items()} not in ({0}, {1})
        for part in parts.values()
    ):
        yield (
            "past_key_values is not a state of a VQ Transformer. Pass the result of "
            "model.init_cache(rows), or the past_key_values of an earlier output"
        )
        return
    stacked = any(np.ndim(part["position"]) > 1 for part in parts.values())
    if stacked != layout.stacked:
        state_layout, model_layout = ("with", "without") if stacked else ("without", "with")
        yield (
            f"past_key_values was created {state_layout} scan_layers, but the model was created "
            f"{model_layout} scan_layers. Use the model's init_cache"
        )
        return
    layers = config.num_hidden_layers
    depths = {len(part["position"]) if stacked else layers for part in parts.values()}
    numbers = [()] if stacked else [(str(n),) for n in range(layers)]
    names = ("attention", "attention_2") if config.gated else ("attention",)
    expected = {(*layout.root, "layers", *number, name) for number in numbers for name in names}
    if parts.keys() != expected or depths != {layers}:
        yield (
            f"past_key_values was created for {_describe_attentions(parts, depths, stacked)}, but "
            f"the model has {_describe_attentions(expected, {layers}, stacked)}"
        )
    for part in parts.values():
        key, value = np.shape(part["window_key"]), np.shape(part["window_value"])
        sizes = {
            "window_size": (key[-2], config.window_size),
            "num_codes": (np.shape(part["cache_count"])[-1], config.num_codes),
            "key heads": (key[-3], config.key_heads),
            "head_dim": (key[-1], config.head_dim),
            "value_dim": (value[-1], config.value_width),
        }
        for name, (state_size, size) in sizes.items():
            if state_size != size:
                yield (
                    f"past_key_values was created for {name}={state_size}, but the model has "
                    f"{name}={size}"
                )


def _describe_attentions(paths: Iterable[KeyPath], depths: set[int], stacked: bool) -> str:
    names = sorted("/".join(path) for path in paths)
    excerpt = names if len(names) < 3 else [names[0], "...", names[-1]]
    layers = f" in {'/'.join(map(str, sorted(depths)))} layers" if stacked else ""
    return f"{len(names)} attentions{layers} ({', '.join(excerpt)})"


class TokenOrder(NamedTuple):
    """An order of the columns of each row in which all tokens precede the padding.

    :meth:`pack` moves tokens into this order, and :meth:`unpack` moves results back.

    Attributes:
        lengths: The number of tokens of each row, `(B,)`. `None` without padding.
        order: The columns of the tokens, followed by the columns of padding, `(B, T)`. `None` if no
            token moves.
        back: The position in `order` of each column, `(B, T)`. `None` if no token moves.
    """

    lengths: jax.Array | None = None
    order: jax.Array | None = None
    back: jax.Array | None = None

    @classmethod
    def find(cls, attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> TokenOrder:
        """Creates the order for an attention mask.

        The tokens of packed rows do not move. Moving them is not necessary and would slow down
        training.

        Args:
            attention_mask: `(B, T)`, 0 for padding.
            segment_ids: Document number of each token in packed rows, `(B, T)`, or `None`.
        """
        if attention_mask is None or segment_ids is not None:
            return cls()
        real = (attention_mask > 0).astype(jnp.int32)
        lengths = real.sum(1)
        if real.shape[1] == 1:
            return cls(lengths)
        order = jnp.argsort(1 - real, axis=1, stable=True)
        return cls(lengths, order, jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0))

    def pack(self, x: jax.Array | None) -> jax.Array | None:
        """Moves the tokens of an array `(B, T)` before the padding."""
        if x is None or self.order is None:
            return x
        return jnp.take_along_axis(x, self.order, axis=1, mode="clip")

    def unpack(self, x: jax.Array) -> jax.Array:
        """Moves the vectors of `(B, T, F)` back to the columns of their tokens."""
        if self.back is None:
            return x
        return jnp.take_along_axis(x, self.back[..., None], axis=1, mode="clip")

    def valid(self, tokens: int) -> jax.Array | None:
        """Returns a mask of the columns after :meth:`pack`, `(B, T)`. It is False for padding."""
        return None if self.lengths is None else jnp.arange(tokens) < self.lengths[:, None]


class Transformer(nnx.Module):
    """The VQ Transformer without a head."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.config = config
        init = nn.normal(config.embedding_initializer_range)
        self.embed_tokens = nn.Embed(config.vocab_size, config.hidden_size, init, rngs)
        absolute = config.absolute_positions
        self.position_scale = nnx.Param(jnp.zeros(())) if absolute else nnx.data(None)
        self.drop = nn.Dropout(config.embedding_dropout)
        self.layers = nn.Layers([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config) if config.final_norm else nnx.data(None)

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        segment_ids: jax.Array | None = None,  # (batch, length)
        code_mask: jax.Array | None = None,  # (batch, length)
        reset_rows: jax.Array | None = None,  # (batch,)
        *,
        rngs: Keys | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> out.FlaxModelOutput:
        if output_attentions:
            raise UsageError(
                "output_attentions is not supported: a code represents many tokens, so there are "
                "no weights per token. output_hidden_states is supported"
            )
        rows = TokenOrder.find(attention_mask, segment_ids)
        valid = rows.valid(input_ids.shape[1])
        if segment_ids is not None:
            valid = segment_ids > 0  # in a document, and not masked
            if attention_mask is not None:
                valid &= attention_mask > 0
        tokens = self._tokens(rows, valid, segment_ids, code_mask, reset_rows)
        packed_ids: Any = rows.pack(input_ids)  # None only for None
        x = self.embed(packed_ids, tokens, rngs)
        x, losses, inputs = nn.run_layers(
            self.layers, x, tokens, rngs=rngs, collect=output_hidden_states
        )
        x = rows.unpack(x if self.norm is None else self.norm(x))
        cost = self.config.commitment_cost
        return out.FlaxBaseModelOutputWithPastAndLoss(
            last_hidden_state=x,
            hidden_states=(*map(rows.unpack, inputs or ()), x) if output_hidden_states else None,
            auxiliary_loss=None if losses[0] is None else cost * jnp.stack(losses).sum(),
        )

    def _tokens(
        self,
        rows: TokenOrder,
        valid: jax.Array | None,
        segment: jax.Array | None,
        counted: jax.Array | None,
        fresh: jax.Array | None,
    ) -> TokenInfo:
        counted = rows.pack(counted)
        if segment is not None and self.config.attention_type != "vq":
            # Attention over all pairs of tokens only compares document numbers. Negative numbers
            # separate the masked tokens of a document from the others.
            visible: Any = valid  # always set for packed rows
            segment = jnp.where(visible, segment, -segment)
        if counted is None or valid is None:
            counted = valid if counted is None else counted
        else:
            counted = (counted > 0) & valid
        return TokenInfo(rows.lengths, valid, counted, segment, fresh)

    def embed(self, ids: jax.Array, tokens: TokenInfo, rngs: Keys | None) -> jax.Array:
        """Returns token embeddings, plus absolute position embeddings if the model has them."""
        x = self.embed_tokens(ids)
        if self.position_scale is not None:
            positions = self._positions(ids, tokens)
            waves = sinusoids(positions, self.config.hidden_size, self.config.sinusoid_base)
            x = x + (self.position_scale[...] * waves).astype(x.dtype)
        return self.drop(x, rngs)

    def _positions(self, ids: jax.Array, tokens: TokenInfo) -> jax.Array:
        """Returns positions, which continue from the state or start at 0 in each document."""
        if tokens.segment is not None:
            return nn.positions_in_segments(jnp.abs(tokens.segment))
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        first = self.layers[0] if isinstance(self.layers, nnx.List) else self.layers
        state = first.attention.read_cache()
        if state is None:
            return positions
        start = state["position"].reshape(-1, len(ids))[0]
        if tokens.fresh is not None:
            start = jnp.where(tokens.fresh, 0, start)
        return positions + start[:, None]


class CausalLM(nnx.Module):
    """The Transformer with a language modeling head. Scale and bias of the logits are float32."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.config, sizes = config, (config.hidden_size, config.vocab_size)
        self.model = Transformer(config, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs)
        bias = config.head_bias
        self.lm_head_bias = nnx.Param(jnp.zeros(config.vocab_size)) if bias else nnx.data(None)

    def __call__(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        output = self.model(*args, **kwargs)
        return out.FlaxCausalLMOutputWithPast(
            logits=nn.vocabulary_logits(self.head, output.last_hidden_state),
            hidden_states=output.hidden_states,
            auxiliary_loss=output.auxiliary_loss,
        )

    def head(self, x: jax.Array) -> jax.Array:
        """Maps hidden states, `(B, T, D)`, to logits of the same dtype, `(B, T, vocab_size)`."""
        head = self.model.embed_tokens.attend if self.lm_head is None else self.lm_head
        logits, scale = head(x).astype(jnp.float32), self.config.logit_scale
        if self.lm_head_bias is None:
            logits = logits * scale
        elif self.config.scale_head_bias:
            logits = (logits + self.lm_head_bias[...]) * scale
        else:
            logits = logits * scale + self.lm_head_bias[...]
        return logits.astype(x.dtype)


class SequenceClassification(nnx.Module):
    """The Transformer with a classification or regression head for the last token."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.model = Transformer(config, rngs)
        self.score = linear(config, config.hidden_size, num_labels(config), rngs)
        self.pad = config.pad_token_id

    def __call__(
        self,
        input_ids: jax.Array,  # (batch, length)
        attention_mask: jax.Array | None = None,  # (batch, length)
        **kwargs: Any,
    ) -> out.FlaxModelOutput:
        output = self.model(input_ids, attention_mask, **kwargs)
        mask = attention_mask
        if mask is None:
            mask = jnp.ones_like(input_ids) if self.pad is None else input_ids != self.pad
        columns = jnp.arange(input_ids.shape[1])
        last = jnp.where(mask > 0, columns, 0).max(1)
        state = jnp.take_along_axis(output.last_hidden_state, last[:, None, None], axis=1)[:, 0]
        return out.FlaxSequenceClassifierOutputWithPast(
            logits=self.score(state),
            hidden_states=output.hidden_states,
            auxiliary_loss=output.auxiliary_loss,
        )


class FlaxVQTransformerPreTrainedModel(FlaxPreTrainedModel):
    """Base class of the VQ Transformer models. The collection `codebook` contains the codebooks."""

    config_class = VQTransformerConfig
    base_model_prefix = "model"
    weight_aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    stored_collections = {"codebook": ("sums", "counts")}
    head_counts = ()  # a single head can be split, by the columns of its values
    fixed_state = True

    def __call__(  # type: ignore[override]  # the state precedes the other options
        self,
        input_ids: Input,
        attention_mask: Input = None,
        params: trees.Params | None = None,
        past_key_values: trees.Params | None = None,
        dropout_rng: jax.Array | Keys | None = None,
        train: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        output_attentions: bool | None = None,
        segment_ids: Input = None,
        code_mask: Input = None,
        reset_rows: Input = None,
        extra: trees.Params | None = None,
    ) -> Any:
        """Runs the model. See :meth:`FlaxPreTrainedModel.run` for the other arguments.

        Args:
            input_ids: Tokens, `(batch, length)`.
            attention_mask: `(batch, length)`, 0 for tokens that are treated as if they were removed
                from the text.
            past_key_values: The state from :meth:`init_cache` or from the previous call.
            segment_ids: Document number of each token in packed rows, `(batch, length)`, and 0 for
                padding at either end. Documents do not attend to each other. Masked tokens within a
                document still count for the positions of later tokens.
            code_mask: `(batch, length)`, 0 for tokens that are excluded from the statistics of the
                codebooks in training.
            reset_rows: `(batch,)`, true for rows that start with an empty state.

        Raises:
            UsageError: The state belongs to another model or batch size, a state is combined with
                `segment_ids`, or the shape of a mask differs from that of `input_ids`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "segment_ids": segment_ids,
            "code_mask": code_mask,
            "reset_rows": reset_rows,
        }
        root = () if self.module_class is Transformer else ("model",)
        check_call(self.config, inputs, past_key_values, StateLayout(self.scan_layers, root))
        return self.run(
            inputs,
            params,
            dropout_rng,
            train,
            output_attentions,
            output_hidden_states,
            return_dict,
            past_key_values,
            extra,
        )

    def max_length(self) -> None:
        """Returns `None`, because the length is unlimited."""

    def init_cache(
        self, batch_size: int, max_length: int = 0, *_: Any, **__: Any
    ) -> dict[str, Any]:
        """Returns the state before the first token. Its size does not depend on `max_length`."""
        if self.config.attention_type == "full":
            raise UsageError(
                "attention_type=full attends to all earlier tokens, so it has no state of fixed "
                "size. Use attention_type=vq for generation and for training in windows"
            )
        return super().init_cache(batch_size, max_length)

    def attention_flops(self, length: int) -> float:
        """Returns the FLOPs of attention per token in training, without the projections.

        The counted operations are the scores with keys of width K, the weighted sums of values of
        width V, and the search for codes, which has no backward pass.

        Args:
            length: Number of tokens per row.
        """
        config, heads = self.config, self.config.query_heads
        near, far = config.window_size + config.block_size, config.num_codes
        positions = config.window_size + 1
        if config.attention_type != "vq":
            near, far, positions = length, 0, length
        attended_width = config.head_dim * (near + far + positions) + config.value_width * (
            near + far
        )
        search = config.key_heads * config.head_dim * config.num_codes
        search = 0 if config.attention_type == "full" else search
        modules = config.num_hidden_layers * (2 if config.gated else 1)
        return float(modules * (6 * heads * attended_width + 2 * search))

    def check_training(self, tokens: int) -> None:
        """Checks that an optimizer step has at least as many tokens as there are codes.

        Args:
            tokens: Number of tokens per optimizer step.

        Raises:
            UsageError: There are more codes than tokens.
        """
        config = self.config
        if config.attention_type != "full" and config.num_codes > tokens:
            raise UsageError(
                f"num_codes={config.num_codes} exceeds the {tokens} keys of an optimizer step "
                "(rows times tokens per row), so most codes would never be used. Use fewer codes "
                "or a larger batch"
            )

    def finalize_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Updates all codebooks with the keys of this optimizer step."""
        if self.config.attention_type == "full":
            return extra
        return {**extra, "codebook": update_codebooks(extra["codebook"], self.config.ema_decay)}

    def extra_metrics(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Returns the mean and the minimum of the perplexities of all codebooks.

        A perplexity is at most `num_codes`.
        """
        values = jnp.stack(perplexities(extra["codebook"]))
        return {"code_perplexity": values.mean(), "code_perplexity_min": values.min()}

    def save_config(self, folder: Path) -> None:
        """Saves the configuration, and the PyTorch modules that Transformers needs to load it."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_config(folder)
        copy_torch_files(folder)


class FlaxVQTransformerModel(FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer without a head. Returns hidden states."""

    module_class = Transformer


class FlaxVQTransformerForCausalLM(FixedStateGeneration, FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer with a language modeling head."""

    module_class = CausalLM


class FlaxVQTransformerForSequenceClassification(FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer for sequence classification, from the last token."""

    module_class = SequenceClassification

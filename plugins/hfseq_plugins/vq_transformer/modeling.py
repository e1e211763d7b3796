"""The VQ Transformer (Lingle, 2024, Transformer-VQ) on Flax NNX."""

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
from hfseq.nn import Keys
from hfseq.nn import outputs as out
from hfseq_plugins.vq_transformer.codebook import perplexities, update_codebooks
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
from hfseq_plugins.vq_transformer.layers import Layer, Norm, TokenInfo, linear
from hfseq_plugins.vq_transformer.positions import sinusoids
from hfseq_plugins.vq_transformer.state import STATE_RANKS

#: Names from the root of a tree to a leaf.
KeyPath = tuple[str, ...]
#: The PyTorch twin: files that lie beside every checkpoint, for Transformers without hfseq.
TORCH_FILES = Path(__file__).parent / "torch_files"
CONFIGURATION = "configuration_vq_transformer"
MODELING = "modeling_vq_transformer"
#: What ``config.json`` says about these files; Transformers reads it with trust_remote_code=True.
AUTO_MAP = {
    "AutoConfig": f"{CONFIGURATION}.VQTransformerConfig",
    "AutoModel": f"{MODELING}.VQTransformerModel",
    "AutoModelForCausalLM": f"{MODELING}.VQTransformerForCausalLM",
    "AutoModelForSequenceClassification": f"{MODELING}.VQTransformerForSequenceClassification",
}


def copy_torch_files(folder: Path) -> None:
    """Copy the twin's files into the checkpoint at ``folder``; they import nothing of hfseq."""
    for file in sorted(TORCH_FILES.glob("*_vq_transformer.py")):
        shutil.copyfile(file, Path(folder) / file.name)


class StateLayout(NamedTuple):
    """Where a model's attentions are: below ``root``, and ``stacked`` over layers or one by one."""

    stacked: bool = False
    root: tuple[str, ...] = ("model",)


def check_call(
    config: VQTransformerConfig,
    given: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    layout: StateLayout,
) -> None:
    """Raise one UsageError for inputs and a state that do not fit each other or the model.

    Options may have been changed since the configuration was made, so they are checked again.
    """
    config.check()
    problems = []
    if state and given["segment_ids"] is not None:
        problems.append(
            "past_key_values carry one document on, segment_ids cut rows into several: give one of "
            "them, or reset_rows for rows that begin a new document"
        )
    if given["reset_rows"] is not None and not state:
        problems.append("reset_rows needs past_key_values: without a state every row is fresh")
    ids = given["input_ids"]
    # The base class has its own messages for other things than arrays.
    shape = None if ids is None or isinstance(ids, (str, list, tuple)) else np.shape(ids)
    if shape is not None and (len(shape) != 2 or not shape[1]):
        problems.append(
            f"input_ids are {shape}: they have to be (batch, length) with at least one token"
        )
    elif shape is not None:
        wanted = dict.fromkeys(("attention_mask", "segment_ids", "code_mask"), shape)
        problems += [
            f"{name} is {np.shape(given[name])}, but input_ids are {shape}: it has to be {size}"
            for name, size in {**wanted, "reset_rows": shape[:1]}.items()
            if given[name] is not None and np.shape(given[name]) != size
        ]
    problems += [] if not state else dict.fromkeys(_wrong_state(config, state, layout))
    if problems:
        raise UsageError("; ".join(problems))


def _wrong_state(
    config: VQTransformerConfig, state: Mapping[str, Any], layout: StateLayout
) -> Iterator[str]:
    """Compare the entries of every attention with the configuration."""
    parts: dict[KeyPath, dict[str, Any]] = {}
    for path, leaf in flatten_dict(dict(state)).items() if isinstance(state, Mapping) else ():
        parts.setdefault(path[:-1], {})[path[-1]] = leaf
    if not parts or any(
        part.keys() != STATE_RANKS.keys()
        # All axes, and either one of layers before them everywhere or none.
        or {np.ndim(part[name]) - rank for name, rank in STATE_RANKS.items()} not in ({0}, {1})
        for part in parts.values()
    ):
        yield (
            "past_key_values is no state of a VQ Transformer: give init_cache(rows) or what a call "
            "returned"
        )
        return
    stacked = any(np.ndim(part["position"]) > 1 for part in parts.values())
    if stacked != layout.stacked:
        made, own = ("with", "without") if stacked else ("without", "with")
        yield f"past_key_values was made {made} scan_layers, the model is {own}: use its init_cache"
        return
    layers = config.num_hidden_layers
    deep = {len(part["position"]) if stacked else layers for part in parts.values()}
    numbers = [()] if stacked else [(str(n),) for n in range(layers)]
    names = ("attention", "attention_2") if config.gated else ("attention",)
    wanted = {(*layout.root, "layers", *number, name) for number in numbers for name in names}
    if parts.keys() != wanted or deep != {layers}:
        yield (
            f"past_key_values was made for {_told(parts, deep, stacked)}, the model has "
            f"{_told(wanted, {layers}, stacked)}"
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
        for name, (given, size) in sizes.items():
            if given != size:
                yield f"past_key_values was made for {name}={given}, the model has {name}={size}"


def _told(paths: Iterable[KeyPath], deep: set[int], stacked: bool) -> str:
    named = sorted("/".join(path) for path in paths)
    some = named if len(named) < 3 else [named[0], "...", named[-1]]
    layers = f" in {'/'.join(map(str, sorted(deep)))} layers" if stacked else ""
    return f"{len(named)} attentions{layers} ({', '.join(some)})"


class TokenOrder(NamedTuple):
    """Where the real tokens of a batch are: they move to the front, and results move back.

    ``lengths`` (B,) counts them, None if all are real; ``order`` (B, T) lists their columns, and
    then the others', None if they are at the front; ``back`` (B, T) is where each column went.
    """

    lengths: jax.Array | None = None
    order: jax.Array | None = None
    back: jax.Array | None = None

    @classmethod
    def find(cls, attention_mask: jax.Array | None, segment_ids: jax.Array | None) -> TokenOrder:
        """Find the real tokens by ``attention_mask`` (B, T); tokens of packed rows stay in place.

        What ``segment_ids`` (B, T) separate needs no order, and moving it would cost time in
        training.
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
        """Move the real tokens of (B, T) to the front."""
        if x is None or self.order is None:
            return x
        return jnp.take_along_axis(x, self.order, axis=1, mode="clip")

    def unpack(self, x: jax.Array) -> jax.Array:
        """Move the vectors of (B, T, F) back to the columns of their tokens."""
        if self.back is None:
            return x
        return jnp.take_along_axis(x, self.back[..., None], axis=1, mode="clip")

    def valid(self, tokens: int) -> jax.Array | None:
        """Tell which columns hold a real token once they are packed, (B, T)."""
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
        input_ids,
        attention_mask=None,
        segment_ids=None,
        code_mask=None,
        reset_rows=None,
        *,
        rngs=None,
        output_attentions=False,
        output_hidden_states=False,
    ):
        if output_attentions:
            raise UsageError(
                "output_attentions: a code stands for many tokens, so there is no weight for each; "
                "output_hidden_states works"
            )
        rows = TokenOrder.find(attention_mask, segment_ids)
        valid = rows.valid(input_ids.shape[1])
        if segment_ids is not None:
            valid = segment_ids > 0  # in a document, and not hidden
            if attention_mask is not None:
                valid &= attention_mask > 0
        tokens = self._tokens(rows, valid, segment_ids, code_mask, reset_rows)
        x = self.embed(rows.pack(input_ids), tokens, rngs)
        x, losses, inputs = nn.run_layers(
            self.layers, x, tokens, rngs=rngs, collect=output_hidden_states
        )
        x = rows.unpack(x if self.norm is None else self.norm(x))
        cost = self.config.commitment_cost
        return out.FlaxBaseModelOutputWithPastAndLoss(
            last_hidden_state=x,
            hidden_states=(*map(rows.unpack, inputs), x) if output_hidden_states else None,
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
            # All pairs are compared by their documents: hidden tokens are in one of their own.
            segment = jnp.where(valid, segment, -segment)
        if counted is None or valid is None:
            counted = valid if counted is None else counted
        else:
            counted = (counted > 0) & valid
        return TokenInfo(rows.lengths, valid, counted, segment, fresh)

    def embed(self, ids: jax.Array, tokens: TokenInfo, rngs: Keys | None) -> jax.Array:
        """Look tokens up and add their absolute positions, where the model has them."""
        x = self.embed_tokens(ids)
        if self.position_scale is not None:
            places = self._places(ids, tokens)
            waves = sinusoids(places, self.config.hidden_size, self.config.sinusoid_base)
            x = x + (self.position_scale[...] * waves).astype(x.dtype)
        return self.drop(x, rngs)

    def _places(self, ids: jax.Array, tokens: TokenInfo) -> jax.Array:
        """Number the tokens from where the state stands, in every document from 0."""
        if tokens.segment is not None:
            return nn.positions_in_segments(jnp.abs(tokens.segment))
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        first = self.layers[0] if isinstance(self.layers, nnx.List) else self.layers
        held = first.attention.read_cache()
        if held is None:
            return places
        start = held["position"].reshape(-1, len(ids))[0]
        if tokens.fresh is not None:
            start = jnp.where(tokens.fresh, 0, start)
        return places + start[:, None]


class CausalLM(nnx.Module):
    """Next-token prediction; scale and bias of the head are applied in float32."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.config, sizes = config, (config.hidden_size, config.vocab_size)
        self.model = Transformer(config, rngs)
        tied = config.tie_word_embeddings
        self.lm_head = nnx.data(None) if tied else linear(config, *sizes, rngs)
        bias = config.head_bias
        self.lm_head_bias = nnx.Param(jnp.zeros(config.vocab_size)) if bias else nnx.data(None)

    def __call__(self, *args: Any, **kwargs: Any):
        output = self.model(*args, **kwargs)
        return out.FlaxCausalLMOutputWithPast(
            logits=self.head(output.last_hidden_state),
            hidden_states=output.hidden_states,
            auxiliary_loss=output.auxiliary_loss,
        )

    def head(self, x: jax.Array) -> jax.Array:
        """Map hidden states (B, T, D) to logits (B, T, vocabulary) in their type."""
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
    """A class or a score for each row, from its last token."""

    def __init__(self, config: VQTransformerConfig, rngs: nnx.Rngs):
        self.model = Transformer(config, rngs)
        self.score = linear(config, config.hidden_size, config.num_labels, rngs)
        self.pad = config.pad_token_id

    def __call__(self, input_ids, attention_mask=None, **kwargs: Any):
        output = self.model(input_ids, attention_mask, **kwargs)
        real = attention_mask
        if real is None:
            real = jnp.ones_like(input_ids) if self.pad is None else input_ids != self.pad
        columns = jnp.arange(input_ids.shape[1])
        last = jnp.where(real > 0, columns, 0).max(1)
        state = jnp.take_along_axis(output.last_hidden_state, last[:, None, None], axis=1)[:, 0]
        return out.FlaxSequenceClassifierOutputWithPast(
            logits=self.score(state),
            hidden_states=output.hidden_states,
            auxiliary_loss=output.auxiliary_loss,
        )


class FlaxVQTransformerPreTrainedModel(FlaxPreTrainedModel):
    """Base of the VQ Transformer classes; the codebooks are the collection ``codebook``."""

    config_class = VQTransformerConfig
    base_model_prefix = "model"
    weight_aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    stored_collections = {"codebook": ("sums", "counts")}
    head_counts = ()  # a single head can be split, by the columns of its values
    fixed_state = True

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        params=None,
        past_key_values=None,
        dropout_rng=None,
        train=False,
        output_hidden_states=None,
        return_dict=None,
        *,
        output_attentions=None,
        segment_ids=None,
        code_mask=None,
        reset_rows=None,
        extra=None,
    ):
        """Run the model; see :meth:`FlaxPreTrainedModel.run`.

        ``input_ids`` (batch, length); tokens that ``attention_mask`` (batch, length) hides leave no
        trace. ``segment_ids`` (batch, length) numbers the documents of packed rows, which do not
        see each other; 0 is padding on any side, and tokens that the mask hides within a document
        keep their places. ``past_key_values`` is the state of :meth:`init_cache`; rows that
        ``reset_rows`` (batch,) names begin afresh. While training, tokens that ``code_mask``
        (batch, length) hides do not count for the codebooks.

        **Raises:** UsageError for a state of another batch or model, or together with
        ``segment_ids``, and for masks of another shape than ``input_ids``.
        """
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "segment_ids": segment_ids,
            "code_mask": code_mask,
            "reset_rows": reset_rows,
        }
        root = () if self.module_class is Transformer else ("model",)
        check_call(self.config, given, past_key_values, StateLayout(self.scan_layers, root))
        return self.run(
            given,
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
        """Return None: nothing limits the length."""

    def init_cache(
        self, batch_size: int, max_length: int = 0, *_: Any, **__: Any
    ) -> dict[str, Any]:
        """Return the state before the first token; its size does not depend on ``max_length``."""
        if self.config.attention_type == "full":
            raise UsageError(
                "attention_type=full looks at all earlier tokens, so it has no state of fixed "
                "size: generate and train by windows with attention_type=vq"
            )
        return super().init_cache(batch_size, max_length)

    def attention_flops(self, length: int) -> float:
        """Return the FLOPs of training a token beside its kernels, in rows of ``length`` tokens.

        Scores meet keys of width K, weights meet values of width V; the search for codes has no
        backward pass.
        """
        config, heads = self.config, self.config.query_heads
        near, far = config.window_size + config.block_size, config.num_codes
        positions = config.window_size + 1
        if config.attention_type != "vq":
            near, far, positions = length, 0, length
        seen = config.head_dim * (near + far + positions) + config.value_width * (near + far)
        search = config.key_heads * config.head_dim * config.num_codes
        search = 0 if config.attention_type == "full" else search
        modules = config.num_hidden_layers * (2 if config.gated else 1)
        return float(modules * (6 * heads * seen + 2 * search))

    def check_training(self, tokens: int) -> None:
        """Refuse more codes than the ``tokens`` of an optimizer step could ever fill."""
        config = self.config
        if config.attention_type != "full" and config.num_codes > tokens:
            raise UsageError(
                f"num_codes={config.num_codes} is more than the {tokens} keys of an optimizer step "
                "(rows times tokens): most codes would never be used; take fewer codes or a larger "
                "batch"
            )

    def finalize_extra(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Move every codebook once towards the keys of this optimizer step."""
        if self.config.attention_type == "full":
            return extra
        return {**extra, "codebook": update_codebooks(extra["codebook"], self.config.ema_decay)}

    def extra_metrics(self, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Return the mean perplexity of the codes, of ``num_codes`` at most."""
        values = jnp.stack(perplexities(extra["codebook"]))
        return {"code_perplexity": values.mean(), "code_perplexity_min": values.min()}

    def save_config(self, folder: Path) -> None:
        """Write the configuration, and the PyTorch classes that Transformers loads with it."""
        self.config.auto_map = dict(AUTO_MAP)
        super().save_config(folder)
        copy_torch_files(folder)


class FlaxVQTransformerModel(FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer without a head: hidden states."""

    module_class = Transformer


class FlaxVQTransformerForCausalLM(FixedStateGeneration, FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer with its language-modelling head."""

    module_class = CausalLM


class FlaxVQTransformerForSequenceClassification(FlaxVQTransformerPreTrainedModel):
    """The VQ Transformer with a classifier on the last token."""

    module_class = SequenceClassification

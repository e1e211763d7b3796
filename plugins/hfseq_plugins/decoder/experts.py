"""Mixtures of experts of decoders: router, experts, shared expert and load-balancing loss.

Each parameter of a mixture holds the weights of all experts. Checkpoints contain either this one
tensor, or a separate tensor per expert and projection. `JOINED` and `MIXTRAL_JOINED` contain the
names of the separate tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.modeling import JoinedTensor
from hfseq.nn import Keys
from hfseq.nn.experts import tensor_rank
from hfseq.nn.sharding import Axes
from hfseq_plugins.decoder.mlp import MLP
from hfseq_plugins.decoder.options import family_options, is_enabled, num_experts

#: For each parameter, the names of the tensors in checkpoints with a separate tensor per expert.
#: `{}` stands for the number of the expert.
JOINED: Mapping[str, JoinedTensor] = {
    "experts.gate_up_proj": JoinedTensor(
        ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    ),
    "experts.down_proj": JoinedTensor(("experts.{}.down_proj.weight",)),
}
#: As `JOINED`, for the names in checkpoints of Mixtral.
MIXTRAL_JOINED: Mapping[str, JoinedTensor] = {
    "experts.gate_up_proj": JoinedTensor(("experts.{}.w1.weight", "experts.{}.w3.weight")),
    "experts.down_proj": JoinedTensor(("experts.{}.w2.weight",)),
}


class RouterStatistics(NamedTuple):
    """The statistics of a router that the load-balancing loss needs, summed over all tokens.

    Attributes:
        probabilities: Sum of each expert's probabilities, float32 `(experts,)`.
        choices: Number of tokens for which the router chose each expert, float32 `(experts,)`.
        tokens: Number of tokens, float32.
    """

    probabilities: jax.Array
    choices: jax.Array
    tokens: jax.Array


def load_balancing_loss(layers: Sequence[RouterStatistics]) -> jax.Array:
    """Returns the load-balancing loss of a model (Fedus et al., 2021, equation 4).

    As in Transformers, the statistics are averaged over the layers, and the loss is computed from
    the averages. It has its minimum, the number of experts per token, if all experts are chosen
    equally often.

    Args:
        layers: The router statistics of each layer with a mixture of experts.
    """
    probabilities, choices, tokens = (sum(parts) for parts in zip(*layers, strict=True))
    count = jnp.maximum(tokens, 1)
    products = lax.stop_gradient(choices / count) * (probabilities / count)
    return products.shape[0] * products.sum()


class Router(nn.Linear):
    """Linear layer that computes the scores of the experts in float32.

    The layer ignores the data type of precision recipes, because rounding the scores to half
    precision would change the choice of experts. It cannot have LoRA adapters, because the routers
    in Transformers are not linear layers.
    """

    adaptable = False

    @property
    def compute_dtype(self) -> DTypeLike:
        """The data type in which the layer computes."""
        return jnp.float32

    @compute_dtype.setter
    def compute_dtype(self, dtype: DTypeLike | None) -> None:
        """Ignores the data type of the precision recipe."""


class Experts(nn.ExpertLayer):
    """The gated feed-forward blocks of all experts.

    The parameters have the same layout as in PyTorch. `gate_up_proj` is `(experts, 2 * inner,
    hidden)`, and its first `inner` outputs are the gate. `down_proj` is `(experts, hidden, inner)`.
    """

    #: The mesh axes over which each axis of the kernels in `arrays` is split. There,
    #: `gate_up_proj` is `(experts, 2, inner, hidden)`.
    axes: ClassVar[dict[str, Axes]] = {
        "gate_up_proj": ("expert", None, "tensor", "fsdp"),
        "down_proj": ("expert", "fsdp", "tensor"),
    }
    #: The mesh axes over which each axis of the result of `split_halves` is split.
    half_axes: ClassVar[Axes] = ("expert", None, None, "tensor")
    gate_up_proj: nnx.Param
    down_proj: nnx.Param

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        options = family_options(config).experts
        assert options is not None
        self.count, width = num_experts(config), config.hidden_size
        self.inner = getattr(config, options.inner_size)
        init = nn.normal(config.initializer_range)
        sizes = {"gate_up_proj": (width, 2 * self.inner), "down_proj": (self.inner, width)}
        for name, size in sizes.items():
            shape = (self.count, *(size[::-1] if self.transposed else size))
            setattr(self, name, nnx.Param(init(rngs.params(), shape, jnp.float32)))
        self.act = nn.activation(config.hidden_act)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        index: jax.Array,  # (batch, length, choices)
        weights: jax.Array,  # (batch, length, choices)
    ) -> jax.Array:
        arrays, axes = self.arrays(), dict(self.axes)
        for name in self.kernel_names:
            if (adapter := self.adapter(name)) is not None:
                first, second = adapter.factors()
                # The outputs of the first layer and the inputs of the second layer are split over
                # the mesh axis `tensor`, so the adapter is split along these features too.
                is_input = name == "gate_up_proj"
                arrays |= {f"{name}_a": first, f"{name}_b": second}
                axes |= {f"{name}_a": ("expert",), f"{name}_b": ("expert",)}
                if is_input:
                    arrays[f"{name}_b"] = self.split_halves(second)
                    axes[f"{name}_b"] = self.half_axes
                else:
                    axes[f"{name}_a"] = ("expert", "tensor")
        return nn.mix_sharded_experts(x, index, weights, self.count, self.compute, arrays, axes)

    def split_halves(self, factor: jax.Array) -> jax.Array:
        """Separates gate and values in the second factor of an adapter.

        Args:
            factor: The factor, `(experts, rank, 2 * inner)`.

        Returns:
            The factor, `(experts, rank, 2, inner)`.
        """
        return factor.reshape(*factor.shape[:2], 2, self.inner)

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the parameters of the experts, in the shapes that `axes` describes."""
        gate_up = self.gate_up_proj[...]
        halves = gate_up.reshape(self.count, 2, self.inner, gate_up.shape[-1])
        return {"gate_up_proj": halves, "down_proj": self.down_proj[...]}

    def compute(
        self, rows: jax.Array, layout: nn.ExpertRows, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        """Applies the experts to rows, `(rows, hidden)`, as `nn.mix_sharded_experts` requires."""
        gate, up = jnp.split(self.product(rows, layout, arrays, "gate_up_proj"), 2, axis=-1)
        return self.product(self.act(gate) * up, layout, arrays, "down_proj")

    def product(
        self,
        rows: jax.Array,
        layout: nn.ExpertRows,
        arrays: Mapping[str, jax.Array],
        name: str,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies rows by the kernels of their experts, and adds the products of adapters."""
        kernel = arrays[name]
        if kernel.ndim == 4:
            kernel = kernel.reshape(len(kernel), -1, kernel.shape[-1])
        outputs = layout.product(rows, kernel, bias, transposed=self.transposed)
        if f"{name}_a" not in arrays:
            return outputs
        second = arrays[f"{name}_b"]
        second = second.reshape(*second.shape[:2], -1)
        return outputs + layout.product(layout.product(rows, arrays[f"{name}_a"]), second)


class ClampedExperts(Experts):
    """The feed-forward blocks of all experts of gpt-oss.

    The parameters have the same layout as in PyTorch. `gate_up_proj` is `(experts, hidden,
    2 * inner)`, and its outputs alternate between gate and values. `down_proj` is `(experts, inner,
    hidden)`.
    """

    transposed = False
    axes: ClassVar[dict[str, Axes]] = {
        "gate_up_proj": ("expert", "fsdp", "tensor"),
        "gate_up_proj_bias": ("expert", "tensor"),
        "down_proj": ("expert", "tensor", "fsdp"),
        "down_proj_bias": ("expert",),
    }
    half_axes: ClassVar[Axes] = ("expert", None, "tensor")

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.gate_up_proj_bias = nnx.Param(jnp.zeros((self.count, 2 * self.inner)))
        self.down_proj_bias = nnx.Param(jnp.zeros((self.count, config.hidden_size)))
        self.limit, self.alpha = config.swiglu_limit, config.swiglu_alpha

    def split_halves(self, factor: jax.Array) -> jax.Array:
        """Returns `factor` unchanged, because its columns alternate between gate and values."""
        return factor

    def arrays(self) -> dict[str, jax.Array]:
        """Returns the parameters of the experts."""
        return {name: getattr(self, name)[...] for name in self.axes}

    def compute(
        self, rows: jax.Array, layout: nn.ExpertRows, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        """Applies the experts to rows, `(rows, hidden)`, as `nn.mix_sharded_experts` requires."""
        inner = self.product(rows, layout, arrays, "gate_up_proj", arrays["gate_up_proj_bias"])
        gate = jnp.minimum(inner[:, ::2], self.limit)
        up = jnp.clip(inner[:, 1::2], -self.limit, self.limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
        # The outputs of the devices along the mesh axis `tensor` are summed, so only the first of
        # these devices adds the bias.
        is_first = tensor_rank(nn.current_options().mesh) == 0
        bias = jnp.where(is_first, arrays["down_proj_bias"], 0)
        return self.product(inner, layout, arrays, "down_proj", bias)


class SparseBlock(nnx.Module):
    """A mixture of experts. The router chooses the experts that process each token.

    The experts have no limit on their number of tokens, so no token is dropped.
    """

    def __init__(self, config: PreTrainedConfig, rngs: nnx.Rngs):
        options = family_options(config).experts
        assert options is not None
        self.choices, self.normalize = (
            config.num_experts_per_tok,
            is_enabled(config, options.normalize),
        )
        self.jitter = getattr(config, "router_jitter_noise", 0.0)
        self.router_name, init = options.router_name, nn.normal(config.initializer_range)
        router = Router(
            config.hidden_size,
            num_experts(config),
            init,
            rngs,
            use_bias=options.router_bias,
            bias_init=init,
        )
        setattr(self, self.router_name, router)
        self.experts = (ClampedExperts if options.clamped else Experts)(config, rngs)
        self.collects = bool(config.output_router_logits)
        self.shared_expert: Any = nnx.data(None)
        self.shared_expert_gate: Any = nnx.data(None)
        if options.shared_expert:
            width = config.hidden_size
            self.shared_expert = MLP(config, rngs, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(width, 1, init, rngs, use_bias=False)

    def __call__(
        self,
        x: jax.Array,  # (batch, length, hidden)
        token_mask: jax.Array | None,  # (batch, length)
        rngs: Keys | None,
    ) -> tuple[jax.Array, RouterStatistics | None]:
        if rngs is not None and self.jitter:
            noise = rngs.bits(x.shape).astype(jnp.float32) / 2**15 - 1  # from -1 to 1
            x = x * (1 + self.jitter * noise).astype(x.dtype)
        scores = getattr(self, self.router_name)(x)
        best_scores, index = nn.choose_experts(scores, self.choices)
        # With `normalize`, the weights are the probabilities of the chosen experts divided by their
        # sum. This is the same as a softmax over the scores of the chosen experts.
        summed_scores = best_scores if self.normalize else scores
        weights = jnp.exp(best_scores - jax.nn.logsumexp(summed_scores, axis=-1, keepdims=True))
        output = self.experts(x, index, weights)
        if self.shared_expert is not None:
            gate = jax.nn.sigmoid(self.shared_expert_gate(x))
            output = output + gate * self.shared_expert(x)
        if not self.collects or token_mask is None:
            return output, None
        tokens, probabilities = token_mask.astype(jnp.float32), jax.nn.softmax(scores)
        choices = jax.nn.one_hot(index, probabilities.shape[-1], dtype=jnp.float32).sum(2)
        sums = [jnp.einsum("bl,ble->e", tokens, values) for values in (probabilities, choices)]
        return output, RouterStatistics(sums[0], sums[1], tokens.sum())

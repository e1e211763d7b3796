"""Throughput, model FLOPs utilization (MFU) and memory of a run."""

from __future__ import annotations

import dataclasses
import functools
import logging
import resource
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfseq.data.pairs import PairSums
from hfseq.nn import trees
from hfseq.training import hardware, processes
from hfseq.training.state import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.objectives.base import Objective
    from hfseq.training.setup import RunData

logger = logging.getLogger(__name__)


def step_flops(
    params: Tree,
    config: PreTrainedConfig,
    tokens: int,
    length: int,
    head_tokens: int,
    attention: float | None = None,
) -> float:
    """Returns the model FLOPs of a training step.

    A step takes 6 FLOPs per weight and token, and 12 L T d FLOPs per token for attention, where L
    is the number of layers, T the number of tokens per row, and d the hidden size. Embedding
    look-ups are not counted. The output head is a matrix of vocabulary size times d, whether or not
    it is tied to the embedding, and is only counted for `head_tokens`. In a mixture of experts,
    only the experts that process a token are counted for it. As usual for MFU, recomputation
    (remat) and padding are not counted (Chowdhery et al., 2022, appendix B).

    Args:
        params: The parameters, or their shapes.
        config: The model's configuration.
        tokens: Tokens per step.
        length: Tokens per row (T).
        head_tokens: Tokens per step for which the output head is computed.
        attention: FLOPs of attention per token, for models that can compute this number. Default:
            12 L T d.
    """
    vocab = getattr(config, "vocab_size", 0)
    width = getattr(config, "hidden_size", getattr(config, "d_model", 0))
    choices = getattr(config, "num_experts_per_tok", 0)
    kernels = 0.0
    for path, leaf in trees.flatten(params).items():
        if path[-1] == "kernel" and vocab not in leaf.shape:
            kernels += leaf.size
        elif "experts" in path[-2:-1] and path[-1].endswith("_proj"):
            kernels += leaf.size * choices / leaf.shape[-3]
    if attention is None:
        attention = 12 * getattr(config, "num_hidden_layers", 0) * width * length
    return tokens * (6.0 * kernels + attention) + 6.0 * head_tokens * vocab * width


def run_flops(model: FlaxPreTrainedModel, objective: Objective, rows: int, length: int) -> float:
    """Returns the model FLOPs of a training step of an objective.

    For an encoder-decoder, this takes into account that the decoder only processes the targets.

    Args:
        model: The model.
        objective: The objective.
        rows: Rows per step.
        length: Tokens per row that the model processes.
    """
    tokens = rows * length
    if targets := objective.target_length(length):
        target_tokens = rows * targets
        work = PairSums(
            tokens, target_tokens, tokens * length, target_tokens * targets, tokens * targets
        )
        return pair_flops(model, work, causal=1.0)
    attention_flops = getattr(model, "attention_flops", None)
    attention = None if attention_flops is None else attention_flops(length)
    head = round(tokens * objective.head_share())
    return step_flops(model.abstract_params, model.config, tokens, length, head, attention)


def pair_flops(model: FlaxPreTrainedModel, work: PairSums, causal: float = 0.5) -> float:
    """Returns the model FLOPs of training an encoder-decoder on pairs of source and target.

    A pair takes 6 FLOPs per weight and token. Each attention layer also takes 12 d FLOPs per
    combination of a query and a key, where d is the width of queries, keys and values. In the
    decoder, the weights that compute the keys and values of cross-attention process source tokens.
    All other weights of the decoder process target tokens. Embedding look-ups are not counted.

    Args:
        model: The model.
        work: Sums over the pairs of a step: their lengths, squared lengths and products of lengths.
        causal: The average fraction of the target positions to which a target position attends. Use
            1 if attention scores are computed for all pairs of target positions.
    """
    config = model.config
    width = getattr(config, "hidden_size", getattr(config, "d_model", 0))
    vocab, both = getattr(config, "vocab_size", 0), getattr(config, "num_hidden_layers", 0)
    layers = getattr(config, "encoder_layers", both)
    decoders = getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", both))
    weights = {False: 0, True: 0}
    for path, leaf in trees.flatten(model.abstract_params).items():
        if path[-1] == "kernel" and vocab not in leaf.shape:
            weights["decoder" in path] += leaf.size
    inner = getattr(config, "inner_width", width)  # width of queries, keys and values
    crossed = 2 * decoders * width * inner
    products = work.source * (weights[False] + crossed)
    products += work.target * (weights[True] - crossed + width * vocab)
    attended = layers * work.source_squares
    attended += decoders * (causal * work.target_squares + work.products)
    return 6.0 * products + 12.0 * inner * attended


def peak_flops(
    compute_dtype: DTypeLike | None = jnp.bfloat16, peak_tflops: float | None = None
) -> float:
    """Returns the peak FLOP/s of the devices of all processes, and logs where the number is from.

    The number is `peak_tflops` or, if it is not set, the value in the data sheet of the device. For
    devices without a data sheet, the rate of a matrix multiplication is measured.

    Args:
        compute_dtype: The computation dtype.
        peak_tflops: TFLOP/s per device. On CPUs, it is TFLOP/s per process, because the devices of
            a process share its cores.
    """
    device, dtype = jax.devices()[0], jnp.dtype(compute_dtype or jnp.float32)
    on_cpu = device.platform == "cpu"
    units = jax.process_count() if on_cpu else jax.device_count()
    accelerator = hardware.find_accelerator(device.device_kind)
    if peak_tflops is not None:
        unit_flops, source = peak_tflops * 1e12, "--peak_tflops"
    elif accelerator is not None:
        unit_flops = accelerator.peak_flops(dtype.itemsize)
        source = f"the data sheet of {accelerator.name}"
    else:
        if on_cpu:
            processes.barrier()
        unit_flops, source = measure_flops(dtype.name), "a measured matrix multiplication"
    unit = "process" if on_cpu else "device"
    logger.info(
        "MFU (model FLOPs utilization) is relative to %.4g TFLOP/s: %.4g TFLOP/s per %s (according "
        "to %s) times %d",
        unit_flops * units / 1e12,
        unit_flops / 1e12,
        unit,
        source,
        units,
    )
    return unit_flops * units


@functools.cache
def measure_flops(dtype: str, size: int = 1536) -> float:
    """Measures the FLOP/s of a large matrix multiplication. This takes about 0.1 seconds."""
    x = jnp.ones((size, size), dtype)

    @jax.jit
    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x, preferred_element_type=jnp.float32)

    product(x).block_until_ready()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        product(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)


def peak_memory_gb() -> float:
    """Returns the peak memory use of the first device, or of the process on a CPU, in GB."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclasses.dataclass
class Meter:
    """Measures tokens per second and MFU between two readings.

    The time for evaluation and saving is excluded.

    Attributes:
        flops_per_token: Model FLOPs per token, without the cost of padding.
        peak: Peak FLOP/s of all devices.
        padded_flops_per_token: Model FLOPs per token, including the cost of padding, or `None` if
            unknown. If it is set, rates that include padding are reported as well.
        padded_tokens_per_token: The number of tokens including padding, divided by the number of
            tokens without padding.
    """

    flops_per_token: float
    peak: float
    padded_flops_per_token: float | None = None
    padded_tokens_per_token: float = 1.0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts a new interval."""
        self._start, self._tokens, self._paused = time.perf_counter(), 0, 0.0

    def add(self, tokens: int) -> None:
        """Counts the tokens of a step."""
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        """Excludes `seconds` of evaluation or saving from the interval."""
        self._paused += seconds

    def read(self) -> dict[str, float]:
        """Returns the rates of the interval, and starts the next one."""
        seconds = max(time.perf_counter() - self._start - self._paused, 1e-9)
        rate = self._tokens / seconds
        self.reset()
        rates = {
            "train_tokens_per_second": rate,
            "train_mfu": rate * self.flops_per_token / self.peak,
        }
        if self.padded_flops_per_token is not None:
            rates |= {
                "train_padded_tokens_per_second": rate * self.padded_tokens_per_token,
                "train_padded_mfu": rate * self.padded_flops_per_token / self.peak,
            }
        return rates


def make_meter(
    model: FlaxPreTrainedModel,
    objective: Objective,
    data: RunData,
    rows: int,
    length: int,
    peak_tflops: float | None = None,
) -> Meter:
    """Returns the meter of a run.

    All processes must call this function at the same time. On CPUs, they measure the peak rate
    simultaneously, so that each process on a machine measures its share of the machine's rate.

    Args:
        model: The model.
        objective: The objective.
        data: The data. If its rows contain pairs, the rates are computed with and without padding.
        rows: Rows per step.
        length: Tokens per row that the model processes.
        peak_tflops: The value of `--peak_tflops`.
    """
    peak = peak_flops(model.precision.compute_dtype, peak_tflops)
    training: Any = getattr(data.train, "rows", None)
    if not hasattr(training, "sums"):
        sequences = objective.sequences_per_row
        flops = run_flops(model, objective, sequences, length)
        return Meter(flops / (data.length if sequences == 1 else sequences * length), peak)
    real, padded = training.sums, training.padded_sums
    tokens = real.source + real.target
    return Meter(
        pair_flops(model, real) / tokens,
        peak,
        padded_flops_per_token=pair_flops(model, padded, causal=1.0) / tokens,
        padded_tokens_per_token=(padded.source + padded.target) / tokens,
    )

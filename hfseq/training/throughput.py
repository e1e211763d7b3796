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
    """Returns the model FLOPs of a step.

    They are 6 per weight and token, and 12 L T d per token for attention. Embedding look-ups cost
    nothing. A tied head costs one product with the embedding per head token. Recomputation (remat)
    and padding are not counted, as usual for MFU (Chowdhery et al., 2022, appendix B).

    Args:
        params: The parameters, or their shapes.
        config: The configuration.
        tokens: Tokens per step.
        length: Tokens per row (T).
        head_tokens: Tokens per step for which the head is computed.
        attention: FLOPs of attention per token, for models that provide it. Default: 12 L T d.
    """
    vocab = getattr(config, "vocab_size", 0)
    width = getattr(config, "hidden_size", getattr(config, "d_model", 0))
    kernels = sum(
        leaf.size
        for path, leaf in trees.flatten(params).items()
        if path[-1] == "kernel" and vocab not in leaf.shape
    )
    if attention is None:
        attention = 12 * getattr(config, "num_hidden_layers", 0) * width * length
    return tokens * (6.0 * kernels + attention) + 6.0 * head_tokens * vocab * width


def run_flops(model: FlaxPreTrainedModel, objective: Objective, rows: int, length: int) -> float:
    """Returns the model FLOPs of a step.

    The decoder of an encoder-decoder only processes the targets.

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
    """Returns the model FLOPs of training on pairs.

    They are 6 per weight and token, and 12 d per layer and product of attention. Decoder matrices
    that compute keys and values of the source process source tokens. Embedding look-ups and padding
    cost nothing.

    Args:
        model: The model.
        work: Sums over the pairs.
        causal: The share of target positions that a target attends to on average. 1 if the whole
            square is computed.
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
    """Returns the peak FLOP/s of the devices of all processes, and logs the source of the number.

    The source is `peak_tflops`, or else the data sheet of the device, or else the measured rate of
    a matrix product.

    Args:
        compute_dtype: The computation dtype.
        peak_tflops: TFLOP/s per device, or per process on CPUs, whose devices share the cores.
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
        unit_flops, source = measure_flops(dtype.name), "a measured matrix product"
    unit = "process" if on_cpu else "device"
    logger.info(
        "MFU (model FLOPs utilization) is relative to %.4g TFLOP/s: %.4g TFLOP/s per %s, according "
        "to %s, times %d",
        unit_flops * units / 1e12,
        unit_flops / 1e12,
        unit,
        source,
        units,
    )
    return unit_flops * units


@functools.cache
def measure_flops(dtype: str, size: int = 1536) -> float:
    """Measures the FLOP/s of a large matrix product on this machine, in about 0.1 seconds."""
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
    """Returns the peak memory in GB, of a device or, on a CPU, of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclasses.dataclass
class Meter:
    """Measures tokens per second and MFU between two readings, without evaluation and saving.

    Attributes:
        flops_per_token: Model FLOPs per token without padding.
        peak: Peak FLOP/s of all devices.
        padded_flops_per_token: FLOPs per token including the cost of padding, if it is known. The
            rates with padding are then reported, too.
        padded_tokens_per_token: The ratio of tokens with padding to tokens without.
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

    All processes must call this together: those on CPUs measure the peak rate at the same time, so
    that processes on the same machine each measure their share.

    Args:
        model: The model.
        objective: The objective.
        data: The data. For pairs, real and padded tokens are counted separately.
        rows: Rows per step.
        length: Tokens per row that the model processes.
        peak_tflops: The value of `--peak_tflops`.
    """
    peak = peak_flops(model.precision.compute_dtype, peak_tflops)
    training: Any = getattr(data.train, "rows", None)
    if not hasattr(training, "sums"):
        flops = run_flops(model, objective, rows, length)
        return Meter(flops / (rows * data.length), peak)
    real, padded = training.sums, training.padded_sums
    tokens = real.source + real.target
    return Meter(
        pair_flops(model, real) / tokens,
        peak,
        padded_flops_per_token=pair_flops(model, padded, causal=1.0) / tokens,
        padded_tokens_per_token=(padded.source + padded.target) / tokens,
    )

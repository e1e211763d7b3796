"""Tokens per second, model FLOPs utilisation and memory, as every run reports them."""

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
    """Return the model FLOPs of a step: 6 a weight and token, and attention's 12 L T d a token.

    ``attention`` is what a token's attention takes instead, where the model says so (a linear one
    does not grow with T). Embedding look-ups cost none; a tied head costs ``head_tokens`` products
    with the table. Recomputation (remat) and padding are not counted, as usual for MFU (Chowdhery
    et al., 2022, appendix B).
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
    """Return the model FLOPs of a step of ``rows`` rows, of which the model sees ``length`` tokens.

    An encoder-decoder runs its decoder on the targets only.
    """
    tokens = rows * length
    if targets := objective.target_length(length):
        written = rows * targets
        work = PairSums(tokens, written, tokens * length, written * targets, tokens * targets)
        return pair_flops(model, work, causal=1.0)
    told = getattr(model, "attention_flops", None)
    attention = None if told is None else told(length)
    head = round(tokens * objective.head_share())
    return step_flops(model.abstract_params, model.config, tokens, length, head, attention)


def pair_flops(model: FlaxPreTrainedModel, work: PairSums, causal: float = 0.5) -> float:
    """Return the model FLOPs of training on pairs: 6 a weight and token, 12 d a layer and product.

    A matrix that makes keys and values of the source for the decoder works on source tokens; a
    target attends to half of its own side (``causal``; 1 where all of a square is computed).
    Look-ups cost nothing, padding neither.
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
    inner = getattr(config, "inner_width", width)  # of queries, keys and values
    crossed = 2 * decoders * width * inner
    products = work.source * (weights[False] + crossed)
    products += work.target * (weights[True] - crossed + width * vocab)
    attended = layers * work.source_squares
    attended += decoders * (causal * work.target_squares + work.products)
    return 6.0 * products + 12.0 * inner * attended


def peak_flops(
    compute_dtype: DTypeLike | None = jnp.bfloat16, peak_tflops: float | None = None
) -> float:
    """Return the peak FLOP/s of the devices of all processes; logs where it is from.

    It is ``peak_tflops`` (10^12 FLOP/s) a unit if given, else the data sheet's, else the rate of a
    measured product. A unit is a device, or on CPUs a process: its devices share the cores.
    """
    device, dtype = jax.devices()[0], jnp.dtype(compute_dtype or jnp.float32)
    on_cpu = device.platform == "cpu"
    units = jax.process_count() if on_cpu else jax.device_count()
    known = hardware.find_accelerator(device.device_kind)
    if peak_tflops is not None:
        one, source = peak_tflops * 1e12, "--peak_tflops"
    elif known is not None:
        one, source = known.peak_flops(dtype.itemsize), f"the data sheet of {known.name}"
    else:
        if on_cpu:
            processes.barrier()
        one, source = measure_flops(dtype.name), "a measured matrix product"
    kind = "process" if on_cpu else "device"
    logger.info(
        "MFU is of %.4g TFLOP/s: %d x %.4g a %s, %s",
        one * units / 1e12,
        units,
        one / 1e12,
        kind,
        source,
    )
    return one * units


@functools.cache
def measure_flops(dtype: str, size: int = 1536) -> float:
    """Measure the rate of one large matrix product on this machine (about a tenth of a second)."""
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
    """Return the largest memory in use so far, in GB: of a device, or of the process on a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


@dataclasses.dataclass
class Meter:
    """Tokens per second and MFU between two readings, without the time spent elsewhere.

    Where padding is known, the rates with it are read too: what the machine did, not the model.
    """

    flops_per_token: float
    peak: float
    padded_flops_per_token: float | None = None
    padded_tokens_per_token: float = 1.0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self._start, self._tokens, self._paused = time.perf_counter(), 0, 0.0

    def add(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._tokens += tokens

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` of evaluation or saving out of the interval."""
        self._paused += seconds

    def read(self) -> dict[str, float]:
        """Return the rates of the interval and start the next one."""
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
    """Return the meter of a run on steps of ``rows`` rows of which the model sees ``length``.

    ``peak_tflops`` is ``--peak_tflops``. Pairs are counted as they are; what their padding costs in
    addition is a figure of its own. All processes call this together: those on CPUs measure at the
    same time, so that those of one machine find what is left to each.
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

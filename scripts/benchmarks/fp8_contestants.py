"""What runs in the processes of ``fp8.py``: a training step in a recipe, timed or profiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import contestants
import fp8_hlo
import fp8_profile
import fp8_step
import harness
import models

# One kernel after the other, so that the profile names each: no CUDA graphs.
SINGLE_KERNELS = {"xla_gpu_enable_command_buffer": ""}


def build(
    model: str, recipe: str, size: dict[str, int], dropout: float, attention: str | None,
    options: dict[str, Any] | None = None,
) -> tuple[Callable[[], float], Any, fp8_step.Prepared]:  # fmt: skip
    """Return a function that takes a step and waits for its loss, the compiled step, its parts."""
    import jax

    from hfseq.training import state

    prepared = fp8_step.prepare(
        model, recipe, fp8_step.Size(**size), dropout=dropout, batches=models.BATCHES,
        attn_implementation=attention,
    )  # fmt: skip
    current = prepared.state()
    batches = [jax.device_put(batch) for batch in prepared.batches]
    if prepared.module.overwritten_extra:  # as the loop does before the first step
        calibrate = state.make_step(
            prepared.objective, prepared.module, prepared.optimizer, 0, False, calibrate=True
        )
        current, _ = jax.jit(calibrate, donate_argnums=0)(current, batches[0])
    lowered = jax.jit(prepared.step, donate_argnums=0).lower(current, batches[0])
    compiled = lowered.compile(compiler_options=options)
    done = 0

    def run() -> float:
        nonlocal current, done
        current, found = compiled(current, batches[done % len(batches)])
        done += 1
        return float(found["loss"])

    return run, compiled, prepared


def timed(
    model: str, recipe: str, size: dict[str, int], dropout: float, attention: str | None
) -> harness.Running:
    """The training loop's step; facts hold its kernels by kind and what it has to compute."""
    import jax

    from hfseq.training import throughput

    run, compiled, prepared = build(model, recipe, size, dropout, attention)
    shape = fp8_step.Size(**size)
    facts = contestants.jax_facts(prepared.module.params_shape_tree) | {
        "model_flops": throughput.run_flops(
            prepared.module, prepared.objective, shape.rows, shape.length
        ),
        "fp8_units": jax.default_backend() == "gpu" and has_units(jax.devices()[0]),
        "datasheet_flops": datasheet_flops(jax.devices()[0].device_kind),
        "kernels": fp8_hlo.count_kinds(compiled.as_text()),
        "targeted": fp8_step.targeted(model, shape) if recipe.startswith("fp8") else 0,
    }
    return harness.Running(lambda: {"loss": run()}, harness.jax_peak_bytes, facts)


def profiled(
    model: str, recipe: str, size: dict[str, int], dropout: float, attention: str | None, steps: int
) -> harness.Running:
    """The same step under the profiler: a call returns the share of time in each kind of kernel."""
    import jax

    options = SINGLE_KERNELS if jax.default_backend() == "gpu" else None
    run, compiled, _ = build(model, recipe, size, dropout, attention, options)
    kinds = fp8_hlo.Module(compiled.as_text()).kinds()
    run()

    def step() -> dict[str, float]:
        return fp8_profile.profiled(lambda: [run() for _ in range(steps)], kinds)

    return harness.Running(step, harness.jax_peak_bytes)


def has_units(device: Any) -> bool:
    """Tell whether a GPU multiplies FP8 in units of its own (NVIDIA, compute capability 8.9 on)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return major.isdigit() and (int(major), int(minor or 0)) >= (8, 9)


def datasheet_flops(kind: str) -> float | None:
    """Return a device's dense bfloat16 peak in FLOP/s by its data sheet, if it is a known one."""
    from hfseq.training import hardware

    known = hardware.of_kind(kind)
    return None if known is None else known.half

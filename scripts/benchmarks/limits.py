"""What a machine can do at most: the rate of a large matrix product, and of memory.

Every row of a benchmark is a share of one of the two, whichever would take longer for what the row
needs (Williams et al., 2009, the roofline model). Both are measured, by whichever of jax and
PyTorch is faster; neither needs any other package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness

#: Bytes of an array of the triad: far above any cache, and little beside the memory of a device.
TRIAD_BYTES = {"cpu": 1 << 28, "gpu": 1 << 30}


def jax_matmul(dtype: str, size: int | None) -> harness.Running:
    """One product of random matrices: ones would heat a GPU less, so it would run faster."""
    import jax
    import jax.numpy as jnp

    size = size or (8192 if jax.default_backend() == "gpu" else 2048)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))

    def step() -> dict[str, float]:
        product(x).block_until_ready()
        return {"work": 2.0 * size**3}

    return harness.Running(step, harness.jax_peak_bytes, {"device": jax_device()})


def torch_matmul(dtype: str, size: int | None) -> harness.Running:
    """The same in PyTorch; float32 may use the TF32 units."""
    import torch

    cuda = torch.cuda.is_available()
    size = size or (8192 if cuda else 2048)
    torch.manual_seed(0)
    device = "cuda" if cuda else "cpu"
    x = torch.randn((size, size), device=device).to(getattr(torch, dtype))
    torch.set_float32_matmul_precision("high")

    def step() -> dict[str, float]:
        torch.matmul(x, x)
        if cuda:
            torch.cuda.synchronize()
        return {"work": 2.0 * size**3}

    return harness.Running(step, harness.torch_peak_bytes, {"device": torch_device()})


def jax_triad(size: int | None) -> harness.Running:
    """STREAM's triad, a = b + s c: two arrays are read and one is written."""
    import jax
    import jax.numpy as jnp

    size = size or TRIAD_BYTES["gpu" if jax.default_backend() == "gpu" else "cpu"]
    b, c = (jnp.full(size // 4, value, jnp.float32) for value in (1.0, 2.0))
    triad = jax.jit(lambda a, b, c: b + 3.0 * c, donate_argnums=0, keep_unused=True)
    a = jnp.zeros(size // 4, jnp.float32)

    def step() -> dict[str, float]:
        nonlocal a
        a = triad(a, b, c).block_until_ready()
        return {"work": 3.0 * size}

    return harness.Running(step, harness.jax_peak_bytes, {"device": jax_device()})


def torch_triad(size: int | None) -> harness.Running:
    """The same in PyTorch."""
    import torch

    cuda = torch.cuda.is_available()
    size = size or TRIAD_BYTES["gpu" if cuda else "cpu"]
    device = "cuda" if cuda else "cpu"
    b, c = (torch.full((size // 4,), value, device=device) for value in (1.0, 2.0))
    a = torch.zeros_like(b)

    def step() -> dict[str, float]:
        torch.add(b, c, alpha=3.0, out=a)
        if cuda:
            torch.cuda.synchronize()
        return {"work": 3.0 * size}

    return harness.Running(step, harness.torch_peak_bytes, {"device": torch_device()})


def jax_device() -> str:
    """Name the device that jax computes on."""
    import jax

    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind}"


def torch_device() -> str:
    """Name the device that PyTorch computes on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def contestants(
    dtypes: Sequence[str], size: int | None = None, triad_bytes: int | None = None
) -> list[harness.Contestant]:
    """Return the products in each of ``dtypes`` and the triad, a group each."""
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        (dtype, "matmul", {"dtype": dtype, "size": size}) for dtype in dtypes
    ]
    kinds.append(("bandwidth", "triad", {"size": triad_bytes}))
    return [
        harness.Contestant(name, group, f"limits:{library}_{kind}", settings, (library,))
        for group, kind, settings in kinds
        for library, name in (("torch", "PyTorch"), ("jax", "jax"))
    ]


def rates(rows: Sequence[harness.Row]) -> dict[str, float]:
    """Return the best rate of each group: FLOP/s by type, and bytes a second as ``bandwidth``."""
    found: dict[str, float] = {}
    for row in rows:
        if row.seconds:
            rate = row.values[-1]["work"] / min(row.seconds)
            found[row.group] = max(found.get(row.group, 0.0), rate)
    return found


def matmul_rates(
    dtypes: Sequence[str],
    *,
    size: int | None = None,
    rounds: int = 20,
    threads: int | None = None,
) -> dict[str, float]:
    """Measure the FLOP/s of a large product in each type, the best of the libraries there are."""
    wanted = [c for c in contestants(dtypes, size) if c.group in dtypes]
    return rates(harness.run(wanted, rounds=rounds, threads=threads))

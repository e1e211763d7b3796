"""The forward pass of an encoder at several batch sizes, in both types."""

from __future__ import annotations

from typing import Any

import harness

from suites import tables
from suites.base import Case, Options, rivals

TITLE = "Inference"
SUMMARY = (
    "BERT-base without a head on rows of 128 random tokens. Parameters are of the type computed "
    "in, on both sides. Every contestant also sums up what it returns, and the sums must agree."
)
COLUMNS = tables.DEFAULT
PICTURE = "ratio"
FACTORIES = {"torch": "suites.inference:torch_forward", "hfseq": "suites.inference:hfseq_forward"}
#: How far mean absolute hidden states may be apart, relatively.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


def cases(options: Options) -> list[Case]:
    """Return a case for each batch size and type."""
    found = []
    batches = options.choose((1, 8, 32), (1, 8, 64, 256), (1, 8), (1, 2))
    length = options.choose(128, 128, 128, 12)
    for dtype in options.types(("float32", "bfloat16")):
        for rows in batches:
            name = f"BERT-base, {rows} x {length}, {dtype}"
            settings = {
                "model": "bert", "dtype": dtype, "rows": rows, "length": length,
                "size": options.size("bert"),
            }  # fmt: skip
            contestants = rivals(options, FACTORIES, settings, name)
            found.append(
                Case(
                    name, contestants, rows * length, dtype=dtype,
                    rounds=options.choose(5, 30, 5, 1), warmup=options.choose(1, 5, 1, 1),
                    weights=("bert", options.size("bert")),
                )
            )  # fmt: skip
    return found


def problems(rows: list[dict]) -> list[str]:
    """Name the contestants whose hidden states are not those of the first of their case."""
    found = []
    first: dict[str, dict] = {}
    for row in (row for row in rows if "mean" in row["facts"]):
        base = first.setdefault(row["case"], row)
        value, wanted = row["facts"]["mean"], base["facts"]["mean"]
        if not abs(value - wanted) <= TOLERANCE[row["dtype"]] * abs(wanted):
            found.append(
                f"{row['case']}: {row['name']} returns hidden states of mean size {value:.6g}, "
                f"{base['name']} {wanted:.6g}"
            )
    return found


def _inputs(config: Any, rows: int, length: int) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(5, config.vocab_size, (rows, length), dtype=np.int32)


def _need(shapes: Any, config: Any, rows: int, length: int, dtype: str) -> dict[str, float]:
    from suites import work

    itemsize = 2 if dtype == "bfloat16" else 4
    return {
        "flops": work.forward_flops(shapes, config, rows, length),
        "bytes": work.forward_bytes(shapes, config, itemsize),
    }


def hfseq_forward(
    model: str, dtype: str, rows: int, length: int, size: dict[str, Any], weights: str
) -> harness.Running:
    """hfseq's model, jitted, parameters and inputs being arguments."""
    import contestants
    import jax
    import jax.numpy as jnp
    import models
    import numpy as np

    import hfseq
    from suites import work

    config = models.configuration(model, size)
    module = hfseq.FlaxAutoModel.from_pretrained(weights, config=config, dtype=dtype)
    params = module.to_bf16(module.params) if dtype == "bfloat16" else module.params
    ids = jax.device_put(_inputs(config, rows, length))
    mask = jax.device_put(np.ones((rows, length), np.int32))
    run = jax.jit(lambda p, i, m: module(i, m, params=p).last_hidden_state)

    def step() -> dict[str, float]:
        run(params, ids, mask).block_until_ready()
        return {}

    facts = contestants.jax_facts(params)
    facts |= _need(work.jax_shapes(params), config, rows, length, dtype)
    facts["mean"] = float(jnp.abs(run(params, ids, mask).astype(jnp.float32)).mean())
    return harness.Running(step, harness.jax_peak_bytes, facts)


def torch_forward(
    model: str, dtype: str, rows: int, length: int, size: dict[str, Any], weights: str,
    compiled: bool = False,
) -> harness.Running:  # fmt: skip
    """PyTorch's model with its default attention, and no mask: rows are full."""
    import contestants
    import models
    import torch
    import transformers

    from suites import work

    config = models.configuration(model, size)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = transformers.AutoModel.from_pretrained(weights, config=config)
    module = module.to(device=device, dtype=getattr(torch, dtype)).eval()
    ids = torch.from_numpy(_inputs(config, rows, length)).long().to(device)
    forward = torch.compile(module) if compiled else module

    def run() -> Any:
        with torch.inference_mode():
            return forward(input_ids=ids).last_hidden_state

    def step() -> dict[str, float]:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return {}

    facts = contestants.torch_facts(module, device)
    facts |= _need(work.torch_shapes(module), config, rows, length, dtype)
    facts["mean"] = float(run().float().abs().mean())
    return harness.Running(step, harness.torch_peak_bytes, facts)

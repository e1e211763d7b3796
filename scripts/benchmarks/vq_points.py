"""What runs in the processes of the VQ benchmark: a pass over one length, or decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

IGNORED = -100


def build(config: dict[str, Any], dtype: str) -> Any:
    """Return the model without parameters."""
    from hfseq.nn import precision
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
    from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM

    made = VQTransformerConfig(**config)
    recipe = precision.precision_for(dtype)
    return FlaxVQTransformerForCausalLM(made, _do_init=False, precision=recipe)


def fresh(model: Any) -> tuple[Any, Any]:
    """Return random parameters and collections."""
    import jax

    key = jax.random.key(0)
    return model.init_weights(key), model.init_extra(key)


# -- passes over a whole text


def train_step(model: Any) -> Callable[..., Any]:
    """Return one step of plain gradient descent: forward, backward and, for VQ, the codebooks."""
    import jax

    learns_codes = model.config.attention_type != "full"

    def loss(params: Any, extra: Any, ids: Any) -> Any:
        found, output, after = _scored(model, params, extra, ids, train=True)
        # Quadratic attention uses no codes: what is not asked for is not computed.
        if not learns_codes:
            return found, extra
        return found + output.auxiliary_loss / ids.size, model.settle_extra(after)

    def step(params: Any, extra: Any, ids: Any) -> Any:
        (found, extra), slopes = jax.value_and_grad(loss, has_aux=True)(params, extra, ids)
        params = jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, params, slopes)
        return params, extra, found

    return step


def forward_step(model: Any) -> Callable[..., Any]:
    """Return the scoring of a text."""

    def step(params: Any, extra: Any, ids: Any) -> Any:
        return params, extra, _scored(model, params, extra, ids, train=False)[0]

    return step


def _scored(model: Any, params: Any, extra: Any, ids: Any, *, train: bool) -> tuple[Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from hfseq.objectives.cross_entropy import cross_entropy

    output, after = model(
        ids, params=params, extra=extra, train=train, dropout_rng=jax.random.key(1)
    )
    labels = jnp.pad(ids[:, 1:], [(0, 0), (0, 1)], constant_values=IGNORED)
    total, count, _ = cross_entropy(output.logits, labels)
    return total / count, output, after


STEPS = {"train": train_step, "forward": forward_step}


def length_point(
    what: str, config: dict[str, Any], rows: int, length: int, dtype: str, remat: bool,
    limit_bytes: float,
) -> harness.Running:  # fmt: skip
    """One length: compiled first, and run only if what it needs is within ``limit_bytes``."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    model = build(config, dtype)
    if remat:
        model.enable_gradient_checkpointing()
    shapes = (model.params_shape_tree, model.extra_shape_tree)
    text = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    program = jax.jit(STEPS[what](model), donate_argnums=(0, 1)).lower(*shapes, text).compile()
    facts = compiled_bytes(program) | {"fits": True, "device": jax.devices()[0].device_kind}
    if facts["compiled_bytes"] > limit_bytes:
        return harness.Running(lambda: {}, lambda: 0, facts | {"fits": False})
    params, extra = fresh(model)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, length), np.int32)

    def step() -> dict[str, float]:
        nonlocal params, extra
        params, extra, loss = program(params, extra, ids)
        return {"loss": float(loss)}

    facts |= {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    facts |= resting()
    return harness.Running(step, harness.jax_peak_bytes, facts)


def compiled_bytes(program: Any) -> dict[str, int]:
    """Return what XLA says a compiled program needs: its temporary arrays, and all of it."""
    found = program.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    temporary = found.temp_size_in_bytes
    return {"temporary_bytes": temporary, "compiled_bytes": temporary + held}


def resting() -> dict[str, Any]:
    """Return what the process holds before its first step, and forget the peak until here."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_in_use" in stats:
        return {"resting_bytes": stats["bytes_in_use"], "peak_of_steps": True}
    before = resident_bytes()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    # Where the system does not forget, the peak is that of compilation, too.
    return {"resting_bytes": before, "peak_of_steps": harness.host_peak_bytes() < before * 1.02}


def resident_bytes() -> int:
    """Return the memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmRSS")


# -- decoding


def decoding(
    config: dict[str, Any], rows: int, chunk: int, dtype: str, report_every: int
) -> harness.Running:
    """Decode greedily; a step is ``report_every`` tokens, in compiled loops of ``chunk``."""
    import jax
    import jax.numpy as jnp

    model = build(config, dtype)
    params, extra = fresh(model)
    state, token = model.init_cache(rows, 0), jnp.ones((rows, 1), jnp.int32)
    program = jax.jit(decode_loop(model, chunk), donate_argnums=2)
    program = program.lower(params, extra, state, token).compile()
    size, done = tree_bytes(state), 0
    trial, _ = program(params, extra, model.init_cache(rows, 0), token)
    missing_tokens(trial, model.config, chunk)
    del trial

    def step() -> dict[str, Any]:
        nonlocal state, token, done
        for _ in range(report_every // chunk):
            state, token = program(params, extra, state, token)
        done += report_every
        jax.block_until_ready(token)
        return {
            "tokens": done, "state_bytes": tree_bytes(state), "memory_bytes": device_bytes(),
            "tokens_missing": missing_tokens(state, model.config, done),
        }  # fmt: skip

    facts = compiled_bytes(program) | {"state_bytes": size, "fits": True} | resting()
    return harness.Running(step, harness.jax_peak_bytes, facts)


def decode_loop(model: Any, chunk: int) -> Callable[..., Any]:
    """Return a loop over ``chunk`` calls of one token."""
    import jax
    import jax.numpy as jnp

    def loop(params: Any, extra: Any, state: Any, token: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, token = carry
            output, _ = model(token, params=params, extra=extra, past_key_values=state)
            following = output.logits.argmax(-1).astype(jnp.int32)
            return (output.past_key_values, following), None

        return jax.lax.scan(step, (state, token), None, length=chunk)[0]

    return loop


def tree_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def device_bytes() -> int:
    """Return the memory in use: of the device, or of this process where that is a CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_in_use") or resident_bytes()


def missing_tokens(state: Any, config: Any, done: int) -> int:
    """Return how many tokens the state should know of and does not: all are counted somewhere."""
    import jax

    expected = max(0, done - config.window_size)
    found = [
        abs(int(leaf.sum()) - expected * leaf.shape[-3] * leaf.shape[-2])
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if path[-1].key == "cache_count"
    ]
    return max(found)

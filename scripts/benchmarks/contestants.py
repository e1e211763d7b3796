"""What runs in the contestants' processes: a training step or a generation, of either library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import harness
import models
from suites import work

HFSEQ = ("jax", "flax", "optax", "transformers")
PYTORCH = ("torch", "transformers")
PACKAGES = {"torch": PYTORCH, "hfseq": HFSEQ}
NAMES = {"torch": "PyTorch", "hfseq": "hfseq"}
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def save_weights(folder: str, model: str, size: dict[str, Any]) -> harness.Running:
    """Write the weights that all start from, in a process of its own: no one's memory shows it."""
    config = models.configuration(model, size)
    absent = harness.Contestant("", "", "", requires=HFSEQ).missing()
    made = (models.torch_class if absent else models.hfseq_class)(model).from_config(config)
    made.save_pretrained(folder)
    return harness.Running(lambda: {}, harness.host_peak_bytes)


def written_weights(folder: str, model: str, size: dict[str, Any], **options: Any) -> list[str]:
    """Run :func:`save_weights`; returns what went wrong."""
    settings = {"folder": folder, "model": model, "size": size}
    writer = harness.Contestant(
        "weights", "", "contestants:save_weights", settings, ("transformers",)
    )
    (row,) = harness.run([writer], rounds=0, warmup=0, **options)
    return [] if row.status == "ok" else [f"no weights could be written: {row.status}"]


def load_torch(model: str, weights: str, config: Any) -> tuple[Any, str]:
    """Return PyTorch's model with its default attention (sdpa), and the device it is on."""
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A model of hfseq's own is stored as a stock twin, whose configuration lies beside the weights.
    subject = models.SUBJECTS[model]
    rates = {rate: getattr(config, rate) for rate in subject.rates}
    given = rates if subject.native else {"config": config}
    return models.torch_class(model).from_pretrained(weights, **given).to(device), device


def torch_facts(model: Any, device: str) -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "attention": model.config._attn_implementation,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def jax_facts(params: Any) -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"device": f"{device.platform} {device.device_kind}", "parameters": count}


# -- a training step


def adamw_flags() -> SimpleNamespace:
    """Return the arguments that the training loop's optimizer reads, with PyTorch's defaults."""
    return SimpleNamespace(
        adam_beta1=ADAMW["betas"][0], adam_beta2=ADAMW["betas"][1], adam_epsilon=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"], weight_decay_mode="decoupled", optim="adamw", freeze=[],
        no_decay=[], max_grad_norm=0.0,
    )  # fmt: skip


def hfseq_step(
    model: str, dtype: str, rows: int, length: int, targets: int, size: dict[str, Any],
    dropout: float | None, weights: str, remat: bool = False, attention: str | None = None,
) -> harness.Running:  # fmt: skip
    """The step that the training loop compiles, with its objective and optimizer.

    ``remat`` recomputes the layers in the backward pass, and scans them: unrolled, XLA for CPUs
    recomputes them all before it needs them. ``attention`` is an implementation.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from hfseq.nn import precision
    from hfseq.training import optimizers, state, throughput

    config = models.configuration(model, size, dropout)
    face = models.hfseq_class(model)
    module = face.from_config(
        config, _do_init=False, precision=precision.precision_for(dtype),
        gradient_checkpointing=remat, scan_layers=remat, attn_implementation=attention,
    )  # fmt: skip
    objective = models.objective(model, config, targets)
    schedule = optax.constant_schedule(ADAMW["lr"])
    optimizer = optimizers.make_optimizer(optimizers.adamw, adamw_flags(), schedule)
    names = tuple(sorted({"loss", "count", *objective.sums}))
    params = face.from_pretrained(weights, config=config, scan_layers=remat).params
    make = jax.jit(
        lambda p: state.make_state(p, optimizer, module.extra, state.zero_window(names)),
        donate_argnums=0,
    )
    current = make(params)
    del params
    step = jax.jit(state.make_step(objective, module, optimizer, 0, False), donate_argnums=0)
    batches = []
    for number in range(models.BATCHES):
        batch, random = models.host_batch(model, config, number, rows, length, targets)
        collated = objective.collate(batch, random, 1) | {"row": jnp.arange(rows)}
        batches.append({name: jnp.asarray(leaf)[None] for name, leaf in collated.items()})
    done = 0

    def run() -> dict[str, float]:
        nonlocal current, done
        current, found = step(current, batches[done % len(batches)])
        done += 1
        return {"loss": float(found["loss"])}

    facts = jax_facts(current["params"])
    facts["model_flops"] = facts["flops"] = throughput.run_flops(module, objective, rows, length)
    facts["bytes"] = work.training_bytes(work.jax_shapes(current["params"]))
    return harness.Running(run, harness.jax_peak_bytes, facts)


def torch_step(
    model: str, dtype: str, rows: int, length: int, targets: int, size: dict[str, Any],
    dropout: float | None, weights: str, compiled: bool = False, remat: bool = False,
) -> harness.Running:  # fmt: skip
    """PyTorch's class with its default attention and the Trainer's fused AdamW.

    ``remat`` recomputes the layers in the backward pass.
    """
    import torch

    config = models.configuration(model, size, dropout)
    module, device = load_torch(model, weights, config)
    module.train()
    if remat:
        modern = getattr(module, "activation_checkpointing_enable", None)
        (modern or module.gradient_checkpointing_enable)()
    plain = [p for p in module.parameters() if p.ndim < 2]
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    forward = torch.compile(module) if compiled else module
    cached = {} if models.SUBJECTS[model].objective == "mlm" else {"use_cache": False}
    batches = []
    for number in range(models.BATCHES):
        batch, random = models.host_batch(model, config, number, rows, length, targets)
        inputs = models.torch_inputs(model, config, batch, random)
        batches.append({k: torch.from_numpy(v).long().to(device) for k, v in inputs.items()})
    done = 0

    def run() -> dict[str, float]:
        nonlocal done
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(**batches[done % len(batches)], **cached).loss
        done += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.item()
        if device == "cuda":
            torch.cuda.synchronize()
        return {"loss": found}

    facts = torch_facts(module, device)
    facts["bytes"] = work.training_bytes(work.torch_shapes(module))
    return harness.Running(run, harness.torch_peak_bytes, facts)


# -- generation


def prompts(config: Any, rows: int, length: int) -> Any:
    """Return random prompts (rows, length), int32."""
    import numpy as np

    return np.random.default_rng(0).integers(5, config.vocab_size, (rows, length), dtype=np.int32)


def generation_options(mode: str, beams: int, new_tokens: int) -> dict[str, Any]:
    """Return the options of ``generate`` that both sides get: as many new tokens in every row."""
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
        "beam": {"do_sample": False, "num_beams": beams},
    }
    return modes[mode] | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}


def hfseq_generate(
    model: str, mode: str, beams: int, rows: int, length: int, new_tokens: int,
    size: dict[str, Any], weights: str, dtype: str = "float32",
) -> harness.Running:  # fmt: skip
    """hfseq's ``generate``: the first call compiles."""
    import jax
    import numpy as np

    config = models.configuration(model, size)
    module = models.hfseq_class(model).from_pretrained(weights, config=config, dtype=dtype)
    ids = prompts(config, rows, length)
    options = generation_options(mode, beams, new_tokens)
    done = 0

    def run() -> dict[str, Any]:
        nonlocal done
        found = module.generate(ids, prng_key=jax.random.PRNGKey(done), **options)
        done += 1
        return {"tokens": new_part(np.asarray(found.sequences), new_tokens)}

    need = work.generation_work(
        work.jax_shapes(module.params), config, rows, beams if mode == "beam" else 1, length,
        new_tokens, 2 if dtype == "bfloat16" else 4,
    )  # fmt: skip
    return harness.Running(run, harness.jax_peak_bytes, jax_facts(module.params) | need)


def torch_generate(
    model: str, mode: str, beams: int, rows: int, length: int, new_tokens: int,
    size: dict[str, Any], weights: str, dtype: str = "float32",
) -> harness.Running:  # fmt: skip
    """PyTorch's ``generate``, with its own cache."""
    import torch

    config = models.configuration(model, size)
    module, device = load_torch(model, weights, config)
    module = module.to(getattr(torch, dtype)).eval()
    ids = torch.from_numpy(prompts(config, rows, length)).long().to(device)
    mask = torch.ones_like(ids)
    options = generation_options(mode, beams, new_tokens)

    def run() -> dict[str, Any]:
        with torch.inference_mode():
            found = module.generate(ids, attention_mask=mask, **options)
        return {"tokens": new_part(found.cpu().numpy(), new_tokens)}

    need = work.generation_work(
        work.torch_shapes(module), config, rows, beams if mode == "beam" else 1, length,
        new_tokens, 2 if dtype == "bfloat16" else 4,
    )  # fmt: skip
    return harness.Running(run, harness.torch_peak_bytes, torch_facts(module, device) | need)


def new_part(sequences: Any, new_tokens: int) -> list[int]:
    """Return the new tokens of all rows, one after the other."""
    return [int(token) for token in sequences[:, -new_tokens:].reshape(-1)]

"""Saving and restoring: seconds a gigabyte, and how long the step stands still meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

from suites import tables
from suites.base import BASELINE, Case, Options

TITLE = "Checkpoints"
SUMMARY = (
    "The whole training state (parameters and both moments of AdamW) to disk and back, flushed to "
    "the device. *Blocked* is the time until the training loop may go on: hfseq writes in the "
    "background. PyTorch is `torch.save` and `torch.load` of the same state; a plain file of as "
    "many bytes shows what the disk can do. Weights alone are what `save_pretrained` and "
    "`from_pretrained` handle."
)
PICTURE = None


def _rate(value: float) -> str:
    return f"{value:.2f}"


def _milliseconds(value: float) -> str:
    return f"{value * 1000:.0f} ms"


def _share(row: dict) -> str:
    return f"{row['disk_share']:.0%}" if row.get("disk_share") else tables.ABSENT


COLUMNS = (
    tables.CASE, ("GB", tables.value("gigabytes", _rate)),
    ("on disk", tables.value("disk_gb", _rate)),
    ("save, s/GB", tables.value("save_per_gb", _rate)),
    ("restore, s/GB", tables.value("restore_per_gb", _rate)),
    ("blocked", tables.value("blocked", _milliseconds)), tables.RATIO,
    ("share of the disk", _share), tables.MEMORY,
)  # fmt: skip
PLAIN = "plain file"
HFSEQ = ("jax", "flax", "optax", "orbax", "transformers", "safetensors", "pluggy")
TORCH = ("torch", "transformers", "safetensors")


def cases(options: Options) -> list[Case]:
    """Return the state and the weights of one model; a step saves and restores once."""
    model = "gpt2"
    title = options.choose(*["GPT-2 small"] * 2, "GPT-2, width 256", "GPT-2, width 32")
    settings = {"model": model, "size": options.size(model)}
    found = []
    for what in ("state", "weights"):
        name = f"{what} of {title}"
        members = [
            harness.Contestant(
                label, name, f"suites.checkpoint:{factory}_{what}", settings, needs
            )
            for peer, label, factory, needs in (
                ("torch", BASELINE, "torch", TORCH), ("hfseq", "hfseq", "hfseq", HFSEQ),
            ) if peer in options.peers
        ]  # fmt: skip
        if what == "state":
            members.append(
                harness.Contestant(PLAIN, name, "suites.checkpoint:plain", settings, TORCH)
            )
        found.append(
            Case(name, tuple(members), 1.0, "round trips", rounds=options.choose(3, 3, 3, 1),
                 warmup=1, weights=(model, options.size(model)))
        )  # fmt: skip
    return found


def finish(rows: list[dict]) -> None:
    """Add the share of a plain file's rate, there and back, that a row reaches."""
    plain = [row for row in rows if row["name"] == PLAIN and row["values"]]
    for row in rows if plain else ():
        if row["values"]:
            both = ("save_per_gb", "restore_per_gb")
            least, own = (sum(tables.values_of(r, key) or 0.0 for key in both)
                          for r in (plain[0], row))  # fmt: skip
            row["disk_share"] = least / own


def _measured(
    held: int,
    save: Callable[[Path], None],
    wait: Callable[[], None],
    restore: Callable[[Path], None],
) -> Callable[[], dict[str, float]]:
    """Return a step that saves to a new folder, waits, restores and removes the folder.

    ``held`` are the bytes in memory: a compressed file is no smaller a checkpoint.
    """

    def step() -> dict[str, float]:
        folder = Path(tempfile.mkdtemp(prefix="hfseq-checkpoint-"))
        try:
            marks = [time.perf_counter()]
            save(folder)
            marks.append(time.perf_counter())
            wait()
            _flush(folder)
            marks.append(time.perf_counter())
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            restore(folder)
            marks.append(time.perf_counter())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        gigabytes = held / harness.GB
        return {
            "seconds": marks[3] - marks[0], "gigabytes": gigabytes, "disk_gb": size / harness.GB,
            "blocked": marks[1] - marks[0],
            "save_per_gb": (marks[2] - marks[0]) / gigabytes,
            "restore_per_gb": (marks[3] - marks[2]) / gigabytes,
        }  # fmt: skip

    return step


def _flush(folder: Path) -> None:
    """Have the system write what it still holds of these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def hfseq_state(model: str, size: dict[str, Any], weights: str) -> harness.Running:
    """The loop's checkpoints: written in the background."""
    import contestants
    import jax
    import models
    import optax

    from hfseq.training import optimizers, state
    from hfseq.training.checkpointer import Checkpointer

    config = models.configuration(model, size)
    module = models.hfseq_class(model).from_pretrained(weights, config=config)
    flags = contestants.adamw_flags()
    optimizer = optimizers.make_optimizer(optimizers.adamw, flags, optax.constant_schedule(1e-4))
    window = state.zero_window(("loss", "count"))
    held = jax.jit(lambda p: state.make_state(p, optimizer, module.extra, window))(module.params)
    held["opt_state"] = jax.tree.map(_noise, held["opt_state"])
    jax.block_until_ready(held)
    checkpoints: list[Checkpointer] = []

    def save(folder: Path) -> None:
        checkpoints[:] = [Checkpointer(folder)]
        checkpoints[0].save(1, held, {"step": 1})

    def restore(folder: Path) -> None:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), held
        )
        jax.block_until_ready(Checkpointer(folder).restore(1, like))

    count = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    step = _measured(count, save, lambda: checkpoints[0].wait(), restore)
    return harness.Running(step, harness.jax_peak_bytes, contestants.jax_facts(module.params))


def _noise(leaf: Any) -> Any:
    """Fill moments with noise, as training does: zeros are compressed to nothing."""
    import jax

    return jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) if leaf.ndim else leaf


def _torch_bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def torch_state(model: str, size: dict[str, Any], weights: str) -> harness.Running:
    """PyTorch's model and optimizer in one file."""
    import contestants
    import models
    import torch

    module, device = contestants.load_torch(model, weights, models.configuration(model, size))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for moments in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.nn.init.normal_(moments[name])

    def save(folder: Path) -> None:
        held = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, folder / "state.pt")
        _flush(folder)

    def restore(folder: Path) -> None:
        held = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        module.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])

    count = 3 * _torch_bytes(module)
    step = _measured(count, save, lambda: None, restore)
    return harness.Running(step, harness.torch_peak_bytes, contestants.torch_facts(module, device))


def plain(model: str, size: dict[str, Any], weights: str) -> harness.Running:
    """As many bytes as the state has, in one file."""
    count = 3 * (Path(weights) / "model.safetensors").stat().st_size
    content = os.urandom(min(count, 1 << 20)) * (count // (1 << 20) + 1)
    content = content[:count]

    def save(folder: Path) -> None:
        (folder / "plain").write_bytes(content)
        _flush(folder)

    step = _measured(count, save, lambda: None, lambda folder: _read(folder / "plain"))
    return harness.Running(step, harness.host_peak_bytes, {"device": "cpu"})


def _read(path: Path) -> None:
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def hfseq_weights(model: str, size: dict[str, Any], weights: str) -> harness.Running:
    """``save_pretrained`` and ``from_pretrained``, through the two-way map of names."""
    import contestants
    import jax
    import models

    config = models.configuration(model, size)
    face = models.hfseq_class(model)
    module = face.from_pretrained(weights, config=config)

    def restore(folder: Path) -> None:
        jax.block_until_ready(face.from_pretrained(folder, config=config).params)

    count = sum(leaf.nbytes for leaf in jax.tree.leaves(module.params))
    step = _measured(count, module.save_pretrained, lambda: None, restore)
    return harness.Running(step, harness.jax_peak_bytes, contestants.jax_facts(module.params))


def torch_weights(model: str, size: dict[str, Any], weights: str) -> harness.Running:
    """The same by Transformers."""
    import contestants
    import models

    config = models.configuration(model, size)
    module, device = contestants.load_torch(model, weights, config)

    def restore(folder: Path) -> None:
        contestants.load_torch(model, str(folder), config)

    step = _measured(_torch_bytes(module), module.save_pretrained, lambda: None, restore)
    return harness.Running(step, harness.torch_peak_bytes, contestants.torch_facts(module, device))

"""A full disk at different writes: saved files are kept, and the run can be resumed."""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hfseq.errors import HfseqError
from hfseq.training import checkpointer
from tests.training.conftest import losses

OPTIONS = {
    "devices": 1,
    "save_steps": 1,
    "max_steps": 4,
    "save_total_limit": 2,
    "report_to": "jsonl,tensorboard",
}
#: Disk sizes, as fractions of the size of a complete output directory.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@pytest.fixture
def volume(tmp_path):
    """Mounts a volume of a size in bytes, or resizes the mounted one."""
    folder = tmp_path / "volume"
    folder.mkdir()

    def mount(size: int | None) -> Path:
        mounted = folder.is_mount()
        room = f"size={size or 1 << 28}"
        options = ["-o", f"remount,{room}", "hfseq-test"] if mounted else ["-o", room, "hfseq-test"]
        process = subprocess.run(
            ["mount", "-t", "tmpfs", *options, str(folder)], capture_output=True, text=True
        )
        if process.returncode:
            pytest.skip(f"mounting a volume needs root: {process.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        gc.collect()  # release memory maps of files on the volume
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def reference():
    """The result of a complete run, for all cases."""
    return {}


def used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_a_full_disk_costs_nothing_that_was_saved(train, volume, reference, tmp_path, share):
    if not reference:
        uninterrupted = train("whole", **OPTIONS).folder
        reference.update(
            losses=losses(uninterrupted),
            weights=load_file(uninterrupted / "model.safetensors"),
            size=used(uninterrupted),
        )
    folder = volume(max(4096, int(reference["size"] * share)))
    options = OPTIONS | {"output_dir": folder / "run"}
    try:
        train(**options)
    except (HfseqError, OSError) as error:
        assert "o space left" in str(error), error
    steps = sorted(
        int(path.name) for path in folder.glob("run/checkpoints/*") if path.name.isdigit()
    )
    assert [s for s in steps if checkpointer.find_damage(folder / f"run/checkpoints/{s}")] == []
    if (weights := folder / "run" / "model.safetensors").exists():
        assert load_file(weights).keys() == reference["weights"].keys()  # whole, of whatever step
    volume(None)
    loop = train(**options)
    assert loop.start_step == (steps[-1] if steps else 0)
    again = load_file(folder / "run" / "model.safetensors")
    assert all((again[name] == reference["weights"][name]).all() for name in again)
    run_losses = losses(folder / "run")
    assert run_losses == {step: reference["losses"][step] for step in run_losses}

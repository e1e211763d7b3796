"""A disk that is full at one write or another: what was saved stays, and the run can go on."""

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
#: Where the disk ends, in shares of what the directory of a whole run takes.
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@pytest.fixture
def volume(tmp_path):
    """Mount a volume of so many bytes, or give the mounted one another size."""
    folder = tmp_path / "volume"
    folder.mkdir()

    def mount(size: int | None) -> Path:
        mounted = folder.is_mount()
        room = f"size={size or 1 << 28}"
        options = ["-o", f"remount,{room}", "hfseq-test"] if mounted else ["-o", room, "hfseq-test"]
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *options, str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a volume needs root: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        gc.collect()  # what maps a file of the volume, a model that nobody holds, lets go of it
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def kept():
    """What the whole run left, for all cases."""
    return {}


def used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_a_full_disk_costs_nothing_that_was_saved(train, volume, kept, tmp_path, share):
    if not kept:
        whole = train("whole", **OPTIONS).folder
        kept.update(
            losses=losses(whole), weights=load_file(whole / "model.safetensors"), size=used(whole)
        )
    folder = volume(max(4096, int(kept["size"] * share)))
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
        assert load_file(weights).keys() == kept["weights"].keys()  # whole, of whatever step
    volume(None)
    loop = train(**options)
    assert loop.start_step == (steps[-1] if steps else 0)
    again = load_file(folder / "run" / "model.safetensors")
    assert all((again[name] == kept["weights"][name]).all() for name in again)
    found = losses(folder / "run")
    assert found == {step: kept["losses"][step] for step in found}

"""The golden numbers of the VQ Transformer's public reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def golden(shared: Path):
    """Returns the arrays of `vq_golden.npz`. Without the file the test is skipped."""
    from tests.plugins.vq_transformer.vq_cases import Golden

    file = shared.parent / "golden" / "vq_golden.npz"
    if not file.is_file():
        pytest.skip(f"no golden numbers at {file} (next to the folder HFSEQ_TEST_DATA)")
    with np.load(file, allow_pickle=False) as arrays:
        return Golden({name: arrays[name] for name in arrays.files})

"""The golden numbers of the VQ Transformer's public reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def golden(shared: Path):
    """Every array of ``vq_golden.npz``; without the file the test is skipped."""
    from tests.plugins.vq_transformer.vq_cases import Golden

    file = shared.parent / "golden" / "vq_golden.npz"
    if not file.is_file():
        pytest.skip(f"no golden numbers at {file} (beside the folder HFSEQ_TEST_DATA)")
    with np.load(file, allow_pickle=False) as arrays:
        return Golden({name: arrays[name] for name in arrays.files})

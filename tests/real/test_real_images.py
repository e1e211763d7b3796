"""DINOv2 with pretrained weights equals PyTorch on a photograph."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfseq
from tests.support.models import close

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def photo():
    import matplotlib

    image = pytest.importorskip("PIL.Image")
    path = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
    return image.open(path).convert("RGB")


@pytest.mark.parametrize(
    "size",
    [(224, 224), (280, 280), (518, 518), (280, 350)],
    ids=["224", "280", "518, without interpolation", "280 x 350"],
)
def test_dinov2_equals_pytorch(checkpoint, photo, size):
    import torch
    from transformers import AutoImageProcessor, AutoModel

    folder, (height, width) = checkpoint("dinov2"), size
    processor = AutoImageProcessor.from_pretrained(folder)
    options = {
        "do_center_crop": False,
        "size": {"height": height, "width": width},
        "return_tensors": "np",
    }
    pixels = processor([photo, photo.rotate(90)], **options)["pixel_values"]
    assert pixels.shape == (2, 3, height, width)
    actual = hfseq.FlaxAutoModel.from_pretrained(folder)(pixels, output_hidden_states=True)
    theirs = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(pixels), output_hidden_states=True)
    # The last layers amplify rounding errors, in PyTorch as well.
    for ours, states in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert close(ours, states.numpy(), 3e-5)
    assert close(actual.pooler_output, expected.pooler_output.numpy(), 3e-5)

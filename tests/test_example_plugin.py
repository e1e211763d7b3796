"""The example architecture of the documentation, loaded from a file."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import hfseq
from hfseq import plugins
from tests.support import plugin_files
from tests.support.plugin_files import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "averaging_encoder.py"
IDS = np.arange(2, 10).reshape(2, 4)
project = plugin_files.project


def test_the_example_is_one_short_file():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 110


def test_example_works_as_a_plugin_file(project):
    plugin_files.write_project_file(project, EXAMPLE.read_text(encoding="utf-8"))
    plugins.load()
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForMaskedLM

    small = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 1}
    config = AutoConfig.for_model("averaging", **small, max_position_embeddings=16)
    model = hfseq.FlaxAutoModelForMaskedLM.from_config(config)
    model.save_pretrained("model")
    for auto in (hfseq.FlaxAutoModelForMaskedLM, AutoModelForMaskedLM):
        loaded = auto.from_pretrained("model")
        assert type(loaded) is hfseq.FlaxAveragingForMaskedLM
        np.testing.assert_array_equal(jax.jit(loaded)(IDS).logits, jax.jit(model)(IDS).logits)


@pytest.mark.slow
def test_the_example_passes_the_battery():
    from hfseq.testing import check_architecture

    spec = plugins.load([EXAMPLE]).architectures.get("averaging")
    config = spec.load_config()(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, max_position_embeddings=32
    )
    assert check_architecture("averaging", config).passed

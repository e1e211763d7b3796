"""MPNet: the battery for every head, the shared bias of positions at large distances."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import FlaxMPNetForMaskedLM, FlaxMPNetModel
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from tests.support.models import fewest_layers, ids
from tests.support.models import mpnet_config as config
from tests.support.parity import compare
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("mpnet", "ForMaskedLM"))
def test_battery(head, checks):
    layers = fewest_layers("mpnet") if checks else {}
    check_architecture("mpnet", config(num_labels=2, **layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "relu"}),
        ("Model", {"relative_attention_num_buckets": 40, "layer_norm_eps": 1e-5}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("mpnet", config(**changes), heads=[head])


def test_long_rows_with_padding_inside_are_those_of_pytorch(tmp_path):
    pytest.importorskip("torch")
    changes = {"max_position_embeddings": 152, "num_hidden_layers": 1, "pad_token_id": 0}
    FlaxMPNetModel(config(**changes), seed=1).save_pretrained(tmp_path)
    tokens, mask = ids(2, 150), np.ones((2, 150), np.int32)
    # Positions skip token 1, whatever the padding token of the configuration.
    tokens[0, 40:43], mask[0, 40:43] = 1, 0
    tokens[1, 140:], mask[1, 140:] = 0, 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    compare(FlaxMPNetModel, tmp_path, inputs, output_mask=mask[..., None], unused=2)  # the pooler


def test_small_tables_of_position_buckets_are_refused():
    with pytest.raises(UsageError, match="relative_attention_num_buckets=16"):
        FlaxMPNetForMaskedLM(config(relative_attention_num_buckets=16), _do_init=False)

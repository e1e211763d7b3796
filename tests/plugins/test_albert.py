"""ALBERT: the battery for every class, layer groups and their shared parameters."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.albert.modeling import FlaxAlbertForMaskedLM
from tests.support.models import albert_config as config
from tests.support.models import close, fewest_layers, ids
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("albert", "ForMaskedLM"))
def test_battery(head, checks):
    layers = fewest_layers("albert") if checks else {}
    check_architecture("albert", config(num_labels=2, **layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {"num_hidden_layers": 5, "num_hidden_groups": 2}),
        ("ForMaskedLM", {"num_hidden_layers": 3, "num_hidden_groups": 3, "inner_group_num": 2}),
        ("ForMaskedLM", {"hidden_act": "gelu", "embedding_size": 32, "tie_word_embeddings": False}),
        ("ForPreTraining", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("albert", config(num_labels=2, **changes), heads=[head])


def test_layers_share_their_parameters():
    small, large = (
        FlaxAlbertForMaskedLM(config(num_hidden_layers=layers), seed=1) for layers in (2, 6)
    )
    assert small.required_params == large.required_params
    assert not close(small(ids()).logits, large(ids(), params=small.params).logits)


@pytest.mark.parametrize("groups", [1, 2])
def test_scanned_groups_run_in_their_order(groups):
    model_config = config(num_hidden_layers=5, num_hidden_groups=groups)
    plain = FlaxAlbertForMaskedLM(model_config, seed=1)
    scanned = FlaxAlbertForMaskedLM(model_config, seed=1, scan_layers=True)
    output, right = (
        model(ids(), output_hidden_states=True, output_attentions=True)
        for model in (scanned, plain)
    )
    assert len(output.hidden_states) == 6 and len(output.attentions) == 5
    for actual, expected in zip(output.to_tuple()[1], right.to_tuple()[1], strict=True):
        assert close(actual, expected)

"""ALBERT: the battery for every class, groups of layers, and that they are shared."""

from __future__ import annotations

import pytest

from hfseq import plugins
from hfseq.testing import check_architecture
from hfseq_plugins.albert.modeling import FlaxAlbertForMaskedLM
from tests.support.models import albert_config as config
from tests.support.models import close, ids
from tests.support.tiers import battery

HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


@pytest.mark.parametrize(("head", "checks"), battery(HEADS, "ForMaskedLM"))
def test_battery(head, checks):
    check_architecture("albert", config(num_labels=2), heads=[head], checks=checks)


def test_battery_covers_every_registered_head():
    assert set(HEADS) == set(plugins.load().architectures["albert"].target.heads)


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
    few, many = (
        FlaxAlbertForMaskedLM(config(num_hidden_layers=layers), seed=1) for layers in (2, 6)
    )
    assert few.required_params == many.required_params
    assert not close(few(ids()).logits, many(ids(), params=few.params).logits)


@pytest.mark.parametrize("groups", [1, 2])
def test_scanned_groups_run_in_their_order(groups):
    given = config(num_hidden_layers=5, num_hidden_groups=groups)
    plain = FlaxAlbertForMaskedLM(given, seed=1)
    scanned = FlaxAlbertForMaskedLM(given, seed=1, scan_layers=True)
    found, right = (
        model(ids(), output_hidden_states=True, output_attentions=True)
        for model in (scanned, plain)
    )
    assert len(found.hidden_states) == 6 and len(found.attentions) == 5
    for one, other in zip(found.to_tuple()[1], right.to_tuple()[1], strict=True):
        assert close(one, other)

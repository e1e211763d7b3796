"""MobileBERT: the battery for every head and option, neighbors of tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import FlaxMobileBertModel
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from tests.support.models import close, fewest_layers, ids
from tests.support.models import mobilebert_config as config
from tests.support.tiers import battery

#: The last token of a text sees the vector of the padding token if the text is padded.
NEIGHBORS = dict.fromkeys(("padding", "packing"), "the last token sees its right neighbor")


#: Parameters that PyTorch's class does not use either, by the option of the configuration.
UNUSED = {
    "embedding_size": r"embedding_transformation/\w+$",
    "use_bottleneck_attention": r"bottleneck/attention/\w+/\w+$",
}


def check(head, changes=None, checks=None):
    # PyTorch gives the embedding of a padding token no gradient, not even as a neighbor.
    skip = {} if (changes or {}).get("trigram_input") is False else NEIGHBORS
    check_architecture(
        "mobilebert",
        config(num_labels=2, pad_token_id=None, **changes or {}),
        heads=[head],
        checks=checks,
        skip=skip,
        zero_gradients=[*ZERO_GRADIENTS, *(UNUSED[n] for n in changes or {} if n in UNUSED)],
    )


@pytest.mark.parametrize(("head", "checks"), battery("mobilebert", "ForMaskedLM"))
def test_battery(head, checks):
    check(head, fewest_layers("mobilebert") if checks else None, checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("Model", {"trigram_input": False, "embedding_size": 32}),
        ("ForMaskedLM", {"trigram_input": False}),
        ("ForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "gelu"}),
        ("Model", {"use_bottleneck": False, "hidden_dropout_prob": 0.1}),
        ("Model", {"use_bottleneck_attention": True, "normalization_type": "layer_norm"}),
        ("Model", {"key_query_shared_bottleneck": False, "intra_bottleneck_size": 32}),
        ("ForSequenceClassification", {"classifier_activation": False, "classifier_dropout": 0.3}),
        ("ForTokenClassification", {"num_feedforward_networks": 1, "hidden_dropout_prob": 0.1}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check(head, changes)


def test_padding_is_a_neighbor_of_the_last_token_and_documents_are_not():
    model = FlaxMobileBertModel(config(num_hidden_layers=1), seed=1)
    tokens = ids(1, 12)
    states = jax.jit(lambda ids, **options: model(ids, **options)[0])
    alone = [np.asarray(states(part)) for part in (tokens[:, :5], tokens[:, 5:])]
    packed = states(tokens, segment_ids=np.array([[1] * 5 + [2] * 7]))
    assert close(packed, np.concatenate(alone, 1))
    mask = np.array([[1] * 5 + [0] * 7])
    padded = np.asarray(states(tokens * mask, attention_mask=mask))[:, :5]
    assert not close(padded[:, 4], alone[0][:, 4], 1e-3)


def test_unsupported_configurations_are_rejected():
    for changes, message in (
        ({"normalization_type": "rms_norm"}, "normalization_type='rms_norm'"),
        ({"key_query_shared_bottleneck": False}, "intra_bottleneck_size=24 .*hidden_size=32"),
    ):
        with pytest.raises(UsageError, match=message):
            FlaxMobileBertModel(config(**changes), _do_init=False)

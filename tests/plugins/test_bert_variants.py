"""CamemBERT, Data2Vec, XLM-RoBERTa-XL and ERNIE: the battery, and task type embeddings."""

from __future__ import annotations

import jax
import pytest

import hfseq
from hfseq.testing import check_architecture
from tests.support import models
from tests.support.models import close, ids
from tests.support.parity import compare
from tests.support.tiers import batteries

FAMILIES = {
    "camembert": "ForMaskedLM",
    "data2vec-text": "ForSequenceClassification",
    "xlm-roberta-xl": "ForMaskedLM",
    "ernie": "ForMaskedLM",
}


def config_of(name, **changes):
    return getattr(models, f"{name.replace('-', '_')}_config")(num_labels=2, **changes)


@pytest.mark.parametrize(("name", "head", "checks"), batteries(FAMILIES))
def test_battery(name, head, checks):
    config = config_of(name, num_hidden_layers=1 if checks else 2)
    check_architecture(name, config, heads=[head], checks=checks)


CROSS = {"is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "changes"),
    [
        *((name, "ForCausalLM", CROSS) for name in FAMILIES),
        ("xlm-roberta-xl", "ForSequenceClassification", {"classifier_dropout": 0.3}),
        ("ernie", "Model", {"use_task_id": False}),
    ],
    ids=str,
)
def test_battery_of_an_option(name, head, changes):
    check_architecture(name, config_of(name, num_hidden_layers=1, **changes), heads=[head])


def test_task_types_are_those_of_pytorch(tmp_path):
    pytest.importorskip("torch")
    model = hfseq.FlaxErnieForTokenClassification(config_of("ernie", num_hidden_layers=1), seed=1)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": ids(), "task_type_ids": ids() % 4}
    compare(hfseq.FlaxErnieForTokenClassification, tmp_path, inputs)
    assert not close(jax.jit(model)(**inputs).logits, jax.jit(model)(ids()).logits, 1e-3)


@pytest.mark.slow
def test_choices_have_task_types():
    model = hfseq.FlaxErnieForMultipleChoice(config_of("ernie", num_hidden_layers=1), seed=1)
    choices = ids(4).reshape(2, 2, 12)
    logits = model(choices, task_type_ids=choices % 4).logits
    first = model(choices[:, :1], task_type_ids=choices[:, :1] % 4).logits
    assert close(logits[:, :1], first)
    assert not close(first, model(choices[:, :1]).logits, 1e-4)

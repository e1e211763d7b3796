"""RoBERTa-PreLayerNorm: the battery for every head, and the position of its norms."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.roberta_prelayernorm.modeling import FlaxRobertaPreLayerNormModel
from tests.support.models import close, ids, roberta_prelayernorm_config
from tests.support.tiers import CHECKS, first

HEADS = (
    *("Model", "ForMaskedLM", "ForCausalLM", "ForSequenceClassification", "ForMultipleChoice"),
    *("ForTokenClassification", "ForQuestionAnswering"),
)


@pytest.mark.parametrize(
    ("head", "checks"),
    first([("ForMaskedLM", CHECKS), *((head, None) for head in HEADS)], ("ForMaskedLM", CHECKS)),
)
def test_battery(head, checks):
    config = roberta_prelayernorm_config(num_labels=2, num_hidden_layers=1 if checks else 2)
    check_architecture("roberta-prelayernorm", config, heads=[head], checks=checks)


def test_battery_covers_every_registered_head():
    from hfseq import plugins

    heads = plugins.load().architectures["roberta-prelayernorm"].target.heads
    assert set(HEADS) == set(heads) - {"ForPreTraining"}
    assert heads["ForPreTraining"] == heads["ForMaskedLM"]


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = roberta_prelayernorm_config(
        num_hidden_layers=1, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False
    )
    check_architecture("roberta-prelayernorm", config, heads=["ForCausalLM"])


@pytest.mark.slow
def test_hidden_states_and_attentions_come_in_the_order_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import RobertaPreLayerNormModel

    model = FlaxRobertaPreLayerNormModel(roberta_prelayernorm_config(initializer_range=0.3))
    model.save_pretrained(tmp_path)
    theirs = RobertaPreLayerNormModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = model(ids(), output_hidden_states=True, output_attentions=True)
    with torch.no_grad():
        expected = theirs(
            torch.tensor(ids()).long(), output_hidden_states=True, output_attentions=True
        )
    for name, count in (("hidden_states", 3), ("attentions", 2)):
        assert len(ours[name]) == len(expected[name]) == count
        assert all(close(a, b) for a, b in zip(ours[name], expected[name], strict=True))


@pytest.mark.slow
def test_rows_longer_than_the_table_are_refused():
    model = FlaxRobertaPreLayerNormModel(roberta_prelayernorm_config(), _do_init=False)
    with pytest.raises(UsageError, match="39 tokens.*38"):
        model(np.ones((1, 39), np.int32), params={})

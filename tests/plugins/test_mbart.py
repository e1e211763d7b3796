"""mBART: the battery for every head, language IDs, and translation."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.mbart.modeling import (
    FlaxMBartForConditionalGeneration,
    FlaxMBartModel,
    shift_tokens_right,
)
from tests.support.models import close, ids, mbart_config
from tests.support.parity import compare, compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import torch_counterpart

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.mark.parametrize(("head", "checks"), battery("mbart", "ForSeq2SeqLM"))
def test_battery(head, checks):
    config = mbart_config(**(SHALLOW if checks else {}), num_labels=3)
    check_architecture("mbart", config, heads=[head], checks=checks)


def test_it_is_planned_as_an_encoder_decoder():
    """In Transformers 4 the head was also registered as a masked language modeling head."""
    from hfseq.cli.plan.run import choose_objective

    assert choose_objective(SimpleNamespace(objective=None), mbart_config()) == "span_mlm"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"scale_embedding": True}, {"tie_word_embeddings": False}], ids=str
)
def test_equals_pytorch(changes, tmp_path):
    pytest.importorskip("torch")
    ours = FlaxMBartForConditionalGeneration(mbart_config(**SHALLOW, **changes))
    ours.save_pretrained(tmp_path)
    inputs = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 7, 1)}
    unused = 1 if ours.config.tie_word_embeddings else 2
    compare(FlaxMBartForConditionalGeneration, tmp_path, inputs, unused=unused)


# -- language ID -----------------------------------------------------------------------------------

ROWS = np.array([[5, 6, 7, 2, 40], [8, 2, 41, 1, 1], [9, 9, 2, 42, -100]])


def test_the_last_token_that_is_not_padding_comes_first():
    expected = [[40, 5, 6, 7, 2], [41, 8, 2, 41, 1], [42, 9, 9, 2, 42]]
    assert np.asarray(shift_tokens_right(ROWS, 1)).tolist() == expected
    assert np.asarray(jax.jit(lambda x: shift_tokens_right(x, 1))(ROWS)).tolist() == expected
    with pytest.raises(UsageError, match="pad_token_id"):
        shift_tokens_right(ROWS, None)


@pytest.mark.slow
def test_shift_matches_pytorch_and_is_the_default(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import MBartModel
    from transformers.models.mbart import modeling_mbart

    theirs = modeling_mbart.shift_tokens_right(torch.tensor(ROWS), 1)
    assert np.asarray(shift_tokens_right(ROWS, 1)).tolist() == theirs.tolist()
    model = FlaxMBartModel(mbart_config(**SHALLOW))
    model.save_pretrained(tmp_path)
    twin = MBartModel.from_pretrained(tmp_path).eval()
    labels = np.where(ROWS == -100, 1, ROWS)
    ours = jax.jit(lambda x: model(x, attention_mask=x != 1).last_hidden_state)(labels)
    mask = torch.tensor(labels != 1).long()
    expected = twin(torch.tensor(labels), attention_mask=mask).last_hidden_state.detach()
    assert close(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"decoder_start_token_id": 50}, {"decoder_start_token_id": 2, "forced_bos_token_id": 51}],
    ids=["mbart", "mbart-50"],
)
@pytest.mark.parametrize("beams", [1, 4])
def test_translates_into_a_language_as_pytorch_does(options, beams, tmp_path):
    model = FlaxMBartForConditionalGeneration(mbart_config(init_std=0.3, scale_embedding=True))
    source = np.concatenate([ids(3, 7), np.full((3, 2), [2, 49], np.int32)], 1)
    options = {"max_length": 10, "num_beams": beams, **options}
    sequences = compare_tokens(model, torch_counterpart(model, tmp_path), source, **options)
    language = options.get("forced_bos_token_id")
    assert language is None or (sequences[:, 1] == language).all()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_of_bart_is_refused_by_name(tmp_path):
    from hfseq_plugins.bart.modeling import FlaxBartModel
    from tests.support.models import bart_config

    FlaxBartModel(bart_config(**SHALLOW)).save_pretrained(tmp_path)
    with pytest.raises((UsageError, ValueError), match="bart"):
        FlaxMBartModel.from_pretrained(tmp_path)

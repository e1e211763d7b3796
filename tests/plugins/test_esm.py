"""ESM: the battery for every head and option, token dropout, contact prediction."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import FlaxEsmForMaskedLM, FlaxEsmModel
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from tests.support.models import close, fewest_layers, ids
from tests.support.models import esm_config as config
from tests.support.tiers import battery

#: The contact head is trained separately, and logits do not depend on it.
UNUSED = (*ZERO_GRADIENTS, r"contact_head/regression/(kernel|bias)$")


def check(head, changes=None, checks=None):
    check_architecture(
        "esm",
        config(num_labels=2, **(changes or {})),
        heads=[head],
        checks=checks,
        zero_gradients=UNUSED,
    )


@pytest.mark.parametrize(("head", "checks"), battery("esm", "ForMaskedLM"))
def test_battery(head, checks):
    check(head, fewest_layers("esm") if checks else None, checks)


ABSOLUTE = {"position_embedding_type": "absolute", "emb_layer_norm_before": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", {**ABSOLUTE, "token_dropout": False}),
        ("ForMaskedLM", {"tie_word_embeddings": False, "rope_theta": 50.0}),
        ("Model", {**ABSOLUTE, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}),
        ("Model", {"is_decoder": True}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check(head, changes)


@pytest.mark.parametrize("changes", [{}, {"position_embedding_type": "absolute"}])
def test_hidden_tokens_and_contacts_are_those_of_pytorch(changes, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import EsmForMaskedLM

    model = FlaxEsmForMaskedLM(config(num_hidden_layers=1, **changes), seed=1)
    model.save_pretrained(tmp_path)
    theirs = EsmForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens, mask = ids(3, 12), np.ones((3, 12), np.int64)
    tokens[0, 3:6] = 3  # hidden
    tokens[1, -1] = 2
    mask[2, 9:], tokens[2, 9:] = 0, 1
    inputs = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        as_torch = {name: torch.from_numpy(np.asarray(x, np.int64)) for name, x in inputs.items()}
        right = theirs(**as_torch).logits.numpy()
        touching = theirs.predict_contacts(as_torch["input_ids"], as_torch["attention_mask"])
    real = mask.astype(bool)
    close(np.asarray(jax.jit(model)(**inputs).logits)[real], right[real])
    close(model.predict_contacts(**inputs), touching.numpy())


def test_packed_proteins_are_computed_as_apart():
    for changes in ({}, {"position_embedding_type": "absolute"}):
        model = FlaxEsmForMaskedLM(config(num_hidden_layers=1, **changes), seed=1)
        logits_of = jax.jit(lambda ids, model=model, **options: model(ids, **options).logits)
        first, second = ids(1, 5, seed=1), ids(1, 7, seed=2)
        first[0, 2], second[0, 3:5] = 3, 3
        row = np.concatenate([first, second, np.ones((1, 4), first.dtype)], 1)
        segments = np.repeat([[1, 2, 0]], [5, 7, 4], axis=1)
        logits = np.asarray(logits_of(row, segment_ids=segments))
        assert close(logits[:, :5], logits_of(first))
        assert close(logits[:, 5:12], logits_of(second))


def test_unsupported_configurations_are_rejected():
    for changes, message in (
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"add_cross_attention": True, "is_decoder": True}, "add_cross_attention=True"),
        ({"mask_token_id": None}, "token_dropout=True .*mask_token_id"),
    ):
        with pytest.raises(UsageError, match=message):
            FlaxEsmModel(config(**changes), _do_init=False)

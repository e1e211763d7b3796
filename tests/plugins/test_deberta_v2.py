"""DeBERTa-v2 and v3: the battery for every head and option, buckets, files of Microsoft."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import (
    FlaxDebertaV2ForMaskedLM,
    FlaxDebertaV2ForSequenceClassification,
    FlaxDebertaV2Model,
)
from hfseq.errors import UsageError
from hfseq.nn.random import batch_keys
from hfseq.testing import check_architecture
from tests.support.models import close, fewest_layers, ids, trees_equal
from tests.support.models import deberta_v2_config as config
from tests.support.parity import compare
from tests.support.tiers import battery

#: As in DeBERTa-v2: own projections of positions, no buckets, position and type embeddings.
V2 = {
    "share_att_key": False,
    "position_biased_input": True,
    "type_vocab_size": 2,
    "position_buckets": -1,
    "max_relative_positions": -1,
    "norm_rel_ebd": "none",
    "conv_kernel_size": 0,
}


def check(head, changes=None, checks=None, **options):
    check_architecture(
        "deberta-v2", config(num_labels=2, **changes or {}), heads=[head], checks=checks, **options
    )


@pytest.mark.parametrize(("head", "checks"), battery("deberta-v2", "ForMaskedLM"))
def test_battery(head, checks):
    check(head, fewest_layers("deberta-v2") if checks else None, checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("ForMaskedLM", V2),
        ("ForMaskedLM", {"legacy": False, "hidden_act": "relu"}),
        ("ForMaskedLM", {"tie_word_embeddings": False, "embedding_size": 24}),
        ("Model", {"pos_att_type": "c2p", "attention_head_size": 8, "share_att_key": False}),
        ("Model", {"pos_att_type": "P2C", "conv_act": "gelu", "conv_groups": 4}),
        ("Model", {"relative_attention": False, "norm_rel_ebd": "none"}),
        ("ForSequenceClassification", {"cls_dropout": 0.3, "pooler_dropout": 0.2}),
        ("ForMultipleChoice", {"pooler_hidden_act": "tanh", "pooler_dropout": 0.2}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check(head, changes)


@pytest.mark.parametrize("changes", [{}, {"share_att_key": False, "position_buckets": 16}])
def test_long_rows_with_padding_are_those_of_pytorch(changes, tmp_path):
    pytest.importorskip("torch")
    FlaxDebertaV2Model(config(num_hidden_layers=1, **changes), seed=1).save_pretrained(tmp_path)
    tokens, mask = ids(2, 90), np.ones((2, 90), np.int32)
    tokens[1, 70:], mask[1, 70:] = 0, 0
    tokens[0, :2], mask[0, :2] = 0, 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    compare(FlaxDebertaV2Model, tmp_path, inputs, output_mask=mask[..., None])


@pytest.mark.slow
@pytest.mark.parametrize("positions", [(256, 512), (-1, 24), (6, 30)], ids=str)
def test_bucket_of_every_distance_is_that_of_pytorch(positions):
    torch = pytest.importorskip("torch")
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    from hfseq_plugins.deberta_v2.modeling import relative_rows

    buckets, limit = positions
    states = torch.zeros(1, 1, 700, 4)
    expected = build_relative_position(states, states, buckets, limit)[0].numpy()
    span = buckets if buckets > 0 else limit
    rows = relative_rows(
        config(position_buckets=buckets, max_relative_positions=limit),
        np.arange(700)[:, None] - np.arange(700),
    )
    assert np.array_equal(rows, np.clip(expected + span, 0, 2 * span - 1))


def test_published_files_have_a_head_that_their_configuration_does_not_name(tmp_path, caplog):
    """Their weights are in a `.bin` file, together with those of the enhanced mask decoder."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    model = FlaxDebertaV2ForMaskedLM(config(legacy=False), seed=1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mask_predictions.dense.weight"] = torch.ones(3)
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.ones(40, 32)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "legacy": True}))
    loaded = FlaxDebertaV2ForMaskedLM.from_pretrained(tmp_path)
    assert trees_equal(loaded.params, model.params) and not caplog.records
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["legacy"] is False


def test_dropout_does_not_depend_on_the_other_rows_of_a_batch():
    model = FlaxDebertaV2Model(config(num_hidden_layers=1, hidden_dropout_prob=0.3), seed=1)

    @jax.jit
    def states(rows):
        keys = batch_keys(jax.random.key(0), rows)
        return model(jnp.asarray(ids(4))[rows], dropout_rng=keys, train=True)[0]

    hidden = states(np.arange(4))
    assert close(hidden[1:3], states(np.arange(1, 3)))
    assert not close(hidden, jax.jit(model)(ids(4))[0], 1e-3)


def test_unsupported_configurations_are_rejected():
    for cls, changes, message in (
        (
            FlaxDebertaV2Model,
            {"attention_head_size": 6},
            "4 attention heads .* 6 .*hidden_size=32",
        ),
        (FlaxDebertaV2Model, {"conv_kernel_size": 4}, "conv_kernel_size=4"),
        (
            FlaxDebertaV2ForSequenceClassification,
            {"pooler_hidden_size": 16},
            "pooler_hidden_size=16",
        ),
        (FlaxDebertaV2ForMaskedLM, {"legacy": False, "embedding_size": 24}, "embedding_size=24"),
    ):
        with pytest.raises(UsageError, match=message):
            cls(config(**changes), _do_init=False)

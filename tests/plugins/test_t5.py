"""T5 and T5 v1.1: the battery, the shared bias, tied and untied heads, old and published files."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hfseq import modeling, nn, plugins
from hfseq.nn import trees
from hfseq.testing import case, check_architecture
from hfseq.testing import checks as testing_checks
from hfseq.testing import torch as testing_torch
from hfseq.testing.case import Case, Skipped
from hfseq_plugins.t5.modeling import (
    FlaxT5EncoderModel,
    FlaxT5ForConditionalGeneration,
    FlaxT5Model,
)
from tests.support.models import close, ids, rewrite_tensors, t5_config, trees_equal
from tests.support.parity import compare
from tests.support.tiers import CHECKS, first, heads

V1_1 = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
TABLE = ("layer", "0", "SelfAttention", "relative_attention_bias", "embedding")


@pytest.mark.parametrize(
    ("head", "depth", "checks"),
    first(
        [
            *((head, 2 if head == "ForSeq2SeqLM" else 1, None) for head in heads("t5")),
            ("ForSeq2SeqLM", 1, CHECKS),
        ],
        ("ForSeq2SeqLM", 1, CHECKS),
    ),
)
def test_battery(head, depth, checks):
    check_architecture("t5", t5_config(num_layers=depth), heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_of_v1_1_with_other_depths_and_widths():
    config = t5_config(**V1_1, num_layers=1, num_decoder_layers=2, d_kv=16)
    check_architecture("t5", config, heads=["ForSeq2SeqLM"])


@pytest.fixture(scope="module")
def encoder_case(tmp_path_factory):
    """Returns the battery's case for the encoder model, which has no Auto class."""
    spec = plugins.load().architectures.get("t5")
    folder = tmp_path_factory.mktemp("encoder")
    return Case("Model", FlaxT5EncoderModel, t5_config(), folder, spec, (), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", (*testing_checks.CHECKS, *testing_torch.CHECKS), ids=lambda check: check.__name__
)
def test_battery_of_the_encoder_model(encoder_case, check):
    try:
        check(encoder_case)
    except Skipped as reason:
        pytest.skip(str(reason))


# -- relative positions
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20)])
def test_bias_equals_pytorchs_at_every_distance(bidirectional, buckets, distance):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    config = t5_config(
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=distance,
        is_decoder=not bidirectional,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    table = np.random.default_rng(0).normal(size=(buckets, 4)).astype(np.float32)
    theirs.relative_attention_bias.weight.data = torch.from_numpy(table)
    expected = theirs.compute_bias(300, 310).detach().numpy()
    options = {"bidirectional": bidirectional, "max_distance": distance}
    assert np.array_equal(nn.relative_position_bias(table, 300, 310, **options), expected)
    later = nn.relative_position_bias(table, 3, 310, 200, **options)
    assert np.array_equal(later, expected[:, :, 200:203])


@pytest.mark.slow
def test_table_of_the_first_block_serves_all_and_is_scanned_under_its_name(tmp_path):
    model = FlaxT5ForConditionalGeneration(t5_config())
    for side in ("encoder", "decoder"):
        assert model.params_shape_tree[side]["block"]["0"]["layer"]["0"]["SelfAttention"].keys() > {
            "relative_attention_bias"
        }
    tables = [path for path in model.required_params if "relative_attention_bias" in path]
    assert sorted(tables) == [(side, "block", "0", *TABLE) for side in ("decoder", "encoder")]
    model.save_pretrained(tmp_path / "listed")
    scanned = FlaxT5ForConditionalGeneration.from_pretrained(tmp_path / "listed", scan_layers=True)
    assert trees.flatten(scanned.params)["encoder", "block", *TABLE].shape == (1, 8, 4)
    scanned.save_pretrained(tmp_path / "scanned")
    again = FlaxT5ForConditionalGeneration.from_pretrained(tmp_path / "scanned")
    assert trees_equal(again.params, model.params)


@pytest.mark.slow
@pytest.mark.parametrize("occupied", [True, False])
def test_scanned_decoding_with_a_cache_gives_the_full_forward(occupied):
    model = FlaxT5ForConditionalGeneration(t5_config(), scan_layers=True)
    tokens, targets, mask = ids(), ids(2, 9, seed=1), np.ones((2, 9), np.int32)
    full = model(tokens, decoder_input_ids=targets).logits
    encoded = model.encode(tokens)
    params = model.params if occupied else None
    cache, logits = model.init_cache(2, 9, encoded, params=params), []
    crossed = cache["decoder"]["block"]["layer"]["1"] if occupied else {"EncDecAttention": {}}
    assert ("cached_key" in crossed["EncDecAttention"]) == occupied
    for part in (slice(0, 6), slice(6, 7), slice(7, 9)):
        output = model.decode(
            targets[:, part], encoded, past_key_values=cache, decoder_attention_mask=mask
        )
        cache = output.past_key_values
        logits.append(output.logits)
    assert close(np.concatenate(logits, 1), full)


# -- the head
# --------------------------------------------------------------------------------------


def test_head_is_tied_and_scaled_only_in_v1_0():
    original = FlaxT5ForConditionalGeneration(t5_config())
    newer = FlaxT5ForConditionalGeneration(t5_config(tie_word_embeddings=False))
    assert newer.required_params - original.required_params == {("lm_head", "kernel")}
    params = {**original.params, "lm_head": {"kernel": original.params["shared"]["embedding"].T}}
    tied = np.asarray(original(ids(), decoder_input_ids=ids()).logits)
    untied = newer(ids(), decoder_input_ids=ids(), params=params).logits
    assert close(np.asarray(untied) * 32**-0.5, tied)


def test_untying_after_construction_means_v1_1_and_is_saved_so(tmp_path):
    config = t5_config()
    config.tie_word_embeddings = False
    model = FlaxT5ForConditionalGeneration(config)
    assert "lm_head" in model.params
    model.save_pretrained(tmp_path)
    assert not FlaxT5ForConditionalGeneration.config_class.from_pretrained(
        tmp_path
    ).scale_decoder_outputs
    inputs = {"input_ids": ids(), "decoder_input_ids": ids()}
    again = FlaxT5ForConditionalGeneration.from_pretrained(tmp_path)
    assert close(again(**inputs).logits, model(**inputs).logits, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("untied", [True, False])
def test_checkpoint_decides_whether_the_head_is_tied(tmp_path, scaled, untied):
    """Different tensors in a file untie the head, whatever the configuration, as in PyTorch."""
    pytest.importorskip("torch")
    model = FlaxT5ForConditionalGeneration(t5_config(tie_word_embeddings=scaled), tied=not untied)
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(seed=1)}
    again = compare(FlaxT5ForConditionalGeneration, tmp_path, inputs)
    assert ("lm_head" in again.params) == untied
    assert trees_equal(again.params, model.params)


def test_copy_of_the_embeddings_is_a_tied_head(tmp_path, caplog):
    FlaxT5ForConditionalGeneration(t5_config(vocab_size=3000)).save_pretrained(tmp_path)

    def repeat(tensors):
        for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
            tensors[f"{name}.weight"] = tensors["shared.weight"].copy()

    rewrite_tensors(tmp_path / "model.safetensors", repeat)
    assert "lm_head" not in FlaxT5ForConditionalGeneration.from_pretrained(tmp_path).params
    assert not caplog.records

    def change(tensors):
        tensors["lm_head.weight"][-1, -1] += 1

    rewrite_tensors(tmp_path / "model.safetensors", change)
    assert "lm_head" in FlaxT5ForConditionalGeneration.from_pretrained(tmp_path).params


# -- the call
# --------------------------------------------------------------------------------------


def test_decoder_input_ids_are_needed():
    model = FlaxT5ForConditionalGeneration(t5_config())
    with pytest.raises(ValueError, match="requires decoder_input_ids.*shift_tokens_right"):
        model(ids())


def test_module_offers_shift_tokens_right():
    shifted = modeling.shift_tokens_right(np.array([[5, 6, -100]]), 0, 3)
    assert np.array_equal(shifted, [[3, 5, 6]])
    assert np.array_equal(modeling.shift_tokens_right(np.array([[-100, 6]]), 0, 3), [[3, 0]])


@pytest.mark.slow
def test_no_length_is_too_long():
    model = FlaxT5Model(t5_config(num_layers=1))
    assert model.max_length() is None
    assert model(ids(1, 700), decoder_input_ids=ids(1, 3)).last_hidden_state.shape == (1, 3, 32)


@pytest.mark.slow
def test_outputs_have_the_names_and_order_of_v4():
    model = FlaxT5ForConditionalGeneration(t5_config())
    flags = {"output_attentions": True, "output_hidden_states": True}
    output = model(ids(), decoder_input_ids=ids(2, 5), **flags)
    assert output.keys() == (
        *("logits", "decoder_hidden_states", "decoder_attentions", "cross_attentions"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions"),
    )
    assert [state.shape for state in output.decoder_hidden_states] == [(2, 5, 32)] * 3
    assert [weights.shape for weights in output.cross_attentions] == [(2, 4, 5, 12)] * 2
    assert np.array_equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    encoded = model.encode(ids(), **flags)
    assert close(encoded[0], output.encoder_last_hidden_state, 1e-6)
    decoded = model.decode(ids(2, 5), encoded, **flags)
    assert close(decoded.logits, output.logits, 1e-6)
    assert model(ids(), decoder_input_ids=ids(), return_dict=False)[0].shape == (2, 12, 64)


@pytest.mark.slow
def test_initialization_follows_the_paper():
    config = t5_config(d_model=64, d_kv=16, num_heads=8, d_ff=256, initializer_factor=0.5, **V1_1)
    params = trees.flatten(FlaxT5ForConditionalGeneration(config).params)
    attention = ("encoder", "block", "1", "layer", "0", "SelfAttention")
    dense = ("encoder", "block", "1", "layer", "1", "DenseReluDense")
    expected = {
        ("shared", "embedding"): 1.0,
        ("lm_head", "kernel"): 1.0,
        (*attention, "q", "kernel"): (128 * 16) ** -0.5,
        (*attention, "k", "kernel"): 128**-0.5,
        (*attention, "o", "kernel"): 128**-0.5,
        (*dense, "wi_0", "kernel"): 64**-0.5,
        (*dense, "wo", "kernel"): 256**-0.5,
    }
    for path, spread in expected.items():
        assert np.std(params[path]) == pytest.approx(0.5 * spread, rel=0.06), path


# -- checkpoints
# -----------------------------------------------------------------------------------


def v4_tree(config):
    """Returns parameters of T5 v1.1 with the names and shapes of Transformers 4."""
    random = np.random.default_rng(3)
    width, inner = config.d_model, config.num_heads * config.d_kv

    def draw(*shape):  # 0.2 causes rounding errors of 1e-5 in gradients on some processors
        return random.normal(size=shape).astype(np.float32) * 0.1

    def attention(biased=False):
        table = (config.relative_attention_num_buckets, config.num_heads)
        projections = {name: {"kernel": draw(width, inner)} for name in ("q", "k", "v")}
        projections["o"] = {"kernel": draw(inner, width)}
        return projections | (
            {"relative_attention_bias": {"embedding": draw(*table)}} if biased else {}
        )

    def layer(name, content):
        return {name: content, "layer_norm": {"weight": draw(width) + 1}}

    def block(number, decoder):
        dense = {name: {"kernel": draw(width, config.d_ff)} for name in ("wi_0", "wi_1")}
        layers = [
            layer("SelfAttention", attention(number == 0)),
            *([layer("EncDecAttention", attention())] if decoder else []),
            layer("DenseReluDense", {**dense, "wo": {"kernel": draw(config.d_ff, width)}}),
        ]
        return {"layer": {str(index): content for index, content in enumerate(layers)}}

    def stack(decoder):
        blocks = {str(n): block(n, decoder) for n in range(config.num_layers)}
        return {"block": blocks, "final_layer_norm": {"weight": draw(width) + 1}}

    shared = {"embedding": draw(config.vocab_size, width)}
    body = {"shared": shared, "encoder": stack(False), "decoder": stack(True)}
    return {**body, "lm_head": {"kernel": draw(width, config.vocab_size)}}


@pytest.fixture(scope="module")
def v4_folder(tmp_path_factory):
    """Returns a checkpoint of Transformers 4: config.json with its keys, and msgpack weights."""
    import json

    from flax.serialization import msgpack_serialize

    folder, config = tmp_path_factory.mktemp("v4"), t5_config(**V1_1)
    stored = {**config.to_dict(), "tie_word_embeddings": False}
    del stored["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "flax_model.msgpack").write_bytes(msgpack_serialize(v4_tree(config)))
    return folder


@pytest.mark.slow
def test_v4_msgpack_file_matches_pytorch(v4_folder, tmp_path):
    pytest.importorskip("torch")
    model = FlaxT5ForConditionalGeneration.from_pretrained(v4_folder)
    assert trees_equal(model.params, v4_tree(model.config))
    model.save_pretrained(tmp_path)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(2, 7)}
    compare(FlaxT5ForConditionalGeneration, tmp_path, inputs, model)


@pytest.mark.slow
def test_base_head_and_encoder_load_each_others_files(v4_folder, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    tree = v4_tree(t5_config(**V1_1))
    body = {name: tree[name] for name in ("shared", "encoder", "decoder")}
    model = FlaxT5ForConditionalGeneration.from_pretrained(v4_folder)
    model.save_pretrained(tmp_path / "head")
    base = FlaxT5Model.from_pretrained(tmp_path / "head")
    assert trees_equal(base.params, body)
    encoder = FlaxT5EncoderModel.from_pretrained(tmp_path / "head")
    assert trees_equal(encoder.params, {name: body[name] for name in ("shared", "encoder")})
    base.save_pretrained(tmp_path / "base")
    again = FlaxT5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    assert trees_equal(again.params, body)  # the head is tied, as in PyTorch
    assert not caplog.records


@pytest.mark.slow
def test_published_checkpoint_equals_pytorch(shared):
    pytest.importorskip("torch")
    folder = shared / "checkpoints-tiny" / "caikit-T5ForConditionalGeneration"
    random = np.random.default_rng(0)
    names = ("input_ids", "decoder_input_ids")
    inputs = {name: random.integers(4, 1302, (2, 20)) for name in names}
    inputs["attention_mask"] = np.array([[1] * 20, [1] * 14 + [0] * 6])
    model = FlaxT5ForConditionalGeneration.from_pretrained(folder, scan_layers=True)
    compare(FlaxT5ForConditionalGeneration, folder, inputs, model)
    assert case.relative_error(model(**inputs).logits, np.zeros((2, 20, 1302))) > 1e-6

"""GPT-2: the battery for both classes, its options, old checkpoints and a published one."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.gpt2.modeling import FlaxGPT2LMHeadModel, FlaxGPT2Model
from tests.support.models import close, gpt2_config, ids, rewrite_tensors, trees_equal
from tests.support.parity import compare
from tests.support.tiers import DECODER_CHECKS, first, heads
from tests.support.v4_trees import write_v4

QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


QUICK = ("ForCausalLM", DECODER_CHECKS)


@pytest.mark.parametrize(
    ("head", "checks"), first([QUICK, *((head, None) for head in heads("gpt2"))], QUICK)
)
def test_battery(head, checks):
    check_architecture("gpt2", gpt2_config(), heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_with_cross_attention_untied_head_and_scores_scaled_by_layer():
    config = gpt2_config(
        add_cross_attention=True,
        tie_word_embeddings=False,
        n_inner=48,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    )
    check_architecture("gpt2", config, heads=["ForCausalLM"])


@pytest.mark.slow
def test_battery_with_unscaled_scores_another_activation_and_no_dropout():
    config = gpt2_config(n_layer=1, scale_attn_weights=False, activation_function="relu", **QUIET)
    check_architecture("gpt2", config, heads=["Model"])


def test_untied_head_has_a_separate_projection():
    tied = FlaxGPT2LMHeadModel(gpt2_config(), _do_init=False)
    untied = FlaxGPT2LMHeadModel(gpt2_config(tie_word_embeddings=False), _do_init=False)
    assert untied.required_params - tied.required_params == {("lm_head", "kernel")}
    assert untied.params_shape_tree["lm_head"]["kernel"].shape == (32, 64)


def test_projections_into_the_residual_stream_begin_smaller():
    params = trees.flatten(FlaxGPT2Model(gpt2_config(n_embd=128, n_layer=8), seed=1).params)
    assert np.std(params["h", "3", "mlp", "c_fc", "kernel"]) == pytest.approx(0.02, rel=0.02)
    for part in ("attn", "mlp"):
        spread = np.std(params["h", "3", part, "c_proj", "kernel"])
        assert spread == pytest.approx(0.02 / 4, rel=0.02)


def test_cache_needs_position_ids():
    model = FlaxGPT2LMHeadModel(gpt2_config())
    with pytest.raises(ValueError, match="past_key_values.*position_ids"):
        model(ids(), past_key_values=model.init_cache(2, 12))


def test_encoder_hidden_states_need_cross_attention():
    model = FlaxGPT2LMHeadModel(gpt2_config())
    with pytest.raises(UsageError, match="add_cross_attention=True"):
        model(ids(), encoder_hidden_states=np.zeros((2, 3, 32), np.float32))


def test_last_hidden_state_is_normalised_and_attention_looks_back():
    output = FlaxGPT2Model(gpt2_config())(ids(), output_attentions=True, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert np.array_equal(output.hidden_states[-1], output.last_hidden_state)
    assert np.allclose(np.std(output.last_hidden_state, -1), 1, atol=0.02)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 12, 12)] * 2
    assert not np.triu(output.attentions[1], 1).any()
    assert np.allclose(np.sum(output.attentions[1], -1), 1, atol=1e-5)


def test_upcast_attention_stays_in_float32():
    for upcast, expected in ((False, "bfloat16"), (True, "float32")):
        config = gpt2_config(n_layer=1, reorder_and_upcast_attn=upcast)
        output = FlaxGPT2LMHeadModel(config, dtype="bfloat16")(ids(), output_attentions=True)
        assert output.attentions[0].dtype == expected
        assert output.logits.dtype == "bfloat16"


# -- checkpoints
# ------------------------------------------------------------------------------------


def v4_tree(config):
    """The parameters of a language model with the names and shapes of Transformers 4."""
    random = np.random.default_rng(3)
    width = config.n_embd

    def draw(*shape):
        return random.normal(size=shape).astype(np.float32) * 0.2

    def norm():
        return {"scale": draw(width) + 1, "bias": draw(width)}

    def conv(features_in, features_out):
        return {"kernel": draw(features_out, features_in), "bias": draw(features_out)}

    def block():
        return {
            "ln_1": norm(),
            "attn": {"c_attn": conv(width, 3 * width), "c_proj": conv(width, width)},
            "ln_2": norm(),
            "mlp": {"c_fc": conv(width, 4 * width), "c_proj": conv(4 * width, width)},
        }

    body = {
        "wte": {"embedding": draw(config.vocab_size, width)},
        "wpe": {"embedding": draw(config.n_positions, width)},
        "h": {str(number): block() for number in range(config.n_layer)},
        "ln_f": norm(),
    }
    return {"transformer": body}


def torch_state(tree):
    """The same values under PyTorch names, where Conv1D kernels are `(in, out)`."""
    names = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
    return {
        ".".join((*path[:-1], names[path[-1]])): leaf.T.copy() if path[-1] == "kernel" else leaf
        for path, leaf in trees.flatten(tree).items()
    }


@pytest.fixture(scope="module")
def v4_folder(tmp_path_factory):
    """A Transformers 4 checkpoint: config.json and flax_model.msgpack."""
    folder, config = tmp_path_factory.mktemp("v4"), gpt2_config()
    write_v4(folder, config, v4_tree(config))
    return folder


def test_v4_msgpack_file_matches_pytorch(v4_folder):
    torch = pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel

    tree = v4_tree(gpt2_config())
    model = FlaxGPT2LMHeadModel.from_pretrained(v4_folder)
    assert trees_equal(model.params, tree)
    theirs = GPT2LMHeadModel(gpt2_config()).eval()
    state = {name: torch.from_numpy(leaf) for name, leaf in torch_state(tree).items()}
    assert theirs.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    theirs.tie_weights()
    assert close(model(ids()).logits, theirs(torch.from_numpy(ids()).long()).logits.detach())


def test_base_and_head_load_each_others_files(v4_folder, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    tree = v4_tree(gpt2_config())
    base = FlaxGPT2Model.from_pretrained(v4_folder)
    assert trees_equal(base.params, tree["transformer"])
    base.save_pretrained(tmp_path)
    assert trees_equal(FlaxGPT2LMHeadModel.from_pretrained(tmp_path).params, tree)
    assert not caplog.records


def test_untied_head_on_a_pretrained_body_is_new(v4_folder, caplog):
    caplog.set_level(logging.WARNING, "hfseq")
    model = FlaxGPT2LMHeadModel.from_pretrained(v4_folder, tie_word_embeddings=False)
    assert trees_equal(model.params["transformer"], v4_tree(gpt2_config())["transformer"])
    assert "lm_head.kernel" in caplog.text and "newly initialized" in caplog.text


def test_causal_masks_of_old_files_are_not_weights(tmp_path, caplog):
    FlaxGPT2LMHeadModel(gpt2_config()).save_pretrained(tmp_path)

    def add(tensors):
        for layer in range(2):
            name = f"transformer.h.{layer}.attn"
            tensors[f"{name}.bias"] = np.tril(np.ones((1, 1, 40, 40), np.uint8))
            tensors[f"{name}.masked_bias"] = np.float32([-1e4])

    rewrite_tensors(tmp_path / "model.safetensors", add)
    FlaxGPT2LMHeadModel.from_pretrained(tmp_path)
    assert not caplog.records


@pytest.mark.slow
def test_published_checkpoint_equals_pytorch(shared):
    pytest.importorskip("torch")
    folder = shared / "checkpoints-tiny" / "lmbuddy-tiny_gpt2"
    tokens = np.random.default_rng(0).integers(0, 21, (2, 20))
    compare(FlaxGPT2Model, folder, {"input_ids": tokens})

"""The WMT Transformer: its configuration, the battery, its variants, differential attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq.checkpoints.config import apply_overrides
from hfseq.errors import UsageError
from hfseq.testing import case, check_architecture
from hfseq.testing import checks as testing_checks
from hfseq_plugins.wmt_transformer.configuration import WMTTransformerConfig
from hfseq_plugins.wmt_transformer.modeling import (
    DifferentialAttention,
    FlaxWMTTransformerForConditionalGeneration,
    FlaxWMTTransformerModel,
    initial_lambdas,
)
from tests.support.models import close, ids, wmt_transformer_config

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
DIFFERENTIAL = {"attention": "differential", "attention_bias": False}


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "heads", "inner", "layers"),
    [("base", 512, 8, 2048, 6), ("big", 1024, 16, 4096, 6), ("tiny", 128, 4, 512, 2)],
)
def test_presets(name, width, heads, inner, layers):
    config = WMTTransformerConfig.preset(name, vocab_size=99)
    assert (config.emb_dim, config.num_heads, config.mlp_dim) == (width, heads, inner)
    assert config.num_layers == config.decoder_layers == layers and config.vocab_size == 99
    assert WMTTransformerConfig.preset(name, encoder_layers=1).encoder_layers == 1


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UsageError, match=r"no preset 'bigg'.*'big'.*known: tiny, base, big"):
        WMTTransformerConfig.preset("bigg")


def test_names_of_the_reference_set_both_sides():
    config = WMTTransformerConfig(emb_dim=64, num_layers=3, num_heads=4, mlp_dim=96, max_len=77)
    assert (config.d_model, config.max_position_embeddings) == (64, 77)
    for side in ("encoder", "decoder"):
        sizes = [getattr(config, f"{side}_{n}") for n in ("layers", "attention_heads", "ffn_dim")]
        assert sizes == [3, 4, 96]
    apply_overrides(config, {"num_layers": 5, "norm": "post"})
    assert (config.encoder_layers, config.decoder_layers, config.norm) == (5, 5, "post")


def test_all_configuration_problems_are_reported_together():
    with pytest.raises(UsageError) as error:
        WMTTransformerConfig(norm="prae", d_model=30, dropout=1.0, embedding_init_std=0.0)
    for part in (
        "norm='prae' is unknown",
        "d_model=30 is not a multiple of encoder_attention_heads=8",
        "dropout=1.0 has to be in [0, 1)",
        "embedding_init_std=0.0 has to be greater than 0",
    ):
        assert part in str(error.value)
    with pytest.raises(UsageError, match="vocab_size=0 has to be at least 1"):
        WMTTransformerConfig(vocab_size=0)
    with pytest.raises(UsageError, match="qkv_dim=36 is not a multiple of encoder_attention_heads"):
        WMTTransformerConfig(qkv_dim=36)
    with pytest.raises(UsageError, match="heads in pairs: decoder_attention_heads=1 is odd"):
        WMTTransformerConfig(attention="differential", decoder_attention_heads=1)


def test_options_that_were_set_later_are_checked_by_the_model():
    config = wmt_transformer_config()
    config.positions = "rotary"
    with pytest.raises(UsageError, match="positions='rotary' is unknown"):
        FlaxWMTTransformerModel(config, _do_init=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "differential"}, "no option like attention='differential'"),
        ({"qkv_dim": 16}, "qkv_dim=16 differs from d_model=32"),
        ({"norm": "post", "positions": "learned"}, "positions='learned' with norm='post'"),
    ],
)
def test_options_without_stock_equivalent_give_the_reason(changes, reason):
    config = wmt_transformer_config(**changes)
    assert reason in "".join(config.twin_problems())
    with pytest.raises(UsageError, match=f"no class of Transformers .*{reason}"):
        config.twin()


@pytest.mark.parametrize(("norm", "variant"), [("pre", "pegasus"), ("post", "marian")])
def test_stock_config_is_equivalent(norm, variant):
    config = wmt_transformer_config(norm=norm, dropout=0.3, bos_token_id=None)
    twin = config.twin()
    assert (twin.model_type, twin.dropout, twin.hfseq["norm"]) == (variant, 0.3, norm)
    assert twin.forced_eos_token_id is None and twin.decoder_start_token_id == 0
    assert twin.activation_function == "relu" and twin.scale_embedding
    back = WMTTransformerConfig.from_dict({**twin.to_diff_dict(), **twin.hfseq})
    assert back.to_dict() == config.to_dict()


# -- initialization --------------------------------------------------------------------------------


@pytest.mark.slow
def test_embeddings_begin_with_unit_variance_and_kernels_as_xavier():
    config = wmt_transformer_config(
        vocab_size=2000, kernel_init="xavier_uniform", embedding_init_std=None, **SHALLOW
    )
    params = FlaxWMTTransformerForConditionalGeneration(config).params
    scaled = params["model"]["shared"]["embedding"] * config.d_model**0.5
    assert abs(float(scaled.std()) - 1) < 0.02
    kernel = params["model"]["encoder"]["layers"]["0"]["fc1"]["kernel"]
    limit = (6 / (32 + 48)) ** 0.5
    assert 0.95 * limit < float(jnp.abs(kernel).max()) <= limit


def test_stock_initialisation():
    config = wmt_transformer_config(kernel_init="normal", init_std=0.3, **SHALLOW)
    kernel = FlaxWMTTransformerModel(config).params["encoder"]["layers"]["0"]["fc1"]["kernel"]
    assert abs(float(kernel.std()) - 0.3) < 0.03


# -- battery ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_battery():
    unlike = {"decoder_attention_heads": 2, "decoder_ffn_dim": 40}
    check_architecture("wmt_transformer", wmt_transformer_config(**unlike), heads=["ForSeq2SeqLM"])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_battery_without_a_head(norm):
    config = wmt_transformer_config(**SHALLOW, norm=norm)
    check_architecture("wmt_transformer", config, heads=["Model"])


@pytest.mark.slow
def test_battery_of_differential_attention():
    config = wmt_transformer_config(**DIFFERENTIAL)
    report = check_architecture("wmt_transformer", config, heads=["ForSeq2SeqLM"])
    assert "transformers has no PyTorch class" in "".join(report.skipped.values())


VARIANTS = {
    "post": {"norm": "post"},
    "learned": {"positions": "learned"},
    "unshared": {"share_embeddings": False},
    "untied": {"logits_via_embedding": False},
    "unshared, untied, post": {
        "share_embeddings": False,
        "logits_via_embedding": False,
        "norm": "post",
    },
    "no bias": {"attention_bias": False},
    "wide heads": {"qkv_dim": 64},
    "post, learned": {"norm": "post", "positions": "learned"},
}


#: A new Pegasus model has other values than the variant allows.
NEW_PEGASUS = {
    "learned": ("torch_initialization", "its positions are sinusoidal"),
    "post, learned": ("torch_initialization", "its positions are sinusoidal"),
    "unshared": ("torch_files", "without tied weights, its head is separate too"),
    "untied": ("torch_files", "without tied weights, its embeddings are separate too"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_battery_of_variants(name):
    selected_checks = {"gradients", "save_and_load", "cached_decoding", "padding", "torch_loads_it"}
    selected_checks |= {"torch_tree", "torch_parity"}
    checks = testing_checks.CHECKS
    check_architecture(
        "wmt_transformer",
        wmt_transformer_config(**SHALLOW, **VARIANTS[name]),
        heads=["ForSeq2SeqLM"],
        skip={c.__name__: "a variant" for c in checks if c.__name__ not in selected_checks}
        | dict([NEW_PEGASUS[name]] if name in NEW_PEGASUS else []),
    )


# -- differential attention ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def differential():
    return FlaxWMTTransformerForConditionalGeneration(
        wmt_transformer_config(**DIFFERENTIAL, init_std=0.3, decoder_layers=2, encoder_layers=1)
    )


def test_lambdas_rise_with_depth():
    expected = [0.8 - 0.6 * np.exp(-0.3 * depth) for depth in range(4)]
    assert np.allclose(initial_lambdas(4), expected) and np.isclose(expected[0], 0.2)


@pytest.mark.slow
def test_first_layer_subtracts_one_map_from_the_other(differential):
    """Compares with the formula of the paper for one head of one row."""
    tokens = ids(1, 6)
    states = differential.encode(tokens, output_hidden_states=True, output_attentions=True)
    layer = differential.params["model"]["encoder"]["layers"]["0"]
    x = np.asarray(states.hidden_states[0][0], np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k = (x @ layer["self_attn"][f"{n}_proj"]["kernel"] for n in "qk")

    def softmax_map(head):
        scores = q[:, head * 8 : head * 8 + 8] @ k[:, head * 8 : head * 8 + 8].T / np.sqrt(8)
        return np.asarray(jax.nn.softmax(scores, axis=-1))

    vectors = layer["self_attn"]
    first, two = (np.exp(np.dot(vectors[f"lambda_q{i}"], vectors[f"lambda_k{i}"])) for i in (1, 2))
    for pair in range(2):
        expected = softmax_map(2 * pair) - (first - two + 0.2) * softmax_map(2 * pair + 1)
        assert close(states.attentions[0][0, pair], expected)


def test_fully_masked_query_gives_zero_and_no_gradient():
    config = wmt_transformer_config(**DIFFERENTIAL)
    layer = DifferentialAttention(config, 4, nnx.Rngs(0))
    query, key, value = jax.random.normal(jax.random.key(1), (3, 2, 3, 4, layer.head_dim))
    mask = jnp.array([[1, 1, 0], [0, 0, 0]])[:, None, None] == 1

    def mixed(query):
        return layer.compute_attention(
            query, key, value, initial=0.2, mask=mask, return_weights=True
        )

    @jax.jit
    def evaluate(query):
        return *mixed(query), jax.grad(lambda query: (mixed(query)[0] ** 3).sum())(query)

    actual, weights, gradient = evaluate(query)
    for part in (actual, weights, gradient):
        assert jnp.isfinite(part).all() and part[0].any() and not part[1].any()


@pytest.mark.slow
def test_lambda_is_trained_and_its_start_is_not(differential):
    gradient = case.jit(jax.grad(lambda p: differential(ids(), params=p).logits[..., 5].sum()))(
        differential.params
    )
    attention = gradient["model"]["decoder"]["layers"]["1"]["encoder_attn"]
    assert attention.keys() == {
        *("q_proj", "k_proj", "v_proj", "out_proj", "head_norm"),
        *("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),
    }
    assert all(np.abs(attention[f"lambda_q{i}"]).max() > 0 for i in (1, 2))


@pytest.mark.slow
def test_generation_with_a_cache_equals_the_full_forward_pass(differential):
    tokens, mask = ids(2, 7), np.array([[1] * 7, [1] * 4 + [0] * 3])
    generated = np.zeros((2, 1), np.int32)
    for _ in range(4):
        logits = differential(tokens, mask, generated).logits[:, -1]
        generated = np.concatenate([generated, np.argmax(logits, -1)[:, None]], 1).astype(np.int32)
    options = {"attention_mask": mask, "max_new_tokens": 4, "eos_token_id": None}
    greedy = differential.generate(tokens, num_beams=1, **options).sequences
    assert np.asarray(greedy).tolist() == generated.tolist()
    # Beams share the encoder's keys. After one step they are the best tokens.
    beams = differential.generate(
        tokens, num_beams=3, num_return_sequences=3, **{**options, "max_new_tokens": 1}
    ).sequences
    first = np.argsort(-np.asarray(differential(tokens, mask, generated[:, :1]).logits[:, -1]))[
        :, :3
    ]
    assert np.asarray(beams)[:, 1].reshape(2, 3).tolist() == first.tolist()


def test_weights_of_beams_are_apart(differential):
    tokens = ids(1, 5)

    def step():
        encoded = differential.encode(tokens)
        cache = differential.init_cache(2, 4, encoded, params=differential.params)
        decoded, mask, positions = ids(2, 1, 3), np.ones((2, 4)), np.zeros((2, 1), np.int32)
        return differential.decode(
            decoded, encoded, None, mask, positions, cache, output_attentions=True
        )

    assert jax.eval_shape(step).cross_attentions[0].shape == (2, 2, 1, 5)


# -- untied heads ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_head_bias_is_trained_only_if_untied():
    for tied in (True, False):
        model = FlaxWMTTransformerForConditionalGeneration(
            wmt_transformer_config(**SHALLOW, logits_via_embedding=tied)
        )

        def loss(params, model=model):
            return model(ids(), params=params).logits.sum()

        gradient = case.jit(jax.grad(loss))(model.params)["final_logits_bias"]
        assert bool(np.any(gradient)) is not tied


@pytest.mark.slow
def test_position_tables_follow_the_config():
    def tables(**changes):
        config = wmt_transformer_config(**SHALLOW, **changes)
        blank = FlaxWMTTransformerForConditionalGeneration(config, _do_init=False)
        table_names = {"shared", "embed_tokens", "embed_positions", "lm_head"}
        return {".".join(path[:-1]) for path in blank.required_params if table_names & set(path)}

    assert tables() == {"model.shared"}
    apart = {"model.encoder.embed_tokens", "model.decoder.embed_tokens"}
    assert tables(share_embeddings=False) == apart
    assert tables(logits_via_embedding=False) == {"model.shared", "lm_head"}
    position_tables = {"model.encoder.embed_positions", "model.decoder.embed_positions"}
    assert tables(positions="learned") == {"model.shared", *position_tables}

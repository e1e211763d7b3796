"""The FP8 encoder: its configuration, the battery, its options, and the flattened head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.checkpoints.config import apply_overrides
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.nn.sharding import Layout, make_mesh
from hfseq.testing import check_architecture, checks
from hfseq_plugins.fp8_encoder.configuration import Fp8EncoderConfig
from hfseq_plugins.fp8_encoder.modeling import (
    FlaxFp8EncoderForMaskedLM,
    FlaxFp8EncoderForSequenceClassification,
    FlaxFp8EncoderModel,
)
from hfseq_plugins.fp8_encoder.sharding import RULES
from tests.support.models import close, fp8_encoder_config, ids

SHALLOW = {"num_hidden_layers": 1, "initializer_range": 0.2}
FLAT = {"head": "te_flatten", "flatten_length": 16}
# The options of the reference with small sizes.
TE = {
    **FLAT,
    "hidden_act": "gelu_pytorch_tanh",
    "positions": "none",
    "type_vocab_size": 0,
    "use_bias": False,
    "final_norm": False,
    "embedding_dropout_prob": 0.0,
    "kernel_init": "lecun_normal",
    "num_hidden_layers": 1,
}


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "heads", "inner", "layers"),
    [
        ("tiny", 128, 4, 512, 2),
        ("base", 768, 12, 3072, 12),
        ("large", 1024, 16, 4096, 24),
        ("te", 256, 8, 1024, 1),
    ],
)
def test_presets(name, width, heads, inner, layers):
    config = Fp8EncoderConfig.preset(name, vocab_size=99)
    assert (config.hidden_size, config.num_attention_heads) == (width, heads)
    assert (config.intermediate_size, config.num_hidden_layers) == (inner, layers)
    assert config.vocab_size == 99 and config.layer_norm_eps == 1e-6


def test_preset_of_the_reference_has_its_shape():
    config = Fp8EncoderConfig.preset("te", vocab_size=99)
    blank = FlaxFp8EncoderForSequenceClassification(config, _do_init=False)
    shapes = {
        trees.join(path): leaf.shape
        for path, leaf in trees.flatten(blank.params_shape_tree).items()
    }
    layer = "bert/encoder/layer/0"
    norms = {
        f"{layer}/{n}/{leaf}": (256,) for n in ("attention/ln", "ln") for leaf in ("scale", "bias")
    }
    square = [f"attention/self/{n}" for n in ("query", "key", "value")] + ["attention/output/dense"]
    assert shapes == {
        "bert/embeddings/word_embeddings/embedding": (99, 256),
        **norms,
        **{f"{layer}/{name}/kernel": (256, 256) for name in square},
        f"{layer}/intermediate/dense/kernel": (256, 1024),
        f"{layer}/output/dense/kernel": (1024, 256),
        "classifier/flatten/kernel": (32 * 256, 256),
        "classifier/flatten/bias": (256,),
        "classifier/dense/kernel": (256, 256),
        "classifier/dense/bias": (256,),
        "classifier/out_proj/kernel": (256, 2),
        "classifier/out_proj/bias": (2,),
    }
    longer = Fp8EncoderConfig.preset("te", vocab_size=99)
    apply_overrides(longer, {"flatten_length": 64, "hidden_act": "geglu"})
    assert longer.gated_mlp and longer.hidden_act == "gelu_pytorch_tanh"
    assert longer.flatten_length == 64 and longer.head == "te_flatten"


@pytest.mark.slow
def test_reference_initialisation_is_scaled_by_fan_in():
    config = Fp8EncoderConfig.preset("te", vocab_size=500)
    params = FlaxFp8EncoderModel(config).params
    layer = params["encoder"]["layer"]["0"]
    assert abs(float(params["embeddings"]["word_embeddings"]["embedding"].std()) * 16 - 1) < 0.02
    assert abs(float(layer["output"]["dense"]["kernel"].std()) * 32 - 1) < 0.02
    stock = FlaxFp8EncoderModel(fp8_encoder_config(initializer_range=0.3)).params
    kernel = stock["encoder"]["layer"]["0"]["output"]["dense"]["kernel"]
    assert abs(float(kernel.std()) - 0.3) < 0.03


def test_all_configuration_problems_are_reported_together():
    with pytest.raises(UsageError) as error:
        Fp8EncoderConfig(
            positions="sinusoidal",
            head="flat",
            hidden_dropout_prob=1.0,
            hidden_size=0,
            type_vocab_size=-1,
        )
    for part in (
        "positions='sinusoidal' is unknown",
        "head='flat' is unknown",
        "hidden_size=0 has to be",
        "hidden_dropout_prob=1.0 has to be in [0, 1)",
        "type_vocab_size=-1 has to be 0",
    ):
        assert part in str(error.value)
    with pytest.raises(UsageError, match="hidden_size=30 is not a multiple of .*heads=12"):
        Fp8EncoderConfig(hidden_size=30)
    with pytest.raises(UsageError, match="head='te_flatten' needs flatten_length"):
        Fp8EncoderConfig(head="te_flatten")
    with pytest.raises(UsageError, match="flatten_length=64 exceeds max_position_embeddings=40"):
        fp8_encoder_config(head="te_flatten", flatten_length=64)


def test_options_that_were_set_later_are_checked_by_the_model():
    config = fp8_encoder_config()
    config.head = "te_flatten"
    with pytest.raises(UsageError, match="needs flatten_length"):
        FlaxFp8EncoderModel(config, _do_init=False)


# -- battery ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_battery(head):
    check_architecture("fp8_encoder", fp8_encoder_config(num_labels=3), heads=[head])


VARIANTS = {
    "te": (TE, "ForSequenceClassification"),
    "geglu": ({**TE, "hidden_act": "geglu", "positions": "learned"}, "ForSequenceClassification"),
    "swiglu, normed": ({"hidden_act": "swiglu"}, "ForMaskedLM"),
    "nothing but words": (
        {"positions": "none", "type_vocab_size": 0, "use_bias": False},
        "ForMaskedLM",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_battery_of_variants(name):
    changes, head = VARIANTS[name]
    # A new model of PyTorch's class has random position embeddings, which loading refuses.
    skip = {"torch_files": "BERT has positions"} if changes.get("positions") == "none" else None
    check_architecture("fp8_encoder", fp8_encoder_config(**changes), heads=[head], skip=skip)


def test_short_battery_of_the_flattened_head():
    selected_checks = {"gradients", "padding"}
    skipped_checks = {check.__name__ for check in checks.CHECKS} - selected_checks
    check_architecture(
        "fp8_encoder",
        fp8_encoder_config(**{**TE, "hidden_act": "geglu"}),
        heads=["ForSequenceClassification"],
        torch=False,
        skip=dict.fromkeys(skipped_checks, "in the slow battery"),
    )


# -- the flattened head ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flat():
    return FlaxFp8EncoderForSequenceClassification(fp8_encoder_config(**TE, num_labels=3), seed=2)


def test_flattened_head_is_three_products_of_all_positions(flat):
    params, head = flat.params, flat.params["classifier"]
    encoder = FlaxFp8EncoderModel(flat.config, _do_init=False)
    with_pooler = {**params["bert"], "pooler": pooler()}
    x = jax.jit(encoder)(ids(2, 16), params=with_pooler).last_hidden_state
    x = x.reshape(2, -1)
    for name in ("flatten", "dense", "out_proj"):
        x = x @ head[name]["kernel"] + head[name]["bias"]
    assert close(jax.jit(flat)(ids(2, 16)).logits, x)


def pooler():
    return {"dense": {"kernel": jnp.zeros((32, 32)), "bias": jnp.zeros(32)}}


@pytest.mark.slow
def test_padding_counts_as_zeros_in_the_flattened_head(flat):
    short = ids(2, 9)
    mask = np.array([[1] * 9, [1] * 5 + [0] * 4])
    expected = flat(short, mask).logits
    for padding in (0, 7):  # for any token id
        long = np.pad(short, ((0, 0), (0, 7)), constant_values=padding)
        assert close(flat(long, np.pad(mask, ((0, 0), (0, 7)))).logits, expected)
    assert close(flat(short[1:, :5]).logits, expected[1:])
    segments = mask.astype(np.int32)
    assert close(flat(short, segment_ids=segments).logits, expected)
    by_query = np.repeat(mask[:, None], 9, 1)
    assert close(flat(short, by_query).logits, expected)


def test_rows_longer_than_the_flattened_head_are_refused(flat):
    assert flat.max_length() == 16
    with pytest.raises(
        UsageError, match=r"17 tokens per sequence.*at most 16 \(flatten_length=16\)"
    ):
        flat(ids(1, 17))
    assert FlaxFp8EncoderModel(flat.config, _do_init=False).max_length() is None
    with_table = FlaxFp8EncoderForMaskedLM(fp8_encoder_config(**FLAT), _do_init=False)
    assert with_table.max_length() == 40


def test_flattened_head_is_split_by_columns_then_rows(flat):
    layout = Layout(make_mesh("data=4,tensor=2"), RULES, flat.config.vocab_size)
    shapes = {path: leaf.shape for path, leaf in trees.flatten(flat.params).items()}
    split = {trees.join(path): tuple(spec) for path, spec in layout.specs(shapes).items()}
    assert split["classifier/flatten/kernel"] == ("fsdp", "tensor")
    assert split["classifier/flatten/bias"] == (("tensor", "fsdp"),)
    assert split["classifier/dense/kernel"] == ("tensor", "fsdp")
    gated = FlaxFp8EncoderModel(fp8_encoder_config(hidden_act="geglu"), _do_init=False)
    shapes = {path: leaf.shape for path, leaf in trees.flatten(gated.params_shape_tree).items()}
    split = {trees.join(path): tuple(spec) for path, spec in layout.specs(shapes).items()}
    for name in ("dense", "up"):
        assert split[f"encoder/layer/0/intermediate/{name}/kernel"] == ("fsdp", "tensor")


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gated_block_multiplies_two_projections():
    model = FlaxFp8EncoderModel(fp8_encoder_config(**SHALLOW, hidden_act="geglu"))
    layer = model.params["encoder"]["layer"]["0"]
    layer["intermediate"]["up"] = jax.tree.map(jnp.zeros_like, layer["intermediate"]["up"])
    dropped = dict(
        layer["output"]["dense"], kernel=jnp.zeros_like(layer["output"]["dense"]["kernel"])
    )
    gated = model(ids()).last_hidden_state  # 0 times any number is finite here
    layer["output"]["dense"] = dropped
    assert close(gated, model(ids()).last_hidden_state, 1e-6)


def test_without_positions_the_encoder_does_not_know_the_order():
    model = FlaxFp8EncoderModel(fp8_encoder_config(**SHALLOW, positions="none"))
    call = jax.jit(lambda tokens: model(tokens).last_hidden_state)
    assert close(call(ids()[:, ::-1]), call(ids())[:, ::-1])
    assert jax.eval_shape(call, ids(1, 90)).shape == (1, 90, 32)
    learned = FlaxFp8EncoderModel(fp8_encoder_config(**SHALLOW), _do_init=False)
    with pytest.raises(UsageError, match="41 tokens per sequence.*at most 40"):
        learned(ids(1, 41), params={})


def test_token_types_are_ignored_without_a_table():
    types = np.ones((2, 12), np.int32)
    without = FlaxFp8EncoderModel(fp8_encoder_config(**SHALLOW, type_vocab_size=0))
    assert not without.accepts("token_type_ids") and without.accepts("attention_mask")
    assert close(without(ids(), token_type_ids=types)[0], without(ids())[0], 0)
    model = FlaxFp8EncoderModel(fp8_encoder_config(**SHALLOW))
    assert model.accepts("token_type_ids")
    assert not close(model(ids(), token_type_ids=types)[0], model(ids())[0], 1e-3)


def test_only_layers_lack_biases():
    def biases(**changes):
        model = FlaxFp8EncoderForMaskedLM(fp8_encoder_config(**changes), _do_init=False)
        return {trees.join(path) for path in model.required_params if path[-1] == "bias"}

    removed = biases() - biases(use_bias=False)
    ends = ("query", "key", "value", "attention/output/dense", "intermediate/dense", "output/dense")
    assert len(removed) == 12
    assert all(name.removesuffix("/bias").endswith(ends) for name in removed)


@pytest.mark.slow
def test_dropout_of_embeddings_can_be_left_out():
    quiet = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.0}

    def first(**changes):
        model = FlaxFp8EncoderModel(fp8_encoder_config(**quiet, **changes))
        options = {"train": True, "dropout_rng": jax.random.key(0), "output_hidden_states": True}
        return model(ids(), **options).hidden_states[0], model(ids(), output_hidden_states=True)[2][
            0
        ]

    assert not close(*first(), 1e-3)
    assert close(*first(embedding_dropout_prob=0.0), 0)

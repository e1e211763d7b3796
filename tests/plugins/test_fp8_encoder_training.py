"""The FP8 encoder in FP8: quantized layers, state, sidecar files, masked-LM training."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import FlaxAutoModelForMaskedLM, FlaxAutoModelForSequenceClassification
from hfseq.errors import WeightsError
from hfseq.nn import trees
from hfseq_plugins.fp8_encoder.modeling import (
    FlaxFp8EncoderForMaskedLM,
    FlaxFp8EncoderForSequenceClassification,
    FlaxFp8EncoderModel,
)
from tests.plugins.test_fp8_encoder import TE
from tests.support.models import close, fp8_encoder_config, ids, trees_equal
from tests.training.conftest import corpus, flags, train  # noqa: F401 - fixtures

SIDECAR = "fp8_params.safetensors"
RECIPES = ("fp8_delayed", "fp8_current")
# One state for query, key and value, stored at the query, and three more per layer.
SITES = ("attention/self/query", "attention/output/dense", "intermediate/dense", "output/dense")
STATE = [
    f"{name}_{part}"
    for name in ("input", "kernel", "output_grad")
    for part in ("amax_history", "scale")
]
FLAT = {"head": "te_flatten", "flatten_length": 16, "final_norm": False, "hidden_act": "geglu"}


def fp8(cls=FlaxFp8EncoderForMaskedLM, recipe="fp8_delayed", **changes):
    return cls(fp8_encoder_config(num_hidden_layers=2, **changes), precision=recipe)


def fp8_layers(model):
    """Returns the Linear layers with FP8 state, and the entries of their state."""
    modules_by_product: dict[str, list[str]] = {}
    for path in trees.flatten(model.extra_shape_tree.get("fp8_params", {})):
        modules_by_product.setdefault("/".join(path[: path.index("dot_general")]), []).append(
            path[-1]
        )
    return {name: sorted(leaves) for name, leaves in modules_by_product.items()}


def filled_state(model):
    """Returns the state with values as after training steps."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(random.uniform(0.5, 2.0, x.shape), x.dtype), model.extra
    )


# -- quantized layers ------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_product_of_the_layers_has_its_state():
    prefix = "bert/encoder/layer"
    expected = {f"{prefix}/{i}/{site}": sorted(STATE) for i in range(2) for site in SITES}
    assert fp8_layers(fp8()) == expected
    assert fp8_layers(fp8(recipe="fp8_current")) == {}


def test_gated_blocks_and_the_large_products_of_the_flattened_head_have_theirs():
    actual = set(fp8_layers(fp8(FlaxFp8EncoderForSequenceClassification, **FLAT)))
    assert {"classifier/flatten", "classifier/dense"} <= actual
    assert "bert/encoder/layer/0/intermediate/up" in actual
    assert not {"classifier/out_proj", "bert/embeddings/word_embeddings"} & actual


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["pooled", "te"])
def test_forward_and_backward_stay_close_to_float32(recipe, name):
    changes = {"initializer_range": 0.1} if name == "pooled" else TE
    config = fp8_encoder_config(**{**changes, "num_hidden_layers": 1}, num_labels=3)
    model = FlaxFp8EncoderForSequenceClassification(config, precision=recipe, seed=1)
    exact = FlaxFp8EncoderForSequenceClassification(config, seed=1)
    mask = np.array([[1] * 12, [1] * 7 + [0] * 5])

    def loss(run):
        def value(params):
            logits = run(ids(), mask, params=params).logits.astype(jnp.float32)
            return jnp.sum(logits * np.array([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]]))

        return jax.jit(jax.value_and_grad(value))

    ours, theirs = (loss(m)(exact.params) for m in (model, exact))
    assert abs(ours[0] - theirs[0]) < 0.1 * max(1, abs(theirs[0]))
    for a, b in zip(*(jax.tree.leaves(gradient) for _, gradient in (ours, theirs)), strict=True):
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= 0.4 * np.linalg.norm(b) + 1e-3
    norms = [
        np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(g))) for _, g in (ours, theirs)
    ]
    assert abs(norms[0] / norms[1] - 1) < 0.1


# -- sidecars --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fp8_state_is_saved_and_restored(tmp_path):
    model = fp8(FlaxFp8EncoderForSequenceClassification)
    model.extra = filled_state(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / SIDECAR).is_file()
    auto = FlaxAutoModelForSequenceClassification
    loaded = auto.from_pretrained(tmp_path, precision="fp8_delayed")
    assert trees_equal(loaded.params, model.params) and trees_equal(loaded.extra, model.extra)
    scanned = auto.from_pretrained(tmp_path, precision="fp8_delayed", scan_layers=True)
    stacked_state = scanned.extra["fp8_params"]["bert"]["encoder"]["layer"]["output"]["dense"][
        "dot_general"
    ]
    listed = model.extra["fp8_params"]["bert"]["encoder"]["layer"]
    scales = [listed[i]["output"]["dense"]["dot_general"]["input_scale"] for i in "01"]
    assert np.array_equal(stacked_state["input_scale"], np.stack(scales))
    assert auto.from_pretrained(tmp_path).extra == {}


def test_weights_without_a_sidecar_begin_with_fresh_scales(tmp_path):
    model = fp8()
    model.extra = filled_state(model)
    model.save_pretrained(tmp_path)
    (tmp_path / SIDECAR).unlink()
    loaded = FlaxAutoModelForMaskedLM.from_pretrained(tmp_path, precision="fp8_delayed")
    assert trees_equal(loaded.params, model.params)
    assert trees_equal(loaded.extra, fp8().extra)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": 64}, r"measured on a kernel \[32, 64\], .*\[32, 48\]"),
        pytest.param(
            {"num_hidden_layers": 3},
            r"layer\.2\S*: this model has no such FP8 layer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sidecar_of_another_model_is_refused(changes, problem, tmp_path):
    fp8().save_pretrained(tmp_path)
    other = FlaxFp8EncoderForMaskedLM(fp8_encoder_config(**changes), precision="fp8_delayed")
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / SIDECAR).rename(tmp_path / SIDECAR)
    with pytest.raises(WeightsError, match=f"(?s){SIDECAR} belongs to another model.*{problem}"):
        FlaxAutoModelForMaskedLM.from_pretrained(tmp_path, precision="fp8_delayed")


def test_pytorch_loads_the_directory_with_the_sidecar_in_it(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    model = fp8(FlaxFp8EncoderForSequenceClassification, num_labels=3, initializer_range=0.2)
    model.extra = filled_state(model)
    model.save_pretrained(tmp_path)
    theirs, loading_info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids()).long()).logits.numpy()
    exact = FlaxAutoModelForSequenceClassification.from_pretrained(tmp_path, precision="float32")
    assert close(exact(ids()).logits, expected)
    again = tmp_path / "again"
    theirs.save_pretrained(again)  # PyTorch saves no sidecar file
    fresh = FlaxAutoModelForSequenceClassification.from_pretrained(again, precision="fp8_delayed")
    assert trees_equal(fresh.params, jax.tree.map(np.asarray, model.params))
    assert type(fresh) is FlaxFp8EncoderForSequenceClassification


@pytest.mark.slow
def test_base_model_reads_the_scales_of_a_model_with_a_head(tmp_path):
    model = fp8()
    model.extra = filled_state(model)
    model.save_pretrained(tmp_path)
    encoder = FlaxFp8EncoderModel.from_pretrained(tmp_path, precision="fp8_delayed")
    assert trees_equal(encoder.extra["fp8_params"], model.extra["fp8_params"]["bert"])


# -- training --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        ("fp8_encoder", "fp8_delayed"),
        ("fp8_encoder", "float32"),
        ("megatron-bert", "fp8_delayed"),
    ],
)
def test_masked_lm_training_learns_and_saves_the_stock_class(model_type, recipe, train):  # noqa: F811
    loop = train(model_type=model_type, precision=recipe, devices=2, max_steps=8)
    records = map(json.loads, (loop.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["train_loss"] for record in records if "train_loss" in record]
    assert len(losses) == 8 and np.isfinite(losses).all() and losses[-1] < losses[0]
    stored = json.loads((loop.folder / "config.json").read_text())
    assert stored["model_type"] == "megatron-bert"
    assert stored["architectures"] == ["MegatronBertForMaskedLM"]
    assert (loop.folder / SIDECAR).is_file() is (recipe == "fp8_delayed")
    loaded = FlaxAutoModelForMaskedLM.from_pretrained(loop.folder, precision=recipe)
    variant = "Fp8Encoder" if model_type == "fp8_encoder" else "MegatronBert"
    assert re.fullmatch(f"Flax{variant}ForMaskedLM", type(loaded).__name__)
    if recipe == "fp8_delayed":
        layers = loaded.extra["fp8_params"]["bert"]["encoder"]["layer"]
        state = layers["1"]["output"]["dense"]["dot_general"]
        # The newest entry of each history is that of the last step.
        assert all(float(state[f"{n}_amax_history"][0]) > 0 for n in ("input", "output_grad"))
        assert float(state["kernel_scale"][0]) != 1.0


@pytest.mark.slow
def test_another_head_has_no_use_for_the_state_of_the_flattened_one(tmp_path):
    """Loads the scales of the base model and ignores those of a missing head, like weights."""
    model = fp8(FlaxFp8EncoderForSequenceClassification, **FLAT)
    model.extra = filled_state(model)
    model.save_pretrained(tmp_path)
    for cls in (FlaxFp8EncoderModel, FlaxFp8EncoderForMaskedLM):
        other = cls.from_pretrained(tmp_path, precision="fp8_delayed")
        state_names = {
            p[p.index("encoder") :]: x for p, x in trees.flatten(other.extra["fp8_params"]).items()
        }
        for path, leaf in trees.flatten(model.extra["fp8_params"]).items():
            if "encoder" in path:
                assert np.array_equal(state_names.pop(path[path.index("encoder") :]), leaf)
        assert not state_names

"""Training in FP8: the state on meshes and with accumulation, skipped steps, exact resumption."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from hfseq import FlaxAutoModelForMaskedLM
from hfseq.errors import UsageError, WeightsError
from hfseq.nn import trees
from tests.support.models import trees_equal
from tests.training.conftest import TWO_LAYERS, losses, stop_at

RECIPE = {
    "precision": "fp8_delayed",
    "fp8_amax_history_length": 4,
    "do_train": True,
    "config_overrides": TWO_LAYERS,
}


def scales(loop):
    return {path: np.asarray(x) for path, x in trees.flatten(loop.state.extra).items()}


@pytest.fixture(scope="module")
def run_cache():
    return {}


def alone(train, run_cache):
    """Three steps on one device."""
    if not run_cache:
        loop = train("one", devices=1, max_steps=3, dtype="float32", **RECIPE)
        run_cache |= {"scales": scales(loop), "losses": losses(loop.folder)}
    return run_cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (4, {"mesh": "data=2,tensor=2"}),
        (8, {"mesh": "data=8"}),
        (8, {"mesh": "data=2,fsdp=2,sequence=2"}),
        (1, {"gradient_accumulation_steps": 4}),
        (1, {"scan_layers": True}),
        (1, {"gradient_checkpointing": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_state_is_that_of_one_device(train, run_cache, devices, options):
    reference = alone(train, run_cache)
    loop = train(devices=devices, max_steps=3, dtype="float32", **RECIPE, **options)
    results, expected = scales(loop), reference["scales"]
    if "scan_layers" in options:
        results = {
            ("fp8_params", *path[1:4], str(n), *path[4:]): leaf
            for path, leaves in results.items()
            for n, leaf in enumerate(leaves)
        }
    assert results.keys() == expected.keys()
    apart = {
        path: np.abs(results[path] - leaf).max() / np.abs(leaf).max()
        for path, leaf in expected.items()
    }
    # Sums in another order sometimes move a value across a rounding boundary, which is an eighth of
    # it in e5m2, and the following maximum by a few per cent. An average over devices or
    # micro-batches instead of the maximum would differ everywhere.
    assert np.median(list(apart.values())) < 1e-4
    assert max(apart.values()) < 0.1, max(apart, key=apart.get)
    for path, difference in apart.items():
        if path[-1].startswith("kernel") or "0" in path and "query" in path and "input" in path[-1]:
            assert difference < 1e-3, path
    for step, loss in reference["losses"].items():
        assert abs(losses(loop.folder)[step] - loss) < 1e-3


@pytest.mark.slow
def test_the_first_step_is_calibrated(train, run_cache):
    """After three steps the history contains the calibration and three more measurements."""
    histories = {
        p: x for p, x in alone(train, run_cache)["scales"].items() if p[-1].endswith("history")
    }
    assert len(histories) == 3 * 8
    for path, leaf in histories.items():
        assert leaf.shape == (4,) and (leaf > 0).all(), path


@pytest.mark.slow
def test_training_follows_bfloat16(train):
    options = {"devices": 1, "max_steps": 12, "do_train": True, "config_overrides": TWO_LAYERS}
    curves = {
        name: losses(train(name, precision=name, **options).folder)
        for name in ("bfloat16", "fp8_delayed", "fp8_current")
    }
    plain = curves.pop("bfloat16")
    assert plain[12] < plain[1] - 0.3
    for name, curve in curves.items():
        assert max(abs(curve[step] - loss) for step, loss in plain.items()) < 0.03, name


@pytest.mark.slow
def test_resume_is_bit_exact(train, tmp_path):
    options = {"devices": 1, "save_steps": 3, "gradient_accumulation_steps": 2, **RECIPE}
    uninterrupted = train("whole", **options)
    with pytest.raises(SystemExit):
        train("stopped", callbacks=[stop_at(4)], **options)
    again = train("stopped", **options)
    assert trees_equal(again.state, uninterrupted.state)
    for name in ("model.safetensors", "fp8_params.safetensors"):
        first, other = (load_file(tmp_path / run / name) for run in ("whole", "stopped"))
        assert first.keys() == other.keys()
        assert all(np.array_equal(first[key], other[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"precision": "bfloat16"}, {"precision": "fp8_delayed"}],
    ids=lambda c: c["precision"],
)
def test_a_run_cannot_change_its_collections_on_the_way(train, change):
    """Another recipe or history length is rejected, with a solution."""
    train(devices=1, max_steps=2, **RECIPE)
    with pytest.raises(UsageError, match=r"--precision fp8_delayed.*--model_name_or_path"):
        train(devices=1, max_steps=4, do_train=True, **change)


@pytest.mark.slow
def test_skipped_step_keeps_the_state(train):
    """A step with a non-finite loss does not change the scales."""
    old_state = {}

    def spoil(info):
        if info.progress.step != 2:
            return None
        old_state.update(jax.device_get(info.state.extra))
        params = trees.flatten(info.state.params)
        path = next(p for p in params if p[-1] == "embedding")
        params[path] = params[path].at[:].set(np.nan)
        return dataclasses.replace(info.state, params=trees.unflatten(params))

    loop = train(callbacks=[spoil], devices=1, max_steps=3, on_non_finite="skip", **RECIPE)
    assert trees_equal(jax.device_get(loop.state.extra), old_state)


@pytest.mark.slow
def test_scales_have_no_moments_or_decay(train):
    loop = train(devices=1, max_steps=2, weight_decay=0.1, max_grad_norm=1.0, **RECIPE)
    names = {
        str(key) for path, _ in jax.tree.flatten_with_path(loop.state.opt_state)[0] for key in path
    }
    assert not any("amax" in name or "dot_general" in name for name in names)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return {}


@pytest.fixture
def saved(train, trained, tmp_path_factory):
    """The directory of a finished FP8 run."""
    if not trained:
        loop = train("saved", devices=1, max_steps=2, **RECIPE)
        trained |= {"folder": loop.folder, "scales": scales(loop)}
    return trained["folder"]


def load(folder, **options):
    from hfseq.nn.precision import choose_precision

    recipe = choose_precision("fp8_delayed", amax_history_length=options.pop("length", 4))
    return FlaxAutoModelForMaskedLM.from_pretrained(folder, precision=recipe, **options)


@pytest.mark.slow
def test_the_sidecar_gives_every_scale_back(saved, trained):
    model = load(saved)
    loaded_extra = {
        ("fp8_params", *p): np.asarray(x)
        for p, x in trees.flatten(model.extra["fp8_params"]).items()
    }
    assert loaded_extra.keys() == trained["scales"].keys()
    assert all(np.array_equal(loaded_extra[path], leaf) for path, leaf in trained["scales"].items())
    with safe_open(saved / "fp8_params.safetensors", "numpy") as opened:
        assert opened.metadata()["recipe"] == "fp8_delayed"


def test_scanned_layers_read_the_same_sidecar_and_write_it_again(saved, tmp_path):
    load(saved, scan_layers=True).save_pretrained(tmp_path)
    first, other = (load_file(f / "fp8_params.safetensors") for f in (saved, tmp_path))
    assert first.keys() == other.keys()
    assert all(np.array_equal(first[name], other[name]) for name in first)


def test_weights_are_those_of_any_recipe(saved, tmp_path):
    """A model without FP8 loads the weights, ignores the sidecar file, and does not save one."""
    plain = FlaxAutoModelForMaskedLM.from_pretrained(saved)
    assert plain.extra == {}
    load(saved).save_pretrained(tmp_path)
    assert (tmp_path / "fp8_params.safetensors").exists()
    plain.save_pretrained(tmp_path)
    assert not (tmp_path / "fp8_params.safetensors").exists()


@pytest.mark.slow
def test_without_the_sidecar_scales_begin_fresh(saved, tmp_path):
    FlaxAutoModelForMaskedLM.from_pretrained(saved).save_pretrained(tmp_path)
    model = load(tmp_path)
    fresh = trees.flatten(model.extra["fp8_params"])
    assert all((np.asarray(x) == 0).all() for p, x in fresh.items() if p[-1].endswith("history"))
    ids = np.arange(8)[None] + 5
    plain = FlaxAutoModelForMaskedLM.from_pretrained(saved)(ids).logits
    assert np.abs(np.asarray(model(ids).logits, np.float32) - plain).max() < 0.1


@pytest.mark.parametrize("length", [2, 6])
def test_a_history_of_another_length_is_cut_or_filled_up(saved, length):
    stored = load_file(saved / "fp8_params.safetensors")
    name = next(
        name for name in stored if name.endswith("mediate.dense.dot_general.input_amax_history")
    )
    leaves = {
        ".".join(p): x
        for p, x in trees.flatten(load(saved, length=length).extra["fp8_params"]).items()
    }
    expected = np.concatenate([stored[name], np.zeros(8, np.float32)])[:length]
    assert np.array_equal(leaves[name], expected)


def other_layers(tensors, metadata):
    return {name.replace("layer.1", "layer.7"): x for name, x in tensors.items()}, metadata


def other_width(tensors, metadata):
    return tensors, metadata | {"kernels": metadata["kernels"].replace("[32, 64]", "[128, 512]")}


@pytest.mark.parametrize(
    ("change", "message"),
    [(other_layers, "no such FP8 layer"), (other_width, r"measured on a kernel \[128, 512\]")],
)
def test_a_sidecar_of_another_model_is_refused(saved, tmp_path, change, message):
    load(saved).save_pretrained(tmp_path)
    path = tmp_path / "fp8_params.safetensors"
    with safe_open(path, "numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    save_file(*change(tensors, metadata)[:1], path, metadata=change(tensors, metadata)[1])
    with pytest.raises(WeightsError, match=message) as raised:
        load(tmp_path)
    assert "delete the file" in str(raised.value)

"""ResNet and RegNet: the battery, batch statistics, their Transformers 4 layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import PreTrainedConfig

import hfseq
from hfseq.errors import UsageError
from hfseq.nn.trees import flatten, unflatten
from hfseq.testing import check_architecture
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.tiers import CHECKS, first

NAMES = ["resnet", "regnet"]
OPTIONS = [
    ("resnet", {"layer_type": "basic", "hidden_act": "gelu"}),
    ("resnet", {"downsample_in_bottleneck": True, "downsample_in_first_stage": True}),
    ("regnet", {"layer_type": "x", "num_channels": 1}),
    ("regnet", {"downsample_in_first_stage": False, "hidden_act": "gelu", "embedding_size": 24}),
]


def config_of(name: str, **changes: object) -> PreTrainedConfig:
    """Returns a tiny configuration of a family."""
    return getattr(models, f"{name}_config")(**changes)


@pytest.mark.parametrize("name", first(NAMES, "resnet"))
def test_battery(name):
    config = config_of(name, hidden_sizes=[8], depths=[1])
    check_architecture(name, config, heads=["ForImageClassification"], checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_battery_of_all(name):
    check_architecture(name, config_of(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), OPTIONS, ids=str)
def test_battery_of_an_option(name, changes):
    check_architecture(name, config_of(name, **changes), heads=["ForImageClassification"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_move_parameters_and_statistics_as_in_pytorch(name, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    stem = {"resnet": "ResNet", "regnet": "RegNet"}[name] + "ForImageClassification"
    model = getattr(hfseq, f"Flax{stem}")(config_of(name))
    model.save_pretrained(tmp_path)
    theirs = getattr(transformers, stem).from_pretrained(tmp_path).train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    pixels, labels = models.images(4, (3, 16, 16)), np.array([0, 1, 2, 1])
    variables = model.params

    def loss(params, statistics):
        output, updated = model(pixels, {"params": params, **statistics}, train=True)
        picked = jax.nn.log_softmax(output.logits)[jnp.arange(4), labels]
        return -picked.mean(), updated

    for _ in range(3):
        params = variables.pop("params")
        gradient, variables = jax.jit(jax.grad(loss, has_aux=True))(params, variables)
        variables["params"] = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        optimizer.zero_grad()
        theirs(torch.from_numpy(pixels), labels=torch.from_numpy(labels)).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "after", params=variables)
    again = getattr(transformers, stem).from_pretrained(tmp_path / "after").state_dict()
    for key, value in theirs.state_dict().items():
        if "num_batches_tracked" not in key:
            assert close(again[key].numpy(), value.numpy(), 1e-4), key


def test_params_hold_the_statistics_as_in_version_4(tmp_path, caplog):
    config = config_of("resnet", hidden_sizes=[8], depths=[1])
    model = hfseq.FlaxResNetForImageClassification(config)
    pixels = models.images()
    assert model.params.keys() == {"params", "batch_stats"}
    assert model.init_weights(jax.random.key(0)).keys() == {"params", "batch_stats"}
    call = jax.jit(lambda params: model(pixels, params=params))
    expected = call(model.params)
    output, changed = jax.jit(lambda params: model(pixels, params=params, train=True))(model.params)
    assert changed.keys() == {"batch_stats"}
    moved = {"params": model.params["params"], **changed}
    logits = call(moved).logits
    assert not close(logits, expected.logits, 1e-4) and not close(output.logits, logits, 1e-4)
    model.params = moved
    assert close(jax.jit(model)(pixels).logits, logits, 0)
    assert expected.logits.shape == (2, 3) and "attentions" not in expected
    for options in ({}, {"safe_serialization": False}):
        model.save_pretrained(tmp_path, **options)
        again, params = type(model).from_pretrained(tmp_path, _do_init=False)
        assert trees_equal(params, model.params)
        assert close(jax.jit(again)(pixels, params=params).logits, logits, 0)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    flat = flatten(moved)
    path, *_ = (path for path in flat if path[-1] == "mean")
    del flat[path]
    model.save_pretrained(tmp_path, params=unflatten(flat))
    assert "/".join(path[1:]) in caplog.text
    again, params = type(model).from_pretrained(tmp_path, _do_init=False)
    assert flatten(params).keys() == model.required_params
    module = model.module
    variables = module.init(jax.random.key(0), pixels.transpose(0, 2, 3, 1))
    assert variables.keys() == {"params", "batch_stats"}
    rows, updated_params = pixels.transpose(0, 2, 3, 1), moved
    assert close(module.apply(updated_params, rows, True).logits, logits, 0)
    _, stats = module.apply(updated_params, rows, deterministic=False, mutable=["batch_stats"])
    assert stats.keys() == {"batch_stats"}


@pytest.mark.slow
def test_v4_basic_blocks_load_by_either_name(tmp_path):
    from flax import serialization

    model = hfseq.FlaxResNetModel(config_of("resnet", layer_type="basic"))
    model.save_pretrained(tmp_path, safe_serialization=False)
    file = tmp_path / "flax_model.msgpack"
    tree = serialization.msgpack_restore(file.read_bytes())
    for part in tree.values():
        for stage in part["encoder"]["stages"].values():
            for block in stage["layers"].values():
                block["layer"] = {f"layer_{key}": value for key, value in block["layer"].items()}
    file.write_bytes(serialization.msgpack_serialize(tree))
    assert trees_equal(hfseq.FlaxResNetModel.from_pretrained(tmp_path).params, model.params)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2", "fsdp=2"])
def test_batch_statistics_do_not_depend_on_the_mesh(mesh):
    from jax.sharding import NamedSharding, PartitionSpec

    from hfseq.nn.sharding import make_mesh

    model, pixels = hfseq.FlaxRegNetModel(config_of("regnet")), models.images(4, (3, 16, 16))
    step = jax.jit(lambda params, pixels: model(pixels, params, train=True))
    right, moved = step(model.params, pixels)
    devices = make_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    rows = NamedSharding(devices, PartitionSpec(("data", "fsdp")))
    outputs, stats = step(
        jax.device_put(model.params, NamedSharding(devices, PartitionSpec())),
        jax.device_put(pixels, rows),
    )
    assert close(outputs.last_hidden_state, right.last_hidden_state, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), stats, moved)


@pytest.mark.parametrize("shape", [(2, 16, 16, 3), (2, 1, 16, 16)])
def test_images_with_wrong_channels_are_rejected(shape):
    model = hfseq.FlaxResNetModel(config_of("resnet"), _do_init=False)
    with pytest.raises(UsageError, match=r"FlaxResNetModel .*\(batch, 3, height, width\)"):
        model(np.zeros(shape, np.float32), params={})

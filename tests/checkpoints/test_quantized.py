"""Reading of quantized checkpoints."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, Qwen3Config

from hfseq import FlaxAutoModelForCausalLM
from hfseq.checkpoints.config import open_checkpoint
from hfseq.checkpoints.files import tensor_from_array
from hfseq.checkpoints.quantized import dequantize
from hfseq.cli.convert import convert
from hfseq.cli.inspect import inspect_checkpoint
from hfseq.errors import CheckpointError, WeightsError
from tests.support import quantized
from tests.support.models import write_random_model
from tests.support.tiers import first

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 40},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=False)
    return write_random_model(config, tmp_path_factory.mktemp("llama") / "model", "ForCausalLM")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
    return write_random_model(config, tmp_path_factory.mktemp("qwen") / "model", "ForCausalLM")


def read(folder, dtype="float32"):
    config = json.loads((folder / "config.json").read_text())
    return dequantize(open_checkpoint(str(folder), {}).tensors, config, str(folder), dtype)


@pytest.mark.parametrize("scheme", quantized.SCHEMES)
def test_dequantized_weights_equal_the_packed_values(llama, scheme, tmp_path):
    values = quantized.quantize_directory(llama, tmp_path / "quantized", scheme)
    tensors = read(tmp_path / "quantized")
    assert set(tensors) == set(open_checkpoint(str(llama), {}).tensors)
    rng = np.random.default_rng(2)
    for name, expected in values.items():
        weight = tensors[name].read(...)
        assert weight.shape == tensors[name].shape == expected.shape
        assert weight.dtype == np.float32
        np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-9)
        for _ in range(4):  # slices at arbitrary bounds
            bounds = [sorted(rng.integers(0, size + 1, 2)) for size in expected.shape]
            index = tuple(slice(start, stop) for start, stop in bounds)
            np.testing.assert_array_equal(tensors[name].read(index), weight[index])
    rounded = read(tmp_path / "quantized", None)[UP]
    assert rounded.dtype == "bfloat16"
    expected = tensors[UP].read(...).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.read(...), expected)


@pytest.mark.parametrize("pieces", [1, 1000])
def test_weights_are_dequantized_in_pieces(llama, pieces, monkeypatch, tmp_path):
    values = quantized.quantize_directory(llama, tmp_path / "quantized", "gptq")
    monkeypatch.setattr("hfseq.checkpoints.quantized.weights.PIECE", pieces)
    rows = read(tmp_path / "quantized")[UP].read((slice(3, 90),))
    np.testing.assert_allclose(rows, values[UP][3:90], rtol=1e-6, atol=1e-9)


def test_mxfp4_experts():
    rng = np.random.default_rng(0)
    parts, values = quantized.mxfp4_experts((3, 10, 96), rng)
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{prefix}{part}": tensor_from_array(array) for part, array in parts.items()}
    tensors[f"{prefix}_bias"] = tensor_from_array(np.zeros((3, 10), np.float32))
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    result = dequantize(tensors, config, "model")
    assert set(result) == {prefix, f"{prefix}_bias"}
    # The values of MXFP4 are exact in bfloat16.
    np.testing.assert_array_equal(result[prefix].read(...).astype(np.float32), values)
    for index in ((slice(1, 3), slice(33, 70), slice(2, 9)), (slice(0, 0),)):
        np.testing.assert_array_equal(result[prefix].read(index).astype(np.float32), values[index])


def test_fp8_experts_that_are_stacked():
    rng = np.random.default_rng(0)
    experts = [quantized.fp8(rng.standard_normal((50, 70)), rng) for _ in range(2)]
    arrays = {
        "experts.gate_up_proj": np.stack([parts["weight"] for parts, _ in experts]),
        "experts.gate_up_proj_scale_inv": np.stack([p["weight_scale_inv"] for p, _ in experts]),
        "experts.gate_up_proj_activation_scale": np.ones(2, np.float32),
    }
    tensors = {name: tensor_from_array(array) for name, array in arrays.items()}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 40]}}
    result = dequantize(tensors, config, "model", "float32")
    assert set(result) == {"experts.gate_up_proj"}
    values = np.stack([values for _, values in experts])
    np.testing.assert_allclose(result["experts.gate_up_proj"].read(...), values, rtol=1e-6)
    index = (slice(1, 2), slice(47, 49), slice(30, 70))
    part = result["experts.gate_up_proj"].read(index)
    np.testing.assert_allclose(part, values[index], rtol=1e-6)


def logits_of(folder, **options):
    model = FlaxAutoModelForCausalLM.from_pretrained(folder, param_dtype=np.float32, **options)
    return np.asarray(model(np.arange(24).reshape(2, 12)).logits), model


@pytest.mark.parametrize("scheme", first(quantized.SCHEMES, "gptq"))
def test_logits_equal_those_of_the_independent_dequantization(qwen, scheme, tmp_path):
    values = quantized.quantize_directory(qwen, tmp_path / "quantized", scheme)
    reference = tmp_path / "reference"
    reference.mkdir()
    tensors = load_file(qwen / "model.safetensors") | values
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    (reference / "config.json").write_bytes((qwen / "config.json").read_bytes())
    logits, model = logits_of(tmp_path / "quantized")
    expected, _ = logits_of(reference)
    assert np.abs(logits - expected).max() <= 1e-6 * np.abs(expected).max()
    settings = quantized.SCHEMES[scheme][0]
    assert not hasattr(model.config, "quantization_config")
    assert model.config.dequantized_from["quant_method"] == settings["quant_method"]


def test_saved_models_say_what_they_were_read_from(llama, tmp_path):
    values = quantized.quantize_directory(llama, tmp_path / "my-gptq", "gptq")
    convert(str(tmp_path / "my-gptq"), tmp_path / "converted")
    config = json.loads((tmp_path / "converted/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dequantized_from"] == {
        **{"quant_method": "gptq", "bits": 4, "group_size": 32, "model": "my-gptq"}
    }
    saved = open_checkpoint(str(tmp_path / "converted"), {}).tensors
    assert set(saved) == set(open_checkpoint(str(llama), {}).tensors)
    expected = values[UP].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(saved[UP].read(...), expected)
    # The key remains if the model is saved again.
    convert(str(tmp_path / "converted"), tmp_path / "again")
    again = json.loads((tmp_path / "again/config.json").read_text())
    assert again["dequantized_from"] == config["dequantized_from"]


def test_inspect_reports_the_dequantized_model(llama, tmp_path):
    quantized.quantize_directory(llama, tmp_path / "quantized", "pack-quantized")
    report = inspect_checkpoint(str(tmp_path / "quantized"))
    assert report["problems"] == []
    assert report["quantization"]["quant_method"] == "compressed-tensors"
    plain = inspect_checkpoint(str(llama), names=False)
    assert plain["quantization"] is None
    assert report["parameters"]["total"] == plain["parameters"]["total"]


# -- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized with 'aqlm'.*supported: awq"),
        ({"quant_method": "gptq", "bits": 5}, "gptq to 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* is 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format 'marlin'"),
        ({"quant_method": "awq", "bits": 8}, "awq to 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "format 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"bits": 4}, "no quant_method"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (quantized.compressed("marlin-24", **quantized.INT4), "format 'marlin-24'"),
        (
            quantized.compressed("pack-quantized", **quantized.INT4)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity format 'sparse-24-bitmask'",
        ),
        (
            quantized.compressed("pack-quantized", **quantized.INT4)
            | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config",
        ),
    ],
)
def test_unsupported_settings_are_refused_before_weights_are_opened(
    llama, settings, message, tmp_path
):
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(WeightsError, match=message):  # the directory has no weights
        FlaxAutoModelForCausalLM.from_pretrained(tmp_path)


def without(*names):
    return lambda parts: [parts.pop(name) for name in names]


def with_part(name, value):
    return lambda parts: parts.update({name: value})


def scaled(name, change):
    return lambda parts: parts.update({name: change(parts[name])})


GPTQ4 = quantized.SCHEMES["gptq"][0]
WORDS = np.zeros((12, 64), np.int32)
PLAIN = np.zeros((96, 64), np.float32)


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("gptq", without("scales"), "up_proj.scales"),
        ("gptq", without("qzeros"), "up_proj.qzeros"),
        ("gptq", without("qweight"), "up_proj.qweight"),
        ("gptq-act-order", without("g_idx"), "up_proj.g_idx"),
        ("gptq", scaled("g_idx", lambda a: a + 1), "groups 1 to 2"),
        ("gptq", scaled("qweight", lambda a: a[:4]), "4 bits and group_size 32"),
        ("gptq", scaled("scales", lambda a: a[:1]), "up_proj.scales has the shape"),
        ("gptq", scaled("scales", lambda a: a.astype(np.int8)), "up_proj.scales has the dtype"),
        ("gptq", with_part("weight", PLAIN), "both .*up_proj.weight and"),
        ("gptq", with_part("weight_packed", WORDS), "do not belong.*up_proj.weight_packed"),
        ("awq", without("qzeros"), "up_proj.qzeros"),
        ("awq", scaled("scales", lambda a: a[:1]), "up_proj.scales has the shape"),
        ("fp8", without("weight_scale_inv"), "up_proj.weight_scale_inv"),
        ("fp8", scaled("weight_scale_inv", lambda a: a[:1]), "up_proj.weight_scale_inv has"),
        ("fp8", with_part("weight", PLAIN), "up_proj.weight has the dtype float32"),
        ("fp8-tensor", with_part("weight_scale_inv", np.ones((3, 2), np.float32)), "block_size"),
        ("pack-quantized", without("weight_scale"), "up_proj.weight_scale"),
        ("pack-quantized", without("weight_shape"), "up_proj.weight_shape"),
        ("pack-quantized-zeros", without("weight_zero_point"), "up_proj.weight_zero_point"),
        ("pack-quantized", scaled("weight_packed", lambda a: a[:, :4]), "weight_packed has the"),
        ("pack-quantized", with_part("qweight", WORDS), "do not belong.*up_proj.qweight"),
        ("int-quantized", without("weight_scale"), "up_proj.weight_scale"),
        ("int-quantized", with_part("weight", PLAIN), "up_proj.weight has the dtype float32"),
        ("nvfp4-pack-quantized", without("weight_global_scale"), "up_proj.weight_global_scale"),
        ("nf4", without("weight.absmax"), "up_proj.weight.absmax"),
        ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "up_proj.weight.quant_state"),
        ("nf4", without("weight.nested_absmax"), "up_proj.weight.nested_absmax"),
        ("nf4", scaled("weight", lambda a: a[:-1]), "bytes instead of"),
        (
            "nf4",
            with_part("weight.quant_state.bitsandbytes__nf4", np.zeros(3, np.uint8)),
            "not a quantization state",
        ),
        ("int8", without("SCB"), "up_proj.SCB"),
        ("int8", scaled("weight_format", lambda a: a + 3), "up_proj.weight_format is 3"),
    ],
)
def test_damaged_weights_are_named(llama, scheme, change, message, tmp_path):
    quantized.quantize_directory(llama, tmp_path / "quantized", scheme)

    def rewrite(tensors):
        prefix = UP.removesuffix("weight")
        parts = {n.removeprefix(prefix): tensors.pop(n) for n in list(tensors) if prefix in n}
        change(parts)
        return tensors | {f"{prefix}{name}": array for name, array in parts.items()}

    rewrite_file(tmp_path / "quantized/model.safetensors", rewrite)
    with pytest.raises(WeightsError, match=message) as error:
        for tensor in read(tmp_path / "quantized").values():
            tensor.read(...)
    assert "up_proj" in str(error.value)


def rewrite_file(path, change):
    """Rewrites a safetensors file that may contain 8-bit floats."""
    tensors = {name: t.read(...) for name, t in open_checkpoint(str(path), {}).tensors.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in change(tensors).items()}
    save_file(arrays, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("scheme", "change"),
    [
        ("gptq", {"group_size": 48}),
        ("gptq", {"bits": 8}),
        ("awq", {"group_size": 48}),
        ("fp8", {"weight_block_size": [16, 16]}),
        (
            "pack-quantized",
            quantized.compressed("pack-quantized", **quantized.INT4 | {"group_size": 48}),
        ),
        ("pack-quantized", quantized.compressed("pack-quantized", **quantized.INT8)),
        ("nf4", {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_settings_that_do_not_fit_are_refused(llama, scheme, change, tmp_path):
    quantized.quantize_directory(llama, tmp_path / "quantized", scheme)
    path = tmp_path / "quantized/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="_proj"):
        FlaxAutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    report = inspect_checkpoint(str(tmp_path / "quantized"), names=False)
    assert any("_proj" in problem for problem in report["problems"])


def test_groups_of_different_formats(llama, tmp_path):
    """The scheme of a module is that of the most specific target."""
    values = quantized.quantize_directory(llama, tmp_path / "a", "pack-quantized")
    other = quantized.quantize_directory(llama, tmp_path / "b", "int-quantized")
    ints = open_checkpoint(str(tmp_path / "b"), {}).tensors
    name = "model.layers.0.self_attn.o_proj"

    def change(tensors):
        others = {n: array for n, array in tensors.items() if not n.startswith(name)}
        return others | {n: t.read(...) for n, t in ints.items() if n.startswith(name)}

    rewrite_file(tmp_path / "a/model.safetensors", change)
    groups = {
        "all": {"targets": ["Linear"], "weights": quantized.INT4, "format": "pack-quantized"},
        "o": {"targets": ["re:.*o_proj"], "weights": quantized.INT8, "format": "int-quantized"},
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    config = {"quantization_config": settings | {"config_groups": groups}}
    opened = open_checkpoint(str(tmp_path / "a"), {}).tensors
    tensors = dequantize(opened, config, "model", "float32")
    for weight in (f"{name}.weight", UP):
        expected = (other if weight.startswith(name) else values)[weight]
        np.testing.assert_allclose(tensors[weight].read(...), expected, rtol=1e-6, atol=1e-9)


def test_dynamic_settings_of_gptq(llama, tmp_path):
    values = quantized.quantize_directory(llama, tmp_path / "a", "gptq-v2-8bit")
    settings = quantized.SCHEMES["gptq-v2-8bit"][0]
    config = {
        "quantization_config": {
            **settings,
            "bits": 4,
            "dynamic": {"-:.*lm_head.*": {}, r"+:.*_proj": {"bits": 8}},
        }
    }
    tensors = dequantize(open_checkpoint(str(tmp_path / "a"), {}).tensors, config, "m", "float32")
    np.testing.assert_allclose(tensors[UP].read(...), values[UP], rtol=1e-6, atol=1e-9)


def test_truncated_file(llama, tmp_path):
    quantized.quantize_directory(llama, tmp_path / "quantized", "nf4")
    path = tmp_path / "quantized/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        FlaxAutoModelForCausalLM.from_pretrained(tmp_path / "quantized")


def test_float_weights_may_have_a_quantization_config(llama):
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    tensors = open_checkpoint(str(llama), {}).tensors
    assert dequantize(tensors, config, "model") == tensors


def test_weights_of_a_mesh_are_read_by_slices(llama, tmp_path):
    """Each device reads only its part, in every format."""
    import jax

    values = quantized.quantize_directory(llama, tmp_path / "quantized", "nf4")
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    model = FlaxAutoModelForCausalLM.from_pretrained(
        tmp_path / "quantized", param_dtype=np.float32, mesh=mesh
    )
    kernel = model.params["model"]["layers"]["0"]["mlp"]["up_proj"]["kernel"]
    assert len(kernel.sharding.device_set) == 2
    np.testing.assert_allclose(np.asarray(kernel).T, values[UP], rtol=1e-6, atol=1e-9)

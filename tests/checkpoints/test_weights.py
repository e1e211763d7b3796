"""The weight map: names in both directions, prefixes, ties, old names, templates, stacks."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.checkpoints.files import tensor_from_array
from hfseq.checkpoints.weights import (
    JoinedTensor,
    Tensor,
    WeightMap,
    check_report,
    describe_missing,
)
from hfseq.errors import WeightsError

SHAPES = {
    ("base", "table", "embedding"): (5, 3),
    ("base", "layer", "0", "dense", "kernel"): (3, 4),
    ("base", "layer", "0", "dense", "bias"): (4,),
    ("base", "layer", "0", "norm", "scale"): (3,),
    ("head", "kernel"): (4, 2),
}


def random_params(shapes=SHAPES):
    random = np.random.default_rng(0)
    return {path: random.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def as_file(tensors):
    return {name: tensor_from_array(value) for name, value in tensors.items()}


def filled(names, tensors, **options):
    matched, report = names.match(as_file(tensors), **options)
    native = options.get("native", False)
    missing = set(report.missing)
    return {
        p: names.read_param(matched, p, native=native) for p in names.shapes if p not in missing
    }, report


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_names_and_layout_are_pytorchs():
    tensors = WeightMap(SHAPES).to_torch(random_params())
    assert {name: value.shape for name, value in tensors.items()} == {
        "base.table.weight": (5, 3),
        "base.layer.0.dense.weight": (4, 3),
        "base.layer.0.dense.bias": (4,),
        "base.layer.0.norm.weight": (3,),
        "head.weight": (2, 4),
    }
    assert all(value.flags.c_contiguous for value in tensors.values())


def test_roundtrip_is_the_identity():
    names = WeightMap(SHAPES)
    params, report = filled(names, names.to_torch(random_params()))
    assert equal(params, random_params())
    assert not report.missing and not report.unexpected and not report.mismatched


def test_native_names_are_dotted_paths():
    names = WeightMap(SHAPES)
    tensors = {".".join(path): value for path, value in random_params().items()}
    params, report = filled(names, tensors, native=True)
    assert equal(params, random_params()) and not report.unexpected


def test_prefix_may_be_absent_or_present():
    names = WeightMap(SHAPES, prefix="base")
    tensors = names.to_torch(random_params())
    without = {name.removeprefix("base."): value for name, value in tensors.items()}
    assert equal(filled(names, without)[0], random_params())
    bare = {path[1:]: shape for path, shape in SHAPES.items() if path[0] == "base"}
    params, report = filled(WeightMap(bare, prefix="base"), tensors)
    assert equal(params, {p[1:]: v for p, v in random_params().items() if p[0] == "base"})
    assert report.unexpected == ["head.weight"]


def test_old_norm_names_are_recognized():
    names = WeightMap({("norm", "scale"): (3,), ("norm", "bias"): (3,)})
    old = {"norm.gamma": np.ones(3, np.float32), "norm.beta": np.zeros(3, np.float32)}
    params, report = filled(names, old)
    assert params[("norm", "scale")].sum() == 3 and not report.unexpected


def test_tied_copies_replace_a_missing_original():
    names = WeightMap(SHAPES, aliases={"decoder.weight": "base.table.weight"})
    tensors = names.to_torch(random_params())
    assert "decoder.weight" not in tensors
    _, report = filled(names, {**tensors, "decoder.weight": tensors["base.table.weight"]})
    assert report.unexpected == []
    moved = {**tensors, "decoder.weight": tensors["base.table.weight"]}
    del moved["base.table.weight"]
    assert equal(filled(names, moved)[0], random_params())


def test_buffers_are_ignored():
    names = WeightMap(SHAPES, ignored=(r"position_ids$",))
    tensors = {**names.to_torch(random_params()), "base.position_ids": np.arange(5)}
    assert filled(names, tensors)[1].unexpected == []


def test_templates_rename_both_ways():
    shapes = {("block", str(i), "ln", "scale"): (3,) for i in range(2)}
    names = WeightMap(shapes, templates={"block.{}.ln": "layers.{}.norm"})
    tensors = names.to_torch(random_params(shapes))
    assert list(tensors) == ["layers.0.norm.weight", "layers.1.norm.weight"]
    assert equal(filled(names, tensors)[0], random_params(shapes))


KERNELS = {
    ("line", "kernel"): (3, 4, 6),
    ("plane", "kernel"): (3, 5, 4, 6),
    ("layer", "conv", "kernel"): (2, 5, 3, 4, 6),
}
NUMBERED = {("layer",): (("layer", "0"), ("layer", "1"))}


@pytest.mark.parametrize("native", [False, True])
def test_convolution_kernels_have_pytorch_order_complete_and_sliced(native):
    names, params = WeightMap(KERNELS, stacked=NUMBERED), random_params(KERNELS)
    tensors = names.to_torch(params)
    assert {name: value.shape for name, value in tensors.items()} == {
        "line.weight": (6, 4, 3),
        "plane.weight": (6, 4, 3, 5),
        "layer.0.conv.weight": (6, 4, 5, 3),
        "layer.1.conv.weight": (6, 4, 5, 3),
    }
    assert tensors["plane.weight"][5, 2, 1, 3] == params["plane", "kernel"][1, 3, 2, 5]
    assert equal(filled(names, tensors)[0], params)
    if native:
        tensors = {".".join(path): value for path, value in names.unstack(params).items()}
    matched, _ = names.match(as_file(tensors), native=native)
    for path, shape in KERNELS.items():
        index = tuple(slice(1, size - at % 2) for at, size in enumerate(shape))
        part = names.read_param(matched, path, index, native=native)
        assert np.array_equal(part, params[path][index])


def test_synonyms_are_read_and_not_written():
    shapes = {("base", "encoder", "layer", "0", "query", "kernel"): (3, 4)}
    names = WeightMap(
        shapes,
        prefix="base",
        synonyms={"layers.{}": "encoder.layer.{}", "attention.q_proj": "query"},
    )
    tensors = names.to_torch(random_params(shapes))
    assert list(tensors) == ["base.encoder.layer.0.query.weight"]
    for name in ("base.layers.0.attention.q_proj.weight", "layers.0.attention.q_proj.weight"):
        params, report = filled(names, {name: tensors["base.encoder.layer.0.query.weight"]})
        assert equal(params, random_params(shapes)) and not report.unexpected
        assert names.resolve_name(name) == "base.encoder.layer.0.query.weight"
    assert names.resolve_name("head.weight") == "head.weight"


STACKED = {("layer", "dense", "kernel"): (2, 3, 4), ("layer", "norm", "scale"): (2, 3)}


def test_stacked_layers_are_one_tensor_a_layer():
    names = WeightMap(STACKED, stacked={("layer",): (("layer", "0"), ("layer", "1"))})
    params = random_params(STACKED)
    tensors = names.to_torch(params)
    assert np.array_equal(tensors["layer.1.dense.weight"], params["layer", "dense", "kernel"][1].T)
    assert equal(filled(names, tensors)[0], params)


def test_stacked_layers_have_native_names_with_numbers():
    names = WeightMap(STACKED, stacked={("layer",): (("layer", "0"), ("layer", "1"))})
    params = random_params(STACKED)
    listed = names.unstack(params)
    assert ("layer", "1", "norm", "scale") in listed
    tensors = {".".join(path): value for path, value in listed.items()}
    assert equal(filled(names, tensors, native=True)[0], params)


@pytest.mark.parametrize("native", [False, True])
def test_slices_are_cut_out_of_the_file(native):
    names = WeightMap(STACKED, stacked={("layer",): (("layer", "0"), ("layer", "1"))})
    params = random_params(STACKED)
    tensors = names.to_torch(params)
    if native:
        tensors = {".".join(path): value for path, value in names.unstack(params).items()}
    matched, _ = names.match(as_file(tensors), native=native)
    index = (slice(1, 2), slice(0, 2), slice(2, 4))
    part = names.read_param(matched, ("layer", "dense", "kernel"), index, native=native)
    assert np.array_equal(part, params["layer", "dense", "kernel"][index])


def test_only_the_requested_slice_is_read():
    requests = []
    shapes = {("dense", "kernel"): (4, 6)}
    names = WeightMap(shapes)
    tensors = as_file(names.to_torch(random_params(shapes)))
    read = tensors["dense.weight"].read

    def spy(index):
        requests.append(index)
        return read(index)

    tensors["dense.weight"] = type(tensors["dense.weight"])((6, 4), "float32", spy)
    matched, _ = names.match(tensors)
    names.read_param(matched, ("dense", "kernel"), (slice(0, 2), slice(3, 6)))
    assert requests == [(slice(3, 6), slice(0, 2))]  # transposed on disk


def test_all_problems_are_reported_together():
    names = WeightMap(SHAPES)
    tensors = names.to_torch(random_params())
    tensors["head.weight"] = np.zeros((3, 4), np.float32)
    tensors["base.table.weight"] = np.zeros((6, 3), np.float32)
    _, report = filled(names, tensors)
    with pytest.raises(WeightsError) as error:
        check_report(report, "model.safetensors", "FlaxModel", ignore_mismatched=False)
    message = str(error.value)
    assert "head.weight: (3, 4) in the file, (2, 4) in the model" in message
    assert "base.table.weight: (6, 3) in the file, (5, 3) in the model" in message
    assert "ignore_mismatched_sizes=True" in message
    check_report(report, "model.safetensors", "FlaxModel", ignore_mismatched=True)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.bool_])
def test_types_that_are_not_parameters_are_refused(dtype):
    names = WeightMap(SHAPES)
    tensors = names.to_torch(random_params())
    tensors["head.weight"] = tensors["head.weight"].astype(dtype)
    _, report = filled(names, tensors)
    with pytest.raises(WeightsError, match=r"head\.weight \(\w+\).*supported: float64.*bfloat16"):
        check_report(report, "model.safetensors", "FlaxModel", ignore_mismatched=True)


def test_missing_names_come_with_the_nearest_left_over():
    names = WeightMap(SHAPES)
    tensors = names.to_torch(random_params())
    tensors["heads.weight"] = tensors.pop("head.weight")
    _, report = filled(names, tensors)
    assert report.missing == [("head", "kernel")] and report.unexpected == ["heads.weight"]
    assert "did you mean 'heads.weight'" in describe_missing(report)


@pytest.mark.parametrize(
    "other", ["pooler.weight", "decoder.head.dense.weight", "head.LayerNorm.weight"]
)
def test_a_tensor_of_another_part_is_not_a_suggestion(other):
    names = WeightMap(SHAPES)
    tensors = names.to_torch(random_params())
    tensors[other] = tensors.pop("head.weight")
    _, report = filled(names, tensors)
    assert report.missing == [("head", "kernel")]
    assert "did you mean" not in describe_missing(report)


def test_a_tensor_of_another_shape_is_not_a_suggestion():
    names = WeightMap(SHAPES)
    tensors = names.to_torch(random_params())
    tensors["heads.weight"] = tensors.pop("head.weight")[:1]
    _, report = filled(names, tensors)
    assert "did you mean" not in describe_missing(report)


def test_missing_tensors_are_read_from_the_fallback():
    shapes = {("base", name, "embedding"): (5, 3) for name in ("table", "one", "two")}
    file_tensors = {"base.table.weight": np.ones((5, 3), np.float32)}
    fallbacks = {f"base.{name}.weight": ["base.table.weight"] for name in ("one", "two")}
    names = WeightMap(shapes, prefix="base", fallbacks=fallbacks)
    params, report = filled(names, file_tensors)
    assert params.keys() == shapes.keys() and not report.missing and not report.unexpected
    both = {**file_tensors, "base.one.weight": np.zeros((5, 3), np.float32)}
    params, _ = filled(names, both)
    assert not params["base", "one", "embedding"].any()
    assert params["base", "two", "embedding"].all()


@pytest.mark.parametrize("way", ["aliases", "fallbacks"])
def test_second_names_count_in_native_files_too(way):
    shapes = {("base", "own", "embedding"): (5, 3)}
    second = {
        "aliases": {"base.shared.weight": "base.own.weight"},
        "fallbacks": {"base.own.weight": ["base.shared.weight"]},
    }
    names = WeightMap(shapes, prefix="base", **{way: second[way]})
    table = {"shared.embedding": np.ones((5, 3), np.float32)}
    params, report = filled(names, table, native=True)
    assert params.keys() == shapes.keys() and not report.unexpected


JOINED = {
    "experts.gate_up_proj": JoinedTensor(
        ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    ),
    "qkv.weight": JoinedTensor(("q.weight", "k.weight", "v.weight")),
}


def joined_map(stacked=None):
    gate_up, kernel = (3, 4, 5), (2, 6)  # (experts, 2 * inner, width) and (in, 3 * out)
    if stacked:
        gate_up, kernel = (2, *gate_up), (2, *kernel)
    shapes = {("layers", "experts", "gate_up_proj"): gate_up, ("layers", "qkv", "kernel"): kernel}
    if not stacked:
        shapes = {("layers", "0", *path[1:]): shape for path, shape in shapes.items()}
    return WeightMap(shapes, joined=JOINED, stacked=stacked)


@pytest.mark.parametrize("stacked", [None, {("layers",): [("layers", "0"), ("layers", "1")]}])
def test_joined_parameters_are_stored_in_parts_and_read_by_slices(stacked):
    names = joined_map(stacked)
    random = np.random.default_rng(0)
    params = {p: random.normal(size=s).astype(np.float32) for p, s in names.shapes.items()}
    stored = names.to_torch(params)
    (experts, gate_up), (_, kernel) = params.items()
    layer = (lambda value: value[0]) if stacked else (lambda value: value)
    expert = stored["layers.0.experts.1.up_proj.weight"]
    np.testing.assert_array_equal(expert, layer(gate_up)[1, 2:])
    np.testing.assert_array_equal(stored["layers.0.k.weight"], layer(kernel)[:, 2:4].T)
    assert len(stored) == 9 * (2 if stacked else 1)
    tensors = {
        name: Tensor(value.shape, "float32", lambda index, value=value: value[index])
        for name, value in stored.items()
    }
    matched, report = names.match(tensors)
    assert not report.missing and not report.unexpected
    for path, value in params.items():
        np.testing.assert_array_equal(names.read_param(matched, path), value)
    index = (slice(1, 3), slice(1, 3), slice(0, 4))
    index = (slice(1, 2), *index) if stacked else index
    np.testing.assert_array_equal(names.read_param(matched, experts, index), gate_up[index])


def test_a_missing_part_of_a_joined_parameter_is_reported():
    names = joined_map()
    params = {path: np.zeros(shape, np.float32) for path, shape in names.shapes.items()}
    tensors = {
        name: Tensor(value.shape, "float32", value.__getitem__)
        for name, value in names.to_torch(params).items()
        if name != "layers.0.experts.2.gate_proj.weight"
    }
    assert names.match(tensors)[1].missing == [("layers", "0", "experts", "gate_up_proj")]


def test_joined_parameters_that_do_not_divide_are_refused():
    with pytest.raises(WeightsError, match=r"cannot be divided into 3 equal parts"):
        WeightMap({("qkv", "kernel"): (2, 7)}, joined=JOINED)

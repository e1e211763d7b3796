"""``hfseq convert``: equal values in another format, and atomic writes."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from hfseq import cli
from hfseq.checkpoints.config import open_checkpoint
from hfseq.cli import convert
from hfseq.errors import CheckpointError, UsageError, WeightsError
from hfseq.nn import trees
from tests.support import models
from tests.support.tiers import first

FAMILIES = {
    "bert": ("FlaxBertForMaskedLM", models.bert_config),
    "gpt2": ("FlaxGPT2LMHeadModel", models.gpt2_config),
    "t5": ("FlaxT5ForConditionalGeneration", models.t5_config),
    "bart": ("FlaxBartForConditionalGeneration", models.bart_config),
    "vq_transformer": ("FlaxVQTransformerForCausalLM", models.vq_transformer_config),
    "wmt_transformer": (
        "FlaxWMTTransformerForConditionalGeneration",
        models.wmt_transformer_config,
    ),
}
#: Slow cases, which are covered by the others too.
OTHERS_COVER = ("bert", "gpt2", "bart", "t5")


@pytest.fixture(autouse=True)
def quiet():
    """Restores the log level: the command silences loading warnings, which it reports itself."""
    logger = logging.getLogger("hfseq.modeling")
    level_before = logger.level
    yield
    logger.setLevel(level_before)


@pytest.fixture
def saved(tmp_path):
    """Saves a tiny model of a family with tokenizer files; returns the model and the directory."""
    import hfseq

    def save(family: str, name: str = "source"):
        class_name, config = FAMILIES[family]
        model = getattr(hfseq, class_name)(config())
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text('{"a": 1}')
        (tmp_path / name / "README.md").write_text("# mine\n")
        (tmp_path / name / "notes.log").write_text("not the model's")
        (tmp_path / name / "checkpoints" / "5").mkdir(parents=True)
        return model, tmp_path / name

    return save


def tensors(folder: Path) -> dict[str, np.ndarray]:
    opened = open_checkpoint(str(folder), {})
    return {name: np.asarray(tensor.read(...)) for name, tensor in opened.tensors.items()}


def equal(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return first.keys() == other.keys() and all(
        first[name].dtype == other[name].dtype and first[name].tobytes() == other[name].tobytes()
        for name in first
    )


@pytest.mark.parametrize("family", first(FAMILIES, *(FAMILIES.keys() - OTHERS_COVER)))
def test_safetensors_msgpack_roundtrip_is_bit_exact(saved, family, tmp_path, capsys):
    model, source = saved(family)
    flax, back = tmp_path / "flax", tmp_path / "back"
    to = ["--to", "msgpack", "--max_shard_size", "20kB", "--strict"]
    assert cli.main(["convert", str(source), str(flax), *to]) == 0
    assert (flax / "flax_model.msgpack.index.json").exists()
    assert not list(flax.glob("*.safetensors"))
    assert cli.main(["convert", str(flax), str(back), "--strict", "--max_shard_size", "30kB"]) == 0
    assert equal(tensors(source), tensors(back))
    loaded = type(model).from_pretrained(back)
    assert models.trees_equal(loaded.params, model.params)
    if model.can_generate():
        names = ["config.json", "generation_config.json"]
        assert all((source / n).read_text() == (back / n).read_text() for n in names)
    assert "checkpoints" not in [path.name for path in back.iterdir()]
    assert (back / "tokenizer.json").read_text() == '{"a": 1}'
    assert (back / "README.md").exists() and not (back / "notes.log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_roundtrip_output_matches_in_pytorch(saved, family, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers.models.auto import modeling_auto

    auto = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}[family]
    _, source = saved(family)
    convert.convert(str(source), tmp_path / "flax", to="msgpack")
    convert.convert(str(tmp_path / "flax"), tmp_path / "back")
    inputs = {"input_ids": torch.tensor(models.ids())}
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    dtypes = []
    for folder in (source, tmp_path / "back"):
        network = getattr(modeling_auto, auto).from_pretrained(folder).eval()
        with torch.no_grad():
            dtypes.append(network(**inputs).logits)
    assert torch.equal(*dtypes)


def test_tensors_of_a_pickle_are_read_and_its_functions_are_not_run(saved, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    import hfseq

    model, source = saved("bert")
    state = {name: torch.tensor(value) for name, value in tensors(source).items()}
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--strict"]) == 0
    loaded = hfseq.FlaxBertForMaskedLM.from_pretrained(tmp_path / "out")
    assert models.trees_equal(loaded.params, model.params)

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"x": Evil()}, source / "pytorch_model.bin")
    assert cli.main(["convert", str(source), str(tmp_path / "evil")]) == 1
    assert not (tmp_path / "ran").exists() and not (tmp_path / "evil").exists()
    assert "not a plain PyTorch state dict" in capsys.readouterr().err


def test_another_type_is_written_and_named_in_the_configuration(saved, tmp_path, capsys):
    model, source = saved("gpt2")
    out = tmp_path / "half"
    assert cli.main(["convert", str(source), str(out), "--dtype", "bfloat16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dtypes"] == {"bfloat16": len(tensors(source))}
    assert report["initialised"] == report["dropped"] == []
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    halves, full = tensors(out), tensors(source)
    assert all(np.array_equal(halves[n], full[n].astype(halves[n].dtype)) for n in full)


def test_dropped_and_new_heads_are_reported(saved, tmp_path, capsys):
    _, source = saved("bert")
    assert cli.main(["convert", str(source), str(tmp_path / "base"), "--base"]) == 0
    err = capsys.readouterr().err
    assert "ignored because the class lacks them: cls.predictions" in err
    assert "newly initialized: pooler" in err
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    task = ["--task", "ForSequenceClassification"]
    assert cli.main(["convert", str(source), str(tmp_path / "c"), *task]) == 0
    assert "newly initialized: bert.pooler" in capsys.readouterr().err
    flags = ["--model_class", "BertForMaskedLM", "--strict"]
    assert cli.main(["convert", str(source), str(tmp_path / "m"), *flags]) == 0


def test_strict_lists_all_mismatches_and_writes_nothing(saved, tmp_path, capsys):
    from safetensors.numpy import save_file

    _, source = saved("bert")
    state = tensors(source)
    state["bert.encoder.layer.0.output.dense.wight"] = state.pop(
        "bert.encoder.layer.0.output.dense.weight"
    )
    state["bert.embeddings.LayerNorm.bias"] = np.zeros(5, np.float32)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    files_before = set(tmp_path.iterdir())
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--strict"]) == 1
    err = capsys.readouterr().err
    for text in (
        "--strict",
        "bert.embeddings.LayerNorm.bias: (5,) in the file, (32,) in",
        "missing: bert.encoder.layer.0.output.dense.weight; did you mean",
        "unexpected: bert.encoder.layer.0.output.dense.wight",
    ):
        assert text in err, text
    assert set(tmp_path.iterdir()) == files_before


def test_destination_is_replaced_only_on_request_and_by_a_complete_model(
    saved, tmp_path, capsys, monkeypatch
):
    _, source = saved("gpt2")
    _, target = saved("bert", "target")
    files_before = {p.name: p.read_bytes() for p in target.iterdir() if p.is_file()}
    assert cli.main(["convert", str(source), str(target)]) == 2
    assert "is not empty" in (error := capsys.readouterr().err) and "--overwrite" in error

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert.shutil, "copyfile", full)
        assert cli.main(["convert", str(source), str(target), "--overwrite"]) == 1
        assert "No space left" in capsys.readouterr().err
        assert {p.name: p.read_bytes() for p in target.iterdir() if p.is_file()} == files_before
        assert cli.main(["convert", str(source), str(tmp_path / "new")]) == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]
    assert cli.main(["convert", str(source), str(target), "--overwrite", "--to", "msgpack"]) == 0
    assert not (target / "model.safetensors").exists()
    assert (target / "checkpoints" / "5").is_dir()
    assert equal(tensors(target), tensors(target)) and (target / "flax_model.msgpack").exists()


def test_a_weight_file_is_selected_among_several(saved, tmp_path):
    model, source = saved("gpt2")
    convert.convert(str(source), tmp_path / "flax", to="msgpack")
    shutil.copy(tmp_path / "flax" / "flax_model.msgpack", source)
    (source / "model.safetensors").write_bytes(b"damaged")
    convert.convert(str(source / "flax_model.msgpack"), tmp_path / "out", strict=True)
    assert models.trees_equal(type(model).from_pretrained(tmp_path / "out").params, model.params)
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["nowhere/at/all", "out"], 1, "'nowhere/at/all' does not exist"),
        (["empty", "out"], 1, "has no config.json"),
        (["file.txt", "out"], 2, "file.txt is not a weight file"),
        (["source", "file.txt"], 2, "file.txt is a file"),
        (["source", "file.txt/out"], 1, "cannot write file.txt/out"),
        (["source", "out", "--max_shard_size", "big"], 2, "--max_shard_size 'big' is not a size"),
        (["source", "out", "--task", "ForFun"], 2, "has no 'ForFun'; it has: Model"),
        (["source", "out", "--model_class", "GPT2Model2"], 2, "did you mean 'FlaxGPT2Model'"),
    ],
)
def test_wrong_inputs_are_named(saved, tmp_path, monkeypatch, capsys, flags, code, message):
    saved("gpt2")
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file.txt").write_text("text")
    assert cli.main(["convert", *flags]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not Path("out").exists()


def test_config_without_known_class_requires_task(saved, tmp_path):
    _, source = saved("bert")
    config = json.loads((source / "config.json").read_text())
    for changes, error, message in (
        ({"architectures": None}, UsageError, "config.json .none. .*--task"),
        ({"model_type": "brt"}, UsageError, "unknown architecture 'brt'.*did you mean 'bert'"),
        ({"model_type": None}, CheckpointError, "config.json .*no model_type"),
    ):
        (source / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(error, match=message):
            convert.convert(str(source), tmp_path / "out")
    (source / "config.json").write_text(json.dumps({**config, "architectures": None}))
    convert.convert(str(source), tmp_path / "out", task="ForMaskedLM", strict=True)
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 65}))
    with pytest.raises(WeightsError, match="word_embeddings"):
        convert.convert(str(source), tmp_path / "out2")


# huggingface_hub uploads files through a deprecated argument of its HTTP library.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_model_on_the_hub_is_converted_with_its_small_files(hub, saved, tmp_path):
    from hfseq.checkpoints.hub import push_folder

    _, source = saved("gpt2")
    push_folder(source, "user/tiny")
    conversion = convert.convert("user/tiny", tmp_path / "out", to="msgpack", strict=True)
    assert {"tokenizer.json", "README.md"} <= set(conversion.carried)
    convert.convert(str(tmp_path / "out"), tmp_path / "back")
    assert equal(tensors(source), tensors(tmp_path / "back"))


def test_the_command_merges_an_adapter_into_its_base(tmp_path, capfd):
    import hfseq
    from hfseq.modeling.lora import LoraConfig

    auto_class = hfseq.FlaxAutoModelForSequenceClassification
    inputs = {"input_ids": models.ids(2, 9)}
    auto_class.from_config(models.bert_config()).save_pretrained(tmp_path / "base")
    model = auto_class.from_pretrained(
        tmp_path / "base", peft_config=LoraConfig(2, lora_alpha=8, target_modules=("query",))
    )
    shaken = {path: leaf + 0.1 for path, leaf in trees.flatten(model.params).items()}
    model.save_pretrained(tmp_path / "adapter", params=trees.unflatten(shaken))
    adapter, merged = str(tmp_path / "adapter"), str(tmp_path / "merged")
    assert cli.main(["convert", adapter, merged]) == 2
    assert "is an adapter: use --merge" in capfd.readouterr().err
    assert cli.main(["convert", str(tmp_path / "base"), merged, "--merge"]) == 2
    assert "adapter_config.json" in capfd.readouterr().err
    assert cli.main(["convert", adapter, merged, "--merge"]) == 0
    assert "FlaxBertForSequenceClassification" in capfd.readouterr().out
    merged_model = hfseq.FlaxAutoModelForSequenceClassification.from_pretrained(merged)
    right = auto_class.from_pretrained(adapter)(**inputs).logits
    np.testing.assert_allclose(merged_model(**inputs).logits, right, rtol=3e-5, atol=3e-5)


def test_images_of_the_model_card_are_copied(saved, tmp_path):
    _, source = saved("bert")
    (source / "README.md").write_text("![Loss](learning%20curve.png)")
    for name in ("learning curve.png", "other.png"):
        (source / name).write_bytes(b"png")
    assert cli.main(["convert", str(source), str(tmp_path / "target")]) == 0
    copied = {path.name for path in (tmp_path / "target").glob("*.png")}
    assert copied == {"learning curve.png"}

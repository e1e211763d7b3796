"""Malicious checkpoints, one attack each."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from hfseq import FlaxAutoModelForMaskedLM, FlaxAutoModelForSeq2SeqLM
from hfseq.checkpoints import files
from hfseq.errors import CheckpointError, ConfigError, HfseqError, UsageError, WeightsError
from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
from tests.support import saved_bert
from tests.support.models import bert_config

model, saved = saved_bert.model, saved_bert.saved
WEIGHTS = "model.safetensors"


def load(folder: Path):
    """Returns the model and its parameters, which stay on the host because that is faster."""
    return FlaxAutoModelForMaskedLM.from_pretrained(folder, _do_init=False)


def header_of(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write(path: Path, header: dict | str, body: bytes) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    data = text.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)


@pytest.fixture
def sharded(model, tmp_path):
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20kB")
    return tmp_path / "sharded"


# -- index files


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param("../saved/model.safetensors", marks=pytest.mark.slow),
        "/etc/passwd",
        pytest.param("..", marks=pytest.mark.slow),
        pytest.param("a/b.safetensors", marks=pytest.mark.slow),
        pytest.param("a\\b", marks=pytest.mark.slow),
        "",
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
def test_shards_outside_the_index_folder_are_rejected(sharded, saved, shard):
    index = sharded / files.SAFETENSORS_INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["cls.predictions.bias"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="shards must be in the directory of the index"):
        load(sharded)


def test_duplicate_name_in_index_is_rejected(sharded):
    index = sharded / files.SAFETENSORS_INDEX
    text = index.read_text().replace(
        '"weight_map": {', '"weight_map": {"cls.predictions.bias": "x.safetensors",'
    )
    index.write_text(text)
    with pytest.raises(CheckpointError, match="duplicate key 'cls.predictions.bias'"):
        load(sharded)


def test_a_deep_index_is_refused(sharded):
    (sharded / files.SAFETENSORS_INDEX).write_text('{"weight_map":' * 10**5)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load(sharded)


def test_shard_that_is_its_index_is_rejected(sharded):
    index = sharded / files.SAFETENSORS_INDEX
    index.write_text(json.dumps({"weight_map": {"a": files.SAFETENSORS_INDEX}}))
    with pytest.raises(CheckpointError, match=rf"{files.SAFETENSORS_INDEX}.*shard"):
        load(sharded)


# -- links


def test_symlinked_weights_are_read(saved, tmp_path):
    blob = tmp_path / "blobs" / "a"
    blob.parent.mkdir()
    shutil.move(saved / WEIGHTS, blob)
    (saved / WEIGHTS).symlink_to(blob)
    assert load(saved)[1]


def test_link_to_another_file_does_not_reveal_it(saved, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("token-1234567890" * 10)
    (saved / WEIGHTS).unlink()
    (saved / WEIGHTS).symlink_to(secret)
    with pytest.raises(CheckpointError, match="damaged or not a safetensors file") as error:
        load(saved)
    assert "1234567890" not in str(error.value)


def test_saving_replaces_links_but_not_their_targets(model, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in (WEIGHTS, "config.json", "generation_config.json"):
        (folder / name).symlink_to(outside)
    model.save_pretrained(folder)
    assert outside.read_text() == "mine" and not (folder / WEIGHTS).is_symlink()


# -- safetensors


TRICKS = {
    "overlapping tensors": lambda h, one, two: h[two].update(data_offsets=h[one]["data_offsets"]),
    "a negative place": lambda h, one, _: h[one].update(data_offsets=[-4, 4]),
    "a place beyond the end": lambda h, one, _: h[one].update(data_offsets=[0, 2**40]),
    "an end before the start": lambda h, one, _: h[one].update(data_offsets=[8, 0]),
    "a shape of 2**80": lambda h, one, _: h[one].update(shape=[2**40, 2**40]),
    "a negative shape": lambda h, one, _: h[one].update(shape=[-1]),
    "another type": lambda h, one, _: h[one].update(dtype="F64"),
    "no type": lambda h, one, _: h[one].update(dtype="object"),
    "metadata that is no text": lambda h, *_: h.update(__metadata__={"format": 3}),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_headers_that_lie_are_refused(saved, trick):
    header, body = header_of(saved / WEIGHTS)
    name, two = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["shape"]
    )[:2]
    TRICKS[trick](header, name, two)
    write(saved / WEIGHTS, header, body)
    with pytest.raises((CheckpointError, WeightsError)):
        load(saved)


@pytest.mark.parametrize("length", [0, 1, 10**9, 2**63, 2**64 - 1])
def test_a_wrong_length_of_the_header_is_refused(saved, length):
    data = (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    with pytest.raises(CheckpointError, match="damaged or not a safetensors file"):
        load(saved)


def test_duplicate_name_in_header_is_rejected(saved):
    header, body = header_of(saved / WEIGHTS)
    name = "cls.predictions.bias"
    text = json.dumps(header)
    first = json.dumps({name: header[name]})[1:-1]
    write(saved / WEIGHTS, "{" + first + "," + text[1:], body)
    with pytest.raises(CheckpointError, match="cls.predictions.bias.*twice|damaged"):
        load(saved)


# -- msgpack


BOMBS = {
    "a list of 4,294,967,295": b"\xdd\xff\xff\xff\xff",
    "a map of 4,294,967,295": b"\xdf\xff\xff\xff\xff",
    "a text of 4 GB": b"\xdb\xff\xff\xff\xff",
    "an extension of 4 GB": b"\xc9\xff\xff\xff\xff\x01",
    "lists in lists": b"\x91" * 10**6,
    "an unknown extension": b"\x81\xa1a\xd4\x55\x00",
    "an array of objects": b"\x81\xa1a\xc7\x0c\x01\x93\x91\x01\xa6object\xc4\x00",
    "an array of 2**62 numbers": b"\x81\xa1a\xc7\x16\x01\x93\x91\xcf\x40"
    + bytes(7)
    + b"\xa7float32\xc4\x00",
    "two trees": b"\x80\x80",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_msgpack_with_false_sizes_is_rejected(tmp_path, bomb):
    bert_config().save_pretrained(tmp_path)
    (tmp_path / files.MSGPACK).write_bytes(BOMBS[bomb])
    text = "damaged or not a Flax msgpack file|no parameter|no tensor of"
    with pytest.raises((CheckpointError, WeightsError), match=text):
        load(tmp_path)


# -- pickles


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_pytorch_model_bin_never_runs(saved, tmp_path):
    torch = pytest.importorskip("torch")
    (saved / WEIGHTS).unlink()
    ran = tmp_path / "ran"
    for dump in (
        lambda path: path.write_bytes(pickle.dumps({"a": Evil(ran)})),
        lambda path: torch.save({"a": Evil(ran)}, path),
        lambda path: torch.save({"a": Evil(ran)}, path, _use_new_zipfile_serialization=False),
    ):
        dump(saved / files.TORCH_BIN)
        with pytest.raises(CheckpointError, match="damaged or not a plain PyTorch state dict"):
            load(saved)
    assert not ran.exists()


def test_files_of_other_libraries_are_not_opened(saved, tmp_path):
    ran = tmp_path / "ran"
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "training_args.bin",
        "rng_state.pth",
        "opt_state.msgpack",
        "tf_model.h5",
        "vocab.pkl",
        "adapter_model.bin",
    ):
        (saved / name).write_bytes(pickle.dumps(Evil(ran)))
    assert load(saved)[1] and not ran.exists()


# -- configurations


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"hidden_size": 10**12}, "hidden_size is 1e.12, at most", marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_hidden_layers": -1}, "num_hidden_layers is -1, .*negative", marks=pytest.mark.slow
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e.09.* 2048"),
        ({"num_hidden_layers": 2000}, "has 2000 layers, .* 42 tensors"),
        pytest.param(
            {"max_position_embeddings": 2**30},
            "1073741824 places of 32 numbers",
            marks=pytest.mark.slow,
        ),
        ({"vocab_size": 2**31 - 1}, "differ in shape"),
        pytest.param({"hidden_size": 33}, "is not valid|differ in shape", marks=pytest.mark.slow),
        pytest.param({"num_attention_heads": 0}, "is not valid", marks=pytest.mark.slow),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        pytest.param(
            {"initializer_range": float("inf")}, "initializer_range is inf", marks=pytest.mark.slow
        ),
        pytest.param(
            {"hidden_act": "__import__('os')"},
            "hidden_act|unknown activation|is not valid",
            marks=pytest.mark.slow,
        ),
        ({"__class__": "x"}, "name '__class__'"),
        pytest.param(
            {"vocab_size": "\ud800"}, "cannot read the configuration", marks=pytest.mark.slow
        ),
        pytest.param(
            {"model_type": "../../bert"},
            "model_type|not recognize|Unrecognized",
            marks=pytest.mark.slow,
        ),
        pytest.param({"architectures": "[" * 10**5}, None, marks=pytest.mark.slow),
    ],
)
def test_absurd_configurations_are_refused_at_once(saved, change, message):
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if message is None:
        assert load(saved)
        return
    with pytest.raises(HfseqError, match=message):
        load(saved)


@pytest.mark.parametrize("text", ["[" * 10**5, "9" * 10**5, "\x00", "null", "3", '"a"', "[1]"])
def test_non_object_config_is_rejected(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises((ConfigError, CheckpointError)) as error:
        load(saved)
    assert str(saved) in str(error.value)


def test_a_table_of_positions_is_not_computed_for_a_file_that_has_none(tmp_path):
    """Marian computes its position table: 2**28 positions would need 100 GB before any check."""
    from hfseq_plugins.marian.modeling import FlaxMarianMTModel
    from tests.support.models import marian_config

    FlaxMarianMTModel(marian_config()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 2**28}))
    with pytest.raises(WeightsError, match="different models"):
        FlaxAutoModelForSeq2SeqLM.from_pretrained(tmp_path)


def test_rotary_positions_have_no_table_that_could_be_too_large(tmp_path):
    from hfseq_plugins.mistral.modeling import FlaxMistralModel
    from tests.support.models import mistral_config

    config = mistral_config(max_position_embeddings=2**28, num_hidden_layers=1)
    FlaxMistralModel(config).save_pretrained(tmp_path)
    FlaxMistralModel.from_pretrained(tmp_path)


def test_huge_model_is_not_allocated_for_one_small_tensor(saved):
    tensors = load_file(saved / WEIGHTS)
    name = "bert.encoder.layer.0.attention.self.query.bias"
    save_file({name: tensors[name]}, saved / WEIGHTS, metadata={"format": "pt"})
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 2**30}))
    with pytest.raises(WeightsError, match=r"contains 32 .* lacks 35433497696"):
        FlaxAutoModelForMaskedLM.from_pretrained(saved)


# -- code in a checkpoint


def with_code(folder: Path, ran: Path, name: str = "FlaxAutoModelForMaskedLM") -> None:
    path = folder / "config.json"
    described = json.loads(path.read_text())
    described["auto_map"] = {"AutoConfig": "evil.EvilConfig", name: "evil.EvilModel"}
    path.write_text(json.dumps(described))
    (folder / "evil.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import BertConfig\n"
        "class EvilConfig(BertConfig):\n    pass\nclass EvilModel:\n    pass\n"
    )


def test_code_is_not_run_unless_it_is_trusted_and_is_named(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with_code(saved, tmp_path / "ran")
    # a plugin registers it, so the code is not needed
    assert type(load(saved)[0]) is FlaxBertForMaskedLM
    text = (saved / "config.json").read_text()
    (saved / "config.json").write_text(text.replace('"bert"', '"evil"'))
    with pytest.raises(HfseqError, match=r"evil\.py.*trust_remote_code=True"):
        load(saved)
    assert not (tmp_path / "ran").exists()


def test_pytorch_code_is_not_run_if_a_plugin_has_the_model(saved, tmp_path):
    with_code(saved, tmp_path / "ran", name="AutoModelForMaskedLM")
    described = json.loads((saved / "config.json").read_text())
    del described["auto_map"]["AutoConfig"]
    (saved / "config.json").write_text(json.dumps(described))
    assert load(saved)[1]
    assert not (tmp_path / "ran").exists()


def test_plugin_files_in_a_checkpoint_are_not_loaded(saved, tmp_path):
    for name in ("hfseqfile.py", "conftest.py", "sitecustomize.py", "modeling_bert.py"):
        (saved / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert load(saved)[1] and not (tmp_path / "ran").exists()


def test_generation_options_are_not_code(saved):
    (saved / "generation_config.json").write_text('{"custom_generate": "evil", "max_length": "x"}')
    try:
        load(saved)
    except (HfseqError, UsageError):
        pass


@pytest.mark.parametrize("auto_map", [5, "a.FlaxAutoModel", ["FlaxAutoModel"], None])
def test_an_auto_map_of_another_type_is_not_code(auto_map):
    from hfseq import FlaxAutoModel

    assert not FlaxAutoModel._has_remote_code(SimpleNamespace(auto_map=auto_map))

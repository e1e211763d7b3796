"""Downloads by repository name, and loading of pushed models with other libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfseq
from hfseq import cli
from hfseq.checkpoints.config import open_checkpoint
from hfseq.checkpoints.headers import read_remote_headers
from hfseq.checkpoints.hub import Repository, push_folder, resolve_file
from hfseq.errors import CheckpointError
from hfseq.reports.cards import CardContext, CardResult, write_model_card
from tests.support.fake_hub import FakeHub
from tests.support.hub_fixture import FastClock

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    (root / "small").mkdir(parents=True)
    (root / "config.json").write_text('{"model_type": "bert"}')
    (root / "model.safetensors").write_bytes(b"weights" * 1000)
    (root / "small/config.json").write_text('{"model_type": "roberta"}')
    return root


def test_file_of_a_local_directory(model: Path) -> None:
    assert resolve_file(model, "config.json") == str(model / "config.json")
    assert resolve_file(model, "config.json", subfolder="small") == str(model / "small/config.json")
    assert resolve_file(model, "absent.json") is None


def test_file_by_repository_name(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    for name in ("config.json", "model.safetensors"):
        file = resolve_file("user/m", name)
        assert file and Path(file).read_bytes() == (model / name).read_bytes()
    small = resolve_file("user/m", "config.json", subfolder="small")
    assert small and json.loads(Path(small).read_text())["model_type"] == "roberta"
    assert resolve_file("user/m", "absent.json") is None


def test_revision_chooses_the_commit(hub: FakeHub, model: Path) -> None:
    repo = hub.seed("user/m", model)
    first = repo.branches["main"]
    (model / "config.json").write_text("{}")
    push_folder(model, "user/m")
    old, new = (resolve_file("user/m", "config.json", revision=r) for r in (first, "main"))
    assert old and new and Path(old).read_text() != Path(new).read_text() == "{}"


def test_unknown_revision_error_names_it(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    with pytest.raises(CheckpointError, match="no revision 'v9'"):
        resolve_file("user/m", "config.json", revision="v9")


@pytest.mark.parametrize("name", ["user/absent", "absent"])
def test_unknown_repository_error_names_it(hub: FakeHub, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}'.*no such repository"):
        resolve_file(name, "config.json")


PATHS = ["/no/such/dir", "./dir", "../dir", "a/b/c", "~/dir", "C:\\dir", "dir/", "gs://a/b"]
FILES = ["checkpoints/model.pt", "model.bin", "user/model.msgpack", "model.ckpt", "a.safetensors"]


@pytest.mark.parametrize("name", PATHS + FILES)
def test_path_that_is_not_a_directory_never_reaches_the_hub(hub: FakeHub, name: str) -> None:
    path_type = "file" if name in FILES else "directory"
    for find in (lambda: resolve_file(name, "config.json"), lambda: Repository(name)("x")):
        with pytest.raises(CheckpointError) as raised:
            find()
        for part in (f"{path_type} '{name}' does not exist", "output directory of a run"):
            assert part in str(raised.value)
    assert hub.requests == []


MODEL_COMMANDS = (
    *("inspect MODEL", "convert MODEL out", "fill-mask MODEL a<mask>", "generate MODEL a"),
    *("translate MODEL a", "classify MODEL a", "tag MODEL a", "answer MODEL a --context b"),
    *("embed MODEL a", "summarize MODEL a", "plan --config MODEL --devices h200:1"),
    "combine --output_dir o --decoder_model_name_or_path MODEL --encoder_model_name_or_path MODEL",
    "tokenizer --output_dir o --model_type bert --config_name MODEL --train_file words.txt",
    "train mlm --output_dir o --train_file words.txt --model_name_or_path MODEL",
    "train mlm --output_dir o --train_file words.txt --model_type bert --tokenizer_name MODEL",
    "train image_classification --output_dir o --train_dir . --model_name_or_path MODEL",
    "train image_text --output_dir o --train_file words.txt --vision_model_name_or_path MODEL "
    "--text_model_name_or_path MODEL",
)


def test_every_command_names_a_path_that_does_not_exist(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("a b c\n" * 50)
    for command in MODEL_COMMANDS:
        assert cli.main(command.replace("MODEL", "checkpoints/chkpt.pt").split()) in (1, 2), command
        assert "file 'checkpoints/chkpt.pt' does not exist" in capsys.readouterr().err, command
    for load in (
        hfseq.FlaxAutoModel.from_pretrained,
        hfseq.FlaxBertModel.from_pretrained,
        lambda name: hfseq.FlaxAutoModel.from_pretrained(tmp_path, config=name),
        lambda name: hfseq.pipeline("fill-mask", name),
        lambda name: hfseq.pipeline("image-classification", name),
    ):
        with pytest.raises(CheckpointError, match="chkpt.pt' does not exist"):
            load("checkpoints/chkpt.pt")
    assert hub.requests == []
    Path("chkpt.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="chkpt.pt' has a format that hfseq does not read"):
        hfseq.FlaxAutoModel.from_pretrained("chkpt.pt")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret"])
def test_file_outside_the_checkpoint_is_refused(model: Path, file: str) -> None:
    (model.parent / "secret").write_text("x")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        resolve_file(model, file)


def test_private_repository_error_suggests_login(
    hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.seed("user/m", model, private=True)
    assert resolve_file("user/m", "config.json")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CheckpointError, match="hf auth login"):
        resolve_file("user/m", "config.json", force_download=True)


def test_gated_repository_is_explained(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    hub.fail("HEAD", "/resolve/", status=403, headers={"X-Error-Code": "GatedRepo"})
    with pytest.raises(CheckpointError, match="accept its terms"):
        resolve_file("user/m", "config.json")


PASSING_FAULTS = [
    ("HEAD", "/resolve/", {"status": 503, "times": 2}),
    ("GET", "/resolve/", {"status": 503}),
    ("GET", "/lfs/", {"status": 500}),
    ("GET", "/lfs/", {"action": "cut"}),
    ("GET", "/lfs/", {"action": "drop"}),
]


@pytest.mark.parametrize(("method", "path", "how"), PASSING_FAULTS)
def test_passing_fault_is_survived(
    hub: FakeHub, model: Path, no_waiting: FastClock, method: str, path: str, how: dict
) -> None:
    hub.seed("user/m", model)
    fault = hub.fail(method, path, **how)
    for name in ("config.json", "model.safetensors"):
        file = resolve_file("user/m", name)
        assert file and Path(file).read_bytes() == (model / name).read_bytes()
    assert fault.times == 0


def test_unreachable_hub_is_explained_and_the_cache_still_serves(
    hub: FakeHub, model: Path, no_waiting: FastClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.seed("user/m", model)
    cached = resolve_file("user/m", "config.json")
    dead = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", dead)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_file("user/m", "config.json") == cached
    with pytest.raises(CheckpointError, match="no connection to the Hub"):
        resolve_file("user/m", "model.safetensors")


def test_offline_uses_the_cache_and_names_missing_files(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    with pytest.raises(CheckpointError, match="not in the local cache"):
        resolve_file("user/m", "config.json", local_files_only=True)
    cached, num_requests = resolve_file("user/m", "config.json"), len(hub.requests)
    assert resolve_file("user/m", "config.json", local_files_only=True) == cached
    assert resolve_file("user/m", "absent.json", local_files_only=True) is None
    assert len(hub.requests) == num_requests


def downloads(hub: FakeHub) -> list[str]:
    return [request for request in hub.requests if "/resolve/" in request]


@pytest.mark.parametrize("subfolder", ["", "small"])
def test_files_that_the_repository_does_not_list_are_not_requested(
    hub: FakeHub, model: Path, subfolder: str
) -> None:
    hub.seed("user/m", model)
    repository = Repository("user/m", subfolder=subfolder)
    assert repository("flax_model.msgpack") is None and repository("absent.json") is None
    assert downloads(hub) == [] and len(hub.requests) == 1
    config = repository("config.json")
    assert config and Path(config).read_bytes() == (model / subfolder / "config.json").read_bytes()
    assert all("config.json" in request for request in downloads(hub))


def test_headers_of_a_repository_without_safetensors_are_not_requested(
    hub: FakeHub, model: Path
) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    hub.seed("user/m", model)
    assert "has no safetensors file" in read_remote_headers("user/m").problems[0]
    assert downloads(hub) == []


def test_a_cached_file_is_found_without_the_list(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    Repository("user/m")("config.json")
    hub.requests.clear()
    assert Repository("user/m")("config.json")
    assert len(hub.requests) == 1
    num_requests = len(hub.requests)
    offline = Repository("user/m", local_files_only=True)
    assert offline("config.json") and offline("model.safetensors") is None
    assert len(hub.requests) == num_requests


def test_without_the_list_files_are_requested(hub: FakeHub, model: Path) -> None:
    hub.seed("user/m", model)
    hub.fail("GET", "/api/models/", times=9, status=404)
    repository = Repository("user/m")
    assert repository("config.json") and repository("absent.json") is None


def test_an_index_that_names_an_absent_file_is_an_error_without_its_request(
    hub: FakeHub, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.seed("user/m", model)
    with pytest.raises(CheckpointError, match="lists model-00001-of-00001.safetensors, which does"):
        open_checkpoint("user/m", {})
    assert {request.rpartition("/")[2] for request in downloads(hub)} == {
        "model.safetensors.index.json"
    }


@pytest.mark.slow
def test_pushing_and_finding_files_import_neither_torch_nor_jax(hub: FakeHub, model: Path) -> None:
    code = (
        "import sys; from hfseq.checkpoints.hub import push_folder, resolve_file;"
        "push_folder(sys.argv[1], 'user/m'); print(resolve_file('user/m', 'config.json'));"
        "assert not {'torch', 'jax', 'flax', 'transformers'} & set(sys.modules)"
    )
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(model)]
    process = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert Path(process.stdout.strip()).read_text() == (model / "config.json").read_text()


@pytest.fixture
def pushed(hub: FakeHub, tmp_path: Path) -> Path:
    """A tiny BERT with tokenizer and model card, in a directory and on the Hub as user/m."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(vocab_size=5, intermediate_size=8, **size)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "m")
    words = {"[UNK]": 0, "[PAD]": 1, "[MASK]": 2, "ja": 3, "nei": 4}
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(tmp_path / "m")
    result = CardResult("loss", 3.25, "laws")
    context = CardContext("m", "BertForMaskedLM", "bert", eval_results=[result], repo_id="user/m")
    write_model_card(tmp_path / "m", context)
    push_folder(tmp_path / "m", "user/m")
    return tmp_path / "m"


def test_pushed_model_loads_in_transformers_by_name(pushed: Path) -> None:
    import torch
    import transformers

    assert transformers.AutoConfig.from_pretrained("user/m").hidden_size == 8
    assert transformers.AutoTokenizer.from_pretrained("user/m")("nei")["input_ids"] == [4]
    loaded, local = (
        transformers.AutoModelForMaskedLM.from_pretrained(name) for name in ("user/m", pushed)
    )
    pairs = zip(loaded.parameters(), local.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_pushed_card_is_read_from_the_hub(pushed: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load("user/m")
    assert [(r.metric_type, r.metric_value) for r in card.data.eval_results] == [("loss", 3.25)]
    assert card.data.pipeline_tag == "fill-mask"


@pytest.mark.parametrize("framework", ["hfseq", "transformers"])
def test_snippets_of_the_card_run(
    pushed: Path, framework: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snippets = re.findall(r"```python\n(.*?)\n```", (pushed / "README.md").read_text(), re.DOTALL)
    (snippet,) = (s for s in snippets if ("from hfseq" in s) == (framework == "hfseq"))
    exec(snippet, {})
    assert capsys.readouterr().out.strip() in {"[UNK]", "[PAD]", "[MASK]", "ja", "nei"}


@pytest.fixture
def adapter(hub: FakeHub, tmp_path: Path):
    """An adapter and its base model, each in a repository."""
    import hfseq
    from hfseq.modeling.lora import LoraConfig
    from tests.support.models import llama_config

    base = hfseq.FlaxLlamaForCausalLM(llama_config(), seed=1)
    base.save_pretrained(tmp_path / "base")
    hub.seed("user/base", tmp_path / "base")
    adapted = hfseq.FlaxLlamaForCausalLM.from_pretrained(
        "user/base", peft_config=LoraConfig(2, target_modules=("q_proj",))
    )
    adapted.save_pretrained(tmp_path / "adapter")
    hub.seed("user/adapter", tmp_path / "adapter")
    return adapted


def loads_equal(loaded, expected) -> bool:
    from tests.support.models import trees_equal

    return trees_equal(loaded.params, expected.params)


def test_adapter_and_base_model_in_two_repositories(hub, adapter, monkeypatch):
    from huggingface_hub import constants

    import hfseq

    classes = (hfseq.FlaxAutoModelForCausalLM, hfseq.FlaxLlamaForCausalLM)
    for options in ({}, {"revision": "main"}):
        for auto_class in classes:
            assert loads_equal(auto_class.from_pretrained("user/adapter", **options), adapter)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("hfseq.modeling.lora._known_full_models", set())
    for auto_class in classes:
        assert loads_equal(auto_class.from_pretrained("user/adapter"), adapter)
    with pytest.raises(CheckpointError, match="user/other.*not in the local cache"):
        hfseq.FlaxAutoModelForCausalLM.from_pretrained("user/other")


def test_revisions_of_adapter_and_base_model_are_separate(hub, adapter, tmp_path):
    import hfseq
    from tests.support.models import llama_config

    first = hub.repos["models", "user/base"].branches["main"]
    hfseq.FlaxLlamaForCausalLM(llama_config(), seed=2).save_pretrained(tmp_path / "base")
    push_folder(tmp_path / "base", "user/base")
    config_path = tmp_path / "adapter" / "adapter_config.json"
    stored = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(stored | {"revision": first}))
    push_folder(tmp_path / "adapter", "user/adapter", revision="v2")
    auto_class = hfseq.FlaxAutoModelForCausalLM
    assert loads_equal(auto_class.from_pretrained("user/adapter", revision="v2"), adapter)
    assert not loads_equal(auto_class.from_pretrained("user/adapter"), adapter)
    at_revision = hfseq.FlaxLlamaForCausalLM.from_pretrained(
        "user/base", revision=first, peft_config=adapter.peft_config
    )
    assert at_revision.peft_config.revision == first


def test_adapter_in_a_subfolder_of_its_base_model(adapter, tmp_path):
    import shutil

    import hfseq

    root = tmp_path / "base"
    shutil.copytree(tmp_path / "adapter", root / "adapter")
    path = root / "adapter" / "adapter_config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"base_model_name_or_path": str(root)}))
    for auto_class in (hfseq.FlaxAutoModelForCausalLM, hfseq.FlaxLlamaForCausalLM):
        assert loads_equal(auto_class.from_pretrained(root, subfolder="adapter"), adapter)

"""``hfseq prove``: outputs of other programs, each in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types

import numpy as np
import pytest
import transformers

import hfseq
from hfseq import cli, plugins
from hfseq.cli import consumers, prove
from hfseq.modeling.lora import LoraConfig
from hfseq.nn import trees
from tests.support import models, parallel

pytest.importorskip("torch")
#: Native architectures without a PyTorch class, or stored as a stock architecture.
OWN = {"vq_transformer"}
NAMES = sorted(set(plugins.load().architectures) - OWN)


@pytest.fixture
def bert(tmp_path):
    model = hfseq.FlaxBertForMaskedLM(models.bert_config(), seed=1)
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def told(capfd, *arguments):
    code = cli.main(["prove", *map(str, arguments), "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_every_consumer_has_its_function():
    assert tuple(consumers.CONSUMERS) == prove.CONSUMER_NAMES


def test_pytorch_computes_the_same_and_a_difference_is_seen(bert, capfd):
    code, report = told(capfd, bert, "--only", "torch")
    (consumer,) = report["consumers"]
    assert code == 0 and report["model_class"] == "BertForMaskedLM"
    assert consumer["status"] == "equal" and consumer["difference"] < 1e-5
    inputs = prove.make_inputs(prove.load_model(str(bert)))
    right = np.asarray(prove.load_model(str(bert))(**inputs).logits)
    np.savez(bert / "given.npz", **inputs, **{"output:logits": right + 0.01})
    comparison = consumers.main("torch", str(bert), str(bert / "given.npz"))
    assert comparison["difference"] > 1e-3
    comparison = consumers.main("peft", str(bert), str(bert / "given.npz"))
    assert comparison == {"status": "not compared", "detail": "not an adapter"}


@pytest.mark.slow
def test_falcon_with_alibi_is_not_compared_with_eager_attention(tmp_path, capfd):
    changes = {"new_decoder_architecture": False, "parallel_attn": False, "num_kv_heads": 4}
    config = models.falcon_config(**changes, multi_query=False, alibi=True)
    hfseq.FlaxFalconForCausalLM(config, seed=1).save_pretrained(tmp_path)
    code, report = told(capfd, tmp_path, "--only", "torch")
    assert code == 0 and report["consumers"][0]["difference"] < 1e-5


@pytest.mark.slow
def test_accelerate_opens_sharded_weights(bert, tmp_path, capfd):
    pytest.importorskip("accelerate")
    np.savez(bert / "inputs.npz", **{"output:logits": np.zeros(1)})
    comparison = consumers.main("accelerate", str(bert), str(bert / "inputs.npz"))
    assert comparison["detail"] == "the weights are not sharded"
    (bert / "inputs.npz").unlink()
    sharded = tmp_path / "sharded"
    hfseq.FlaxBertForMaskedLM.from_pretrained(bert).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    code, report = told(capfd, sharded, "--only", "accelerate")
    assert code == 0 and report["consumers"][0]["status"] == "equal"


@pytest.mark.parametrize(
    ("server", "module"),
    [
        ("vllm", "vllm.transformers_utils.config"),
        ("sglang", "sglang.srt.utils.hf_transformers_utils"),
    ],
)
def test_servers_read_the_configuration_or_are_absent(bert, monkeypatch, server, module):
    np.savez(bert / "inputs.npz", **{"output:logits": np.zeros(1)})
    arguments = (server, str(bert), str(bert / "inputs.npz"))
    if importlib.util.find_spec(server) is None:
        assert consumers.main(*arguments) == {"status": "absent", "detail": f"no {server}"}
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    config = transformers.BertConfig.from_pretrained(bert)
    reader = lambda folder, trust_remote_code: config  # noqa: E731
    monkeypatch.setattr(sys.modules[module], "get_config", reader, raising=False)
    assert consumers.main(*arguments)["status"] == "not compared"
    config.hidden_size += 1
    refused = consumers.main(*arguments)
    assert refused["status"] == "refused" and "hidden_size" in refused["detail"]


@pytest.mark.slow
def test_a_parameter_that_the_file_lacks_is_not_a_match(bert, capfd):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(bert / "model.safetensors")
    del tensors["bert.encoder.layer.0.output.dense.weight"]
    save_file(tensors, bert / "model.safetensors", {"format": "pt"})
    code, report = told(capfd, bert, "--only", "torch")
    assert report["consumers"][0]["status"] == "refused"
    assert "missing in the file: ['bert.encoder.layer.0" in report["consumers"][0]["detail"]


@pytest.mark.slow
def test_peft_opens_an_adapter(bert, tmp_path, capfd):
    pytest.importorskip("peft")
    config = LoraConfig(2, lora_alpha=8, target_modules=("query",))
    model = hfseq.FlaxBertForMaskedLM.from_pretrained(bert, peft_config=config)
    shaken = {path: leaf + 0.1 for path, leaf in trees.flatten(model.params).items()}
    model.save_pretrained(tmp_path / "adapter", params=trees.unflatten(shaken))
    code, report = told(capfd, tmp_path / "adapter", "--only", "torch", "peft")
    assert code == 0
    assert [consumer["status"] for consumer in report["consumers"]] == ["not compared", "equal"]


@pytest.mark.slow
def test_difference_exits_with_1_and_missing_consumers_are_listed(bert, capfd, monkeypatch):
    monkeypatch.setattr(prove, "TOLERANCE", -1.0)
    code, report = told(capfd, bert, "--only", "torch")
    assert code == 1 and report["consumers"][0]["status"] == "differs"
    assert cli.main(["prove", str(bert), "--python", "/no/such/python"]) == 2
    assert "--python /no/such/python: " in capfd.readouterr().err
    assert cli.main(["prove", "/no/such/model"]) == 1
    assert "'/no/such/model' is not a directory" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pytorch_of_transformers_4_and_5_matches_the_family(name, tmp_path):
    head = parallel.main_head(name)
    params, extra = parallel.variables(name, head)
    parallel.make_model(name, head).save_pretrained(tmp_path, params=params, extra=extra)
    older = [python] if (python := os.environ.get("HFSEQ_TRANSFORMERS_4")) else []
    report = prove.prove(str(tmp_path), ("torch",), older, 300)
    first, *older_results = report["consumers"]
    assert first["status"] == "equal", first
    for other in older_results:  # Transformers 4.57 lacks newer families
        assert other["status"] in ("equal", "not compared", "refused"), other

"""The PyTorch modules of a checkpoint: PyTorch without hfseq loads and saves it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hfseq_plugins.vq_transformer import modeling as torch_twin
from hfseq_plugins.vq_transformer.modeling import (
    FlaxVQTransformerForCausalLM,
    FlaxVQTransformerForSequenceClassification,
    FlaxVQTransformerModel,
)
from tests.plugins.vq_transformer import torch_twins, vq_cases
from tests.plugins.vq_transformer.torch_twins import ids, max_difference, to_state_dict

SIZES = {"num_hidden_layers": 2, "window_size": 3, "head_bias": True}
# Without hfseq and jax: loads all heads, generates, trains one step and saves.
WITHOUT_HFSEQ = """
import json, sys
sys.modules.update(dict.fromkeys(("hfseq", "hfseq_plugins", "jax", "flax")))
import numpy as np, torch, transformers
folder, target = sys.argv[1:]
found = {"classes": []}
for name in ("Model", "ModelForSequenceClassification", "ModelForCausalLM"):
    load = getattr(transformers, "Auto" + name).from_pretrained
    model, info = load(folder, trust_remote_code=True, output_loading_info=True)
    missing = sorted(info["missing_keys"])
    found["classes"].append([type(model).__name__, missing, sorted(info["unexpected_keys"])])
tokens = torch.tensor(np.load(folder + "/tokens.npy")).long()
with torch.no_grad():
    np.save(target + ".npy", model(tokens).logits.numpy())
options = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
found["greedy"] = model.generate(tokens, **options).tolist()
found["beams"] = model.generate(tokens, num_beams=3, **options).tolist()
narrow = load(folder, trust_remote_code=True, dtype=torch.bfloat16)
found["types"] = sorted({str(leaf.dtype) for n, leaf in narrow.named_buffers()})
found["types"] += sorted({str(leaf.dtype) for leaf in narrow.parameters()})
optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
model(tokens, labels=tokens).loss.backward()
optimizer.step()
model.update_codebooks()
model.save_pretrained(target)
again = load(target, trust_remote_code=True)
found["same"] = all(torch.equal(a, b) for a, b in
                    zip(model.state_dict().values(), again.state_dict().values()))
np.savez(target + "/state.npz", **{n: leaf.numpy() for n, leaf in model.state_dict().items()})
print(json.dumps(found))
"""
WITH_HFSEQ = """
import json, sys
import hfseq, numpy as np, torch, transformers
folder = sys.argv[1]
found = []
for options in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, **options)
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    found.append([type(model).__name__, type(config).__name__])
    if isinstance(model, torch.nn.Module):
        tokens = torch.tensor(np.load(folder + "/tokens.npy")).long()
        logits = model(tokens).logits.detach().numpy()
        found[-1].append(float(np.abs(logits - np.load(folder + "/logits.npy")).max()))
        model.save_pretrained(folder + "/again")
        model = hfseq.FlaxAutoModelForCausalLM.from_pretrained(folder + "/again")
        found[-1].append(type(model).__name__)
print(json.dumps(found))
"""


def run_python(script, modules, *arguments):
    """Runs a script in a process that caches remote code in `modules`. Returns its output."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=modules.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def save(folder, head="gqa", **changes):
    """Saves a JAX model with random parameters and its outputs. Returns the model."""
    ours = vq_cases.model(head, **SIZES, **changes)
    params, ours.extra = vq_cases.variables(ours)
    ours.save_pretrained(folder, params=params, extra=ours.extra)
    tokens = ids(2, 13).int().numpy()
    logits = ours(tokens, params=params, extra=ours.extra)[0].logits
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "logits.npy", np.asarray(logits))
    return ours, params


@pytest.fixture(scope="module", params=["shga", pytest.param("mqa", marks=pytest.mark.slow)])
def shipped(request, tmp_path_factory):
    """Returns a JAX checkpoint and the outputs of a Python process without hfseq."""
    folder = tmp_path_factory.mktemp("shipped")
    ours, params = save(folder / "jax", request.param)
    outputs = run_python(WITHOUT_HFSEQ, folder / "modules", folder / "jax", folder / "torch")
    return folder, ours, params, outputs


@pytest.mark.slow
def test_checkpoints_name_their_pytorch_classes(tmp_path):
    ours, _ = save(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["auto_map"] == torch_twin.AUTO_MAP
    assert stored["architectures"] == ["VQTransformerForCausalLM"]
    for name in torch_twin.AUTO_MAP.values():
        module, _, class_name = name.partition(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text()
    assert type(ours.config).__name__ == torch_twin.AUTO_MAP["AutoConfig"].split(".")[1]


def test_shipped_files_need_torch_and_transformers_only():
    for file in torch_twin.TORCH_FILES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 or (torch_twin.TORCH_FILES / f"{node.module}.py").is_file()
                names = [] if node.level else [node.module]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= {"torch", "transformers", *sys.stdlib_module_names}, file.name


@pytest.mark.slow
def test_pytorch_without_hfseq_computes_the_same(shipped):
    folder, ours, params, outputs = shipped
    classes = [(name, missing) for name, missing, _ in outputs["classes"]]
    assert classes == [
        ("VQTransformerModel", []),
        ("VQTransformerForSequenceClassification", ["score.weight"]),
        ("VQTransformerForCausalLM", []),
    ]
    assert outputs["classes"][-1][2] == []
    logits = np.load(folder / "jax" / "logits.npy")
    assert max_difference(np.load(folder / "torch.npy"), logits) <= 1e-5
    assert outputs["types"] == ["torch.float32", "torch.bfloat16"]


@pytest.mark.slow
def test_pytorch_without_hfseq_generates_the_same(shipped):
    folder, ours, params, outputs = shipped
    model = torch_twins.make_torch_model(ours.config, params, ours.extra)
    tokens = torch.from_numpy(np.load(folder / "jax" / "tokens.npy")).long()
    options = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    for name, beams in (("greedy", 1), ("beams", 3)):
        assert model.generate(tokens, num_beams=beams, **options).tolist() == outputs[name]


@pytest.mark.slow
def test_what_pytorch_saves_loads_in_jax(shipped):
    folder, ours, _, outputs = shipped
    assert outputs["same"]
    assert {path.name for path in torch_twin.TORCH_FILES.glob("*_vq_transformer.py")} <= {
        path.name for path in (folder / "torch").iterdir()
    }
    stored = json.loads((folder / "torch" / "config.json").read_text())
    assert stored["auto_map"] == torch_twin.AUTO_MAP
    loaded = FlaxVQTransformerForCausalLM.from_pretrained(folder / "torch")
    theirs = np.load(folder / "torch" / "state.npz")
    for name, leaf in to_state_dict(loaded.params, loaded.extra).items():
        assert np.array_equal(leaf.numpy(), theirs[name]), name
    assert loaded.config.to_diff_dict().keys() == ours.config.to_diff_dict().keys() | {"dtype"}


@pytest.mark.slow
def test_with_hfseq_the_same_call_returns_flax_unless_code_is_trusted(tmp_path):
    save(tmp_path)
    actual = run_python(WITH_HFSEQ, tmp_path / "modules", tmp_path)
    flax = ["FlaxVQTransformerForCausalLM", "VQTransformerConfig"]
    assert actual[0] == actual[2] == flax
    name, _, difference, back = actual[1]
    assert name == "VQTransformerForCausalLM" and difference <= 1e-5
    assert back == "FlaxVQTransformerForCausalLM"


@pytest.mark.parametrize(
    "model_class", [FlaxVQTransformerModel, FlaxVQTransformerForSequenceClassification]
)
def test_other_heads_load_from_jax(model_class, tmp_path):
    from transformers import AutoConfig

    ours = model_class(vq_cases.config("mhga", num_labels=3), _do_init=False)
    params, extra = vq_cases.variables(ours)
    # the base model, which is `model` in the other classes
    if model_class is FlaxVQTransformerModel:
        extra = {"codebook": extra["codebook"]["model"]}
    ours.save_pretrained(tmp_path, params=params, extra=extra)
    theirs = getattr(torch_twins.modeling, model_class.torch_class_name()).from_pretrained(
        tmp_path, config=AutoConfig.from_pretrained(tmp_path)
    )
    tokens = ids(2, 9)
    call = jax.jit(lambda tokens: ours(tokens, params=params, extra=extra)[0][0])
    assert max_difference(theirs(tokens)[0], call(tokens.int().numpy())) <= 1e-5
    theirs.save_pretrained(tmp_path / "torch")
    loaded = model_class.from_pretrained(tmp_path / "torch")
    assert to_state_dict(loaded.params, loaded.extra).keys() == theirs.state_dict().keys()


def test_shipping_keeps_other_files(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    torch_twin.copy_torch_files(tmp_path)
    torch_twin.copy_torch_files(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"README.md", *(p.name for p in Path(torch_twin.TORCH_FILES).glob("*_vq_*.py"))}

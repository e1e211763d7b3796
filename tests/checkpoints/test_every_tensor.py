"""Loading accounts for every tensor of a file: it is read, or a message names it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq import plugins
from hfseq.errors import HfseqError
from hfseq.nn import trees
from tests.support import models
from tests.support.models import rewrite_tensors

#: Families of which the default suite loads one head each, one per kind of model.
ONE_PER_KIND = (
    "FlaxBertForPreTraining",
    "FlaxLlamaForCausalLM",
    "FlaxBartForConditionalGeneration",
    "FlaxResNetForImageClassification",
    "FlaxWhisperForConditionalGeneration",
)


def every_head(per_family: int | None = None) -> list[Any]:
    """Returns a parameter for each family and model class, or for the first ones of a family."""
    cases = []
    for entry in plugins.load().architectures.entries():
        spec, classes = entry.target, set()
        if not hasattr(models, f"{spec.model_type.replace('-', '_')}_config"):
            continue  # a plugin of another test
        for task, target in spec.heads.items():
            if target not in classes and len(classes) != per_family:
                classes.add(target)
                marks = () if target.endswith(ONE_PER_KIND) else pytest.mark.slow
                name = f"{spec.model_type}-{task}"
                cases.append(pytest.param(spec.model_type, task, marks=marks, id=name))
    return cases


def load_class(model_type: str, task: str) -> Any:
    return plugins.load().architectures.get(model_type).load_head(task)


def tiny_config(model_type: str, task: str, **changes: Any) -> Any:
    if task == "ForCausalLM" and model_type not in ("llama",):
        config = getattr(models, f"{model_type.replace('-', '_')}_config")()
        if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
            changes["is_decoder"] = True
    config = getattr(models, f"{model_type.replace('-', '_')}_config")(**changes)
    if hasattr(config, "eos_token_id") and config.eos_token_id is None:
        config.eos_token_id = 2
    return config


def save_fresh(cls: Any, config: Any, folder: Path) -> None:
    """Saves a new model of the PyTorch class, or of hfseq's if there is none."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = cls(config)
    theirs = getattr(transformers, model.torch_class_name(), None)
    if theirs is None or type(config).__module__.startswith("hfseq"):
        model.save_pretrained(folder)
    else:
        theirs(model.config).save_pretrained(folder)


def loaded_values(cls: Any, folder: Path, caplog: Any) -> tuple[dict[Any, np.ndarray], str]:
    """Returns the parameters and collections of a loaded model, and the messages or the error."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hfseq.modeling"):
        try:
            model, params = cls.from_pretrained(folder, _do_init=False)
        except HfseqError as error:
            return {}, str(error)
    leaves = trees.flatten(params) | trees.flatten(model.extra)
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}, caplog.text


def change(path: Path, new_values: dict[str, float]) -> None:
    """Fills some tensors of a file with a value."""
    rewrite_tensors(
        path,
        lambda tensors: {
            name: np.full_like(tensor, new_values[name]) if name in new_values else tensor
            for name, tensor in tensors.items()
        },
    )


@pytest.mark.parametrize(("model_type", "task"), every_head())
def test_each_tensor_of_a_file_is_loaded_or_named(model_type, task, tmp_path, caplog):
    """Each tensor has its own value, which must be in the parameters, or a message names it."""
    cls = load_class(model_type, task)
    save_fresh(cls, tiny_config(model_type, task), tmp_path)
    path = tmp_path / "model.safetensors"
    derived = cls(tiny_config(model_type, task), _do_init=False).derived_weights()
    refused = {name for name, entry in derived.items() if entry.remedy}  # with other values
    names = [name for name in load_file(path) if name not in refused]
    values = {name: number + 2.0 for number, name in enumerate(names)}
    change(path, values)
    leaves, messages = loaded_values(cls, tmp_path, caplog)
    loaded = {value for leaf in leaves.values() for value in np.unique(leaf).tolist()}
    lost = [name for name, value in values.items() if value not in loaded and name not in messages]
    assert leaves and lost == []


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "task"), every_head(per_family=2))
def test_a_change_of_any_tensor_is_loaded_or_named(model_type, task, tmp_path, caplog):
    cls = load_class(model_type, task)
    save_fresh(cls, tiny_config(model_type, task), tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    shutil.copy(path, tmp_path / "original.safetensors")
    before, lost = loaded_values(cls, tmp_path / "saved", caplog)[0], []
    for name in load_file(path):
        change(path, {name: 3.0})
        after, messages = loaded_values(cls, tmp_path / "saved", caplog)
        changed = (k for k, leaf in after.items() if not np.array_equal(leaf, before.get(k)))
        if name not in messages and not any(changed):
            lost.append(name)
        shutil.copy(tmp_path / "original.safetensors", path)
    assert before and lost == []

"""Checkpoints that the Flax classes of Transformers 4.57 wrote (v4_files/make.py) load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import hfseq
from hfseq.nn import trees
from tests.support.tiers import first

FILES = Path(__file__).parent / "v4_files"
NAMES = first(sorted(path.parent.name for path in FILES.glob("*/config.json")), "clip")


def model_class(folder):
    (class_name,) = json.loads((folder / "config.json").read_bytes())["architectures"]
    return getattr(hfseq, f"Flax{class_name}")


def numbers(folder, part):
    from safetensors.numpy import load_file

    stored = load_file(folder / "numbers.safetensors")
    return {k.removeprefix(f"{part}."): v for k, v in stored.items() if k.startswith(f"{part}.")}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_version_4_keeps_its_tree_and_gives_pytorchs_numbers(name, tmp_path, caplog):
    from flax.serialization import msgpack_restore

    folder = FILES / name
    model = model_class(folder).from_pretrained(folder)
    stored = trees.flatten(msgpack_restore((folder / "flax_model.msgpack").read_bytes()))
    ours = trees.flatten(model.params)
    assert {path: leaf.shape for path, leaf in ours.items()} == {
        path: leaf.shape for path, leaf in stored.items()
    }
    assert all(np.array_equal(ours[path], leaf) for path, leaf in stored.items())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for each in (model, again):
        output = jax.jit(each)(**numbers(folder, "input"))
        for key, right in numbers(folder, "output").items():
            actual = np.asarray(output[key])
            assert np.abs(actual - right).max() <= 1e-5 * max(1, np.abs(right).max()), key


PROMPTS = 50
GENERATING = [
    path.parent.name
    for path in sorted(FILES.glob("*/config.json"))
    if re.search(r"For(CausalLM|ConditionalGeneration)", path.read_text())
    if "num_mel_bins" not in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", GENERATING)
def test_fifty_prompts_are_continued_token_for_token_as_by_pytorch(name, search, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    model = model_class(FILES / name).from_pretrained(FILES / name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    theirs = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path)
    random = np.random.default_rng(5)
    tokens, mask = random.integers(5, 46, (PROMPTS, 12)), np.ones((PROMPTS, 12), np.int64)
    is_encoder_decoder = theirs.config.is_encoder_decoder
    for row, length in enumerate(random.integers(3, 13, PROMPTS)):
        mask[row, length:] = 0
    mask = mask if is_encoder_decoder else mask[:, ::-1].copy()
    tokens = np.where(mask, tokens, 1)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 1, **search}
    sequences = model.generate(tokens, attention_mask=mask, **options).sequences
    torch_inputs = torch.from_numpy(tokens), torch.from_numpy(mask)
    right = theirs.generate(torch_inputs[0], attention_mask=torch_inputs[1], **options).numpy()
    assert np.array_equal(sequences[:, : right.shape[1]], right)
    assert (np.asarray(sequences)[:, right.shape[1] :] == 1).all()

"""Tests that every feature of the reference guides has a command and an existing test.

The commands of the guides that train, evaluate or translate are run as they are written.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hfseq.training.arguments import CONFIGS
from tests.support import guides
from tests.support.translators import save_tiny_t5

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
FILES = {path.name: path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
# What no code of ours takes part in: bindings of processes to processors.
OUTSIDE = ("`numactl", "`CUDA_DEVICE_ORDER")


def rows() -> list[list[str]]:
    """Return the cells of each table row: guide, hfseq, test."""
    lines = [line for line in TEXT.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    return [row for row in cells if row[0] != "Guide"]


def test_all_five_documents_have_their_table_and_their_tutorial():
    titles = re.findall(r"^## (.*)", TEXT, flags=re.M)
    assert titles[0] == "Commands" and len(titles) == 6
    tutorials = {path.name for path in (ROOT / "docs" / "tutorials").glob("*.md")}
    tutorials -= {"captioning.md", "transcription.md"}  # which none of them has
    assert set(re.findall(r"\(tutorials/(\w+\.md)\)", TEXT)) == tutorials
    assert len(rows()) > 140


def test_every_feature_names_a_test_that_exists():
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`(\w+\.py)::(test_\w+)`", row[2])
        assert named or row[0].startswith(OUTSIDE), row
        for file, name in named:
            code = FILES[file].read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", code, flags=re.M), (file, name)


def test_every_flag_on_our_side_is_one():
    from hfseq.data.arguments import OBJECTIVES
    from hfseq.training.arguments import (
        ModelArguments,
        ProcessArguments,
        TrainingArguments,
        flag_names,
    )

    known = flag_names((ModelArguments, TrainingArguments, ProcessArguments, *OBJECTIVES.values()))
    # Flags of other programs, and a placeholder.
    known |= {"vocab_size", "vocabulary", "logdir", "time_limit", "NAME"}
    for row in rows():
        used = set(re.findall(r"(?<![\w-])--([a-zA-Z]\w*)", row[1]))
        assert used <= known, (row[1], used - known)


@pytest.mark.parametrize("suffix", ["py", "sh", "yaml"])
def test_every_script_on_our_side_exists(suffix):
    scripts = {path.name for path in (ROOT / "scripts").rglob(f"*.{suffix}")}
    scripts |= {path.name for path in CONFIGS.iterdir()}
    for row in rows():
        named = {Path(name).name for name in re.findall(rf"[\w/-]+\.{suffix}\b", row[1])}
        assert named <= scripts, (row[1], named - scripts)


# -- the commands of the guides


def test_the_table_contains_what_the_commands_answer():
    """`python -m tests.support.guides` writes the table."""
    assert guides.page_with_table(TEXT) == TEXT
    assert all((ROOT / "scripts" / command.script).exists() for command in guides.COMMANDS)
    for command in guides.COMMANDS:
        accepted = command.test != "test_a_command_is_answered_with_flags_of_hfseq"
        assert (guides.answer(command) is None) == accepted, command.text


def one_line(text):
    """Joins continued lines, and leaves out what differs between the processes of a run."""
    text = re.sub(r"\\\n", " ", text)
    return re.sub(r"--process-id \d|(--cpunodebind|--membind)=\d+|&$", "", " ".join(text.split()))


def test_every_command_of_the_guides_is_listed_as_it_is_written(shared):
    folder = shared.parent / "references"
    if not folder.is_dir():
        pytest.skip(f"no guides at {folder}")
    guide = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")))
    listed = [one_line(command.text) for command in guides.COMMANDS]
    for text in (*listed, *(one_line(code) for codes in guides.PYTHON.values() for code in codes)):
        assert text.strip() in one_line(guide), text
    program = r"\b(?:python3?|torchrun|numactl)\s[^'`]*\.py\b[^'`]*"
    for line in re.sub(r"\\\n", " ", guide).splitlines():
        if match := re.search(program, line):
            command_line = one_line(match[0]).rstrip(". ")
            assert any(command_line in command for command in listed), line


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [c for c in guides.COMMANDS if c.test == "test_a_command_is_answered_with_flags_of_hfseq"],
    ids=lambda command: command.line[:60],
)
def test_a_command_is_answered_with_flags_of_hfseq(command, tmp_path):
    from hfseq.training.arguments import (
        ModelArguments,
        ProcessArguments,
        TrainingArguments,
        data_class_of,
        flag_names,
    )

    process = run(command.script, command.flags, tmp_path)
    assert process.returncode == 2 and "Traceback" not in process.stderr
    classes = (ModelArguments, TrainingArguments, ProcessArguments)
    known = flag_names((*classes, data_class_of(command.objective)))
    suggested = guides.suggested_flags(process.stderr)
    assert suggested and {flag[2:] for flag in suggested} <= known


def run(script, flags, folder):
    """Runs a script of hfseq on one device in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    words = [sys.executable, str(ROOT / "scripts" / script), *flags]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def shorten(flags):
    """Returns flags of a command with small batches and four steps."""
    sizes = {"batch_size": 2, "warmup_steps": 1, "gradient_accumulation": 1}
    short = []
    for flag in flags:
        name, _, value = flag.partition("=")
        size = next((size for key, size in sizes.items() if name.endswith(key)), value)
        short.append(f"{name}={size}" if value else name)
    return [*short, "--max_steps=4", "--max_eval_samples=4"]


TINY = {
    "FacebookAI/roberta-base": {
        **{"model_type": "roberta", "hidden_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 514},
        **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    },
    "openai-community/gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2},
        **{"bos_token_id": 50256, "eos_token_id": 50256},
    },
    "google/t5-v1_1-base": {
        **{"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1},
        **{"num_heads": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
    "facebook/bart-base": {
        **{"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32},
        **{"decoder_ffn_dim": 32},
    },
}


def write_oscar(folder, shared):
    """Writes a folder that `datasets` loads under the name of the dataset of the guide."""
    folder.mkdir()
    with (shared / "norwegian-laws" / "valid.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"][:20_000] for line in lines][:8]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: unshuffled_deduplicated_no\n  data_files: train.jsonl\n---\n"
    )


@pytest.fixture
def recipe(shared, hub, tmp_path, monkeypatch):
    """Returns a function that runs a recipe of the guide for language modeling.

    The configuration comes from a fake Hub, and the vocabulary has 1,000 tokens.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    write_oscar(tmp_path / "oscar", shared)

    def run_recipe(name):
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config.json").write_text(json.dumps(TINY[name]))
        hub.seed(name, tmp_path / "source")
        output = re.findall(r'save_pretrained\("\./(.*?)"', guides.PYTHON[name][1])[0]
        Path(output).mkdir()
        names = {}
        for code in guides.PYTHON[name]:
            exec(re.sub(r"\b(50265|50257|32_000)\b", "1000", code), names)
        command = guides.RECIPES[name]
        process = run(command.script, shorten(command.flags), tmp_path)
        assert process.returncode == 0, process.stderr
        return Path(output), process

    return run_recipe


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", guides.RECIPES)
def test_a_recipe_runs_as_written(name, recipe, hub):
    from transformers import AutoConfig, AutoTokenizer

    output, process = recipe(name)
    config, tokenizer = AutoConfig.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    added = {"openai-community/gpt2": 1, "google/t5-v1_1-base": 100}.get(name, 0)
    assert config.vocab_size == 1000 + added == max(tokenizer.get_vocab().values()) + 1
    assert process.stderr.count("increased vocab_size from 1000") == bool(added)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert "integer within the vocabulary" not in process.stderr
    assert {"model.safetensors", "README.md"} <= set(hub.repo(f"user/{output}").at("main").files)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "command",
    [command for command in guides.PYTORCH if command.test.startswith("test_flags_of")],
    ids=lambda command: command.line[:60],
)
def test_flags_of_the_pytorch_scripts_run_as_written(command, recipe, tmp_path):
    output, _ = recipe("FacebookAI/roberta-base")
    flags = [flag.replace("${MODEL_DIR}", str(output)) for flag in command.flags]
    process = run(command.script, shorten(flags), tmp_path)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "runs" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_inference_command_runs_as_written(tmp_path):
    sizes = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32"
    flags = [*guides.BERT.flags, "--config_overrides", sizes, "--num_runs=2"]
    process = run(guides.BERT.script, flags, tmp_path)
    assert process.returncode == 0 and re.search(r"\| bfloat16 \|", process.stdout), process.stderr
    assert "32 x 128 tokens" in process.stderr


@pytest.mark.slow
def test_the_model_of_the_inference_example_loads_as_written(tmp_path, monkeypatch):
    import jax

    from hfseq import FlaxBertModel
    from tests.support.models import bert_config

    monkeypatch.chdir(tmp_path)
    config = bert_config()
    FlaxBertModel(config).save_pretrained("bert-base-uncased")
    names = {"FlaxBertModel": FlaxBertModel, "config": config}
    code = 'model = FlaxBertModel.from_pretrained("bert-base-uncased", config=config, '
    exec(f"import jax\n{code}dtype=jax.numpy.bfloat16)", names)
    assert names["model"](np.ones((1, 3), int)).last_hidden_state.dtype == jax.numpy.bfloat16


@pytest.mark.slow
def test_the_translation_command_runs_as_written(tmp_path):
    """The checkpoint is the output directory of a run."""
    save_tiny_t5(tmp_path / "checkpoints" / "chkpt.pt")
    process = run(guides.TRANSLATE.script, guides.TRANSLATE.flags, tmp_path)
    assert process.returncode == 0, process.stderr

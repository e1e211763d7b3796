"""The wheel in a fresh environment and an empty folder, without PyTorch. Needs a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from tests.support.audio import write_words
from tests.support.images import draw_digits
from tests.test_without_torch import TASKS, save_models_of_all_tasks

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.network, pytest.mark.slow]

SMALL_RUN = (
    "--max_steps 2 --logging_steps 1 --per_device_train_batch_size 4 --report_to jsonl".split()
)
VIT = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,patch_size=8"
WAV2VEC2 = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,"
    "conv_dim=[16,32],conv_stride=[10,10],conv_kernel=[20,10],num_feat_extract_layers=2,"
    "feat_extract_norm=layer,do_stable_layer_norm=true,num_conv_pos_embeddings=8,"
    "num_conv_pos_embedding_groups=2,codevector_dim=16,num_codevectors_per_group=8,"
    "proj_codevector_dim=16,num_negatives=10,mask_time_length=5"
)
#: Beginnings of the names of modules that need an extra when they are imported.
NEED_EXTRAS = ("hfseq.pipelines.lm_eval", "hfseq_plugins.bridge.")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "tests", "__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT, source, ignore=ignored)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    for command in (
        [python, "-m", "pip", "install", "-q", "build"],
        [python, "-m", "build", "-q", "--wheel", "--outdir", folder / "dist", source],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode and "index" in done.stderr + done.stdout:
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    install(folder / "venv", str(wheel))
    return folder / "venv"


def install(environment: Path, *requirements: str) -> None:
    command = [environment / "bin" / "python", "-m", "pip", "install", "-q", *requirements]
    subprocess.run(list(map(str, command)), check=True)


def run(environment: Path, folder: Path, *command: object) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HFSEQ", "HF_"))}
    program = environment / "bin" / str(command[0])
    return subprocess.run(
        [str(program), *map(str, command[1:])],
        cwd=folder,
        env=clean | {"HOME": str(folder / "home"), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )


def check(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_of_the_base_install_imports(environment, tmp_path):
    code = f"""
    import importlib, pkgutil, hfseq, hfseq_plugins
    for package in (hfseq, hfseq_plugins):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.startswith({NEED_EXTRAS!r}) and "torch" not in module.name:
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
    import importlib.util
    extras = ("torch", "soundfile", "shtab")
    print(*(name for name in extras if importlib.util.find_spec(name)))
    """
    assert check(run(environment, tmp_path, "python", "-c", textwrap.dedent(code))).split() == []


def test_missing_extras_are_one_line_with_the_command(environment, tmp_path):
    write_words(tmp_path / "speech", 16)
    flags = ["--config_overrides", WAV2VEC2, "--mask_time_prob", "0.5", *SMALL_RUN]
    flags += ["--train_dir", "speech", "--validation_dir", "speech", "--output_dir", "audio"]
    done = run(environment, tmp_path, "hfseq", "train", "wav2vec2", *flags)
    assert done.returncode == 2 and "pip install 'hfseq[audio]'" in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    done = run(environment, tmp_path, "hfseq", "completion", "bash")
    assert done.returncode == 2 and "pip install 'hfseq[completion]'" in done.stderr


def test_quickstart_and_training_from_python(environment, tmp_path):
    check(run(environment, tmp_path, "hfseq", "quickstart", "--max_steps", "20"))
    folder = tmp_path / "quickstart"
    assert (folder / "model" / "README.md").is_file()
    flags = [
        *("--model_type", "roberta", "--tokenizer_name", folder / "tokenizer"),
        *("--config_overrides", "hidden_size=16,num_hidden_layers=1,num_attention_heads=1"),
        *("--max_seq_length", "32", *SMALL_RUN),
    ]
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:400]))
    (tmp_path / "valid.jsonl").write_text("\n".join(lines[-40:]))
    data = ["--train_file", "train.jsonl", "--validation_file", "valid.jsonl"]
    check(run(environment, tmp_path, "hfseq", "train", "mlm", "--output_dir", "a", *flags, *data))
    named = {str(k)[2:]: str(v) for k, v in zip(flags[::2], flags[1::2], strict=True)}
    code = f"""
    import json, datasets, hfseq
    train, valid = (datasets.Dataset.from_list([json.loads(line) for line in open(name)])
                    for name in ("train.jsonl", "valid.jsonl"))
    flags = {named!r}
    result = hfseq.train("mlm", train_dataset=train, eval_dataset=valid, output_dir="b", **flags)
    print(result.metrics["eval_loss"], type(result.model).__name__)
    """
    loss, name = check(run(environment, tmp_path, "python", "-c", textwrap.dedent(code))).split()[
        -2:
    ]
    rows = [
        [
            line
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
            if "loss" in line
        ]
        for run in "ab"
    ]
    values = [[pick_losses(line) for line in lines] for lines in rows]
    assert values[0] == values[1] and name == "FlaxRobertaForMaskedLM"
    assert float(loss) > 0


def pick_losses(line: str) -> tuple:
    import json

    row = json.loads(line)
    return row["step"], row.get("train_loss"), row.get("eval_loss")


def test_images_and_audio_with_their_extras(environment, tmp_path):
    install(environment, "Pillow", "soundfile", "scipy")
    draw_digits(tmp_path / "digits", 4)
    flags = ["--model_type", "vit", "--image_size", "32", "--config_overrides", VIT, *SMALL_RUN]
    flags += ["--train_dir", "digits", "--validation_dir", "digits", "--output_dir", "vit"]
    check(run(environment, tmp_path, "hfseq", "train", "image_classification", *flags))
    assert (tmp_path / "vit" / "model.safetensors").is_file()
    write_words(tmp_path / "speech", 16)
    flags = ["--config_overrides", WAV2VEC2, "--mask_time_prob", "0.5", *SMALL_RUN]
    flags += ["--max_duration_in_seconds", "0.5", "--min_duration_in_seconds", "0.1"]
    flags += ["--train_dir", "speech", "--validation_dir", "speech", "--output_dir", "audio"]
    check(run(environment, tmp_path, "hfseq", "train", "wav2vec2", *flags))
    assert (tmp_path / "audio" / "model.safetensors").is_file()


def test_every_task_runs_with_the_extras_for_images_and_audio(environment, tmp_path):
    install(environment, "Pillow", "soundfile", "scipy")
    folders = save_models_of_all_tasks(tmp_path)
    output = check(run(environment, tmp_path, "python", "-c", TASKS, *folders))
    assert output.count("ok ") == TASKS.count('    ("')


@pytest.mark.parametrize("unwritable", ["home", "folder"])
def test_read_only_directories_are_one_clear_error_or_none(environment, tmp_path, unwritable):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    folder = tmp_path / unwritable
    folder.mkdir()
    folder.chmod(0o500)
    done = run(environment, tmp_path, "hfseq", "quickstart", "--output_dir", folder / "x")
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr


def test_an_unsupported_python_is_refused_by_pip(environment):
    code = "import importlib.metadata as m; print(m.metadata('hfseq')['Requires-Python'])"
    done = subprocess.run(
        [environment / "bin" / "python", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == ">=3.11" and sys.version_info >= (3, 11)

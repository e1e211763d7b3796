"""A token in the environment of a run does not appear anywhere else, whatever goes wrong."""

from __future__ import annotations

import os
import random
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfseq.errors import redact, redact_private, redact_values
from tests.support import machines

SCRIPT = machines.ROOT / "scripts" / "run_mlm_flax.py"
HUB = "hf_PlantedTokenOfTheHubOf37Characters"
WANDB = "0123456789abcdef" * 2 + "plantedw"
URL = "PlantedInTheUrl"
PLANTED = (HUB, WANDB, URL)
TOKEN = "hf_" + "a1B2" * 9


def environment(folder: Path, **overrides: str) -> dict[str, str]:
    defaults = {
        "HF_TOKEN": HUB,
        "WANDB_API_KEY": WANDB,
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://user:{URL}@127.0.0.1:9",
        "HF_HOME": str(folder / "hf"),
        "HFSEQ_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
        "NO_PROXY": "*",
        "WANDB_DIR": str(folder / "wandb"),
        "WANDB_CACHE_DIR": str(folder / "wandb-cache"),
    }
    (folder / "tmp").mkdir(exist_ok=True)
    return machines.environment(folder / "modules", **defaults | overrides)


def command_lines(parent: int) -> str:
    """The process list entries of a process and its child processes."""
    process_list = subprocess.run(
        ["ps", "-eo", "pid,ppid,args", "ww"], capture_output=True, text=True
    )
    rows = [line.split(None, 2) for line in process_list.stdout.splitlines()[1:]]
    family = {str(parent)}
    for _ in range(4):
        family |= {row[0] for row in rows if row[1] in family}
    return "\n".join(row[2] for row in rows if row[0] in family and len(row) > 2)


def run(command: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    """Returns the exit code, the output, and the process list during the run."""
    process = machines.start([sys.executable, *command], env)
    listed = ""
    while process.poll() is None:
        listed += command_lines(process.pid)
        time.sleep(0.5)
    output, _ = process.communicate()
    return process.returncode, output, listed


def found_in(folder: Path) -> list[str]:
    """The files that contain a planted token, and the token."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [
        f"{path.relative_to(folder)}: {secret}"
        for path in files
        for secret in PLANTED
        if secret.encode() in path.read_bytes() or secret in path.name
    ]


def test_a_run_whose_push_fails_writes_its_token_nowhere(flags, tmp_path):
    pytest.importorskip("wandb")
    (tmp_path / "wandb").mkdir()
    argument_list = [
        *flags(
            report_to=None,
            max_steps=3,
            save_steps=2,
            data_cache_dir=tmp_path / "data",
            hub_model_id="user/tiny",
        ),
        "--push_to_hub",
        "--report_to",
        "tensorboard",
        "jsonl",
        "wandb",
    ]
    code, output, listed = run([str(SCRIPT), *argument_list], environment(tmp_path))
    assert "hfseq push" in output and code == 1, output  # the remaining command
    assert "run_mlm_flax.py" in listed
    for secret in PLANTED:
        assert secret not in output and secret not in listed
    assert {"checkpoints", "runs", "README.md", "metrics.jsonl", "wandb"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    assert found_in(tmp_path) == []


CRASH = f"""
import os
from hfseq import hookimpl

@hookimpl
def register_architectures(register):
    raise RuntimeError("refused with " + os.environ["HF_TOKEN"] + " and http://me:{URL}@host/")
"""


@pytest.mark.slow
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_an_exception_with_a_token_in_it_is_shown_without(flags, tmp_path, debug):
    """Errors of a plugin, of an unreadable URL, and unexpected ones."""
    (tmp_path / "crash.py").write_text(CRASH)
    data = f"https://me:{URL}@127.0.0.1:9/train.jsonl?token={URL}"
    for extra_flags in (
        {"plugin": tmp_path / "crash.py", "model_type": "of-that-plugin"},
        {"train_file": data},
    ):
        _, output, _ = run([str(SCRIPT), *flags(**extra_flags), *debug], environment(tmp_path))
        assert "error: " in output or "Traceback" in output, output
        assert [secret for secret in PLANTED if secret in output] == [], output


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"Bearer {TOKEN}!", "Bearer <token>!"),
        ("https://me:secret@host/a", "https://host/a"),
        ("s3://key:secret@bucket/a b", "s3://bucket/a b"),
        ("http://h/a?x=1&token=abc&y=2", "http://h/a?x=1&token=<token>&y=2"),
        ("https://h/a?X-Amz-Signature=abc'", "https://h/a?X-Amz-Signature=<token>'"),
        ("https://h/a?sig=abc#part", "https://h/a?sig=<token>#part"),
        ("mail me@host or a://b", "mail me@host or a://b"),
        ("--max_tokens=3 tokenizer?top=1", "--max_tokens=3 tokenizer?top=1"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text, redacted):
    assert redact(text) == redacted


def test_the_values_of_secret_variables_are_hidden(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "some-key-of-mine")
    monkeypatch.setenv("HF_TOKEN", "short")  # blanking out such would blank out words
    assert redact("a short text with some-key-of-mine") == "a short text with <token>"
    nested = {"a": ["some-key-of-mine", 3], "b": ("x",)}
    assert redact_values(nested) == {"a": ["<token>", 3], "b": ["x"]}
    assert redact("given: mine", "mine") == "given: <token>"


ALPHANUMERICS = string.ascii_letters + string.digits
# Hypothesis would read all modules of hfseq and of the tests, which takes seconds.
DRAW = random.Random(0)


def piece(characters: str = f"{ALPHANUMERICS}_", shortest: int = 1, longest: int = 40) -> str:
    return "".join(DRAW.choices(characters, k=DRAW.randint(shortest, longest)))


def name() -> str:
    return DRAW.choice(["hf_", ""]) + piece()


def test_a_path_survives_redaction():
    for _ in range(300):
        names = (name() for _ in range(DRAW.randint(2, 4)))
        path = DRAW.choice(["", "/", "~/", "../", "gs://"]) + "/".join(names)
        for text in (path, f"{path}.json", f"--train_file {path}", f"'{path} x'", f"x={path}/"):
            assert redact(text) == text


def test_an_identifier_survives_redaction():
    """Only `hf_` followed by at least 30 letters or digits is a token."""
    for _ in range(300):
        first, second = name(), name()
        for word in (f"{first}_{second}", f"{first}-{second}", f"{first[:29]}.py", f"x_{first}"):
            for text in (word, f"--run_name {word}", f"{{'a': '{word}'}}"):
                if not re.search(r"(?<![\w-])hf_[A-Za-z0-9]{30,}(?![\w-])", word):
                    assert redact(text) == text


def test_no_token_survives_redaction():
    separators = " \t\n'\"=:,;()[]{}<>|"
    starts = [*separators, "--token=", "Bearer ", "https://a/b?x="]
    ends = ["", *separators, *"!?&", ".", ". And", "...", "@host/a"]
    for before in starts:
        for after in ends:
            secret = piece(ALPHANUMERICS, 30, 50)
            redacted = redact(f"some words{before}hf_{secret}{after}")
            assert secret not in redacted and "some words" in redacted


def test_values_of_secret_variables_are_hidden_as_whole_words(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "private")
    for _ in range(300):
        word = f"{piece()}private{piece()}/x"
        assert redact(word) == word
    for text in ("key=private", "private", "'private'", "(private)", "a private."):
        assert "private" not in redact(text)


def test_the_home_directory_is_hidden_where_a_path_begins_with_it(monkeypatch):
    monkeypatch.setenv("HOME", "/root")
    unchanged = "/data/root/a /rooted /root-2/b ./root"
    assert redact_private(unchanged) == unchanged
    assert redact_private("--a /root/a '/root' b=/root:/root.") == "--a ~/a '~' b=~:~."


def test_a_token_among_the_flags_is_refused(flags, tmp_path):
    for token_flags in ([f"--token={HUB}"], ["--hub_token", HUB]):
        process = subprocess.run(
            [sys.executable, str(SCRIPT), *flags(), *token_flags],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.returncode == 2 and HUB not in process.stderr + process.stdout
        assert "HF_TOKEN" in process.stderr

"""Released cards are made from their logs, and a number that is not the log's is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GPT2 = ROOT / "model_cards" / "norwegian-laws-gpt2"


def make_cards(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "make_cards.py"), "--folder", str(folder)]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    shutil.copytree(GPT2, tmp_path / "cards" / "one")
    return tmp_path / "cards"


def test_released_cards_match_their_logs() -> None:
    done = make_cards(ROOT / "model_cards", "--check")
    folders = [path for path in (ROOT / "model_cards").iterdir() if path.is_dir()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == len(folders) >= 9


def test_number_that_differs_from_the_log_is_detected(cards: Path) -> None:
    assert make_cards(cards).returncode == 0
    card = cards / "one" / "README.md"
    card.write_text(card.read_text().replace("| loss | 3.759 |", "| loss | 3.659 |"))
    done = make_cards(cards, "--check")
    assert done.returncode == 1 and "3.659" in done.stdout and "3.759" in done.stdout


@pytest.mark.parametrize("lacks", ["metrics.jsonl", "run.json"])
def test_unfinished_run_is_rejected(cards: Path, tmp_path: Path, lacks: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ({"metrics.jsonl", "run.json"} - {lacks}).pop()).write_text("{}")
    done = make_cards(cards, "--add", str(run), "--name", "two")
    assert done.returncode == 2 and lacks in done.stderr
    assert not (cards / "two").exists()
    done = make_cards(cards, "--add", str(run), "--name", "one")
    assert done.returncode == 2 and "already exists" in done.stderr

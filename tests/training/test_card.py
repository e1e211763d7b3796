"""The model card of a run: sample outputs, license, languages and papers."""

from __future__ import annotations

import re

import pytest
from huggingface_hub import ModelCard


def samples(text: str) -> list[str]:
    """The code blocks in the section on sample outputs."""
    return re.findall(r"```text\n(.*?)\n```", text.partition("## Sample outputs")[2], re.DOTALL)


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param("mlm", marks=pytest.mark.slow),
        "clm",
        pytest.param("span_mlm", marks=pytest.mark.slow),
        pytest.param("denoising", marks=pytest.mark.slow),
    ],
)
def test_card_shows_model_outputs(train, tmp_path, objective):
    train("run", 1, objective, max_steps=2, card_samples=2)
    blocks = samples((tmp_path / "run" / "README.md").read_text())
    assert len(blocks) == 2 and all(block.startswith("> ") for block in blocks)
    prompt, answer = blocks[0].removeprefix("> ").split("\n\n")
    if objective == "mlm":
        assert prompt.count("<mask>") == 1 and len(re.findall(r"\(\d+%\)", answer)) == 3
    if objective == "span_mlm":
        assert "<extra_id_0>" in prompt
    if objective == "denoising":
        assert "<mask>" in prompt


@pytest.mark.slow
def test_a_card_has_licence_languages_and_citation(train, tmp_path):
    train("run", 1, max_steps=2, card_license="apache-2.0", card_language="nb")
    path = tmp_path / "run" / "README.md"
    data = ModelCard.load(path).data
    assert (data.license, data.language) == ("apache-2.0", ["nb"])
    assert "liu2019roberta" in path.read_text() and "Sample outputs" not in path.read_text()


def test_examples_that_fail_do_not_cost_the_card(train, tmp_path, monkeypatch, caplog):
    from hfseq.objectives.mlm import MaskedLM

    def broken(*_):
        raise ValueError("no examples today")

    monkeypatch.setattr(MaskedLM, "samples", broken)
    train("run", 1, card_samples=2)
    assert "no examples today" in caplog.text
    assert "## Training" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.slow
def test_a_run_becomes_a_released_card(train, tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    train("run", 1, max_steps=2, card_language="nb", learning_curve=True)
    script = Path(__file__).resolve().parents[2] / "scripts" / "make_cards.py"
    command = [sys.executable, str(script), "--folder", str(tmp_path / "cards")]
    subprocess.run([*command, "--add", str(tmp_path / "run"), "--name", "one"], check=True)
    subprocess.run([*command, "--check"], check=True)
    card = (tmp_path / "cards" / "one" / "README.md").read_text()
    run_card = (tmp_path / "run" / "README.md").read_text()
    assert card.replace("one", "run") == run_card.replace("one", "run")


@pytest.mark.slow
def test_examples_are_shown_by_the_trackers_too(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("run", 1, max_steps=2, card_samples=2, report_to="tensorboard")
    (folder,) = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("eval_samples")]
    printed = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert printed.startswith("| input | model |") and printed.count("<mask>") == 2

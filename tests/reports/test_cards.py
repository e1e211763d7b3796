"""Model cards: complete, parseable, consistent with the log, never replacing a user's README."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfseq import plugins
from hfseq.reports import cards
from hfseq.reports.cards import (
    MARKER,
    MEDIA,
    CardContext,
    CardDataset,
    CardResult,
    load_training_numbers,
    render_model_card,
    write_model_card,
)

BARE = CardContext("m", "BertModel", "bert")
FULL = CardContext(
    "norwegian-roberta",
    "RobertaForMaskedLM",
    "roberta",
    language="no",
    licence="apache-2.0",
    command="python run_mlm_flax.py --train_file $DATA/laws.txt",
    datasets=[
        CardDataset("laws", files=["$DATA/laws.txt"], documents=1234, tokens=5_678_901),
        CardDataset("wikipedia", config="20231101.no"),
    ],
    tokenizer="byte-level BPE, 8,000 pieces",
    hyperparameters={"learning_rate": 5e-4, "adam_beta1": 0.9, "a|b": "c|d"},
    hardware="2 CPU cores",
    versions={"hfseq": "0.1.0", "jax": "0.10.2"},
    duration_s=3725,
    throughput=12_345.6,
    mfu=0.4321,
    parameters=5_123_456,
    steps=12_000,
    tokens_seen=393_216_000,
    eval_results=[
        CardResult("loss", 3.2015275, "laws"),
        CardResult("accuracy", 0.44, "laws"),
        CardResult("loss", float("nan"), "wikipedia"),
    ],
    curve_file="learning curve.png",
    sample_outputs=[("Loven <mask>.", "gjelder (0.9)")],
    limits="Knows laws only.",
    citation="@article{liu2019roberta}",
    extra_sections=["## Carbon\n\nLittle."],
    repo_id="user/norwegian-roberta",
)


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The only plugin sections are those that a test adds to this list."""
    sections: list[Any] = []

    def call_all(hook: str, context: dict[str, Any]) -> list[Any]:
        assert hook == "model_card_sections"
        return [section(context) for section in sections]

    monkeypatch.setattr(plugins, "load", lambda: SimpleNamespace(call_all=call_all))
    return sections


def test_metadata_parses_as_the_hub_parses_it(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(write_model_card(tmp_path, FULL))
    data = card.data
    assert (data.language, data.license, data.library_name) == ("no", "apache-2.0", "transformers")
    assert data.pipeline_tag == "fill-mask" and data.model_name == "norwegian-roberta"
    assert data.datasets == ["wikipedia"] and data.metrics == ["accuracy", "loss"]
    assert {"jax", "flax", "hfseq", "roberta"} <= set(data.tags)
    results = [(r.metric_type, r.metric_value, r.dataset_name) for r in data.eval_results]
    assert results == [("loss", 3.2015275, "laws"), ("accuracy", 0.44, "laws")]


@pytest.mark.parametrize(
    "text",
    [
        "`RobertaForMaskedLM` with 5.12 million parameters, trained on laws, wikipedia in JAX",
        "| loss | 3.202 | laws | validation |",
        "](learning%20curve.png)",
        "| laws |  | $DATA/laws.txt | 1,234 | 5,678,901 |",
        "| wikipedia | 20231101.no |  |  |  |",
        "byte-level BPE, 8,000 pieces",
        "| Steps | 12,000 |",
        "| Tokens seen | 393,216,000 |",
        "| Training time | 1 h 2 min |",
        "| Throughput | 12,346 tokens/s |",
        "| Model FLOPs utilization | 43.2% |",
        "| Hardware | 2 CPU cores |",
        "| Software | hfseq 0.1.0, jax 0.10.2 |",
        "```bash\npython run_mlm_flax.py --train_file $DATA/laws.txt\n```",
        "| `learning_rate` | 0.0005 |",
        r"| `a\|b` | c\|d |",
        "> Loven <mask>.\n\ngjelder (0.9)",
        "## Carbon\n\nLittle.",
        "## Limitations\n\nKnows laws only.",
        "## License\n\napache-2.0",
        "```bibtex\n@article{liu2019roberta}\n```",
        'FlaxAutoModelForMaskedLM.from_pretrained("user/norwegian-roberta")',
        'AutoModelForMaskedLM.from_pretrained("user/norwegian-roberta")',
    ],
)
def test_card_says(text: str) -> None:
    assert text in render_model_card(FULL)


def test_bare_card_has_no_empty_sections() -> None:
    card = render_model_card(BARE)
    for absent in ("Evaluation", "Sample", "License", "Citation", "command", "None", "| | |", "!["):
        assert absent not in card
    assert "## Limitations" in card and "FlaxAutoModel.from_pretrained" in card
    assert "\n\n\n" not in card


def test_snippets_are_python() -> None:
    heads = ("BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration", "BertForMaskedLM")
    for architecture in (
        *heads,
        "BertForSequenceClassification",
        "BertForMultipleChoice",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
    ):
        card = render_model_card(replace(BARE, architecture=architecture))
        snippets = re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)
        assert len(snippets) == 2
        for snippet in snippets:
            compile(snippet, architecture, "exec")


@pytest.mark.parametrize(
    ("architecture", "task", "pipeline"),
    [
        ("RobertaForMaskedLM", "ForMaskedLM", "fill-mask"),
        ("GPT2LMHeadModel", "ForCausalLM", "text-generation"),
        ("BartForConditionalGeneration", "ForSeq2SeqLM", "translation"),
        ("BertForTokenClassification", "ForTokenClassification", "token-classification"),
        ("BertModel", "", None),
    ],
)
def test_task_follows_from_the_architecture(
    architecture: str, task: str, pipeline: str | None
) -> None:
    context = replace(BARE, architecture=architecture)
    assert context.task == task
    assert (f"pipeline_tag: {pipeline}" in render_model_card(context)) == (pipeline is not None)


def test_what_a_model_is_for_can_be_said_where_its_class_does_not() -> None:
    context = replace(
        BARE, architecture="BartForConditionalGeneration", pipeline_tag="summarization"
    )
    assert "pipeline_tag: summarization" in render_model_card(context)


def test_architecture_without_torch_class_is_honest_about_it() -> None:
    card = render_model_card(replace(FULL, stock=False))
    assert "library_name: hfseq" in card and "no PyTorch class" in card
    assert "from transformers import AutoModelForMaskedLM" not in card


def test_readme_of_the_user_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# my own words")
    assert write_model_card(tmp_path, BARE) == tmp_path / "MODEL_CARD.md"
    assert (tmp_path / "README.md").read_text() == "# my own words"


def test_own_card_is_replaced_until_its_marker_is_removed(tmp_path: Path) -> None:
    path = write_model_card(tmp_path, BARE)
    assert write_model_card(tmp_path, FULL) == path == tmp_path / "README.md"
    assert "norwegian-roberta" in path.read_text()
    path.write_text(path.read_text().replace(MARKER, ""))
    assert write_model_card(tmp_path, BARE).name == "MODEL_CARD.md"
    assert {p.name for p in tmp_path.iterdir()} == {"README.md", "MODEL_CARD.md"}


def test_plugins_add_sections(no_plugins: list[Any]) -> None:
    no_plugins += [lambda context: f"## {context['name']} by a plugin", lambda context: None]
    card = render_model_card(FULL)
    assert card.index("## Carbon") < card.index("## norwegian-roberta by a plugin")
    assert card.index("by a plugin") < card.index("## Limitations")


def test_tokens_and_home_directory_do_not_reach_the_card() -> None:
    token = "hf_" + "a1B2" * 9
    secret = f"--data {Path.home()}/laws.txt --hub_token {token}"
    files = [CardDataset("laws", files=[f"{Path.home()}/laws.txt"])]
    context = replace(FULL, command=secret, hyperparameters={"x": secret}, datasets=files)
    card = render_model_card(context)
    assert token not in card and str(Path.home()) not in card.replace("~", "")
    assert "--data ~/laws.txt" in card


def test_directories_of_this_machine_do_not_reach_the_card() -> None:
    command = (
        "hfseq train mlm --train_file /srv/data/laws.txt --cache_dir=/var/cache/hf https://a/b"
    )
    files = [CardDataset("laws", files=["/srv/data/laws.txt"])]
    values = {"train_file": ["/srv/data/laws.txt"], "ratio": "1/2/3"}
    context = replace(FULL, command=command, hyperparameters=values, datasets=files)
    card = render_model_card(context)
    assert "/srv" not in card and "/var" not in card
    assert "--train_file laws.txt --cache_dir=hf https://a/b" in card and "1/2/3" in card


def test_the_card_of_an_adapter_begins_with_the_adapter() -> None:
    adapter = "LoRA of rank 8 for org/base, 1,000 of 9,000 parameters trained"
    summary = replace(FULL, adapter=adapter, description="", base_model="org/base").summary()
    assert summary.startswith("An adapter for `RobertaForMaskedLM`, fine-tuned from [org/base]")
    assert summary.endswith(f"{adapter}.")


def test_samples_before_training_are_above_those_after_it() -> None:
    text = render_model_card(replace(FULL, first_outputs=["kan (0.4)"]))
    expected = "> Loven <mask>.\n\nBefore training: kan (0.4)\n\nAfter training: gjelder (0.9)\n"
    assert expected in text


def test_text_cannot_break_out_of_its_block() -> None:
    context = replace(FULL, sample_outputs=[("```\n# not a heading\n```", "````")])
    assert "`````text\n> ```\n# not a heading\n```\n\n````\n`````" in render_model_card(context)


@pytest.mark.parametrize("name", ["google-bert/bert-base-cased", "gpt2"])
def test_base_model_of_the_hub_is_linked(name: str) -> None:
    card = render_model_card(replace(FULL, base_model=name))
    assert f"base_model: {name}" in card and f"](https://huggingface.co/{name})" in card


@pytest.mark.parametrize("name", ["/data/me/bert", "./bert", "a/b/c"])
def test_local_base_model_stays_private(name: str) -> None:
    card = render_model_card(replace(FULL, base_model=name))
    assert "base_model" not in card and name not in card


def write_log(path: Path) -> Path:
    records = [
        {"step": 1, "time": 100.0, "train_loss": 9.0, "train_tokens_per_second": 50.0, "mfu": 0.1},
        {"step": 2, "time": 110.0, "train_loss": 8.0, "train_tokens_per_second": 900, "mfu": 0.3},
        {"step": 2, "time": 111.0, "eval_loss": 7.5, "eval_accuracy": 0.25, "eval_runtime": 3.0},
        {"step": 2, "time": 111.0, "text": {"sample": "text"}},
        {"step": 3, "time": 120.0, "train_loss": None, "train_tokens_per_second": 1000.0},
        {"step": 3, "time": 121.0, "eval_loss": 7.75, "eval_accuracy": 0.5, "tokens_seen": 3000},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_numbers_come_from_the_log(tmp_path: Path) -> None:
    numbers = load_training_numbers(write_log(tmp_path / "metrics.jsonl"))
    assert (numbers.steps, numbers.duration_s) == (3, 21.0)
    assert (numbers.best_eval_loss, numbers.best_step) == (7.5, 2)
    assert numbers.last["train_loss"] == 8.0 and numbers.last["eval_loss"] == 7.75
    assert numbers.medians == {"tokens_per_second": 900, "mfu": 0.2}


def test_card_shows_the_numbers_of_the_log(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl")
    context = replace(FULL, duration_s=None).with_log(log, dataset="held-out laws")
    assert context.eval_results == [
        CardResult("loss", 7.75, "held-out laws"),
        CardResult("accuracy", 0.5, "held-out laws"),
    ]
    card = render_model_card(context)
    for text in ("| Steps | 3 |", "| Tokens seen | 3,000 |", "| Training time | 21 s |"):
        assert text in card
    assert "900 tokens/s" in card and "20.0%" in card and "| loss | 7.75 | held-out laws |" in card


def test_a_split_with_data_of_its_own_is_named_by_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl")
    for split, expected in (("validation", "dev.tsv"), ("test", "laws")):
        context = BARE.with_log(log, dataset="laws", split_datasets={split: "dev.tsv"})
        assert {result.dataset for result in context.eval_results} == {expected}


def test_empty_log_leaves_the_card_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    context = BARE.with_log(tmp_path / "metrics.jsonl")
    assert context.steps == 0 and "Evaluation" not in render_model_card(context)


def test_checkpoints_that_bring_their_classes_say_how_pytorch_loads_them():
    card = render_model_card(replace(FULL, stock=False, custom_code=True))
    assert "trust_remote_code=True" in card and "the model code in this repository" in card
    assert "library_name: transformers" in card and "- custom_code" in card


@pytest.mark.parametrize("architecture", MEDIA)
def test_what_reads_pictures_or_sound_is_shown_how_to(architecture):
    for tensors, library in (("np", "hfseq"), ("pt", "transformers")):
        text = cards.snippet("", "mine", tensors, architecture=architecture)
        compile(text, "card", "exec")
        assert f'{"Flax" * (library == "hfseq")}{architecture}.from_pretrained("mine")' in text
        imports = text.partition("processor =")[0]
        assert (f"from hfseq import Flax{architecture}\n" in imports) == (library == "hfseq")
        assert ("tokenizer = " in text) == ("tokenizer" in MEDIA[architecture][1])

#!/usr/bin/env python
"""Write the released model cards, so that no number in them is typed by hand.

    python scripts/make_cards.py            # model_cards/*/README.md
    python scripts/make_cards.py --check    # exit code 1 if one is not what its logs say
    python scripts/make_cards.py --add out --name my-roberta    # a card of the run in out/

A card's folder holds the run's log (`metrics.jsonl`), results and curve, `card.yaml` with what no
log says, and `findings.md`, text that follows the results. Numbers in that text are expressions on
`log` (the last value of every metric), `card` (card.yaml) and its `facts`, and the folder's JSON
files by their names: {{ '%.2f' | format(facts.unigram_entropy - log.eval_loss) }}.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

from hfseq import plugins
from hfseq.errors import UsageError, run_command
from hfseq.reports import cards, plots
from hfseq.training.export import CARD_DATA_FILE

FOLDER = ROOT / "model_cards"
COPIED = (
    *("metrics.jsonl", "eval_results.json", "predict_results.json", "learning_curve.png"),
    "training_args.json",
)


def main() -> int:
    """Write, check or add."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("--add", type=Path, metavar="RUN", help="an output directory of a run")
    parser.add_argument("--name", help="name of the card that is added")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return run_command(lambda: work(options))


def work(options: argparse.Namespace) -> int:
    """Do what the flags say; returns the exit code."""
    if options.add:
        add(options.add, options.folder / (options.name or options.add.resolve().name))
        return 0
    wrong = 0
    for folder in sorted(path.parent for path in options.folder.glob("*/card.yaml")):
        problems = check(folder) if options.check else write(folder)
        wrong += bool(problems)
        print(f"{folder.name}: {'; '.join(problems) or 'ok'}")
    return 1 if wrong else 0


def write(folder: Path) -> list[str]:
    """Write the card of a folder, and draw its curve."""
    facts = yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8")).get("facts", {})
    entropy = facts.get("unigram_entropy")
    lines = {"unigram entropy": entropy} if entropy else {}
    log, picture = folder / "metrics.jsonl", folder / "learning_curve.png"
    plots.learning_curve(log, picture, folder.name, lines)
    (folder / "README.md").write_text(render(folder), encoding="utf-8")
    return []


def check(folder: Path) -> list[str]:
    """Return what is wrong with the card of a folder."""
    from huggingface_hub import ModelCard

    path, problems = folder / "README.md", []
    said = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    due = render(folder).splitlines()
    for number, (there, wanted) in enumerate(zip(said, due, strict=False), 1):
        if there != wanted:
            problems.append(f"README.md:{number} says {there!r}, its sources say {wanted!r}")
            break
    else:
        if len(said) != len(due):
            problems.append(f"README.md has {len(said)} lines, its sources make {len(due)}")
    last = last_values(folder)
    for name in ("eval_results.json", "predict_results.json"):
        for metric, value in read_json(folder / name).items():
            if metric in last and value != last[metric]:
                problems.append(f"{name}: {metric} is {value}, the log says {last[metric]}")
    if not problems and not ModelCard(path.read_text(encoding="utf-8")).data.eval_results:
        problems.append("README.md has no results in its metadata")
    if not (folder / "learning_curve.png").exists():
        problems.append("there is no learning_curve.png")
    return problems


def render(folder: Path) -> str:
    """Return the card of a folder."""
    said = yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8"))
    facts, judged = said.pop("facts", {}), said.pop("judged_on", {})
    spec = plugins.load().architectures.get(said["model_type"])
    context = cards.CardContext(
        model_name=folder.name,
        datasets=[cards.CardDataset(**data) for data in said.pop("datasets")],
        command="\n".join(said.pop("commands")),
        findings=findings(folder, facts, said),
        curve_file="learning_curve.png",
        about=spec.card or "",
        citation=spec.citation,
        **said,
    )
    return cards.render_model_card(
        context.with_log(folder / "metrics.jsonl", split_datasets=judged)
    )


def findings(folder: Path, facts: dict[str, Any], said: dict[str, Any]) -> str:
    """Return the text that follows the results, its numbers filled in."""
    path = folder / "findings.md"
    if not path.exists():
        return ""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701
    known = {file.stem: read_json(file) for file in folder.glob("*.json")}
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return template.render(log=last_values(folder), facts=facts, card=said, **known).strip()


def last_values(folder: Path) -> dict[str, Any]:
    """Return the last value of every metric in the log."""
    return dict(cards.load_training_numbers(folder / "metrics.jsonl").last)


def read_json(path: Path) -> Any:
    """Read a JSON file; without one, nothing is known."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(run: Path, folder: Path) -> None:
    """Copy a run's log and results into a new card's folder, and write what else is known."""
    if folder.exists():
        raise UsageError(f"{folder} exists already: give another --name")
    for name in ("metrics.jsonl", CARD_DATA_FILE):
        if not (run / name).exists():
            raise UsageError(
                f"{run} has no {name}: give the output directory of a finished training"
            )
    folder.mkdir(parents=True)
    for name in COPIED:
        if (run / name).exists():
            shutil.copy2(run / name, folder / name)
    said = read_json(run / CARD_DATA_FILE)
    said["commands"] = [said.pop("command")]
    (folder / "card.yaml").write_text(
        yaml.safe_dump(said, allow_unicode=True, sort_keys=False, width=100), encoding="utf-8"
    )
    (folder / "findings.md").write_text("", encoding="utf-8")
    write(folder)
    print(f"wrote {folder}; complete card.yaml and findings.md, then run this without --add")


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Write the model cards of recorded runs from their logs.

    python scripts/make_cards.py            # model_cards/*/README.md
    python scripts/make_cards.py --check    # exit code 1 if a card differs from its logs
    python scripts/make_cards.py --add out --name my-roberta    # add a card for the run in out/

The directory of a card contains the log (`metrics.jsonl`), results and curve of the run,
`card.yaml` with the data that is not in the log, and `findings.md`, the text after the results.
Numbers in `findings.md` are Jinja expressions, such as
{{ '%.2f' | format(facts.unigram_entropy - log.eval_loss) }}. They can use `log` (the last value of
every metric), `card` (the contents of card.yaml), `facts` (the entry of that name in card.yaml),
and the JSON files of the directory by their names without the extension.
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

CARDS_FOLDER = ROOT / "model_cards"
COPIED_FILES = (
    *("metrics.jsonl", "eval_results.json", "predict_results.json", "learning_curve.png"),
    "training_args.json",
)


def main() -> int:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, compare the cards with their logs"
    )
    parser.add_argument("--add", type=Path, metavar="RUN", help="output directory of a run to add")
    parser.add_argument("--name", help="name of the added card (default: name of the directory)")
    parser.add_argument("--folder", type=Path, default=CARDS_FOLDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Run the requested action and return the exit code."""
    if options.add:
        add(options.add, options.folder / (options.name or options.add.resolve().name))
        return 0
    failures = 0
    for folder in sorted(path.parent for path in options.folder.glob("*/card.yaml")):
        problems = check(folder) if options.check else write(folder)
        failures += bool(problems)
        print(f"{folder.name}: {'; '.join(problems) or 'ok'}")
    return 1 if failures else 0


def write(folder: Path) -> list[str]:
    """Write the card of a directory and plot its learning curve."""
    facts = yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8")).get("facts", {})
    entropy = facts.get("unigram_entropy")
    lines = {"unigram entropy": entropy} if entropy else {}
    log, curve_path = folder / "metrics.jsonl", folder / "learning_curve.png"
    plots.learning_curve(log, curve_path, folder.name, lines)
    (folder / "README.md").write_text(render(folder), encoding="utf-8")
    return []


def check(folder: Path) -> list[str]:
    """Return the problems of the card of a directory."""
    from huggingface_hub import ModelCard

    path, problems = folder / "README.md", []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    expected_lines = render(folder).splitlines()
    for number, (line, expected) in enumerate(zip(lines, expected_lines, strict=False), 1):
        if line != expected:
            problems.append(f"README.md:{number} is {line!r}, expected {expected!r}")
            break
    else:
        if len(lines) != len(expected_lines):
            problems.append(f"README.md has {len(lines)} lines, expected {len(expected_lines)}")
    last = last_values(folder)
    for name in ("eval_results.json", "predict_results.json"):
        for metric, value in read_json(folder / name).items():
            if metric in last and value != last[metric]:
                problems.append(f"{name}: {metric} is {value}, but {last[metric]} in the log")
    if not problems and not ModelCard(path.read_text(encoding="utf-8")).data.eval_results:
        problems.append("README.md has no results in its metadata")
    if not (folder / "learning_curve.png").exists():
        problems.append("learning_curve.png is missing")
    return problems


def render(folder: Path) -> str:
    """Render the card of a directory."""
    card = yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8"))
    facts, split_datasets = card.pop("facts", {}), card.pop("judged_on", {})
    spec = plugins.load().architectures.get(card["model_type"])
    context = cards.CardContext(
        model_name=folder.name,
        datasets=[cards.CardDataset(**data) for data in card.pop("datasets")],
        command="\n".join(card.pop("commands")),
        findings=findings(folder, facts, card),
        curve_file="learning_curve.png",
        about=spec.card or "",
        citation=spec.citation,
        **card,
    )
    return cards.render_model_card(
        context.with_log(folder / "metrics.jsonl", split_datasets=split_datasets)
    )


def findings(folder: Path, facts: dict[str, Any], card: dict[str, Any]) -> str:
    """Render findings.md, the text after the results."""
    path = folder / "findings.md"
    if not path.exists():
        return ""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701
    json_files = {file.stem: read_json(file) for file in folder.glob("*.json")}
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return template.render(log=last_values(folder), facts=facts, card=card, **json_files).strip()


def last_values(folder: Path) -> dict[str, Any]:
    """Return the last value of every metric in the log."""
    return dict(cards.load_training_numbers(folder / "metrics.jsonl").last)


def read_json(path: Path) -> Any:
    """Read a JSON file. Returns an empty dict if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(run: Path, folder: Path) -> None:
    """Create the directory of a new card from the output directory of a run."""
    if folder.exists():
        raise UsageError(f"{folder} already exists; use another --name")
    for name in ("metrics.jsonl", CARD_DATA_FILE):
        if not (run / name).exists():
            raise UsageError(
                f"{run} contains no {name}; use the output directory of a finished training run"
            )
    folder.mkdir(parents=True)
    for name in COPIED_FILES:
        if (run / name).exists():
            shutil.copy2(run / name, folder / name)
    card = read_json(run / CARD_DATA_FILE)
    card["commands"] = [card.pop("command")]
    (folder / "card.yaml").write_text(
        yaml.safe_dump(card, allow_unicode=True, sort_keys=False, width=100), encoding="utf-8"
    )
    (folder / "findings.md").write_text("", encoding="utf-8")
    write(folder)
    print(f"wrote {folder}; complete card.yaml and findings.md, then run this script without --add")


if __name__ == "__main__":
    sys.exit(main())

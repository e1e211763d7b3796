#!/usr/bin/env python
"""Write what the documentation says about the code: table of architectures, list of flags.

python scripts/make_docs.py           # README.md between its markers, docs/flags.md
python scripts/make_docs.py --check   # exit code 1 if a file is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- architectures: scripts/make_docs.py -->", "<!-- /architectures -->"

# The first flag of each group of flags, in the order of the dataclasses.
MODEL = {"model_name_or_path": "Model"}
DATA = {
    "dataset_name": "Sources",
    "max_seq_length": "Rows and masks",
    "preprocessing_num_workers": "Tokenising",
}
TRAINING = {
    "output_dir": "Run",
    "per_device_train_batch_size": "Batch",
    "learning_rate": "Optimizer",
    "num_train_epochs": "Duration, logging, evaluation, checkpoints",
    "seed": "Machine",
    "report_to": "Reports",
    "push_to_hub": "Hub",
    "plugin": "Plugins and errors",
}

FLAGS = """# Flags

<!-- Written by scripts/make_docs.py: change the dataclasses, not this file. -->

`--help` of each script prints the same. A flag may be written with underscores or dashes; a switch
needs no value (`--do_train`) but takes one (`--do_train False`), and a switch that is on is turned
off by `--no_…` too. A flag with … takes several values, separated by spaces.

A YAML or JSON file may come first, flags after it override it
([argument files](training.md#argument-files)).

## run_mlm_flax.py

{mlm}
## train_tokenizer.py

It takes the flags below, and of `run_mlm_flax.py` those of [Sources](#sources).

{tokenizer}"""


def architectures() -> str:
    """Return the table of registered architectures."""
    from hfseq import plugins
    from hfseq.registry import target_name

    lines = ["| Model type | Tasks | Classes |", "|---|---|---|"]
    for entry in plugins.load().architectures.entries():
        heads = entry.target.heads
        base = target_name(heads["Model"])
        tasks = ", ".join(_words(task) for task in heads if task != "Model")
        lines.append(f"| `{entry.name}` | {tasks} | `{base}`, `{base.removesuffix('Model')}For…` |")
    return "\n".join(lines)


def _words(task: str) -> str:
    words = re.findall("[A-Z][a-z]+|[A-Z]+", task.removeprefix("For"))
    text = " ".join(word if word.isupper() else word.lower() for word in words)
    return text.replace("pre training", "pretraining")


def flags() -> str:
    """Return docs/flags.md."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from train_tokenizer import TokenizerArguments

    from hfseq.data.arguments import DataArguments
    from hfseq.training.arguments import ModelArguments, TrainingArguments

    parts = ((ModelArguments, MODEL), (DataArguments, DATA), (TrainingArguments, TRAINING))
    mlm = "\n".join(_tables(part, titles) for part, titles in parts)
    return FLAGS.format(mlm=mlm, tokenizer=_tables(TokenizerArguments, {}))


def _tables(part: type, titles: dict[str, str]) -> str:
    hints = typing.get_type_hints(part)
    titles, lines = dict(titles), []
    if not titles:
        lines += _head()
    for field in dataclasses.fields(part):
        if title := titles.pop(field.name, None):
            lines += ["" if lines else None, f"### {title}", "", *_head()]
        lines.append(_row(field, hints[field.name]))
    assert not titles, f"no such flags: {titles}"
    return "\n".join(line for line in lines if line is not None) + "\n"


def _head() -> list[str]:
    return ["| Flag | Default | Meaning |", "|---|---|---|"]


def _row(field: dataclasses.Field, hint: Any) -> str:
    kinds = {kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)}
    several = typing.get_origin(hint) is list or any(typing.get_origin(k) is list for k in kinds)
    value = {int: " N", float: " X"}.get(next(iter(kinds)), "")
    if bool in kinds and len(typing.get_args(hint)) < 2:
        value = ""
    shown = f"`--{field.name}{value}{' …' if several else ''}`"
    text = field.metadata["help"].replace("|", "\\|")
    return f"| {shown} | {_default(field)} | {text} |"


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    if field.name == "output_dir":
        return "required"
    value = field.default
    if value is dataclasses.MISSING:
        value = field.default_factory()
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{' '.join(value) if isinstance(value, list) else value}`"


def documents() -> dict[Path, str]:
    """Return the text that each generated file should have."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    table = f"{BEGIN}\n\n{architectures()}\n\n{END}"
    return {ROOT / "README.md": before + table + after, ROOT / "docs" / "flags.md": flags()}


def main(check: bool) -> int:
    """Write the files, or with ``check`` say which are not current."""
    stale = []
    for path, text in documents().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'not current, run python scripts/make_docs.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    sys.exit(main(parser.parse_args().check))

#!/usr/bin/env python
"""Write what the documentation says about the code: architectures, their classes, flags.

python scripts/make_docs.py           # docs/flags.md; between markers: README.md, other pages
python scripts/make_docs.py --check   # exit code 1 if a file is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Container
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BEGIN, END = "<!-- architectures: scripts/make_docs.py -->", "<!-- /architectures -->"
BEGIN_OPTIONS, END_OPTIONS = "<!-- options: scripts/make_docs.py -->", "<!-- /options -->"
BEGIN_CLASSES, END_CLASSES = "<!-- classes: scripts/make_docs.py -->", "<!-- /classes -->"

# The first flag of each group of flags, in the order of the dataclasses.
MODEL = {"model_name_or_path": "Model"}
DATA = {
    "dataset_name": "Sources",
    "max_seq_length": "Rows",
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
PROCESSES = {"distributed": "Several processes"}
SCRIPTS = {
    "run_mlm_flax.py": "mlm",
    "run_clm_flax.py": "clm",
    "run_t5_mlm_flax.py": "span_mlm",
    "run_bart_dlm_flax.py": "denoising",
    "run_translation_flax.py": "translation",
    "run_classification_flax.py": "classification",
}

FLAGS = """# Flags

<!-- Written by scripts/make_docs.py: change the dataclasses, not this file. -->

`--help` of each script prints the same. A flag may be written with underscores or dashes; a switch
needs no value (`--do_train`) but takes one (`--do_train False`), and a switch that is on is turned
off by `--no_…` too. A flag with … takes several values, separated by spaces.

A YAML or JSON file may come first, flags after it override it
([argument files](training.md#argument-files)).

## Every training script

{shared}
{scripts}
## run_bert_flax.py

It trains nothing, and takes these alone:

{inference}
## train_tokenizer.py

It takes the flags below, and of the training scripts those of [Sources](#sources).

{tokenizer}"""


def architectures() -> str:
    """Return the table of registered architectures."""
    lines = ["| Model type | Tasks | Classes |", "|---|---|---|"]
    for spec in _specs():
        tasks = ", ".join(_words(task) for task in spec.heads if task != "Model")
        page = f"docs/families/{spec.plugin}.md"
        name = f"`{spec.model_type}`"
        shown = f"[{name}]({page})" if (ROOT / page).exists() else name
        lines.append(f"| {shown} | {tasks} | {', '.join(_short(spec))} |")
    return "\n".join(lines)


def _specs() -> list[Any]:
    from hfseq import plugins

    return [entry.target for entry in plugins.load().architectures.entries()]


def _short(spec: Any) -> list[str]:
    """Name the classes; more than three heads of one stem together."""
    from hfseq.plugins.registry import target_name

    names = [kind.__name__ for kind in _tasks(spec)]
    stem = f"{target_name(spec.heads['Model']).removesuffix('Model')}For"
    alike = [name for name in names if name.startswith(stem)]
    if len(alike) > 3:
        names = [name for name in names if name not in alike] + [f"{stem}…"]
    return [f"`{name}`" for name in names]


def classes(page: str) -> str:
    """Return the table of the public classes of the plugin that has this page."""
    from hfseq.plugins import TASKS

    specs = [spec for spec in _specs() if spec.plugin == page]
    found: dict[type, list[str]] = {}
    for spec in specs:
        for kind, tasks in _tasks(spec).items():
            found.setdefault(kind, []).extend(tasks)
    lines = ["| Class | Suffix of `FlaxAutoModel` | What it is |", "|---|---|---|"]
    for kind, tasks in found.items():
        loaded = [task for task in tasks if task in TASKS]
        suffixes = ", ".join(f"`{task}`" if task != "Model" else "none" for task in loaded)
        text = kind.__doc__.splitlines()[0].rstrip(".").replace("``", "`")
        lines.append(f"| `{kind.__name__}` | {suffixes or '–'} | {text} |")
    return "\n".join(lines)


def _tasks(spec: Any) -> dict[type, list[str]]:
    """Return the public classes of an architecture, each with the tasks it is registered for."""
    tasks: dict[type, list[str]] = {}
    for task in spec.heads:
        tasks.setdefault(spec.load_head(task), []).append(task)
    home = vars(sys.modules[spec.load_head("Model").__module__])
    others = [kind for kind in home.values() if _is_model(kind, home["__name__"])]
    return {kind: tasks.get(kind, []) for kind in [*tasks, *others]}


def _is_model(kind: Any, module: str) -> bool:
    if not isinstance(kind, type) or kind.__module__ != module:
        return False
    return getattr(kind, "module_class", None) is not None and hasattr(kind, "from_pretrained")


def _words(task: str) -> str:
    words = re.findall("[A-Z][a-z]+|[A-Z]+", task.removeprefix("For"))
    text = " ".join(word if word.isupper() else word.lower() for word in words)
    return text.replace("pre training", "pretraining").replace("seq seq LM", "sequence to sequence")


def flags() -> str:
    """Return docs/flags.md."""
    sys.path[:0] = [str(HERE), str(HERE / "benchmarks")]
    from inference import InferenceArguments
    from train_tokenizer import TokenizerArguments

    from hfseq.data.arguments import OBJECTIVES, TextArguments
    from hfseq.training.arguments import ModelArguments, ProcessArguments, TrainingArguments

    parts = (
        (ModelArguments, MODEL), (TextArguments, DATA), (TrainingArguments, TRAINING),
        (ProcessArguments, PROCESSES),
    )  # fmt: skip
    shared = "\n".join(_tables(part, titles) for part, titles in parts)
    common = {field.name for field in dataclasses.fields(TextArguments)}
    scripts = "\n".join(
        f"## {script}\n\nBeside those of [every training script](#every-training-script):\n\n"
        + _tables(OBJECTIVES[objective], {}, leave_out=common)
        for script, objective in SCRIPTS.items()
    )
    own = {
        "inference": _tables(InferenceArguments, {}),
        "tokenizer": _tables(TokenizerArguments, {}),
    }
    return FLAGS.format(shared=shared, scripts=scripts, **own)


def _tables(part: type, titles: dict[str, str], leave_out: Container[str] = ()) -> str:
    hints = typing.get_type_hints(part)
    titles, lines = dict(titles), []
    if not titles:
        lines += _head()
    for field in dataclasses.fields(part):
        if field.name in leave_out:
            continue
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
    from hfseq.generation.options import documentation

    readme, generation = ROOT / "README.md", ROOT / "docs" / "generation.md"
    found = {
        readme: _between(readme, BEGIN, END, architectures()),
        generation: _between(generation, BEGIN_OPTIONS, END_OPTIONS, documentation()),
    }
    for page in sorted((ROOT / "docs" / "families").glob("*.md")):
        found[page] = _between(page, BEGIN_CLASSES, END_CLASSES, classes(page.stem))
    return found | {ROOT / "docs" / "flags.md": flags()}


def _between(path: Path, begin: str, end: str, table: str) -> str:
    """Return the text of ``path`` with ``table`` between its two markers."""
    before, rest = path.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


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

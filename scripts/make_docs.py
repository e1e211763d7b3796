#!/usr/bin/env python
"""Write the generated parts of the documentation: families, their classes, flags.

python scripts/make_docs.py           # write docs/{flags,families,flax_classes}.md and the
                                      # generated parts of README.md and other pages
python scripts/make_docs.py --check   # write nothing; exit code 1 if a file is not up to date
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

# Titles of the groups of flags. The keys are the first flag of each group, in the order in which
# the dataclasses define the flags.
MODEL = {"model_name_or_path": "Model"}
DATA = {
    "teacher": "Distillation",
    "dataset_name": "Sources",
    "max_seq_length": "Rows",
    "preprocessing_num_workers": "Tokenization",
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
    "run_sft_flax.py": "sft",
    "run_dpo_flax.py": "dpo",
    "run_kto_flax.py": "kto",
    "run_orpo_flax.py": "orpo",
    "run_cpo_flax.py": "cpo",
    "run_reward_flax.py": "reward",
    "run_embedding_flax.py": "embedding",
    "run_cross_encoder_flax.py": "cross_encoder",
    "run_sparse_encoder_flax.py": "sparse_encoder",
    "run_multi_vector_flax.py": "multi_vector",
    "run_translation_flax.py": "translation",
    "run_classification_flax.py": "classification",
    "run_ner_flax.py": "token_classification",
    "run_qa_flax.py": "question_answering",
    "run_summarization_flax.py": "summarization",
    "run_image_classification_flax.py": "image_classification",
    "run_clip_flax.py": "image_text",
    "run_image_captioning_flax.py": "image_to_text",
    "run_wav2vec2_pretrain_flax.py": "wav2vec2",
    "run_speech_recognition_ctc_flax.py": "ctc",
    "run_speech_recognition_flax.py": "speech_recognition",
}

FLAGS = """# Flags

<!-- Written by scripts/make_docs.py: change the dataclasses, not this file. -->

`--help` of each script prints the same text. Flags accept underscores and dashes. A boolean flag
needs no value (`--do_train`) but accepts one (`--do_train False`). If it is on by
default, `--no_NAME` turns the flag `--NAME` off. In the tables, a flag whose name is followed by
three dots (`--train_file …`) accepts several values, separated by spaces.

The first argument may be a YAML or JSON file. Flags after it override its values
([argument files](training.md#argument-files)).

## All training scripts

{shared}
{scripts}
## run_bert_flax.py

This script runs inference only. It accepts these flags and no others:

{inference}
## train_tokenizer.py

This script accepts the flags below and those of [Sources](#sources).

{tokenizer}"""


GALLERY = """# Families

<!-- Written by scripts/make_docs.py from the registry: change the plugins, not this file. -->

Each family is a plugin in `plugins/hfseq_plugins/` and has a page on its options, training and
known issues. The families cover {count} model types. To look up a Flax class of Transformers 4,
see [the list of these classes](flax_classes.md). To add an architecture, write
[a model class](model_class.md) in one file.

In the table, *Origin* is the paper or repository of the family, *PyTorch* is the PyTorch class of
Transformers that loads the same checkpoints, *Scripts* are the hfseq scripts for which the page of
the family shows a command, and *Since* is the hfseq version that added the family.

{table}

```{{toctree}}
:hidden:

{pages}
```
"""

FLAX_CLASSES = """# Flax classes of Transformers 4

<!-- Written by scripts/make_docs.py from the registry. -->

Transformers 4.57 exported {count} Flax classes: the classes of {families} families and the Auto
classes. hfseq provides {here} of them. Import them from `hfseq`. After `import hfseq.v4`, they are
also available at [their Transformers 4 paths](migration.md#the-old-import-paths).

In the table, *Since* is the hfseq version that added the class, and the last column is the PyTorch
class of Transformers 5 that loads the same checkpoints.

{table}
"""

#: The PyTorch class of each Flax class whose name is not "Flax" and the name of the PyTorch class.
#: None: PyTorch has no such class.
TORCH_NAMES = {
    "FlaxAutoModelForVision2Seq": "AutoModelForImageTextToText",
    "FlaxBartDecoderPreTrainedModel": None,
    "FlaxBertForCausalLM": "BertLMHeadModel",
    "FlaxCLIPTextPreTrainedModel": None,
    "FlaxCLIPVisionPreTrainedModel": None,
}


#: Rows of the table in README.md, in order.
MODALITIES = (
    "Text encoders",
    "Text decoders",
    "Text encoder-decoders",
    "Images",
    "Images and text",
    "Audio",
)


def _plugins() -> dict[str, list[Any]]:
    """Return the architectures of each plugin that has a page, sorted by the page's title."""
    specs: dict[str, list[Any]] = {}
    for spec in _specs():
        if (ROOT / "docs" / "families" / f"{spec.plugin}.md").exists():
            specs.setdefault(spec.plugin, []).append(spec)
    return dict(sorted(specs.items(), key=lambda item: _title(item[0]).lower()))


def _title(plugin: str) -> str:
    page = ROOT / "docs" / "families" / f"{plugin}.md"
    return page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def architectures() -> str:
    """Return the README's table of families by modality."""
    links: dict[str, list[str]] = {modality: [] for modality in MODALITIES}
    for plugin, specs in _plugins().items():
        links[_modality(specs[0])].append(f"[{_title(plugin)}](docs/families/{plugin}.md)")
    rows = [f"| {modality} | {', '.join(names)} |" for modality, names in links.items() if names]
    return "\n".join(["| Modality | Families |", "|---|---|", *rows])


def _modality(spec: Any) -> str:
    """Return the modality of a family, which selects its row in the README's table."""
    model_class = _main_class(spec)
    if hasattr(model_class, "get_image_features") or "ForVision2Seq" in spec.heads:
        return "Images and text"
    if model_class.main_input_name == "pixel_values":
        return "Images"
    if model_class.main_input_name != "input_ids":
        return "Audio"
    if "ForSeq2SeqLM" in spec.heads:
        return "Text encoder-decoders"
    return "Text encoders" if "ForMaskedLM" in spec.heads else "Text decoders"


def families() -> str:
    """Return docs/families.md."""
    from hfseq.plugins import TASKS

    versions = _versions(ROOT / "docs" / "families.md")
    lines = ["| Family | Model types | Tasks | Origin | PyTorch | Scripts | Since |"]
    lines.append("|---|---|---|---|---|---|---|")
    for plugin, specs in _plugins().items():
        text = (ROOT / "docs" / "families" / f"{plugin}.md").read_text(encoding="utf-8")
        name = f"[{_title(plugin)}](families/{plugin}.md)"
        types = ", ".join(f"`{spec.model_type}`" for spec in specs)
        heads = dict.fromkeys(task for spec in specs for task in spec.heads)
        tasks = [_words(task) for task in heads if task in TASKS and task != "Model"]
        scripts = sorted(set(re.findall(r"scripts/(run_\w+)_flax\.py", text)))
        cells = [
            name,
            types,
            ", ".join(tasks) or "feature extraction",
            _origin(specs[0].citation),
            _torch_class(specs[0]),
            ", ".join(f"`{script}`" for script in scripts) or "–",
            versions.get(name, _version()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    pages = "\n".join(f"families/{plugin}" for plugin in _plugins())
    return GALLERY.format(count=len(_specs()), table="\n".join(lines), pages=pages)


def _origin(citation: str) -> str:
    """Return the first author, the year and the address of a BibTeX entry."""
    fields = {
        field: re.search(rf"^\s*{field}\s*=\s*[{{\"](.*)", citation, flags=re.M)
        for field in ("author", "year", "url")
    }
    author, year, url = (match[1].strip() if match else "" for match in fields.values())
    author = re.sub(r"\\\W|[{}]", "", re.split(r",| and ", author)[0])
    text = f"{author} {year[:4]}".strip()
    address = re.match(r"[^}\"]+", url)
    return f"[{text}]({address[0]})" if address else text or "–"


def _main_class(spec: Any) -> Any:
    """Return the model class without a head, or the first class if all classes have heads."""
    return spec.load_head("Model" if "Model" in spec.heads else next(iter(spec.heads)))


def _torch_class(spec: Any) -> str:
    if str(spec.config).startswith("transformers:"):
        return f"`{_main_class(spec).torch_class_name()}`"
    return "see its page"


def flax_classes() -> str:
    """Return docs/flax_classes.md."""
    import hfseq
    from hfseq.v4 import paths

    versions = _versions(ROOT / "docs" / "flax_classes.md")
    pages = {plugin: f"[{plugin}](families/{plugin}.md)" for plugin in _plugins()}
    lines = ["| Name | Family | Since | PyTorch class |", "|---|---|---|---|"]
    names = paths.flax_classes()
    available = [name for name in names if hasattr(hfseq, name)]
    for name, family in names.items():
        since = versions.get(f"`{name}`", "").removeprefix("not yet") or _version()
        torch_name = TORCH_NAMES.get(name, name.removeprefix("Flax"))
        cells = [
            f"`{name}`",
            pages.get(family, family),
            since if name in available else "not yet",
            f"`{torch_name}`" if torch_name else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return FLAX_CLASSES.format(
        count=len(names),
        families=len({*names.values()} - {"auto"}),
        here=len(available),
        table="\n".join(lines),
    )


def _version() -> str:
    from hfseq.plugins import __version__

    return __version__


def _versions(page: Path) -> dict[str, str]:
    """Return the versions in the "Since" column of a page by the first cell of the row.

    A page that is generated again keeps these versions.
    """
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    column = next((i for i, cell in enumerate(rows[0]) if "ince" in cell), 0) if rows else 0
    return {row[0]: row[column] for row in rows[1:]}


def _specs() -> list[Any]:
    from hfseq import plugins

    return [entry.target for entry in plugins.load().architectures.entries()]


def classes(page: str) -> str:
    """Return the table of the public classes of the plugin that has this page."""
    from hfseq.plugins import TASKS

    tasks_of_class: dict[type, list[str]] = {}
    for spec in (spec for spec in _specs() if spec.plugin == page):
        for model_class, tasks in _tasks(spec).items():
            tasks_of_class.setdefault(model_class, []).extend(tasks)
    lines = ["| Class | Suffix of `FlaxAutoModel` | Description |", "|---|---|---|"]
    for model_class, tasks in tasks_of_class.items():
        suffixes = [f"`{task}`" if task != "Model" else "none" for task in tasks if task in TASKS]
        text = model_class.__doc__.splitlines()[0].rstrip(".").replace("``", "`")
        lines.append(f"| `{model_class.__name__}` | {', '.join(suffixes) or '–'} | {text} |")
    return "\n".join(lines)


def _tasks(spec: Any) -> dict[type, list[str]]:
    """Return the public classes of an architecture, each with the tasks it is registered for."""
    tasks: dict[type, list[str]] = {}
    for task in spec.heads:
        tasks.setdefault(spec.load_head(task), []).append(task)
    module = vars(sys.modules[spec.load_head(next(iter(spec.heads))).__module__])
    classes = [value for value in module.values() if _is_model_class(value, module["__name__"])]
    return {model_class: tasks.get(model_class, []) for model_class in [*tasks, *classes]}


def _is_model_class(value: Any, module: str) -> bool:
    if not isinstance(value, type) or value.__module__ != module:
        return False
    return getattr(value, "module_class", None) is not None and hasattr(value, "from_pretrained")


#: Descriptions of tasks, where they differ from the words in the suffix of the Auto class.
_TASK_WORDS = {
    "pre training": "pretraining",
    "seq seq LM": "sequence to sequence",
    "speech seq seq": "speech to text",
    "vision seq": "image to text",
}


def _words(task: str) -> str:
    words = re.findall("[A-Z][a-z]+|[A-Z]+", task.removeprefix("For"))
    text = " ".join(word if word.isupper() else word.lower() for word in words)
    return _TASK_WORDS.get(text, text)


def flags() -> str:
    """Return docs/flags.md."""
    sys.path[:0] = [str(HERE), str(HERE / "benchmarks")]
    from inference import InferenceArguments

    from hfseq.cli.tokenizer import TokenizerArguments
    from hfseq.data.arguments import OBJECTIVES, TextArguments
    from hfseq.training.arguments import ModelArguments, ProcessArguments, TrainingArguments

    parts = (
        (ModelArguments, MODEL),
        (TextArguments, DATA),
        (TrainingArguments, TRAINING),
        (ProcessArguments, PROCESSES),
    )
    shared = "\n".join(_tables(part, titles) for part, titles in parts)
    common = {field.name for field in dataclasses.fields(TextArguments)}
    scripts = "\n".join(
        f"## {script}\n\nIn addition to the flags of [all training scripts]"
        "(#all-training-scripts), this script accepts the following flags."
        + "".join(f" `--{name}` defaults to `{value}`." for name, value in defaults.items())
        + "\n\n"
        + _tables(OBJECTIVES[objective], {}, leave_out=common)
        for script, objective in SCRIPTS.items()
        for defaults in [OBJECTIVES[objective].defaults]
    )
    return FLAGS.format(
        shared=shared,
        scripts=scripts,
        inference=_tables(InferenceArguments, {}),
        tokenizer=_tables(TokenizerArguments, {}),
    )


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
    types = {option for option in typing.get_args(hint) or (hint,) if option is not type(None)}
    is_list = typing.get_origin(hint) is list or any(
        typing.get_origin(option) is list for option in types
    )
    value = {int: " N", float: " X"}.get(next(iter(types)), "")
    if bool in types and len(typing.get_args(hint)) < 2:
        value = ""
    flag = f"`--{field.name}{value}{' …' if is_list else ''}`"
    text = field.metadata["help"].replace("|", "\\|")
    return f"| {flag} | {_default(field)} | {text} |"


def _default(field: dataclasses.Field) -> str:
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or field.name == "output_dir":
        return "required"
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{' '.join(value) if isinstance(value, list) else value}`"


def documents() -> dict[Path, str]:
    """Return the expected text of each generated file."""
    from hfseq.generation.options import options_table

    readme, generation = ROOT / "README.md", ROOT / "docs" / "generation.md"
    texts = {
        readme: _between(readme, BEGIN, END, architectures()),
        generation: _between(generation, BEGIN_OPTIONS, END_OPTIONS, options_table()),
    }
    for page in sorted((ROOT / "docs" / "families").glob("*.md")):
        texts[page] = _between(page, BEGIN_CLASSES, END_CLASSES, classes(page.stem))
    docs = ROOT / "docs"
    return texts | {
        docs / "flags.md": flags(),
        docs / "families.md": families(),
        docs / "flax_classes.md": flax_classes(),
    }


def _between(path: Path, begin: str, end: str, table: str) -> str:
    """Return the text of `path` with `table` between the two markers."""
    prefix, suffix = path.read_text(encoding="utf-8").split(begin)
    return f"{prefix}{begin}\n\n{table}\n\n{end}{suffix.split(end)[1]}"


def main(check: bool) -> int:
    """Write the files, or with `check` list those that are not up to date."""
    stale = []
    for path, text in documents().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(
            f"{path}: {'not up to date: run python scripts/make_docs.py' if check else 'written'}"
        )
    return int(check and bool(stale))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="List stale files and write nothing.")
    sys.exit(main(parser.parse_args().check))

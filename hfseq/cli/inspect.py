"""One report on a checkpoint: what it is, what takes it, what it holds, what is wrong with it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfseq import errors, plugins
from hfseq.checkpoints import config as resolve
from hfseq.checkpoints import headers
from hfseq.checkpoints.headers import NUMPY, read_header
from hfseq.checkpoints.weights import FLOATING
from hfseq.cli import convert
from hfseq.cli.text import paint, width
from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.modeling import auto
from hfseq.plugins import ArchitectureSpec
from hfseq.plugins.registry import auto_class_name

Fetch = Callable[[str], str | None]


PLAIN_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


FP8 = "fp8_params.safetensors"


def read_json(fetch: Fetch, name: str, problems: list[str]) -> dict[str, Any]:
    """Return a JSON object, or nothing; what is wrong with it is noted."""
    path = fetch(name)
    if path is None:
        return {}
    try:
        found = errors.parse_json(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        problems.append(f"{name} cannot be read: {first_line(error)}")
        return {}
    return found


def tokenizer(fetch: Fetch, problems: list[str]) -> dict[str, Any] | None:
    """Return the kind, size and largest id of the tokenizer; None where there is none."""
    settings = read_json(fetch, "tokenizer_config.json", problems)
    found: dict[str, Any] = {"class": settings.get("tokenizer_class"), "file": None}
    ids: list[int] = []
    if (path := fetch("tokenizer.json")) is not None:
        found["file"] = "tokenizer.json"
        ids = _fast(path, problems)
    else:
        name = next((name for name in PLAIN_VOCABULARIES if fetch(name)), None)
        if name is None:
            return None
        found["file"], ids = name, _plain(Path(str(fetch(name))), problems)
    added = settings.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        ids += [int(number) for number in added if str(number).isdecimal()]
    if ids:
        found |= {"entries": len(set(ids)), "largest_id": max(ids)}
    return found


def _fast(path: str, problems: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    try:
        return list(Tokenizer.from_file(path).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the library raises bare Exceptions
        problems.append(f"tokenizer.json cannot be read: {first_line(error)}")
        return []


def _plain(path: Path, problems: list[str]) -> list[int]:
    try:
        if path.suffix == ".json":
            return [int(number) for number in errors.parse_json(path.read_bytes()).values()]
        if path.suffix == ".txt":
            return list(range(path.read_text("utf-8").count("\n")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(f"{path.name} cannot be read: {first_line(error)}")
    return []


def generation(fetch: Fetch, problems: list[str]) -> dict[str, Any] | None:
    """Return what generation_config.json sets; None where there is none."""
    if fetch("generation_config.json") is None:
        return None
    found = read_json(fetch, "generation_config.json", problems)
    hidden = ("transformers_version", "_from_model_config")
    return {name: value for name, value in found.items() if name not in hidden}


def fp8(fetch: Fetch) -> dict[str, Any] | None:
    """Return what the file of FP8 scales says; None where there is none."""
    path = fetch(FP8)
    if path is None:
        return None
    header = read_header(path)
    return {
        "file": FP8,
        "recipe": header.metadata.get("recipe"),
        "variables": len(header.tensors),
        "problems": header.problems,
    }


def training(folder: Path) -> dict[str, Any] | None:
    """Return the steps of training checkpoints and the last logged step; None where no run was."""
    steps = sorted(
        int(entry.name)
        for entry in (folder / "checkpoints").glob("*")
        if entry.name.isdecimal() and entry.is_dir()
    )
    log = folder / "metrics.jsonl"
    if not steps and not log.is_file():
        return None
    found: dict[str, Any] = {"checkpoints": steps}
    if log.is_file():
        from hfseq.reports.log import read_metrics

        records = read_metrics(log)
        found["logged_step"] = max((record["step"] for record in records), default=None)
    return found


#: Tables with a row for each token, by PyTorch's and by Flax's names.
EMBEDDINGS = re.compile(
    r"(^|\.)(word_embeddings|wte|shared|embed_tokens|token_embedding)\.(weight|embedding)$"
)


def inspect_checkpoint(
    name: str, *, names: bool = True, read_values: bool = False
) -> dict[str, Any]:
    """Return what is known of a directory, a Hub name or a weight file beside its config.json.

    ``names`` compares the names with those of the model's class, for which jax starts; without it
    only headers are read. ``read_values`` looks for NaN and infinities, reading everything. The
    report is made of JSON's types; ``problems`` is a list of sentences.
    """
    source = auto.Source.of(name)
    folder = Path(source.place) if Path(source.place).is_dir() else None
    fetch = resolve.fetcher(source.place, {})
    problems: list[str] = []
    stored = read_json(fetch, "config.json", problems)
    if fetch("config.json") is None:
        problems.append("no config.json")
    elif not problems and auto.model_type(stored) is None:
        problems.append("config.json names no model_type")
    if folder is None:
        weights = headers.remote_weights(source.place)
    else:
        only = Path(source.file).name if source.file else None
        weights = headers.local_weights(folder, only)
    problems += weights.problems
    report = {
        "source": name,
        **_architecture(stored, problems),
        "parameters": _parameters(weights),
        "files": [
            {"name": h.file, "bytes": h.size, "tensors": len(h.tensors)} for h in weights.headers
        ],
        "not_read": weights.others,
        "tokenizer": tokenizer(fetch, problems),
        "embedding_rows": _embedding_rows(weights),
        "generation": generation(fetch, problems),
        "fp8": fp8(fetch),
        "training": None if folder is None else training(folder),
    }
    problems += (report["fp8"] or {}).get("problems", [])
    _check_vocabulary(report, stored, problems)
    if names and weights.headers and report["plugin"]:
        report["names"] = _compare_names(source.place, stored, weights, problems)
    if read_values:
        report["not_finite"] = _not_finite(weights, problems)
    return {**report, "problems": problems}


def _architecture(stored: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    kind, twin = auto.model_type(stored), stored.get("model_type")
    found: dict[str, Any] = {
        "model_type": kind,
        "stored_as": twin if twin != kind else None,
        "architectures": stored.get("architectures"),
        "plugin": None,
        "jax_classes": [],
        "pytorch_classes": [],
    }
    registry = plugins.load().architectures
    if kind is not None and kind not in registry:
        found["pytorch_classes"] = _torch_classes(stored, None)
        known = ", ".join(sorted(registry))
        problems.append(f"no plugin has the model type '{kind}': hfseq loads {known}")
    elif kind is not None:
        spec: ArchitectureSpec = registry.get(str(kind))
        found["plugin"] = spec.plugin
        found["jax_classes"] = _jax_classes(spec)
        stock = registry.get(str(twin)) if twin in registry else None
        found["pytorch_classes"] = _torch_classes(stored, stock)
    return found


def _jax_classes(spec: ArchitectureSpec) -> list[str]:
    return [f"Flax{auto_class_name(task)}" for task in spec.heads]


def _torch_classes(stored: dict[str, Any], spec: ArchitectureSpec | None) -> list[str]:
    """Return the classes of PyTorch that load it, without importing Transformers."""
    custom = stored.get("auto_map")
    if isinstance(custom, dict):
        return [f"{name} (trust_remote_code=True)" for name in custom if "Model" in name]
    stock = importlib.util.find_spec("transformers")
    folders = (stock.submodule_search_locations or []) if stock else []
    kind = re.sub(r"\W", "_", str(stored.get("model_type")))
    if not any((Path(folder) / "models" / kind).is_dir() for folder in folders):
        return []
    if spec is None:
        return [str(name) for name in stored.get("architectures") or ()]
    return [auto_class_name(task) for task in spec.heads]


def _parameters(weights: headers.Weights) -> dict[str, Any]:
    types = headers.totals(weights)
    counts = {
        name: entry.count
        for name, (_, entry) in weights.entries.items()
        if NUMPY.get(entry.code) in FLOATING or entry.code not in NUMPY
    }
    return {"total": sum(counts.values()), "modules": _by_module(counts), "dtypes": types}


def _by_module(counts: dict[str, int], depth: int = 1) -> dict[str, int]:
    """Sum by the first component of names, and by two where one holds more than half of all."""
    groups: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        head = ".".join(name.split(".")[:-1][:depth]) or name
        groups.setdefault(head, {})[name] = count
    found: dict[str, int] = {}
    for head, part in groups.items():
        large = depth == 1 and 2 * sum(part.values()) > sum(counts.values())
        found |= _by_module(part, 2) if large else {head: sum(part.values())}
    return found


def _embedding_rows(weights: headers.Weights) -> dict[str, int]:
    return {
        name: entry.shape[0]
        for name, (_, entry) in weights.entries.items()
        if EMBEDDINGS.search(name) and len(entry.shape) == 2
    }


def _check_vocabulary(report: dict[str, Any], stored: dict[str, Any], problems: list[str]) -> None:
    largest = (report["tokenizer"] or {}).get("largest_id")
    for name, rows in report["embedding_rows"].items():
        if largest is not None and largest >= rows:
            problems.append(f"the tokenizer's largest id is {largest}, but {name} has {rows} rows")
        size = stored.get("vocab_size")
        if isinstance(size, int) and size != rows:
            problems.append(f"config.json says vocab_size {size}, but {name} has {rows} rows")


def _compare_names(
    place: str, stored: dict[str, Any], weights: headers.Weights, problems: list[str]
) -> dict[str, Any] | None:
    """Compare the names of the files with those of the class that config.json names."""
    tensors = weights.tensors()
    try:
        cls = auto.find_class(stored, place)
        config, _ = resolve.load_config(cls, place, None, {}, {})
        try:
            options = cls.checkpoint_options(tensors)
        except headers.NotHere:
            options = {}
        model = cls(config, _do_init=False, **options)
    except (HfseqError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"its class cannot be made: {first_line(error)}")
        return None
    _, report = model.file_map.match(tensors, native=weights.native)
    problems += convert.problems(model, report)
    tied = _tied(model, set(tensors))
    return {"class": cls.__name__, "missing": len(report.missing),
            "unexpected": len(report.unexpected), "tied": tied}  # fmt: skip


def _tied(model: Any, names: set[str]) -> dict[str, str]:
    """Return names of PyTorch's that are not stored, with the tensor that each repeats."""
    kind = type(model).__name__
    writes = model.can_generate() or "LM" in kind or "PreTraining" in kind
    return {
        alias: name
        for alias, name in model.file_map.aliases.items()
        # The table lists the heads of all classes of a family.
        if alias not in names and (writes or ".embed" in alias)
    }


def _not_finite(weights: headers.Weights, problems: list[str]) -> dict[str, int]:
    """Count NaN and infinities in every tensor of floating numbers."""
    if weights.folder is None:
        raise UsageError("--values needs the weights here: download the model first")
    found = {}
    for name, (header, entry) in weights.entries.items():
        if NUMPY.get(entry.code) not in FLOATING or header.problems:
            continue
        count = _count_not_finite(headers.values(weights.folder, header, entry))
        if count:
            found[name] = count
            problems.append(f"{name} holds {count:,} values that are NaN or infinite")
    return found


def _count_not_finite(values: np.ndarray) -> int:
    flat, size = values.reshape(-1), 1 << 22
    pieces = (flat[i : i + size] for i in range(0, len(flat), size))
    return sum(int((~np.isfinite(piece.astype(np.float32))).sum()) for piece in pieces)


EXAMPLES = """hfseq inspect my-roberta
hfseq inspect my-roberta --values
hfseq inspect FacebookAI/roberta-base --headers_only --json"""


SHOWN = 12


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "model", metavar="DIR", help="directory, Hub name, or a weight file beside its config.json"
    )
    parser.add_argument(
        "--headers_only", action="store_true",
        help="do not compare names with the model's class, for which jax has to start",
    )  # fmt: skip
    parser.add_argument(
        "--values", action="store_true", help="read all weights and look for NaN and infinities"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the report; exit code 1 where something is wrong."""
    from hfseq import plugins

    plugins.load(arguments.plugin)
    if not arguments.headers_only:
        import jax

        # Nothing here is for an accelerator, and none is to be taken from those who use it.
        jax.config.update("jax_platforms", "cpu")

    report = inspect_checkpoint(
        arguments.model, names=not arguments.headers_only, read_values=arguments.values
    )
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))
    return 1 if report["problems"] else 0


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for label, value in _rows(report):
        first, *more = (value or ["none"]) if isinstance(value, list) else [value]
        yield f"{label:15}{first}"
        yield from (f"{'':15}{line}" for line in more)
    for problem in report["problems"][:SHOWN]:
        yield f"{paint('problem'.ljust(15), 'red')}{problem}"
    if len(report["problems"]) > SHOWN:
        yield f"{'':15}and {len(report['problems']) - SHOWN} more (--json lists them)"
    if not report["problems"]:
        yield paint("no problem found", "green")


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kind = report["model_type"] or "unknown"
    stored = f", stored as {report['stored_as']}" if report["stored_as"] else ""
    plugin = f" (plugin {report['plugin']})" if report["plugin"] else ""
    yield "model type", f"{kind}{stored}{plugin}"
    if report["architectures"]:
        yield "architecture", ", ".join(map(str, report["architectures"]))
    yield from _weights(report)
    for label, name in (("JAX", "jax_classes"), ("PyTorch", "pytorch_classes")):
        names = ", ".join(report[name]) or "no class"
        yield label, textwrap.wrap(names, width() - 15, break_on_hyphens=False)
    yield from _beside(report)


def _weights(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    parameters = report["parameters"]
    if report["files"]:
        yield "parameters", f"{parameters['total']:,}"
        modules = sorted(parameters["modules"].items(), key=lambda item: -item[1])
        rows = [f"{count:>13,}  {name}" for name, count in modules[:SHOWN]]
        rest = sum(count for _, count in modules[SHOWN:])
        yield "", rows + ([f"{rest:>13,}  {len(modules) - SHOWN} more"] if rest else [])
        yield (
            "types",
            [
                f"{code}: {row['tensors']} tensors, {row['bytes']:,} bytes"
                for code, row in parameters["dtypes"].items()
            ],
        )
        yield (
            "files",
            [
                f"{file['name']}: {file['tensors']} tensors, {file['bytes']:,} bytes"
                for file in report["files"]
            ],
        )
    if report["not_read"]:
        yield "not read", ", ".join(report["not_read"])
    for alias, name in ((report.get("names") or {}).get("tied") or {}).items():
        yield "tied", f"{alias} = {name}"


def _beside(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    tokenizer = report["tokenizer"]
    if tokenizer is None:
        yield "tokenizer", "none"
    else:
        kind = tokenizer["class"] or tokenizer["file"]
        size = f", {tokenizer['entries']:,} entries" if "entries" in tokenizer else ""
        rows = sorted(set(report["embedding_rows"].values()))
        yield "tokenizer", f"{kind}{size}" + "".join(f", {n:,} embedding rows" for n in rows)
    if report["generation"]:
        options = ", ".join(f"{name}={value}" for name, value in report["generation"].items())
        yield "generation", textwrap.wrap(options, width() - 15, break_on_hyphens=False)
    if report["fp8"]:
        yield "FP8 scales", f"{report['fp8']['variables']} variables of {report['fp8']['recipe']}"
    if run := report["training"]:
        steps = ", ".join(map(str, run["checkpoints"])) or "none"
        logged = run.get("logged_step")
        yield "checkpoints", f"{steps}" + (f" (logged up to step {logged})" if logged else "")

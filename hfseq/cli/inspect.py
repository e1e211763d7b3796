"""``hfseq inspect``: what a checkpoint is, what loads it, what it holds, what is wrong with it."""

from __future__ import annotations

import argparse
import importlib.util
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hfseq import plugins
from hfseq.cli.convert import build_abstract_model, use_cpu
from hfseq.cli.convert import describe_mismatches as misfits
from hfseq.cli.text import add_json, colorize, print_json, terminal_width
from hfseq.errors import HfseqError, UsageError, first_line, parse_json
from hfseq.plugins.registry import (
    TASKS,
    ArchitectureSpec,
    auto_class_name,
    target_name,
    torch_auto_class_name,
)

EXAMPLES = """hfseq inspect my-roberta
hfseq inspect my-roberta --values
hfseq inspect FacebookAI/roberta-base --headers_only --json"""

#: Problems, and modules, that are listed before the rest is counted.
MAX_LISTED = 12

PLAIN_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")

FP8 = "fp8_params.safetensors"

#: Tables with a row for each token, by PyTorch's and by Flax's names.
EMBEDDINGS = re.compile(
    r"(^|\.)(word_embeddings|wte|shared|embed_tokens|token_embedding)\.(weight|embedding)$"
)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq inspect``."""
    parser.add_argument(
        "model", metavar="DIR", help="directory, Hub name, or a weight file beside its config.json"
    )
    parser.add_argument(
        "--headers_only",
        action="store_true",
        help="do not compare names with the model's class, for which jax has to start",
    )
    parser.add_argument(
        "--values", action="store_true", help="read all weights and look for NaN and infinities"
    )
    add_json(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print the report; exit code 1 where something is wrong."""
    plugins.load(arguments.plugin)
    if not arguments.headers_only:
        use_cpu()
    report = inspect_checkpoint(
        arguments.model, names=not arguments.headers_only, read_values=arguments.values
    )
    problems = report["problems"]
    if arguments.json:
        print_json(report)
        return 1 if problems else 0
    for label, value in _rows(report):
        first, *more = (value or ["none"]) if isinstance(value, list) else [value]
        print("\n".join([f"{label:15}{first}", *(f"{'':15}{line}" for line in more)]))
    for problem in problems[:MAX_LISTED]:
        print(f"{colorize('problem'.ljust(15), 'red')}{problem}")
    if len(problems) > MAX_LISTED:
        print(f"{'':15}and {len(problems) - MAX_LISTED} more (--json lists them)")
    if not problems:
        print(colorize("no problem found", "green"))
    return 1 if problems else 0


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """Yield what is known by its label; a list has a line for each of its texts."""

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, terminal_width() - 15, break_on_hyphens=False)

    stored = f", stored as {report['stored_as']}" if report["stored_as"] else ""
    plugin = f" (plugin {report['plugin']})" if report["plugin"] else ""
    yield "model type", f"{report['model_type'] or 'unknown'}{stored}{plugin}"
    if report["architectures"]:
        yield "architecture", ", ".join(report["architectures"])
    if report["files"]:
        parameters = report["parameters"]
        yield "parameters", f"{parameters['total']:,}"
        modules = sorted(parameters["modules"].items(), key=lambda item: -item[1])
        rest = sum(count for _, count in modules[MAX_LISTED:])
        modules = modules[:MAX_LISTED] + [(f"{len(modules) - MAX_LISTED} more", rest)] * bool(rest)
        yield "", [f"{count:>13,}  {name}" for name, count in modules]
        held = "{}: {tensors} tensors, {bytes:,} bytes"
        yield "types", [held.format(code, **row) for code, row in parameters["dtypes"].items()]
        yield "files", [held.format(file["name"], **file) for file in report["files"]]
    if report["not_read"]:
        yield "not read", ", ".join(report["not_read"])
    for alias, name in ((report.get("names") or {}).get("tied") or {}).items():
        yield "tied", f"{alias} = {name}"
    for label, key in (("JAX", "jax_classes"), ("PyTorch", "pytorch_classes")):
        yield label, wrapped(", ".join(report[key]) or "no class")
    if tokenizer := report["tokenizer"]:
        size = f", {tokenizer['entries']:,} entries" if "entries" in tokenizer else ""
        rows = sorted(set(report["embedding_rows"].values()))
        text = f"{tokenizer['class'] or tokenizer['file']}{size}"
        yield "tokenizer", text + "".join(f", {n:,} embedding rows" for n in rows)
    else:
        yield "tokenizer", "none"
    if options := report["generation"]:
        yield "generation", wrapped(", ".join(f"{name}={v}" for name, v in options.items()))
    if scales := report["fp8"]:
        yield "FP8 scales", f"{scales['variables']} variables of {scales['recipe']}"
    if run := report["training"]:
        steps, logged = ", ".join(map(str, run["checkpoints"])) or "none", run.get("logged_step")
        yield "checkpoints", steps + (f" (logged up to step {logged})" if logged else "")


def inspect_checkpoint(
    name: str, *, names: bool = True, read_values: bool = False
) -> dict[str, Any]:
    """Return what is known of a directory, a Hub name or a weight file beside its config.json.

    ``names`` compares the names with those of the model's class, for which jax starts; without it
    only headers are read. ``read_values`` looks for NaN and infinities, reading everything. The
    report is made of JSON's types; ``problems`` is a list of sentences.
    """
    from hfseq.checkpoints import headers
    from hfseq.checkpoints.weights import FLOAT_DTYPES

    checkpoint = Checkpoint(name)
    weights, problems = checkpoint.weights, checkpoint.problems
    counts = {
        name: entry.count
        for name, (_, entry) in weights.entries.items()
        if headers.NUMPY_DTYPES.get(entry.dtype_code) in FLOAT_DTYPES
        or entry.dtype_code not in headers.NUMPY_DTYPES
    }
    report = {
        "source": name,
        **checkpoint.architecture(),
        "parameters": {
            "total": sum(counts.values()),
            "modules": _by_module(counts, 1),
            "dtypes": headers.count_by_dtype(weights),
        },
        "files": [
            {"name": h.file, "bytes": h.size, "tensors": len(h.tensors)} for h in weights.headers
        ],
        "not_read": weights.unread_files,
        "tokenizer": checkpoint.tokenizer(),
        "embedding_rows": {
            name: entry.shape[0]
            for name, (_, entry) in weights.entries.items()
            if EMBEDDINGS.search(name) and len(entry.shape) == 2
        },
        "generation": None,
        "fp8": None,
        "training": checkpoint.training(),
    }
    if checkpoint.fetch("generation_config.json") is not None:
        options = checkpoint.read_json("generation_config.json")
        hidden = ("transformers_version", "_from_model_config")
        report["generation"] = {key: v for key, v in options.items() if key not in hidden}
    if (path := checkpoint.fetch(FP8)) is not None:
        header = headers.read_header(path)
        report["fp8"] = {
            "file": FP8,
            "recipe": header.metadata.get("recipe"),
            "variables": len(header.tensors),
            "problems": header.problems,
        }
        problems += header.problems
    largest = (report["tokenizer"] or {}).get("largest_id")
    size = checkpoint.stored.get("vocab_size")
    for table, rows in report["embedding_rows"].items():
        if largest is not None and largest >= rows:
            problems.append(f"the tokenizer's largest id is {largest}, but {table} has {rows} rows")
        if isinstance(size, int) and size != rows:
            problems.append(f"config.json says vocab_size {size}, but {table} has {rows} rows")
    if names and weights.headers and report["plugin"]:
        report["names"] = checkpoint.compare_names()
    if read_values:
        report["not_finite"] = checkpoint.count_nonfinite()
    return {**report, "problems": problems}


class Checkpoint:
    """What is inspected: its files, config.json and headers, and what was wrong so far."""

    def __init__(self, name: str) -> None:
        from hfseq.checkpoints import headers
        from hfseq.checkpoints.config import Source, fetcher, model_type

        source = Source.parse(name)
        self.location = source.location
        self.folder = Path(self.location) if Path(self.location).is_dir() else None
        self.fetch = fetcher(self.location, {})
        self.problems: list[str] = []
        self.stored = self.read_json("config.json")
        if self.fetch("config.json") is None:
            self.problems.append("no config.json")
        elif not self.problems and model_type(self.stored) is None:
            self.problems.append("config.json names no model_type")
        if self.folder is None:
            self.weights = headers.read_remote_headers(self.location)
        else:
            only = Path(source.file).name if source.file else None
            self.weights = headers.read_local_headers(self.folder, only)
        self.problems += self.weights.problems

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON object, or nothing; what is wrong with it is noted."""
        path = self.fetch(name)
        if path is None:
            return {}
        try:
            content = parse_json(Path(path).read_bytes())
            if not isinstance(content, dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {first_line(error)}")
            return {}
        return content

    def architecture(self) -> dict[str, Any]:
        """Return the model type of config.json, who registers it, and the classes that load it."""
        from hfseq.checkpoints.config import class_names, model_type

        kind, twin = model_type(self.stored), self.stored.get("model_type")
        twin = twin if isinstance(twin, str) else None
        registry = plugins.load().architectures
        spec = registry.get(str(kind)) if kind in registry else None
        stock = registry.get(str(twin)) if spec and twin in registry else None
        if kind is not None and spec is None:
            known = ", ".join(sorted(registry))
            self.problems.append(f"no plugin has the model type '{kind}': hfseq loads {known}")
        torch_classes: list[str] = []
        if kind is not None:  # without importing Transformers, which is slow
            package = importlib.util.find_spec("transformers")
            folders = (package.submodule_search_locations or []) if package else []
            # The parts of a family share its folder.
            modules = {re.sub(r"\W", "_", str(twin)), *([stock.plugin] if stock else ())}
            if isinstance(custom := self.stored.get("auto_map"), dict):
                torch_classes = [f"{n} (trust_remote_code=True)" for n in custom if "Model" in n]
            elif any((Path(f) / "models" / m).is_dir() for f in folders for m in modules):
                torch_classes = class_names(self.stored)
                if stock:
                    names = _classes(stock, torch_auto_class_name)
                    torch_classes = [name.removeprefix("Flax") for name in names]
        return {
            "model_type": kind,
            "stored_as": twin if twin != kind else None,
            "architectures": class_names(self.stored) if "architectures" in self.stored else None,
            "plugin": spec.plugin if spec else None,
            "jax_classes": _classes(spec) if spec else [],
            "pytorch_classes": torch_classes,
        }

    def tokenizer(self) -> dict[str, Any] | None:
        """Return the kind, size and largest id of the tokenizer; None where there is none."""
        settings = self.read_json("tokenizer_config.json")
        names = ("tokenizer.json", *PLAIN_VOCABULARIES)
        file = next((name for name in names if self.fetch(name) is not None), None)
        if file is None:
            return None
        path = Path(str(self.fetch(file)))
        ids: list[int] = []
        try:
            if file == "tokenizer.json":
                from tokenizers import Tokenizer

                vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
                ids = list(vocabulary.values())
            elif path.suffix == ".json":
                ids = [int(number) for number in parse_json(path.read_bytes()).values()]
            elif path.suffix == ".txt":
                ids = list(range(path.read_text("utf-8").count("\n")))
        except Exception as error:  # the tokenizers library raises bare Exceptions
            self.problems.append(f"{path.name} cannot be read: {first_line(error)}")
        added = settings.get("added_tokens_decoder")
        if isinstance(added, Mapping):
            ids += [int(number) for number in added if re.fullmatch(r"\d{1,18}", str(number))]
        size = {"entries": len(set(ids)), "largest_id": max(ids)} if ids else {}
        return {"class": settings.get("tokenizer_class"), "file": file, **size}

    def training(self) -> dict[str, Any] | None:
        """Return the steps of training checkpoints and the last logged; None where no run was."""
        from hfseq.reports.log import LOG_FILE, read_metrics

        if self.folder is None:
            return None
        saved = (self.folder / "checkpoints").glob("*")
        steps = sorted(int(path.name) for path in saved if path.name.isdecimal() and path.is_dir())
        if not (self.folder / LOG_FILE).is_file():
            return {"checkpoints": steps} if steps else None
        logged = max(
            (record["step"] for record in read_metrics(self.folder / LOG_FILE)), default=None
        )
        return {"checkpoints": steps, "logged_step": logged}

    def compare_names(self) -> dict[str, Any] | None:
        """Compare the names of the files with those of the class that config.json names."""
        from hfseq.modeling.auto import find_class

        tensors = self.weights.tensors()
        try:
            cls = find_class(self.stored, self.location)
            model = build_abstract_model(cls, self.location, tensors)
        except (HfseqError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.problems.append(f"its class cannot be made: {first_line(error)}")
            return None
        _, report = model.file_map.match(tensors, native=self.weights.native)
        self.problems += misfits(model, report)
        writes = model.can_generate() or "LM" in cls.__name__ or "PreTraining" in cls.__name__
        # PyTorch's names that are not stored, with the tensor that each repeats; the table of
        # aliases lists the heads of all classes of a family.
        tied = {
            alias: name
            for alias, name in model.file_map.aliases.items()
            if alias not in tensors and (writes or ".embed" in alias)
        }
        return {
            "class": cls.__name__,
            "missing": len(report.missing),
            "unexpected": len(report.unexpected),
            "tied": tied,
        }

    def count_nonfinite(self) -> dict[str, int]:
        """Count NaN and infinities in every tensor of floating numbers."""
        import numpy as np

        from hfseq.checkpoints.headers import NUMPY_DTYPES, read_tensor
        from hfseq.checkpoints.weights import FLOAT_DTYPES

        if self.weights.folder is None:
            raise UsageError("--values needs the weights here: download the model first")
        size = 1 << 22  # numbers that are converted at a time
        counts = {}
        for name, (header, entry) in self.weights.entries.items():
            if NUMPY_DTYPES.get(entry.dtype_code) not in FLOAT_DTYPES or header.problems:
                continue
            flat = read_tensor(self.weights.folder, header, entry).reshape(-1)
            pieces = (flat[i : i + size].astype(np.float32) for i in range(0, len(flat), size))
            if count := sum(int((~np.isfinite(piece)).sum()) for piece in pieces):
                counts[name] = count
                self.problems.append(f"{name} holds {count:,} values that are NaN or infinite")
        return counts


def _classes(spec: ArchitectureSpec, auto: Callable[[str], str] = auto_class_name) -> list[str]:
    """Name what loads each head: an Auto class, or the head itself where there is none."""
    return [
        f"Flax{auto(task)}" if task in TASKS else target_name(target)
        for task, target in spec.heads.items()
    ]


def _by_module(counts: dict[str, int], depth: int) -> dict[str, int]:
    """Sum by the first component of names, and by two where one holds more than half of all."""
    groups: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        module = ".".join(name.split(".")[:-1][:depth]) or name
        groups.setdefault(module, {})[name] = count
    sums: dict[str, int] = {}
    for module, part in groups.items():
        large = depth == 1 and 2 * sum(part.values()) > sum(counts.values())
        sums |= _by_module(part, 2) if large else {module: sum(part.values())}
    return sums

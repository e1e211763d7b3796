"""Command-line interface of ``hfseq inspect``: contents and problems of a checkpoint."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.checkpoints import hub
from hfseq.cli.convert import build_abstract_model, describe_mismatches, use_cpu
from hfseq.cli.text import add_json, colorize, print_json, terminal_width
from hfseq.errors import HfseqError, UsageError, first_line, parse_json
from hfseq.plugins.registry import (
    TASKS,
    ArchitectureSpec,
    auto_class_name,
    target_name,
    torch_auto_class_name,
)

if TYPE_CHECKING:
    from hfseq.checkpoints.weights import Tensor

EXAMPLES = """hfseq inspect my-roberta
hfseq inspect my-roberta --values
hfseq inspect FacebookAI/roberta-base --headers_only --json"""

#: Maximum number of listed problems, and of listed modules.
MAX_LISTED = 12

PLAIN_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")

FP8 = "fp8_params.safetensors"

#: Matches the names of token embedding matrices in PyTorch and Flax checkpoints.
EMBEDDINGS = re.compile(
    r"(^|\.)(word_embeddings|wte|shared|embed_tokens|token_embedding)\.(weight|embedding)$"
)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq inspect``."""
    parser.add_argument(
        "model",
        metavar="DIR",
        help="Directory, Hub name, or weight file with config.json in the same directory.",
    )
    parser.add_argument(
        "--headers_only",
        action="store_true",
        help="Skip the comparison with the model class, which has to start JAX.",
    )
    parser.add_argument(
        "--values", action="store_true", help="Read all weights and check for NaN and infinities."
    )
    add_json(parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if the checkpoint has problems."""
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
        first, *others = (value or ["none"]) if isinstance(value, list) else [value]
        print("\n".join([f"{label:15}{first}", *(f"{'':15}{line}" for line in others)]))
    for problem in problems[:MAX_LISTED]:
        print(f"{colorize('problem'.ljust(15), 'red')}{problem}")
    if len(problems) > MAX_LISTED:
        print(f"{'':15}and {len(problems) - MAX_LISTED} more (--json lists them)")
    if not problems:
        print(colorize("no problem found", "green"))
    return 1 if problems else 0


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str | list[str]]]:
    """Yields the label and the text of each row of the report. Lists have one line per element."""

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
        remaining = sum(count for _, count in modules[MAX_LISTED:])
        modules = modules[:MAX_LISTED] + [(f"{len(modules) - MAX_LISTED} more", remaining)] * bool(
            remaining
        )
        yield "", [f"{count:>13,}  {name}" for name, count in modules]
        template = "{}: {tensors} tensors, {bytes:,} bytes"
        if settings := report["quantization"]:
            names = (
                *("bits", "format", "checkpoint_format", "version", "group_size"),
                *("weight_block_size", "bnb_4bit_quant_type", "load_in_8bit"),
            )
            details = [f"{name} {settings[name]}" for name in names if settings.get(name)]
            yield "quantization", ", ".join([str(settings.get("quant_method")), *details])
        yield "types", [template.format(code, **row) for code, row in parameters["dtypes"].items()]
        yield "files", [template.format(file["name"], **file) for file in report["files"]]
    if report["not_read"]:
        yield "not read", ", ".join(report["not_read"])
    for alias, name in ((report.get("names") or {}).get("tied") or {}).items():
        yield "tied", f"{alias} = {name}"
    for label, key in (("JAX", "jax_classes"), ("PyTorch", "pytorch_classes")):
        yield label, wrapped(", ".join(report[key]) or "none")
    if tokenizer := report["tokenizer"]:
        size = f", {tokenizer['entries']:,} entries" if "entries" in tokenizer else ""
        rows = sorted(set(report["embedding_rows"].values()))
        text = f"{tokenizer['class'] or tokenizer['file']}{size}"
        yield "tokenizer", text + "".join(f", {n:,} embedding rows" for n in rows)
    else:
        yield "tokenizer", "none"
    if options := report["generation"]:
        # Whisper lists about 100 languages and 90 suppressed tokens.
        shown = {
            name: f"{len(value)} entries"
            if isinstance(value, dict | list) and len(value) > MAX_LISTED
            else value
            for name, value in options.items()
        }
        yield "generation", wrapped(", ".join(f"{name}={v}" for name, v in shown.items()))
    if scales := report["fp8"]:
        yield "FP8 scales", f"{scales['variables']} variables of {scales['recipe']}"
    if run := report["training"]:
        steps, logged = ", ".join(map(str, run["checkpoints"])) or "none", run.get("logged_step")
        yield "checkpoints", steps + (f" (logs until step {logged})" if logged else "")


def inspect_checkpoint(
    name: str, *, names: bool = True, read_values: bool = False
) -> dict[str, Any]:
    """Inspects a checkpoint.

    Args:
        name: Directory, Hub name, or weight file with config.json in the same directory.
        names: Whether to compare the tensors with the model class, which starts JAX. Otherwise only
            headers are read.
        read_values: Whether to read all weights and check for NaN and infinities.

    Returns:
        The report, which consists of JSON types. ``problems`` is a list of messages.
    """
    from hfseq.checkpoints import headers
    from hfseq.checkpoints.weights import FLOAT_DTYPES

    checkpoint = Checkpoint(name)
    weights, problems = checkpoint.weights, checkpoint.problems
    tensors, quantization = checkpoint.dequantize()
    counts = {
        name: math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype in FLOAT_DTYPES
        or tensor.dtype.startswith("float8")
        or tensor.dtype not in headers.NUMPY_DTYPES.values()
    }
    report = {
        "source": name,
        **checkpoint.architecture(),
        "quantization": quantization,
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
            problems.append(f"the tokenizer's largest ID is {largest}, but {table} has {rows} rows")
        if isinstance(size, int) and size != rows:
            problems.append(f"config.json has vocab_size {size}, but {table} has {rows} rows")
    if names and weights.headers and report["plugin"]:
        report["names"] = checkpoint.compare_names()
    if read_values:
        report["not_finite"] = checkpoint.count_nonfinite()
    return {**report, "problems": problems}


class Checkpoint:
    """The files, config.json and headers of an inspected checkpoint, and its problems so far."""

    def __init__(self, name: str) -> None:
        from hfseq.checkpoints import headers
        from hfseq.checkpoints.config import Source, fetcher, model_type

        source = Source.parse(name)
        self.location = source.location
        self.folder = Path(self.location) if Path(self.location).is_dir() else None
        self.fetch = fetcher(self.location, {})
        self.problems: list[str] = []
        self._is_dequantized = True
        self.stored = self.read_json("config.json")
        if self.fetch("config.json") is None:
            self.problems.append("no config.json")
        elif not self.problems and model_type(self.stored) is None:
            self.problems.append("config.json has no model_type")
        if self.folder is None:
            self.weights = headers.read_remote_headers(self.location)
        else:
            file_name = Path(source.file).name if source.file else None
            self.weights = headers.read_local_headers(self.folder, file_name)
        self.problems += self.weights.problems

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads a JSON object. If it is invalid, adds a problem and returns ``{}``."""
        path = self.fetch(name)
        if path is None:
            return {}
        try:
            content = parse_json(Path(path).read_bytes())
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {first_line(error)}")
            return {}
        return content

    def architecture(self) -> dict[str, Any]:
        """Returns the model type, the plugin that registers it, and the classes that load it."""
        from hfseq.checkpoints.config import class_names, model_type

        native, stored_type = model_type(self.stored), self.stored.get("model_type")
        stored_type = stored_type if isinstance(stored_type, str) else None
        registry = plugins.load().architectures
        spec = registry.get(str(native)) if native in registry else None
        stored_spec = registry.get(str(stored_type)) if spec and stored_type in registry else None
        if native is not None and spec is None:
            model_types = ", ".join(sorted(registry))
            self.problems.append(
                f"no plugin registers the model type '{native}' (supported: {model_types})"
            )
        torch_classes: list[str] = []
        if native is not None:  # without importing Transformers, which is slow
            package = importlib.util.find_spec("transformers")
            folders = (package.submodule_search_locations or []) if package else []
            # Several model types of a family may share one folder in Transformers.
            modules = {
                re.sub(r"\W", "_", str(stored_type)),
                *([stored_spec.plugin] if stored_spec else ()),
            }
            if isinstance(custom := self.stored.get("auto_map"), dict):
                torch_classes = [f"{n} (trust_remote_code=True)" for n in custom if "Model" in n]
            elif any((Path(f) / "models" / m).is_dir() for f in folders for m in modules):
                torch_classes = class_names(self.stored)
                if stored_spec:
                    names = _classes(stored_spec, torch_auto_class_name)
                    torch_classes = [name.removeprefix("Flax") for name in names]
        return {
            "model_type": native,
            "stored_as": stored_type if stored_type != native else None,
            "architectures": class_names(self.stored) if "architectures" in self.stored else None,
            "plugin": spec.plugin if spec else None,
            "jax_classes": _classes(spec) if spec else [],
            "pytorch_classes": torch_classes,
        }

    def tokenizer(self) -> dict[str, Any] | None:
        """Returns the class, size and largest ID of the tokenizer, or `None`."""
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
        """Returns the steps of training checkpoints and the last logged step, or `None`."""
        from hfseq.reports.log import LOG_FILE, read_metrics

        if self.folder is None:
            return None
        saved = (self.folder / hub.CHECKPOINT_DIR).glob("*")
        steps = sorted(int(path.name) for path in saved if path.name.isdecimal() and path.is_dir())
        if not (self.folder / LOG_FILE).is_file():
            return {"checkpoints": steps} if steps else None
        logged = max(
            (record["step"] for record in read_metrics(self.folder / LOG_FILE)), default=None
        )
        return {"checkpoints": steps, "logged_step": logged}

    def dequantize(self) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """Returns the tensors after dequantization, and the quantization settings or `None`.

        If the weights cannot be dequantized, adds a problem and returns the stored tensors.
        """
        from hfseq.checkpoints import quantized
        from hfseq.checkpoints.headers import WeightsNotDownloaded

        tensors = self.weights.tensors()
        try:
            settings = quantized.check_method(self.stored, self.location)
            if settings is None:
                return tensors, None
            return quantized.dequantize(tensors, self.stored, self.location), settings
        except WeightsNotDownloaded:  # some formats store the shapes of the weights as tensors
            pass
        except HfseqError as error:
            self.problems.append(first_line(error))
        stored = self.stored.get("quantization_config")
        self._is_dequantized = False
        return tensors, dict(stored) if isinstance(stored, Mapping) else {}

    def compare_names(self) -> dict[str, Any] | None:
        """Compares the tensors with the model class of config.json."""
        from hfseq.modeling.auto import find_class

        if not self._is_dequantized:
            return None
        try:
            cls = find_class(self.stored, self.location)
            model, tensors = build_abstract_model(cls, self.location, self.weights.tensors())
        except (HfseqError, ValueError, TypeError, KeyError, AttributeError) as error:
            self.problems.append(f"cannot build the model class: {first_line(error)}")
            return None
        _, report = model.match_tensors(
            tensors, native=self.weights.native, compare=self.folder is not None
        )
        self.problems += describe_mismatches(model, report, self.weights.native)
        # Names of PyTorch tensors that are not stored because they are tied to another tensor.
        # `aliases` also contains the heads of other classes of the family, which are skipped.
        tied = {
            alias: name
            for alias, name in model.file_map.aliases.items()
            if alias not in tensors and (model.has_lm_head() or ".embed" in alias)
        }
        return {
            "class": cls.__name__,
            "missing": len(report.missing),
            "unexpected": len(report.unexpected),
            "tied": tied,
        }

    def count_nonfinite(self) -> dict[str, int]:
        """Counts NaN and infinities in each floating-point tensor."""
        import numpy as np

        from hfseq.checkpoints.headers import NUMPY_DTYPES, read_tensor
        from hfseq.checkpoints.weights import FLOAT_DTYPES

        if self.weights.folder is None:
            raise UsageError("--values requires local weights: download the model first")
        size = 1 << 22  # values per conversion to float32
        counts = {}
        for name, (header, entry) in self.weights.entries.items():
            if NUMPY_DTYPES.get(entry.dtype_code) not in FLOAT_DTYPES or header.problems:
                continue
            flat = read_tensor(self.weights.folder, header, entry).reshape(-1)
            pieces = (flat[i : i + size].astype(np.float32) for i in range(0, len(flat), size))
            if count := sum(int((~np.isfinite(piece)).sum()) for piece in pieces):
                counts[name] = count
                self.problems.append(f"{name} contains {count:,} NaN or infinite values")
        return counts


def _classes(spec: ArchitectureSpec, auto: Callable[[str], str] = auto_class_name) -> list[str]:
    """Returns the class that loads each head: an Auto class or, if there is none, a model class."""
    return [
        f"Flax{auto(task)}" if task in TASKS else target_name(target)
        for task, target in spec.heads.items()
    ]


def _by_module(counts: dict[str, int], depth: int) -> dict[str, int]:
    """Sums counts by module, which is the first ``depth`` components of a name.

    A module with more than half of the total is divided further, by the first two components.
    """
    groups: dict[str, dict[str, int]] = {}
    for name, count in counts.items():
        module = ".".join(name.split(".")[:-1][:depth]) or name
        groups.setdefault(module, {})[name] = count
    sums: dict[str, int] = {}
    for module, part in groups.items():
        large = depth == 1 and 2 * sum(part.values()) > sum(counts.values())
        sums |= _by_module(part, 2) if large else {module: sum(part.values())}
    return sums

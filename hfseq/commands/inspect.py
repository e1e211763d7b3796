"""``hfseq inspect``: its flags, and the report as text."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from hfseq.commands.terminal import paint, width

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
    from hfseq.inspection.describe import inspect_checkpoint

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

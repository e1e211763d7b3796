"""Command line of ``hfseq port``, which translates a model file of Transformers to a plugin."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.cli import flags
from hfseq.cli.text import add_json, print_json
from hfseq.errors import PluginError, UsageError, first_line, import_problem, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.cli.port.translation import Translation
    from hfseq.cli.port.verification import HeadResult

EXAMPLES = """hfseq port arcee                   # writes arcee.py and test_arcee.py
hfseq port arcee --heads Model ForCausalLM --output_file my_arcee.py
hfseq port vit_mae                 # exits with 1: lists the statements to translate by hand
hfseq port vit_mae --only_verify   # compares the edited vit_mae.py with PyTorch
hfseq train clm --plugin arcee.py --help"""

#: The translation is tested with the model files of Transformers up to this minor version.
TESTED_VERSION = (5, 24)
TEST = Path(__file__).parents[2] / "templates" / "test_port.py.txt"


def add_port(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq port``."""
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="Model type of Transformers.")
    flags.add_flag(
        parser,
        "output_file",
        help_text="File to create. The test is written next to it, as test_FILE.",
        default_text="MODEL_TYPE.py",
        aliases=("--output",),
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        metavar="HEAD",
        help="Heads to port, such as Model or ForCausalLM. Default: all heads of the model file.",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="Replace existing files.",
    )
    parser.add_argument(
        "--only_verify",
        action="store_true",
        help="Compare the existing file with PyTorch without translating, for ports that were "
        "completed by hand.",
    )
    parser.add_argument(
        "--checks",
        nargs="+",
        metavar="CHECK",
        help="Checks of hfseq.testing.check_architecture to run. Default: all checks.",
    )
    add_json(parser)


def run_port(arguments: argparse.Namespace) -> int:
    """Writes a port and compares it with PyTorch.

    Returns:
        0 if every statement is translated and no check fails, otherwise 1.
    """
    # The comparison needs the precision of the CPU, and one check needs eight devices.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    model_type = arguments.model_type
    output = Path(arguments.output_file or f"{_identifier(model_type)}.py")
    _check_arguments(arguments, output)
    report: dict[str, Any] = {"model_type": model_type, "file": str(output)}
    if not arguments.only_verify:
        from hfseq.cli.port.translation import translate

        translation = translate(model_type, arguments.heads)
        output.write_text(translation.text, encoding="utf-8")
        report |= _describe(translation)
        if not arguments.json:
            _print_translation(translation, output)
        if translation.markers:
            return _finish(report, arguments.json, is_complete=False)
    problem = _missing_torch()
    if problem:
        report["error"] = f"{problem}, so {output} was not compared with PyTorch"
        return _finish(report, arguments.json, is_complete=False)
    from hfseq.cli.port import verification

    config = verification.tiny_config(model_type)
    results = []
    heads = arguments.heads if arguments.only_verify else None
    try:
        for result in verification.verify(output, model_type, config, heads, arguments.checks):
            results.append(result)
            if not arguments.json:
                print(result, flush=True)
    except PluginError as error:
        report["error"] = first_line(error)
        return _finish(report, arguments.json, is_complete=False)
    if not arguments.only_verify:
        report["test"] = str(_write_test(output, model_type, config, results))
    report["results"] = [_result(result) for result in results]
    return _finish(report, arguments.json, all(result.passes for result in results))


def _check_arguments(arguments: argparse.Namespace, output: Path) -> None:
    """Raises a `UsageError` if the model type or the output file cannot be used."""
    from transformers import CONFIG_MAPPING

    from hfseq.errors import did_you_mean

    model_type = arguments.model_type
    if "/" in model_type or Path(model_type).is_dir():
        raise UsageError(
            f"'{model_type}' is not a model type. Pass the model type of a model file in the "
            "installed Transformers, such as 'llama'. hfseq port neither runs nor translates code "
            "that is stored in a checkpoint (trust_remote_code)"
        )
    if model_type not in CONFIG_MAPPING:
        raise UsageError(
            f"Transformers has no model type '{model_type}'"
            f"{did_you_mean(model_type, list(CONFIG_MAPPING))}"
        )
    if arguments.only_verify:
        if not output.exists():
            raise UsageError(
                f"--only_verify: '{output}' does not exist. Run hfseq port without --only_verify "
                "to create it"
            )
        return
    test = _test_path(output)
    for path in (output, test):
        if path.exists() and not arguments.force:
            raise UsageError(
                f"'{path}' already exists: use --force to replace it, or another --output_file"
            )
    if not output.parent.is_dir():
        raise UsageError(f"--output_file {output}: the directory '{output.parent}' does not exist")
    architectures = plugins.load(arguments.plugin).architectures
    if model_type in architectures:
        print(
            f"hfseq already has '{model_type}': the plugin '{architectures[model_type].plugin}' "
            f"registers it, and its checkpoints load without a port. The port is used only by "
            f"programs that are started with --plugin {output}",
            file=sys.stderr,
        )


def _identifier(model_type: str) -> str:
    return re.sub(r"\W", "_", model_type)


def _test_path(output: Path) -> Path:
    return output.with_name(f"test_{output.name}")


def _missing_torch() -> str:
    """Returns why PyTorch cannot be imported, or an empty string."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return import_problem(error, "torch", "hfseq[port]")
    return ""


def _write_test(
    output: Path, model_type: str, config: PreTrainedConfig, results: Sequence[HeadResult]
) -> Path:
    """Writes the test of a port to the directory of the port and returns the path of the test."""
    from hfseq.cli.port.verification import array_source, config_source

    inputs = {name: value for result in results for name, value in result.inputs.items()}
    calls: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        calls.setdefault(tuple(result.inputs), []).append(result.head)
    checks = []
    for names, heads in calls.items():
        arguments = [f'"{model_type}"', "CONFIG"]
        if len(calls) > 1:
            arguments.append(f"heads={heads}")
        if names:
            arguments.append(f"inputs={{name: INPUTS[name] for name in {names}}}")
        checks.append(f"check_architecture({', '.join(arguments)})")
    entries = [f'"{name}": {array_source(value)}' for name, value in inputs.items()]
    text = Template(TEST.read_text(encoding="utf-8")).substitute(
        model_type=model_type,
        name=_identifier(model_type),
        file=output.name,
        numpy="import numpy as np" if inputs else "",
        config_class=type(config).__name__,
        config=config_source(config),
        inputs=f"INPUTS = {{{', '.join(entries)}}}" if inputs else "",
        checks="\n    ".join(checks),
    )
    path = _test_path(output)
    path.write_text(formatted(text), encoding="utf-8")
    return path


def formatted(text: str) -> str:
    """Formats Python code with ruff. Returns the code unchanged if ruff is not installed."""
    command = [sys.executable, "-m", "ruff"]
    if importlib.util.find_spec("ruff") is None:
        program = shutil.which("ruff")
        if program is None:
            return text
        command = [program]
    result = subprocess.run(
        [*command, "format", "--line-length", "100", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    return result.stdout if result.returncode == 0 else text


# -- the report
# ---------------------------------------------------------------------------------------


def _describe(translation: Translation) -> dict[str, Any]:
    return {
        "heads": list(translation.heads),
        "left_out": dict(translation.left_out),
        "markers": [
            {"reason": m.reason, "path": m.path, "line": m.line, "source": m.source}
            for m in translation.markers
        ],
        "unread_fields": list(translation.unread_fields),
        "family": translation.family,
        "complete_reason": translation.complete_reason,
    }


def _result(result: HeadResult) -> dict[str, Any]:
    return {
        "head": result.head,
        "passed": result.report.passed,
        "skipped": result.report.skipped | result.report.not_run,
        "failed": result.report.failed,
        "difference": None if result.difference is None else str(result.difference),
    }


def _print_translation(translation: Translation, output: Path) -> None:
    import transformers

    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version > TESTED_VERSION:
        print(
            f"note: hfseq port is tested with Transformers up to "
            f"{'.'.join(map(str, TESTED_VERSION))}. The installed {transformers.__version__} is "
            f"newer than the versions that are tested"
        )
    print(f"wrote {output}: {', '.join(translation.heads) or 'no head'}")
    if translation.family:
        print(f"  derives from {translation.family}, and contains only the differences")
    if translation.complete_reason:
        print(f"  complete file: {translation.complete_reason}")
    for head, reason in translation.left_out.items():
        print(f"  left out {head}: {reason}")
    if translation.unread_fields:
        fields = ", ".join(translation.unread_fields)
        print(f"  configuration fields that only the PyTorch model reads: {fields}")
    if translation.markers:
        count = len(translation.markers)
        print(f"{count} statement{'s' * (count > 1)} without a translation:")
    for marker in translation.markers:
        print(f"  {Path(marker.path).name}:{marker.line}: {marker.reason}")
        print(f"    {one_line(marker.source, 200)}")
    if translation.markers:
        print(
            f"Replace each NotTranslated(...) in {output} with code, then run hfseq port "
            f"{translation.model_type} --only_verify --output_file {output}"
        )


def _finish(report: dict[str, Any], as_json: bool, is_complete: bool) -> int:
    """Prints the JSON report, the error or the final line, and returns the exit code."""
    if as_json:
        print_json(report)
    elif error := report.get("error"):
        print(f"error: {error}", file=sys.stderr)
    elif is_complete:
        test = f"; wrote {report['test']}" if "test" in report else ""
        print(f"{report['file']} agrees with PyTorch{test}")
    return 0 if is_complete else 1

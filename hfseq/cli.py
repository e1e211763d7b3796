"""The ``hfseq`` command: what is installed, plugins and a start for a new one, models."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from hfseq import __version__, model_commands, plan_command, plugins, translate_command
from hfseq.errors import UsageError, run_command
from hfseq.registry import describe

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "numpy", "torch"),
)
TEMPLATE = Path(__file__).with_name("templates") / "new_architecture.py.txt"

EXAMPLES = """examples:
  hfseq env                              versions, plugins and devices, for a bug report
  hfseq plugins --json                   what every plugin adds, for programs
  hfseq new my-encoder                   write my_encoder.py, a working architecture in one file
  hfseq plugins --plugin my_encoder.py   see that it is found
  hfseq fill-mask DIR "a <mask> text"    what a trained masked language model puts there
  hfseq translate DIR < in.txt           translate line by line with a translation model
  hfseq plan --config gpt2 --devices h200:8   memory, exchange and time of a run, beforehand
  hfseq push DIR --hub_model_id me/it    upload a model directory as one commit

Documentation: docs/cli.md and docs/plugins.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for errors, 2 for wrong usage."""
    arguments = build_parser().parse_args(argv)
    arguments.plugin += arguments.plugin_after
    debug = arguments.debug or arguments.debug_after
    return run_command(lambda: arguments.run(arguments), debug=debug)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run`` to its function."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="hfseq",
        description="JAX/Flax sequence models on Hugging Face: environment, plugins, models.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"hfseq {__version__}")
    _add_common(parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"example: {example}",
            formatter_class=formatter,
        )
        _add_common(sub, "_after")
        sub.set_defaults(run=run)
        return sub

    env = command("env", run_env, "show versions, plugins and devices", "hfseq env --json")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.add_argument("--no-devices", action="store_true", help="do not start jax to list devices")
    listing = command("plugins", run_plugins, "show what every plugin adds", "hfseq plugins --json")
    listing.add_argument("--json", action="store_true", help="print JSON")
    new = command(
        "new", run_new, "write a working architecture in one file", "hfseq new my-encoder"
    )
    new.add_argument("name", metavar="NAME", help="model type, e.g. my-encoder")
    new.add_argument("--output", metavar="FILE", type=Path, help="default: NAME.py")
    example = "hfseq push my-roberta --hub_model_id user/my-roberta"
    push = command("push", model_commands.run_push, "push a model directory to the Hub", example)
    model_commands.add_push(push)
    example = f'hfseq fill-mask my-roberta "Return the {model_commands.MASK} of the list."'
    text = "let a masked language model fill masks"
    fill = command("fill-mask", model_commands.run_fill_mask, text, example)
    model_commands.add_fill_mask(fill)
    example = 'hfseq translate my-translator "The cat is blue." --num_beams 4'
    text = "translate text, a file or standard input"
    translate = command("translate", translate_command.run_translate, text, example)
    translate_command.add_translate(translate)
    example = "hfseq plan --config gpt2 --mesh data=8,fsdp=8 --devices h200:64 --length 1024"
    text = "say what a training run needs and takes, without its devices"
    plan_command.add_plan(command("plan", plan_command.run_plan, text, example))
    return parser


def run_env(arguments: argparse.Namespace) -> int:
    """Print versions and plugins at once, then the devices, for which jax has to start."""
    loaded = _load(arguments)
    report: dict[str, Any] = {
        "hfseq": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "plugins": {info.name: info.version for info in loaded.infos},
        "errors": {name: describe(error) for name, error in loaded.errors.items()},
    }
    if arguments.json:
        if not arguments.no_devices:
            report["devices"] = _devices()
        print(json.dumps(report, indent=2))
        return 0
    rows = {key: report[key] for key in ("hfseq", "python", "platform")}
    rows |= {name: version or "not installed" for name, version in report["packages"].items()}
    for name, value in rows.items():
        print(f"{name:18}{value}")
    names = [f"{n} {v}" if v else n for n, v in report["plugins"].items()]
    print(f"{'plugins':18}{', '.join(names)}")
    for error in report["errors"].values():
        print(f"{'broken plugin':18}{error}")
    if not arguments.no_devices:
        sys.stdout.flush()
        for device in _devices():
            print(f"{'device':18}{device}")
    return 0


def run_plugins(arguments: argparse.Namespace) -> int:
    """Print every plugin with its origin, hooks and what it adds."""
    loaded = _load(arguments)
    rows = [
        {
            "name": info.name,
            "origin": info.origin,
            "version": info.version,
            "hooks": list(info.hooks),
            "adds": loaded.adds(info.name),
        }
        for info in loaded.infos
    ]
    errors = {name: describe(error) for name, error in loaded.errors.items()}
    if arguments.json:
        print(json.dumps({"plugins": rows, "errors": errors}, indent=2))
        return 0
    for info in loaded.infos:
        print(f"{info.name} ({' '.join(filter(None, (info.origin, info.version)))})")
        for kind, names in loaded.adds(info.name).items():
            print(f"  {kind}: {', '.join(names)}")
        for hook in info.hooks:
            if hook not in plugins.REGISTRIES:
                print(f"  {hook}")
    for error in errors.values():
        print(f"error: {error}")
    return 0


def run_new(arguments: argparse.Namespace) -> int:
    """Write the template of a one-file architecture under a new name."""
    name = arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UsageError(
            f"'{name}' is no model type: use lower-case words joined by '-', such as my-encoder"
        )
    known = plugins.load(arguments.plugin).architectures
    if name in known:
        raise UsageError(f"plugin '{known[name].plugin}' has '{name}' already: choose another")
    words = re.split("[-_]", name)
    output = arguments.output or Path("_".join(words) + ".py")
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        model_type=name, Class="".join(word.capitalize() for word in words), prefix="_".join(words)
    )
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"'{output}' exists already: give another --output") from None
    print(f"wrote {output}; next: hfseq plugins --plugin {output}")
    return 0


def _add_common(parser: argparse.ArgumentParser, suffix: str = "") -> None:
    """Add what may stand before and after the command; argparse keeps only one of equal names."""
    text = "load this plugin file too (repeatable)"
    where = f"plugin{suffix}"
    parser.add_argument(
        "--plugin", action="append", metavar="FILE", default=[], dest=where, help=text
    )
    text = "show tracebacks of errors"
    parser.add_argument("--debug", action="store_true", dest=f"debug{suffix}", help=text)


def _load(arguments: argparse.Namespace) -> plugins.Plugins:
    """Load the plugins without the warnings on broken ones, which the command prints itself."""
    plugins.logger.disabled = True
    try:
        return plugins.load(arguments.plugin)
    finally:
        plugins.logger.disabled = False


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    try:
        import jax

        return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except Exception as error:  # a broken driver or plugin of jax: this command is there to show it
        return [f"none ({describe(error)})"]


if __name__ == "__main__":
    sys.exit(main())

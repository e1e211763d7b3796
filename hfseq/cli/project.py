"""Command-line interface of ``hfseq env``, ``plugins``, ``new`` and ``push``."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

from hfseq import plugins
from hfseq.checkpoints import hub, network
from hfseq.cli import flags
from hfseq.cli.text import add_hidden_alias, add_json, print_json
from hfseq.errors import UsageError
from hfseq.plugins import __version__, manager
from hfseq.plugins.registry import describe_error
from hfseq.training import accelerator_flags

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "numpy", "torch"),
)

TEMPLATES = Path(__file__).parents[1] / "templates"
TEMPLATE_KINDS = ("encoder", "decoder", "seq2seq", "state")


def add_env(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq env``."""
    add_json(parser)
    no_devices = parser.add_argument(
        "--no_devices",
        action="store_true",
        help="Do not list devices. Listing them requires starting JAX.",
    )
    add_hidden_alias(parser, "--no-devices", no_devices)


def run_env(arguments: argparse.Namespace) -> int:
    """Prints versions and plugins immediately, then the devices after JAX has started."""
    loaded = _load_plugins(arguments)
    report: dict[str, Any] = {
        "hfseq": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict.fromkeys(PACKAGES),
        "plugins": {info.name: info.version for info in loaded.infos},
        "errors": {name: describe_error(error) for name, error in loaded.errors.items()},
        "accelerator_flags": {
            "set": accelerator_flags.current_flags(),
            "recommended": list(accelerator_flags.recommended_flags()),
        },
    }
    for name in PACKAGES:
        try:
            report["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if arguments.json:
        print_json(report if arguments.no_devices else report | {"devices": _devices()})
        return 0
    rows = [(name, report[name]) for name in ("hfseq", "python", "platform")]
    rows += [(name, version or "not installed") for name, version in report["packages"].items()]
    names = [f"{n} {v}" if v else n for n, v in report["plugins"].items()]
    rows += [("plugins", ", ".join(names))]
    rows += [("broken plugin", error) for error in report["errors"].values()]
    flags = report["accelerator_flags"]
    rows += list(flags["set"].items())
    rows += [("flags to try", " ".join(flags["recommended"]) or "none")]
    for name, value in rows:
        print(f"{name:18}{value}")
    if not arguments.no_devices:
        sys.stdout.flush()
        for device in _devices():
            print(f"{'device':18}{device}")
    return 0


def _devices() -> list[str]:
    try:
        import jax

        return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
    except Exception as error:  # the command must work with broken drivers and JAX plugins
        return [f"none ({describe_error(error)})"]


def _load_plugins(arguments: argparse.Namespace) -> plugins.Plugins:
    """Loads the plugins without warnings about broken ones, which the command prints itself."""
    manager.logger.disabled = True
    try:
        return plugins.load(arguments.plugin)
    finally:
        manager.logger.disabled = False


def run_plugins(arguments: argparse.Namespace) -> int:
    """Prints each plugin with its origin, hooks and registered names."""
    loaded = _load_plugins(arguments)
    errors = {name: describe_error(error) for name, error in loaded.errors.items()}
    if arguments.json:
        rows = [
            {
                "name": info.name,
                "origin": info.origin,
                "version": info.version,
                "hooks": list(info.hooks),
                "adds": loaded.registrations(info.name),
            }
            for info in loaded.infos
        ]
        print_json({"plugins": rows, "errors": errors})
        return 0
    for info in loaded.infos:
        print(f"{info.name} ({' '.join(filter(None, (info.origin, info.version)))})")
        for registry, names in loaded.registrations(info.name).items():
            print(f"  {registry}: {', '.join(names)}")
        for hook in info.hooks:
            if not hook.startswith("register_"):
                print(f"  {hook}")
    for error in errors.values():
        print(f"error: {error}")
    return 0


def add_new(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq new``."""
    parser.add_argument("name", metavar="NAME", help="Model type, e.g. my-encoder.")
    parser.add_argument(
        "--kind",
        choices=TEMPLATE_KINDS,
        default=TEMPLATE_KINDS[0],
        help="Type of architecture. Default: encoder.",
    )
    flags.add_flag(
        parser,
        "output_file",
        help_text="File to create.",
        default_text="NAME.py",
        aliases=("--output",),
    )
    add_json(parser)


def run_new(arguments: argparse.Namespace) -> int:
    """Writes a single-file architecture from a template."""
    name = arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise UsageError(
            f"invalid model type '{name}': use lower-case words joined by '-', such as my-encoder"
        )
    architectures = plugins.load(arguments.plugin).architectures
    if name in architectures:
        raise UsageError(
            f"plugin '{architectures[name].plugin}' already registers '{name}': use another name"
        )
    words = re.split("[-_]", name)
    output = Path(arguments.output_file or "_".join(words) + ".py")
    template = TEMPLATES / f"new_{arguments.kind}.py.txt"
    text = Template(template.read_text(encoding="utf-8")).substitute(
        model_type=name, Class="".join(word.capitalize() for word in words), prefix="_".join(words)
    )
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"'{output}' already exists: use another --output_file") from None
    if arguments.json:
        print_json({"file": str(output)})
    else:
        print(f"wrote {output}; next: hfseq plugins --plugin {output}")
    return 0


def add_push(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq push``, which have the same names as in the training scripts."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="Model directory, for example the output directory of a run.",
    )
    parser.add_argument(
        "--hub_model_id",
        metavar="ID",
        help="Repository, e.g. user/model. Default: the name of DIR.",
    )
    parser.add_argument("--hub_private_repo", action="store_true", help="Use a private repository.")
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="Also push the newest training checkpoint, to resume on another machine.",
    )
    parser.add_argument(
        "--message",
        default="Upload with hfseq",
        metavar="TEXT",
        help="Commit message. Default: Upload with hfseq.",
    )
    parser.add_argument(
        "--hub_timeout",
        type=float,
        default=network.DEFAULT_STALL_TIMEOUT,
        metavar="SECONDS",
        help="Seconds without network traffic after which the upload fails. Default: 600.",
    )
    add_json(parser)


def run_push(arguments: argparse.Namespace) -> int:
    """Pushes a directory as one commit and prints the URL of the commit."""
    if not arguments.hub_timeout > 0:
        raise UsageError(f"--hub_timeout {arguments.hub_timeout:g} must be positive")
    hub.set_timeout(arguments.hub_timeout)
    folder, private = arguments.directory, arguments.hub_private_repo
    name = arguments.hub_model_id or folder.resolve().name
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).is_dir():
        raise UsageError(
            f"--hub_model_id {name} is a path, not a repository such as user/model. To copy a "
            f"model to a directory, use: hfseq convert {folder} {name}"
        )

    def push() -> str:
        return hub.push_folder(
            folder,
            name,
            private=private,
            message=arguments.message,
            checkpoint=arguments.checkpoint,
        )

    try:
        url = network.run_with_stall_timeout(push)
    except network.TransferStalled as error:
        command = hub.push_command(folder, name, private, arguments.checkpoint)
        raise hub.HubError(
            f"cannot push {folder} to '{name}': {error}. Files that have arrived are not sent "
            f"again. Resume with: {command}"
        ) from error
    if arguments.json:
        print_json({"url": url})
    else:
        print(url)
    return 0

"""``hfseq env``, ``plugins``, ``new``, ``push``: what is installed, a new architecture, the Hub."""

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
from hfseq.cli.text import add_json, print_json
from hfseq.errors import UsageError
from hfseq.plugins import __version__, manager
from hfseq.plugins.registry import describe_error
from hfseq.training import accelerator_flags

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "numpy", "torch"),
)

TEMPLATES = Path(__file__).parents[1] / "templates"
TEMPLATE_KINDS = ("encoder", "decoder", "seq2seq")


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq env``."""
    add_json(parser)
    parser.add_argument(
        "--no-devices", action="store_true", help="do not start jax to list devices"
    )


def run_env(arguments: argparse.Namespace) -> int:
    """Print versions and plugins at once, then the devices, for which jax has to start."""
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
    rows += [("flags to try", " ".join(flags["recommended"]) or "none (one device, or none)")]
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
    except Exception as error:  # a broken driver or plugin of jax: this command is there to show it
        return [f"none ({describe_error(error)})"]


def _load_plugins(arguments: argparse.Namespace) -> plugins.Plugins:
    """Load the plugins without the warnings on broken ones, which the command prints itself."""
    manager.logger.disabled = True
    try:
        return plugins.load(arguments.plugin)
    finally:
        manager.logger.disabled = False


def run_plugins(arguments: argparse.Namespace) -> int:
    """Print every plugin with its origin, hooks and what it adds."""
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
        for kind, names in loaded.registrations(info.name).items():
            print(f"  {kind}: {', '.join(names)}")
        for hook in info.hooks:
            if not hook.startswith("register_"):
                print(f"  {hook}")
    for error in errors.values():
        print(f"error: {error}")
    return 0


def add_new(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq new``."""
    parser.add_argument("name", metavar="NAME", help="model type, e.g. my-encoder")
    parser.add_argument(
        "--kind",
        choices=TEMPLATE_KINDS,
        default=TEMPLATE_KINDS[0],
        help="what it is a model of; default: encoder",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: NAME.py")


def run_new(arguments: argparse.Namespace) -> int:
    """Write the template of a one-file architecture of a kind under a new name."""
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
    template = TEMPLATES / f"new_{arguments.kind}.py.txt"
    text = Template(template.read_text(encoding="utf-8")).substitute(
        model_type=name, Class="".join(word.capitalize() for word in words), prefix="_".join(words)
    )
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"'{output}' exists already: give another --output") from None
    print(f"wrote {output}; next: hfseq plugins --plugin {output}")
    return 0


def add_push(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq push``; they are named as in the training scripts."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="a complete output directory")
    parser.add_argument(
        "--hub_model_id", metavar="ID", help="repository, e.g. user/model; default: the name of DIR"
    )
    parser.add_argument(
        "--hub_private_repo", action="store_true", help="make the repository private"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="also push the newest training checkpoint, to go on from elsewhere",
    )
    parser.add_argument(
        "--message", default="Upload with hfseq", metavar="TEXT", help="message of the commit"
    )
    parser.add_argument(
        "--hub_timeout",
        type=float,
        default=network.DEFAULT_STALL_TIMEOUT,
        metavar="SECONDS",
        help="without a byte moving, after which the Hub hangs (600)",
    )


def run_push(arguments: argparse.Namespace) -> int:
    """Push a directory as one commit and print its address."""
    if not arguments.hub_timeout > 0:
        raise UsageError(f"--hub_timeout {arguments.hub_timeout:g}: give a positive number")
    hub.set_timeout(arguments.hub_timeout)
    folder, private = arguments.directory, arguments.hub_private_repo
    name = arguments.hub_model_id or folder.resolve().name

    def push() -> str:
        return hub.push_folder(
            folder,
            name,
            private=private,
            message=arguments.message,
            checkpoint=arguments.checkpoint,
        )

    try:
        print(network.run_with_stall_timeout(push))
    except network.TransferStalled as error:
        command = hub.push_command(folder, name, private, arguments.checkpoint)
        raise hub.HubError(
            f"cannot push {folder} to '{name}': {error}. What has arrived is not sent again; go on "
            f"with: {command}"
        ) from error
    return 0

"""``hfseq env`` and ``hfseq plugins``: what is installed and what it adds."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from typing import Any

from hfseq import __version__, plugins
from hfseq.registry import describe

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "tokenizers"),
    *("datasets", "huggingface_hub", "safetensors", "numpy", "torch"),
)


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq env``."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-devices", action="store_true", help="do not start jax to list devices"
    )


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq plugins``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


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

"""The command `hfseq bridge export`."""

from __future__ import annotations

import argparse

from hfseq.errors import UsageError
from hfseq_plugins.bridge.heads import check_torch_version


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq bridge export``."""
    parser.add_argument(
        "directory", metavar="DIR", help="Directory with the configuration and weights of a model."
    )
    parser.add_argument(
        "--batch_sizes",
        type=int,
        nargs="+",
        default=[1],
        help="Batch sizes to export programs for (default: 1).",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[],
        help="Lengths to export programs for, in tokens or audio samples. Not needed for images.",
    )
    parser.add_argument(
        "--platforms",
        nargs="+",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="Platforms on which the programs can run (default: the platform of this machine).",
    )
    parser.add_argument(
        "--class_name",
        help="Name of the PyTorch class (default: the first architecture in config.json).",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the programs of a model into its directory, and prints the names of the files."""
    import importlib.util
    import json
    from pathlib import Path

    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "hfseq bridge export needs torch, which is not installed: pip install 'hfseq[bridge]'"
        )
    check_torch_version()
    path = Path(arguments.directory) / "config.json"
    if not path.is_file():
        raise UsageError(f"{arguments.directory} is not a model directory: config.json is missing")
    names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    class_name = arguments.class_name or next(iter(names), None)
    if class_name is None:
        raise UsageError(
            f"{path} does not name a class in `architectures`: pass the name of the PyTorch class "
            "with --class_name"
        )

    from hfseq_plugins.bridge.export import export_model
    from hfseq_plugins.bridge.model import bridged_class

    model_class = bridged_class(class_name.removeprefix("Flax"))
    model, params = model_class.from_pretrained(arguments.directory, _do_init=False)
    files = export_model(
        model,
        params,
        arguments.directory,
        arguments.batch_sizes,
        arguments.lengths,
        arguments.platforms,
    )
    for file in files:
        print(f"{arguments.directory}/bridge/{file}")
    return 0

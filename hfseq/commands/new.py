"""``hfseq new``: a working architecture in one file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from string import Template

from hfseq import plugins
from hfseq.errors import UsageError

TEMPLATE = Path(__file__).parents[1] / "templates" / "new_architecture.py.txt"


def add_new(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq new``."""
    parser.add_argument("name", metavar="NAME", help="model type, e.g. my-encoder")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: NAME.py")


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

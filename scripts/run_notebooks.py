#!/usr/bin/env python
"""Run the notebooks of the documentation and store their outputs.

python scripts/run_notebooks.py docs/notebooks/*.ipynb

This needs nbclient and ipykernel (``pip install -e ".[docs]"``). Each notebook runs in an empty
directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main(paths: list[str]) -> int:
    """Run each notebook in place."""
    import nbformat
    from nbclient import NotebookClient

    # environment of the kernels
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    for path in map(Path, paths):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(
                notebook, timeout=1200, resources={"metadata": {"path": folder}}
            ).execute()
        tidy(notebook)
        nbformat.write(notebook, path)
        print(path)
    return 0


def tidy(notebook: Any) -> None:
    """Remove outputs that depend on the machine: logs, execution times and versions."""
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

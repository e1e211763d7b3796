"""A training script that records the rows of each step.

    python recording_run.py NOTES OBJECTIVE FLAGS…

A line of NOTES is the number of a step, the process, and a digest of the rows of the corpus that
the step consumed, in their order; it is written when the step takes them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any


def record(notes: Path) -> None:
    """Makes every loader of this process record its batches in `notes`."""
    from hfseq.training import loader, processes

    make, batches = loader.Loader.make_batch, loader.Loader.batches
    digests: dict[int, list[str]] = {}

    class Noting:
        """Rows by step, which records each access."""

        def __init__(self, source: Any):
            self.source = source

        def __getitem__(self, step: int) -> Any:
            rows = self.source[step]
            digests[step] = [hashlib.sha1(row.tobytes()).hexdigest() for row in rows["input_ids"]]
            return rows

    def noting(self: Any, step: int) -> Any:
        source, self.source = self.source, Noting(self.source)
        try:
            return make(self, step)
        finally:
            self.source = source

    def giving(self: Any, *span: int) -> Generator[Any, None, None]:
        for item in batches(self, *span):
            line = {"step": item[0], "process": processes.process_index(), "rows": digests[item[0]]}
            with notes.open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield item

    loader.Loader.make_batch, loader.Loader.batches = noting, giving  # type: ignore[method-assign]


def main(notes: str, objective: str, *flags: str) -> None:
    """Trains, and records the rows."""
    from hfseq.training.arguments import parse
    from hfseq.training.run import main as train

    record(Path(notes))
    train(parse(list(flags), objective=objective), objective)


if __name__ == "__main__":
    from hfseq.errors import run_command

    sys.exit(run_command(lambda: main(*sys.argv[1:])))

"""A training script that records the rows of each step.

    python recording_run.py NOTES OBJECTIVE FLAGS…

Each process appends a line to the file NOTES when it starts a step. The line contains the number of
the step, the number of the process, the positions in the batch of the rows that this process reads,
and a digest of each of these rows.
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
    positions: dict[int, list[int]] = {}

    class Noting:
        """Wraps the batches of a loader, and computes the digests of the rows that are read."""

        def __init__(self, source: Any):
            self.source = source

        def fetch(self, step: int, part: Any) -> Any:
            rows = self.source.fetch(step, part)
            positions[step] = part.tolist()
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
            line = {"step": item.step, "process": processes.process_index()}
            line |= {"positions": positions[item.step], "rows": digests[item.step]}
            with notes.open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield item

    loader.Loader.make_batch, loader.Loader.batches = noting, giving  # type: ignore[method-assign]


def main(notes: str, objective: str, *flags: str) -> None:
    """Trains with these flags, and records the rows of each step in the file `notes`."""
    from hfseq.training.arguments import parse
    from hfseq.training.run import main as train

    record(Path(notes))
    train(parse(list(flags), objective=objective), objective)


if __name__ == "__main__":
    from hfseq.errors import run_command

    sys.exit(run_command(lambda: main(*sys.argv[1:])))

#!/usr/bin/env python
r"""Measure hfseq beside its peers: every suite, one command, the same on a CPU and on a GPU.

    python scripts/benchmarks/run.py                        # every suite
    python scripts/benchmarks/run.py train generation       # two of them
    python scripts/benchmarks/run.py train --only 'GPT-2.*512' --rounds 10
    python scripts/benchmarks/run.py --quick                # small models, minutes on a CPU
    python scripts/benchmarks/run.py --list                 # the rows; runs nothing

It needs a checkout, Python 3.11 and what a row needs: a row whose packages (or compiler) are
missing says so, and the others run. Contestants run in processes of their own and step in turn.
Tables go to docs/benchmarks/tables.md between markers, raw values to run_SUITE.json and pictures
next to it; with --output elsewhere, and with --quick nowhere unless --output says so.
Exit code 1 if a contestant failed, if results differ, or if nothing ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(p) for p in (HERE, HERE.parent.parent) if str(p) not in sys.path]

import harness
import limits
import suites
from suites import base, tables

ROUNDS = "Alternating rounds"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(suites.SUITES))
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("--only", metavar="REGEX", help="rows whose 'suite/case/name' matches")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small models, minutes on a CPU")
    sizes.add_argument("--tiny", action="store_true", help="tests only: the numbers mean nothing")
    parser.add_argument(
        "--peers", nargs="+", choices=base.PEERS, default=list(base.PEERS), help="who takes part"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], help="types to compute in"
    )
    parser.add_argument("--rounds", type=int, help="timed steps of each contestant")
    parser.add_argument(
        "--suite_time", type=float, metavar="SECONDS", help="start nothing more in a suite after it"
    )
    parser.add_argument(
        "--patience", type=float, default=900.0, metavar="SECONDS",
        help="end a contestant that is silent for so long",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "gpu"], help="whose sizes; found by default")
    parser.add_argument("--threads", type=int, help="cores for each; all by default")
    parser.add_argument(
        "--packages", metavar="DIR", help="packages that this Python lacks; its own come first"
    )
    parser.add_argument("--tag", help="a word in the names of what is written, e.g. h200")
    parser.add_argument("--output", type=Path, help="gets benchmarks/tables.md and more")
    parser.add_argument(
        "--join", action="store_true", help="keep what an earlier run here measured beside it"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.suites if name not in suites.SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}: there are {', '.join(suites.SUITES)}")
    for name in ("rounds", "threads", "suite_time", "patience"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name} {getattr(options, name)}: give a number above 0")
    try:
        re.compile(options.only or "")
    except re.error as error:
        parser.error(f"--only {options.only}: {error}")
    if options.tag and not re.fullmatch(r"\w+", options.tag):
        parser.error(f"--tag {options.tag}: give letters, digits and _")
    if options.packages and not Path(options.packages).is_dir():
        parser.error(f"--packages {options.packages}: there is no such directory")
    return options


def options_of(flags: argparse.Namespace) -> base.Options:
    """Return what the suites need to know of the flags."""
    return base.Options(
        profile="quick" if flags.quick else "tiny" if flags.tiny else "full",
        device=flags.device or base.detect_device(), peers=tuple(flags.peers),
        dtypes=tuple(flags.dtypes) if flags.dtypes else None, rounds=flags.rounds,
        threads=flags.threads or len(os.sched_getaffinity(0)),
    )  # fmt: skip


def chosen(suite: str, options: base.Options, only: str | None) -> list[base.Case]:
    """Return the cases of a suite with the contestants that ``only`` lets through."""
    found = []
    for case in suites.load(suite).cases(options):
        kept = tuple(
            c for c in case.contestants if re.search(only or "", f"{suite}/{case.name}/{c.name}")
        )
        if kept:
            rounds = options.rounds or case.rounds
            found.append(dataclasses.replace(case, contestants=kept, rounds=rounds))
    return found


def tell(line: str) -> None:
    """Print progress where it does not mix with the result; lists of tokens are left out."""
    print(line.split(" {")[0], file=sys.stderr, flush=True)


@dataclasses.dataclass
class Runner:
    """Runs the cases of suites; ``folder`` gets the weights, each written once."""

    options: base.Options
    folder: Path
    patience: float | None = None
    suite_time: float | None = None
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    _written: dict[str, tuple[str, list[str]]] = dataclasses.field(default_factory=dict)

    def suite(self, name: str, cases: list[base.Case]) -> list[dict]:
        """Run the cases of a suite in turn; returns a summary for every contestant."""
        started, found = time.monotonic(), list[dict]()

        def over() -> bool:
            return bool(self.suite_time) and time.monotonic() - started > self.suite_time

        for number, case in enumerate(cases, 1):
            tell(f"{name} {number}/{len(cases)}: {case.name}")
            if over():
                status = f"not run: the {self.suite_time:g} s of the suite were over"
                rows = [harness.Row(c.name, c.group, status) for c in case.contestants]
            else:
                rows = self._case(case, over)
            if name == "limits":
                self.limits |= limits.rates(rows)
            found += [base.summary(row, case, rows, self.limits) for row in rows]
        return found

    def _case(self, case: base.Case, over: Any) -> list[harness.Row]:
        contestants = case.contestants
        if case.weights and not all(c.missing() for c in contestants):
            folder, problems = self._weights(*case.weights)
            if problems:
                return [
                    harness.Row(
                        c.name, c.group, f"failed: {problems[0]}" if not c.missing() else
                        f"not run: no {', '.join(c.missing())}",
                    )
                    for c in contestants
                ]  # fmt: skip
            contestants = tuple(
                dataclasses.replace(c, settings=c.settings | {"weights": folder})
                for c in contestants
            )
        return harness.run(
            contestants, rounds=case.rounds, warmup=case.warmup, settle=case.settle,
            threads=self.options.threads, report=tell, stop=over, patience=self.patience,
        )  # fmt: skip

    def _weights(self, model: str, size: dict[str, Any]) -> tuple[str, list[str]]:
        """Write the weights of a model, unless they are there."""
        import contestants

        key = json.dumps([model, size], sort_keys=True)
        if key not in self._written:
            folder = str(self.folder / f"weights{len(self._written)}")
            problems = contestants.written_weights(
                folder, model, size, threads=self.options.threads, report=tell,
                patience=self.patience,
            )  # fmt: skip
            self._written[key] = folder, problems
        return self._written[key]


def command(arguments: Sequence[str] | None) -> str:
    """Return the command to repeat, without places of this machine."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for flag in ("--output", "--packages"):
        if flag in given:
            at = given.index(flag)
            del given[at : at + 2]
    return shlex.join(["python", "scripts/benchmarks/run.py", *given])


def title(suite: str, tag: str | None) -> str:
    """Return the name of what is written of a suite."""
    return f"run_{suite}_{tag}" if tag else f"run_{suite}"


def measure(
    name: str, runner: Runner, cases: list[base.Case], head: dict[str, Any]
) -> dict[str, Any]:
    """Run a suite and return what is written down of it."""
    suite = suites.load(name)
    rows = runner.suite(name, cases)
    if hasattr(suite, "finish"):
        suite.finish(rows)
    problems = suite.problems(rows) if hasattr(suite, "problems") else []
    problems += [
        f"{row['case']}: {row['name']} {row['status']}"
        for row in rows
        if row["status"].startswith("failed")
    ]
    rounds = {case.rounds for case in cases}
    counts = f"{min(rounds)}" if len(rounds) == 1 else f"{min(rounds)} to {max(rounds)}"
    return head | {
        "benchmark": title(name, head["tag"]), "suite": name,
        "rounds": f"{ROUNDS}: {counts}", "limits": runner.limits, "rows": rows,
        "remarks": suite.remarks(rows) if hasattr(suite, "remarks") else [], "problems": problems,
    }  # fmt: skip


def earlier_run(path: Path, head: dict[str, Any]) -> dict[str, Any] | None:
    """Return what ``path`` holds of an earlier run, if that was on this machine."""
    if not path.exists():
        return None
    earlier = json.loads(path.read_text(encoding="utf-8"))
    same = ("cpu", "cores", "versions")
    if any(earlier["machine"].get(key) != head["machine"].get(key) for key in same):
        tell(f"--join: {path} comes from another machine or other versions: leave --join out")
        raise SystemExit(2)
    return earlier


def join(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Put the rows of cases that only an earlier run measured before those of ``result``."""
    measured = {row["case"] for row in result["rows"]}
    kept = [row for row in earlier["rows"] if row["case"] not in measured and row["seconds"]]
    result["rows"] = kept + result["rows"]
    result["command"] = f"{earlier['command']}, then {result['command']}"
    limits = earlier["limits"].items() | result["limits"].items()
    result["limits"] = {name: max(v for n, v in limits if n == name) for name, _ in limits}


def publish(result: dict[str, Any], output: Path | None) -> None:
    """Print a suite's section, and write section, JSON and picture where there is an ``output``."""
    suite, name = suites.load(result["suite"]), result["benchmark"]
    picture = None
    if output is not None:
        from suites import pictures

        harness.write_json(output / "benchmarks" / f"{name}.json", result)
        drawn = pictures.draw(suite, result, output / "benchmarks" / f"{name}.png")
        if isinstance(drawn, str):
            result["remarks"].append(f"No picture: {drawn}.")
        elif drawn is not None:
            picture = drawn.name
    text = tables.section(result, suite, picture)
    if output is not None:
        harness.write_section(output / "benchmarks" / "tables.md", name, text)
    print(f"\n## {suite.TITLE}\n\n{text}\n", flush=True)
    for problem in result["problems"]:
        tell(problem)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    flags = parse(arguments)
    if flags.packages:
        folder = str(Path(flags.packages).resolve())
        os.environ[harness.EXTRA_PACKAGES] = folder
        sys.path.append(folder)
    options = options_of(flags)
    wanted = {n: chosen(n, options, flags.only) for n in flags.suites or suites.SUITES}
    wanted = {name: cases for name, cases in wanted.items() if cases}
    if not wanted:
        print(f"--only {flags.only} matches no row: see --list", file=sys.stderr)
        return 2
    if flags.list:
        for name, cases in wanted.items():
            print(*(f"{name}/{case.name}/{c.name}" for case in cases for c in case.contestants),
                  sep="\n")  # fmt: skip
        return 0
    output = flags.output or (harness.ROOT / "docs" if options.profile == "full" else None)
    head = {
        "command": command(arguments), "machine": harness.machine_facts(), "tag": flags.tag,
        "threads": options.threads, "profile": options.profile, "device": options.device,
    }  # fmt: skip
    before = {}
    if flags.join and output is not None:
        files = {name: output / "benchmarks" / f"{title(name, flags.tag)}.json" for name in wanted}
        found = {name: earlier_run(path, head) for name, path in files.items()}
        before = {name: earlier for name, earlier in found.items() if earlier}
    failed, ran = False, False
    with tempfile.TemporaryDirectory(prefix="hfseq-benchmarks-") as folder:
        os.environ["TMPDIR"] = folder  # what an ended contestant leaves behind goes with it
        runner = Runner(options, Path(folder), flags.patience, flags.suite_time)
        shares = any(tables.LIMIT in suites.load(name).COLUMNS for name in wanted)
        if shares and "limits" not in wanted:
            tell("measuring the limits of the machine")
            runner.suite("limits", chosen("limits", options, None))
        for name, cases in wanted.items():
            result = measure(name, runner, cases, head)
            if name in before:
                join(result, before[name])
            publish(result, output)
            failed |= bool(result["problems"])
            ran |= any(row["seconds"] for row in result["rows"])
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())

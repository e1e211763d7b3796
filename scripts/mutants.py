"""Mutation testing: measure how many small faults in the code the tests detect.

    pip install pytest-cov
    python scripts/mutants.py measure          # once: record the lines and the time of each test
    python scripts/mutants.py make --count 120 # write a random sample to .mutants/mutants.jsonl
    python scripts/mutants.py run              # write .mutants/results.jsonl; can be resumed
    python scripts/mutants.py verify           # check that the failed tests pass without mutants
    python scripts/mutants.py summary          # print the results

A mutant is a copy of the code with one change: another operator, comparison, constant or condition,
a removed statement, or two swapped arguments. For each mutant, the tests that execute the changed
line run in the order of their duration until one fails. The tests of the default suite run first.
If none of them fails, the tests of the slow tier follow. Mutants are written to a copy of the tree,
never to the checkout. They are stored as text with the surrounding lines, so that they still apply
after the code has moved to another file.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import difflib
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("hfseq", "plugins")
PYTEST_FAILED = 99  # exit code of a fork in which pytest itself failed
# Imported once before forking. None of them may initialize a JAX backend.
LIBRARIES = (
    "jax", "flax.nnx", "flax.linen", "optax", "orbax.checkpoint", "torch", "datasets", "evaluate",
    "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert",
    "transformers.models.bart.modeling_bart", "transformers.trainer", "tokenizers", "sacrebleu",
    "safetensors.numpy", "safetensors.torch", "matplotlib.pyplot", "pluggy",
)  # fmt: skip

# ------------------------------------------------------------------------------------ mutants


@dataclass
class Mutant:
    """A change that replaces the lines ``before`` by the lines ``after``.

    ``above`` and ``below`` are the surrounding lines, by which :func:`find` locates the change.
    """

    number: int
    file: str
    line: int
    package: str
    kind: str
    before: list[str]
    after: list[str]
    above: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Pow: "*", ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
    ast.MatMult: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
TOKEN = re.compile(rb"[-+*/%@<>=!&|^]+|\b(not in|is not|and|or|in|is)\b")
MESSAGE_FUNCTION = re.compile(
    r"(^|\.)(print|warn|warning|info|debug|error|exception|echo|say|field)$"
)


class Mutations(ast.NodeVisitor):
    """Collects the possible mutations of ``source``.

    A mutation is a tuple (kind, start, end, replacement), where start and end are byte offsets.
    """

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[tuple[str, int, int, str]] = []
        self.visit(ast.parse(source))

    def start(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.end(node)].decode()

    def replace(self, kind: str, node: ast.AST, by: str) -> None:
        self.found.append((kind, self.start(node), self.end(node), by))

    def between(self, operator_type: str, left: ast.AST, right: ast.AST, operator: ast.AST) -> None:
        """Replace the operator between two operands, keeping brackets."""
        start, end = self.end(left), self.start(right)
        match = TOKEN.search(self.source, start, end)
        if match and type(operator) in OPERATORS:
            self.found.append((operator_type, *match.span(), OPERATORS[type(operator)]))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        text = isinstance(node.left, (ast.JoinedStr, ast.Constant))
        if not (text and isinstance(node.op, ast.Add)):
            self.between("operator", node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self.between("comparison", left, right, operator)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("boolean", left, right, node.op)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.replace("constant", node, repr(node.value + 1))

    def condition(self, node: Any) -> None:
        if "TYPE_CHECKING" in self.text(node.test) or "__name__" in self.text(node.test):
            return
        self.replace("condition", node.test, f"(not ({self.text(node.test)}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = condition

    def visit_Call(self, node: ast.Call) -> None:
        if MESSAGE_FUNCTION.search(self.text(node.func)):
            return
        first = node.args[:2]
        if len(first) == 2 and not any(isinstance(argument, ast.Starred) for argument in first):
            a, b = self.text(first[0]), self.text(first[1])
            gap = self.source[self.end(first[0]) : self.start(first[1])].decode()
            if a != b:
                span = self.start(first[0]), self.end(first[1])
                self.found.append(("arguments", *span, b + gap + a))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not MESSAGE_FUNCTION.search(
            self.text(node.value.func)
        ):
            self.replace("statement", node, "pass")
            self.generic_visit(node)
        elif isinstance(node.value, (ast.Yield, ast.Await)):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # Removing the assignment of a local name would only raise a NameError.
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace("statement", node, "pass")  # messages are not mutated

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace("statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace("statement", node, "pass")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings, which are messages and names."""


def mutants_of(
    root: Path, file: str, package: str
) -> Iterator[tuple[str, Callable[[], Mutant | None]]]:
    """Yield the kind of each mutant of a file and a function that creates it.

    The function returns None if the change is not a different, valid program.
    """
    source = (root / file).read_text(encoding="utf-8")
    lines, mutations = source.splitlines(keepends=True), Mutations(source)

    def make(kind: str, start: int, end: int, text: str) -> Mutant | None:
        first = bisect.bisect_right(mutations.starts, start) - 1
        last = bisect.bisect_right(mutations.starts, max(start, end - 1)) - 1
        changed = mutations.source[:start] + text.encode() + mutations.source[end:]
        try:
            if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
                return None
        except SyntaxError:
            return None
        count = last + 1 - first + changed.count(b"\n") - mutations.source.count(b"\n")
        after = changed.decode().splitlines(keepends=True)[first : first + count]
        return Mutant(
            0,
            file,
            first + 1,
            package,
            kind,
            lines[first : last + 1],
            after,
            lines[max(0, first - 4) : first],
            lines[last + 1 : last + 5],
        )

    for mutation in mutations.found:
        yield mutation[0], functools.partial(make, *mutation)


def sample(root: Path, count: int, seed: int, least: int = 4) -> list[Mutant]:
    """Draw ``count`` mutants.

    Each package gets ``least`` mutants. The others are distributed in proportion to the number of
    possible mutants of the packages. Within a package, the kinds of mutation alternate.
    """
    packages: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            package = "hfseq/*.py" if file.count("/") == 1 else "/".join(file.split("/")[:2])
            for kind, make in mutants_of(root, file, package):
                packages[package][kind].append(make)
    rng, mutants = random.Random(seed), []
    sizes = {package: sum(map(len, kinds.values())) for package, kinds in packages.items()}
    free = count - least * len(packages)
    shares = {package: least + free * size / sum(sizes.values()) for package, size in sizes.items()}
    counts = {package: int(share) for package, share in shares.items()}
    for package in sorted(shares, key=lambda package: counts[package] - shares[package]):
        counts[package] += sum(counts.values()) < count
    for package in sorted(packages):
        kinds = sorted(packages[package])
        rng.shuffle(kinds)
        for index in range(counts[package]):
            candidates, mutant = packages[package][kinds[index % len(kinds)]], None
            while mutant is None:
                mutant = candidates.pop(rng.randrange(len(candidates)))()
            mutants.append(mutant)
    for number, mutant in enumerate(mutants):
        mutant.number = number
    return mutants


def find(root: Path, mutant: Mutant) -> tuple[str, int, int] | None:
    """Return the (file, line, indent) where a mutant applies, or None if it does not apply.

    Of several places with the same code, this is the one with the most similar surrounding lines.
    """

    def dedent_lines(lines: list[str]) -> str:
        return textwrap.dedent("".join(lines)).strip()

    text = dedent_lines(mutant.before)
    context = [line.strip() for line in mutant.above + mutant.below]
    best: tuple[float, str, int, int] | None = None
    for path in (path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))):
        file = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for index in range(len(lines) - len(mutant.before) + 1):
            candidate = lines[index : index + len(mutant.before)]
            if lines[index].strip() != mutant.before[0].strip() or dedent_lines(candidate) != text:
                continue
            candidate_context = (
                lines[max(0, index - 4) : index] + lines[index + len(candidate) :][:4]
            )
            matcher = difflib.SequenceMatcher(
                None, context, [line.strip() for line in candidate_context]
            )
            score = (
                matcher.ratio() + 0.1 * (file == mutant.file) + 0.01 * (index + 1 == mutant.line)
            )
            indent = len(candidate[0]) - len(candidate[0].lstrip())
            if best is None or score > best[0]:
                best = (score, file, index + 1, indent)
    return best and best[1:]


# --------------------------------------------------------------------------------- coverage


PHASE = re.compile(r"(\|| \()(setup|call|run|teardown)\)?$")


@dataclass
class Suite:
    """The results of ``measure``.

    Attributes:
        seconds: Duration of each test.
        slow: The tests of the slow tier.
        lines: For each file and line, the tests that execute the line.
    """

    seconds: dict[str, float]
    slow: set[str]
    lines: dict[str, dict[int, list[str]]]

    @classmethod
    def read(cls, folder: Path) -> Suite:
        from coverage import CoverageData

        seconds: dict[str, float] = defaultdict(float)
        slow = set()
        for text in (folder / "tests.jsonl").read_text().splitlines():
            record = json.loads(text)
            seconds[record["test"]] += record["seconds"]
            if record["slow"]:
                slow.add(record["test"])
        data, lines = CoverageData(str(folder / "coverage")), {}
        data.read()
        for path in data.measured_files():
            # The context is "test|call" in a worker and "test (call)" in a subprocess.
            lines[Path(path).relative_to(ROOT).as_posix()] = {
                line: sorted({PHASE.sub("", context) for context in contexts})
                for line, contexts in data.contexts_by_lineno(path).items()
            }
        return cls(dict(seconds), slow, lines)

    def covering(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute the mutant, fastest first.

        A statement over several lines counts as executed if its first line is executed. For code
        that runs when the module is imported, the tests of all lines of the module are returned.
        """
        of_file = self.lines.get(mutant.file, {})
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        within = [
            (node.end_lineno - node.lineno, node.lineno)  # type: ignore[operator]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
        ]
        tests = set(of_file.get(min(within)[1], ())) | set(of_file.get(mutant.line, ()))
        if not tests & self.seconds.keys() and _runs_on_import(ast.parse(source), mutant.line):
            tests = {test for tests in of_file.values() for test in tests}
        return sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__)


def _runs_on_import(tree: ast.Module, line: int) -> bool:
    return not any(
        isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )


def pytest_runtest_logreport(report: Any) -> None:
    """Record the duration of a test. During ``measure``, this file is loaded as a pytest plugin."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    record = {"test": report.nodeid, "seconds": report.duration, "slow": "slow" in report.keywords}
    with open(os.environ["HFSEQ_MUTANTS"] + "/tests.jsonl", "a") as file:
        print(json.dumps(record), file=file)


def measure_coverage(folder: Path, tests: list[str]) -> int:
    """Run the tests and record the lines that each of them executes. Default: all tests."""
    shutil.rmtree(folder / "measured", ignore_errors=True)
    (folder / "measured").mkdir(parents=True)
    settings = (
        "[run]\nsource = hfseq, plugins\npatch = subprocess\nsigterm = true\n"
        f"data_file = {folder}/measured/coverage\ncontext = ${{PYTEST_CURRENT_TEST-}}\n"
    )
    (folder / "coveragerc").write_text(settings)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider",
        "-n", "auto", "--dist", "loadfile", "--cov", f"--cov-config={folder}/coveragerc",
        "--cov-context=test", "--cov-report=", *(tests or ["-m", "slow or not slow"]),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HFSEQ_MUTANTS": str(folder / "measured")}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    for name in ("coverage", "tests.jsonl"):
        (folder / "measured" / name).replace(folder / name)
    return code


# ---------------------------------------------------------------------------------- testing


class TestReporter:
    """A pytest plugin that selects tests and reports their results through a pipe."""

    def __init__(self, wanted: list[str], write: int) -> None:
        self.wanted, self.pipe = set(wanted), write

    def report(self, *words: str) -> None:
        os.write(self.pipe, (json.dumps(words) + "\n").encode())

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report("failed", f"collection of {report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.report("start", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.report("failed", report.nodeid)


@dataclass
class Outcome:
    """The result of a mutant in one tier.

    Attributes:
        outcome: "killed" if a test failed, "survived" if all passed, "timeout" if a test did not
            finish.
        test: The test that failed or did not finish.
        ran: Number of tests that were started.
        of: Number of tests that execute the mutant.
        seconds: Duration of the tests.
    """

    outcome: str
    test: str = ""
    ran: int = 0
    of: int = 0
    seconds: float = 0.0


def run_tests(tree: Path, tests: list[str], expected: float, deadline: float, log: Path) -> Outcome:
    """Run the tests in a fork of this process until one fails."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(read)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = PYTEST_FAILED
        try:
            import pytest

            files = list(dict.fromkeys(test.split("::")[0] for test in tests))
            arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"]
            every = ["-m", "slow or not slow", "--rootdir", str(tree), "--tb=short"]
            # pytest warns about modules that were imported before it could rewrite them.
            every += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = pytest.main([*arguments, *every, *files], plugins=[TestReporter(tests, write)])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(int(code))
    os.close(write)
    buffer, started, result = b"", [], Outcome("survived", of=len(tests))
    while result.outcome == "survived":
        if not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            # Distinguish a hanging test from an exhausted time budget.
            lasted = time.monotonic() - started[-1][1] if started else expected
            result.outcome = "timeout" if lasted > max(60.0, 10 * expected) else "survived"
            result.test = started[-1][0] if started else ""
            break
        chunk = os.read(read, 65536)
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for event, test in map(json.loads, lines):
            if event == "start":
                started.append((test, time.monotonic()))
            else:
                result.outcome, result.test = "killed", test
                break
        if not chunk:
            break
    os.close(read)
    finished = result.outcome == "survived" and not result.test
    if not finished:
        _kill(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _kill(child)  # processes that the tests left running
    if code == PYTEST_FAILED:
        raise RuntimeError(f"pytest failed to run: see {log}")
    if finished and code not in (0, 5):
        result.outcome = "killed"
        result.test = started[-1][0] if started else f"pytest ended with {code}"
    result.ran = len(started)
    return result


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def batches_by_time(tests: list[str], seconds: Callable[[str], float]) -> Iterator[list[str]]:
    """Yield batches of tests with a total time of 5 s, 20 s, 80 s and so on, sorted by file."""
    budget, batch, spent = 5.0, [], 0.0
    for test in tests:
        if batch and spent + seconds(test) > budget:
            yield sorted(batch)
            budget, batch, spent = 4 * budget, [], 0.0
        batch.append(test)
        spent += seconds(test)
    if batch:
        yield sorted(batch)


class Tree:
    """A copy of the checkout that contains one mutant at a time."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "work" / ROOT.name, folder / "pytest.log"
        shutil.rmtree(self.root.parent, ignore_errors=True)
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        if (ROOT.parent / "shared").exists():  # data used by tests
            (self.root.parent / "shared").symlink_to(ROOT.parent / "shared")
        os.chdir(self.root)
        sys.path[:0] = [str(self.root), str(self.root / "plugins")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        importlib.import_module("tests.support.environment")  # must be set before jax is imported
        for name in LIBRARIES:
            try:
                importlib.import_module(name)
            except ImportError:
                print(f"{name} cannot be imported and is skipped")

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        # Two mutants with equal size and modification time would share their bytecode.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: list[str], suite: Suite, limit: float) -> Outcome:
        begin, result = time.monotonic(), Outcome("survived", of=len(tests))
        for batch in batches_by_time(tests, suite.seconds.__getitem__):
            longest = max(suite.seconds[test] for test in batch)
            part = run_tests(self.root, batch, longest, begin + limit, self.log)
            result.outcome, result.test, result.ran = part.outcome, part.test, result.ran + part.ran
            if result.outcome != "survived" or time.monotonic() - begin > limit:
                break
        result.seconds = round(time.monotonic() - begin, 1)
        return result


def run(folder: Path, limit: float) -> None:
    """Test every mutant without a result."""
    suite = Suite.read(folder)
    mutants = read(folder / "mutants.jsonl")
    results = folder / "results.jsonl"
    finished_numbers = {record["number"] for record in _records(results)}
    tree = Tree(folder)
    for mutant in mutants:
        if mutant.number in finished_numbers:
            continue
        location = find(ROOT, mutant)
        record: dict[str, Any] = asdict(mutant)
        if location is None:
            record["outcome"] = "not found"
        else:
            mutant.file, mutant.line, indent = location
            source = (ROOT / mutant.file).read_text(encoding="utf-8")
            lines = source.splitlines(keepends=True)
            after = textwrap.dedent("".join(mutant.after))
            first = mutant.line - 1
            lines[first : first + len(mutant.before)] = [textwrap.indent(after, " " * indent)]
            covering = suite.covering(mutant)
            tree.write(mutant.file, "".join(lines))
            record |= {"file": mutant.file, "line": mutant.line, "outcome": "survived"}
            for tier in ("default", "slow"):
                tests = [test for test in covering if (test in suite.slow) == (tier == "slow")]
                outcome = tree.test(tests, suite, limit)
                record[tier], record["outcome"] = asdict(outcome), outcome.outcome
                if outcome.outcome != "survived":
                    break
            tree.write(mutant.file, source)
        with results.open("a") as file:
            print(json.dumps(record), file=file)
        location = f"{mutant.number:4} {mutant.file}:{mutant.line} {mutant.kind}"
        print(f"{location}: {record['outcome']}", flush=True)


def verify(folder: Path) -> None:
    """Check that all tests that killed a mutant pass on the unchanged code."""
    suite, tree = Suite.read(folder), Tree(folder)
    killers = {
        record[tier]["test"]
        for record in _records(folder / "results.jsonl")
        for tier in ("default", "slow")
        if record.get(tier, {}).get("outcome") == "killed"
    }
    for test in sorted(killers & suite.seconds.keys(), key=suite.seconds.__getitem__):
        outcome = tree.test([test], suite, 600)
        if outcome.outcome != "survived" or not outcome.ran:
            print(f"{test}: {outcome.outcome} without a mutant, {outcome.ran} tests ran")


# --------------------------------------------------------------------------------- commands


def read(path: Path) -> list[Mutant]:
    return [Mutant(**record) for record in _records(path)]


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def summary(folder: Path) -> None:
    records = _records(folder / "results.jsonl")
    print(f"{'package':24} mutants  default suite  with slow tier  timeout  survived")
    for package in [*sorted({record["package"] for record in records}), ""]:
        of_package = [record for record in records if package in ("", record["package"])]
        default = sum(r.get("default", {}).get("outcome") == "killed" for r in of_package)
        count = Counter(record["outcome"] for record in of_package)
        print(
            f"{package or 'all':24} {len(of_package):7}  {default:13}  {count['killed']:14}"
            f"  {count['timeout']:7}  {count['survived']:8}"
        )
    for record in records:
        if record["outcome"] != "killed":
            print(f"\n{record['file']}:{record['line']} {record['kind']}: {record['outcome']}")
            print("- " + "- ".join(record["before"]) + "+ " + "+ ".join(record["after"]), end="")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["measure", "make", "run", "verify", "summary"])
    parser.add_argument("tests", nargs="*", help="for measure: tests or other pytest arguments")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".mutants", help="directory for mutants and results"
    )
    parser.add_argument(
        "--count", type=int, default=120, help="number of mutants (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds per mutant and tier (default: %(default)s)",
    )
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.command == "measure":
        sys.exit(measure_coverage(folder, arguments.tests))
    elif arguments.command == "make":
        mutants = sample(ROOT, arguments.count, arguments.seed)
        text = "".join(json.dumps(asdict(mutant)) + "\n" for mutant in mutants)
        (folder / "mutants.jsonl").write_text(text)
        print(f"{len(mutants)} mutants of {len({m.package for m in mutants})} packages")
    elif arguments.command == "run":
        run(folder, arguments.limit)
    elif arguments.command == "verify":
        verify(folder)
    summary(folder)


if __name__ == "__main__":
    main()

"""Flags from dataclasses: help and errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hfseq.data.arguments import option
from hfseq.errors import UsageError
from hfseq.training.arguments import flag_names, make_parser, parse_flags


@dataclass
class Some:
    """A flag of each type."""

    run_name: str = field(metadata={"help": "What it is called."})
    save_steps: int = option(500, "How often.")
    learning_rate: float = option(5e-5, "How fast.")
    use_cache: bool = option(True, "Whether.")
    debug: bool = option(False, "More words.")
    cache_dir: str | None = option(None, "Where.")
    report_to: list[str] = field(default_factory=lambda: ["a", "b"], metadata={"help": "Whom."})


@dataclass
class Other:
    """More flags."""

    seed: int = option(1, "A number.")

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}: give 0 or more")


def test_each_dataclass_is_filled():
    some, other = parse_flags((Some, Other), ["--run_name", "x", "--save-steps=7", "--seed", "3"])
    assert (some.run_name, some.save_steps, other.seed) == ("x", 7, 3)
    assert flag_names((Some, Other)) >= {"run_name", "seed"}


def test_help_shows_one_spelling_and_useful_defaults():
    text = make_parser((Some,), "What it does.\n\n    the command").format_help()
    assert "\n    the command\n" in text, "the description keeps its lines"
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "--run_name VALUE What it is called." in lines
    assert "--save_steps N How often. (default: 500)" in lines
    assert "--learning_rate X How fast. (default: 5e-05)" in lines
    assert "--use_cache Whether." in lines and "--no_use_cache Whether." in lines
    assert "--report_to VALUE [...] Whom. (default: a b)" in lines
    assert "None" not in text and "--save-steps" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--save_step", "1", "--savesteps", "2"],
            "unknown flag --savesteps; did you mean '--save_",
        ),
        (["--zzz"], "unknown flag --zzz"),
        (["stray", "a b"], "argument stray 'a b'"),
        (["--seed", "-1"], "--seed -1: give 0 or more"),
    ],
)
def test_a_mistake_is_a_usage_error_that_names_it(given, message):
    with pytest.raises(UsageError) as error:
        parse_flags((Some, Other), ["--run_name", "x", *given])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "required: --run_name"),
        (["--run_name", "x", "--save_steps", "many"], "invalid int value: 'many'"),
        (["--run_name"], "expected one argument"),
    ],
)
def test_argparse_errors_exit_with_2(given, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags((Some,), given)
    assert stop.value.code == 2
    usage, problem = capsys.readouterr().err.splitlines()
    assert message in problem and "--help lists them" in usage

"""Command-line interface of ``hfseq evaluate``: tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from hfseq.cli import flags
from hfseq.cli.models import prepare_devices
from hfseq.cli.text import add_json
from hfseq.errors import (
    DataError,
    HfseqError,
    UsageError,
    first_line,
    optional_import,
    write_atomically,
)

EXAMPLES = """hfseq evaluate my-gpt2 --tasks lambada_openai,hellaswag --limit 100
hfseq evaluate my-adapter --task riddles --include_path my-tasks --num_fewshot 3
hfseq evaluate my-chat --tasks gsm8k --apply_chat_template --output_file gsm8k.json"""


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq evaluate``, whose names are those of lm-evaluation-harness."""
    parser.add_argument("model", metavar="DIR", help="Directory or Hub name of a causal LM.")
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks",
        "--task",
        action="extend",
        type=lambda text: text.split(","),
        required=True,
        metavar="A,B",
        help="Comma-separated tasks, groups, tags, patterns such as mmlu_*, or YAML files.",
    )
    group.add_argument(
        "--include_path", metavar="DIR", help="Directory with additional tasks. Default: none."
    )
    group.add_argument(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="Few-shot examples per context. Default: the number that the task defines.",
    )
    group.add_argument(
        "--limit",
        type=float,
        metavar="N",
        help="Number of documents per task, or a fraction below 1. Default: all documents.",
    )
    group.add_argument(
        "--apply_chat_template",
        action="store_true",
        help="Format contexts with the model's chat template.",
    )
    group = parser.add_argument_group("output")
    add_json(group, "Print the results of lm-evaluation-harness as JSON.")
    flags.add_flag(
        group,
        "output_file",
        help_text="JSON file for the results. Without --json, their table is also printed.",
        default_text="none",
        aliases=("--output",),
    )
    flags.add_flag(group, "disable_tqdm")
    flags.add_model_flags(parser.add_argument_group("model"), batch_size=8)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Evaluates the model and prints the results of lm-evaluation-harness."""
    problems = [
        f"--{name} {value} must be {rule}"
        for name, value, minimum, rule in (
            ("num_fewshot", arguments.num_fewshot, 0, "at least 0"),
            ("limit", arguments.limit, 1e-9, "above 0"),
        )
        if value is not None and value < minimum
    ]
    if arguments.include_path and not Path(arguments.include_path).is_dir():
        problems.append(f"--include_path {arguments.include_path} is not a directory")
    if arguments.output_file and not Path(arguments.output_file).absolute().parent.is_dir():
        problems.append(f"--output_file {arguments.output_file}: the directory does not exist")
    if problems:
        raise UsageError("; ".join(problems))
    with optional_import("hfseq evaluate", "lm_eval", "hfseq[eval]"):
        import lm_eval
        from lm_eval.utils import handle_non_serializable, make_table

        import hfseq.pipelines.lm_eval  # noqa: F401  # registers the model
    manager, tasks = find_tasks(arguments.tasks, arguments.include_path)
    prepare_devices(arguments)
    limit = arguments.limit
    try:
        results = lm_eval.simple_evaluate(
            model="hfseq",
            model_args={
                "pretrained": arguments.model,
                "dtype": arguments.precision,
                "disable_tqdm": arguments.disable_tqdm,
            },
            tasks=tasks,
            task_manager=manager,
            num_fewshot=arguments.num_fewshot,
            batch_size=arguments.batch_size,
            log_samples=False,
            limit=limit if limit is None or limit < 1 else int(limit),
            apply_chat_template=arguments.apply_chat_template,
        )
    except HfseqError:
        raise
    except Exception as error:  # raised by datasets, templates and metrics of the tasks
        raise DataError(
            f"lm_eval cannot evaluate {','.join(tasks)}: {first_line(error)}"
        ) from error
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    if arguments.output_file:
        write_atomically(Path(arguments.output_file), text + "\n")
    if arguments.json:
        if not arguments.output_file:
            print(text)
        return 0
    for column in ("results", "groups"):
        if results.get(column):
            print(make_table(results, column))
    return 0


def find_tasks(names: list[str], include_path: str | None) -> tuple[Any, list[str]]:
    """Resolves task names.

    Listing the thousands of tasks of lm-evaluation-harness takes seconds. The list is not read if
    ``include_path`` and the files in ``names`` define all requested tasks.

    Args:
        names: Tasks, groups, tags, patterns or files.
        include_path: Directory with additional tasks, or `None`.

    Returns:
        A ``TaskManager``, and the names and file paths of the tasks.

    Raises:
        UsageError: A name does not match any task. The message contains similar names.
    """
    from lm_eval.tasks import TaskManager

    files = {name for name in names if name.endswith((".yaml", ".yml")) and Path(name).is_file()}
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if not {*names} <= files | {*manager.all_subtasks}:  # groups may contain tasks from elsewhere
        manager = TaskManager(include_path=include_path)
    task_names: list[str] = []
    for name in names:
        matches = [str(Path(name).absolute())] if name in files else manager.match_tasks([name])
        if not matches:
            suggestions = difflib.get_close_matches(name, manager.all_tasks, n=5)
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
            raise UsageError(f"--tasks {name}: unknown task, group, tag or file{hint}")
        task_names += [match for match in matches if match not in task_names]
    return manager, task_names

"""``hfseq evaluate``: a language model on tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

from hfseq.cli.models import add_model_flags, prepare_devices
from hfseq.cli.text import add_json
from hfseq.errors import DataError, HfseqError, UsageError, first_line, write_atomically

EXAMPLES = """hfseq evaluate my-gpt2 --tasks lambada_openai,hellaswag --limit 100
hfseq evaluate my-adapter --task riddles --include_path my-tasks --num_fewshot 3
hfseq evaluate my-chat --tasks gsm8k --apply_chat_template --output gsm8k.json"""


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq evaluate``, which have the names of the harness's own."""
    parser.add_argument("model", metavar="DIR", help="directory or Hub name of a causal LM")
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks",
        "--task",
        action="extend",
        type=lambda text: text.split(","),
        required=True,
        metavar="A,B",
        help="tasks, groups, tags, patterns such as mmlu_*, or files (A.yaml)",
    )
    group.add_argument("--include_path", metavar="DIR", help="a folder of tasks of your own")
    group.add_argument(
        "--num_fewshot", type=int, metavar="N", help="examples in each context; default: the task's"
    )
    group.add_argument(
        "--limit", type=float, metavar="N", help="the first N documents of each task, or a share <1"
    )
    group.add_argument(
        "--apply_chat_template", action="store_true", help="contexts are conversations"
    )
    group = parser.add_argument_group("output")
    add_json(group, "print the harness's results as JSON")
    group.add_argument("--output", metavar="FILE", help="write them as JSON there, too")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--batch_size", type=int, metavar="N", default=8, help="requests computed together (8)"
    )
    add_model_flags(group)


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate, and print the harness's table."""
    problems = [
        f"--{name} {value}: give a number {rule}"
        for name, value, least, rule in (
            ("num_fewshot", arguments.num_fewshot, 0, "of at least 0"),
            ("limit", arguments.limit, 1e-9, "above 0"),
            ("batch_size", arguments.batch_size, 1, "of at least 1"),
        )
        if value is not None and value < least
    ]
    if arguments.include_path and not Path(arguments.include_path).is_dir():
        problems.append(f"--include_path {arguments.include_path} is no directory")
    if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
        problems.append(f"--output {arguments.output}: there is no such directory")
    if problems:
        raise UsageError("; ".join(problems))
    try:
        import lm_eval
        from lm_eval.utils import handle_non_serializable, make_table

        import hfseq.pipelines.lm_eval  # noqa: F401  # registers the model
    except ImportError as error:
        raise UsageError(f'evaluation needs lm-eval: pip install "hfseq[eval]" ({error})') from None
    manager, tasks = find_tasks(arguments.tasks, arguments.include_path)
    prepare_devices(arguments)
    limit = arguments.limit
    try:
        results = lm_eval.simple_evaluate(
            model="hfseq",
            model_args={"pretrained": arguments.model, "dtype": arguments.precision},
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
    except Exception as error:  # of datasets, templates and metrics that the tasks name
        raise DataError(
            f"lm_eval cannot evaluate {','.join(tasks)}: {first_line(error)}"
        ) from error
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    if arguments.output:
        write_atomically(Path(arguments.output), text + "\n")
    if arguments.json:
        print(text)
        return 0
    for column in ("results", "groups"):
        if results.get(column):
            print(make_table(results, column))
    return 0


def find_tasks(names: list[str], include_path: str | None) -> tuple[Any, list[str]]:
    """Return a TaskManager, and what ``names`` mean to it.

    The harness's own thousands of tasks take seconds to list: where a folder has all that is asked
    for they are left alone.

    **Raises:** UsageError for what is no task, with those that have a name like it.
    """
    from lm_eval.tasks import TaskManager

    files = {name for name in names if name.endswith((".yaml", ".yml")) and Path(name).is_file()}
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if not {*names} <= files | {*manager.all_subtasks}:  # groups may have parts that are elsewhere
        manager = TaskManager(include_path=include_path)
    found: list[str] = []
    for name in names:
        matches = [str(Path(name).absolute())] if name in files else manager.match_tasks([name])
        if not matches:
            near = difflib.get_close_matches(name, manager.all_tasks, n=5)
            hint = f"; near names are {', '.join(near)}" if near else ""
            raise UsageError(f"--tasks {name}: there is no such task, group, tag or file{hint}")
        found += [match for match in matches if match not in found]
    return manager, found

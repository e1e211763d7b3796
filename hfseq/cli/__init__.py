"""The ``hfseq`` command: its subcommands in order, and the flags that they share."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from hfseq.cli import (
    chat,
    combine,
    convert,
    evaluate,
    inspect,
    launch,
    models,
    plan,
    port,
    project,
    prove,
    quickstart,
    report,
    retrieval,
    tasks,
)
from hfseq.cli.port import coverage
from hfseq.cli.text import add_json
from hfseq.errors import expand_home, optional_import, run_command
from hfseq.plugins import __version__
from hfseq.training import aot
from hfseq.training.arguments import reject_token_flags
from hfseq.training.flag_names import resolve_flags

EXAMPLES = """examples:
  hfseq quickstart                       train a small language model in a few minutes
  hfseq train --list                     list the training objectives
  hfseq train mlm --help                 show examples and flags of an objective
  hfseq launch --help                    start several processes of a run on this machine
  hfseq tokenizer --help                 train a tokenizer on your own text
  hfseq env                              show versions, plugins and devices, for a bug report
  hfseq new my-encoder                   write my_encoder.py, a working architecture in one file
  hfseq port arcee                       write arcee.py, a port of a PyTorch model file
  hfseq plan --config gpt2 --devices h200:8   estimate memory, communication and time of a run
  hfseq report DIR                       show the progress or the results of a run
  hfseq compare DIR DIR                  compare the curves and the flags of runs
  hfseq inspect DIR                      show the contents and the problems of a checkpoint
  hfseq convert DIR OUT --to msgpack     convert a checkpoint to another format
  hfseq combine --help                   create a captioning model from two checkpoints
  hfseq prove DIR                        check that other programs compute the same outputs
  hfseq fill-mask DIR "a <mask> text"    predict masked tokens
  hfseq generate DIR "Once upon a time"  generate text with a language model
  hfseq chat DIR                         chat with a language model
  hfseq translate DIR < in.txt           translate line by line
  hfseq transcribe DIR talk.flac         transcribe audio to text or subtitles
  hfseq caption DIR photos/              generate captions of images
  hfseq classify DIR photos/             classify images or texts
  hfseq tag DIR "Ada lives in Oslo."     find named entities in texts
  hfseq answer DIR "Who?" --context @f   answer a question from a text
  hfseq summarize DIR < articles.txt     summarize line by line
  hfseq embed DIR < sentences.txt        compute text embeddings
  hfseq rank DIR "query" < texts.txt     sort texts by their relevance
  hfseq search DIR notes/ "query"        search a folder of texts
  hfseq evaluate DIR --tasks hellaswag   evaluate on tasks of lm-evaluation-harness
  hfseq push DIR --hub_model_id me/it    upload a model directory as one commit

Documentation: docs/cli.md and docs/plugins.md."""

COMPLETION_EXAMPLES = """eval "$(hfseq completion bash)"      # in ~/.bashrc, for new shells
hfseq completion zsh > "${fpath[1]}/_hfseq"
hfseq completion fish > ~/.config/fish/completions/hfseq.fish"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq completion``."""
    shells = ("bash", "zsh", "fish", "tcsh")
    parser.add_argument("shell", choices=shells, help="Shell to print the script for.")


def run_completion(arguments: argparse.Namespace) -> int:
    """Prints the completion script of a shell.

    For flags without a fixed set of values, the script completes file names.
    """
    with optional_import("completion", "shtab", "hfseq[completion]"):
        import shtab

    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in (parser, *commands.choices.values()):
        for action in command._actions:
            if action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE
    print(shtab.complete(parser, arguments.shell))
    return 0


Flags = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]

#: Name, description, function that adds the flags, function that runs the command and returns the
#: exit code, examples.
COMMANDS: tuple[tuple[str, str, Flags, Run, str], ...] = (
    ("quickstart", "train a small masked language model on text that is part of Python",
     quickstart.add_quickstart, quickstart.run_quickstart, "hfseq quickstart --output_dir demo"),
    ("env", "show versions, plugins and devices", project.add_env, project.run_env,
     "hfseq env --json"),
    ("plugins", "list the plugins and their registered names", add_json, project.run_plugins,
     "hfseq plugins --json"),
    ("new", "write a working architecture in one file", project.add_new, project.run_new,
     "hfseq new my-encoder"),
    ("port", "translate a model file of Transformers to a plugin, and compare it with PyTorch",
     port.add_port, port.run_port, port.EXAMPLES),
    ("port-coverage", "port all model types of Transformers and compare them with PyTorch",
     coverage.add_coverage, coverage.run_coverage, coverage.EXAMPLES),
    ("plan", "estimate memory, communication and time of a training run, without its devices",
     plan.add_plan, plan.run_plan,
     "hfseq plan --config gpt2 --mesh data=8,fsdp=8 --devices h200:64 --length 1024"),
    ("launch", "start several processes of a run on this machine", launch.add_launch,
     launch.run_launch, launch.EXAMPLES),
    ("report", "show the progress or the results of a run", report.add_report, report.run_report,
     report.EXAMPLES),
    ("compare", "compare the curves and the flags of runs", report.add_compare, report.run_compare,
     report.COMPARE_EXAMPLES),
    ("inspect", "show the contents and the problems of a checkpoint", inspect.add_inspect,
     inspect.run_inspect, inspect.EXAMPLES),
    ("convert", "convert a checkpoint to another format or data type", convert.add_convert,
     convert.run_convert, convert.EXAMPLES),
    ("combine", "create a captioning model from an image encoder and a text decoder",
     combine.add_combine, combine.run_combine,
     "hfseq combine --output_dir vit-gpt2 --decoder_model_name_or_path gpt2 \\\n"
     "  --encoder_model_name_or_path google/vit-base-patch16-224-in21k"),
    ("prove", "check that other programs compute the same outputs from a model directory",
     prove.add_prove, prove.run_prove, prove.EXAMPLES),
    ("fill-mask", "predict masked tokens with a masked language model", models.add_fill_mask,
     models.run_fill_mask, f'hfseq fill-mask my-roberta "Return the {models.MASK} of the list."'),
    ("generate", "generate text with a language model", models.add_generate, models.run_generate,
     models.EXAMPLES),
    ("chat", "chat with a language model that has a chat template", chat.add_chat, chat.run_chat,
     chat.EXAMPLES),
    ("translate", "translate text, a file or standard input", models.add_translate,
     models.run_translate, 'hfseq translate my-translator "The cat is blue." --num_beams 4'),
    ("transcribe", "transcribe audio files", models.add_transcribe,
     models.run_transcribe,
     "hfseq transcribe openai/whisper-tiny talks/ --output_format srt --output_dir subtitles"),
    ("caption", "generate captions of images", models.add_caption, models.run_caption,
     "hfseq caption my-captions photos/ --num_beams 4 --json > captions.jsonl"),
    ("classify", "classify texts or images", tasks.add_classify,
     tasks.run_classify,
     "hfseq classify my-cola 'They drank the pub dry.'\n"
     "hfseq classify my-nli --candidate_labels sport,politics --input_file news.txt --json\n"
     "hfseq classify google/vit-base-patch16-224 photos/ --top_k 3"),
    ("tag", "find named entities in texts", tasks.add_tag, tasks.run_tag,
     "hfseq tag my-ner 'Ada lives in Oslo.'\n"
     "hfseq tag my-ner --input_file letters.txt --json > entities.jsonl"),
    ("answer", "answer questions from a context", tasks.add_answer, tasks.run_answer,
     "hfseq answer my-qa 'Who wrote it?' --context @chapter.txt --top_k 3\n"
     "hfseq answer my-qa --input_file dev-v2.0.json --handle_impossible_answer --json"),
    ("embed", "compute text embeddings, as sentence-transformers does", tasks.add_embed,
     tasks.run_embed,
     "hfseq embed my-vectors 'how old is the law' --json\n"
     "hfseq embed my-vectors --input_file sentences.txt --output_file vectors.npy"),
    ("rank", "sort texts by their relevance to a query, with a cross-encoder", retrieval.add_rank,
     retrieval.run_rank,
     "hfseq rank my-reranker 'how old is the law' --input_file texts.txt --top_k 3"),
    ("search", "search a folder of texts", retrieval.add_search, retrieval.run_search,
     "hfseq search my-vectors notes/ 'how old is the law' --top_k 5\n"
     "hfseq search my-vectors notes/ 'how old is the law' --reranker my-reranker --json"),
    ("mine", "find hard negatives for training retrieval models", retrieval.add_mine,
     retrieval.run_mine,
     "hfseq mine my-vectors --train_file pairs.jsonl --output_file triplets.jsonl \\\n"
     "  --relative_margin 0.05 --num_negatives 5"),
    ("evaluate-retrieval", "evaluate a retrieval model by search, reranking or similarity",
     retrieval.add_evaluate, retrieval.run_evaluate,
     "hfseq evaluate-retrieval my-vectors --dataset scifact/ --json\n"
     "hfseq evaluate-retrieval my-reranker --reranking_file dev.jsonl"),
    ("summarize", "summarize texts", tasks.add_summarize, tasks.run_summarize,
     "hfseq summarize my-t5 --input_file articles.txt --output_file short.txt"),
    ("evaluate", "evaluate a language model on tasks of lm-evaluation-harness",
     evaluate.add_evaluate, evaluate.run_evaluate, evaluate.EXAMPLES),
    ("push", "push a model directory to the Hub", project.add_push, project.run_push,
     "hfseq push my-roberta --hub_model_id user/my-roberta"),
    ("completion", "print a shell script that completes commands and flags", add_completion,
     run_completion, COMPLETION_EXAMPLES),
)  # fmt: skip


#: Commands that parse their flags themselves, because they have hundreds of flags. The module of a
#: command is only imported when the command runs.
PROGRAMS = {
    "train": "train, fine-tune or evaluate a model",
    "tokenizer": "train a tokenizer on your own text",
    "bridge": "export and compare models that run the PyTorch code of Transformers",
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. Each command sets ``run`` to its function."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="hfseq",
        description="Tools for JAX/Flax sequence models: runs, checkpoints, models and plugins.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"hfseq {__version__}")
    _add_common(parser, "")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary in PROGRAMS.items():
        subparsers.add_parser(name, help=summary, add_help=False)
    for name, summary, add_flags, run, examples in COMMANDS:
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="\n  ".join(["examples:", *examples.splitlines()]),
            formatter_class=formatter,
        )
        _add_common(sub, "_after")
        add_flags(sub)
        sub.set_defaults(run=run)
    return parser


def _add_common(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Adds the flags that are allowed both before and after the command.

    The main parser and the parser of the command both have these flags. With equal names in the
    namespace, the default in the parser of the command would replace a value that was given before
    the command. The suffix makes the names different.
    """
    parser.add_argument(
        "--plugin",
        action="append",
        metavar="FILE",
        default=[],
        dest=f"plugin{suffix}",
        help="Plugin file to load (repeatable).",
    )
    parser.add_argument(
        "--debug", action="store_true", dest=f"debug{suffix}", help="Show the tracebacks of errors."
    )


def _command_position(args: Sequence[str]) -> int | None:
    """Returns the index of the command in ``args``, or `None` if there are only common flags."""
    position = 0
    while position < len(args) and args[position].startswith("-"):
        position += 2 if args[position] == "--plugin" else 1
    return position if position < len(args) else None


def _resolve(
    args: Sequence[str], position: int | None, parser: argparse.ArgumentParser
) -> list[str]:
    """Spells out abbreviated flags after the command, which is at the index ``position``.

    The flags of a program that a command runs, such as ``hfseq launch``, are not changed.
    """
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    if position is None or args[position] not in commands.choices:
        return list(args)
    command = commands.choices[args[position]]
    if any(action.nargs == argparse.REMAINDER for action in command._actions):
        return list(args)
    return [*args[: position + 1], *resolve_flags(args[position + 1 :], command)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments. Default: the arguments of the process.

    Returns:
        The exit code: 0, 1 for an error, or 2 for wrong usage.
    """
    args = expand_home(sys.argv[1:] if argv is None else argv)
    position = _command_position(args)
    if position is not None and args[position] in PROGRAMS:
        common = argparse.ArgumentParser(add_help=False)
        _add_common(common, "")
        before = common.parse_args(args[:position])
        program = importlib.import_module(f"hfseq.cli.{args[position]}")
        return program.main(args[position + 1 :], before.plugin, before.debug)

    def run() -> int:
        reject_token_flags(args)
        aot.start_quietly()
        parser = build_parser()
        arguments = parser.parse_args(_resolve(args, position, parser))
        arguments.plugin += arguments.plugin_after
        return arguments.run(arguments)

    return run_command(run, debug="--debug" in args)

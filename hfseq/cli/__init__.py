"""The ``hfseq`` command: its parts, their order, and what they share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from hfseq.cli import (
    chat,
    convert,
    evaluate,
    inspect,
    models,
    plan,
    project,
    prove,
    report,
    tasks,
)
from hfseq.cli.text import add_json
from hfseq.errors import run_command
from hfseq.plugins import __version__
from hfseq.training import aot
from hfseq.training.arguments import reject_token_flags

EXAMPLES = """examples:
  hfseq env                              versions, plugins and devices, for a bug report
  hfseq new my-encoder                   write my_encoder.py, a working architecture in one file
  hfseq plan --config gpt2 --devices h200:8   memory, exchange and time of a run, beforehand
  hfseq report DIR                       how a run is going, or went
  hfseq compare DIR DIR                  curves over each other, and which flags differ
  hfseq inspect DIR                      what a checkpoint holds, and what is wrong with it
  hfseq convert DIR OUT --to msgpack     the same weights in another format
  hfseq prove DIR                        do other programs compute the same from it
  hfseq fill-mask DIR "a <mask> text"    what a trained masked language model puts there
  hfseq generate DIR "Once upon a time"  what a language model writes
  hfseq chat DIR                         talk with a language model
  hfseq translate DIR < in.txt           translate line by line with a translation model
  hfseq transcribe DIR talk.flac         write down what is said, as text or subtitles
  hfseq caption DIR photos/              write what is to be seen, picture by picture
  hfseq classify DIR photos/             say which classes pictures, or texts, have
  hfseq tag DIR "Ada lives in Oslo."     find names in texts
  hfseq answer DIR "Who?" --context @f   answer from a text
  hfseq summarize DIR < articles.txt     summarise line by line
  hfseq embed DIR < sentences.txt        vectors of texts
  hfseq evaluate DIR --tasks hellaswag   scores on tasks of lm-evaluation-harness
  hfseq push DIR --hub_model_id me/it    upload a model directory as one commit

Documentation: docs/cli.md and docs/plugins.md."""

COMPLETION_EXAMPLES = """eval "$(hfseq completion bash)"      # in ~/.bashrc for all shells to come
hfseq completion zsh > "${fpath[1]}/_hfseq"
hfseq completion fish > ~/.config/fish/completions/hfseq.fish"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq completion``."""
    shells = ("bash", "zsh", "fish", "tcsh")
    parser.add_argument("shell", choices=shells, help="the shell to write the script for")


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script of a shell, in which files are offered where a flag takes any word."""
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

#: Name, what it does, what adds its flags, what runs it and returns the exit code, examples.
COMMANDS: tuple[tuple[str, str, Flags, Run, str], ...] = (
    ("env", "show versions, plugins and devices", project.add_env, project.run_env,
     "hfseq env --json"),
    ("plugins", "show what every plugin adds", add_json, project.run_plugins,
     "hfseq plugins --json"),
    ("new", "write a working architecture in one file", project.add_new, project.run_new,
     "hfseq new my-encoder"),
    ("plan", "say what a training run needs and takes, without its devices", plan.add_plan,
     plan.run_plan,
     "hfseq plan --config gpt2 --mesh data=8,fsdp=8 --devices h200:64 --length 1024"),
    ("report", "show how a run is going, or went", report.add_report, report.run_report,
     report.EXAMPLES),
    ("compare", "lay the curves of runs over each other", report.add_compare, report.run_compare,
     report.COMPARE_EXAMPLES),
    ("inspect", "show what a checkpoint holds, and what is wrong with it", inspect.add_inspect,
     inspect.run_inspect, inspect.EXAMPLES),
    ("convert", "write a model's weights in another format or type", convert.add_convert,
     convert.run_convert, convert.EXAMPLES),
    ("prove", "compare what other programs compute from a model directory", prove.add_prove,
     prove.run_prove, prove.EXAMPLES),
    ("fill-mask", "let a masked language model fill masks", models.add_fill_mask,
     models.run_fill_mask, f'hfseq fill-mask my-roberta "Return the {models.MASK} of the list."'),
    ("generate", "let a language model write", models.add_generate, models.run_generate,
     models.EXAMPLES),
    ("chat", "talk with a language model that has a chat template", chat.add_chat, chat.run_chat,
     chat.EXAMPLES),
    ("translate", "translate text, a file or standard input", models.add_translate,
     models.run_translate, 'hfseq translate my-translator "The cat is blue." --num_beams 4'),
    ("transcribe", "write down what is said in files of sound", models.add_transcribe,
     models.run_transcribe,
     "hfseq transcribe openai/whisper-tiny talks/ --output_format srt --output_dir subtitles"),
    ("caption", "write what is to be seen on pictures", models.add_caption, models.run_caption,
     "hfseq caption my-captions photos/ --num_beams 4 --json > captions.jsonl"),
    ("classify", "say which classes texts or pictures have", tasks.add_classify,
     tasks.run_classify,
     "hfseq classify my-cola 'They drank the pub dry.'\n"
     "hfseq classify my-nli --candidate_labels sport,politics --input_file news.txt --json\n"
     "hfseq classify google/vit-base-patch16-224 photos/ --top_k 3"),
    ("tag", "find names and other entities in texts", tasks.add_tag, tasks.run_tag,
     "hfseq tag my-ner 'Ada lives in Oslo.'\n"
     "hfseq tag my-ner --input_file letters.txt --json > entities.jsonl"),
    ("answer", "answer questions from a text", tasks.add_answer, tasks.run_answer,
     "hfseq answer my-qa 'Who wrote it?' --context @chapter.txt --top_k 3\n"
     "hfseq answer my-qa --input_file dev-v2.0.json --handle_impossible_answer --json"),
    ("embed", "make vectors of texts, as sentence-transformers does", tasks.add_embed,
     tasks.run_embed,
     "hfseq embed my-vectors 'how old is the law' --json\n"
     "hfseq embed my-vectors --input_file sentences.txt --output_file vectors.npy"),
    ("summarize", "summarise texts", tasks.add_summarize, tasks.run_summarize,
     "hfseq summarize my-t5 --input_file articles.txt --output_file short.txt"),
    ("evaluate", "evaluate a language model on tasks of lm-evaluation-harness",
     evaluate.add_evaluate, evaluate.run_evaluate, evaluate.EXAMPLES),
    ("push", "push a model directory to the Hub", project.add_push, project.run_push,
     "hfseq push my-roberta --hub_model_id user/my-roberta"),
    ("completion", "print a script that completes commands and flags in a shell", add_completion,
     run_completion, COMPLETION_EXAMPLES),
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run`` to its function."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="hfseq",
        description="JAX/Flax sequence models on Hugging Face: runs, checkpoints, models, plugins.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"hfseq {__version__}")
    _add_common(parser, "")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, does, add_flags, run, examples in COMMANDS:
        sub = subparsers.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            epilog="\n  ".join(["examples:", *examples.splitlines()]),
            formatter_class=formatter,
        )
        _add_common(sub, "_after")
        add_flags(sub)
        sub.set_defaults(run=run)
    return parser


def _add_common(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Add what may stand before and after the command; argparse keeps only one of equal names."""
    parser.add_argument(
        "--plugin",
        action="append",
        metavar="FILE",
        default=[],
        dest=f"plugin{suffix}",
        help="load this plugin file too (repeatable)",
    )
    parser.add_argument(
        "--debug", action="store_true", dest=f"debug{suffix}", help="show tracebacks of errors"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 for errors, 2 for wrong usage."""
    words = sys.argv[1:] if argv is None else argv

    def run() -> int:
        reject_token_flags(words)
        aot.start_quietly()
        arguments = build_parser().parse_args(words)
        arguments.plugin += arguments.plugin_after
        return arguments.run(arguments)

    return run_command(run, debug="--debug" in words)

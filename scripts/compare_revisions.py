#!/usr/bin/env python
r"""Prove that two revisions compute the same, to the last bit, for the recipe of every model card.

    python scripts/compare_revisions.py 04f3c5a            # that revision against this checkout
    python scripts/compare_revisions.py 04f3c5a HEAD --cards cola-fp8-encoder wikitext-2-gpt2
    python scripts/compare_revisions.py ../old . --steps 8 --keep runs

A revision is a directory with a checkout, or a name that git knows. The commands of
`model_cards/*/card.yaml` run with their own flags, models and batch sizes, in processes of their
own; only what takes long is less: the first part of each file of data, a few steps with a short
warm-up, an evaluation and a checkpoint half way, and few texts generated. Compared are
all logged numbers but times and memory, the files of weights and of the tokenizer, logits of fixed
inputs by the saved model, and what it generates (greedily, with beams, sampled with a seed). And a
run of OLD, cut back to its checkpoint half way, is gone on with by either: both must give what the
uninterrupted run of OLD gave.

Prints a table and the first differences; exit code 1 if there is one. Both sides share a cache of
compiled programs: one that is the same on both is compiled once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
# Where the data of a card lies below --data; the cards themselves say $DATA.
DATA = {
    "cola-fp8-encoder": "cola/raw",
    "enwik8-vq": "enwik8-4MB",
    "gutenberg-en-vq": "gutenberg-en",
    "norwegian-laws-bart": "norwegian-laws",
    "norwegian-laws-gpt2": "norwegian-laws",
    "norwegian-laws-roberta": "norwegian-laws",
    "norwegian-laws-t5": "norwegian-laws",
    "npk-nb-nn": "nb-nn-npk",
    "numbers-en-de": "",
    "tatoeba-en-es": "en-es-tatoeba",
    "wikitext-2-gpt2": "wikitext-2",
}
# Cards whose data is drawn, spoken, made up or cut by a program, which are not compared.
MADE = {
    "dates-sft",
    "digit-captions",
    "made-names-tagger",
    "made-questions-reader",
    "made-reports-writer",
    "sentences-en-es",
    "spoken-numbers-letters",
    "spoken-numbers-wav2vec2",
    "spoken-numbers-whisper",
}
BYTES = 300_000  # of each file that is trained on; of the others a tenth
# Of a log everything but this must be the same.
MEASURED = re.compile(r"time|second|mfu|memory")
HEADS = {
    "run_mlm_flax.py": "FlaxAutoModelForMaskedLM",
    "run_clm_flax.py": "FlaxAutoModelForCausalLM",
    "run_t5_mlm_flax.py": "FlaxAutoModelForSeq2SeqLM",
    "run_bart_dlm_flax.py": "FlaxAutoModelForSeq2SeqLM",
    "run_translation_flax.py": "FlaxAutoModelForSeq2SeqLM",
    "run_classification_flax.py": "FlaxAutoModelForSequenceClassification",
}
SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.8},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 0.9, "prng_key": 7},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", help="directory of a checkout, or a revision")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="the same; by default this one")
    parser.add_argument("--cards", nargs="+", default=list(DATA), choices=DATA, metavar="CARD")
    parser.add_argument("--steps", type=int, default=6, help="an even number (default: 6)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--keep", type=Path, help="an empty folder for all that is written")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.steps % 2:
        parser.error(f"--steps {arguments.steps}: give an even number, a checkpoint lies half way")
    if not arguments.data.is_dir():
        parser.error(f"--data {arguments.data} is no directory")
    if arguments.keep and arguments.keep.exists() and any(arguments.keep.iterdir()):
        parser.error(f"--keep {arguments.keep} is not empty")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaving no worktree behind
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        with checkout(arguments.old, work) as old, checkout(arguments.new, work) as new:
            return compare_cards(old, new, arguments, work)


@contextmanager
def checkout(given: str, work: Path) -> Iterator[Path]:
    """The directory of a revision: the one that was given, or a worktree for as long as needed."""
    if Path(given).is_dir():
        yield Path(given).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    folder = Path(tempfile.mkdtemp(prefix="revision-", dir=_made(work)))
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), given], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def compare_cards(old: Path, new: Path, arguments: argparse.Namespace, work: Path) -> int:
    """Run and compare each card; prints the table as it grows."""
    for side in (old, new):
        found = run_python(side, ["-c", "import hfseq; print(hfseq.__file__)"], work, work)
        if not Path(found.strip()).is_relative_to(side):
            sys.exit(f"{side} is not what Python imports there, but {found.strip()}")
    columns = ("log", "weights", "logits", "tokens", "continued")
    print(f"| card | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    problems: list[str] = []
    for card in arguments.cards:
        counts, wrong = compare_card(card, old, new, arguments, work)
        cells = [
            f"{counts[c]} same" if not wrong[c] else f"{len(wrong[c])} of {counts[c]} DIFFER"
            for c in columns
        ]
        print(f"| {card} | {' | '.join(cells)} |", flush=True)
        problems += [f"{card}, {c}: {text}" for c in columns for text in wrong[c][:5]]
    print("\n".join(["", *problems]) if problems else "\nno difference")
    return 1 if problems else 0


def compare_card(
    card: str, old: Path, new: Path, arguments: argparse.Namespace, work: Path
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """How many things of each column were compared, and which differ."""
    folders = {side: work / side / card for side in ("old", "new", "old-went-on", "new-went-on")}
    *before, training = commands(card, arguments, work)
    for side, tree in (("old", old), ("new", new)):
        for command in (*before, training):
            run_python(tree, command, _made(folders[side]), work)
    output = training[training.index("--output_dir") + 1]
    half = arguments.steps // 2
    for side, tree in (("old-went-on", old), ("new-went-on", new)):
        cut_back(folders["old"], folders[side], output, half)
        run_python(tree, training, folders[side], work)
    saved = {side: folder / output for side, folder in folders.items()}
    logs = {side: read_log(folder / "metrics.jsonl") for side, folder in saved.items()}
    files = {side: hashes(folder) for side, folder in saved.items()}
    probed = {}
    for side, tree in (("old", old), ("new", new)):
        printed = run_python(tree, [__file__, "--probe", training[0], saved[side]], work, work)
        probed[side] = json.loads(printed.splitlines()[-1])
    pairs = {
        "log": [(logs["old"], logs["new"])],
        "weights": [(files["old"], files["new"])],
        "logits": [(probed["old"]["logits"], probed["new"]["logits"])],
        "tokens": [(probed["old"]["tokens"], probed["new"]["tokens"])],
        # What OLD goes on with is its uninterrupted run, and what NEW goes on with is the same.
        "continued": [
            (expected[whole], found[side])
            for expected, found in ((logs, logs), (files, files))
            for whole, side in (("old", "old-went-on"), ("old-went-on", "new-went-on"))
        ],
    }
    wrong = {
        column: [text for pair in given for text in differences(*pair)]
        for column, given in pairs.items()
    }
    return {column: sum(len(one) for one, _ in given) for column, given in pairs.items()}, wrong


def cut_back(whole: Path, target: Path, output: str, step: int) -> None:
    """Copy the folder of a run as if it had been killed after the checkpoint of ``step``.

    Its log and its weights are of later steps: a run that goes on replaces both.
    """
    shutil.copytree(whole, target)
    for path in (target / output / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    for pattern in ("*_results.json", "generated_*.txt", "README.md", "*.png"):
        for path in (target / output).glob(pattern):
            path.unlink()


def commands(card: str, arguments: argparse.Namespace, work: Path) -> list[list[str]]:
    """The commands of a card as script and flags, cut short; the training is the last."""
    import yaml

    source, cut = arguments.data / DATA[card], work / "data" / card
    given = yaml.safe_load((CARDS / card / "card.yaml").read_text())["commands"]
    found = []
    for command in given:
        words, flag = [], ""
        for word in shlex.split(command)[1:]:
            flag = word if word.startswith("--") else flag
            if not word.startswith("$DATA/"):
                words.append(word)
                continue
            paths = sorted(source.glob(word.removeprefix("$DATA/")))
            if not paths:
                sys.exit(f"{card}: there is no {word} in {source}")
            size = BYTES // len(paths) if flag == "--train_file" else BYTES // 10
            words += [str(first_part(path, cut / path.name, size)) for path in paths]
        found.append([f"scripts/{Path(words[0]).name}", *words[1:]])
    training = found[-1]
    if shlex.join(training).count("--tokenizer_name bytes"):  # which no command of the card makes
        made = "scripts/train_tokenizer.py --model_type vq_transformer --vocabulary bytes"
        found.insert(0, [*made.split(), "--output_dir", "bytes"])
    half = arguments.steps // 2
    own = {
        "max_steps": arguments.steps,
        "warmup_steps": 2 if "--warmup_steps" in training else 0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": half,
        "max_eval_batches": 2,
        "save_strategy": "steps",
        "save_steps": half,
        "save_total_limit": 4,
        "report_to": "jsonl",
        "card_samples": 2,
        "compilation_cache_dir": work / "compiled",
    }
    if "--do_predict" in training:
        own |= {"max_generate_samples": 8, "max_test_samples": 16}
    training += [word for name, value in own.items() for word in (f"--{name}", str(value))]
    return found


def first_part(path: Path, target: Path, size: int) -> Path:
    """Copy the first whole lines of ``size`` bytes, one at least."""
    _made(target.parent)
    if not target.exists():
        content = path.read_bytes()
        target.write_bytes(content[: content.find(b"\n", size) + 1] or content)
    return target


def run_python(tree: Path, command: list[Any], folder: Path, work: Path) -> str:
    """Run Python with hfseq of ``tree`` in ``folder``; returns what it prints."""
    words = [str(tree / w) if str(w).startswith("scripts/") else str(w) for w in command]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "plugins"))),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"in {folder}: {shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def read_log(path: Path) -> dict[str, Any]:
    """Every number and text of a log, by step and name, but those that no two runs share."""
    found: dict[str, Any] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        step = record.pop("step")
        for name, value in record.items():
            if name != "run" and not MEASURED.search(name):  # "run": the flags
                key = f"{name} of step {step}"
                found[key] = [*found.get(key, []), value]
    return found


def hashes(folder: Path) -> dict[str, str]:
    """The weights and the tokenizer that a run left."""
    found = {path.name: path.read_bytes() for path in folder.glob("tokenizer*.json")}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        # The library writes several entries of metadata in no fixed order.
        header = json.dumps(json.loads(content[8:start]), sort_keys=True)
        found[path.name] = header.encode() + content[start:]
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the very same in two tables of values."""
    return [
        f"{name}: {_shown(one.get(name))} and {_shown(other.get(name))}"
        for name in sorted(one.keys() | other.keys())
        if json.dumps(one.get(name)) != json.dumps(other.get(name))
    ]


def _shown(value: Any) -> str:
    numbers = [f"{x!r} ({x.hex()})" for x in value or () if isinstance(x, float)]
    return (", ".join(numbers) or json.dumps(value))[:200]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def probe(script: str, folder: str) -> None:
    """Print logits of fixed inputs and generated tokens as JSON: this runs in either revision."""
    import numpy as np

    import hfseq

    model = getattr(hfseq, HEADS[Path(script).name]).from_pretrained(folder)
    draw = np.random.default_rng(0)
    ids = draw.integers(5, model.config.vocab_size, (3, 24)).astype(np.int32)
    given = {"input_ids": ids, "attention_mask": (np.arange(24) < [[24], [17], [9]]).astype("i4")}
    both = model.config.is_encoder_decoder
    more = {"decoder_input_ids": ids[:, ::-1]} if both else {}
    logits = np.asarray(model(**given, **more).logits)
    tokens: dict[str, Any] = {}
    if hasattr(model, "generate") and ("CausalLM" in HEADS[Path(script).name] or both):
        # Padding of prompts is on the left.
        prompts = given if both else {n: np.array(a[:, ::-1]) for n, a in given.items()}
        for name, options in SEARCHES.items():
            made = model.generate(**prompts, max_new_tokens=12, min_new_tokens=8, **options)
            tokens[name] = np.asarray(made.sequences).tolist()
    digest = hashlib.sha256(logits.tobytes()).hexdigest()
    known = [str(logits.dtype), list(logits.shape), float(np.abs(logits).sum()), digest]
    print(json.dumps({"logits": {"logits": known}, "tokens": tokens}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        sys.exit(probe(*sys.argv[2:]))
    sys.exit(main())

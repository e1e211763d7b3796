#!/usr/bin/env python
r"""Write the compatibility table of docs/checkpoints.md, with one model of each family.

    python scripts/make_prove_table.py --python ~/transformers4/bin/python --output prove.json

For each model, `hfseq prove` lets other programs load the checkpoint and compares their outputs
with hfseq's. The models are those of the tests, with random weights and a generated tokenizer.
Encoders are also tested without a head. Programs that are not installed are skipped. The script
takes about half an hour.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

from hfseq import plugins  # noqa: E402
from hfseq.cli import prove  # noqa: E402
from tests.support import parallel  # noqa: E402

MARKS = {"equal": "=", "absent": "", "not compared": "–"}


def save_tokenizer(folder: str, vocab_size: int) -> None:
    """Save a word-level tokenizer with ``vocab_size`` tokens, including special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(vocab_size - 4))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), names, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)


def compare(name: str, head: str, older: list[str]) -> dict:
    """Return the result of ``hfseq prove`` for one model class of a family.

    ``older`` contains Python interpreters with other versions of Transformers.
    """
    with tempfile.TemporaryDirectory() as folder:
        params, extra = parallel.variables(name, head)
        model = parallel.make_model(name, head)
        model.save_pretrained(folder, params=params, extra=extra)
        if model.has_input("input_ids") and model.vocab_size():
            save_tokenizer(folder, model.vocab_size())
        return {"family": name, **prove.prove(folder, prove.CONSUMER_NAMES, older, 300)}


def table_row(result: dict, columns: list[str]) -> str:
    """Return a row of the table. The page explains the symbols above the table."""
    by_name = {consumer["name"]: consumer for consumer in result["consumers"]}
    cells = []
    for column in columns:
        consumer = by_name[column]
        difference = f" {consumer['difference']:.0e}" if consumer["status"] == "differs" else ""
        cells.append(MARKS.get(consumer["status"], consumer["status"]) + difference)
    return f"| `{result['model_class']}` | " + " | ".join(cells) + " |"


def main() -> None:
    """Compare all families, and print the table and the messages of the programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", action="append", default=[], help="Python interpreter with Transformers 4"
    )
    parser.add_argument("--output", required=True, help="JSON file for all results")
    parser.add_argument(
        "--only", nargs="*", help="only these families, or heads such as hubert:ForCTC"
    )
    arguments = parser.parse_args()
    tables = []
    for entry in arguments.only or sorted(set(plugins.load().architectures) - {"vq_transformer"}):
        name, _, task = entry.partition(":")
        heads = [task or parallel.main_head(name)]
        if heads[0] == "ForMaskedLM" and not task:
            heads.append("Model")
        for head in heads:
            try:
                result = compare(name, head, arguments.python)
            except Exception as error:
                print(f"{name} {head}: {error}", file=sys.stderr)
                continue
            tables.append(result)
            columns = [
                consumer["name"] for consumer in result["consumers"] if consumer["name"] != "peft"
            ]
            print(table_row(result, columns), flush=True)
            for consumer in result["consumers"]:
                if consumer["status"] in ("refused", "differs"):
                    print(
                        f"    {consumer['name']}: {consumer['detail']}", file=sys.stderr, flush=True
                    )
    Path(arguments.output).write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

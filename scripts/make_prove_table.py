#!/usr/bin/env python
r"""Write the table of docs/checkpoints.md: what other programs compute of one model of each family.

    python scripts/make_prove_table.py --python ~/transformers4/bin/python --output prove.json

The models are those of the tests, with random weights and a made-up tokenizer; encoders come
without a head, too. Programs that are not installed are left out. It takes about half an hour.
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


def save_tokenizer(folder: str, vocabulary: int) -> None:
    """Write a tokenizer of words of the model's size, with the special tokens of most families."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>"]
    words = {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(vocabulary - 4))])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), names, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **roles).save_pretrained(folder)


def compare(name: str, head: str, older: list[str]) -> dict:
    """Return what ``hfseq prove`` finds of a family's head."""
    with tempfile.TemporaryDirectory() as folder:
        params, extra = parallel.variables(name, head)
        model = parallel.make_model(name, head)
        model.save_pretrained(folder, params=params, extra=extra)
        if model.has_input("input_ids") and model.vocab_size():
            save_tokenizer(folder, model.vocab_size())
        return {"family": name, **prove.prove(folder, prove.CONSUMER_NAMES, older, 300)}


def row(found: dict, columns: list[str]) -> str:
    """Return a line of the table; what a mark means stands above it."""
    by_name = {one["name"]: one for one in found["consumers"]}
    cells = []
    for column in columns:
        one = by_name[column]
        apart = f" {one['difference']:.0e}" if one["status"] == "differs" else ""
        cells.append(MARKS.get(one["status"], one["status"]) + apart)
    return f"| `{found['model_class']}` | " + " | ".join(cells) + " |"


def main() -> None:
    """Compare all families, and print the table and what programs say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="Transformers 4")
    parser.add_argument("--output", required=True, help="JSON of all results")
    parser.add_argument("--only", nargs="*", help="some families")
    given = parser.parse_args()
    tables = []
    for name in given.only or sorted(set(plugins.load().architectures) - {"vq_transformer"}):
        heads = [parallel.main_head(name)]
        if heads[0] == "ForMaskedLM":
            heads.append("Model")
        for head in heads:
            try:
                found = compare(name, head, given.python)
            except Exception as error:
                print(f"{name} {head}: {error}", file=sys.stderr)
                continue
            tables.append(found)
            columns = [one["name"] for one in found["consumers"] if one["name"] != "peft"]
            print(row(found, columns), flush=True)
            for one in found["consumers"]:
                if one["status"] in ("refused", "differs"):
                    print(f"    {one['name']}: {one['detail']}", file=sys.stderr, flush=True)
    Path(given.output).write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

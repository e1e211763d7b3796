#!/usr/bin/env python
r"""Make examples to tag words, answer questions and summarise, of names and dates of Babel.

    python scripts/make_task_data.py --task ner --output_dir ner-data

The folder gets train.jsonl, validation.jsonl and test.jsonl. A fifth of the names of countries,
languages and currencies is in validation and test alone. Plain sentences stand between
the made ones, those of Python's language reference or of a --text_file. What needs no model scores
on the test examples is printed; equal seeds give equal files. Needs Babel, and rouge-score for
summaries: pip install "hfseq[translation,rouge]".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date, timedelta
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import quickstart_corpus

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hfseq.objectives.metrics import SENTENCE_BOUNDARY, answer_scores, entity_scores, rouge_scores

Example = dict[str, Any]
SPLITS = ("train", "validation", "test")
HELD_OUT = 20  # percent of the names of each kind, which are in no training example
PEOPLE = ("Ada", "Boris", "Carla", "Emil", "Greta", "Ivan", "Maria", "Otto")
FIRST_DAY, DAYS = date(1950, 1, 1), 27_000
DATES = ("long", "MMMM y")
TEMPLATE = re.compile(r"\{(\w+)\}")
WORD = re.compile(r"\w+(?:[.,:-]\w+)*|[^\w\s]")
PLAIN = re.compile(r"[A-Z][a-z][a-z ,]{28,88}\.")  # no names, no numbers, no mark-up

# In capitals: entities. In small letters: the same words, which are none here.
TAGGED = """
{NUMBER} letters came from {COUNTRY} on {DATE}.
Since {DATE} the office in {COUNTRY} takes {CURRENCY}.
The form is written in {LANGUAGE} and was sent on {DATE}.
She speaks {LANGUAGE} and a little {LANGUAGE}.
We sold {NUMBER} tickets for {NUMBER} {CURRENCY}.
He paid in {CURRENCY} when he was in {COUNTRY}.
From {COUNTRY} to {COUNTRY} it takes {NUMBER} hours.
{COUNTRY} joined on {DATE}, {COUNTRY} on {DATE}.
The book has {NUMBER} pages in {LANGUAGE}.
On {DATE} there were {NUMBER} visitors from {COUNTRY}.
{DATE} was the day when {COUNTRY} gave up the {CURRENCY}.
{LANGUAGE} is spoken by {NUMBER} people in {COUNTRY}.
{country} called about room {number} before noon.
{country} said that {country} would be late.
The {language} pastry is on table {number}.
A {language} shepherd barked at gate {number}.
Go to page {number} of volume {number}.
Version {number} of the program came out on {DATE}.
Train {number} leaves for {COUNTRY} at once.
Room {number} costs {NUMBER} {CURRENCY}.
{month} wrote to {month} about line {number}.
May I see the {language} pastry, asked {country}.
We polish and march on to house {number}.
{country} was born in {COUNTRY} on {DATE}.
Aunt {month} learned {LANGUAGE} in {COUNTRY}.
Bus {number} stops near the {currency} bar.
Mr {country} met Mrs {country} in house {number}.
The {currency} hotel is behind the {currency} bar.
The ship {country} carries the {language} pastry.
Miss {country} sang at the {currency} hotel with {language} friends.
The {country} hotel has {NUMBER} beds and a {language} cook.
""".strip().splitlines()

# What a context tells of a person, two things of a kind, and how each is asked for.
TOLD = {
    "DATE": {
        "{PERSON} was born in {DATE}.": "When was {PERSON} born?",
        "{PERSON} left home in {DATE}.": "When did {PERSON} leave home?",
    },
    "COUNTRY": {
        "{PERSON} lives in {COUNTRY}.": "Where does {PERSON} live?",
        "{PERSON} went to {COUNTRY}.": "Where did {PERSON} go?",
    },
    "LANGUAGE": {
        "{PERSON} speaks {LANGUAGE}.": "Which language does {PERSON} speak?",
        "{PERSON} forgot {LANGUAGE}.": "Which language did {PERSON} forget?",
    },
    "MONEY": {
        "{PERSON} paid {MONEY}.": "How much did {PERSON} pay?",
        "{PERSON} lost {MONEY}.": "How much did {PERSON} lose?",
    },
}
#: What an answer looks like, for a baseline.
NAME = r"([A-Z]\w+(?: (?:&|da|[A-Z]\w+))*)"
SHAPES = {
    "DATE": r"([A-Z]\w+ (?:\d+, )?\d{4})",
    "COUNTRY": rf"(?:to|in) {NAME}",
    "LANGUAGE": rf"(?:forgot|speaks) {NAME}",
    "MONEY": rf"(?<!\d)(\d{{1,3}}(?:,\d{{3}})* {NAME})",
}
UNANSWERED = 0.25

# A report: sentences in any order, of which the summary keeps some of the numbers.
REPORTED = (
    ("The office in {COUNTRY} opened on {DATE}.", "On {DATE} the books of {COUNTRY} were closed."),
    (
        "It counted {LETTERS} letters, after {OLD} in the year before.",
        "There had been {OLD} letters a year ago, and now {LETTERS}.",
    ),
    ("Most of them were in {LANGUAGE}.", "{LANGUAGE} was the language of nearly all."),
)
SUMMARY = "{COUNTRY} had {LETTERS} letters in {LANGUAGE} by {DATE}."


class Names:
    """What templates are filled with; for ``train`` without what is held out."""

    def __init__(self, random: Random, train: bool):
        from babel import Locale

        english = Locale("en")
        kinds = {
            "COUNTRY": [
                name
                for code, name in english.territories.items()
                if code.isalpha() and len(code) == 2
            ],
            "LANGUAGE": [name for name in english.languages.values() if name.isalpha()],
            "CURRENCY": [
                name
                for name in english.currencies.values()
                if re.fullmatch(r"[A-Z]\w+( [A-Z]\w+){1,2}", name)
            ],
        }
        self.random = random
        self.kinds = {
            kind: sorted(n for n in names if not (train and is_held_out(n)))
            for kind, names in kinds.items()
        }
        self.months = list(english.months["format"]["wide"].values())

    def one(self, slot: str) -> str:
        """Return something for a slot of a template."""
        from babel.dates import format_date
        from babel.numbers import format_decimal

        random, kind = self.random, slot.upper()
        if kind == "DATE":
            day = FIRST_DAY + timedelta(random.randrange(DAYS))
            return format_date(day, random.choice(DATES), locale="en")
        if kind == "MONTH":
            return random.choice(self.months)
        if kind == "PERSON":
            return random.choice(PEOPLE)
        if kind == "MONEY":
            return f"{self.one('NUMBER')} {self.one('CURRENCY')}"
        if kind in ("LETTERS", "OLD"):
            return str(random.randrange(2, 1000))
        if kind == "NUMBER":
            return format_decimal(int(10 ** random.uniform(0.5, 5.5)), locale="en")
        return random.choice(self.kinds[kind])


def is_held_out(name: str) -> bool:
    """Tell whether a name is for validation and test alone."""
    return int(sha256(name.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT


def tagged(names: Names, plain: Sequence[str]) -> Example:
    """Return words with tags: one or two made sentences, and sometimes a plain one."""
    random = names.random
    parts = random.sample(TAGGED, random.choice((1, 2)))
    parts += [random.choice(plain)] * (random.random() < 0.3)
    random.shuffle(parts)
    words, tags = [], []
    for place, text in enumerate(TEMPLATE.split(" ".join(parts))):
        found = WORD.findall(names.one(text) if place % 2 else text)
        words += found
        inside = place % 2 and text.isupper()
        tags += [f"{'I' if n else 'B'}-{text}" if inside else "O" for n in range(len(found))]
    return {"tokens": words, "ner_tags": tags}


def asked(names: Names, plain: Sequence[str]) -> Example:
    """Return a question on one of several things told of a person, which may be missing."""
    random = names.random
    person, kinds = names.one("PERSON"), random.sample(list(TOLD), 2)
    facts = [fact for kind in kinds for fact in TOLD[kind]]
    wanted = random.choice(facts)
    question = next(TOLD[kind][wanted] for kind in kinds if wanted in TOLD[kind])
    if random.random() < UNANSWERED:
        facts.remove(wanted)
    random.shuffle(facts)
    context, texts, starts = "", [], []
    for fact in facts:
        for place, text in enumerate(TEMPLATE.split(fact)):
            value = text
            if place % 2:
                value = person if text == "PERSON" else names.one(text)
                if fact == wanted and text != "PERSON":
                    texts, starts = [value], [len(context)]
            context += value
        context += " "
        if random.random() < 0.1:
            context += random.choice(plain) + " "
    question = question.format(PERSON=person)
    number = sha256((question + context).encode()).hexdigest()[:12]
    return {
        "id": number,
        "question": question,
        "context": context.strip(),
        "answers": {"text": texts, "answer_start": starts},
    }


def summarised(names: Names, plain: Sequence[str]) -> Example:
    """Return a report with its summary; plain sentences and last year's numbers are not in it."""
    random = names.random
    values: dict[str, str] = defaultdict(str)
    for slot in ("COUNTRY", "DATE", "LETTERS", "OLD", "LANGUAGE"):
        values[slot] = names.one(slot)
    parts = [random.choice(pair).format(**values) for pair in REPORTED]
    parts += [random.choice(plain)]
    random.shuffle(parts)
    return {"document": " ".join(parts), "summary": SUMMARY.format(**values)}


def tag_by_word(train: Sequence[Example], test: Sequence[Example]) -> dict[str, float]:
    """Judge the tag that a word has most often, O for those that are new."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for example in train:
        for word, tag in zip(example["tokens"], example["ner_tags"], strict=True):
            seen[word][tag] += 1
    most = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    found = [[most.get(word, "O") for word in example["tokens"]] for example in test]
    scores = entity_scores(found, [example["ner_tags"] for example in test])
    return {"the most frequent tag of each word: f1": scores["f1"]}


def answer_blindly(train: Sequence[Example], test: Sequence[Example]) -> dict[str, float]:
    """Judge no answer at all, and the first of the context that is of the kind asked for."""
    shapes = {
        question.split()[0]: SHAPES[kind]
        for kind, facts in TOLD.items()
        for question in facts.values()
    }
    first = [re.search(shapes[one["question"].split()[0]], one["context"]) for one in test]
    texts = [match[1] if match else "" for match in first]
    ways = {"no answer": [""] * len(test), "the first of its kind": texts}
    scores = {}
    for name, found in ways.items():
        judged = [
            answer_scores(answer, one["answers"]["text"])
            for answer, one in zip(found, test, strict=True)
        ]
        scores[f"{name}: f1"] = 100 * sum(f1 for _, f1 in judged) / len(judged)
    return scores


def lead(train: Sequence[Example], test: Sequence[Example]) -> dict[str, float]:
    """Judge the first sentence of each document."""
    found = [SENTENCE_BOUNDARY.split(example["document"])[0] for example in test]
    scores = rouge_scores(found, [[example["summary"]] for example in test])
    return {f"the first sentence: {name}": scores[name] for name in ("rouge2", "rougeL")}


TASKS: dict[str, tuple[Callable[..., Example], Callable[..., dict[str, float]]]] = {
    "ner": (tagged, tag_by_word),
    "qa": (asked, answer_blindly),
    "summarization": (summarised, lead),
}


def plain_sentences(texts: Iterable[str]) -> list[str]:
    """Return the sentences that can be no example of anything."""
    found = {
        line
        for text in texts
        for line in SENTENCE_BOUNDARY.split(" ".join(text.split()))
        if PLAIN.fullmatch(line)
    }
    return sorted(found)


def main() -> None:
    """Write the examples of a task and print what needs no model scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text_file", type=Path, help="a text to take plain sentences from")
    for split, count in zip(SPLITS, (6000, 400, 400), strict=True):
        parser.add_argument(f"--{split}", type=int, default=count, help="how many examples")
    options = parser.parse_args()
    make, judge = TASKS[options.task]
    text = options.text_file
    texts = quickstart_corpus.topics() if text is None else [text.read_text(encoding="utf-8")]
    plain = plain_sentences(texts)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    made = {}
    for split in SPLITS:
        names = Names(Random(f"{options.task} {split} {options.seed}"), split == "train")
        made[split] = [make(names, plain) for _ in range(getattr(options, split))]
        lines = (json.dumps(example, ensure_ascii=False) + "\n" for example in made[split])
        path = options.output_dir / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
    scores = judge(made["train"], made["test"])
    (options.output_dir / "baselines.json").write_text(json.dumps(scores, indent=4) + "\n")
    for name, value in scores.items():
        print(f"{options.task}, {name} {value:.3f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
r"""Generate examples for NER, question answering or summarization from names and dates of Babel.

    python scripts/make_task_data.py --task ner --output_dir ner-data

Writes train.jsonl, validation.jsonl and test.jsonl to the output directory. One fifth of the names
of countries, languages and currencies occur only in validation and test. Unrelated sentences from
Python's language reference or from --text_file are added. The scores of baselines without a model
on the test examples are printed and saved. Equal seeds give equal files. Requires Babel, and
rouge-score for summarization: pip install "hfseq[translation,rouge]".
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hfseq.cli import quickstart
from hfseq.objectives.metrics import SENTENCE_BOUNDARY, answer_scores, entity_scores, rouge_scores

Example = dict[str, Any]
SPLITS = ("train", "validation", "test")
HELD_OUT_PERCENT = 20  # percent of the names of each type that training examples do not contain
PEOPLE = ("Ada", "Boris", "Carla", "Emil", "Greta", "Ivan", "Maria", "Otto")
FIRST_DAY, DAYS = date(1950, 1, 1), 27_000
DATES = ("long", "MMMM y")
TEMPLATE = re.compile(r"\{(\w+)\}")
WORD = re.compile(r"\w+(?:[.,:-]\w+)*|[^\w\s]")
PLAIN_SENTENCE = re.compile(r"[A-Z][a-z][a-z ,]{28,88}\.")  # without names, numbers and markup

# Uppercase slots are entities. Lowercase slots are filled with the same words, but are not tagged.
TAGGING_TEMPLATES = """
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

# Sentences of a context about a person, two for each entity type, with their questions.
QUESTIONS = {
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
#: Regular expressions by which a baseline without a model finds answers.
NAME = r"([A-Z]\w+(?: (?:&|da|[A-Z]\w+))*)"
ANSWER_PATTERNS = {
    "DATE": r"([A-Z]\w+ (?:\d+, )?\d{4})",
    "COUNTRY": rf"(?:to|in) {NAME}",
    "LANGUAGE": rf"(?:forgot|speaks) {NAME}",
    "MONEY": rf"(?<!\d)(\d{{1,3}}(?:,\d{{3}})* {NAME})",
}
UNANSWERABLE_SHARE = 0.25

# Sentences of a report, in any order. The summary contains some of their values.
REPORT_TEMPLATES = (
    ("The office in {COUNTRY} opened on {DATE}.", "On {DATE} the books of {COUNTRY} were closed."),
    (
        "It counted {LETTERS} letters, after {OLD} in the year before.",
        "There had been {OLD} letters a year ago, and now {LETTERS}.",
    ),
    ("Most of them were in {LANGUAGE}.", "{LANGUAGE} was the language of nearly all."),
)
SUMMARY_TEMPLATE = "{COUNTRY} had {LETTERS} letters in {LANGUAGE} by {DATE}."


class SlotValues:
    """Random values for the slots of templates.

    With ``train``, the values do not include held-out names (:func:`is_held_out`).
    """

    def __init__(self, random: Random, train: bool):
        from babel import Locale

        english = Locale("en")
        names_by_type = {
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
        self.names_by_type = {
            entity_type: sorted(n for n in names if not (train and is_held_out(n)))
            for entity_type, names in names_by_type.items()
        }
        self.months = list(english.months["format"]["wide"].values())

    def value_for(self, slot: str) -> str:
        """Return a random value for a slot of a template."""
        from babel.dates import format_date
        from babel.numbers import format_decimal

        random, entity_type = self.random, slot.upper()
        if entity_type == "DATE":
            day = FIRST_DAY + timedelta(random.randrange(DAYS))
            return format_date(day, random.choice(DATES), locale="en")
        if entity_type == "MONTH":
            return random.choice(self.months)
        if entity_type == "PERSON":
            return random.choice(PEOPLE)
        if entity_type == "MONEY":
            return f"{self.value_for('NUMBER')} {self.value_for('CURRENCY')}"
        if entity_type in ("LETTERS", "OLD"):
            return str(random.randrange(2, 1000))
        if entity_type == "NUMBER":
            return format_decimal(int(10 ** random.uniform(0.5, 5.5)), locale="en")
        return random.choice(self.names_by_type[entity_type])


def is_held_out(name: str) -> bool:
    """Return whether a name occurs only in validation and test."""
    return int(sha256(name.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def make_tagged_words(names: SlotValues, plain: Sequence[str]) -> Example:
    """Return the tagged words of one or two generated sentences.

    In 30 % of the examples there is an unrelated sentence too.
    """
    random = names.random
    parts = random.sample(TAGGING_TEMPLATES, random.choice((1, 2)))
    parts += [random.choice(plain)] * (random.random() < 0.3)
    random.shuffle(parts)
    words, tags = [], []
    for index, text in enumerate(TEMPLATE.split(" ".join(parts))):
        new_words = WORD.findall(names.value_for(text) if index % 2 else text)
        words += new_words
        inside = index % 2 and text.isupper()
        tags += [f"{'I' if n else 'B'}-{text}" if inside else "O" for n in range(len(new_words))]
    return {"tokens": words, "ner_tags": tags}


def make_question(names: SlotValues, plain: Sequence[str]) -> Example:
    """Return a context with several facts about a person, and a question about one of them.

    The context of some examples does not contain the fact, so that the question has no answer.
    """
    random = names.random
    person, entity_types = names.value_for("PERSON"), random.sample(list(QUESTIONS), 2)
    sentences = [sentence for entity_type in entity_types for sentence in QUESTIONS[entity_type]]
    asked_sentence = random.choice(sentences)
    question = next(
        QUESTIONS[entity_type][asked_sentence]
        for entity_type in entity_types
        if asked_sentence in QUESTIONS[entity_type]
    )
    if random.random() < UNANSWERABLE_SHARE:
        sentences.remove(asked_sentence)
    random.shuffle(sentences)
    context, texts, starts = "", [], []
    for sentence in sentences:
        for index, text in enumerate(TEMPLATE.split(sentence)):
            value = text
            if index % 2:
                value = person if text == "PERSON" else names.value_for(text)
                if sentence == asked_sentence and text != "PERSON":
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


def make_summary(names: SlotValues, plain: Sequence[str]) -> Example:
    """Return a report and its summary, which omits unrelated sentences and last year's numbers."""
    random = names.random
    values: dict[str, str] = defaultdict(str)
    for slot in ("COUNTRY", "DATE", "LETTERS", "OLD", "LANGUAGE"):
        values[slot] = names.value_for(slot)
    parts = [random.choice(pair).format(**values) for pair in REPORT_TEMPLATES]
    parts += [random.choice(plain)]
    random.shuffle(parts)
    return {"document": " ".join(parts), "summary": SUMMARY_TEMPLATE.format(**values)}


def tag_by_word(train: Sequence[Example], test: Sequence[Example]) -> dict[str, float]:
    """Score a baseline that predicts the most frequent tag of each word, and O for unseen words."""
    tag_counts: dict[str, Counter[str]] = defaultdict(Counter)
    for example in train:
        for word, tag in zip(example["tokens"], example["ner_tags"], strict=True):
            tag_counts[word][tag] += 1
    most_frequent = {word: counts.most_common(1)[0][0] for word, counts in tag_counts.items()}
    predictions = [[most_frequent.get(word, "O") for word in example["tokens"]] for example in test]
    scores = entity_scores(predictions, [example["ner_tags"] for example in test])
    return {"the most frequent tag of each word: f1": scores["f1"]}


def answer_without_model(train: Sequence[Example], test: Sequence[Example]) -> dict[str, float]:
    """Score two baselines for questions.

    One always predicts "no answer". The other predicts the first text in the context that looks
    like an answer of the requested type.
    """
    shapes = {
        question.split()[0]: ANSWER_PATTERNS[entity_type]
        for entity_type, questions in QUESTIONS.items()
        for question in questions.values()
    }
    first = [
        re.search(shapes[example["question"].split()[0]], example["context"]) for example in test
    ]
    texts = [match[1] if match else "" for match in first]
    baselines = {"no answer": [""] * len(test), "the first of its kind": texts}
    scores = {}
    for name, answers in baselines.items():
        example_scores = [
            answer_scores(answer, example["answers"]["text"])
            for answer, example in zip(answers, test, strict=True)
        ]
        scores[f"{name}: f1"] = 100 * sum(f1 for _, f1 in example_scores) / len(example_scores)
    return scores


def summarize_by_first_sentence(
    train: Sequence[Example], test: Sequence[Example]
) -> dict[str, float]:
    """Score a baseline whose summary is the first sentence of the document."""
    summaries = [SENTENCE_BOUNDARY.split(example["document"])[0] for example in test]
    scores = rouge_scores(summaries, [[example["summary"]] for example in test])
    return {f"the first sentence: {name}": scores.values[name] for name in ("rouge2", "rougeL")}


TASKS: dict[str, tuple[Callable[..., Example], Callable[..., dict[str, float]]]] = {
    "ner": (make_tagged_words, tag_by_word),
    "qa": (make_question, answer_without_model),
    "summarization": (make_summary, summarize_by_first_sentence),
}


def plain_sentences(texts: Iterable[str]) -> list[str]:
    """Return sentences without names and numbers."""
    sentences = {
        line
        for text in texts
        for line in SENTENCE_BOUNDARY.split(" ".join(text.split()))
        if PLAIN_SENTENCE.fullmatch(line)
    }
    return sorted(sentences)


def main() -> None:
    """Write the examples of a task and print the scores of its baselines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text_file", type=Path, help="text file with unrelated sentences")
    for split, count in zip(SPLITS, (6000, 400, 400), strict=True):
        parser.add_argument(
            f"--{split}", type=int, default=count, help="number of examples (default: %(default)s)"
        )
    options = parser.parse_args()
    make_example, baseline = TASKS[options.task]
    text = options.text_file
    texts = quickstart.topics() if text is None else [text.read_text(encoding="utf-8")]
    plain = plain_sentences(texts)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    examples = {}
    for split in SPLITS:
        names = SlotValues(Random(f"{options.task} {split} {options.seed}"), split == "train")
        examples[split] = [make_example(names, plain) for _ in range(getattr(options, split))]
        lines = (json.dumps(example, ensure_ascii=False) + "\n" for example in examples[split])
        path = options.output_dir / f"{split}.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
    scores = baseline(examples["train"], examples["test"])
    (options.output_dir / "baselines.json").write_text(json.dumps(scores, indent=4) + "\n")
    for name, value in scores.items():
        print(f"{options.task}, {name} {value:.3f}")


if __name__ == "__main__":
    main()

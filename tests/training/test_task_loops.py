"""Runs for token classification, question answering and summarization."""

from __future__ import annotations

import functools
import json
import random
import re

import numpy as np
import pytest

import hfseq
from hfseq.errors import DataError, UsageError
from tests.support.tiers import first
from tests.training.conftest import WORDS, check_resume, losses

TAGS = {"law": "B-LAW", "know": "B-LOC", "every": "I-LAW"}
BERT = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "max_position_embeddings=70"
)


SIDES = (
    "d_model=32,max_position_embeddings=64,encoder_layers=1,decoder_layers=1,"
    "encoder_attention_heads=4,decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64"
)
KINDS = {
    "token_classification": ("ner", "bert", BERT),
    "question_answering": ("qa", "bert", BERT),
    "summarization": ("sum", "bart", SIDES),
}


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tables(corpus, tmp_path_factory):
    """Sentences with tags, questions with answers, texts with summaries. Some are invalid."""
    folder, draw = tmp_path_factory.mktemp("tables"), random.Random(0)
    for split, count in (("train", 64), ("valid", 12)):
        tagged, question_rows, summed = [], [], []
        for number in range(count):
            words = draw.choices(WORDS, k=draw.randint(4, 12))
            tagged.append({"tokens": words, "ner_tags": [TAGS.get(word, "O") for word in words]})
            text = " ".join([*draw.sample([*words, "goal"], len(words) + 1), *words * 3])
            at = text.index("goal")  # once, and in no other word
            answers = {"text": ["goal"], "answer_start": [at]}
            if number % 5 == 4:
                answers = {"text": [], "answer_start": []}
            question = "what of " + words[0]
            question_rows.append(
                {"id": str(number), "question": question, "context": text, "answers": answers}
            )
            summed.append({"id": number, "document": text[:80], "summary": words[0]})
        if split == "train":
            tagged += [{"tokens": ["a"], "ner_tags": []}, {"tokens": [], "ner_tags": []}]
            question_rows += [
                {**question_rows[0], "answers": {"text": ["no"], "answer_start": [1]}}
            ]
        else:
            tagged.append({"tokens": ["a"], "ner_tags": ["B-NEW"]})
        write(folder / f"ner-{split}.jsonl", tagged)
        write(folder / f"qa-{split}.jsonl", question_rows)
        write(folder / f"sum-{split}.jsonl", summed)
    return folder


@pytest.fixture
def task(flags, tables):
    """Trains one of the three on its tables."""

    def run(output, objective, callbacks=(), devices=1, **changes):
        from tests.support import runs

        name, model_type, sizes = KINDS[objective]
        values = {
            "model_type": model_type,
            "config_overrides": sizes,
            "global_batch_size": 8,
            "per_device_eval_batch_size": 4,
            "max_seq_length": None,
            "warmup_steps": 0,
            "train_file": tables / f"{name}-train.jsonl",
            "validation_file": tables / f"{name}-valid.jsonl",
        } | changes
        return runs.train(flags(output, **values), objective, devices, callbacks)

    return run


def test_words_are_tagged_and_bad_sentences_named(task, tables, caplog, tmp_path):
    test = {"test_file": tables / "ner-valid.jsonl", "do_predict": True}
    loop = task(
        "ner",
        "token_classification",
        do_train=True,
        do_eval=True,
        max_steps=80,
        learning_rate=1e-2,
        return_entity_level_metrics=True,
        pad_to_max_length=True,
        **test,
    )
    log_text = caplog.text
    assert "2 of 66 train examples" in log_text
    assert re.search("ner-train.jsonl, line 65: .*1 words and 0 tags", log_text)
    assert "line 66: the list of words is empty" in log_text
    assert "line 13: unknown tag 'B-NEW'" in log_text
    assert loop.metrics["eval_f1"] > 0.9 and loop.metrics["eval_LOC_number"] > 0
    model = hfseq.FlaxAutoModelForTokenClassification.from_pretrained(tmp_path / "ner")
    assert set(model.config.id2label.values()) == {"O", *TAGS.values()}
    lines = (tmp_path / "ner" / "predictions.txt").read_text().splitlines()
    first = json.loads((tables / "ner-valid.jsonl").read_text().splitlines()[0])
    assert len(lines) == 13 and len(lines[0].split()) == len(first["tokens"])
    with pytest.raises(DataError, match="line 65: .*1 words and 0 tags.*--bad_examples"):
        task("strict", "token_classification", bad_examples="error")


@pytest.mark.slow
def test_label_all_tokens_includes_later_pieces(task):
    apart = [
        task(f"all{every}", "token_classification", max_steps=1, label_all_tokens=every).run
        for every in (False, True)
    ]
    rows = [run.data.train.rows.fetch(np.arange(8)) for run in apart]
    counts = [(row["labels"] != -100).sum() for row in rows]
    assert counts[0] < counts[1] < (rows[1]["segment_ids"] > 0).sum()
    names = apart[1].objective.names
    assert "I-LAW" in names and "I-LOC" not in names  # which then continues as B-LOC


@pytest.mark.parametrize(
    "objective", first(["token_classification", "question_answering"], "question_answering")
)
def test_the_loss_is_that_of_pytorch(task, objective, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    changes = {"max_steps": 1, "learning_rate": 0.0, "do_train": True, "do_eval": True}
    if objective == "question_answering":
        changes |= {"version_2_with_negative": True, "max_seq_length": 40, "doc_stride": 8}
    loop = task("run", objective, **changes)
    name = {"token_classification": "TokenClassification"}.get(objective, "QuestionAnswering")
    theirs = getattr(transformers, f"AutoModelFor{name}").from_pretrained(tmp_path / "run").eval()
    data = loop.run.data.evaluation
    total = count = 0
    for step in range(len(data)):
        batch = data[step]
        batch = {key: torch.tensor(np.asarray(value)).long() for key, value in batch.items()}
        valid, mask = batch["valid"].bool(), batch["segment_ids"]
        inputs = {"input_ids": batch["input_ids"], "attention_mask": mask}
        if "token_type_ids" in batch:
            inputs["token_type_ids"] = batch["token_type_ids"]
        with torch.no_grad():
            output = theirs(**inputs)
        entropy = torch.nn.functional.cross_entropy
        if objective == "token_classification":
            labels = torch.where(valid[:, None], batch["labels"], -100)
            total += entropy(output.logits.mT, labels, reduction="sum")
            count += (labels != -100).sum()
            continue
        for side in ("start", "end"):
            logits = output[f"{side}_logits"]
            total += entropy(logits, batch[side], reduction="none")[valid].sum() / 2
        count += valid.sum()
    assert loop.metrics["eval_loss"] == pytest.approx(float(total / count), rel=1e-5)


def test_answers_are_predicted_and_written(task, tables, tmp_path, caplog):
    loop = task(
        "qa",
        "question_answering",
        do_train=True,
        do_eval=True,
        do_predict=True,
        max_steps=6,
        version_2_with_negative=True,
        max_seq_length=48,
        doc_stride=16,
        test_file=tables / "qa-valid.jsonl",
    )
    assert "1 of 65 train examples" in caplog.text
    assert "line 65: the answer 'no' is not at character 1" in caplog.text
    rows, examples = loop.run.data.train.rows, 64
    assert len(rows) > examples, "long contexts are several rows"
    windows = loop.run.objective.windows["train"]
    records = loop.run.objective.splits["train"]
    observed_ids = set()
    for row, (start, end) in enumerate(zip(rows.rows["start"], rows.rows["end"], strict=True)):
        example = records[int(windows.example_indices[row])]
        if end:
            first, last = windows.offsets[row][start][0], windows.offsets[row][end][1]
            assert example["context"][first:last] == example["answers"]["text"][0]
            observed_ids.add(example["id"])
    assert len(observed_ids) == sum(
        bool(records[i]["answers"]["text"]) for i in range(len(records))
    )
    metrics = loop.metrics
    expected_ids = [
        json.loads(line)["answers"]["text"]
        for line in (tables / "qa-valid.jsonl").read_text().splitlines()
    ]
    share = sum(map(bool, expected_ids)) / len(expected_ids)
    overall_f1 = share * metrics["eval_HasAns_f1"] + (1 - share) * metrics["eval_NoAns_f1"]
    assert metrics["eval_f1"] == pytest.approx(overall_f1)
    folder = tmp_path / "qa"
    best, every, odds = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("predictions", "nbest_predictions", "null_odds")
    )
    assert set(best) == set(every) == set(odds) == {str(i) for i in range(12)}
    for name, texts in every.items():
        assert sum(text["probability"] for text in texts) == pytest.approx(1)
        assert best[name] == ("" if odds[name] > 0 else next(t["text"] for t in texts if t["text"]))


def test_invalid_questions_are_reported(task, tables, tmp_path):
    with pytest.raises(UsageError, match="rows of 12 tokens with a stride of 8 leave no"):
        task("short", "question_answering", max_seq_length=12, doc_stride=8)
    with pytest.raises(DataError, match="it has no answer .*--version_2_with_negative"):
        task("v1", "question_answering", bad_examples="error")
    nested = {"version": "1.1", "data": [{"paragraphs": [{"context": "Ada sings.", "qas": [
        {"id": "x", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]},
    ]}]}]}  # fmt: skip
    file = tmp_path / "squad.json"
    file.write_text(json.dumps(nested))
    loop = task("nested", "question_answering", train_file=file, validation_file=file, max_steps=1)
    assert len(loop.run.objective.splits["train"]) == 1


def test_summaries_are_generated_and_scored(task, tables, corpus):
    pytest.importorskip("rouge_score")
    loop = task(
        "sum",
        "summarization",
        do_train=True,
        do_eval=True,
        max_steps=2,
        max_target_length=8,
        tokenizer_name=corpus / "marian",
        max_generate_samples=4,
        max_source_length=32,
    )
    assert {"eval_rouge1", "eval_rougeLsum", "eval_gen_len"} <= loop.metrics.keys()
    assert loop.run.model.generation_config.max_length == 8
    assert loop.run.objective.lengths == (32, 8)


@pytest.mark.slow
@pytest.mark.parametrize("objective", list(KINDS))
def test_resume_is_bit_exact(task, objective, corpus):
    changes = {"do_train": True, "save_steps": 2}
    if objective == "summarization":
        changes |= {"tokenizer_name": corpus / "marian", "predict_with_generate": False}
    check_resume(functools.partial(task, objective=objective), step=4, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("objective", list(KINDS))
def test_mesh_matches_single_device(task, objective, corpus):
    changes = {"do_train": True}
    if objective == "summarization":
        changes |= {"tokenizer_name": corpus / "marian", "predict_with_generate": False}
    single = losses(task("one", objective, **changes).folder)
    distributed = losses(
        task("many", objective, devices=8, mesh="data=4,tensor=2", **changes).folder
    )
    for step, value in single.items():
        assert distributed[step] == pytest.approx(value, rel=2e-5), step

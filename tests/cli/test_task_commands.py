"""The commands answer, tag, summarize and classify."""

from __future__ import annotations

import json

import pytest

import hfseq
from hfseq import cli
from tests.support.task_models import TEXTS, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("classes", "nli", "tags", "answers", "seq2seq"):
        make(root, name)
    return root


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Returns a function that sets standard input to bytes."""

    opened = []

    def put(data: bytes) -> None:
        (tmp_path / "typed").write_bytes(data)
        opened.append(open(tmp_path / "typed", encoding="utf-8"))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield put
    for file in opened:
        file.close()


def test_lines_keep_their_order_and_bad_lines_are_empty(folder, typed, capfd):
    data = b"Anna lives in Berlin.\n\nbad \xff byte\n" + b"It was. " * 99 + b"\nIt was\n"
    command = ["classify", str(folder / "classes"), "--top_k", "1", "--long_lines", "error"]
    typed(data)
    assert cli.main(command) == 1
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert len(lines) == 5 and lines[1:4] == ["", "", ""] and lines[0] and lines[4]
    assert "error: <stdin>:2: the text is empty" in err
    assert "<stdin>:3: invalid UTF-8: byte 0xff at column 5" in err
    assert "<stdin>:4: " in err and "tokens exceed the model's 128 positions" in err
    assert "3 of 5 inputs were rejected" in err
    typed(data)
    assert cli.main([*command, "--on_bad_line", "skip"]) == 0
    typed(data)
    assert cli.main([*command, "--on_bad_line", "stop"]) == 1
    assert "stopped at <stdin>:2" in capfd.readouterr().err
    typed(data)
    code = cli.main([*command[:-2], "--on_bad_line", "replace", "--json"])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert code == 1 and [row.get("error", "") != "" for row in rows] == [0, 1, 0, 0, 0]
    task_pipeline = hfseq.pipeline("text-classification", str(folder / "classes"), truncation=True)
    (expected,) = task_pipeline(rows[3]["input"], top_k=1)
    assert rows[3]["output"][0]["label"] == expected["label"]
    assert rows[3]["output"][0]["score"] == pytest.approx(expected["score"], rel=1e-4)


def test_labels_that_are_named_are_compared(folder, capsys):
    command = ["classify", str(folder / "nli"), TEXTS[0], "--candidate_labels", "river, law"]
    assert cli.main(command) == 0
    first, second = capsys.readouterr().out.strip().split(", ")
    assert {first.split()[0], second.split()[0]} == {"river", "law"}


def test_entities_are_marked_in_the_text(folder, tmp_path, capsys):
    file, output = tmp_path / "in.txt", tmp_path / "out.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS[:4]))
    command = ["tag", str(folder / "tags"), "--input_file", str(file)]
    assert cli.main([*command, "--output_file", str(output)]) == 0
    task_pipeline = hfseq.pipeline("ner", str(folder / "tags"), aggregation_strategy="first")
    for text, line, entities in zip(
        TEXTS, output.read_text().splitlines(), task_pipeline(TEXTS[:4]), strict=False
    ):
        for entity in entities:
            assert f"[{entity['entity_group']} {text[entity['start'] : entity['end']]}]" in line
        plain = line
        for entity in entities:
            plain = plain.replace(f"[{entity['entity_group']} ", "").replace("]", "")
        assert plain == text
    assert not (tmp_path / "out.txt.part").exists()


def test_questions_are_answered_from_a_text_or_a_table(folder, tmp_path, capsys):
    model, context = str(folder / "answers"), tmp_path / "context.txt"
    context.write_text(TEXTS[2])
    task_pipeline = hfseq.pipeline("question-answering", model, max_answer_len=30)
    expected = task_pipeline(question="Where?", context=TEXTS[2])["answer"]
    for context_flag in (TEXTS[2], f"@{context}"):
        assert cli.main(["answer", model, "Where?", "--context", context_flag]) == 0
        assert capsys.readouterr().out.strip() == expected
    table = tmp_path / "questions.jsonl"
    rows = [{"question": "Where?", "context": TEXTS[2]}, {"question": "", "context": "a"}, {"a": 1}]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert cli.main(["answer", model, "--input_file", str(table), "--json", "--top_k", "2"]) == 1
    out, err = capsys.readouterr()
    first, second, third = map(json.loads, out.splitlines())
    assert first["input"] == rows[0] | {"a": None} and first["output"][0]["answer"] == expected
    assert "its question or its context is empty" in second["error"]
    assert f"{table}, line 3: its 'question' must be a text, not None" in err and third["error"]
    for bad, message in (
        (["Where?"], "QUESTION requires --context TEXT"),
        ([], "--input_file with a SQuAD file or a table"),
        (["--context", "a"], "--context requires a QUESTION"),
        (["Where?", "--context", "@nowhere"], "nowhere"),
        (["Where?", "--context", "a", "--top_k", "0"], "--top_k 0 must be at least 1"),
    ):
        assert cli.main(["answer", model, *bad]) == 2
        assert message in capsys.readouterr().err


def test_summaries_take_a_line_each(folder, capsys):
    command = ["summarize", str(folder / "seq2seq"), *TEXTS[:2], "--max_new_tokens", "6"]
    assert cli.main(command) == 0
    task_pipeline = hfseq.pipeline("summarization", str(folder / "seq2seq"), max_new_tokens=6)
    expected = [" ".join(output["summary_text"].split()) for output in task_pipeline(TEXTS[:2])]
    assert capsys.readouterr().out.splitlines() == expected
    assert cli.main([*command, "--input_file", "x"]) == 2
    assert "either positional texts or --input_file" in capsys.readouterr().err

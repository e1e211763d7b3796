"""``hfseq chat``: messages from a terminal, a pipe or a file, and answers as text or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hfseq import cli
from hfseq.pipelines.chat import Chat
from tests.support.tiny_chat import TEMPLATE, save_tiny_chat

SHORT = ["--max_new_tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "gpt2"
    save_tiny_chat(folder)
    return folder


@pytest.fixture
def turns(tmp_path) -> Path:
    """A file of messages that also starts a new conversation."""
    path = tmp_path / "turns.txt"
    path.write_text(
        "who reads?\n\nblåbær\n/clear\nwho reads?\n/exit\nnever said\n", encoding="utf-8"
    )
    return path


@pytest.fixture
def typed(monkeypatch):
    """Returns a function that simulates typed lines. An exception among them is raised."""

    def type_lines(*lines: str | type[BaseException]) -> list[str]:
        left, prompts = [*lines, EOFError], []

        def read(prompt: str) -> str:
            prompts.append(prompt)
            line = left.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", type("In", (), {"isatty": lambda: True}))
        return prompts

    return type_lines


def run(folder: Path, *arguments: str) -> int:
    return cli.main(["chat", str(folder), *SHORT, *arguments])


def replies(folder: Path, *questions: str) -> list[str]:
    chat = Chat.from_pretrained(str(folder), max_new_tokens=6)
    return ["".join(chat.reply(question)) for question in questions]


def test_a_line_is_a_turn(folder, turns, tmp_path, capsys):
    first, second = replies(folder, "who reads?", "blåbær")
    assert run(folder, "--input_file", str(turns)) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{first}\n" and captured.err == ""
    output = tmp_path / "answers.jsonl"
    assert run(folder, "--input_file", str(turns), "--output_file", str(output), "--json") == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"role": "assistant", "content": text} for text in (first, second, first)]


def test_standard_input_is_read_without_prompts(folder, turns, capsys, monkeypatch):
    with turns.open("rb") as file:
        monkeypatch.setattr(
            sys, "stdin", type("In", (), {"fileno": file.fileno, "isatty": lambda: False})
        )
        assert run(folder, "--system", "read the law") == 0
    captured = capsys.readouterr()
    assert (
        len(captured.out) > 0 and captured.err == "" and ">" not in captured.out.split("\n")[0][:2]
    )
    assert captured.out != "".join(f"{text}\n" for text in replies(folder, "who reads?"))


def test_lines_are_typed_until_the_end(folder, typed, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    first, second = replies(folder, "who reads?", "blåbær")
    prompts = typed("who reads?", " ", "blåbær", "/clear", "who reads?", EOFError, "never")
    assert run(folder) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n{first}\n" and "/clear " in captured.err
    assert prompts == ["> "] * 6
    for last in (KeyboardInterrupt, "/exit"):
        prompts = typed(last, "never")
        assert run(folder) == 0
        assert capsys.readouterr().out == "" and prompts == ["> "]


def test_ctrl_c_stops_the_answer_but_not_the_chat(folder, typed, capsys, monkeypatch):
    reply, conversations = Chat.reply, []

    def interrupted(self, text):
        conversations.append([message["content"] for message in self.messages])
        for piece in reply(self, text):
            yield piece
            if text == "stop":
                raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "reply", interrupted)
    typed("stop", "blåbær")
    assert run(folder) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first and second and len(conversations) == 2
    assert conversations[1] == ["stop", first]
    path = Path(folder).parent / "stop.txt"
    path.write_text("stop\n")
    assert run(folder, "--input_file", str(path)) == 130


def test_too_long_typed_input_fails_only_its_turn(folder, typed, tmp_path, capsys):
    long = "the law of every land " * 40
    typed(long, "who reads?")
    assert run(folder, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["content"] == replies(folder, "who reads?")[0]
    assert "Shorten the message" in captured.err
    (tmp_path / "long.txt").write_text(long)
    assert run(folder, "--input_file", str(tmp_path / "long.txt")) == 2
    assert "Shorten the message" in capsys.readouterr().err


def test_dropped_turns_are_mentioned_once(folder, tmp_path, capsys):
    (tmp_path / "many.txt").write_text(f"{'read the law ' * 10}\n" * 5)
    assert run(folder, "--input_file", str(tmp_path / "many.txt")) == 0
    assert capsys.readouterr().err.count("its oldest messages are ignored") == 1


@pytest.mark.slow
def test_sampling_flags_enable_sampling(folder, turns, capsys):
    def said(*flags: str) -> str:
        assert run(folder, "--input_file", str(turns), *flags) == 0
        return capsys.readouterr().out

    sampling = ["--temperature", "2", "--top_p", "0.99", "--top_k", "0"]
    assert said(*sampling) == said(*sampling) != said(*sampling, "--seed", "5")
    assert said("--temperature", "0") == said() != said(*sampling)


def test_a_template_may_come_from_a_file(folder, turns, tmp_path, capsys):
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("assistant:", "user:"))
    assert run(folder, "--input_file", str(turns)) == 0
    first_output = capsys.readouterr().out
    template = ["--chat_template", str(tmp_path / "template.jinja")]
    assert run(folder, "--input_file", str(turns), *template) == 0
    assert capsys.readouterr().out != first_output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_new_tokens", "0"], "--max_new_tokens 0 must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0 must be at least 0"),
        (["--top_p", "2"], "--top_p 2.0 must be above 0 and at most 1"),
        (["--temperature", "0", "--top_k", "5"], "remove --top_p and --top_k"),
        (["--chat_template", "/no/where"], "--chat_template /no/where: "),
        (["--input_file", "/no/where"], "--input_file /no/where: "),
    ],
)
def test_invalid_flags_fail_before_loading(folder, flags, message, capsys, monkeypatch):
    monkeypatch.setattr(Chat, "from_pretrained", None)
    assert run(folder, *flags) == 2
    assert message in capsys.readouterr().err


def test_a_line_that_is_not_text_is_named(folder, tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"who?\n\xff\n")
    assert run(folder, "--input_file", str(tmp_path / "bad.txt")) == 1
    assert "bad.txt:2: invalid UTF-8" in capsys.readouterr().err

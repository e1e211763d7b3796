"""``hfseq translate``: each input line has an output line, even if the line is invalid."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfseq import cli
from hfseq import errors as errors_module
from hfseq.cli import models as translate_command
from hfseq.errors import UsageError
from hfseq.pipelines.lines import count_lines, read_lines
from tests.support.translators import echo, save_tiny_t5

ROOT = Path(__file__).resolve().parents[2]
#: A fast program that runs ``hfseq translate`` with a translation to upper case.
CAPITALS = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from hfseq import cli
from hfseq.pipelines import factory
from tests.support.translators import echo

factory.pipeline = lambda task, name, batch_size, **options: echo(batch_size=batch_size)
sys.exit(cli.main(["translate", "m", *sys.argv[1:]]))
"""


@pytest.fixture
def model_arguments(monkeypatch) -> list:
    """Replaces translation by upper case; the list has the arguments of the model."""
    from hfseq.pipelines import factory

    calls = []

    def pipeline(task, name, precision, **options):
        calls.append({"name": name, "precision": precision, **options})
        languages = ("src_lang", "tgt_lang")
        return echo(positions=48, **{n: v for n, v in options.items() if n not in languages})

    monkeypatch.setattr(factory, "pipeline", pipeline)
    return calls


def run(*arguments: object) -> int:
    return cli.main(["translate", "m", *map(str, arguments)])


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_texts_come_out_line_by_line(model_arguments, capfd):
    assert run("one", "two\nthree", "", "four") == 0
    assert capfd.readouterr() == ("ONE\nTWO\nTHREE\n\nFOUR\n", "")


def test_texts_are_accepted_before_and_after_flags(model_arguments, capfd):
    assert run("a", "--num_beams", 1, "b", "--batch_size", 3, "c") == 0
    assert capfd.readouterr().out == "A\nB\nC\n"
    assert (model_arguments[0]["num_beams"], model_arguments[0]["batch_size"]) == (1, 3)


def test_flags_that_do_not_exist_are_wrong_usage(model_arguments, capfd):
    assert run("a", "--beams", "b") == 2
    assert "unknown flag --beams; did you mean '--num_beams'?" in capfd.readouterr().err


def test_every_flag_on_the_model_reaches_the_translator(model_arguments):
    given = {
        "num_return_sequences": 2,
        "num_beams": 3,
        "batch_size": 5,
        "max_source_length": 7,
        "max_new_tokens": 9,
        "length_penalty": 0.5,
        "length_penalty_type": "gnmt",
        "long_lines": "split",
        "precision": "bfloat16",
        "source_lang": "en",
        "target_lang": "es",
        "source_prefix": "x",
    }
    assert run("a", *[word for name, value in given.items() for word in (f"--{name}", value)]) == 0
    renamed = {"source_lang": "src_lang", "target_lang": "tgt_lang", "long_lines": "truncation"}
    expected = {renamed.get(name, name): value for name, value in given.items()}
    assert model_arguments == [{"name": "m", "return_details": True, **expected}]


def test_a_file_is_translated_line_by_line(model_arguments, tmp_path, capfd):
    content = "\ufeffone\r\n\r\n  \ntwo\u2028three\x0bfour\nlast".encode()
    source = put(tmp_path / "in.txt", content)
    assert run("--input_file", source) == 0
    assert capfd.readouterr() == ("ONE\n\n\nTWO\u2028THREE\x0bFOUR\nLAST\n", "")


def test_json_contains_all_fields_of_a_line(model_arguments, tmp_path, capfd):
    source = put(tmp_path / "in.txt", b"a\n\xff\n" + b"b" * 60)
    flags = ["--json", "--num_beams", 2, "--num_return_sequences", 2, "--max_new_tokens", 47]
    assert run("--input_file", source, *flags) == 1
    first, two, three = map(json.loads, capfd.readouterr().out.splitlines())
    assert first == {
        "line": 1,
        "source": "a",
        "warnings": [],
        "translations": [
            {"text": "A", "score": 0.0, "ended": True},
            {"text": "A'", "score": -1.0, "ended": True},
        ],
    }
    error = "invalid UTF-8: byte 0xff at column 1"
    assert two == {
        "line": 2,
        "source": "\ufffd",
        "translations": [],
        "warnings": [],
        "error": error,
    }
    assert three["warnings"] == ["61 tokens exceed the limit of 48: truncated"]
    assert three["translations"][0] == {"text": "B" * 47, "score": 0.0, "ended": False}


def test_n_best_are_as_many_lines_for_every_line(model_arguments, capfd):
    flags = ["--scores", "--num_beams", 2, "--num_return_sequences", 2]
    assert run("a", "", "$", *flags) == 1
    assert capfd.readouterr().out == "0.0000\tA\n-1.0000\tA'\n\t\n\t\n\n\n"


def test_two_thousand_lines_survive_a_bad_one(model_arguments, tmp_path, capfd):
    lines = [b"line %d" % number for number in range(1, 2_001)]
    lines[1321] = b"caf\xe9 au lait"
    source = put(tmp_path / "in.txt", b"\n".join(lines) + b"\n")
    target = tmp_path / "out.txt"
    assert run("--input_file", source, "--output_file", target) == 1
    errors = capfd.readouterr().err.splitlines()
    assert errors == [
        f"error: {source}:1322: invalid UTF-8: byte 0xe9 at column 4",
        "1 of 2000 lines could not be translated and are empty in the output",
    ]
    out = target.read_text().split("\n")
    assert len(out) == 2_001 and out[1321] == "" and out[2_000] == ""
    assert all(out[n - 1] == f"LINE {n}" for n in range(1, 2_001) if n != 1322)


@pytest.mark.parametrize(
    ("choice", "code", "out"),
    [
        ("report", 1, "A\n\nB\n"),
        ("skip", 0, "A\n\nB\n"),
        ("replace", 0, "A\nX\ufffdY\nB\n"),
        ("stop", 1, "A\n"),
    ],
)
def test_bad_lines_follow_the_chosen_policy(model_arguments, tmp_path, capfd, choice, code, out):
    source = put(tmp_path / "in.txt", b"a\nx\xffy\nb\n")
    assert run("--input_file", source, "--on_bad_line", choice) == code
    printed = capfd.readouterr()
    assert printed.out == out and f"{source}:2: invalid UTF-8" in printed.err


def test_a_line_on_which_the_model_fails_is_reported(model_arguments, capfd):
    assert run("a", "5 $", "b") == 1
    printed = capfd.readouterr()
    assert printed.out == "A\n\nB\n"
    assert "error: text:2: the model failed: a dollar\n" in printed.err


def test_long_line_warning_names_the_line(model_arguments, tmp_path, capfd):
    source = put(tmp_path / "in.txt", b"a\n" + b"b" * 60 + b"\n")
    assert run("--input_file", source) == 0
    printed = capfd.readouterr()
    assert printed.out == f"A\n{'B' * 47}\n"
    assert f"warning: {source}:2: 61 tokens exceed the limit of 48: trunc" in printed.err


def test_translations_without_an_end_are_counted(model_arguments, capfd):
    assert run("abcdef", "a", "--max_new_tokens", 4) == 0
    printed = capfd.readouterr()
    assert printed.out == "ABCD\nA\n"
    assert printed.err.startswith("1 of 2 translations reached the maximum length")


def test_a_file_gets_its_name_when_it_is_complete(model_arguments, tmp_path, capfd):
    target = put(tmp_path / "out.txt", b"old\n")
    source = put(tmp_path / "in.txt", b"a\nb\n\xff\n")
    assert run("--input_file", source, "--output_file", target, "--on_bad_line", "stop") == 1
    assert target.read_text() == "old\n" and (tmp_path / "out.txt.part").read_text() == "A\nB\n"
    assert f"stopped: the first 2 lines are in {target}.part" in capfd.readouterr().err
    assert run("c", "--output_file", target) == 0
    assert target.read_text() == "C\n" and not (tmp_path / "out.txt.part").exists()


def test_failure_before_the_first_line_writes_nothing(tmp_path, capfd):
    target = tmp_path / "out.txt"
    assert cli.main(["translate", str(tmp_path), "a", "--output_file", str(target)]) == 1
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err.startswith("error: ")


def test_a_device_is_written_to_and_not_replaced(model_arguments):
    assert run("a", "--output_file", "/dev/null") == 0
    assert not Path("/dev/null").is_file() and not Path("/dev/null.part").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--input_file", "x"], "either TEXT or --input_file"),
        (["a", "--scores", "--num_beams", "1"], "--scores requires --num_beams above 1"),
        (["--input_file", "no-such-file"], "--input_file no-such-file: No such file"),
        (["--input_file", "."], "--input_file .: is a directory"),
        (["a", "--output_file", "."], "--output_file . is a directory"),
        (["a", "--output_file", "no/such/out"], "--output_file no/such/out: No such file"),
        (["a", "--num_beams", "2", "--num_return_sequences", "3"], "num_return_sequences` (3)"),
    ],
)
def test_usage_errors_precede_any_work(
    model_arguments, tmp_path, monkeypatch, capfd, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and list(tmp_path.iterdir()) == []


def test_utf_16_is_named(model_arguments, tmp_path, capfd):
    source = put(tmp_path / "in.txt", "über\n".encode("utf-16"))
    assert run("--input_file", source) == 1
    assert f"{source}:1: the text is UTF-16, not UTF-8" in capfd.readouterr().err


def test_lines_are_written_when_their_newline_arrives():
    reader, writer = os.pipe()
    lines = read_lines(reader, "pipe")
    os.write(writer, b"one\ntw")
    assert next(lines) == "one"
    os.write(writer, b"o\r\n")
    os.close(writer)
    assert list(lines) == ["two"]


def test_lines_longer_than_the_read_buffer_are_complete(tmp_path):
    source = put(tmp_path / "in.txt", ("å" * 50_000 + "\n\nb").encode())
    with open(source, "rb") as file:
        assert list(read_lines(file.fileno(), "x")) == ["å" * 50_000, "", "b"]


@pytest.mark.parametrize(("content", "count"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)])
def test_counting_lines_agrees_with_reading_them(tmp_path, content, count):
    source = put(tmp_path / "in.txt", content)
    with open(source, "rb") as file:
        assert count_lines(str(source)) == count == len(list(read_lines(file.fileno(), "x")))


def test_a_real_checkpoint_is_translated_from_a_directory(tmp_path, capfd):
    save_tiny_t5(tmp_path / "t5")
    flags = ["--num_beams", "1", "--max_new_tokens", "15"]
    assert cli.main(["translate", str(tmp_path / "t5"), "the cat", "", *flags]) == 0
    first, blank = capfd.readouterr().out.splitlines()
    assert first and not blank
    assert cli.main(["translate", str(tmp_path / "t5"), "the cat", "--target_lang", "es"]) == 2
    assert "does not define languages" in capfd.readouterr().err


def start(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'plugins'}"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", CAPITALS, *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
    )


@pytest.mark.slow
def test_stdin_is_translated_incrementally_and_ctrl_c_keeps_output(tmp_path):
    process = start()
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    guard = threading.Timer(60, process.kill)
    guard.start()
    assert [process.stdout.readline() for _ in range(2)] == [b"ONE\n", b"TWO\n"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    guard.cancel()
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


@pytest.mark.slow
def test_a_reader_that_has_had_enough_ends_the_work_quietly(tmp_path):
    source = put(tmp_path / "in.txt", b"some words\n" * 20_000)
    process = start("--input_file", str(source))
    assert process.stdout.readline() == b"SOME WORDS\n"
    process.stdout.close()  # as `head -1` does
    process.stdin.close()
    assert process.wait(timeout=60) == errors_module.CLOSED_PIPE_EXIT_CODE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_missing_package_of_a_tokenizer_is_named(monkeypatch):
    from hfseq.errors import CheckpointError
    from hfseq.modeling.auto import load

    def from_pretrained(name):
        raise ImportError("MarianTokenizer requires the SentencePiece library")

    auto = SimpleNamespace(from_pretrained=from_pretrained, __name__="AutoTokenizer")
    with pytest.raises(CheckpointError, match="'m' .*: pip install sentencepiece"):
        load(auto, "m")


def test_the_guide_has_every_flag_and_no_other(capsys):
    with pytest.raises(SystemExit):
        cli.main(["translate", "--help"])
    flags = set(re.findall(r"--[a-z_]+", capsys.readouterr().out))
    guide = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    documented = set(
        re.findall(r"--[a-z_]+", guide.split("## hfseq translate")[1].split("\n## ")[0])
    )
    assert documented == flags - {"--help", "--plugin", "--debug"}


@pytest.mark.slow
def test_help_of_translate_imports_nothing_heavy():
    code = (
        "import sys; from hfseq import cli\n"
        "try: cli.main(['translate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'flax', 'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_reference_spellings_of_the_script():
    parse = translate_command.script_arguments
    assert vars(parse(["m", "a", "--num_beams", "2", "b"]))["texts"] == ["a", "b"]
    arguments = parse(["--english-query", "The cat.", "--checkpoint-file", "m"])
    assert (arguments.model, arguments.texts) == ("m", ["The cat."])
    with pytest.raises(UsageError, match="no model"):
        parse([])

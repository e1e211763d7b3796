"""``hfseq push`` and ``hfseq fill-mask``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hfseq import cli, plugins
from hfseq.errors import UsageError
from tests.support.fake_hub import FakeHub

TEXTS = ["en lov om <mask>", "<mask> leser og skriver lange <mask> for alle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A directory with a tiny RoBERTa and its tokenizer."""
    from transformers import RobertaConfig

    import hfseq
    from hfseq.data.tokenizers import train_tokenizer

    directory = tmp_path_factory.mktemp("models") / "tiny"
    words = "en lov om å bygge språkmodeller for alle som leser og skriver lange".split()
    texts = [" ".join(words[i % 7 : i % 5 + 8]) for i in range(100)]
    tokenizer = train_tokenizer([texts], "roberta", None, 300, directory)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        initializer_range=0.5,
    )
    hfseq.FlaxAutoModelForMaskedLM.from_config(config).save_pretrained(directory)
    return directory


def test_fill_mask_prints_the_likeliest_tokens_of_every_mask(model, capsys):
    import jax
    from transformers import AutoTokenizer

    import hfseq

    assert cli.main(["fill-mask", str(model), *TEXTS, "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TEXTS[0] and lines[3] == TEXTS[1]
    assert [lines[4], lines[7]] == ["  mask 1", "  mask 2"] and len(lines) == 10

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(model)
    compute_logits = jax.jit(lambda inputs: network(**inputs).logits)
    lines_expected = []
    for text in TEXTS:  # one at a time, so without padding
        inputs = tokenizer(text, return_tensors="np")
        for position in np.flatnonzero(inputs["input_ids"][0] == tokenizer.mask_token_id):
            logits = np.asarray(compute_logits(dict(inputs))[0, position], np.float64)
            shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            lines_expected += [
                f"  {shares[i]:6.1%}  {tokenizer.decode([int(i)]).strip()}"
                for i in np.argsort(-shares)[:2]
            ]
    assert [line for line in lines if "%" in line] == lines_expected


def test_a_mask_has_one_spelling_for_all_models_and_one_of_the_model(tmp_path, model, capsys):
    from transformers import BertConfig

    import hfseq
    from hfseq.data.tokenizers import train_tokenizer

    tokenizer = train_tokenizer([["en lov om alle"] * 50], "bert", None, 60, tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=8, **sizes)
    hfseq.FlaxAutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    texts = ["en [MASK] om", "en <mask> om"]
    for folder in (tmp_path, model):
        assert cli.main(["fill-mask", str(folder), *texts]) == 0
        first, second = capsys.readouterr().out.split(texts[1])
        assert first == texts[0] + second
        fill = hfseq.pipeline("fill-mask", str(folder))
        assert fill(texts[0]) == fill(texts[1]) and len(fill("[MASK] <mask>")) == 2
    with pytest.raises(UsageError, match=r"no mask token \(\[MASK\] or <mask>\)"):
        hfseq.pipeline("fill-mask", str(tmp_path))("en lov")


def test_fill_mask_as_json(model, capsys):
    assert cli.main(["fill-mask", str(model), *TEXTS, "--top", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in rows] == TEXTS
    assert [[len(mask) for mask in row["masks"]] for row in rows] == [[2], [2, 2]]
    first, second = rows[0]["masks"][0]
    assert first["probability"] >= second["probability"] > 0 and isinstance(first["token"], str)


def test_fill_mask_writes_a_file_in_another_precision_and_batch_size(model, tmp_path, capsys):
    output = tmp_path / "tokens.json"
    flags = ["--json", "--output_file", str(output), "--batch_size", "1"]
    assert cli.main(["fill-mask", str(model), *TEXTS, *flags, "--precision", "bfloat16"]) == 0
    assert capsys.readouterr().out == ""
    assert [len(row["masks"]) for row in json.loads(output.read_text())] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["en lov om alle"], 2, "'en lov om alle': it contains no mask token (<mask>)"),
        (["en <mask> lov", "--top_k", "0"], 2, "--top_k 0"),
        (["<mask> lov " * 12], 2, "tokens exceed the model's 22 positions"),
    ],
)
def test_fill_mask_error_names_the_problem_of_a_text(model, arguments, code, message, capsys):
    assert cli.main(["fill-mask", str(model), *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_fill_mask_names_a_directory_that_is_not_a_model(tmp_path, capsys):
    assert cli.main(["fill-mask", str(tmp_path), "a <mask>"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path) in line


def test_fill_mask_names_a_directory_without_a_tokenizer(model, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    assert cli.main(["fill-mask", str(tmp_path), "a <mask>"]) == 2
    assert f"tokenizer of '{tmp_path}' has only special tokens" in capsys.readouterr().err


def test_fill_mask_knows_the_architecture_of_a_plugin_file(tmp_path, monkeypatch, capsys):
    from hfseq.data.tokenizers import train_tokenizer

    monkeypatch.chdir(tmp_path)
    try:
        assert cli.main(["new", "my-encoder"]) == 0
        spec = plugins.load(["my_encoder.py"]).architectures.get("my-encoder")
        tokenizer = train_tokenizer([["en lov om alle"] * 50], "roberta", None, 270, tmp_path / "m")
        head = spec.load_head("ForMaskedLM")
        head(spec.load_config()(vocab_size=len(tokenizer), hidden_size=16)).save_pretrained("m")
        plugins.unload()
        assert cli.main(["fill-mask", "m", "en <mask>", "--plugin", "my_encoder.py"]) == 0
    finally:
        plugins.unload()
    assert capsys.readouterr().out.count("%") == 5


# huggingface_hub uploads files through a deprecated argument of its HTTP library.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
@pytest.mark.parametrize("name", [None, "user/another"])
def test_push_uploads_the_directory_as_one_commit(hub: FakeHub, model, name, capsys):
    flags = ["--hub_model_id", name] if name else []
    assert cli.main(["push", str(model), *flags, "--message", "the weights"]) == 0
    repository = hub.repo(name or "user/tiny")
    assert [commit.title for commit in repository.history()].count("the weights") == 1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(
        repository.at("main").files
    )
    assert capsys.readouterr().out.startswith(hub.url)
    assert not repository.private


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_makes_a_private_repository_on_request(hub: FakeHub, model):
    arguments = ["--hub_model_id", "user/secret", "--hub_private_repo"]
    assert cli.main(["push", str(model), *arguments]) == 0
    assert hub.repo("user/secret").private


def test_push_takes_no_token_from_the_process_list(model, capsys):
    arguments = ["--hub_model_id", "user/secret", "--hub_token", "hf_test"]
    assert cli.main(["push", str(model), *arguments]) == 2
    assert "--hub_token: " in capsys.readouterr().err


def test_push_refuses_an_empty_directory(tmp_path, capsys):
    assert cli.main(["push", str(tmp_path), "--hub_model_id", "user/x"]) == 2
    assert "nothing to push" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./published", "/srv/models/x", "a/b/c"])
def test_push_to_a_path_names_the_command_that_copies(model, name, capsys):
    assert cli.main(["push", str(model), "--hub_model_id", name]) == 2
    assert f"hfseq convert {model} {name}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["push", "fill-mask"])
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys; from hfseq import cli\n"
        f"try: cli.main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'flax', 'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_evaluation_without_the_harness_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["evaluate", "no-model", "--tasks", "riddles"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: hfseq evaluate requires lm_eval: pip install 'hfseq[eval]'"

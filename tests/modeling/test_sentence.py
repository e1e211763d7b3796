"""Sentence vectors, compared with sentence-transformers and NumPy."""

from __future__ import annotations

import json
import logging
import sys

import jax
import numpy as np
import pytest

import hfseq
from hfseq import cli
from hfseq.errors import CheckpointError, UsageError
from hfseq.generation.request import text_width
from hfseq.modeling.sentence import POOLING_MODES, Dense, SentenceConfig, pool
from hfseq.nn import cpu
from tests.support.task_models import TEXTS, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models"), "features")


def one_by_one(model, text, modes, prompt=""):
    """Returns the vector of a text with loops over its tokens, in float64."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model._source[0])
    ids = tokenizer(prompt + text, return_tensors="np")["input_ids"]
    run = jax.jit(lambda ids: model(ids, np.ones(ids.shape, np.int32)).last_hidden_state)
    hidden = np.asarray(run(ids)[0], np.float64)
    weights = np.arange(1, len(hidden) + 1)[:, None]
    pooled = {
        "cls": hidden[0],
        "max": hidden.max(0),
        "mean": hidden.mean(0),
        "mean_sqrt_len": hidden.sum(0) / np.sqrt(len(hidden)),
        "weightedmean": (hidden * weights).sum(0) / weights.sum(),
        "lasttoken": hidden[-1],
    }
    return np.concatenate([pooled[mode] for mode in modes])


def test_pooling_modes_match_for_any_batch(folder):
    model, texts = hfseq.FlaxAutoModel.from_pretrained(folder), TEXTS[1:4]
    modes = tuple(POOLING_MODES)
    model.sentence_config = SentenceConfig(modes)
    expected = np.stack([one_by_one(model, text, modes) for text in texts])
    for size in (1, 2, 32):
        np.testing.assert_allclose(model.encode(texts, batch_size=size), expected, atol=2e-5)
    assert model.encode(texts[0]).shape == expected[0].shape
    plain = hfseq.FlaxAutoModel.from_pretrained(folder)
    truncated = plain.encode(texts, pooling="mean", normalize_embeddings=True, truncate_dim=9)
    start = modes.index("mean") * 32
    cut = expected[:, start : start + 9]
    cut = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(truncated, cut, atol=1e-5)


def test_the_files_are_written_and_read(folder, tmp_path, caplog):
    model = hfseq.FlaxAutoModel.from_pretrained(folder)
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=(32, 5)).astype(np.float32)
    sentence_config = SentenceConfig(
        ("mean",),
        dense=(Dense(kernel, np.ones(5, np.float32), "Tanh"),),
        normalize=True,
        max_seq_length=12,
        do_lower_case=True,
        prompts={"query": "law: "},
        default_prompt_name="query",
    )
    model.sentence_config = sentence_config
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    again = hfseq.FlaxAutoModel.from_pretrained(tmp_path)
    assert again.sentence_config.dense[0].activation == "Tanh"
    with caplog.at_level(logging.WARNING):
        vectors = again.encode(TEXTS)
    assert "4 of 5 sentences are longer than 12 tokens" in caplog.text.replace("\n", " ")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    short = "It was read"
    plain = one_by_one(again, short.lower(), ("mean",), "law: ")
    expected = np.tanh(plain @ kernel + 1)
    np.testing.assert_allclose(again.encode(short), expected / np.linalg.norm(expected), atol=1e-5)
    assert not np.allclose(again.encode(short, prompt=""), again.encode(short), atol=1e-3)
    again.save_pretrained(tmp_path / "copy")
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.json") if "copy" not in str(p)}
    copied = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*.json")}
    assert names - copied == {"tokenizer.json", "tokenizer_config.json"}
    # The newer format.
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 32, "pooling_mode": "cls"})
    )
    assert SentenceConfig.read(str(tmp_path), {}).pooling == ("cls",)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "a.b.CNN", "path": ""}]))
    with pytest.raises(CheckpointError, match="unsupported module CNN .*Pooling"):
        SentenceConfig.read(str(tmp_path), {})


@pytest.fixture
def saved(folder, tmp_path):
    """A directory in the format of sentence-transformers 6, which tests change."""
    from transformers import AutoTokenizer

    model = hfseq.FlaxAutoModel.from_pretrained(folder)
    model.sentence_config = SentenceConfig(("mean",))
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_order_and_names_of_version_6_are_read_and_written(saved, tmp_path):
    modes = ["mean_sqrt_len_tokens", "cls"]
    change(saved / "1_Pooling" / "config.json", pooling_mode=modes)
    model = hfseq.FlaxAutoModel.from_pretrained(saved)
    expected = one_by_one(model, TEXTS[0], ("mean_sqrt_len", "cls"))
    np.testing.assert_allclose(model.encode(TEXTS[0]), expected, atol=2e-5)
    model.save_pretrained(tmp_path / "again")
    assert (
        json.loads((tmp_path / "again/1_Pooling/config.json").read_text())["pooling_mode"] == modes
    )


def test_settings_that_hfseq_does_not_know_are_kept(saved, tmp_path):
    name = "config_sentence_transformers.json"
    change(saved / name, similarity_fn_name="dot", future_key=[1])
    model = hfseq.FlaxAutoModel.from_pretrained(saved)
    assert model.encode(TEXTS[0]).ndim == 1
    model.save_pretrained(tmp_path / "again")
    settings = json.loads((tmp_path / "again" / name).read_text())
    assert settings["similarity_fn_name"] == "dot" and settings["future_key"] == [1]


@pytest.mark.parametrize("features", [32, 5])
def test_dense_layers_may_add_their_input(saved, tmp_path, features):
    draw = np.random.default_rng(0)
    kernel, residual = draw.normal(size=(2, 32, features)).astype(np.float32)
    projection = None if features == 32 else residual
    model = hfseq.FlaxAutoModel.from_pretrained(saved)
    plain = model.encode(TEXTS[2:4])
    layer = Dense(kernel, None, "Tanh", use_residual=True, residual=projection)
    model.sentence_config = SentenceConfig(dense=(layer,))
    expected = np.tanh(plain @ kernel) + (plain if projection is None else plain @ projection)
    np.testing.assert_allclose(model.encode(TEXTS[2:4]), expected, atol=1e-5)
    model.save_pretrained(saved)
    again = hfseq.FlaxAutoModel.from_pretrained(saved)
    np.testing.assert_allclose(again.encode(TEXTS[2:4]), expected, atol=1e-5)
    change(saved / "2_Dense" / "config.json", module_input_name="token_embeddings")
    with pytest.raises(CheckpointError, match="module_input_name 'token_embeddings'"):
        hfseq.FlaxAutoModel.from_pretrained(saved).encode(TEXTS)


def test_dense_layers_are_read_from_a_bin_file(saved):
    torch = pytest.importorskip("torch")
    kernel = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    model = hfseq.FlaxAutoModel.from_pretrained(saved)
    model.sentence_config = SentenceConfig(dense=(Dense(kernel, None, "Tanh"),))
    model.save_pretrained(saved)
    (saved / "2_Dense" / "model.safetensors").unlink()
    path = saved / "2_Dense" / "pytorch_model.bin"
    torch.save({"linear.weight": torch.tensor(kernel.T)}, path)
    (layer,) = SentenceConfig.read(str(saved), {}).dense
    np.testing.assert_array_equal(layer.kernel, kernel)
    torch.save({"weight": torch.tensor(kernel.T)}, path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a dense layer"):
        SentenceConfig.read(str(saved), {})


def test_token_types_of_texts_and_pairs_reach_the_model(saved):
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS]:1 $A:1 [SEP]:1",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=special,
    )
    tokenizer.save_pretrained(saved)
    model = hfseq.FlaxAutoModel.from_pretrained(saved)
    for texts in (TEXTS[:2], [(TEXTS[3], TEXTS[0]), (TEXTS[1], TEXTS[3])]):
        for text, vector in zip(texts, model.encode(texts), strict=True):
            sides = (text,) if isinstance(text, str) else text
            inputs = dict(tokenizer(*sides, return_tensors="np"))
            run = jax.jit(lambda inputs: model(**inputs).last_hidden_state[0])
            hidden = np.asarray(run(inputs))
            assert inputs["token_type_ids"].any()
            np.testing.assert_allclose(vector, hidden.mean(0), atol=2e-5)
    with pytest.raises(UsageError, match="sentence 2 must be a text, not"):
        model.encode([TEXTS[0], ("a", "b")])
    with pytest.raises(UsageError, match="sentence 1 must be a pair of texts.*'a', 'b', 'c'"):
        model.encode([("a", "b", "c")])


def test_sentence_directories_are_converted_with_their_modules(saved, tmp_path):
    target = tmp_path / "converted"
    assert cli.main(["convert", str(saved), str(target), "--to", "msgpack"]) == 0
    assert (target / "1_Pooling" / "config.json").is_file()
    np.testing.assert_allclose(
        hfseq.FlaxAutoModel.from_pretrained(target).encode(TEXTS),
        hfseq.FlaxAutoModel.from_pretrained(saved).encode(TEXTS),
        atol=1e-5,
    )


@pytest.mark.parametrize("count", [1, 8])
def test_long_rows_go_in_smaller_batches_on_a_single_cpu(count, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: count)
    assert cpu.rows_per_chunk(32, 32) == 32
    assert cpu.rows_per_chunk(512, 32) == (4 if count == 1 else 32)
    assert cpu.rows_per_chunk(4096, 32) == (1 if count == 1 else 32)
    widths = [text_width(length) for length in range(1, 513)]
    assert all(0 <= width - length < max(8, length / 4) for length, width in enumerate(widths, 1))
    assert len(set(widths)) == 20 and text_width(500, 510) == 510


def test_a_prompt_can_be_left_out_of_the_mean(folder):
    from transformers import AutoTokenizer

    model = hfseq.FlaxAutoModel.from_pretrained(folder)
    model.sentence_config = SentenceConfig(include_prompt=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the law river", return_tensors="np")["input_ids"]
    run = jax.jit(lambda ids: model(ids, np.ones(ids.shape, np.int32)).last_hidden_state)
    hidden = np.asarray(run(ids)[0])
    left = len(tokenizer("the law")["input_ids"]) - 1
    result = model.encode("river", prompt="the law ")
    np.testing.assert_allclose(result, hidden[left:].mean(0), atol=1e-5)


def test_invalid_sentences_are_rejected(folder, tmp_path):
    model = hfseq.FlaxAutoModel.from_pretrained(folder)
    with pytest.raises(UsageError, match='modules.json.*pooling="mean"'):
        model.encode("a")
    with pytest.raises(UsageError, match="pooling 'men'; did you mean 'mean'.*cls"):
        model.encode("a", pooling="men")
    with pytest.raises(UsageError, match="prompt_name 'passage'.*query"):
        model.sentence_config = SentenceConfig(prompts={"query": "q: "})
        model.encode("a", prompt_name="passage")
    head = hfseq.FlaxAutoModelForMaskedLM.from_config(model.config)
    with pytest.raises(UsageError, match="encode: pass the tokenizer"):
        head.encode("a", pooling="mean")
    from transformers import AutoTokenizer

    with pytest.raises(UsageError, match="FlaxBertForMaskedLM .*has a head.*FlaxAutoModel"):
        head.encode("a", pooling="mean", tokenizer=AutoTokenizer.from_pretrained(folder))


def test_padding_at_the_end_changes_no_pooling():
    hidden = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    short = pool(hidden[1:, :3], mask[1:, :3], list(POOLING_MODES))
    np.testing.assert_allclose(pool(hidden, mask, list(POOLING_MODES))[1:], short, atol=1e-6)


def test_the_command_writes_arrays_and_lines(folder, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    expected = hfseq.FlaxAutoModel.from_pretrained(folder).encode(TEXTS, pooling="mean")
    command = ["embed", str(folder), "--pooling", "mean", "--input_file", str(lines)]
    assert cli.main([*command, "--output_file", str(tmp_path / "v.npy")]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), expected, atol=1e-6)
    assert cli.main([*command, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["input"] for row in rows] == TEXTS
    np.testing.assert_allclose([row["output"] for row in rows], expected, atol=1e-6)
    lines.write_text("a\n\nb\n")
    assert cli.main(command) == 1
    assert f"{lines}:2: the text is empty" in capsys.readouterr().err
    capsys.readouterr()
    assert cli.main([*command, "--truncate_dim", "-1"]) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_vectors_are_those_of_sentence_transformers(trained_bert, tmp_path, shared):
    theirs = pytest.importorskip("sentence_transformers")
    from transformers import AutoTokenizer

    from hfseq.data.tokenizers import save_generic

    assert sys.modules["sentence_transformers"] is theirs
    lines = (shared / "wikitext-2" / "valid.txt").read_text(encoding="utf-8").splitlines()
    texts = [line.strip() for line in lines if len(line.split()) > 3][:200]
    model = hfseq.FlaxAutoModel.from_pretrained(trained_bert)
    ours = model.encode(texts)
    expected = theirs.SentenceTransformer(str(trained_bert), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert np.abs((ours * expected).sum(1) - 1).max() < 1e-5
    model.save_pretrained(tmp_path)
    save_generic(AutoTokenizer.from_pretrained(trained_bert), tmp_path)
    again = theirs.SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, again, atol=1e-6)

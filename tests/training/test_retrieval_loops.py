"""Runs that train cross-encoders, sparse encoders and multi-vector encoders."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hfseq.errors import DataError, UsageError
from hfseq.nn import trees
from tests.support.models import trees_equal
from tests.training.conftest import WORDS, check_resume, losses

BERT = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=64,"
    "max_position_embeddings=40"
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of texts and of words of these texts, in the formats of the losses."""
    folder, draw = tmp_path_factory.mktemp("retrieval"), random.Random(0)
    words = sorted(set(WORDS))
    for name, count in (("train", 64), ("valid", 16)):
        files: dict[str, list[dict[str, Any]]] = {}
        for number in range(count):
            text = draw.sample(words, 4)
            negative = " ".join(draw.sample(words, 4))
            query, document = " ".join(text[:2]), " ".join(sorted(text))
            label = number % 2
            rows = {
                "triplets": {"query": query, "document": document, "negative": negative},
                "pairs": {"query": query, "document": document},
                "labeled": {
                    "query": query,
                    "document": document if label else negative,
                    "label": label,
                },
                "lists": {
                    "query": query,
                    "documents": [document, negative][: 1 + label],
                    "labels": [1, 0][: 1 + label],
                },
                "classes": {
                    "query": query, "document": document,
                    "label": ["no", "yes", "maybe"][number % 3],
                },
                "margins": {
                    "query": query, "document": document, "negative": negative, "score": [2.5, 1.0]
                },
                "scores": {"a": query, "b": document, "score": number / count},
                "texts": {"text": document, "label": number % 4},
            }  # fmt: skip
            for data_name, row in rows.items():
                files.setdefault(data_name, []).append(row)
        for data_name, listed in files.items():
            write(folder / f"{name}-{data_name}.jsonl", listed)
    return folder


@pytest.fixture
def fit(flags, data):
    """Trains an objective on one of the files."""

    def run(
        output, objective="cross_encoder", data_name="pairs", devices=1, callbacks=(), **changes
    ):
        from tests.support import runs

        values = {
            "model_type": "bert",
            "config_overrides": BERT,
            "global_batch_size": 16,
            "per_device_eval_batch_size": 8,
            "max_seq_length": None,
            "warmup_steps": 0,
            "max_steps": 4,
            "pad_to_max_length": True,
            "train_file": data / f"train-{data_name}.jsonl",
            "validation_file": data / f"valid-{data_name}.jsonl",
        } | changes
        return runs.train(flags(output, **values), objective, devices, callbacks)

    return run


CROSS_ENCODER_LOSSES = {
    "binary_cross_entropy": "labeled",
    "cross_entropy": "classes",
    "mse": "scores",
    "margin_mse": "margins",
    "multiple_negatives_ranking": "triplets",
    "lambda_loss": "lists",
    "list_net": "lists",
    "list_mle": "lists",
    "p_list_mle": "lists",
    "rank_net": "lists",
    "adr_mse": "lists",
}


@pytest.mark.parametrize(
    "loss",
    [
        loss if loss in ("lambda_loss",) else pytest.param(loss, marks=pytest.mark.slow)
        for loss in CROSS_ENCODER_LOSSES
    ],
)
def test_cross_encoders_learn_with_each_loss(fit, loss, tmp_path):
    loop = fit(
        "run",
        data_name=CROSS_ENCODER_LOSSES[loss],
        loss=loss,
        do_train=True,
        do_eval=True,
        max_steps=12,
    )
    values = losses(loop.folder)
    assert np.isfinite(list(values.values())).all()
    assert min(list(values.values())[6:]) < values[1]
    assert np.isfinite(loop.metrics["eval_loss"])


OBJECTIVES = {
    "embedding": "triplets",
    "sparse_encoder": "triplets",
    "multi_vector": "triplets",
    "cross_encoder": "triplets",
}


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_runs_resume_exactly(fit, objective):
    changes = {"batch_sampler": "no_duplicates"}
    if objective == "cross_encoder":
        changes["loss"] = "multiple_negatives_ranking"
    check_resume(
        lambda output, **options: fit(output, objective, OBJECTIVES[objective], **options),
        step=3,
        do_train=True,
        save_steps=2,
        **changes,
    )


def mixture(tmp_path: Path, *entries: dict[str, Any]) -> Path:
    path = tmp_path / "mixture.yaml"
    path.write_text(json.dumps(list(entries), default=str))  # JSON is also YAML
    return path


@pytest.mark.slow
def test_a_mixture_has_a_loss_for_each_dataset_and_resumes_exactly(fit, data, caplog, tmp_path):
    caplog.set_level("INFO")
    path = mixture(
        tmp_path,
        {"train_file": data / "train-pairs.jsonl", "batch_sampler": "no_duplicates"},
        {"train_file": data / "train-scores.jsonl", "loss": "cosent", "weight": 3},
    )
    _, resumed = check_resume(
        lambda output, **options: fit(output, "embedding", train_file=None, **options),
        step=3,
        do_train=True,
        save_steps=2,
        train_mixture=path,
    )
    assert "mixture of 2 datasets (weighted): 2, 6 batches per epoch" in caplog.text
    # The loss of CoSENT over 16 pairs is much larger than a cross-entropy at random.
    assert resumed.progress.data["source"] == "train-pairs.jsonl, train-scores.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "clm", "sft"])
def test_text_objectives_mix_rows(objective, flags, corpus, tmp_path, caplog):
    from tests.support import runs

    caplog.set_level("INFO")
    other = tmp_path / "other.jsonl"
    lines = (corpus / "train.jsonl").read_text().splitlines()[:30]
    other.write_text("\n".join(line.upper().replace("TEXT", "text") for line in lines) + "\n")
    path = mixture(
        tmp_path,
        {"train_file": corpus / "train.jsonl"},
        {"train_file": other, "weight": 2},
    )

    def run(output: str, callbacks: Any = (), **options: Any) -> Any:
        values = {"train_file": None, "train_mixture": path, **options}
        if objective != "mlm":
            values |= {
                "model_type": "llama",
                "config_overrides": "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,"
                "num_key_value_heads=2,intermediate_size=64,max_position_embeddings=40",
            }
        return runs.train(flags(output, **values), objective, 1, callbacks)

    check_resume(run, step=3, do_train=True, save_steps=2)
    assert "mixture of 2 datasets (weighted)" in caplog.text and "rows per epoch" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must contain a list of datasets"),
        ("- a.jsonl", "must map data flags to values"),
        ("- train_file: a\n  weight: 0", "weight must be a number above 0"),
        ("- train_file: a\n  wieght: 2", "unknown data flag 'wieght'"),
        ("- weight: 2", "requires train_file or dataset_name"),
        ("- {", "is not valid YAML"),
        ("- train_file: a\n- train_file: b\n  loss: x", "dataset 2: --loss x"),
    ],
)
def test_mixtures_that_are_not_valid_are_errors(content, message, tmp_path):
    from hfseq.data.arguments import EmbeddingArguments

    path = tmp_path / "mixture.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        EmbeddingArguments(train_mixture=str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        EmbeddingArguments(train_mixture=str(tmp_path / "missing.yaml"))
    path.write_text("- train_file: a\n")
    with pytest.raises(UsageError, match="--train_mixture and --train_file"):
        EmbeddingArguments(train_mixture=str(path), train_file=["b"])


def test_several_dataset_names_are_a_mixture(tmp_path):
    from hfseq.training.arguments import parse

    config = tmp_path / "run.yaml"
    config.write_text("output_dir: out\ndataset_name: [x, y]\n")
    names = ["--dataset_name", "a", "--dataset_name=b"]
    weights = ["--dataset_weights", "1", "3"]
    for words, expected, strategy in (
        (["--output_dir=out", *names], [("a", 1), ("b", 1)], "proportional"),
        (["--output_dir=out", *names, *weights], [("a", 1), ("b", 3)], "weighted"),
        ([str(config), *weights], [("x", 1), ("y", 3)], "weighted"),
        ([str(config), "--dataset_name", "a"], [], None),
    ):
        data: Any = parse(words, objective="embedding").data
        assert [(part.dataset_name, weight) for part, weight in data.mixture] == expected
        assert data.multi_dataset_batch_sampler == strategy
        assert data.dataset_name == (expected[0][0] if expected else "a")


@pytest.mark.parametrize(
    ("objective", "words", "message"),
    [
        ("embedding", ["--dataset_weights", "1"], "has 1 values, but --dataset_name has 2"),
        ("embedding", ["--dataset_weights", "1", "0"], "1 0: expected numbers above 0"),
        ("embedding", ["--dataset_weights", "1", "nan"], "expected numbers above 0"),
        ("embedding", ["--train_file", "x"], "--dataset_names and --train_file"),
        ("embedding", ["--train_mixture", "x"], "mutually exclusive"),
        ("mlm", ["--streaming"], "--dataset_names does not support --streaming"),
        ("classification", [], "--dataset_name has the values a, b, but"),
    ],
)
def test_several_dataset_names_that_cannot_be_used_are_errors(objective, words, message):
    from hfseq.training.arguments import parse

    names = ["--output_dir=out", "--dataset_name", "a", "b"]
    with pytest.raises(UsageError, match=message):
        parse([*names, *words], objective=objective)


QUERY = {"query": "a", "document": "b"}


@pytest.mark.parametrize(
    ("objective", "loss", "row", "error", "message"),
    [
        ("cross_encoder", None, {**QUERY, "label": 2}, DataError, "labels from 0 to 1"),
        ("cross_encoder", None, QUERY, UsageError, "requires labels"),
        ("cross_encoder", None, {**QUERY, "label": "NaN"}, DataError, "must be a finite number"),
        ("cross_encoder", None, {"query": "a", "label": 1}, UsageError, "two text columns"),
        ("cross_encoder", None, {**QUERY, "c": "d", "label": 1}, UsageError, "2 text columns"),
        (
            *("cross_encoder", "lambda_loss"),
            *({"query": "a", "documents": [], "labels": []}, UsageError, "two text columns"),
        ),
        (
            *("cross_encoder", "lambda_loss"),
            *({"query": "a", "documents": ["b"], "labels": [1, 0]}, DataError),
            "must contain 1 numbers, not 2",
        ),
        (
            *("cross_encoder", "lambda_loss"),
            *({"query": "a", "documents": ["b"], "labels": 1}, DataError, "list of numbers"),
        ),
        ("embedding", "cosent", {"a": "b", "c": "d"}, UsageError, "requires labels"),
        ("embedding", "cosent", {"a": "b", "c": "d", "score": None}, DataError, "finite number"),
        ("embedding", "contrastive", {"a": "b", "c": "d", "label": 0.5}, DataError, "0 or 1"),
        ("embedding", "triplet", {"a": "b", "c": "d"}, UsageError, "3 text columns"),
        ("embedding", None, {"anchor": "b", "positive": " "}, DataError, "non-empty text"),
        ("embedding", None, {"text": "b"}, UsageError, "has the columns text"),
        ("embedding", "softmax", {**QUERY, "label": "x"}, UsageError, "at least two classes"),
        ("embedding", "softmax", {**QUERY, "label": 0.5}, DataError, "must be a class"),
        (
            *("multi_vector", "distill_kl_div", {"q": "a", "d": "b", "e": "c", "scores": [1]}),
            *(DataError, "must contain 2 numbers, not 1"),
        ),
    ],
)
def test_examples_that_are_not_valid_are_errors(objective, loss, row, error, message, tmp_path):
    from transformers import BertConfig

    from hfseq import plugins
    from hfseq.data.arguments import OBJECTIVES as ARGUMENTS

    path = write(tmp_path / "rows.jsonl", [row] * 2)
    arguments = ARGUMENTS[objective](
        train_file=[str(path)], loss=loss, validation_split_percentage=0
    )
    with pytest.raises(error, match=message):
        plugins.load().objectives.get(objective)(arguments, None, BertConfig())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "anchor,positive,positive\na,b,c\n", "not unique: anchor, positive, positive"),
        (
            "rows.jsonl",
            '{"anchor": "a", "positive": "b", "positive": "c"}\n',
            "line 1 is not valid JSON: duplicate key 'positive'",
        ),
    ],
)
def test_duplicate_columns_are_errors(name, text, message, tmp_path):
    from transformers import BertConfig

    from hfseq.data.arguments import EmbeddingArguments
    from hfseq.objectives.embedding import Embedding

    (tmp_path / name).write_text(text)
    arguments = EmbeddingArguments(train_file=[str(tmp_path / name)], validation_split_percentage=0)
    with pytest.raises(DataError, match=message):
        Embedding(arguments, None, BertConfig())


def test_negatives_that_are_positives_are_reported(tmp_path, caplog):
    from transformers import BertConfig

    from hfseq.data.arguments import EmbeddingArguments
    from hfseq.objectives.embedding import Embedding

    row = {"anchor": "a", "positive": "b", "negative": "b"}
    path = write(tmp_path / "rows.jsonl", [row, row | {"negative": "c"}])
    Embedding(
        EmbeddingArguments(train_file=[str(path)], validation_split_percentage=0),
        None,
        BertConfig(),
    )
    assert "1 of 2 examples have a negative that equals the positive" in caplog.text
    assert "line 1" in caplog.text


def test_group_by_label_requires_labels(fit):
    with pytest.raises(UsageError, match="group_by_label requires labels"):
        fit("run", "embedding", batch_sampler="group_by_label", do_train=True)


def test_tokenizers_that_do_not_separate_pairs_are_reported(corpus, caplog):
    from transformers import AutoTokenizer, BertConfig, PreTrainedTokenizerFast

    from hfseq.objectives.cross_encoder import CrossEncoderTraining

    tokenizer: Any = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    objective = CrossEncoderTraining.__new__(CrossEncoderTraining)
    objective.tokenizer, objective.config = tokenizer, BertConfig()
    objective.check_pairs()
    assert not caplog.text
    plain = tokenizer.backend_tokenizer
    plain.post_processor = None
    objective.tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>")
    objective.check_pairs()
    assert "does not separate the texts of a pair" in caplog.text

    def refuse(*texts: str) -> Any:
        if len(texts) > 1:
            raise ValueError("only one text")
        return {"input_ids": [1]}

    objective.tokenizer = refuse  # type: ignore[assignment]
    with pytest.raises(UsageError, match="does not support pairs of texts.*only one text"):
        objective.check_pairs()


@pytest.mark.slow
def test_the_softmax_loss_classifies_pairs_and_resumes_exactly(fit, data, tmp_path):
    import hfseq

    loop, _ = check_resume(
        lambda output, **options: fit(output, "embedding", "classes", **options),
        step=3,
        do_train=True,
        do_eval=True,
        save_steps=2,
        loss="softmax",
    )
    assert 0 <= loop.metrics["eval_accuracy"] <= 1 and "eval_mrr_at_10" not in loop.metrics
    # The classifier of the three classes is not saved.
    modules = json.loads((loop.folder / "modules.json").read_text())
    assert [entry["name"] for entry in modules] == ["0", "1", "2"]
    assert hfseq.RetrievalModel.from_pretrained(loop.folder).encode(["the law"]).shape == (1, 32)
    path = mixture(
        tmp_path,
        {"train_file": data / "train-pairs.jsonl"},
        {"train_file": data / "train-classes.jsonl", "loss": "softmax"},
    )
    with pytest.raises(UsageError, match="dataset 2: only the first dataset"):
        fit("mixed", "embedding", train_file=None, train_mixture=path, do_train=True)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["batch_sampler", "group_by_label"])
def test_triplets_of_labeled_texts(fit, sampler):
    loop = fit(
        "run",
        "embedding",
        "texts",
        loss="batch_hard_triplet",
        margin=1.0,
        batch_sampler=sampler,
        do_train=True,
        do_eval=True,
    )
    assert np.isfinite(list(losses(loop.folder).values())).all()
    assert "eval_accuracy" not in loop.metrics and np.isfinite(loop.metrics["eval_loss"])


def test_training_keeps_the_settings_of_the_model(fit, tmp_path):
    import hfseq
    from hfseq.modeling.sentence import Dense, SentenceConfig

    fit("base", "embedding", max_steps=1, do_train=True)
    model = hfseq.SentenceEncoder.from_pretrained(tmp_path / "base")
    model.config = SentenceConfig(
        pooling=("cls",),
        dense=(Dense.random(32, 8),),
        max_seq_length=9,
        prompts={"query": "who "},
        similarity_fn_name="dot",
    )
    model.save_pretrained(tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2, "normalize": False}
    fit("run", "embedding", **start, max_steps=1, do_train=True)
    trained: Any = hfseq.RetrievalModel.from_pretrained(tmp_path / "run").config
    assert (trained.pooling, trained.normalize, trained.max_seq_length) == (("cls",), False, 9)
    assert (trained.prompts["query"], trained.similarity_fn_name) == ("who ", "dot")
    change = np.abs(trained.dense[0].kernel - model.config.dense[0].kernel).max()
    assert 1e-4 < change < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["embedding", "cross_encoder", "sparse_encoder"])
def test_chunks_work_with_lora_and_bfloat16(fit, objective, corpus, tmp_path):
    data_name = "labeled" if objective == "cross_encoder" else "triplets"
    fit("base", objective, data_name, do_train=True, max_steps=1)
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "base", "do_train": True}
    lora = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.1}
    for changes, tolerance in ((lora, 1e-5), ({"dtype": "bfloat16"}, 2e-2)):
        results = []
        for chunk in (None, 5):
            output = f"{'-'.join(changes)}-{chunk}"
            options = {**start, **changes, "mini_batch_size": chunk}
            results.append(losses(fit(output, objective, data_name, **options).folder))
        for step, value in results[0].items():
            assert results[1][step] == pytest.approx(value, rel=tolerance), (changes, step)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_router_with_a_static_embedding_is_trained_and_exported(fit, corpus, tmp_path):
    from tokenizers import Tokenizer

    import hfseq
    from hfseq.modeling import sentence
    from hfseq.modeling.sentence.bi_encoder import QueryRoute
    from hfseq.modeling.sentence.static_embedding import StaticEmbedding

    theirs = pytest.importorskip("sentence_transformers")
    save_start("embedding", corpus, tmp_path / "plain")
    model = hfseq.SentenceEncoder.from_pretrained(tmp_path / "plain")
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer/tokenizer.json"))
    size = tokenizer.get_vocab_size()
    table = np.random.default_rng(0).normal(size=(size, 32)).astype(np.float32)
    route = QueryRoute(StaticEmbedding(table, tokenizer), normalize=True)
    model.config = sentence.SentenceConfig(normalize=True, query_route=route)
    model.save_pretrained(tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2}
    fit("run", "embedding", "triplets", **start, do_train=True)
    ours: Any = hfseq.RetrievalModel.from_pretrained(tmp_path / "run")
    trained = ours.config.query_route.static_embedding.embedding
    assert np.abs(trained - table).max() > 1e-3
    model = theirs.SentenceTransformer(str(tmp_path / "run"), device="cpu")
    texts = ["the law of every land", "who live there"]
    for method in ("encode_query", "encode_document"):
        expected = getattr(model, method)(texts)
        np.testing.assert_allclose(getattr(ours, method)(texts), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_router_with_two_transformers_has_the_weights_of_sentence_transformers(
    fit, data, corpus, tmp_path
):
    from transformers import AutoTokenizer, BertConfig

    import hfseq
    from hfseq.data.batches import Batches
    from hfseq.modeling.sentence import Dense, SentenceConfig
    from hfseq.modeling.sentence.bi_encoder import QueryRoute

    theirs = pytest.importorskip("sentence_transformers")
    save_start("embedding", corpus, tmp_path / "plain")
    model = hfseq.SentenceEncoder.from_pretrained(tmp_path / "plain")
    tokenizer: Any = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    small = BertConfig.from_pretrained(tmp_path / "plain", hidden_size=16, intermediate_size=24)
    projection = SentenceConfig(dense=(Dense.random(16, 32),), normalize=True)
    query_encoder = hfseq.SentenceEncoder(hfseq.FlaxBertModel(small, seed=2), tokenizer, projection)
    route = QueryRoute(encoder=query_encoder)
    model.config = SentenceConfig(normalize=True, query_route=route)
    model.save_pretrained(tmp_path / "start")
    rows = [json.loads(line) for line in (data / "train-triplets.jsonl").open()]
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2}
    start |= {"adam_epsilon": 1e-2, "weight_decay": 0.1}

    def run(output: str, **options: Any) -> Any:
        return fit(output, "embedding", "triplets", **start, **options)

    check_resume(run, step=3, do_train=True, do_eval=True, save_steps=2)
    chunks = run("chunks", do_train=True, mini_batch_size=5)
    assert losses(chunks.folder) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    order = Batches(range(len(rows)), BATCH, 42)  # type: ignore[arg-type]
    ordered = [rows[index] for step in range(STEPS) for index in order.indices(step)[0]]
    run("ours", do_train=True, max_steps=STEPS)
    train_theirs(
        *(theirs, "embedding", "MultipleNegativesRankingLoss", 1e-2, 1e-2, tmp_path / "start"),
        *(ordered, tmp_path),
        weight_decay=0.1,
        router_mapping={"query": "query", "document": "document", "negative": "document"},
    )
    ours = hfseq.RetrievalModel.from_pretrained(tmp_path / "ours")
    texts = ["the law of every land", "who live there"]
    for method in ("encode_query", "encode_document"):
        before = getattr(model, method)(texts)
        actual = getattr(ours, method)(texts)
        assert np.abs(actual - before).max() > 1e-2
        for name in ("theirs", "ours"):
            reference = theirs.SentenceTransformer(str(tmp_path / name), device="cpu")
            expected = getattr(reference, method)(texts)
            np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=name)


def test_a_bi_encoder_gets_an_autoencoder_which_resumes_exactly(fit, corpus, tmp_path):
    import hfseq

    save_start("embedding", corpus, tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2}
    start |= {"auto_encoder_size": 64, "auto_encoder_k": 6}

    def run(output: str, **options: Any) -> Any:
        return fit(output, "sparse_encoder", "triplets", **start, **options)

    whole = run("whole", do_train=True, save_steps=3)
    checkpoint = tmp_path / "whole" / "checkpoints" / "3"
    resumed = run("resumed", do_train=True, resume_from_checkpoint=checkpoint)
    assert resumed.start_step == 3
    assert trees_equal(whole.state.params, resumed.state.params)
    assert trees_equal(whole.state.extra, resumed.state.extra)
    ours: Any = hfseq.RetrievalModel.from_pretrained(tmp_path / "whole")
    encoder = ours.config.auto_encoder
    assert (encoder.hidden_dim, encoder.k, ours.config.max_active_dims) == (64, 6, 6)
    # Four steps with three columns, and two updates per column.
    assert encoder.last_nonzero.min() == 1 and encoder.last_nonzero.max() <= 24
    assert np.abs(encoder.latent_bias).max() > 1e-3
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "- csr\n" in card and "- splade\n" not in card


@pytest.mark.slow
def test_an_autoencoder_is_trained_in_chunks_and_further(fit, corpus, tmp_path):
    import hfseq

    save_start("embedding", corpus, tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2}
    start |= {"auto_encoder_size": 64, "auto_encoder_k": 6}

    def run(output: str, **options: Any) -> Any:
        return fit(output, "sparse_encoder", "triplets", **start, do_train=True, **options)

    whole, chunks = run("whole", do_eval=True), run("chunks", mini_batch_size=5)
    assert 1 < whole.metrics["eval_document_active_dims"] <= 6
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "chunks") == pytest.approx(expected, rel=1e-5)
    assert trees_equal(chunks.state.extra, whole.state.extra)
    run("mesh", devices=8, mesh="data=4,fsdp=2")
    assert losses(tmp_path / "mesh") == pytest.approx(expected, rel=2e-5)
    ours: Any = hfseq.RetrievalModel.from_pretrained(tmp_path / "whole")
    encoder = ours.config.auto_encoder
    # The saved model is trained further, with its own statistics.
    start |= {"model_name_or_path": tmp_path / "whole", "auto_encoder_size": None}
    again = run("again", max_steps=1)
    (statistics,) = trees.flatten(again.state.extra["buffers"]).values()
    assert (np.asarray(statistics) <= encoder.last_nonzero + 6).all()
    assert np.asarray(statistics).max() >= encoder.last_nonzero.max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_encoder_k": 40}, "has 128 features, but its training uses the 160 largest"),
        ({"auto_encoder_size": 16}, "has 16 features, but its training uses the 32 largest"),
    ],
)
def test_autoencoders_that_are_too_small_are_errors(fit, corpus, tmp_path, changes, message):
    save_start("embedding", corpus, tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", **changes}
    with pytest.raises(UsageError, match=message):
        fit("run", "sparse_encoder", "triplets", **start, do_train=True)


def test_flags_of_autoencoders_require_a_bi_encoder(fit):
    with pytest.raises(UsageError, match=r"--auto_encoder_size .* require a bi-encoder"):
        fit("run", "sparse_encoder", "triplets", auto_encoder_size=64, do_train=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_static_query_encoder_is_trained_and_exported(fit, corpus, frozen, tmp_path):
    from transformers import AutoTokenizer, BertConfig

    import hfseq
    from hfseq.modeling.sentence import SparseConfig, StaticQueryEncoder

    theirs = pytest.importorskip("sentence_transformers")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    size = len(tokenizer)
    model = hfseq.FlaxBertForMaskedLM(
        BertConfig(
            vocab_size=size, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    weight = np.linspace(0.5, 1.5, size, dtype=np.float32)
    query_encoder = StaticQueryEncoder(weight, tokenizer, frozen)
    config = SparseConfig(query_encoder=query_encoder)
    hfseq.SparseEncoder(model, tokenizer, config).save_pretrained(tmp_path / "start")
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    start |= {"model_name_or_path": tmp_path / "start", "learning_rate": 1e-2}

    def run(output: str, **options: Any) -> Any:
        return fit(output, "sparse_encoder", "triplets", **start, **options)

    check_resume(run, step=3, do_train=True, save_steps=2)
    ours = hfseq.SparseEncoder.from_pretrained(tmp_path / "whole")
    assert ours.config.query_encoder is not None
    changed = np.abs(ours.config.query_encoder.weight - weight).max()
    assert changed == 0 if frozen else changed > 1e-3
    model = theirs.SparseEncoder(str(tmp_path / "whole"), device="cpu")
    texts = ["the law of every land", "who live there", ""]
    for method in ("encode_query", "encode_document"):
        expected = getattr(model, method)(texts).to_dense().numpy()
        actual = getattr(ours, method)(texts).toarray()
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "objective", ["embedding", "cross_encoder", "sparse_encoder", "multi_vector"]
)
def test_trained_directories_open_in_sentence_transformers(fit, objective, tmp_path):
    import hfseq

    theirs = pytest.importorskip("sentence_transformers")
    data_name = "labeled" if objective == "cross_encoder" else "triplets"
    lengths = {"max_seq_length": 12}
    if objective == "multi_vector":
        lengths["query_length"] = 8
    fit("run", objective, data_name, do_train=True, max_steps=3, **lengths)
    folder = str(tmp_path / "run")
    class_names = {
        "embedding": "SentenceTransformer",
        "cross_encoder": "CrossEncoder",
        "sparse_encoder": "SparseEncoder",
        "multi_vector": "MultiVectorEncoder",
    }
    card = (tmp_path / "run/README.md").read_text()
    assert f"from sentence_transformers import {class_names[objective]}\n" in card
    texts = ["the law of every land", "who live there", "read"]
    if objective == "cross_encoder":
        pairs = [(texts[0], text) for text in texts]
        model = theirs.CrossEncoder(folder, device="cpu")
        assert model.max_length == 12
        expected = model.predict(pairs)
        np.testing.assert_allclose(
            hfseq.CrossEncoder.from_pretrained(folder).predict(pairs), expected, atol=1e-5
        )
        return
    name = {
        "embedding": ("SentenceTransformer", "SentenceEncoder"),
        "sparse_encoder": ("SparseEncoder", "SparseEncoder"),
        "multi_vector": ("MultiVectorEncoder", "MultiVectorEncoder"),
    }[objective]
    model = getattr(theirs, name[0])(folder, device="cpu")
    ours = getattr(hfseq, name[1]).from_pretrained(folder)
    for method in ("encode_query", "encode_document"):
        expected = getattr(model, method)(texts)
        actual = getattr(ours, method)(texts)
        if objective == "sparse_encoder":
            expected, actual = expected.to_dense().numpy(), actual.toarray()
        for first, second in zip(actual, expected, strict=True):
            np.testing.assert_allclose(first, np.asarray(second), atol=1e-5)


STEPS, BATCH = 20, 16
#: The objective, the data, the loss and the loss of sentence-transformers.
PARITY: dict[str, tuple[str, str, str, str]] = {
    "ranking": (
        "embedding",
        "triplets",
        "multiple_negatives_ranking",
        "MultipleNegativesRankingLoss",
    ),
    "cosent": ("embedding", "scores", "cosent", "CoSENTLoss"),
    "pairs": ("cross_encoder", "labeled", "binary_cross_entropy", "BinaryCrossEntropyLoss"),
    "lists": ("cross_encoder", "lists", "lambda_loss", "LambdaLoss"),
    "splade": ("sparse_encoder", "triplets", "multiple_negatives_ranking", "SpladeLoss"),
    "csr": ("sparse_encoder", "triplets", "multiple_negatives_ranking", "CSRLoss"),
    "colbert": (
        "multi_vector",
        "triplets",
        "multiple_negatives_ranking",
        "MultiVectorMultipleNegativesRankingLoss",
    ),
}


def save_start(objective: str, corpus: Path, folder: Path) -> None:
    """Saves a model without dropout, of the kind that the objective trains, or "csr"."""
    from transformers import AutoTokenizer, BertConfig

    import hfseq
    from hfseq.modeling import sentence
    from hfseq.modeling.sentence.auto_encoder import SparseAutoEncoder

    tokenizer: Any = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    model_class, encoder, config = {
        "embedding": ("BertModel", "SentenceEncoder", sentence.SentenceConfig(normalize=True)),
        "cross_encoder": (
            *("BertForSequenceClassification", "CrossEncoder"),
            sentence.CrossEncoderConfig(activation="Identity"),
        ),
        "sparse_encoder": ("BertForMaskedLM", "SparseEncoder", sentence.SparseConfig()),
        "csr": (
            *("BertModel", "SparseEncoder"),
            sentence.SparseConfig(
                max_active_dims=8,
                bi_encoder=sentence.SentenceConfig(normalize=True),
                auto_encoder=SparseAutoEncoder.random(32, 128, 8),
            ),
        ),
        "multi_vector": (
            *("BertModel", "MultiVectorEncoder"),
            sentence.MultiVectorConfig((sentence.random_projection(32, 16),)),
        ),
    }[objective]
    bert = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1,
    )  # fmt: skip
    model = getattr(hfseq, f"Flax{model_class}")(bert, seed=1)
    getattr(hfseq, encoder)(model, tokenizer, config).save_pretrained(folder)


def train_theirs(
    theirs: Any,
    objective: str,
    loss_name: str,
    rate: float,
    epsilon: float,
    start: Path,
    rows: list[dict[str, Any]],
    out: Path,
    **options: Any,
) -> None:
    """Trains a model with sentence-transformers on these rows, in this order, and saves it."""
    import torch
    from datasets import Dataset

    module, name = {
        "embedding": ("sentence_transformer", "SentenceTransformer"),
        "cross_encoder": ("cross_encoder", "CrossEncoder"),
        "sparse_encoder": ("sparse_encoder", "SparseEncoder"),
        "multi_vector": ("multi_vector_encoder", "MultiVectorEncoder"),
    }[objective]
    package = getattr(theirs, module)
    trainer_class = getattr(theirs, f"{name}Trainer")
    arguments_class = getattr(theirs, f"{name}TrainingArguments")

    class InOrder(trainer_class):
        def get_batch_sampler(
            self, dataset: Any, batch_size: int, drop_last: bool, **_: Any
        ) -> Any:
            order = torch.utils.data.SequentialSampler(dataset)
            return torch.utils.data.BatchSampler(order, batch_size, drop_last)

    model = getattr(theirs, name)(str(start), device="cpu")
    losses_module = importlib.import_module(f"{package.__name__}.losses")
    if loss_name == "CSRLoss":
        loss = losses_module.CSRLoss(model)
    elif loss_name == "SpladeLoss":
        inner = losses_module.SparseMultipleNegativesRankingLoss(model)
        weights = {"document_regularizer_weight": 3e-5, "query_regularizer_weight": 5e-5}
        loss = losses_module.SpladeLoss(model, inner, **weights)
    else:
        loss = getattr(losses_module, loss_name)(model)
    arguments = arguments_class(
        output_dir=str(out / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        adam_epsilon=epsilon,
        max_grad_norm=0,
        warmup_steps=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    dataset = Dataset.from_list(rows)
    InOrder(model=model, args=arguments, train_dataset=dataset, loss=loss).train()
    model.save_pretrained(str(out / "theirs"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PARITY)
def test_twenty_steps_have_the_weights_of_sentence_transformers(case, fit, data, corpus, tmp_path):
    from safetensors.numpy import load_file

    from hfseq.data.batches import Batches

    theirs = pytest.importorskip("sentence_transformers")
    objective, data_name, loss, loss_name = PARITY[case]
    # AdamW amplifies rounding in gradients that are smaller than its epsilon.
    epsilon = 1e-3 if case == "lists" else 1e-2
    # The maximum over tokens is not smooth: large steps amplify rounding.
    rate = 1e-3 if case in ("splade", "csr") else 1e-2
    save_start("csr" if case == "csr" else objective, corpus, tmp_path / "start")
    rows = [json.loads(line) for line in (data / f"train-{data_name}.jsonl").open()]
    start = {"model_type": None, "config_overrides": None, "tokenizer_name": None}
    loop = fit(
        "ours",
        objective,
        data_name,
        **start,
        model_name_or_path=tmp_path / "start",
        loss=loss,
        max_steps=STEPS,
        learning_rate=rate,
        adam_epsilon=epsilon,
        do_train=True,
        logging_steps=STEPS,
    )
    order = Batches(range(len(rows)), BATCH, 42)  # type: ignore[arg-type]
    ordered = [rows[index] for step in range(STEPS) for index in order.indices(step)[0]]
    train_theirs(theirs, objective, loss_name, rate, epsilon, tmp_path / "start", ordered, tmp_path)
    changes = []
    for file in loop.folder.rglob("model.safetensors"):
        name = file.relative_to(loop.folder)
        actual, expected, first = (
            load_file(folder / name)
            for folder in (loop.folder, tmp_path / "theirs", tmp_path / "start")
        )
        for key in actual.keys() & expected.keys():
            if key == "stats_last_nonzero":
                np.testing.assert_array_equal(actual[key], expected[key])
                continue
            np.testing.assert_allclose(actual[key], expected[key], atol=1e-4, err_msg=key)
            changes.append(np.abs(actual[key] - first[key]).max())
    assert len(changes) > 15 and max(changes) > rate

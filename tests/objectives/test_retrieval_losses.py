"""The losses of retrieval models, compared with the classes of sentence-transformers 6."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.modeling.sentence.auto_encoder import SparseAutoEncoder
from hfseq.objectives import auto_encoder
from hfseq.objectives import ranking_losses as ranking
from hfseq.objectives import retrieval_losses as losses

ROWS, FEATURES = 12, 9


class Case(NamedTuple):
    """A loss of this package and the class that it corresponds to."""

    loss: Callable[..., losses.LossSum]
    reference: str
    texts: int = 2
    labels: str | None = None
    options: dict[str, Any] = {}
    reference_options: dict[str, Any] = {}


def mnr(vectors: jax.Array, labels: Any, valid: jax.Array, **options: Any) -> losses.LossSum:
    return losses.multiple_negatives_ranking(vectors, valid, **options)


def triplet(vectors: jax.Array, labels: Any, valid: jax.Array, **options: Any) -> losses.LossSum:
    return losses.triplet(vectors, valid, **options)


def on_scores(loss: Callable[..., losses.LossSum]) -> Callable[..., losses.LossSum]:
    def with_dot(vectors: jax.Array, *arguments: Any, **options: Any) -> losses.LossSum:
        scores = losses.pairwise_similarity(vectors[:, :1], vectors[:, 1:], "dot")
        return loss(scores, *arguments, **options)

    return with_dot


def on_texts(loss: Callable[..., losses.LossSum]) -> Callable[..., losses.LossSum]:
    return lambda vectors, *arguments, **options: loss(vectors[:, 0], *arguments, **options)


ALL = {"directions": losses.ALL_DIRECTIONS}
SYMMETRIC = {"directions": losses.SYMMETRIC, "partition_mode": "per_direction"}
CASES = {
    "mnr": Case(mnr, "MultipleNegativesRankingLoss"),
    "mnr-negatives": Case(mnr, "MultipleNegativesRankingLoss", 4),
    "mnr-scale": Case(mnr, "MultipleNegativesRankingLoss", 3, None, {"scale": 3.0}, {"scale": 3.0}),
    "gte": Case(mnr, "MultipleNegativesRankingLoss", 3, None, ALL, ALL),
    "symmetric": Case(mnr, "MultipleNegativesRankingLoss", 3, None, SYMMETRIC, SYMMETRIC),
    **{
        mode: Case(
            *(mnr, "MultipleNegativesRankingLoss", 4, None),
            *[{"hardness_mode": mode, "hardness_strength": 2.5}] * 2,
        )
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
    "cosent": Case(losses.cosent, "CoSENTLoss", 2, "score"),
    "cosent-ties": Case(losses.cosent, "CoSENTLoss", 2, "binary"),
    "angle": Case(losses.cosent, "AnglELoss", 2, "score", {"angle": True}),
    "angle-negatives": Case(losses.cosent, "AnglELoss", 4, "binary", {"angle": True}),
    "cosine": Case(losses.cosine_similarity_loss, "CosineSimilarityLoss", 2, "score"),
    "contrastive": Case(losses.contrastive, "ContrastiveLoss", 2, "binary", {"margin": 1.2},
                        {"margin": 1.2}),
    "online": Case(losses.online_contrastive, "OnlineContrastiveLoss", 2, "binary",
                   {"margin": 1.2}, {"margin": 1.2}),
    "online-one-label": Case(losses.online_contrastive, "OnlineContrastiveLoss", 2, "ones"),
    "triplet": Case(triplet, "TripletLoss", 3),
    "batch-all": Case(on_texts(losses.batch_all_triplet), "BatchAllTripletLoss", 1, "class",
                      {"margin": 0.5}, {"margin": 0.5}),
    "batch-hard": Case(on_texts(losses.batch_hard_triplet), "BatchHardTripletLoss", 1, "class"),
    "semi-hard": Case(on_texts(losses.batch_semi_hard_triplet), "BatchSemiHardTripletLoss", 1,
                      "class"),
    "semi-hard-one-label": Case(
        on_texts(losses.batch_semi_hard_triplet), "BatchSemiHardTripletLoss", 1, "ones"
    ),
    "batch-hard-one-label": Case(
        on_texts(losses.batch_hard_triplet), "BatchHardTripletLoss", 1, "ones"
    ),
    "batch-all-one-label": Case(
        on_texts(losses.batch_all_triplet), "BatchAllTripletLoss", 1, "ones"
    ),
    "margin-mse": Case(on_scores(losses.margin_mse), "MarginMSELoss", 3, "score"),
    "margin-mse-scores": Case(on_scores(losses.margin_mse), "MarginMSELoss", 4, "scores3"),
    "kl": Case(on_scores(losses.distill_kl_div), "DistillKLDivLoss", 4, "scores3",
               {"temperature": 2.0}, {"temperature": 2.0}),
    "kl-teacher": Case(on_scores(losses.distill_kl_div), "DistillKLDivLoss", 4, "scores3",
                       {"teacher_temperature": 0.5}, {"teacher_temperature": 0.5}),
    "mse": Case(losses.embed_distill, "MSELoss", 2, "vector", {"metric": "mse"}),
    **{
        f"distill-{metric}": Case(
            *(losses.embed_distill, "EmbedDistillLoss", 2, "vector"),
            *[{"metric": metric}, {"distance_metric": metric}],
        )
        for metric in ("l2", "cosine")
    },
}  # fmt: skip


def make_labels(
    label_kind: str | None, random: np.random.Generator, rows: int
) -> np.ndarray | None:
    return {
        None: lambda: None,
        "score": lambda: random.random(rows).astype(np.float32),
        "binary": lambda: random.integers(0, 2, rows).astype(np.float32),
        "ones": lambda: np.ones(rows, np.float32),
        "class": lambda: random.integers(0, 4, rows).astype(np.float32),
        "scores3": lambda: random.normal(size=(rows, 3)).astype(np.float32),
        "vector": lambda: random.normal(size=(rows, FEATURES)).astype(np.float32),
    }[label_kind]()


def value_and_grad(case: Case, vectors: Any, labels: Any, valid: Any) -> tuple[Any, np.ndarray]:
    labels = None if labels is None else jnp.asarray(labels)

    def mean(vectors: jax.Array) -> jax.Array:
        return case.loss(vectors, labels, jnp.asarray(valid), **case.options).mean

    value, gradient = jax.jit(jax.value_and_grad(mean))(jnp.asarray(vectors))
    return value, np.asarray(gradient)


def make_case(name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(ROWS, CASES[name].texts, FEATURES)).astype(np.float32)
    vectors[1:3, 0] += 0.5 * vectors[1:3, -1]  # some pairs are similar
    return vectors, make_labels(CASES[name].labels, random, ROWS)


#: The cases of the default tests.
FAST = ("mnr-negatives", "gte", "angle-negatives", "online", "semi-hard", "batch-all", "kl")


def fast_first(names: Iterable[str], fast: Container[str]) -> list[Any]:
    """Returns test parameters. All names that are not in ``fast`` are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", fast_first(CASES, FAST))
def test_rows_that_pad_the_batch_do_not_change_losses(name):
    case, (vectors, labels) = CASES[name], make_case(name)
    if labels is not None and case.labels != "vector":
        labels[1] = labels[0]  # ties
    value, gradient = value_and_grad(case, vectors, labels, np.ones(ROWS, bool))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    # Extra rows that repeat examples, in the middle.
    order = np.r_[0:5, 2:5, 5:ROWS]
    valid = np.r_[np.ones(5, bool), np.zeros(3, bool), np.ones(ROWS - 5, bool)]
    padded_labels = None if labels is None else labels[order]
    padded, padded_gradient = value_and_grad(case, vectors[order], padded_labels, valid)
    np.testing.assert_allclose(padded, value, rtol=2e-6)
    assert not padded_gradient[~valid].any()
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(padded_gradient[valid], gradient, atol=1e-5 * scale)


def compare(ours: tuple[Any, np.ndarray], loss: Any, tensor: Any) -> None:
    """Checks a value and a gradient against PyTorch's.

    The values are sums of float32 numbers in different orders. They are compared relative to the
    largest gradient, because single gradients can be differences of large numbers.
    """
    loss.backward()
    theirs = tensor.grad.numpy()
    np.testing.assert_allclose(ours[0], loss.item(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ours[1], theirs, atol=1e-5 * max(np.abs(theirs).max(), 1e-3))


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("torch")
    return pytest.importorskip("sentence_transformers")


def column_model(tensor: Any) -> Any:
    """Returns a model whose vectors of column i are ``tensor[:, i]``."""
    import torch

    class Columns(torch.nn.Module):
        def forward(self, features: dict) -> dict:
            return {"sentence_embedding": tensor[:, features["column"]]}

        def get_embedding_dimension(self) -> int:
            return tensor.shape[-1]

    return Columns()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_sentence_transformers(name, seed, theirs):
    import torch
    from sentence_transformers.sentence_transformer import losses as reference

    case, (vectors, labels) = CASES[name], make_case(name, seed)
    tensor = torch.tensor(vectors, requires_grad=True)
    loss = getattr(reference, case.reference)(column_model(tensor), **case.reference_options)
    features = [{"column": column} for column in range(case.texts)]
    tensor_labels = None if labels is None else torch.tensor(labels)
    result = loss(features, tensor_labels)
    compare(value_and_grad(case, vectors, labels, np.ones(ROWS, bool)), result, tensor)


@pytest.mark.slow
@pytest.mark.parametrize("texts", [2, 3])
@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_gist_is_that_of_sentence_transformers(texts, strategy, contrast, theirs):
    import torch
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    random = np.random.default_rng(texts)
    vectors, guide = random.normal(size=(2, ROWS, texts, FEATURES)).astype(np.float32)
    guide[:, 1] += guide[:, 0]
    tensor = torch.tensor(vectors, requires_grad=True)
    loss = GISTEmbedLoss.__new__(GISTEmbedLoss)
    torch.nn.Module.__init__(loss)
    options = {"temperature": 0.1, "margin_strategy": strategy, "margin": 0.1}
    options |= {"contrast_anchors": contrast, "contrast_positives": contrast}
    loss.model, loss.guide = column_model(tensor), column_model(torch.tensor(guide))
    loss.similarity_fct = torch.nn.CosineSimilarity(dim=-1)
    loss.cross_entropy_loss = torch.nn.CrossEntropyLoss()
    loss.must_retokenize = loss.gather_across_devices = False
    for name, value in options.items():
        setattr(loss, name, value)
    result = loss([{"column": column} for column in range(texts)], None)

    def mean(vectors: jax.Array) -> jax.Array:
        return losses.gist(vectors, jnp.asarray(guide), jnp.ones(ROWS, bool), **options).mean

    compare(jax.value_and_grad(mean)(jnp.asarray(vectors)), result, tensor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_classifier_of_pairs_is_that_of_sentence_transformers(theirs):
    import torch
    from sentence_transformers.sentence_transformer.losses import SoftmaxLoss

    random = np.random.default_rng(0)
    vectors = random.normal(size=(ROWS, 2, FEATURES)).astype(np.float32)
    labels = random.integers(0, 3, ROWS).astype(np.int32)
    tensor = torch.tensor(vectors, requires_grad=True)
    model = column_model(tensor)
    model.device = "cpu"
    loss = SoftmaxLoss(model, FEATURES, 3)
    result = loss([{"column": 0}, {"column": 1}], torch.tensor(labels, dtype=torch.long))
    weight, bias = (p.detach().numpy() for p in loss.classifier.parameters())

    def mean(vectors: jax.Array) -> jax.Array:
        logits = losses.pair_features(vectors) @ weight.T + bias
        return ranking.softmax_cross_entropy(logits, labels, jnp.ones(ROWS, bool)).mean

    compare(jax.value_and_grad(mean)(jnp.asarray(vectors)), result, tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnr-negatives", "cosent", "mse", "triplet"])
@pytest.mark.filterwarnings("ignore")
def test_matryoshka_is_that_of_sentence_transformers(name, theirs):
    import torch
    from sentence_transformers.sentence_transformer import losses as reference

    case, (vectors, labels) = CASES[name], make_case(name)
    tensor = torch.tensor(vectors, requires_grad=True)
    dims, weights = [FEATURES, 4, 2], [1.0, 0.5, 2.0]
    model = column_model(tensor)
    inner = getattr(reference, case.reference)(model, **case.reference_options)
    loss = reference.MatryoshkaLoss(model, inner, dims, weights)
    features = [{"column": column} for column in range(case.texts)]
    result = loss(features, None if labels is None else torch.tensor(labels))

    def mean(vectors: jax.Array) -> jax.Array:
        def inner(part: jax.Array, labels: Any) -> losses.LossSum:
            return case.loss(part, labels, jnp.ones(ROWS, bool), **case.options)

        labels_array = None if labels is None else jnp.asarray(labels)
        return losses.matryoshka(inner, vectors, labels_array, dims, weights).mean

    compare(jax.value_and_grad(mean)(jnp.asarray(vectors)), result, tensor)


# -- rerankers


class ListCase(NamedTuple):
    loss: Callable[..., losses.LossSum]
    reference: str
    options: dict[str, Any] = {}
    reference_options: dict[str, Any] = {}


SCHEMES = {
    "none": "NoWeightingScheme",
    "ndcg_loss1": "NDCGLoss1Scheme",
    "ndcg_loss2": "NDCGLoss2Scheme",
    "lambda_rank": "LambdaRankScheme",
    "ndcg_loss2pp": "NDCGLoss2PPScheme",
}
LIST_CASES = {
    **{
        scheme: ListCase(
            ranking.lambda_loss, "LambdaLoss", {"weighting": scheme}, {"weighting_scheme": scheme}
        )
        for scheme in SCHEMES
    },
    "lambda-k": ListCase(ranking.lambda_loss, "LambdaLoss", {"k": 2}, {"k": 2}),
    "lambda-natural": ListCase(
        ranking.lambda_loss, "LambdaLoss", *[{"reduction_log": "natural", "sigma": 2.0}] * 2
    ),
    "ranknet": ListCase(ranking.lambda_loss, "RankNetLoss", {"weighting": "none"}),
    "listnet": ListCase(ranking.list_net, "ListNetLoss"),
    "listmle": ListCase(ranking.list_mle, "ListMLELoss"),
    "listmle-sorted": ListCase(
        ranking.list_mle, "ListMLELoss", *[{"respect_input_order": False}] * 2
    ),
    "plistmle": ListCase(ranking.list_mle, "PListMLELoss", {"weighted": True}),
    "adrmse": ListCase(ranking.adr_mse, "ADRMSELoss"),
    "adrmse-alpha": ListCase(ranking.adr_mse, "ADRMSELoss", *[{"alpha": 3.0}] * 2),
}
DOCUMENTS = (4, 1, 6, 3)


def make_lists(name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores, labels and a mask of lists of unequal length, with ties among the labels."""
    random = np.random.default_rng(seed)
    shape = (len(DOCUMENTS), max(DOCUMENTS))
    mask = np.arange(shape[1]) < np.array(DOCUMENTS)[:, None]
    labels = random.integers(0, 3, shape).astype(np.float32)
    if "sorted" in name:  # the order of ties is arbitrary there
        labels = random.permuted(np.tile(np.arange(6, dtype=np.float32), (4, 1)), axis=1)
    return random.normal(size=shape).astype(np.float32), labels, mask


def list_value_and_grad(case: ListCase, *arrays: np.ndarray) -> tuple[Any, np.ndarray]:
    scores, labels, mask = map(jnp.asarray, arrays)
    mean = jax.jit(
        jax.value_and_grad(lambda scores: case.loss(scores, labels, mask, **case.options).mean)
    )
    value, gradient = mean(scores)
    return value, np.asarray(gradient)


@pytest.mark.parametrize(
    "name", fast_first(LIST_CASES, ("ndcg_loss2pp", "listmle-sorted", "adrmse"))
)
def test_padding_does_not_change_listwise_losses(name):
    scores, labels, mask = make_lists(name)
    value, gradient = list_value_and_grad(LIST_CASES[name], scores, labels, mask)
    assert value > 0 and np.isfinite(gradient).all() and not gradient[~mask].any()
    wide = [np.pad(x, ((0, 2), (0, 3)), constant_values=fill) for x, fill in
            zip((scores, labels, mask), (7.0, 2.0, False), strict=True)]  # fmt: skip
    padded, padded_gradient = list_value_and_grad(LIST_CASES[name], *wide)
    np.testing.assert_allclose(padded, value, rtol=1e-6)
    np.testing.assert_allclose(padded_gradient[:4, :6], gradient, atol=1e-6)


def cross_encoder(tensor: Any) -> Any:
    """Returns a model whose score of the pair (i, j) of numbers is ``tensor[i, j]``."""
    import torch
    from sentence_transformers import CrossEncoder

    class Table(CrossEncoder):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        num_labels = 1
        device = torch.device("cpu")

        def preprocess(self, pairs: list, **options: Any) -> dict:
            return {"pairs": pairs}

        def forward(self, inputs: dict) -> dict:
            return {"scores": torch.stack([tensor[i, j] for i, j in inputs["pairs"]])[:, None]}

    return Table()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LIST_CASES)
@pytest.mark.filterwarnings("ignore")
def test_listwise_losses_are_those_of_sentence_transformers(name, seed, theirs):
    import torch
    from sentence_transformers.cross_encoder import losses as reference

    case, (scores, labels, mask) = LIST_CASES[name], make_lists(name, seed)
    tensor = torch.tensor(scores, requires_grad=True)
    options = dict(case.reference_options)
    if "weighting_scheme" in options:
        scheme = SCHEMES[options["weighting_scheme"]]
        options["weighting_scheme"] = getattr(reference, scheme)()
    loss = getattr(reference, case.reference)(cross_encoder(tensor), **options)
    documents = [list(range(count)) for count in DOCUMENTS]
    tensor_labels = [
        torch.tensor(row[:count]) for row, count in zip(labels, DOCUMENTS, strict=True)
    ]
    result = loss([list(range(len(documents))), documents], tensor_labels)
    compare(list_value_and_grad(case, scores, labels, mask), result, tensor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pointwise_losses_of_rerankers_are_those_of_sentence_transformers(theirs):
    import torch
    from sentence_transformers.cross_encoder import losses as reference

    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(2, 8, 1)).astype(np.float32)
    labels = 1 / (1 + np.exp(-labels[:, 0]))
    valid = jnp.ones(8, bool)
    cases = [
        (ranking.binary_cross_entropy, "BinaryCrossEntropyLoss", {"pos_weight": 3.0}),
        (ranking.mse, "MSELoss", {}),
    ]
    for ours, name, options in cases:
        tensor = torch.tensor(scores, requires_grad=True)
        tensors = {key: torch.tensor(value) for key, value in options.items()}
        loss = getattr(reference, name)(cross_encoder(tensor), **tensors)
        result = loss([list(range(8)), [0] * 8], torch.tensor(labels))
        value = jax.value_and_grad(
            lambda x, ours=ours, options=options: ours(x[:, 0], labels, valid, **options).mean
        )(jnp.asarray(scores))
        compare(value, result, tensor)
    # With `num_negatives=None`, the candidates are all documents of the other rows.
    table = random.normal(size=(5, 5)).astype(np.float32)
    tensor = torch.tensor(table, requires_grad=True)
    loss = reference.MultipleNegativesRankingLoss(cross_encoder(tensor), num_negatives=None)
    result = loss([list(range(5)), list(range(5))], None)
    order = np.array([[row, *(i for i in range(5) if i != row)] for row in range(5)])
    value = jax.value_and_grad(
        lambda x: (
            ranking.candidate_ranking(jnp.take_along_axis(x, order, 1), jnp.ones((5, 5), bool)).mean
        )
    )(jnp.asarray(table))
    compare(value, result, tensor)


# -- sparse encoders and late interaction


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 4])
def test_the_flops_regularizer_is_that_of_sentence_transformers(threshold, theirs):
    import torch
    from sentence_transformers.sparse_encoder.losses import FlopsLoss

    weights = np.random.default_rng(0).normal(size=(ROWS, 2, FEATURES)).clip(0).astype(np.float32)
    tensor = torch.tensor(weights, requires_grad=True)
    result = FlopsLoss(None, threshold).compute_loss_from_embeddings(tensor.reshape(-1, FEATURES))
    value = jax.value_and_grad(losses.flops)(jnp.asarray(weights), jnp.ones(ROWS, bool), threshold)
    compare(value, result, tensor)


def make_auto_encoder(normalize: bool) -> tuple[SparseAutoEncoder, np.ndarray]:
    """Returns an autoencoder with unused features, and vectors of three columns of texts."""
    random = np.random.default_rng(3)
    weights: dict[str, Any] = {
        "encoder": random.normal(size=(24, FEATURES)),
        "pre_bias": random.normal(size=FEATURES) / 5,
        "latent_bias": random.normal(size=24) / 5,
    }
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    last_nonzero = np.where(random.random(24) < 0.7, 30, 3)
    encoder = SparseAutoEncoder(
        **weights, last_nonzero=last_nonzero, k=3, k_aux=5, normalize=normalize
    )
    return encoder, random.normal(size=(ROWS, 3, FEATURES)).astype(np.float32)


@pytest.mark.parametrize("normalize", [False, True])
def test_rows_that_pad_the_batch_do_not_change_reconstructions(normalize):
    encoder, vectors = make_auto_encoder(normalize)
    valid = np.r_[np.zeros(2, bool), np.ones(ROWS - 2, bool)]
    vectors[:2] = 9.0
    buffers = encoder.buffers["last_nonzero"]
    run = jax.jit(
        lambda vectors, valid: auto_encoder.reconstruct(
            encoder, vectors, encoder.weights, buffers, valid
        )
    )
    _, loss, statistics = run(vectors, valid)
    latents, expected_loss, expected_statistics = run(vectors[2:], valid[2:])
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    np.testing.assert_array_equal(statistics, expected_statistics)
    assert ((latents > 0).sum(-1) <= 3).all() and (latents > 0).any()
    # Equal texts have no spread, by which the auxiliary loss is divided.
    equal = jnp.ones((4, 2, FEATURES))
    assert np.isfinite(run(equal, valid[:4])[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_reconstructions_are_those_of_sentence_transformers(normalize, train, theirs):
    import torch
    from sentence_transformers.sparse_encoder.losses import CSRLoss
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder as Reference

    encoder, vectors = make_auto_encoder(normalize)
    reference = Reference(FEATURES, 24, k=3, k_aux=5, normalize=normalize).train(train)
    names = {"pre_bias": "pre_bias", "encoder": "encoder.weight", "latent_bias": "latent_bias"}
    state = {names[name]: torch.tensor(value) for name, value in encoder.weights.items()}
    reference.load_state_dict(
        {
            **state,
            "decoder.linear.weight": state["encoder.weight"],
            "stats_last_nonzero": torch.tensor(encoder.last_nonzero),
        }
    )
    tensor = torch.tensor(vectors, requires_grad=True)
    columns = column_model(tensor)

    class Model(torch.nn.Module):
        def forward(self, features: dict) -> dict:
            return reference(columns(features))

    terms = CSRLoss(Model(), beta=0.3, gamma=0.5)([{"column": n} for n in range(3)], None)
    result = sum(terms.values())
    assert terms["reconstruction_loss_aux"] > 0.01  # unused features exist

    def mean(vectors: jax.Array, weights: Any) -> tuple[jax.Array, jax.Array]:
        buffers, valid = encoder.buffers["last_nonzero"], jnp.ones(ROWS, bool)
        latents, error, statistics = auto_encoder.reconstruct(
            encoder, vectors, weights, buffers, valid, auxiliary_weight=0.3, train=train
        )
        options: dict[str, Any] = {"scale": 1.0, "similarity": "dot"}
        base = losses.multiple_negatives_ranking(latents, valid, **options)
        return error + 0.5 * base.mean, statistics

    weights = {name: jnp.asarray(value) for name, value in encoder.weights.items()}
    (value, statistics), gradients = jax.value_and_grad(mean, (0, 1), has_aux=True)(
        jnp.asarray(vectors), weights
    )
    compare((value, gradients[0]), result, tensor)
    np.testing.assert_array_equal(statistics, reference.stats_last_nonzero.numpy())
    parameters = dict(reference.named_parameters())
    for name, tensor_name in names.items():
        expected = parameters[tensor_name].grad.numpy()
        np.testing.assert_allclose(gradients[1][name], expected, atol=1e-5 * np.abs(expected).max())


def make_tokens(seed: int = 0) -> list[np.ndarray]:
    """Returns queries, documents and their masks. The second document has no visible token."""
    random = np.random.default_rng(seed)
    queries = random.normal(size=(4, 3, FEATURES)).astype(np.float32)
    documents = random.normal(size=(8, 5, FEATURES)).astype(np.float32)
    query_mask = np.arange(3) < np.array([3, 1, 2, 3])[:, None]
    document_mask = random.random((8, 5)) < 0.6
    document_mask[0] = True
    document_mask[1] = False
    return [queries, documents, query_mask, document_mask]


def test_maxsim_scores_tokens_that_are_not_hidden():
    queries, documents, query_mask, document_mask = make_tokens()
    scores = np.asarray(losses.maxsim(*map(jnp.asarray, make_tokens())))
    for i in range(4):
        for j in range(8):
            visible = documents[j][document_mask[j]].astype(np.float64)
            query = queries[i][query_mask[i]]
            expected = (query @ visible.T).max(1).sum() if len(visible) else -1e9
            np.testing.assert_allclose(scores[i, j], expected, rtol=1e-5)
    pairwise = losses.maxsim_pairwise(
        queries, documents.reshape(4, 2, 5, FEATURES), query_mask, document_mask.reshape(4, 2, 5)
    )
    own_scores = scores.reshape(4, 4, 2)[np.arange(4), np.arange(4)]
    np.testing.assert_allclose(pairwise, own_scores, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_maxsim_is_that_of_sentence_transformers(normalize, theirs):
    import torch
    from sentence_transformers.util.similarity import maxsim

    arrays = make_tokens(1)
    tensor = torch.tensor(arrays[0], requires_grad=True)
    result = maxsim(
        *(tensor, *map(torch.tensor, arrays[1:])), length_normalize=normalize
    )[:, 2:]  # fmt: skip
    weights = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)

    def total(queries: jax.Array) -> jax.Array:
        scores = losses.maxsim(queries, *map(jnp.asarray, arrays[1:]), length_normalize=normalize)
        return (scores[:, 2:] * weights).sum()

    value = jax.value_and_grad(total)(jnp.asarray(arrays[0]))
    compare(value, (result * torch.tensor(weights)).sum(), tensor)


@pytest.mark.slow
def test_score_chunks_do_not_change_losses():
    vectors = jnp.asarray(make_case("mnr-negatives")[0])
    valid = jnp.arange(ROWS) != 4
    guide = np.random.default_rng(3).normal(size=vectors[:, :3].shape).astype(np.float32)

    def ranking_loss(vectors: jax.Array, chunk: int | None) -> jax.Array:
        options: dict[str, Any] = {"directions": losses.ALL_DIRECTIONS, "chunk_rows": chunk}
        return losses.multiple_negatives_ranking(vectors, valid, **options).mean

    def gist_loss(vectors: jax.Array, chunk: int | None) -> jax.Array:
        return losses.gist(vectors[:, :3], guide, valid, chunk_rows=chunk).mean

    for loss in (ranking_loss, gist_loss):
        value, gradient = jax.value_and_grad(loss)(vectors, None)
        for chunk in (5, 1):
            chunk_value, chunk_gradient = jax.value_and_grad(loss)(vectors, chunk)
            np.testing.assert_allclose(chunk_value, value, rtol=1e-5)
            np.testing.assert_allclose(chunk_gradient, gradient, atol=1e-5 * abs(gradient).max())

"""Divergences between teacher and student, and the vocabularies of both."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq.data.arguments import OBJECTIVES, CausalArguments, EmbeddingArguments
from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError
from hfseq.objectives import divergences
from hfseq.objectives.base import Auxiliary
from hfseq.objectives.clm import CausalLM
from hfseq.objectives.distillation import with_teacher
from hfseq.plugins import load
from tests.support import chats, preferences
from tests.support.tiers import first

DRAW = np.random.default_rng(0)
STUDENT, TEACHER = DRAW.normal(size=(2, 5, 11)) * 3


def softmax(x: np.ndarray) -> np.ndarray:
    exponents = np.exp(x - x.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_divergences_equal_their_definitions(name, temperature):
    s, t = (softmax(x / temperature) for x in (STUDENT, TEACHER))
    m = 0.3 * t + 0.7 * s
    expected = {
        "forward_kl": kl(t, s),
        "reverse_kl": kl(s, t),
        "jsd": 0.3 * kl(t, m) + 0.7 * kl(s, m),
    }[name] * temperature**2
    arrays = (jnp.asarray(x, jnp.float32) for x in (STUDENT, TEACHER))
    result = divergences.divergence(name, *arrays, temperature, 0.3)
    np.testing.assert_allclose(result, expected, rtol=2e-5)


def test_the_divergence_of_attention_weights_is_a_mean_over_heads():
    hidden = [[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]  # the last query sees no key
    scores = np.where(hidden, -np.inf, DRAW.normal(size=(2, 2, 5, 3, 4)) * 5)
    with np.errstate(invalid="ignore"):
        student, teacher = np.nan_to_num(softmax(scores))
        terms = np.nan_to_num(teacher * np.log(teacher / student))
    expected = terms.sum(-1).mean(1)
    result = divergences.attention_divergence(*map(jnp.float32, (student, teacher)))
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)
    assert not result[:, -1].any()
    gradient = jax.grad(lambda x: divergences.attention_divergence(x, jnp.float32(teacher)).sum())
    assert jnp.isfinite(gradient(jnp.float32(student))).all()


@pytest.fixture
def folder(tmp_path):
    return chats.write_tokenizer(tmp_path / "tokenizer")


def distilled(tokenizer, teacher):
    arguments = CausalArguments(train_file=["x"], teacher=str(teacher))
    return with_teacher(CausalLM)(arguments, tokenizer, SimpleNamespace(vocab_size=302))


def test_a_teacher_with_other_tokens_is_refused(folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UsageError, match="1 tokens .*'<extra>' .only student"):
        distilled(tokenizer, folder)
    with pytest.raises(UsageError, match="tokenizer of --teacher .*nowhere"):
        distilled(tokenizer, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="--teacher has no effect"):
        EmbeddingArguments(train_file=["x"], teacher="t", distillation_weight=0)


def test_token_ids_of_a_reordered_vocabulary_are_mapped(folder, tmp_path):
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert distilled(tokenizer, folder).teacher_ids is None
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    first, second = "a", "e"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = tmp_path / "other"
    tokenizer.save_pretrained(other)
    (other / "tokenizer.json").write_text(json.dumps(state))
    objective = distilled(tokenizer, other)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (first, second)}
    assert objective.teacher_ids[ids[first]] == ids[second]
    assert objective.teacher_ids[ids[second]] == ids[first]
    assert (np.sort(objective.teacher_ids) == np.arange(objective.num_tokens)).all()


# -- preferences


@pytest.fixture(scope="module")
def preference_folder(tmp_path_factory):
    folder = preferences.write(tmp_path_factory.mktemp("preferences"))
    preferences.save_model(folder)
    return folder


def preference_losses(folder, name, model, teacher, **flags):
    """Returns the loss with and without a teacher, the metrics with a teacher, and the batch."""
    from transformers import AutoTokenizer

    suffix = "-strings" if model.config.is_encoder_decoder else ""
    values: dict = {"train_file": [str(folder / f"train{suffix}.jsonl")], **flags}
    results = []
    for weights in ({"teacher": str(folder / "model"), "task_weight": 0.25}, {}):
        objective_class = load().objectives.get(name)
        if weights:
            objective_class = with_teacher(objective_class)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        objective = objective_class(OBJECTIVES[name](**values, **weights), tokenizer, model.config)
        objective.auxiliary = {"teacher": Auxiliary(teacher), "reference": Auxiliary(teacher)}
        objective.prepare(model)
        rows, _ = objective.make_rows(objective.load_splits(None), "train", 64)
        arrays = rows.fetch(np.arange(5)) | {"valid": np.arange(5) < 4}
        batch = objective.collate(arrays, RowRandom(0, 0, np.arange(5)), 1)
        inputs = {key: jnp.asarray(array) for key, array in batch.items()}
        inputs["auxiliary"] = {"teacher": teacher.params, "reference": teacher.params}
        if objective.uses_step_totals:
            inputs["step_totals"] = objective.step_totals(model, model.params, inputs, {})
        run = jax.jit(lambda p, inputs, o=objective: o.loss(model, p, inputs, None, True, extra={}))
        total, count, outputs = run(model.params, inputs)
        totals = {key: float(part) for key, part in outputs["totals"].items()}
        metrics = objective.metrics({"loss": float(total), "count": float(count)} | totals)
        results.append((float(total) / float(count), metrics, batch))
    return results


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("dpo", {"packing": True, "loss_type": ["sigmoid", "sft"]}),
        pytest.param("kto", {"loss_type": "apo_zero_unpaired"}, marks=pytest.mark.slow),
        pytest.param("orpo", {}, marks=pytest.mark.slow),
        pytest.param("cpo", {"loss_type": "simpo"}, marks=pytest.mark.slow),
        pytest.param("cpo", {"encoder_decoder": True}, marks=pytest.mark.slow),
    ],
)
def test_a_teacher_is_compared_at_the_tokens_of_all_answers(
    preference_folder, name, flags, monkeypatch
):
    """The mean over the answer tokens of all rows, from the logits of both models in float64."""
    monkeypatch.setattr("hfseq.nn.logits.CHUNK_LOGITS", 5000)  # several chunks
    flags, folder = dict(flags), preference_folder
    if flags.pop("encoder_decoder", False):
        from transformers import AutoTokenizer, T5Config

        size = len(AutoTokenizer.from_pretrained(folder / "model"))
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=size, decoder_start_token_id=0, **sizes)
        config.tie_word_embeddings = False
        model, teacher = (hfseq.FlaxT5ForConditionalGeneration(config, seed=n) for n in (1, 2))
    else:
        model = hfseq.FlaxLlamaForCausalLM.from_pretrained(folder / "model")
        teacher = hfseq.FlaxLlamaForCausalLM(model.config, seed=5)
    (loss, metrics, batch), (plain, _, _) = preference_losses(folder, name, model, teacher, **flags)
    segments = batch["segments"]
    ids, learned = (batch[key].reshape(-1, segments.shape[-1]) for key in ("answer_ids", "learned"))
    inputs: dict = {"input_ids": ids, "attention_mask": segments.reshape(ids.shape) > 0}
    if "prompts" in batch:
        inputs = {"decoder_input_ids": ids}
        for key, source in (("input_ids", "prompts"), ("attention_mask", "prompt_segments")):
            inputs[key] = np.repeat(batch[source], len(ids) // len(batch[source]), 0)
    elif segments.ndim == 2:
        inputs["segment_ids"] = segments
    student_logits, teacher_logits = (
        np.float64(jax.jit(lambda inputs, each=each: each(**inputs).logits)(inputs))
        for each in (model, teacher)
    )
    expected = kl(softmax(teacher_logits), softmax(student_logits))[learned > 0].mean()
    assert metrics["distillation_loss"] == pytest.approx(expected, rel=2e-5)
    assert loss == pytest.approx(0.25 * plain + 0.5 * expected, rel=2e-5)
    assert metrics["total_loss"] == pytest.approx(loss, rel=2e-5)


@pytest.mark.parametrize("distillation_loss", first([None, "mse", "forward_kl"], None))
def test_reward_models_learn_the_rewards_of_a_teacher(preference_folder, distillation_loss):
    config = hfseq.FlaxLlamaForCausalLM.from_pretrained(preference_folder / "model").config
    config.num_labels = 1
    model, teacher = (hfseq.FlaxLlamaForSequenceClassification(config, seed=n) for n in (1, 2))
    (loss, metrics, batch), (plain, _, _) = preference_losses(
        preference_folder,
        "reward",
        model,
        teacher,
        pad_token="<|endoftext|>",
        distillation_loss=distillation_loss,
    )
    ids, mask = (batch[key].reshape(10, -1) for key in ("answer_ids", "segments"))
    student_rewards, teacher_rewards = (
        np.float64(jax.jit(each)(ids, attention_mask=mask).logits).reshape(5, 2)[:4]
        for each in (model, teacher)
    )
    difference = student_rewards - teacher_rewards
    values = {
        None: np.square(difference[:, 0] - difference[:, 1]),
        "mse": np.square(difference).mean(1),
        "forward_kl": kl(softmax(teacher_rewards), softmax(student_rewards)),
    }[distillation_loss]
    assert metrics["distillation_loss"] == pytest.approx(values.mean(), rel=2e-5)
    assert loss == pytest.approx(0.25 * plain + 0.5 * values.mean(), rel=2e-5)


def test_a_free_reference_gives_all_answers_the_same_probability(preference_folder):
    """The loss is that of zero log-probabilities of the reference, from logits in float64."""
    model = hfseq.FlaxLlamaForCausalLM.from_pretrained(preference_folder / "model")
    flags = {"loss_type": ["cdpo"], "label_smoothing": 0.2, "beta": 0.3, "reference_free": True}
    _, (loss, _, batch) = preference_losses(preference_folder, "dpo", model, model, **flags)
    ids, learned, segments = (
        batch[key].reshape(-1, batch["segments"].shape[-1])
        for key in ("answer_ids", "learned", "segments")
    )
    logits = np.float64(jax.jit(model)(ids, attention_mask=segments > 0).logits)
    logs = np.log(softmax(logits))
    # `learned` marks the positions whose next token belongs to the answer.
    taken = np.take_along_axis(logs[:, :-1], ids[:, 1:, None], -1)[..., 0]
    logps = (taken * (learned[:, :-1] > 0)).sum(-1).reshape(5, 2)[:4]
    margins = 0.3 * (logps[:, 0] - logps[:, 1])
    expected = (0.8 * np.logaddexp(0, -margins) + 0.2 * np.logaddexp(0, margins)).mean()
    assert loss == pytest.approx(expected, rel=2e-5)

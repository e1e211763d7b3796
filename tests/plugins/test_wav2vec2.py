"""wav2vec 2.0: the battery for all classes and both norm types, the quantizer, invalid inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hfseq
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.nn.random import Keys
from hfseq.objectives.ctc import ctc_loss
from hfseq.testing import check_architecture
from hfseq.testing.case import ROWS, SAMPLES, ZERO_GRADIENTS
from hfseq_plugins.wav2vec2 import modeling
from hfseq_plugins.wav2vec2.modeling import (
    FlaxWav2Vec2ForCTC,
    FlaxWav2Vec2ForPreTraining,
    FlaxWav2Vec2Model,
    _compute_mask_indices,
    _sample_negative_indices,
    output_lengths,
)
from tests.support import models
from tests.support.models import close, trees_equal
from tests.support.parity import compare_files
from tests.support.tiers import CHECKS, first

STABLE = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
KINDS = {
    "base": {},
    "large": STABLE,
    "base_before": {"do_stable_layer_norm": True},
    "odd": {
        "num_conv_pos_embeddings": 3,
        "num_feat_extract_layers": 2,
        "hidden_act": "relu",
        "feat_extract_activation": "silu",
    },
    "adapter": {"add_adapter": True, **STABLE},
    "adapter_width": {"add_adapter": True, "output_hidden_size": 20},
    "languages": {"adapter_attn_dim": 8, **STABLE},
}


def hidden(config):
    frames = output_lengths(config, SAMPLES, add_adapter=False)
    return np.random.default_rng(4).random((ROWS, frames)) < 0.4


ONE = [("ForCTC", "large", CHECKS)]


@pytest.mark.parametrize(
    ("head", "variant", "checks"),
    first(
        [*ONE, *((head, variant, None) for head in ("Model", "ForCTC") for variant in KINDS)]
        + [("ForPreTraining", variant, None) for variant in ("base", "large")],
        *ONE,
    ),
)
def test_battery(head, variant, checks):
    config = models.wav2vec2_config(
        **KINDS[variant], **({"num_hidden_layers": 1} if checks else {})
    )
    # In evaluation the codes are an argmax, so their scores have no gradient.
    zero = (*ZERO_GRADIENTS, "quantizer/weight_proj/(kernel|bias)$")
    skip_reasons = {
        "bfloat16": "of codes that are nearly as near another is chosen, all of it different"
    }
    check_architecture(
        "wav2vec2",
        config,
        heads=[head],
        checks=checks,
        zero_gradients=zero,
        inputs={"mask_time_indices": hidden(config)},
        skip=skip_reasons if "Pre" in head else None,
    )


#: No dropout, so that a training step equals PyTorch's.
STILL = dict.fromkeys(
    (
        "hidden_dropout",
        "activation_dropout",
        "attention_dropout",
        "feat_proj_dropout",
        "feat_quantizer_dropout",
        "final_dropout",
        "layerdrop",
    ),
    0.0,
)


def audio_batch(rows=3, samples=SAMPLES, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, samples)).astype(np.float32)
    mask = np.ones((rows, samples), np.int32)
    mask[0, samples // 2 :] = 0
    return values * mask.astype(np.float32), mask


def twin(model, folder):
    """Returns the PyTorch model with the same weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model.save_pretrained(folder)
    return getattr(transformers, model.torch_class_name()).from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["base", "large"])
def test_names_of_before_and_after_pytorch_2_load_and_the_new_are_written(
    variant, tmp_path, caplog
):
    from safetensors.numpy import load_file

    model = FlaxWav2Vec2Model(models.wav2vec2_config(**KINDS[variant]))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "encoder.pos_conv_embed.conv.parametrizations.weight"
    assert {f"{prefix}.original0", f"{prefix}.original1"} <= stored.keys()

    def old(tensors):
        names = {
            "parametrizations.weight.original0": "weight_g",
            "parametrizations.weight.original1": "weight_v",
        }
        for new, old_name in names.items():
            key = f"encoder.pos_conv_embed.conv.{new}"
            tensors[key.replace(new, old_name)] = tensors.pop(key)

    models.rewrite_tensors(tmp_path / "model.safetensors", old)
    assert trees_equal(FlaxWav2Vec2Model.from_pretrained(tmp_path).params, model.params)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Model", "ForCTC", "ForPreTraining"])
def test_files_of_pytorch_load_and_are_saved_as_they_were(name, tmp_path, caplog):
    pytest.importorskip("torch")
    compare_files(getattr(modeling, f"FlaxWav2Vec2{name}"), models.wav2vec2_config(), tmp_path)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_the_ctc_loss_and_its_gradients_are_those_of_pytorch(reduction, zero_infinity, tmp_path):
    torch = pytest.importorskip("torch")
    config = models.wav2vec2_config(ctc_loss_reduction=reduction, ctc_zero_infinity=zero_infinity)
    model = FlaxWav2Vec2ForCTC(config)
    theirs = twin(model, tmp_path).eval()
    values, mask = audio_batch()
    labels = np.array([[3, 4, -100, -100, -100], [5, 5, 6, 6, 7], [9, -100, -100, -100, -100]])
    if zero_infinity:
        labels[0] = 3  # the four frames fit at most two of them
    inputs = {"input_values": values, "attention_mask": mask}
    output = theirs(
        **{name: torch.tensor(value) for name, value in inputs.items()}, labels=torch.tensor(labels)
    )
    output.loss.backward()

    def loss(params):
        logits = model(**inputs, params=params).logits
        lengths = model._get_feat_extract_output_lengths(mask.sum(-1))
        return ctc_loss(
            logits,
            labels,
            lengths,
            blank=config.pad_token_id,
            reduction=reduction,
            zero_infinity=zero_infinity,
        )

    value, gradient = jax.value_and_grad(loss)(model.params)
    assert close(value, output.loss.item(), 1e-5)
    ours = model.weight_map.to_torch(trees.flatten(gradient))
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert close(ours[name], parameter.grad.numpy(), 1e-5), name


def test_ctc_loss_of_too_long_targets():
    logits, labels = np.zeros((2, 3, 5)), np.array([[1, 1, 2], [1, 2, 3]])
    assert np.isinf(ctc_loss(logits, labels))
    each = ctc_loss(logits, labels, reduction="none", zero_infinity=True)
    assert each[0] == 0 and 0 < each[1] < np.inf
    with pytest.raises(UsageError, match="reduction 'means'"):
        ctc_loss(logits, labels, reduction="means")


def test_sampled_vectors_are_vectors_of_the_codebook():
    config = models.wav2vec2_config()
    quantizer = modeling.GumbelVectorQuantizer(config, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, config.conv_dim[-1]))
    vectors, _ = jax.jit(lambda x: quantizer(x, None, 2.0, Keys(jax.random.key(2))))(x)
    codes = quantizer.codevectors[...].reshape(quantizer.groups, -1, vectors.shape[-1] // 2)
    drawn = vectors.reshape(10, quantizer.groups, -1)
    distances = jnp.abs(drawn[:, :, None] - codes).max(-1).min(-1)
    assert distances.max() < 1e-6 and len(jnp.unique(drawn[:, 0, 0].round(4))) > 1


@pytest.mark.slow
def test_codes_are_drawn_and_passed_through_as_by_pytorch(monkeypatch, tmp_path):
    """Transformers 4 averaged the code vectors with their probabilities."""
    torch = pytest.importorskip("torch")
    config = models.wav2vec2_config(**STILL, **STABLE)
    model = FlaxWav2Vec2ForPreTraining(config)
    theirs = twin(model, tmp_path).train()
    theirs.set_gumbel_temperature(1.5)
    values, mask = audio_batch()
    frames = output_lengths(config, SAMPLES)
    random = np.random.default_rng(5)
    noise = random.gumbel(size=(3, frames, 2, 6)).astype(np.float32)
    time_mask = random.random((3, frames)) < 0.5
    exponentials = torch.tensor(np.exp(-noise)).reshape(-1, 6)  # the quantizer applies -log
    monkeypatch.setattr(
        torch.Tensor, "exponential_", lambda tensor: exponentials.reshape(tensor.shape)
    )
    monkeypatch.setattr(modeling, "_gumbel", lambda keys, shape: jnp.asarray(noise).reshape(shape))
    inputs = {"input_values": values, "attention_mask": mask, "mask_time_indices": time_mask}
    output = theirs(**{name: torch.tensor(value) for name, value in inputs.items()})
    weights = random.normal(size=output.projected_quantized_states.shape).astype(np.float32)

    def loss(params):
        actual = model(
            **inputs,
            gumbel_temperature=1.5,
            gumbel_rng=jax.random.key(0),
            train=True,
            params=params,
        )
        total = (actual.projected_quantized_states * weights).sum() + actual.codevector_perplexity
        return total, actual

    gradient, actual = jax.grad(loss, has_aux=True)(model.params)
    total = (output.projected_quantized_states * torch.tensor(weights)).sum()
    (total + output.codevector_perplexity).backward()
    for name in ("projected_states", "projected_quantized_states", "codevector_perplexity"):
        assert close(actual[name], output[name].detach().numpy(), 1e-5), name
    ours = model.weight_map.to_torch(trees.flatten(gradient))
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert close(ours[name], parameter.grad.numpy(), 2e-5), name


@pytest.mark.slow
def test_training_draws_other_codes_with_another_key_and_needs_one():
    model = FlaxWav2Vec2ForPreTraining(models.wav2vec2_config(**STILL))
    values, _ = audio_batch()

    def states(**keys):
        return model(values, train=True, **keys).projected_quantized_states

    first, other = (states(gumbel_rng=jax.random.key(n)) for n in (0, 1))
    assert not close(first, other, 1e-3)
    assert close(first, states(gumbel_rng=jax.random.PRNGKey(0)), 0)  # legacy keys work, too
    assert not close(first, states(dropout_rng=jax.random.key(1)), 1e-3)
    with pytest.raises(UsageError, match="train=True samples code vectors: pass gumbel_rng="):
        states()


@pytest.mark.slow
def test_dropout_takes_part_in_the_layers():
    """Transformers 4 applied no dropout inside the layers."""
    rates = STILL | {"hidden_dropout": 0.5}
    for variant in ("base", "large"):
        config = models.wav2vec2_config(**KINDS[variant], **rates)
        model = FlaxWav2Vec2Model(config)
        values, _ = audio_batch()
        output = model(values, train=True, dropout_rng=jax.random.key(0), output_hidden_states=True)
        again = model(values, output_hidden_states=True)
        first, second, _ = output.hidden_states
        assert np.mean(np.asarray(first) == 0) > 0.4 and not close(first, again.hidden_states[0])
        change = np.asarray(second - first)
        assert variant == "base" or 0.1 < np.mean(change == 0) < 0.4


@pytest.mark.slow
def test_layer_drop_skips_layers_in_training():
    config = models.wav2vec2_config(**STILL | {"layerdrop": 0.5}, **STABLE)
    model = FlaxWav2Vec2Model(config)
    output = model(
        audio_batch(32)[0],
        train=True,
        dropout_rng=jax.random.split(jax.random.key(0), 32),
        output_hidden_states=True,
    )
    first, second, _ = map(np.asarray, output.hidden_states)
    skipped = [np.array_equal(a, b) for a, b in zip(first, second, strict=True)]
    assert 4 < sum(skipped) < 28


@pytest.mark.slow
def test_padding_does_not_change_layer_norm_models(tmp_path):
    model = FlaxWav2Vec2Model(models.wav2vec2_config(**STABLE))
    values, mask = audio_batch()
    long, short = model(values, mask), model(values[:1, : SAMPLES // 2])
    frames = model._get_feat_extract_output_lengths(SAMPLES // 2)
    assert short.last_hidden_state.shape[1] == frames
    assert close(long.last_hidden_state[:1, :frames], short.last_hidden_state, 1e-5)
    frame_mask = model._get_feature_vector_attention_mask(long[0].shape[1], mask)
    assert frame_mask.sum(-1).tolist() == [frames, *[long[0].shape[1]] * 2]
    full = model(values, np.ones_like(mask))
    assert close(full[0], model(values)[0], 1e-6)


@pytest.mark.slow
def test_a_frozen_feature_encoder_gets_no_gradient():
    model = FlaxWav2Vec2ForCTC(models.wav2vec2_config())
    values, mask = audio_batch()

    def gradient(frozen):
        def loss(params):
            return model(values, mask, params=params, freeze_feature_encoder=frozen).logits.var()

        return jax.grad(loss)(model.params)["wav2vec2"]

    def moved(tree):
        return any(np.asarray(leaf).any() for leaf in jax.tree.leaves(tree))

    assert moved(gradient(False)["feature_extractor"])
    assert not moved(gradient(True)["feature_extractor"]) and moved(gradient(True)["encoder"])


@pytest.mark.parametrize("masked", [False, True])
def test_spans_are_drawn_as_by_pytorch(masked):
    torch = pytest.importorskip("torch")
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        _compute_mask_indices as theirs,
    )

    for seed in range(20):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 31, (4, 1)) if masked else np.full((4, 1), 30)
        mask = (np.arange(30) < lengths).astype(np.int64)
        probability, length = random.uniform(0, 0.9), int(random.integers(1, 12))
        actual = []
        for draw, inputs in ((_compute_mask_indices, mask), (theirs, torch.tensor(mask))):
            np.random.seed(seed)  # noqa: NPY002
            inputs = inputs if masked else None
            actual.append(draw((4, 30), probability, length, inputs, min_masks=seed % 3))
        assert np.array_equal(*actual), seed
    with pytest.raises(UsageError, match="mask_length=31 has to be between 1 and the 30"):
        _compute_mask_indices((2, 30), 0.5, 31)


def test_negatives_are_other_frames_of_the_row():
    sampled = _sample_negative_indices((3, 7, 5), 50)
    assert sampled.shape == (3, 350) and sampled.dtype == np.int32
    for row, numbers in enumerate(sampled.reshape(3, 7, 50) - 7 * np.arange(3)[:, None, None]):
        for frame, negatives in enumerate(numbers):
            assert set(negatives) == {*range(7)} - {frame}, (row, frame)
    short = _sample_negative_indices((2, 7, 5), 50, np.array([[1] * 4 + [0] * 3, [1] * 7]))
    assert set(short.reshape(2, 7, 50)[0, 1]) == {0, 2, 3}
    with pytest.raises(UsageError, match="2 frames or more"):
        _sample_negative_indices((2, 1, 5), 3)


def test_old_paths_lead_to_the_helpers():
    import importlib

    importlib.import_module("hfseq.v4")  # provides the old import paths
    old = importlib.import_module("transformers.models.wav2vec2.modeling_flax_wav2vec2")
    names = (
        "_compute_mask_indices",
        "_sample_negative_indices",
        "FlaxWav2Vec2ForCTC",
        "FlaxWav2Vec2Module",
        "FlaxWav2Vec2ForPreTrainingModule",
        "FlaxWav2Vec2Model",
        "FlaxWav2Vec2BaseModelOutput",
        "FlaxWav2Vec2ForPreTrainingOutput",
    )
    assert all(hasattr(old, name) for name in names)
    assert isinstance(hfseq.FlaxAutoModel.from_config(models.wav2vec2_config()), FlaxWav2Vec2Model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(90), r"expects \(batch, samples\).*batch of one: input_values.None."),
        (np.zeros((2, 90, 1)), r"\(2, 90, 1\).* expects \(batch, samples\)"),
        (np.zeros((1, 15)), "15 samples per row.* needs 16 or more"),
        (np.zeros((1, 0)), "0 samples per row"),
        ([[0.0] * 90, [0.0] * 80], "rows of different lengths: pad them .feature_extractor"),
    ],
)
def test_audio_of_wrong_shape_is_rejected(values, message):
    model = FlaxWav2Vec2Model(models.wav2vec2_config(), _do_init=False)
    with pytest.raises(UsageError, match=message):
        model(values, params={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feat_extract_norm": "batch"}, "feat_extract_norm 'batch' .known: group, layer"),
        ({"num_attention_heads": 5}, "hidden_size=32 is not a multiple of the 5 attention heads"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        FlaxWav2Vec2Model(models.wav2vec2_config(**changes), _do_init=False)


@pytest.mark.slow
def test_hidden_frames_that_do_not_fit_are_refused():
    model = FlaxWav2Vec2Model(models.wav2vec2_config())
    with pytest.raises(UsageError, match=r"8 frames per row.*\(batch, 8\)"):
        model(np.zeros((1, SAMPLES)), mask_time_indices=np.ones((1, 9), bool))
    model = FlaxWav2Vec2Model(models.wav2vec2_config(mask_time_prob=0.0))
    with pytest.raises(UsageError, match="mask_time_prob or mask_feature_prob is greater than 0"):
        model(np.zeros((1, SAMPLES)), mask_time_indices=np.ones((1, 8), bool))
    with pytest.raises(UsageError, match="codevector_dim=16 is not a multiple of num_code"):
        FlaxWav2Vec2ForPreTraining(models.wav2vec2_config(num_codevector_groups=3))

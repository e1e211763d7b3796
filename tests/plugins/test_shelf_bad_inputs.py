"""What the families of Transformers 4 say of inputs and files that are not theirs."""

import numpy as np
import pytest
from transformers import PreTrainedConfig

import hfseq
from hfseq.errors import UsageError
from tests.support import models
from tests.support.tiers import first

# Stem of the class, and whether a table of positions ends its rows.
FAMILIES = {
    "albert": ("AlbertModel", True), "distilbert": ("DistilBertModel", True),
    "electra": ("ElectraModel", True), "roformer": ("RoFormerModel", True),
    "big_bird": ("BigBirdModel", True), "xlm_roberta": ("XLMRobertaModel", True),
    "roberta_prelayernorm": ("RobertaPreLayerNormModel", True), "llama": ("LlamaModel", False),
    "mistral": ("MistralModel", False), "gemma": ("GemmaModel", False), "opt": ("OPTModel", True),
    "bloom": ("BloomModel", False), "gpt_neo": ("GPTNeoModel", True), "gptj": ("GPTJModel", True),
    "xglm": ("XGLMModel", True), "mbart": ("MBartModel", True), "mt5": ("MT5Model", False),
    "blenderbot": ("BlenderbotModel", True), "blenderbot_small": ("BlenderbotSmallModel", True),
    "longt5": ("LongT5Model", False), "clip_text_model": ("CLIPTextModel", True),
}  # fmt: skip


def configuration(name: str, **changes: object) -> PreTrainedConfig:
    """Return the tiny configuration of a family."""
    return getattr(models, f"{name}_config")(**changes)


def build(name: str, **changes: object) -> hfseq.FlaxPreTrainedModel:
    """Return a tiny model."""
    return getattr(hfseq, "Flax" + FAMILIES[name][0])(configuration(name, **changes))


@pytest.mark.parametrize("name", first(FAMILIES, "roformer", "mbart"))
def test_ids_and_lengths_that_do_not_fit_are_told(name):
    model = build(name)
    words = model.config.vocab_size
    target = {"decoder_input_ids": np.ones((1, 4), int)} if model.config.is_encoder_decoder else {}
    ids, told = np.array([[5, words, 7, 8]]), f"{words}, .*vocabulary of {words}: use the tok"
    with pytest.raises(UsageError, match=f"input_ids hold {told}"):
        model(ids, **target)
    if target:
        with pytest.raises(UsageError, match=f"decoder_input_ids hold {told}"):
            model(np.ones((1, 4), int), decoder_input_ids=ids)
    if FAMILIES[name][1]:
        limit = model.max_length()
        message = rf"input_ids have {limit + 1} tokens .* allows {limit} \("
        with pytest.raises(UsageError, match=message):
            model(np.ones((1, limit + 1), int), **target)


@pytest.mark.parametrize(
    ("given", "asked"),
    first(
        [
            ("albert", "ElectraModel"),
            ("electra", "DistilBertModel"),
            ("llama", "MistralModel"),
            ("mistral", "GemmaModel"),
            ("gemma", "LlamaModel"),
            ("gptj", "GPTNeoModel"),
            ("xlm_roberta", "RobertaModel"),
            ("mbart", "BartModel"),
            ("mt5", "T5Model"),
            ("roformer", "BigBirdModel"),
            ("blenderbot_small", "BlenderbotModel"),
        ],
        ("llama", "MistralModel"),
    ),
)
def test_a_siblings_checkpoint_is_refused_with_both_names(tmp_path, given, asked):
    configuration(given).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    kind = configuration(given).model_type
    with pytest.raises(UsageError, match=f"type '{kind}', Flax{asked} is for .*FlaxAutoModel"):
        getattr(hfseq, f"Flax{asked}").from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, "unknown rope_type 'spiral'.*known: default"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "'linear' needs factor"),
    ],
)
def test_rotary_positions_that_nobody_knows_are_an_error(name, rope, message):
    config = configuration(name)
    config.rope_parameters = rope
    with pytest.raises(UsageError, match=message):
        getattr(hfseq, f"Flax{FAMILIES[name][0]}")(config)


@pytest.mark.parametrize(
    "changes", [{"name": "mistral", "sliding_window": 0}, {"name": "gpt_neo", "window_size": 0}]
)
def test_a_window_without_the_own_key_is_told(changes):
    model = build(**changes)
    with pytest.raises(UsageError, match="sliding_window .*own key, so it is 1 or more, or None"):
        model(np.ones((1, 4), int))


def test_key_heads_that_do_not_divide_the_query_heads_are_told():
    with pytest.raises(UsageError, match=r"num_attention_heads=4 .*num_key_value_heads=3"):
        build("llama", num_key_value_heads=3)(np.ones((1, 4), int))


@pytest.mark.parametrize("window", first([3, 50], 50))
def test_a_window_larger_than_the_cache_sees_all_of_it(window):
    model = hfseq.FlaxMistralForCausalLM(configuration("mistral", sliding_window=window))
    ids = np.random.default_rng(0).integers(3, 60, (2, 8))
    whole = model(ids).logits
    cache, parts, mask = model.init_cache(2, 8), [], np.ones((2, 8), int)
    for columns in (slice(0, 5), slice(5, 8)):
        positions = np.broadcast_to(np.arange(8)[columns], ids[:, columns].shape)
        output = model(
            ids[:, columns], attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        parts.append(output.logits)
        cache = output.past_key_values
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"room for 8 tokens, 8 are taken and 1 come"):
        model(
            ids[:, :1], attention_mask=mask, position_ids=ids[:, :1] * 0 + 8, past_key_values=cache
        )


@pytest.mark.parametrize(
    ("stem", "name"),
    first([("ViTModel", "vit"), ("CLIPVisionModel", "clip_vision_model")], ("ViTModel", "vit")),
)
def test_pictures_that_do_not_fit_are_told(stem, name):
    config = configuration(name)
    model, size = getattr(hfseq, f"Flax{stem}")(config), config.image_size
    for shape, remedy in (
        ((1, 3, 48, 48), f"resize them to {size} x {size}"),
        ((1, size, size, 3), r"channels come first here: pixel_values.transpose\(0, 3, 1, 2\)"),
        ((1, 1, size, size), "reads 3 channels"),
        ((3, size, size), r"one picture is a batch of one, pixel_values\[None\]"),
    ):
        with pytest.raises(UsageError, match=f"{stem} takes .*{remedy}"):
            model(np.zeros(shape, np.float32))

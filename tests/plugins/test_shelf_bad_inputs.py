"""Errors of the Transformers 4 families for invalid inputs and files of other families."""

import jax
import numpy as np
import pytest
from transformers import PreTrainedConfig

import hfseq
from hfseq.errors import UsageError
from tests.support import models
from tests.support.tiers import first

# Class name without "Flax", and the number of tokens that the position table allows.
FAMILIES = {
    "albert": ("AlbertModel", 40), "distilbert": ("DistilBertModel", 40),
    "electra": ("ElectraModel", 40), "roformer": ("RoFormerModel", 40),
    "big_bird": ("BigBirdModel", 64), "xlm_roberta": ("XLMRobertaModel", 38),
    "roberta_prelayernorm": ("RobertaPreLayerNormModel", 38), "llama": ("LlamaModel", None),
    "mistral": ("MistralModel", None), "gemma": ("GemmaModel", None), "opt": ("OPTModel", 40),
    "bloom": ("BloomModel", None), "gpt_neo": ("GPTNeoModel", 40), "gptj": ("GPTJModel", 40),
    "xglm": ("XGLMModel", 40), "mbart": ("MBartModel", 40), "mt5": ("MT5Model", None),
    "blenderbot": ("BlenderbotModel", 40), "blenderbot_small": ("BlenderbotSmallModel", 40),
    "longt5": ("LongT5Model", None), "clip_text_model": ("CLIPTextModel", 24),
    "bert": ("BertModel", 40), "megatron_bert": ("MegatronBertModel", 40),
    "mpnet": ("MPNetModel", 40), "mobilebert": ("MobileBertModel", 40),
    "ernie": ("ErnieModel", 40), "deberta_v2": ("DebertaV2Model", None),
    "umt5": ("UMT5Model", None), "gte": ("GteModel", None),
    "roberta": ("RobertaModel", 38), "gpt2": ("GPT2Model", 40), "bart": ("BartModel", 40),
}  # fmt: skip


def configuration(name: str, **changes: object) -> PreTrainedConfig:
    """Returns a tiny configuration of a family."""
    return getattr(models, f"{name}_config")(**changes)


def build(name: str, _do_init: bool = True, **changes: object) -> hfseq.FlaxPreTrainedModel:
    """Returns a tiny model."""
    cls = getattr(hfseq, "Flax" + FAMILIES[name][0])
    return cls(configuration(name, **changes), _do_init=_do_init)


@pytest.mark.parametrize("name", FAMILIES)
def test_invalid_ids_and_lengths_raise(name):
    model, limit = build(name, _do_init=False), FAMILIES[name][1]
    words = model.config.vocab_size
    target = {"decoder_input_ids": np.ones((1, 4), int)} if model.config.is_encoder_decoder else {}
    ids, message = np.array([[5, words, 7, 8]]), f"{words}.*vocabulary of {words}.*tokenizer"
    with pytest.raises(UsageError, match=f"input_ids .*{message}"):
        model(ids, **target, params={})
    if target:
        with pytest.raises(UsageError, match=f"decoder_input_ids .*{message}"):
            model(np.ones((1, 4), int), decoder_input_ids=ids, params={})
    assert model.max_length() == limit or limit is None
    if limit:
        attribute = "n_positions" if name in ("gpt2", "gptj") else "max_position_embeddings"
        message = rf"input_ids .*{limit + 1} tokens.*{limit} \(.*{attribute}"
        with pytest.raises(UsageError, match=message):
            model(np.ones((1, limit + 1), int), **target, params={})


def test_causal_bart_rejects_long_rows():
    model = hfseq.FlaxBartForCausalLM(configuration("bart"), _do_init=False)
    with pytest.raises(UsageError, match="41 tokens.*40 .*max_position_embeddings=40"):
        model(np.ones((1, 41), int), params={})


@pytest.mark.parametrize(
    ("name", "class_name"),
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
def test_checkpoint_of_another_family_raises_with_both_names(tmp_path, name, class_name):
    configuration(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    model_type = configuration(name).model_type
    with pytest.raises(UsageError, match=f"'{model_type}'.*Flax{class_name} .*FlaxAutoModel"):
        getattr(hfseq, f"Flax{class_name}").from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, "rope_type.*'spiral'.*default"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "'linear'.*factor"),
    ],
)
def test_unknown_rope_types_raise(name, rope, message):
    config = configuration(name)
    config.rope_parameters = rope
    with pytest.raises(UsageError, match=message):
        getattr(hfseq, f"Flax{FAMILIES[name][0]}")(config)


@pytest.mark.parametrize(
    "changes", [{"name": "mistral", "sliding_window": 0}, {"name": "gpt_neo", "window_size": 0}]
)
def test_window_without_own_key_raises(changes):
    model = build(**changes)
    with pytest.raises(UsageError, match=r"own key.*sliding_window"):
        model(np.ones((1, 4), int))


def test_key_heads_that_do_not_divide_query_heads_raise():
    with pytest.raises(UsageError, match=r"num_attention_heads=4 .*num_key_value_heads=3"):
        build("llama", num_key_value_heads=3)(np.ones((1, 4), int))


@pytest.mark.parametrize("window", first([3, 50], 50))
def test_window_larger_than_cache_sees_whole_cache(window):
    config = configuration("mistral", sliding_window=window, num_hidden_layers=1)
    model = hfseq.FlaxMistralForCausalLM(config)
    ids = np.random.default_rng(0).integers(3, 60, (2, 8))
    expected = jax.jit(model)(ids).logits
    cache, parts, mask = model.init_cache(2, 8), [], np.ones((2, 8), int)
    for columns in (slice(0, 5), slice(5, 8)):
        positions = np.broadcast_to(np.arange(8)[columns], ids[:, columns].shape)
        output = jax.jit(model)(
            ids[:, columns], attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        parts.append(output.logits)
        cache = output.past_key_values
    np.testing.assert_allclose(np.concatenate(parts, 1), expected, rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"8 tokens.*8 .*1 "):
        model(
            ids[:, :1], attention_mask=mask, position_ids=ids[:, :1] * 0 + 8, past_key_values=cache
        )


@pytest.mark.parametrize(
    ("stem", "name"),
    first([("ViTModel", "vit"), ("CLIPVisionModel", "clip_vision_model")], ("ViTModel", "vit")),
)
def test_images_of_wrong_shape_raise(stem, name):
    config = configuration(name)
    model, size = getattr(hfseq, f"Flax{stem}")(config), config.image_size
    for shape, remedy in (
        ((1, 3, 48, 48), f"{size} x {size}"),
        ((1, size, size, 3), r"pixel_values.transpose\(0, 3, 1, 2\)"),
        ((1, 1, size, size), "3 channels"),
        ((3, size, size), r"pixel_values\[None\]"),
    ):
        with pytest.raises(UsageError, match=f"{stem}.*{remedy}"):
            model(np.zeros(shape, np.float32))

"""Invalid arguments raise errors with the option's name and a remedy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation import families

IDS = families.prompts(2, 5)

OPTIONS = {
    "foo": ({"foo": 1, "do_samples": True}, r"\['foo', 'do_samples'\].*typos"),
    "typo": ({"do_samples": True}, "did you mean 'do_sample'"),
    "beams": ({"num_beams": 100}, "num_beams=100 .*vocabulary of 48 tokens"),
    "no beams": ({"num_beams": 0}, "num_beams=0 must be a positive integer"),
    "n-best": ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    "greedy n-best": ({"num_return_sequences": 3}, "num_return_sequences"),
    "temperature": ({"do_sample": True, "temperature": 0.0}, "temperature=0.0.*do_sample=False"),
    "integer temperature": ({"do_sample": True, "temperature": 2}, "temperature=2 must be a fl"),
    "top_k": ({"do_sample": True, "top_k": -1}, "top_k=-1 must be"),
    "top_p": ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 must be above 0"),
    "min_p": ({"do_sample": True, "min_p": -0.5}, "min_p=-0.5 must be between"),
    "typical": ({"do_sample": True, "typical_p": 0.0}, "typical_p=0.0 must be"),
    "penalty": ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0 must be"),
    "penalty as text": ({"repetition_penalty": "1"}, "repetition_penalty='1' must be"),
    "ngrams": ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size=-2 must be"),
    "early": ({"num_beams": 2, "early_stopping": "maybe"}, "early_stopping"),
    "short": ({"max_length": 5}, "max_length=5 .*5 tokens of input_ids.*max_new_tokens"),
    "none new": ({"max_new_tokens": 0}, "max_new_tokens"),
    "too long": ({"max_new_tokens": 80}, "only 64 positions: .*at most 59"),
    "minimum": ({"min_length": 30, "max_length": 20}, "min_length=30 cannot be reached"),
    "new minimum": ({"min_new_tokens": 9, "max_new_tokens": 4}, "min_new_tokens=9 cannot be"),
    "negative minimum": ({"min_length": -1, "max_length": 9}, "min_length=-1"),
    "bad words": ({"bad_words_ids": [3]}, "bad_words_ids"),
    "bias": ({"sequence_bias": {(3,): 1}}, "sequence_bias"),
    "bias outside": ({"sequence_bias": {(99,): 1.0}}, "48 tokens, but `sequence_bias`.*99"),
    "eos": ({"eos_token_id": -3}, "`eos_token_id` has to be"),
    "pad": ({"pad_token_id": 77}, "pad_token_id=77 is outside of the vocabulary of 48"),
    "forced": ({"suppress_tokens": [4], "forced_eos_token_id": 4}, "suppress_tokens"),
    "decay": (
        {"exponential_decay_length_penalty": (2, 1.1), "eos_token_id": None},
        "exponential_decay_length_penalty requires eos_token_id",
    ),
    "stops": ({"stop_token_sequences": [4]}, "stop_token_sequences=.*list of non-empty lists"),
    "strings": ({"stop_strings": "x"}, "stop_strings='x' .*tokenizer=.*stop_token_sequences="),
    "criterion": (
        {"stopping_criteria": [3]},
        r"stopping_criteria contains 3,.*\(input_ids, cur_len",
    ),
    "processor": ({"logits_processor": [3]}, "logits_processor must be a list of callables.* 3"),
    "no padding": (
        {"stop_token_sequences": [[4]], "eos_token_id": None, "pad_token_id": None},
        "pass pad_token_id=",
    ),
    "contrastive": ({"penalty_alpha": 0.6}, "penalty_alpha=0.6 is not supported: use do_sample"),
    "groups": ({"num_beam_groups": 2, "num_beams": 4}, "num_beam_groups=2 is not supported"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
    "time": ({"max_time": 1.0}, "max_time=1.0 is not supported: loop over stream_generate"),
    "attentions": ({"output_attentions": True}, "output_attentions=True is not supported: call"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
    "assistant": ({"assistant_model": 3}, "assistant_model: leave it out"),
    "prefix": ({"prefix_allowed_tokens_fn": 3}, "prefix_allowed_tokens_fn: use a logits_processor"),
    "mask shape": ({"attention_mask": np.ones((2, 4))}, r"attention_mask has the shape \(2, 4\)"),
    "hidden row": ({"attention_mask": np.eye(2, 5, 1) * [0, 1, 0, 0, 0]}, "every token of row 1"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options, message = OPTIONS[name]
    model = families.model("gpt2" if name == "too long" else "llama")
    with pytest.raises(ValueError, match=message):
        model.generate(
            IDS,
            **{"max_new_tokens": 4, **options}
            if not {"max_length", "max_new_tokens"} & set(options)
            else options,
        )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[4, 5], [6]], r"input_ids has rows of different lengths.*tokenizer\(texts, padding=T"),
        (np.array([4, 5]), r"input_ids .*\(batch, length\).*\(2,\).*ids\[None\]"),
        ("text", r"input_ids must be an array of numbers, not text"),
        (np.ones((1, 3)), "input_ids .*float64.* integers"),
        (np.array([[4, 48]]), "input_ids contains 48, .*vocabulary of 48"),
        (np.array([[4, -1]]), "input_ids contains -1, .*vocabulary"),
        (np.ones((1, 65), int), "has 65 tokens, but the model has only 64 positions"),
    ],
)
def test_prompts(ids, message):
    with pytest.raises(ValueError, match=message):
        families.model("gpt2").generate(ids, max_new_tokens=2)


def test_empty_prompt_without_a_begin_token():
    with pytest.raises(ValueError, match="input_ids contains no tokens.*bos_token_id"):
        families.model("llama").generate(
            np.zeros((1, 0), np.int32), bos_token_id=None, max_new_tokens=2
        )


def test_encoder_decoders():
    model = families.fresh_model("t5")
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="`decoder_start_token_id` has to be defined"):
        model.generate(IDS, decoder_start_token_id=None, max_new_tokens=2)
    model = families.fresh_model("t5")
    with pytest.raises(ValueError, match="input_ids contains no tokens"):
        model.generate(np.zeros((1, 0), np.int32), max_new_tokens=2)
    with pytest.raises(ValueError, match="requires input_ids"):
        model.generate(max_new_tokens=2)
    with pytest.raises(ValueError, match=r"decoder_input_ids has the shape \(1, 2\).*input is 2"):
        model.generate(IDS, decoder_input_ids=np.array([[0, 4]]), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"\['token_type_ids'\]"):
        model.generate(IDS, token_type_ids=IDS, max_new_tokens=2)
    bart = families.model("bart")
    with pytest.raises(ValueError, match="input_ids has 70 tokens.*only 64 positions"):
        bart.generate(np.full((1, 70), 5), max_new_tokens=2)


def test_class_without_a_head():
    import hfseq

    model = families.class_without_head(hfseq.FlaxBertModel)(families.config("bert"))
    with pytest.raises(TypeError, match="FlaxBertModel.*following classes.*FlaxBertForCausalLM"):
        model.generate(IDS)


def test_bidirectional_model():
    from transformers import BertConfig

    import hfseq

    model_class = families.generative_class(hfseq.FlaxBertForCausalLM)
    config = BertConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
    )
    with pytest.raises(ValueError, match="is_decoder"):
        model_class(config).generate(IDS, max_new_tokens=2)


def test_processor_that_the_options_make_too():
    from hfseq.generation import FlaxNoRepeatNGramLogitsProcessor as NGrams

    with pytest.raises(ValueError, match="NoRepeatNGram.*drop the processor or the option"):
        families.model("llama").generate(
            IDS, no_repeat_ngram_size=2, logits_processor=[NGrams(3)], max_new_tokens=2
        )


def test_model_without_parameters():
    model = families.flax_class("llama")(families.config("llama"), _do_init=False)
    with pytest.raises(ValueError, match="params"):
        model.generate(IDS, max_new_tokens=2)

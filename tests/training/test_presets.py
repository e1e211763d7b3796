"""Presets create configurations with the tokenizer's vocabulary and special tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq import plugins
from hfseq.data.tokenizers import check_vocabulary, fit_vocabulary
from hfseq.errors import UsageError
from hfseq.plugins import ArchitectureSpec
from hfseq.plugins.registry import Entry
from hfseq.training.setup import new_config, set_special_tokens


class Tokenizer(SimpleNamespace):
    def __len__(self):
        return 300


TOKENIZER = Tokenizer(pad_token_id=0, bos_token_id=None, eos_token_id=1)
NAMES = [
    (model_type, preset)
    for model_type in ("fp8_encoder", "vq_transformer", "wmt_transformer")
    for preset in plugins.load().architectures.get(model_type).load_config().presets
]


@pytest.mark.parametrize(("model_type", "preset"), NAMES)
def test_a_preset_takes_the_vocabulary_of_the_tokenizer(model_type, preset):
    config = new_config(model_type, TOKENIZER, preset)
    values = type(config).presets[preset]
    assert config.vocab_size == 300 and config.eos_token_id == 1
    assert all(getattr(config, n) == v for n, v in values.items() if n != "vocab_size")


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match="enwik8, pg19, imagenet64, throughput"):
        new_config("vq_transformer", TOKENIZER, "enwik9")


def test_a_fresh_configuration_has_the_tokenizers_cls_and_sep(monkeypatch):
    from transformers import ModernBertConfig

    ids = {f"{role}_token_id": n for n, role in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    entry = Entry("modernbert", "mine", ArchitectureSpec("modernbert", config=ModernBertConfig))
    monkeypatch.setitem(plugins.load().architectures._entries, "modernbert", entry)
    config = new_config("modernbert", Tokenizer(**ids), None)
    assert {name: getattr(config, name) for name in ids} == ids


@pytest.mark.parametrize("model_type", ["marian", "pegasus"])
def test_the_decoder_of_a_new_model_starts_with_the_tokenizers_pad_token(model_type):
    ids = SimpleNamespace(pad_token_id=3, bos_token_id=None, eos_token_id=1)
    config = new_config(model_type, Tokenizer(**vars(ids)), None)
    assert config.decoder_start_token_id == config.pad_token_id == 3


@pytest.fixture(scope="module")
def plain_vocabulary(tmp_path_factory):
    """Returns the tokenizer.json of the guide for language modeling, with five special tokens."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(["en katt"], vocab_size=300, special_tokens=tokens)
    tokenizer.save(str(tmp_path_factory.mktemp("plain") / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(
    ("model_type", "tokens", "count"),
    [
        ("gpt2", {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}, 1),
        ("qwen2", {}, 1),
        ("bert", {"pad": "[PAD]"}, 5),
        ("gemma", {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}, 2),
        ("bart", {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "decoder_start": "</s>"}, 0),
        ("blenderbot", {"bos": "<s>", "decoder_start": "<s>"}, 0),
    ],
)
def test_a_configuration_gets_the_tokens_of_its_tokenizer(
    plain_vocabulary, model_type, tokens, count, tmp_path, caplog
):
    from transformers import AutoTokenizer

    size = plain_vocabulary.get_vocab_size()
    config = plugins.load().architectures.get(model_type).load_config()(vocab_size=size)
    config.save_pretrained(tmp_path)
    plain_vocabulary.save(str(tmp_path / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        fit_vocabulary(tokenizer, config)
        set_special_tokens(config, tokenizer, {})
    check_vocabulary(tokenizer, config)
    assert config.vocab_size == size + count
    assert caplog.text.count("increased vocab_size") == bool(count)
    ids = {role: getattr(config, f"{role}_token_id") for role in tokens}
    assert ids == {role: tokenizer.convert_tokens_to_ids(token) for role, token in tokens.items()}


def test_a_vocabulary_of_another_model_and_overrides_are_kept(plain_vocabulary, caplog):
    from transformers import GPT2Config

    tokenizer = SimpleNamespace(
        get_vocab=lambda: {"a": 0, "b": 12, "<s>": 13},
        added_tokens_decoder={13: "<s>"},
        bos_token_id=13,
        eos_token_id=13,
    )
    config = GPT2Config(vocab_size=11, bos_token_id=5, eos_token_id=[13, 7])
    fit_vocabulary(tokenizer, config)
    assert config.vocab_size == 11  # b is an ordinary token
    set_special_tokens(config, tokenizer, {"bos_token_id": 5})
    assert (config.bos_token_id, config.eos_token_id) == (5, [13, 7])
    config.bos_token_id = 50256
    set_special_tokens(config, tokenizer, {"bos_token_id": 50256})
    assert "bos_token_id 50256: not in the vocabulary of 11" in caplog.text

"""Presets create configurations with the tokenizer's vocabulary and special tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.plugins import ArchitectureSpec
from hfseq.plugins.registry import Entry
from hfseq.training.setup import new_config


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

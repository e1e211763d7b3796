"""Valid models and tokenizers of each type, and functions that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hostile.data_subjects import TEXTS


def save_bert(folder: Path, **options: Any) -> None:
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
    from tests.support.models import bert_config

    FlaxBertForMaskedLM(bert_config(num_hidden_layers=1)).save_pretrained(folder, **options)


def save_shards(folder: Path) -> None:
    save_bert(folder, max_shard_size="20kB")


def save_msgpack(folder: Path) -> None:
    save_bert(folder, safe_serialization=False)


def save_torch(folder: Path) -> None:
    import torch

    save_bert(folder)
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def save_gpt2(folder: Path) -> None:
    from hfseq_plugins.gpt2.modeling import FlaxGPT2LMHeadModel
    from tests.support.models import gpt2_config

    FlaxGPT2LMHeadModel(gpt2_config(n_layer=1)).save_pretrained(folder)


def save_marian(folder: Path) -> None:
    from hfseq_plugins.marian.modeling import FlaxMarianMTModel
    from tests.support.models import marian_config

    FlaxMarianMTModel(marian_config(encoder_layers=1, decoder_layers=1)).save_pretrained(folder)


def save_twin(folder: Path) -> None:
    from hfseq_plugins.wmt_transformer.modeling import FlaxWMTTransformerForConditionalGeneration
    from tests.support.models import wmt_transformer_config

    config = wmt_transformer_config(encoder_layers=1, decoder_layers=1)
    FlaxWMTTransformerForConditionalGeneration(config).save_pretrained(folder)


def save_vq(folder: Path) -> None:
    from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
    from tests.support.models import vq_transformer_config

    FlaxVQTransformerForCausalLM(vq_transformer_config()).save_pretrained(folder)


def save_fp8(folder: Path) -> None:
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
    from tests.support.models import bert_config

    FlaxBertForMaskedLM(bert_config(num_hidden_layers=1), precision="fp8_delayed").save_pretrained(
        folder
    )


def load_tensors(folder: Path) -> None:
    """Opens the weights and reads every tensor, without building the model."""
    from hfseq.checkpoints import config as resolve

    opened = resolve.open_checkpoint(str(folder), {})
    for tensor in opened.tensors.values():
        assert tensor.read(...).shape == tensor.shape


def load_bert(folder: Path) -> None:
    from hfseq import FlaxAutoModelForMaskedLM

    FlaxAutoModelForMaskedLM.from_pretrained(folder, _do_init=False)


def load_decoder(folder: Path) -> None:
    from hfseq import FlaxAutoModelForCausalLM

    FlaxAutoModelForCausalLM.from_pretrained(folder, _do_init=False)


def load_seq2seq(folder: Path) -> None:
    from hfseq import FlaxAutoModelForSeq2SeqLM

    FlaxAutoModelForSeq2SeqLM.from_pretrained(folder, _do_init=False)


def load_fp8(folder: Path) -> None:
    from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM

    FlaxBertForMaskedLM.from_pretrained(folder, precision="fp8_delayed", _do_init=False)


def load_config(folder: Path) -> None:
    """Reads a configuration as the training scripts do."""
    from types import SimpleNamespace

    from hfseq.training import setup
    from hfseq.training.arguments import ModelArguments

    objective = SimpleNamespace(
        default_model_type=None, configure=lambda *_: None, configure_data=lambda *_: None
    )
    arguments = SimpleNamespace(
        model=ModelArguments(config_name=str(folder)),
        data=None,
        training=SimpleNamespace(do_train=True, output_dir=""),
    )
    setup.load_config(arguments, _Vocabulary(), objective)


class _Vocabulary:
    """The part of a tokenizer that the check of a configuration requires."""

    name_or_path, all_special_ids, added_tokens_decoder = "small", (0,), {}  # type: ignore[var-annotated]

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "c": 2}


def save_tokenizer(folder: Path) -> None:
    from hfseq.data.tokenizers import train_tokenizer

    train_tokenizer(TEXTS, "bert", vocab_size=120, output_dir=folder, min_frequency=1)


def load_tokenizer(folder: Path) -> None:
    from types import SimpleNamespace

    from hfseq.data.tokenize import DocumentEncoder
    from hfseq.data.tokenizers import check_vocabulary
    from hfseq.objectives.base import Objective
    from hfseq.training import setup
    from hfseq.training.arguments import ModelArguments

    arguments = SimpleNamespace(model=ModelArguments(tokenizer_name=str(folder)), data=None)
    tokenizer = setup.load_tokenizer(arguments, Objective, folder)  # type: ignore[arg-type]
    check_vocabulary(tokenizer, SimpleNamespace(vocab_size=120))
    DocumentEncoder(tokenizer)(TEXTS[:2])

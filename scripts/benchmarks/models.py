"""The models that benchmarks run: configurations, classes, objectives, and random batches.

Everything that both sides must agree on is here, so that hfseq and PyTorch get the same of it.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

MASKED = 0.15
BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to measure: ``head`` ends the names of the Auto classes of both sides.

    ``config`` is a configuration class of transformers, or "module:class" of one of hfseq's own;
    PyTorch then takes the stock twin that hfseq stores it as.

    ``rates`` are the configuration's names of dropout rates; ``size`` changes the defaults of the
    configuration class into those of the published model.
    """

    title: str
    config: str
    head: str
    rates: tuple[str, ...]
    batch: int
    length: int
    target_length: int = 0
    mask_id: int = 0
    size: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def objective(self) -> str:
        """What it is trained with: mlm, clm or seq2seq."""
        return {"ForMaskedLM": "mlm", "ForCausalLM": "clm"}.get(self.head, "seq2seq")

    @property
    def native(self) -> bool:
        """Whether transformers has no class for it."""
        return ":" in self.config

    def config_class(self) -> Any:
        """Import the configuration class."""
        module, _, name = self.config.rpartition(":")
        return getattr(importlib.import_module(module or "transformers"), name)


_ENCODER_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_ROBERTA = {
    "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}  # fmt: skip
_BART = {
    "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
    "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
}  # fmt: skip

SUBJECTS = {
    "roberta": Subject(
        "RoBERTa-base", "RobertaConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128, mask_id=50264,
        size=_ROBERTA,
    ),
    "bert": Subject("BERT-base", "BertConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128, mask_id=103),
    "gpt2": Subject(
        "GPT-2 small", "GPT2Config", "ForCausalLM", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 4,
        512,
    ),
    # 114 targets are what span corruption makes of rows whose encoder input has 512 tokens.
    "t5": Subject("T5-small", "T5Config", "ForSeq2SeqLM", ("dropout_rate",), 4, 512, 114,
                  size={"decoder_start_token_id": 0}),
    "bart": Subject(
        "BART-base", "BartConfig", "ForSeq2SeqLM",
        ("dropout", "attention_dropout", "activation_dropout"), 4, 256, 256, size=_BART,
    ),
    "wmt": Subject(
        "WMT Transformer base", "hfseq_plugins.wmt_transformer.configuration:WMTTransformerConfig",
        "ForSeq2SeqLM", ("dropout", "attention_dropout", "activation_dropout"), 16, 64, 64,
    ),
}  # fmt: skip

_LAYERS = (
    *("num_hidden_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def configuration(name: str, size: dict[str, Any], dropout: float | None = None) -> Any:
    """Return the configuration of a subject.

    ``size`` changes it: "layers" sets all stacks, other names are the configuration's own. Without
    ``dropout`` the configuration's own rates stay.
    """
    subject = SUBJECTS[name]
    config = subject.config_class()(**subject.size)
    changes = dict(size)
    layers = changes.pop("layers", None)
    if layers is not None:
        changes = {key: layers for key in _LAYERS if hasattr(config, key)} | changes
    if dropout is not None:
        changes |= {rate: dropout for rate in subject.rates}
    absent = [key for key in changes if not hasattr(config, key)]
    if absent:
        raise ValueError(f"{type(config).__name__} has no {', '.join(absent)}")
    for key, value in changes.items():
        setattr(config, key, value)
    for key in _SPECIAL:  # a smaller vocabulary keeps its special tokens
        if getattr(config, key, None) is not None:
            setattr(config, key, min(getattr(config, key), config.vocab_size - 1))
    return config


def mask_id(name: str, config: Any) -> int:
    """Return the id that hides tokens; the last one where the vocabulary was made smaller."""
    return min(SUBJECTS[name].mask_id, config.vocab_size - 1)


def torch_class(name: str) -> Any:
    """Return PyTorch's class."""
    import transformers

    return getattr(transformers, f"AutoModel{SUBJECTS[name].head}")


def hfseq_class(name: str) -> Any:
    """Return hfseq's class."""
    import hfseq

    return getattr(hfseq, f"FlaxAutoModel{SUBJECTS[name].head}")


# -- training


def host_batch(name: str, config: Any, number: int, rows: int, length: int, targets: int) -> Any:
    """Return the arrays of a batch of full rows, and the random numbers that mask them."""
    import numpy as np

    from hfseq.data.batches import RowRandom

    random = np.random.default_rng(number)
    last = mask_id(name, config) if SUBJECTS[name].objective == "mlm" else config.vocab_size
    ids = random.integers(5, last, (rows, length), dtype=np.int32)
    batch = {"input_ids": ids, "segment_ids": np.ones_like(ids), "valid": np.ones(rows, bool)}
    if targets:
        labels = random.integers(5, config.vocab_size, (rows, targets), dtype=np.int32)
        start = np.full((rows, 1), config.decoder_start_token_id, np.int32)
        batch["labels"] = labels
        batch["decoder_input_ids"] = np.concatenate([start, labels[:, :-1]], axis=1)
    return batch, RowRandom(0, number, np.arange(rows))


def tokenizer(name: str, config: Any) -> SimpleNamespace:
    """What masking asks of a tokenizer: its size, its mask and its special tokens."""
    hidden = mask_id(name, config)

    class Stub(SimpleNamespace):
        def __len__(self) -> int:
            return config.vocab_size

        def get_vocab(self) -> dict[str, int]:
            return {"<mask>": hidden}

    special = [0, 1, 2, 3, hidden]
    return Stub(mask_token_id=hidden, all_special_ids=special, added_tokens_decoder={})


def objective(name: str, config: Any, targets: int) -> Any:
    """Return hfseq's objective; that of encoder-decoders takes its batches as they are."""
    flags = SimpleNamespace(
        mlm_probability=MASKED, whole_word_masking=False, train_ref_file=None,
        validation_ref_file=None, cross_documents=False,
    )  # fmt: skip
    arguments = (flags, tokenizer(name, config), config)
    kind = SUBJECTS[name].objective
    if kind == "mlm":
        from hfseq.objectives.mlm import MaskedLM

        return MaskedLM(*arguments)
    if kind == "clm":
        from hfseq.objectives.clm import CausalLM

        return CausalLM(*arguments)
    from hfseq.objectives.seq2seq import Seq2SeqLM

    class Ready(Seq2SeqLM):
        def collate(self, rows: Any, random: Any, groups: int) -> Any:
            return {key: value for key, value in rows.items() if key != "valid"}

        def target_length(self, length: int) -> int:
            return targets

    return Ready(*arguments)


def torch_inputs(name: str, config: Any, batch: dict[str, Any], random: Any) -> dict[str, Any]:
    """Return the keyword arguments of PyTorch's class for the same batch, as arrays.

    Rows are full, so no mask is given: attention may take its fastest path. Labels are of full
    length, as PyTorch's collators make them.
    """
    import numpy as np

    kind = SUBJECTS[name].objective
    if kind == "clm":
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    if kind == "seq2seq":
        return {key: batch[key] for key in ("input_ids", "decoder_input_ids", "labels")}
    from hfseq.objectives.mlm import mask_tokens

    special = np.zeros(config.vocab_size, bool)
    special[tokenizer(name, config).all_special_ids] = True
    ids, labels = mask_tokens(
        batch, random, mask_id=mask_id(name, config), vocab_size=config.vocab_size,
        special=special, probability=MASKED,
    )  # fmt: skip
    return {"input_ids": ids, "labels": labels}

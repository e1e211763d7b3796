"""Compares training steps with PyTorch, counts their work, and compiles steps for an H200.

    python scripts/benchmarks/training.py --model roberta       # a table of benchmarks/tables.md
    python scripts/benchmarks/training.py --model gpt2 --batch_size 4 --length 512
    python scripts/benchmarks/training.py --model t5 --target_length 114
    python scripts/benchmarks/training.py --model bart --layers 2 --rounds 3 --output try
    python scripts/benchmarks/training.py h200 --target hfseq/training/targets/h200.txtpb

hfseq and PyTorch train with AdamW from the same weights, on the same batches and masks. PyTorch
gets a label for every position, because its data collators return one. The script runs from a
checkout, on a CPU or an NVIDIA GPU. If packages are missing, the rows of the table that require
them say so. Before the timed steps, the script runs three steps without dropout and checks that the
losses agree. This module also defines the suites train, memory and scaling of run.py.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import itertools
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from harness import Case, Contestant, Options, Rows, Suite, Workload

# -- the models: settings that hfseq and PyTorch share

MLM_PROBABILITY, BATCHES = 0.15, 4
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
#: Size keys that all architectures share, and the corresponding fields of their configurations.
SIZE_KEYS = {
    "width": ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"),
    "wide": ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "encoder_ffn_dim",
             "decoder_ffn_dim"),
    "layers": ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers",
               "decoder_layers", "n_layer"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads",
              "decoder_attention_heads"),
}  # fmt: skip
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
TASKS = {"ForMaskedLM": "mlm", "ForCausalLM": "clm", "ForSeq2SeqLM": "seq2seq"}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model to measure.

    Attributes:
        title: Name in the tables.
        config: Configuration class of Transformers, or ``"module:class"`` for an architecture that
            only hfseq has. hfseq saves such a model in the format of an equivalent architecture of
            Transformers, which PyTorch then uses.
        head: Suffix of the names of the Auto classes, such as ``ForMaskedLM``.
        dropout_keys: Fields of the configuration that are dropout rates.
        batch: Default batch size.
        length: Default tokens per row.
        target_length: Default decoder tokens per row. 0 without a decoder.
        mask_id: Token ID of the mask token.
        size: Fields of the configuration that differ from its defaults.
    """

    title: str
    config: str
    head: str
    dropout_keys: tuple[str, ...]
    batch: int
    length: int
    target_length: int = 0
    mask_id: int = 0
    size: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def objective(self) -> str:
        """``mlm``, ``clm`` or ``seq2seq``."""
        return TASKS.get(self.head, "seq2seq")


_ENCODER_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_RATES = ("dropout", "attention_dropout", "activation_dropout")
_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_BART = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
#: A small mixture of 16 experts, two of which process a token.
_MIXTRAL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}
_WMT = "hfseq_plugins.wmt_transformer.configuration:WMTTransformerConfig"
TRAINING_MODELS = {
    "roberta": ModelSpec("RoBERTa-base", "RobertaConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128,
                         mask_id=50264, size=_ROBERTA),
    "bert": ModelSpec("BERT-base", "BertConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128,
                      mask_id=103),
    "modernbert": ModelSpec("ModernBERT-base", "ModernBertConfig", "ForMaskedLM",
                          ("attention_dropout", "mlp_dropout", "embedding_dropout"), 8, 128,
                          mask_id=50284),
    "gpt2": ModelSpec("GPT-2 small", "GPT2Config", "ForCausalLM",
                    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 4, 512),
    "mixtral": ModelSpec("Mixtral, 4 layers", "MixtralConfig", "ForCausalLM",
                         ("attention_dropout",), 2, 512, size=_MIXTRAL),
    # Span corruption yields 114 target tokens for an encoder input of 512 tokens.
    "t5": ModelSpec("T5-small", "T5Config", "ForSeq2SeqLM", ("dropout_rate",), 4, 512, 114,
                  size={"decoder_start_token_id": 0}),
    "bart": ModelSpec("BART-base", "BartConfig", "ForSeq2SeqLM", _RATES, 4, 256, 256, size=_BART),
    "wmt": ModelSpec("WMT Transformer base", _WMT, "ForSeq2SeqLM", _RATES, 16, 64, 64),
}  # fmt: skip
#: Models for measurements of the forward pass. Most of them have two layers.
FORWARD_MODELS = {
    "encoder": ModelSpec("BERT-base", "BertConfig", "", (), 0, 128),
    "clip_text": ModelSpec(
        "CLIP-text-base, 2 layers", "CLIPTextConfig", "", (), 0, 77, size={"num_hidden_layers": 2}
    ),
    "vit": ModelSpec(
        "ViT-base, 2 layers", "ViTConfig", "", (), 0, 197, size={"num_hidden_layers": 2}
    ),
    "distilbert": ModelSpec(
        "DistilBERT, 2 layers", "DistilBertConfig", "", (), 0, 128, size={"n_layers": 2}
    ),
    "opt": ModelSpec(
        "OPT-125m, 2 layers", "OPTConfig", "", (), 0, 128, size={"num_hidden_layers": 2}
    ),
    "llama": ModelSpec("Llama-1B-like, 2 layers", "LlamaConfig", "", (), 0, 128, size=_LLAMA),
}
#: Size of the opus-mt models. The last token ID is the padding token and starts the targets.
_MARIAN = {
    "vocab_size": 54688,
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_position_embeddings": 512,
    "activation_function": "swish",
    "scale_embedding": True,
    "init_std": 0.05,
    "bos_token_id": 0,
    "forced_eos_token_id": None,
}
#: Models for generation only. 30 seconds of audio become 1,500 encoder positions.
GENERATION_MODELS = {
    "whisper": ModelSpec(
        "Whisper tiny",
        "WhisperConfig",
        "ForSpeechSeq2Seq",
        (),
        0,
        1500,
        size={"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}
#: Models of the pipelines and of the translation benchmark.
TEXT_MODELS = {
    "marian": ModelSpec("Marian-base", "MarianConfig", "ForSeq2SeqLM", (), 0, 0, size=_MARIAN),
    "classifier": ModelSpec("BERT-base", "BertConfig", "ForSequenceClassification", (), 0, 512),
    "image_classifier": ModelSpec(
        "ViT-base", "ViTConfig", "ForImageClassification", (), 0, 197, size={"num_labels": 1000}
    ),
    "minilm_ranker": ModelSpec(
        "MiniLM-L6",
        "BertConfig",
        "ForSequenceClassification",
        (),
        0,
        512,
        size={
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
            "num_labels": 1,
        },
    ),
    "minilm": ModelSpec(
        "MiniLM-L6",
        "BertConfig",
        "",
        (),
        0,
        256,
        size={"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
}


def model_spec(name: str) -> ModelSpec:
    """Returns the specification of a model by its name."""
    return (TRAINING_MODELS | FORWARD_MODELS | GENERATION_MODELS | TEXT_MODELS)[name]


def make_config(name: str, size: Mapping[str, Any], dropout: float | None = None) -> Any:
    """Returns the configuration of a model.

    Args:
        name: Name of the model.
        size: Changes of the configuration. A key of ``SIZE_KEYS`` sets all corresponding fields, so
            ``layers`` applies to all stacks. Other keys are fields of the configuration.
        dropout: Value of all dropout rates. `None` keeps the rates of the configuration.

    Raises:
        ValueError: The configuration does not have one of the fields.
    """
    subject = model_spec(name)
    module, _, class_name = subject.config.rpartition(":")
    config = getattr(importlib.import_module(module or "transformers"), class_name)(**subject.size)
    changes = {
        key: size[name]
        for name, keys in SIZE_KEYS.items()
        if name in size
        for key in keys
        if hasattr(config, key)
    }
    changes |= {key: value for key, value in size.items() if key not in SIZE_KEYS}
    changes |= {} if dropout is None else dict.fromkeys(subject.dropout_keys, dropout)
    unknown = [key for key in changes if not hasattr(config, key)]
    if unknown:
        raise ValueError(f"{type(config).__name__} has no field {', '.join(unknown)}")
    for key, value in changes.items():
        setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for key in SPECIAL:  # keep special tokens inside of a smaller vocabulary
        if getattr(config, key, None) is not None:
            setattr(config, key, min(getattr(config, key), config.vocab_size - 1))
    return config


def torch_class(name: str) -> Any:
    """Returns the Auto class of Transformers for a model."""
    import transformers

    return getattr(transformers, f"AutoModel{model_spec(name).head}")


def hfseq_class(name: str) -> Any:
    """Returns the Auto class of hfseq for a model."""
    import hfseq

    return getattr(hfseq, f"FlaxAutoModel{model_spec(name).head}")


def save_weights(folder: str, model: str, size: dict[str, Any]) -> Workload:
    """Saves random weights with hfseq, or with PyTorch if hfseq's packages are missing."""
    missing = Contestant("", "", "", requires=harness.HFSEQ).missing()
    module = (torch_class if missing else hfseq_class)(model).from_config(make_config(model, size))
    module.save_pretrained(folder)
    return Workload(lambda: {}, harness.host_peak_bytes)


def load_torch(model: str, weights: str, config: Any, dtype: str = "float32") -> tuple[Any, str]:
    """Loads PyTorch's model with its default attention (sdpa). Returns the model and its device."""
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    subject = model_spec(model)
    # A model of an architecture that only hfseq has is saved with the configuration of an
    # equivalent architecture of Transformers.
    rates = {rate: getattr(config, rate) for rate in subject.dropout_keys}
    load_options = rates if ":" in subject.config else {"config": config}
    module = torch_class(model).from_pretrained(weights, **load_options)
    return module.to(device=device, dtype=getattr(torch, dtype)), device


def torch_info(module: Any) -> dict[str, Any]:
    """Returns the device, attention implementation and parameter count of a PyTorch model."""
    return {
        "device": harness.torch_device(),
        "attention": module.config._attn_implementation,
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def tree_bytes(tree: Any) -> int:
    """Returns the size of all arrays of a tree in bytes."""
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def jax_info(params: Any) -> dict[str, Any]:
    """Returns the device and the parameter count of a jax model."""
    import jax

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"device": harness.jax_device(), "parameters": count}


def mask_id(name: str, config: Any) -> int:
    """Returns the ID of the mask token, or the last ID if the vocabulary is smaller."""
    return min(TRAINING_MODELS[name].mask_id, config.vocab_size - 1)


class TokenizerStub(SimpleNamespace):
    """The attributes of a tokenizer that masking requires: size, mask token and special tokens."""

    def __init__(self, name: str, config: Any):
        hidden = mask_id(name, config)
        super().__init__(
            mask_token_id=hidden,
            all_special_ids=[0, 1, 2, 3, hidden],
            added_tokens_decoder={},
            vocab_size=config.vocab_size,
        )

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {"<mask>": self.mask_token_id}


def make_objective(name: str, config: Any, targets: int) -> Any:
    """Returns the training objective of hfseq.

    For encoder-decoders, the objective uses batches as they are, without collating rows.
    """
    from hfseq.objectives.clm import CausalLM
    from hfseq.objectives.mlm import MaskedLM
    from hfseq.objectives.seq2seq import Seq2SeqLM

    class Ready(Seq2SeqLM):
        def collate(self, rows: Any, random: Any, groups: int) -> Any:
            return {key: value for key, value in rows.items() if key != "valid"}

        def target_length(self, length: int) -> int:
            return targets

    flags = SimpleNamespace(
        mlm_probability=MLM_PROBABILITY,
        whole_word_masking=False,
        train_ref_file=None,
        validation_ref_file=None,
        cross_documents=False,
    )
    objective_class = {"mlm": MaskedLM, "clm": CausalLM, "seq2seq": Ready}[
        TRAINING_MODELS[name].objective
    ]
    return objective_class(flags, TokenizerStub(name, config), config)


def host_batch(name: str, config: Any, number: int, rows: int, length: int, targets: int) -> Any:
    """Returns a batch of rows without padding, and the random numbers for masking."""
    import numpy as np

    from hfseq.data.batches import RowRandom

    random = np.random.default_rng(number)
    last = mask_id(name, config) if TRAINING_MODELS[name].objective == "mlm" else config.vocab_size
    ids = random.integers(5, last, (rows, length), dtype=np.int32)
    batch = {"input_ids": ids, "segment_ids": np.ones_like(ids), "valid": np.ones(rows, bool)}
    if targets:
        labels = random.integers(5, config.vocab_size, (rows, targets), dtype=np.int32)
        start = np.full((rows, 1), config.decoder_start_token_id, np.int32)
        batch["labels"] = labels
        batch["decoder_input_ids"] = np.concatenate([start, labels[:, :-1]], axis=1)
    return batch, RowRandom(0, number, np.arange(rows))


def torch_inputs(name: str, config: Any, batch: dict[str, Any], random: Any) -> dict[str, Any]:
    """Returns the keyword arguments of PyTorch's model for the same batch, as NumPy arrays.

    The rows have no padding, so an attention mask is unnecessary, and attention can use its fastest
    implementation.
    """
    import numpy as np

    from hfseq.objectives.mlm import mask_tokens

    objective = TRAINING_MODELS[name].objective
    if objective == "clm":
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    if objective == "seq2seq":
        return {key: batch[key] for key in ("input_ids", "decoder_input_ids", "labels")}
    special = np.zeros(config.vocab_size, bool)
    special[TokenizerStub(name, config).all_special_ids] = True
    ids, labels = mask_tokens(
        batch,
        random,
        mask_id=mask_id(name, config),
        vocab_size=config.vocab_size,
        special=special,
        probability=MLM_PROBABILITY,
    )
    return {"input_ids": ids, "labels": labels}


# -- the step of the training loop


@dataclasses.dataclass
class PreparedStep:
    """A training step of the loop with its inputs on the host.

    Attributes:
        module: The model.
        objective: The objective.
        optimizer: The optimizer.
        step: Function from a training state and a batch to the next state and the metrics.
        batches: The batches.
    """

    module: Any
    objective: Any
    optimizer: Any
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[dict[str, Any]]

    def make_state(self, params: Any, extra: Any) -> Any:
        """Returns the training state of step 0 with ``params``. This method can be traced."""
        from hfseq.training import state

        names = tuple(sorted({"loss", "count", *self.objective.sums}))
        return state.make_state(params, self.optimizer, extra, names)

    def random_state(self, rng: Any) -> Any:
        """Returns the state of step 0 with random parameters. This method can be traced."""
        return self.make_state(self.module.init_weights(rng), self.module.init_extra(rng))


def make_optimizer() -> Any:
    """Returns AdamW with a constant learning rate."""
    import optax

    from hfseq.training import optimizers

    flags = SimpleNamespace(
        adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1],
        adam_epsilon=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        weight_decay_mode="decoupled",
        optim="adamw",
        freeze=[],
        no_decay=[],
        max_grad_norm=0.0,
    )
    schedule = optax.constant_schedule(ADAMW["lr"])
    return optimizers.make_optimizer(optimizers.adamw, flags, schedule)


def prepare(
    name: str,
    module: Any,
    rows: int,
    length: int,
    targets: int,
    batches: int = BATCHES,
    documents: int = 1,
) -> PreparedStep:
    """Builds the step that the training loop compiles, with objective and AdamW, and its batches.

    Args:
        name: Name of the model in ``TRAINING_MODELS``.
        module: The model.
        rows: Rows per batch.
        length: Tokens per row.
        targets: Decoder tokens per row.
        batches: Number of batches.
        documents: Documents per row. The objective receives this number as the maximum number of
            documents, as in the training loop.
    """
    import numpy as np

    from hfseq.nn.context import RowGuarantees
    from hfseq.training import state

    objective, optimizer = make_objective(name, module.config, targets), make_optimizer()
    objective.prepare(module)
    if objective.row_guarantees is not None:
        objective.row_guarantees = RowGuarantees(max_runs=documents)
    collated_batches = []
    for number in range(batches):
        batch, random = host_batch(name, module.config, number, rows, length, targets)
        batch["segment_ids"] += np.arange(length, dtype=np.int32) * documents // length
        collated = objective.collate(batch, random, 1) | {"row": np.arange(rows, dtype=np.int32)}
        collated_batches.append({key: np.asarray(leaf)[None] for key, leaf in collated.items()})
    full_step = state.make_step(objective, module, optimizer, 0, False)

    def step(current: Any, batch: Any) -> tuple[Any, Any]:
        return full_step(current, {}, batch)

    return PreparedStep(module, objective, optimizer, step, collated_batches)


def step_runner(program: Callable[..., Any], current: Any, batches: Sequence[Any]) -> Any:
    """Returns a function that runs the next training step and waits for its loss."""
    turns = itertools.cycle(batches)

    def run() -> dict[str, float]:
        nonlocal current
        current, metrics = program(current, next(turns))
        return {"loss": float(metrics["loss"])}

    return run


def hfseq_step(
    model: str,
    dtype: str,
    rows: int,
    length: int,
    targets: int,
    size: dict[str, Any],
    dropout: float | None,
    weights: str,
    remat: bool = False,
    attention: str | None = None,
    documents: int = 1,
) -> Workload:
    """Builds the training step that the loop of hfseq compiles, with its objective and optimizer.

    With ``remat``, the activations of the layers are recomputed in the backward pass, and the
    layers are scanned. Without scanning, XLA for CPUs would recompute the activations of all layers
    before it uses the first one. ``attention`` is the name of an attention implementation.
    ``documents`` is the number of documents per row, which do not attend to each other.
    """
    import jax

    from hfseq.nn import precision
    from hfseq.training import throughput

    config = make_config(model, size, dropout)
    module = hfseq_class(model).from_config(
        config,
        _do_init=False,
        precision=precision.precision_for(dtype),
        gradient_checkpointing=remat,
        scan_layers=remat,
        attn_implementation=attention,
    )
    prepared = prepare(model, module, rows, length, targets, documents=documents)
    loaded = hfseq_class(model).from_pretrained(weights, config=config, scan_layers=remat)
    make_state = jax.jit(lambda p: prepared.make_state(p, module.extra), donate_argnums=0)
    current = make_state(loaded.params)
    del loaded
    info = jax_info(current.params)
    flops = throughput.run_flops(module, prepared.objective, rows, length)
    info |= {"model_flops": flops, "flops": flops}
    info["bytes"] = training_bytes(jax_shapes(current.params))
    device_batches = jax.device_put(prepared.batches)
    step: Any = jax.jit(prepared.step, donate_argnums=0)
    if jax.default_backend() != "cpu":  # the process memory of a CPU differs from XLA's plan
        step = step.lower(current, device_batches[0]).compile()
        info["planned_bytes"] = harness.compiled_memory(step)["compiled_bytes"]
    run = step_runner(step, current, device_batches)
    return Workload(run, harness.jax_peak_bytes, info)


def torch_step(
    model: str,
    dtype: str,
    rows: int,
    length: int,
    targets: int,
    size: dict[str, Any],
    dropout: float | None,
    weights: str,
    compiled: bool = False,
    remat: bool = False,
) -> Workload:
    """Builds the training step of PyTorch.

    It uses the model's default attention and the Trainer's fused AdamW. With ``remat``, the layers
    are recomputed in the backward pass.
    """
    import torch

    config = make_config(model, size, dropout)
    module, device = load_torch(model, weights, config)
    module.train()
    if remat:
        enable_remat = getattr(module, "activation_checkpointing_enable", None)
        (enable_remat or module.gradient_checkpointing_enable)()
    vectors = [p for p in module.parameters() if p.ndim < 2]
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    forward = torch.compile(module) if compiled else module
    forward_options = {} if TRAINING_MODELS[model].objective == "mlm" else {"use_cache": False}
    batches = []
    for number in range(BATCHES):
        batch, random = host_batch(model, config, number, rows, length, targets)
        inputs = torch_inputs(model, config, batch, random)
        batches.append({k: torch.from_numpy(v).long().to(device) for k, v in inputs.items()})
    turns = itertools.cycle(batches)

    def run() -> dict[str, float]:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(**next(turns), **forward_options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        harness.torch_synchronize()
        return {"loss": loss.item()}

    info = torch_info(module) | {"bytes": training_bytes(torch_shapes(module))}
    return Workload(run, harness.torch_peak_bytes, info)


FACTORIES = {"torch": "training:torch_step", "hfseq": "training:hfseq_step"}

# -- lower bounds of the work of a computation. They depend only on shapes and are the same for all
# contestants: nothing is recomputed, activations stay in the caches, and each weight is read once
# per use. The reported share of a limit can therefore be too low, but not too high.

Shapes = Mapping[str, tuple[int, ...]]
ITEMSIZE = {"float32": 4, "bfloat16": 2}
#: Bytes per parameter and training step. AdamW reads four float32 arrays and writes three, the
#: backward pass writes the gradient, and the forward and backward passes each read the weights.
TRAINING_BYTES = 4 * (4 + 3 + 1 + 2)
_TABLES = ("embed", "wpe", "wte", "shared", "relative_attention_bias")


def torch_shapes(module: Any) -> Shapes:
    """Returns the shapes of the parameters of a PyTorch model by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def jax_shapes(params: Any) -> Shapes:
    """Returns the shapes of the parameters of a jax model by name."""
    from hfseq.nn import trees

    return {".".join(map(str, path)): leaf.shape for path, leaf in trees.flatten(params).items()}


def training_bytes(shapes: Shapes) -> float:
    """Returns the minimum number of bytes that a training step moves."""
    return float(TRAINING_BYTES * sum(math.prod(shape) for shape in shapes.values()))


def count_matmul_weights(shapes: Shapes, vocab: int, side: str | None = None) -> int:
    """Counts the weights of matrix multiplications: all but embeddings, biases and norms.

    Every token is multiplied with each of these weights.

    Args:
        shapes: Shapes of the parameters by name.
        vocab: Size of the vocabulary, which identifies embeddings.
        side: ``"encoder"`` or ``"decoder"`` to count only the weights of that stack.
    """
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) >= 2
        and vocab not in shape
        and not any(t in name for t in _TABLES)
        and (side is None or ("decoder" in name) == (side == "decoder"))
    )


def hidden_size(config: Any) -> int:
    """Returns the hidden size of a configuration."""
    return getattr(config, "hidden_size", None) or config.d_model


def forward_work(
    shapes: Shapes, config: Any, rows: int, length: int, itemsize: int
) -> dict[str, float]:
    """Returns the FLOPs and bytes of a forward pass."""
    attention = 4.0 * config.num_hidden_layers * hidden_size(config) * length
    weights = count_matmul_weights(shapes, getattr(config, "vocab_size", 0))
    flops = rows * length * (2.0 * weights + attention)
    return {"flops": flops, "bytes": float(itemsize * weights)}


def generation_work(
    shapes: Shapes, config: Any, rows: int, beams: int, prompt: int, new: int, itemsize: int
) -> dict[str, float]:
    """Returns the FLOPs and bytes of the generation of ``new`` tokens per row.

    The bytes are those that have to be read for each new token: the weight matrices of the decoder
    and of the output head, and the cached keys and values of the previous tokens and of the encoder
    outputs.
    """
    width, layers, vocab = hidden_size(config), config.num_hidden_layers, config.vocab_size
    encoder_decoder = bool(config.is_encoder_decoder)
    decoder = (
        count_matmul_weights(shapes, vocab, "decoder" if encoder_decoder else None) + vocab * width
    )
    encoder = count_matmul_weights(shapes, vocab, "encoder") if encoder_decoder else 0
    prompt_flops = rows * prompt * 2.0 * (encoder if encoder_decoder else decoder - vocab * width)
    tokens = rows * beams * new
    context = (0 if encoder_decoder else prompt) + new / 2
    cached = 2 * layers * width * rows * (beams * context + (prompt if encoder_decoder else 0))
    attended = 4.0 * layers * width * (context + (prompt if encoder_decoder else 0))
    return {
        "flops": prompt_flops + tokens * (2.0 * decoder + attended),
        "bytes": float(itemsize * (encoder + new * (decoder + cached))),
    }


# -- one model: training.py

# glibc uses 2 MB pages for large allocations. A step then has hundreds of page faults, not 300,000.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Maximum relative difference of the losses of two implementations. They sum in different orders,
# and round bfloat16 results at different points.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the flags. Sizes default to those of the model."""
    parser = harness.make_parser(
        __doc__,
        sizes=True,
        batch_size=(int, "rows per step"),
        length=(int, "(encoder) tokens per row"),
        target_length=(int, "decoder tokens per row"),
        rounds=(15, "timed steps per contestant"),
    )
    parser.add_argument(
        "--model", default="roberta", choices=list(TRAINING_MODELS), help="model to train"
    )
    parser.add_argument(
        "--dropout", type=float, help="value of all dropout rates (default: as configured)"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    parser.add_argument(
        "--huge_pages", action="store_true", help="also measure with memory pages of 2 MB"
    )
    options = parser.parse_args(arguments)
    subject = TRAINING_MODELS[options.model]
    if options.target_length and not subject.target_length:
        parser.error(
            f"--target_length requires an encoder-decoder, but {options.model} has no decoder"
        )
    for name, default in (
        ("batch_size", subject.batch),
        ("length", subject.length),
        ("target_length", subject.target_length),
    ):
        setattr(options, name, getattr(options, name) or default)
    return options


def step_cases(options: argparse.Namespace, dropout: float | None, **turns: int) -> list[Case]:
    """Returns a case per dtype for the flags of the script."""
    cases, size = [], harness.size_from_flags(options)
    for dtype in options.dtypes:
        case = training_case(
            Options(),
            options.model,
            dtype,
            options.batch_size,
            options.length,
            options.target_length,
            dtype,
            ("torch", "hfseq"),
            size,
            dropout=dropout,
            **turns,
        )
        torch, ours = case.contestants
        compiled = dataclasses.replace(
            torch, name=f"{torch.name}, compiled", settings=torch.settings | {"compiled": True}
        )
        paged = [
            dataclasses.replace(
                contestant, name=f"{contestant.name}, huge pages", environment=HUGE_PAGES
            )
            for contestant in (torch, ours)
        ]
        members = [torch, *([compiled] if options.compile else []), ours]
        members += paged if options.huge_pages else []
        cases.append(dataclasses.replace(case, contestants=tuple(members)))
    return cases


def loss_problems(rows: Rows, tolerance: Mapping[str, float]) -> list[str]:
    """Returns a message per contestant whose losses differ from the first contestant of its case.

    ``tolerance`` is the maximum relative difference by dtype.
    """
    problems = []
    for row, base in harness.rows_with_baseline(rows, "values"):
        allowed, both = tolerance[row["dtype"]], zip(row["values"], base["values"], strict=False)
        pairs = [(a["loss"], b["loss"]) for a, b in both]
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if row is not base and not worst <= allowed:
            problems.append(
                f"{row['case']}: the losses of {row['name']} and {base['name']} differ by "
                f"{worst:.1e} (allowed {allowed:.0e}): {pairs}"
            )
    return problems


def run_steps(arguments: list[str]) -> int:
    """Runs the command without a subcommand and returns the exit code."""
    options = parse(arguments)
    result = harness.result_header(f"train_{options.model}", "training.py", arguments, options)
    with tempfile.TemporaryDirectory() as folder:
        runner, problems = harness.Runner(result["threads"], Path(folder)), list[str]()
        if not options.no_check:
            check_rows = runner.run_suite("check", step_cases(options, 0.0, rounds=3, warmup=0))
            problems = loss_problems(check_rows, TOLERANCE)
        runner.limits = harness.matmul_rates(options.dtypes, runner.threads)
        turns = {"rounds": options.rounds, "warmup": 2, "settle": 1}
        rows = runner.run_suite("train", step_cases(options, options.dropout, **turns))
    targets = f" to {options.target_length}" if options.target_length else ""
    dropout = "as configured" if options.dropout is None else f"{options.dropout:g}"
    result |= {
        "limits": runner.limits,
        "rows": rows,
        "problems": problems,
        "rounds": f"{options.rounds} alternating rounds, an untimed step before each",
        "remarks": [
            f"{TRAINING_MODELS[options.model].title}{harness.size_text(result['options'])}, batch "
            f"{options.batch_size}, length {options.length}{targets}, dropout {dropout}."
        ],
    }
    return harness.publish(result, harness.section(result, COLUMNS), options.output)


COLUMNS = (
    ("precision", harness.CASE[1]),
    harness.TOKENS,
    harness.TIME,
    harness.RATIO,
    harness.MFU,
    harness.MEMORY,
)

# -- the suites of run.py

#: Model, title, length, target length, rows on a CPU, rows on a GPU.
TRAINING_SHAPES = (
    ("roberta", "RoBERTa-base", 128, 0, 8, 128),
    ("roberta", "RoBERTa-base", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 1024, 0, 1, 16),
    ("mixtral", "Mixtral, 4 layers", 512, 0, 2, 32),
    ("t5", "T5-small", 512, 114, 2, 64),
    ("bart", "BART-base", 256, 256, 2, 32),
    ("wmt", "WMT base", 64, 64, 16, 256),
)
#: Configuration fields of the attention dropout rate. PyTorch's flash attention supports dropout,
#: but jax's flash attention does not.
ATTENTION_DROPOUT_KEYS = {
    "roberta": "attention_probs_dropout_prob",
    "gpt2": "attn_pdrop",
    "bart": "attention_dropout",
    "wmt": "attention_dropout",
}
#: Cases whose bfloat16 variant is measured on a CPU by default. --dtypes measures all.
BFLOAT16_ON_CPU = ("roberta 128", "gpt2 512")


def training_case(
    options: Options,
    model: str,
    name: str,
    rows: int,
    length: int,
    targets: int,
    dtype: str,
    peers: Sequence[str] | None = None,
    size: dict[str, Any] | None = None,
    remat: bool = False,
    dropout: float | None = None,
    **turns: Any,
) -> Case:
    """Returns a case that compares training steps of a model."""
    settings = {
        "model": model,
        "dtype": dtype,
        "rows": rows,
        "length": length,
        "targets": targets,
        "size": options.size(model) if size is None else size,
        "dropout": dropout,
    } | ({"remat": True} if remat else {})
    amount = rows * (length + targets)
    return harness.comparison_case(options, FACTORIES, settings, name, amount, peers, **turns)


def shape_name(title: str, rows: int, length: int, targets: int, dtype: str) -> str:
    """Returns the name of a case, such as ``T5-small, 2 x 512 to 114, float32``."""
    return f"{title}, {rows} x {length}" + (f" to {targets}" if targets else "") + f", {dtype}"


def train_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite train."""
    turns = {
        "rounds": options.choose(3, 20, 3, 1),
        "warmup": options.choose(0, 3, 1, 1),
        "settle": options.choose(1, 1, 0, 0),
    }
    cases = []
    for model, title, full, targets, cpu, gpu in TRAINING_SHAPES:
        rows, parts = options.choose(cpu, gpu, 2, 2), options.choose(1, 1, 4, 32)
        # With two shorter rows, there may be no masked token. PyTorch's loss is then NaN.
        length, targets = max(full // parts, 12), targets // parts
        both = ("float32", "bfloat16") if f"{model} {full}" in BFLOAT16_ON_CPU else ("float32",)
        for dtype in options.dtypes_or_default(*options.choose(both, (), (), ())):
            name = shape_name(title, rows, length, targets, dtype)
            case = training_case(options, model, name, rows, length, targets, dtype, **turns)
            cases.append(case)
            if options.gpu and dtype == "bfloat16" and model in ATTENTION_DROPOUT_KEYS:
                # Without attention dropout, both can use flash attention.
                name = f"{name}, attention weights kept"
                changes = {"size": options.size(model) | {ATTENTION_DROPOUT_KEYS[model]: 0.0}}
                without_dropout = [
                    dataclasses.replace(c, group=name, settings=c.settings | changes)
                    for c in case.contestants
                ]
                fused = [
                    dataclasses.replace(
                        c, name=f"{c.name}, cuDNN", settings=c.settings | {"attention": "cudnn"}
                    )
                    for c in without_dropout
                    if c.name == "hfseq"
                ]
                cases.append(
                    dataclasses.replace(case, name=name, contestants=(*without_dropout, *fused))
                )
    return cases


def memory_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite memory, with and without recomputation."""
    cases, dtype = [], options.dtypes_or_default()[0]
    for model, title, length, targets, cpu in (
        ("roberta", "RoBERTa-base", 512, 0, 8),
        ("gpt2", "GPT-2 small", 512, 0, 4),
        ("t5", "T5-small", 512, 114, 8),
        ("bart", "BART-base", 256, 256, 8),
    ):
        if not options.gpu and model not in ("roberta", "bart"):
            continue  # the suite train reports the peaks of the others
        rows = options.choose(cpu, 32 if model == "gpt2" else 64, 2, 2)
        length = options.choose(length, length, 128, 12)
        targets = targets and options.choose(targets, targets, 64, 6)
        for remat in (False, True):
            name = shape_name(title, rows, length, targets, dtype) + (", recomputed" * remat)
            case = training_case(
                options,
                model,
                name,
                rows,
                length,
                targets,
                dtype,
                options.eager_peers,
                remat=remat,
                rounds=1,
                warmup=1,
            )
            # Each contestant is a separate group, so that all memory is available to it.
            members = case.contestants
            alone = tuple(dataclasses.replace(c, group=f"{name}, {c.name}") for c in members)
            cases.append(dataclasses.replace(case, contestants=alone))
    return cases


def memory_finish(rows: Rows) -> None:
    """Adds the peak memory relative to PyTorch's peak memory to each record."""
    for row in rows:
        base = next((r for r in rows if r["case"] == row["case"] and r["name"] == "PyTorch"), None)
        if base and base["peak_memory_gb"] and row["peak_memory_gb"]:
            row["memory_ratio"] = row["peak_memory_gb"] / base["peak_memory_gb"]


def state_share(row: dict[str, Any]) -> str:
    """Formats the size of the training state and its share of the peak memory.

    The training state consists of parameters, gradients and both moments of AdamW in float32.
    """
    count = row["facts"].get("parameters")
    if not count or not row["peak_memory_gb"]:
        return harness.ABSENT
    state = 16 * count / harness.GB
    return f"{state:.2f} GB, {state / row['peak_memory_gb']:.0%}"


def scaling_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite scaling: several batch sizes, then several widths."""
    if "hfseq" not in options.peers:
        return []
    batches = options.choose((1, 2, 4, 8, 16), (4, 16, 64, 256), (1, 2, 4, 8), (1, 2, 4))
    widths = options.choose(
        (128, 256, 512, 1024), (256, 512, 1024, 2048, 4096), (64, 128, 256), (16, 32, 64)
    )
    width, rows = options.choose(512, 1024, 128, 32), options.choose(8, 64, 4, 2)
    length, layers = options.choose(128, 512, 64, 8), options.choose(4, 4, 2, 1)
    turns = {"rounds": options.choose(5, 20, 3, 1), "warmup": 1}
    cases = []
    points = [("batch", b, width, b) for b in batches] + [("width", w, w, rows) for w in widths]
    for over, value, width, rows in points:
        size = {
            "layers": layers,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": max(width // 64, 2),
            "vocab_size": 120 if options.tiny else 8000,
        }
        cases.append(
            training_case(
                options,
                "roberta",
                f"{over} {value}",
                rows,
                length,
                0,
                options.dtypes_or_default()[0],
                ("hfseq",),
                size,
                info={"over": over, "value": value},
                **turns,
            )
        )
    return cases


def scaling_points(rows: Rows, over: str) -> dict[str, list[tuple[float, float]]]:
    """Returns the points of each contestant.

    A point is ``(batch, seconds per step)`` if ``over`` is ``"batch"``, and
    ``(width, seconds per token)`` if it is ``"width"``.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["case_facts"].get("over") == over and row["median_seconds"]:
            seconds = row["median_seconds"] / (row["amount"] if over == "width" else 1)
            points.setdefault(row["name"], []).append((row["case_facts"]["value"], seconds))
    return points


def exponent(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the exponent with which the second number of each pair grows with the first number.

    It is the slope of a line that is fitted to the logarithms. 1 means linear growth.
    """
    logarithms = [(math.log(x), math.log(y)) for x, y in pairs]
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


def scaling_remarks(rows: Rows) -> list[str]:
    """Returns sentences that say how the time grows with the batch size and with the width."""
    remarks = []
    for over, quantity in (
        ("batch", "time per step over the batch size (1 is linear)"),
        ("width", "time per token over the width (at most 2 by FLOPs)"),
    ):
        exponents = []
        for name, pairs in scaling_points(rows, over).items():
            last = f" ({exponent(pairs[-2:]):.2f} between the last two)" if len(pairs) > 2 else ""
            exponents += [f"{name} {exponent(pairs):.2f}{last}"] if len(pairs) > 1 else []
        remarks += [f"Exponent of the {quantity}: {', '.join(exponents)}."] if exponents else []
    return remarks


def scaling_curves(rows: Rows) -> list[dict[str, Any]]:
    """Returns the panels of the plot."""
    parts = []
    for over, x, y, scale in (
        ("batch", "rows", "seconds per step", 1.0),
        ("width", "width", "microseconds per token", 1e6),
    ):
        lines = {
            name: ([a for a, _ in pairs], [b * scale for _, b in pairs])
            for name, pairs in scaling_points(rows, over).items()
        }
        style = {"marker": "o", "markersize": 4}
        parts += [{"x": x, "y": y, "lines": lines, "style": style}] if lines else []
    return parts


TRAIN = Suite(
    "Training step",
    "The step that the training loop compiles (objective, AdamW, gradient norm, donated state), "
    "compared with PyTorch's model with sdpa attention and fused AdamW, eager and with "
    "`torch.compile`. PyTorch uses `torch.autocast` for bfloat16. Weights, batches, masks and "
    "dropout rates are the same. The losses must agree within 5 % (within 2e-5 without dropout in "
    "`training.py`).",
    train_cases,
    harness.DEFAULT_COLUMNS,
    "ratio",
    # The tolerance is large because the dropout masks differ.
    problems=lambda rows: loss_problems(rows, dict.fromkeys(TOLERANCE, 0.05)),
)
MEMORY = Suite(
    "Peak memory",
    "Peak memory of a training process: device memory on a GPU, and on a CPU the memory of the "
    "process, including its libraries and compilation. State is the minimum: parameters, two "
    "moments and gradients in float32.",
    memory_cases,
    (
        harness.CASE,
        harness.MEMORY,
        ("against PyTorch", lambda row: harness.format_ratio(row.get("memory_ratio"))),
        ("state", state_share),
        harness.TIME,
    ),
    "memory",
    memory_finish,
)
SCALING = Suite(
    "Scaling on one device",
    "Training steps of RoBERTa over the batch size (time should grow linearly once the machine is "
    "fully used) and over the width (the FLOPs per token grow with its square, the time grows more "
    "slowly until the machine reaches its maximum rate).",
    scaling_cases,
    harness.DEFAULT_COLUMNS,
    "curves",
    remarks=scaling_remarks,
    curves=scaling_curves,
)
# -- any architecture at any size, for example to compile it for an absent GPU

HEAD_DIM = 64  # features per attention head
DROPOUT_KEYS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"),
    *("attn_pdrop", "dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)
# Additional configuration fields of an architecture.
ARCHITECTURE_SIZES: dict[str, dict[str, Any]] = {
    "vq_transformer": {
        "num_attention_heads": 1,
        "head_dim": HEAD_DIM,
        "num_codes": 64,
        "block_size": 16,
        "window_size": 16,
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a model and of its batches, for any architecture."""

    width: int
    layers: int
    rows: int
    length: int
    vocab_size: int

    def values(self) -> dict[str, int]:
        """Returns the size under the field names of all configurations."""
        width, heads, positions = self.width, max(1, self.width // HEAD_DIM), self.length + 8
        values = {"width": width, "wide": 4 * width, "layers": self.layers, "heads": heads}
        return {key: value for name, value in values.items() for key in SIZE_KEYS[name]} | {
            "d_kv": width // heads,
            "max_position_embeddings": positions,
            "n_positions": positions,
            "vocab_size": self.vocab_size,
        }


def architectures() -> list[str]:
    """Returns the names of all architectures that an objective of this module can train."""
    from hfseq import plugins

    registry = plugins.load().architectures
    return [name for name in registry if any(task in registry.get(name).heads for task in TASKS)]


def make_sized_config(name: str, size: Size, dropout: float) -> Any:
    """Returns the configuration of an architecture with the given size and dropout rate."""
    from hfseq import plugins

    config_class = plugins.load().architectures.get(name).load_config()
    defaults = config_class().to_dict()
    # Special tokens that exist in a small vocabulary. T5 has no default start token.
    special = {key: i for i, key in enumerate(SPECIAL) if defaults.get(key) is not None}
    special |= {"decoder_start_token_id": 0} if defaults.get("is_encoder_decoder") else {}
    values = (
        size.values()
        | dict.fromkeys(DROPOUT_KEYS, dropout)
        | special
        | ARCHITECTURE_SIZES.get(name, {})
    )
    return config_class(
        **{key: value for key, value in values.items() if key in defaults or key in special}
    )


def prepare_sized(
    name: str, recipe: Any, size: Size, *, dropout: float = 0.0, batches: int = 1, **options: Any
) -> PreparedStep:
    """Builds the training step of an architecture.

    Args:
        name: Name of the architecture.
        recipe: Precision recipe.
        size: Size of the model and of its batches.
        dropout: Value of all dropout rates.
        batches: Number of batches.
        **options: Options of the model class.

    Raises:
        ValueError: The architecture does not support any of the objectives.
    """
    from hfseq import plugins

    spec = plugins.load().architectures.get(name)
    task = next((task for task in TASKS if task in spec.heads), None)
    if task is None:
        raise ValueError(f"{name} does not support any of {', '.join(TASKS)}")
    # A mask ID beyond the vocabulary selects its last ID.
    TRAINING_MODELS.setdefault(name, ModelSpec(name, "", task, (), 0, 0, mask_id=10**9))
    config = make_sized_config(name, size, dropout)
    module = spec.load_head(task)(config, _do_init=False, precision=recipe, **options)
    targets = size.length if TRAINING_MODELS[name].objective == "seq2seq" else 0
    return prepare(name, module, size.rows, size.length, targets, batches)


# -- the GPU kernels of a compiled step and their kinds, from XLA's optimized HLO. "Product" means
# matrix multiplication. A multiplication is an FP8 product only if both operands have an FP8 type.
# If XLA emulates FP8, it rounds the operands to FP8 and converts them back. Such a multiplication
# belongs to the kind OTHER_PRODUCT.

FP8_PRODUCT, OTHER_PRODUCT, ATTENTION = "FP8 products", "other products", "fused attention"
QUANTIZATION, OPTIMIZER = "FP8 casts, maxima, scales", "optimizer, norm, state"
COLLECTIVE, COPY, ELEMENTWISE = "collectives", "copies", "element-wise and sums"
KERNEL_KINDS = (
    FP8_PRODUCT,
    OTHER_PRODUCT,
    ATTENTION,
    QUANTIZATION,
    ELEMENTWISE,
    OPTIMIZER,
    COLLECTIVE,
    COPY,
)

_NAME = re.compile(r"%([\w.\-]+)")
_SIZES = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Instructions that take no time, and instructions that only contain other instructions.
_FREE = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
_CONTAINERS = {"while", "conditional", "call"}
_MOVES = {"copy", "transpose", "copy-start", "slice", "dynamic-slice", "concatenate", "pad"}


def shape_bytes(shape: str) -> int:
    """Returns the bytes of an HLO shape. For a tuple, this is the sum over its elements."""
    from hfseq.training import collectives

    return sum(size for _, size in collectives.array_shapes(shape))


class Program:
    """The GPU kernels of a compiled program.

    Args:
        text: The text of the program, from ``compiled.as_text()``.

    Attributes:
        kernels: Pairs (instruction, kind) of the instructions that run as a kernel. The kind is one
            of ``KERNEL_KINDS``.

    Raises:
        ValueError: The text is not that of a compiled program.
    """

    def __init__(self, text: str):
        from hfseq.training import collectives

        self._collectives, self._has_fp8 = collectives.COLLECTIVE_OPS, "f8e" in text
        self._parts: dict[str, dict[str, Any]] = {}
        entry = None
        for instruction in collectives.instructions(text):
            self._parts.setdefault(instruction.computation, {})[instruction.name] = instruction
            entry = instruction.computation if instruction.entry else entry
        if entry is None:
            raise ValueError("no ENTRY computation: this is not the text of a compiled program")
        self.kernels = [(kernel, self._kernel_kind(kernel)) for kernel in self._executed(entry)]

    def kinds(self) -> dict[str, str]:
        """Returns the kind of each kernel by its name."""
        return {kernel.name: kernel_kind for kernel, kernel_kind in self.kernels}

    def counts(self) -> dict[str, int]:
        """Returns the number of kernels per kind, in the order of ``KERNEL_KINDS``."""
        counter = collections.Counter(self.kinds().values())
        return {
            kernel_kind: counter[kernel_kind]
            for kernel_kind in KERNEL_KINDS
            if counter[kernel_kind]
        }

    def traffic(self) -> list[tuple[Any, str, int]]:
        """Returns each kernel, its kind, and the bytes of its operands and results.

        A kernel moves this number of bytes if it reads and writes each array once. The body of a
        loop counts once. If a kernel only gathers elements from an operand, only the bytes of these
        elements count.
        """
        moved = []
        for kernel, kernel_kind in self.kernels:
            instructions = self._parts[kernel.computation]
            operands = [name for name in _NAME.findall(kernel.attributes) if name in instructions]
            bytes_read = {name: shape_bytes(instructions[name].shape) for name in operands}
            for number, gathered_bytes in self._gathered(kernel).items():
                bytes_read[operands[number]] = min(bytes_read[operands[number]], gathered_bytes)
            moved.append(
                (kernel, kernel_kind, shape_bytes(kernel.shape) + sum(bytes_read.values()))
            )
        return moved

    def _gathered(self, kernel: Any) -> dict[int, int]:
        """Returns how many bytes a fusion gathers from each operand, by the operand's index.

        Operands that the fusion also uses in another way are left out.
        """
        instructions = self._parts.get(kernel.calls[0][1], {}) if kernel.opcode == "fusion" else {}

        def bytes_taken(name: str) -> float:
            """Returns how many bytes of a value are read, or infinity if all of it may be read.

            Bytes that are read from a view of the value, such as a reshaped value, count too.
            """
            total = 0.0
            for instruction in instructions.values():
                operands = _NAME.findall(instruction.attributes)
                if name not in operands:
                    continue
                if instruction.opcode in ("bitcast", "reshape", "slice"):
                    total += bytes_taken(instruction.name)
                elif instruction.opcode in ("gather", "dynamic-slice") and operands[0] == name:
                    total += shape_bytes(instruction.shape)
                else:
                    return math.inf
            return total

        parameters = [
            instruction
            for instruction in instructions.values()
            if instruction.opcode == "parameter"
        ]
        sizes = {
            int(instruction.attributes.split(")")[0]): bytes_taken(instruction.name)
            for instruction in parameters
        }
        return {number: int(size) for number, size in sizes.items() if 0 < size < math.inf}

    def _executed(self, computation: str) -> Iterator[Any]:
        for instruction in self._parts[computation].values():
            if instruction.opcode in _CONTAINERS:
                for _, called in instruction.calls:
                    yield from self._executed(called)
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
                yield instruction

    def _kernel_kind(self, kernel: Any) -> str:
        if kernel.opcode.startswith(self._collectives):
            return COLLECTIVE
        if target := _TARGET.search(kernel.attributes):
            if "matmul" in target[1] or "gemm" in target[1]:
                return self._product(kernel)
            if "fmha" in target[1]:
                return ATTENTION
        inside = self._inside(kernel)
        for instruction in (*inside, kernel):
            if instruction.opcode == "dot":
                return self._product(instruction)
        if self._has_fp8 and self._is_quantization(kernel, inside):
            return QUANTIZATION
        if {kernel.opcode, *(instruction.opcode for instruction in inside)} <= _MOVES | _FREE | {
            "fusion"
        }:
            return COPY
        return ELEMENTWISE if "jvp" in kernel.op_name else OPTIMIZER

    def _inside(self, kernel: Any) -> list[Any]:
        instructions = []
        for _, name in kernel.calls if kernel.opcode in ("fusion", "async-start") else []:
            for instruction in self._parts.get(name, {}).values():
                instructions += [instruction, *self._inside(instruction)]
        return instructions

    def _product(self, product: Any) -> str:
        """Returns the kind of a matrix multiplication, which depends on the operand types."""
        instructions = self._parts[product.computation]
        operands = [
            instructions[name]
            for name in _NAME.findall(product.attributes)[:2]
            if name in instructions
        ]
        fp8 = [bool(re.match(r"\(?f8e", operand.shape)) for operand in operands]
        return FP8_PRODUCT if len(fp8) == 2 and all(fp8) else OTHER_PRODUCT

    def _is_quantization(self, kernel: Any, inside: Sequence[Any]) -> bool:
        """Returns whether a kernel converts to or from FP8, or computes its scales."""
        if "_roll" in kernel.op_name or any(
            "f8e" in instruction.shape for instruction in (kernel, *inside)
        ):
            return True
        is_scalar = all(size in ("", "1") for size in _SIZES.findall(kernel.shape))
        reducers = [
            name
            for instruction in inside
            if instruction.opcode == "reduce"
            for _, name in instruction.calls
        ]
        reducer_opcodes = {
            step.opcode for name in reducers for step in self._parts.get(name, {}).values()
        }
        if "maximum" in reducer_opcodes and (
            is_scalar or any(instruction.opcode == "abs" for instruction in inside)
        ):
            return True
        reduces = any(instruction.opcode == "reduce" for instruction in inside)
        return is_scalar and not reduces and "jvp" in kernel.op_name


# -- steps compiled for an absent H200: training.py h200

BANDWIDTH, PEAK = 4.8e12, 989e12  # bytes per second and half-precision FLOP/s of an H200
# Do not merge matrix multiplications that share an operand (keys and values of all decoder layers),
# so that each of them is counted.
NO_DOT_MERGER = {"xla_disable_hlo_passes": "dot-merger"}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
LOCAL_FLAGS = ("target", "packages", "dump", "threads", "top")


def h200_parser(about: str, **sizes: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags to compile for an absent GPU.

    Args:
        about: Description of the command.
        **sizes: Size flags and their defaults.
    """
    texts = {
        "width": "hidden size",
        "layers": "number of layers per stack",
        "batch_size": "rows per step",
        "length": "tokens per row",
        "vocab_size": "vocabulary size",
    }
    parser = harness.make_parser(about, **{name: (n, texts[name]) for name, n in sizes.items()})
    parser.add_argument(
        "--target", type=Path, required=True, help="description of the GPU (text proto)"
    )
    parser.add_argument(
        "--packages", type=Path, help="folder with jax's CUDA plugin and the CUDA compiler"
    )
    return parser


def read_target(path: Path) -> str:
    """Returns the description of the GPU.

    Raises:
        SystemExit: The file does not exist, or lacks a field without which XLA does not use FP8.
    """
    if not path.is_file():
        raise SystemExit(f"--target {path}: no such file")
    text = path.read_text()
    for field in ("gpu_device_info", "runtime_version"):
        if field not in text:
            raise SystemExit(
                f"--target {path} has no {field}: a GpuTargetConfigProto of a GPU with a CUDA "
                "runtime is required. Without it, XLA would not use FP8"
            )
    return text


def use_packages(folder: Path | None) -> None:
    """Adds the CUDA compiler in ``folder`` to the search paths. Must run before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if folder is None:
        return
    compiler = folder / "nvidia" / "cuda_nvcc"
    missing = [p for p in (folder / "jax_plugins", compiler / "bin" / "ptxas") if not p.exists()]
    if missing:
        raise SystemExit(
            f"--packages {folder} has no {missing[0].relative_to(folder)}. Install it with\n"
            f"  pip install --no-deps --target {folder} jax-cuda12-plugin==VERSION "
            "jax-cuda12-pjrt==VERSION nvidia-cuda-nvcc-cu12\n"
            "where VERSION is the version of the installed jax"
        )
    sys.path.append(str(folder))
    os.environ["PATH"] = f"{compiler / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    flags = f"--xla_gpu_cuda_data_dir={compiler}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def target_sharding(options: argparse.Namespace) -> Any:
    """Returns a sharding on the GPU that ``--target`` describes."""
    target = read_target(options.target)
    use_packages(options.packages)
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("data",)), PartitionSpec())


def compile_for(gpu: Any, prepared: PreparedStep, options: dict[str, Any]) -> Any:
    """Compiles a step for an absent GPU and returns the program.

    Args:
        gpu: Sharding on this GPU, from :func:`target_sharding`.
        prepared: The step.
        options: Compiler options.
    """
    import jax

    from hfseq.training import aot

    def on_gpu(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=gpu)

    abstract = jax.eval_shape(prepared.random_state, jax.random.key(0))
    arguments = jax.tree.map(on_gpu, (abstract, prepared.batches[0]))
    with aot.compiling_for(gpu.mesh.devices.flat[0]):
        traced = jax.jit(prepared.step, donate_argnums=0).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options)


def h200_command(
    script: str, parse: Callable[[Sequence[str]], argparse.Namespace], options: argparse.Namespace
) -> str:
    """Returns the command that repeats a compilation, without paths on this machine."""
    arguments = ["--target", options.target.name, "--packages", "DIR"]
    defaults = parse(["--target", "x"])
    for flag, value in vars(options).items():
        if flag not in (*LOCAL_FLAGS, "output", "models", "recipes") and value != getattr(
            defaults, flag
        ):
            words = value if isinstance(value, list) else [] if value is True else [value]
            arguments += [f"--{flag}", *map(str, words)]
    return harness.command(script, arguments)


def h200_setup(
    name: str,
    script: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    arguments: Sequence[str],
) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """Returns the options, the sharding of the GPU, and the first entries of the result."""
    options = parse(arguments)
    gpu = target_sharding(options)
    return (
        options,
        gpu,
        {
            "benchmark": name,
            "command": h200_command(script, parse, options),
            "machine": harness.machine_info(),
            "options": harness.options_dict(options, LOCAL_FLAGS),
            "target": gpu.mesh.devices.flat[0].device_kind,
            "problems": [],
        },
    )


def parse_h200(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of the subcommand h200."""
    parser = h200_parser(
        "Compiles training steps for an absent H200 and estimates their time.\n\n--target is XLA's "
        "description of the GPU (GpuTargetConfigProto as text). --packages is the same\nas for "
        "fp8.py h200. The table has two lower bounds of the time of a step. The first is the "
        "number\nof bytes of the operands and results of all kernels, divided by the bandwidth of "
        "the GPU.\nThe second is the number of FLOPs of the matrix multiplications, divided by the "
        "peak rate\nof the GPU. Attention uses the default implementation for GPUs.",
        width=768,
        layers=2,
        vocab_size=50257,
    )
    default = ["roberta:32x512", "gpt2:16x1024", "t5:16x512", "bart:16x512", "llama:8x1024"]
    parser.add_argument(
        "--steps", nargs="+", default=default, help="training steps, as MODEL:ROWSxLENGTH"
    )
    parser.add_argument(
        "--precision", default="bfloat16", help="precision recipe (default: bfloat16)"
    )
    parser.add_argument("--top", type=int, default=0, help="number of largest kernels to print")
    options = parser.parse_args(arguments)
    for step in options.steps:
        if not re.fullmatch(r"\w+:[1-9]\d*x[1-9]\d*", step):
            parser.error(f"--steps {step}: expected MODEL:ROWSxLENGTH, e.g. gpt2:16x1024")
    return options


def h200_row(step: str, options: argparse.Namespace, gpu: Any) -> dict[str, Any]:
    """Compiles a step and returns its record."""
    from hfseq.training import throughput

    name, _, batch = step.partition(":")
    rows, length = map(int, batch.split("x"))
    size = Size(options.width, options.layers, rows, length, options.vocab_size)
    prepared = prepare_sized(name, options.precision, size)
    program = compile_for(gpu, prepared, CUBLAS)
    traffic = Program(program.as_text()).traffic()
    moved: collections.Counter[str] = collections.Counter()
    for _, kernel_kind, count in traffic:
        moved[kernel_kind] += count
    for kernel, kernel_kind, count in sorted(traffic, key=lambda each: -each[2])[: options.top]:
        description = f"{kernel_kind:24s} {kernel.shape[:64]:64s} {kernel.op_name}"
        harness.log_progress(f"{count / 1e6:9.1f} MB  {description}")
    return {
        "name": name,
        "group": batch,
        "status": "ok",
        "kernels": len(traffic),
        "bytes": dict(moved),
        "temporary": program.memory_analysis().temp_size_in_bytes,
        "moved": sum(moved.values()),
        "flops": throughput.run_flops(prepared.module, prepared.objective, rows, length),
    }


def h200_section(result: dict[str, Any]) -> str:
    """Returns the section of benchmarks/tables.md for a result."""
    kinds = (OTHER_PRODUCT, ELEMENTWISE, OPTIMIZER, COPY)
    columns = [
        "",
        "batch",
        "kernels",
        *kinds,
        "moved",
        "lower bound by bytes",
        "lower bound by products",
        "temporary",
    ]
    lines = [
        [
            row["name"],
            row["group"],
            str(row["kernels"]),
            *(f"{row['bytes'].get(kernel_kind, 0) / 1e9:.2f} GB" for kernel_kind in kinds),
            f"{row['moved'] / 1e9:.1f} GB",
            f"{row['moved'] / BANDWIDTH * 1e3:.2f} ms",
            f"{row['flops'] / PEAK * 1e3:.2f} ms",
            f"{row['temporary'] / 1e9:.2f} GB",
        ]
        for row in result["rows"]
    ]
    size, jax = result["options"], result["machine"]["versions"].get("jax")
    return (
        f"{harness.markdown(columns, lines)}\n\nWidth {size['width']}, {size['layers']} layers, "
        f"vocabulary {size['vocab_size']}, {size['precision']}, no dropout; compiled for "
        f"{result['target']} without a GPU (jax {jax}), products by cuBLAS. The lower bounds "
        f"assume 4.8 TB/s and 989 TFLOP/s.\n\n`{result['command']}`"
    )


def run_h200(arguments: Sequence[str]) -> int:
    """Runs the subcommand h200 and returns the exit code."""
    options, gpu, result = h200_setup("h200_step", "training.py h200", parse_h200, arguments)
    result["rows"] = [h200_row(step, options, gpu) for step in options.steps]
    return harness.publish(result, h200_section(result), options.output, failed=False)


if __name__ == "__main__":
    sys.exit(harness.dispatch({"": run_steps, "h200": run_h200}, __doc__, sys.argv[1:]))

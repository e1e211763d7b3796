"""Training steps of one model beside its rivals; what they need; steps compiled for an H200.

    python scripts/benchmarks/training.py --model roberta       # a table of benchmarks/tables.md
    python scripts/benchmarks/training.py --model gpt2 --batch_size 4 --length 512
    python scripts/benchmarks/training.py --model t5 --target_length 114
    python scripts/benchmarks/training.py --model bart --layers 2 --rounds 3 --output try
    python scripts/benchmarks/training.py h200 --target hfseq/training/targets/h200.txtpb

Both sides train with AdamW from the same weights, on the same batches and masks; PyTorch gets
labels of full length, as its data collators make them. It runs from a checkout, on the CPU or on an
NVIDIA GPU, with what the Python has: rows of packages that are missing say so. First the losses of
three steps without dropout must agree. The suites train, memory and scaling of run.py are here too.
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
from harness import Case, Contestant, Options, Rows, Running, Suite

# -- the models: everything that both sides must agree on

MASKED, BATCHES = 0.15, 4
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
#: What a size may name for every architecture, and what their configurations call it.
NAMES = {
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
class Subject:
    """A model to measure: ``head`` ends the names of the Auto classes of both sides.

    ``config`` is a configuration class of transformers, or "module:class" of one of hfseq's own;
    PyTorch then takes the stock twin that hfseq stores it as. ``rates`` are the configuration's
    names of dropout rates; ``size`` makes its defaults those of the published model.
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
_WMT = "hfseq_plugins.wmt_transformer.configuration:WMTTransformerConfig"
SUBJECTS = {
    "roberta": Subject("RoBERTa-base", "RobertaConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128,
                       mask_id=50264, size=_ROBERTA),
    "bert": Subject("BERT-base", "BertConfig", "ForMaskedLM", _ENCODER_RATES, 8, 128, mask_id=103),
    "modernbert": Subject("ModernBERT-base", "ModernBertConfig", "ForMaskedLM",
                          ("attention_dropout", "mlp_dropout", "embedding_dropout"), 8, 128,
                          mask_id=50284),
    "gpt2": Subject("GPT-2 small", "GPT2Config", "ForCausalLM",
                    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 4, 512),
    # 114 targets are what span corruption makes of rows whose encoder input has 512 tokens.
    "t5": Subject("T5-small", "T5Config", "ForSeq2SeqLM", ("dropout_rate",), 4, 512, 114,
                  size={"decoder_start_token_id": 0}),
    "bart": Subject("BART-base", "BartConfig", "ForSeq2SeqLM", _RATES, 4, 256, 256, size=_BART),
    "wmt": Subject("WMT Transformer base", _WMT, "ForSeq2SeqLM", _RATES, 16, 64, 64),
}  # fmt: skip
#: Models of which the forward pass alone is measured, most of them two layers deep.
FORWARD = {
    "encoder": Subject("BERT-base", "BertConfig", "", (), 0, 128),
    "clip_text": Subject(
        "CLIP-text-base, 2 layers", "CLIPTextConfig", "", (), 0, 77, size={"num_hidden_layers": 2}
    ),
    "vit": Subject(
        "ViT-base, 2 layers", "ViTConfig", "", (), 0, 197, size={"num_hidden_layers": 2}
    ),
    "distilbert": Subject(
        "DistilBERT, 2 layers", "DistilBertConfig", "", (), 0, 128, size={"n_layers": 2}
    ),
    "opt": Subject(
        "OPT-125m, 2 layers", "OPTConfig", "", (), 0, 128, size={"num_hidden_layers": 2}
    ),
    "llama": Subject("Llama-1B-like, 2 layers", "LlamaConfig", "", (), 0, 128, size=_LLAMA),
}
#: The size of the opus-mt models; the last token is padding and begins targets.
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
#: What only writes: thirty seconds of sound are 1,500 places of the encoder.
WRITING = {
    "whisper": Subject(
        "Whisper tiny",
        "WhisperConfig",
        "ForSpeechSeq2Seq",
        (),
        0,
        1500,
        size={"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}
#: What the pipelines read texts with, and what translates.
READING = {
    "marian": Subject("Marian-base", "MarianConfig", "ForSeq2SeqLM", (), 0, 0, size=_MARIAN),
    "classifier": Subject("BERT-base", "BertConfig", "ForSequenceClassification", (), 0, 512),
    "minilm": Subject(
        "MiniLM-L6",
        "BertConfig",
        "",
        (),
        0,
        256,
        size={"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
}


def subject_of(name: str) -> Subject:
    return (SUBJECTS | FORWARD | WRITING | READING)[name]


def configuration(name: str, size: Mapping[str, Any], dropout: float | None = None) -> Any:
    """Return the configuration of a subject.

    ``size`` changes it: what ``NAMES`` has is set wherever it is there ("layers": in all stacks),
    other names are the configuration's own. Without ``dropout`` its own rates stay.
    """
    subject = subject_of(name)
    module, _, kind = subject.config.rpartition(":")
    config = getattr(importlib.import_module(module or "transformers"), kind)(**subject.size)
    changes = {
        key: size[name]
        for name, keys in NAMES.items()
        if name in size
        for key in keys
        if hasattr(config, key)
    }
    changes |= {key: value for key, value in size.items() if key not in NAMES}
    changes |= {} if dropout is None else dict.fromkeys(subject.rates, dropout)
    absent = [key for key in changes if not hasattr(config, key)]
    if absent:
        raise ValueError(f"{type(config).__name__} has no {', '.join(absent)}")
    for key, value in changes.items():
        setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for key in SPECIAL:  # a smaller vocabulary keeps its special tokens
        if getattr(config, key, None) is not None:
            setattr(config, key, min(getattr(config, key), config.vocab_size - 1))
    return config


def torch_class(name: str) -> Any:
    import transformers

    return getattr(transformers, f"AutoModel{subject_of(name).head}")


def hfseq_class(name: str) -> Any:
    import hfseq

    return getattr(hfseq, f"FlaxAutoModel{subject_of(name).head}")


def save_weights(folder: str, model: str, size: dict[str, Any]) -> Running:
    absent = Contestant("", "", "", requires=harness.HFSEQ).missing()
    made = (torch_class if absent else hfseq_class)(model).from_config(configuration(model, size))
    made.save_pretrained(folder)
    return Running(lambda: {}, harness.host_peak_bytes)


def load_torch(model: str, weights: str, config: Any, dtype: str = "float32") -> tuple[Any, str]:
    """Return PyTorch's model with its default attention (sdpa), and the device it is on."""
    import torch

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    subject = subject_of(model)
    # A model of hfseq's own is stored as a stock twin, whose configuration lies beside the weights.
    rates = {rate: getattr(config, rate) for rate in subject.rates}
    given = rates if ":" in subject.config else {"config": config}
    module = torch_class(model).from_pretrained(weights, **given)
    return module.to(device=device, dtype=getattr(torch, dtype)), device


def torch_facts(module: Any) -> dict[str, Any]:
    return {
        "device": harness.torch_device(),
        "attention": module.config._attn_implementation,
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def tree_bytes(tree: Any) -> int:
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def jax_facts(params: Any) -> dict[str, Any]:
    import jax

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {"device": harness.jax_device(), "parameters": count}


def mask_id(name: str, config: Any) -> int:
    """Return the id that hides tokens; the last one where the vocabulary was made smaller."""
    return min(SUBJECTS[name].mask_id, config.vocab_size - 1)


class Stub(SimpleNamespace):
    """What masking asks of a tokenizer: its size, its mask and its special tokens."""

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
    """Return hfseq's objective; that of encoder-decoders takes its batches as they are."""
    from hfseq.objectives.clm import CausalLM
    from hfseq.objectives.mlm import MaskedLM
    from hfseq.objectives.seq2seq import Seq2SeqLM

    class Ready(Seq2SeqLM):
        def collate(self, rows: Any, random: Any, groups: int) -> Any:
            return {key: value for key, value in rows.items() if key != "valid"}

        def target_length(self, length: int) -> int:
            return targets

    flags = SimpleNamespace(
        mlm_probability=MASKED,
        whole_word_masking=False,
        train_ref_file=None,
        validation_ref_file=None,
        cross_documents=False,
    )
    kind = {"mlm": MaskedLM, "clm": CausalLM, "seq2seq": Ready}[SUBJECTS[name].objective]
    return kind(flags, Stub(name, config), config)


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


def torch_inputs(name: str, config: Any, batch: dict[str, Any], random: Any) -> dict[str, Any]:
    """Return the keyword arguments of PyTorch's class for the same batch, as arrays.

    Rows are full, so no mask is given: attention may take its fastest path.
    """
    import numpy as np

    from hfseq.objectives.mlm import mask_tokens

    kind = SUBJECTS[name].objective
    if kind == "clm":
        return {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    if kind == "seq2seq":
        return {key: batch[key] for key in ("input_ids", "decoder_input_ids", "labels")}
    special = np.zeros(config.vocab_size, bool)
    special[Stub(name, config).all_special_ids] = True
    ids, labels = mask_tokens(
        batch,
        random,
        mask_id=mask_id(name, config),
        vocab_size=config.vocab_size,
        special=special,
        probability=MASKED,
    )
    return {"input_ids": ids, "labels": labels}


# -- the step of the training loop


@dataclasses.dataclass
class Prepared:
    """A training step of the loop, and what it is called with; nothing lies on a device yet."""

    module: Any
    objective: Any
    optimizer: Any
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[dict[str, Any]]

    def make_state(self, params: Any, extra: Any) -> Any:
        """Return the state of step 0 with ``params``, to be traced."""
        from hfseq.training import state

        names = tuple(sorted({"loss", "count", *self.objective.sums}))
        return state.make_state(params, self.optimizer, extra, names)

    def random_state(self, rng: Any) -> Any:
        """Return the state of step 0 with random parameters, to be traced."""
        return self.make_state(self.module.init_weights(rng), self.module.init_extra(rng))


def make_optimizer() -> Any:
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
) -> Prepared:
    """Build the step that the loop compiles (objective, AdamW), and batches on the host.

    A row has so many ``documents``, and as the loop does, the objective knows it.
    """
    import numpy as np

    from hfseq.nn.context import RowGuarantees as Known
    from hfseq.training import state

    objective, optimizer = make_objective(name, module.config, targets), make_optimizer()
    objective.prepare(module)
    if objective.row_guarantees is not None:
        objective.row_guarantees = Known(max_runs=documents)
    made = []
    for number in range(batches):
        batch, random = host_batch(name, module.config, number, rows, length, targets)
        batch["segment_ids"] += np.arange(length, dtype=np.int32) * documents // length
        collated = objective.collate(batch, random, 1) | {"row": np.arange(rows, dtype=np.int32)}
        made.append({key: np.asarray(leaf)[None] for key, leaf in collated.items()})
    whole = state.make_step(objective, module, optimizer, 0, False)

    def step(current: Any, batch: Any) -> tuple[Any, Any]:
        return whole(current, {}, batch)

    return Prepared(module, objective, optimizer, step, made)


def stepping(program: Callable[..., Any], current: Any, batches: Sequence[Any]) -> Any:
    """Return a function that takes the next step and waits for its loss."""
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
) -> Running:
    """The step that the training loop compiles, with its objective and optimizer.

    ``remat`` recomputes the layers in the backward pass, and scans them: unrolled, XLA for CPUs
    recomputes them all before it needs them. ``attention`` is an implementation, ``documents`` of
    a row do not see each other.
    """
    import jax

    from hfseq.nn import precision
    from hfseq.training import throughput

    config = configuration(model, size, dropout)
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
    make = jax.jit(lambda p: prepared.make_state(p, module.extra), donate_argnums=0)
    current = make(loaded.params)
    del loaded
    facts = jax_facts(current.params)
    flops = throughput.run_flops(module, prepared.objective, rows, length)
    facts |= {"model_flops": flops, "flops": flops}
    facts["bytes"] = training_bytes(jax_shapes(current.params))
    placed = jax.device_put(prepared.batches)
    step: Any = jax.jit(prepared.step, donate_argnums=0)
    if jax.default_backend() != "cpu":  # whose memory is another matter than what XLA plans
        step = step.lower(current, placed[0]).compile()
        facts["planned_bytes"] = harness.planned_bytes(step)["compiled_bytes"]
    run = stepping(step, current, placed)
    return Running(run, harness.jax_peak_bytes, facts)


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
) -> Running:
    """PyTorch's class with its default attention and the Trainer's fused AdamW.

    ``remat`` recomputes the layers in the backward pass.
    """
    import torch

    config = configuration(model, size, dropout)
    module, device = load_torch(model, weights, config)
    module.train()
    if remat:
        modern = getattr(module, "activation_checkpointing_enable", None)
        (modern or module.gradient_checkpointing_enable)()
    plain = [p for p in module.parameters() if p.ndim < 2]
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    forward = torch.compile(module) if compiled else module
    cached = {} if SUBJECTS[model].objective == "mlm" else {"use_cache": False}
    batches = []
    for number in range(BATCHES):
        batch, random = host_batch(model, config, number, rows, length, targets)
        inputs = torch_inputs(model, config, batch, random)
        batches.append({k: torch.from_numpy(v).long().to(device) for k, v in inputs.items()})
    turns = itertools.cycle(batches)

    def run() -> dict[str, float]:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(**next(turns), **cached).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        harness.torch_wait()
        return {"loss": loss.item()}

    facts = torch_facts(module) | {"bytes": training_bytes(torch_shapes(module))}
    return Running(run, harness.torch_peak_bytes, facts)


FACTORIES = {"torch": "training:torch_step", "hfseq": "training:hfseq_step"}

# -- the least that a computation needs, from shapes alone and the same for every contestant:
# nothing is recomputed, no activation leaves the caches, every weight is read once where it is
# used. A share of the limit can therefore be low for good reasons, but never too high.

Shapes = Mapping[str, tuple[int, ...]]
ITEMSIZE = {"float32": 4, "bfloat16": 2}
#: Bytes a parameter of a training step: AdamW reads four arrays of float32 and writes three, the
#: gradient is written, and forward and backward pass read the weights.
TRAINING_BYTES = 4 * (4 + 3 + 1 + 2)
_TABLES = ("embed", "wpe", "wte", "shared", "relative_attention_bias")


def torch_shapes(module: Any) -> Shapes:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def jax_shapes(params: Any) -> Shapes:
    from hfseq.nn import trees

    return {".".join(map(str, path)): leaf.shape for path, leaf in trees.flatten(params).items()}


def training_bytes(shapes: Shapes) -> float:
    return float(TRAINING_BYTES * sum(math.prod(shape) for shape in shapes.values()))


def matrices(shapes: Shapes, vocab: int, side: str | None = None) -> int:
    """Count the weights that multiply every token: no tables, no biases, no norms.

    ``side`` takes those of the encoder or decoder alone.
    """
    return sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if len(shape) >= 2
        and vocab not in shape
        and not any(t in name for t in _TABLES)
        and (side is None or ("decoder" in name) == (side == "decoder"))
    )


def width_of(config: Any) -> int:
    return getattr(config, "hidden_size", None) or config.d_model


def forward_work(
    shapes: Shapes, config: Any, rows: int, length: int, itemsize: int
) -> dict[str, float]:
    attention = 4.0 * config.num_hidden_layers * width_of(config) * length
    weights = matrices(shapes, getattr(config, "vocab_size", 0))
    flops = rows * length * (2.0 * weights + attention)
    return {"flops": flops, "bytes": float(itemsize * weights)}


def generation_work(
    shapes: Shapes, config: Any, rows: int, beams: int, prompt: int, new: int, itemsize: int
) -> dict[str, float]:
    """Return FLOPs and bytes of generating ``new`` tokens in each of ``rows``.

    Each new token reads the decoder's matrices, the head's table and what is cached: its own keys
    and values so far, and those of the source.
    """
    width, layers, vocab = width_of(config), config.num_hidden_layers, config.vocab_size
    two_sides = bool(config.is_encoder_decoder)
    decoder = matrices(shapes, vocab, "decoder" if two_sides else None) + vocab * width
    encoder = matrices(shapes, vocab, "encoder") if two_sides else 0
    before = rows * prompt * 2.0 * (encoder if two_sides else decoder - vocab * width)
    tokens = rows * beams * new
    seen = (0 if two_sides else prompt) + new / 2
    cached = 2 * layers * width * rows * (beams * seen + (prompt if two_sides else 0))
    attended = 4.0 * layers * width * (seen + (prompt if two_sides else 0))
    return {
        "flops": before + tokens * (2.0 * decoder + attended),
        "bytes": float(itemsize * (encoder + new * (decoder + cached))),
    }


# -- one model: training.py

# Large allocations of glibc in pages of 2 MB: a step then faults in hundreds of pages, not 300,000.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Where the first losses of two implementations may differ, relatively: sums in another order, and
# in bfloat16 rounding at other places.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3}


def parse(given: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__,
        sizes=True,
        batch_size=(int, "rows a step"),
        length=(int, "tokens a row (of the encoder)"),
        target_length=(int, "tokens a row of the decoder"),
        rounds=(15, "timed steps of each contestant"),
    )
    parser.add_argument("--model", default="roberta", choices=list(SUBJECTS))
    parser.add_argument(
        "--dropout", type=float, help="all rates; those of the configuration if none"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--huge_pages", action="store_true", help="both with 2 MB pages, too")
    options = parser.parse_args(given)
    subject = SUBJECTS[options.model]
    if options.target_length and not subject.target_length:
        parser.error(f"--target_length is for encoder-decoders; {options.model} has no decoder")
    for name, own in (
        ("batch_size", subject.batch),
        ("length", subject.length),
        ("target_length", subject.target_length),
    ):
        setattr(options, name, getattr(options, name) or own)
    return options


def step_cases(options: argparse.Namespace, dropout: float | None, **turns: int) -> list[Case]:
    cases, size = [], harness.size_of(options)
    for dtype in options.dtypes:
        case = case_of(
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
            dataclasses.replace(one, name=f"{one.name}, huge pages", environment=HUGE_PAGES)
            for one in (torch, ours)
        ]
        members = [torch, *([compiled] if options.compile else []), ours]
        members += paged if options.huge_pages else []
        cases.append(dataclasses.replace(case, contestants=tuple(members)))
    return cases


def loss_problems(rows: Rows, tolerance: Mapping[str, float]) -> list[str]:
    """Name the contestants whose losses are (relatively) far from those of their case's first."""
    problems = []
    for row, base in harness.beside_first(rows, "values"):
        allowed, both = tolerance[row["dtype"]], zip(row["values"], base["values"], strict=False)
        pairs = [(a["loss"], b["loss"]) for a, b in both]
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if row is not base and not worst <= allowed:
            problems.append(
                f"{row['case']}: the losses of {row['name']} and {base['name']} differ by "
                f"{worst:.1e} (allowed {allowed:.0e}): {pairs}"
            )
    return problems


def steps(given: list[str]) -> int:
    options = parse(given)
    result = harness.head(f"train_{options.model}", "training.py", given, options)
    with tempfile.TemporaryDirectory() as folder:
        runner, problems = harness.Runner(result["threads"], Path(folder)), list[str]()
        if not options.no_check:
            checked = runner.suite("check", step_cases(options, 0.0, rounds=3, warmup=0))
            problems = loss_problems(checked, TOLERANCE)
        runner.limits = harness.matmul_rates(options.dtypes, runner.threads)
        turns = {"rounds": options.rounds, "warmup": 2, "settle": 1}
        rows = runner.suite("train", step_cases(options, options.dropout, **turns))
    targets = f" to {options.target_length}" if options.target_length else ""
    dropout = "as configured" if options.dropout is None else f"{options.dropout:g}"
    result |= {
        "limits": runner.limits,
        "rows": rows,
        "problems": problems,
        "rounds": f"{options.rounds} alternating rounds, an untimed step before each",
        "remarks": [
            f"{SUBJECTS[options.model].title}{harness.size_text(result['options'])}, batch "
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
SHAPES = (
    ("roberta", "RoBERTa-base", 128, 0, 8, 128),
    ("roberta", "RoBERTa-base", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 1024, 0, 1, 16),
    ("t5", "T5-small", 512, 114, 2, 64),
    ("bart", "BART-base", 256, 256, 2, 32),
    ("wmt", "WMT base", 64, 64, 16, 256),
)
#: The rate of attention weights: jax has no flash attention that drops them, PyTorch has.
ATTENTION_RATES = {
    "roberta": "attention_probs_dropout_prob",
    "gpt2": "attn_pdrop",
    "bart": "attention_dropout",
    "wmt": "attention_dropout",
}
#: On a CPU bfloat16 is measured for the rows that the aims name; --dtypes measures all.
BFLOAT16_ON_CPU = ("roberta 128", "gpt2 512")


def case_of(
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
    return harness.compared(options, FACTORIES, settings, name, amount, peers, **turns)


def shape_name(title: str, rows: int, length: int, targets: int, dtype: str) -> str:
    return f"{title}, {rows} x {length}" + (f" to {targets}" if targets else "") + f", {dtype}"


def train_cases(options: Options) -> list[Case]:
    turns = {
        "rounds": options.choose(3, 20, 3, 1),
        "warmup": options.choose(0, 3, 1, 1),
        "settle": options.choose(1, 1, 0, 0),
    }
    cases = []
    for model, title, full, targets, cpu, gpu in SHAPES:
        rows, parts = options.choose(cpu, gpu, 2, 2), options.choose(1, 1, 4, 32)
        # Two rows of fewer than a dozen tokens may have none that is masked: PyTorch's loss is nan.
        length, targets = max(full // parts, 12), targets // parts
        both = ("float32", "bfloat16") if f"{model} {full}" in BFLOAT16_ON_CPU else ("float32",)
        for dtype in options.types(*options.choose(both, (), (), ())):
            name = shape_name(title, rows, length, targets, dtype)
            case = case_of(options, model, name, rows, length, targets, dtype, **turns)
            cases.append(case)
            if options.gpu and dtype == "bfloat16" and model in ATTENTION_RATES:
                # Without dropout of attention weights, so that both sides can use flash.
                name = f"{name}, attention weights kept"
                changes = {"size": options.size(model) | {ATTENTION_RATES[model]: 0.0}}
                kept = [
                    dataclasses.replace(c, group=name, settings=c.settings | changes)
                    for c in case.contestants
                ]
                fused = [
                    dataclasses.replace(
                        c, name=f"{c.name}, cuDNN", settings=c.settings | {"attention": "cudnn"}
                    )
                    for c in kept
                    if c.name == "hfseq"
                ]
                cases.append(dataclasses.replace(case, name=name, contestants=(*kept, *fused)))
    return cases


def memory_cases(options: Options) -> list[Case]:
    cases, dtype = [], options.types()[0]
    for model, title, length, targets, cpu in (
        ("roberta", "RoBERTa-base", 512, 0, 8),
        ("gpt2", "GPT-2 small", 512, 0, 4),
        ("t5", "T5-small", 512, 114, 8),
        ("bart", "BART-base", 256, 256, 8),
    ):
        if not options.gpu and model not in ("roberta", "bart"):
            continue  # the table of training steps has the peaks of the others
        rows = options.choose(cpu, 32 if model == "gpt2" else 64, 2, 2)
        length = options.choose(length, length, 128, 12)
        targets = targets and options.choose(targets, targets, 64, 6)
        for remat in (False, True):
            name = shape_name(title, rows, length, targets, dtype) + (", recomputed" * remat)
            case = case_of(
                options,
                model,
                name,
                rows,
                length,
                targets,
                dtype,
                options.eager,
                remat=remat,
                rounds=1,
                warmup=1,
            )
            # One after the other: each has the whole memory to itself.
            members = case.contestants
            alone = tuple(dataclasses.replace(c, group=f"{name}, {c.name}") for c in members)
            cases.append(dataclasses.replace(case, contestants=alone))
    return cases


def memory_finish(rows: Rows) -> None:
    for row in rows:
        base = next((r for r in rows if r["case"] == row["case"] and r["name"] == "PyTorch"), None)
        if base and base["peak_memory_gb"] and row["peak_memory_gb"]:
            row["memory_ratio"] = row["peak_memory_gb"] / base["peak_memory_gb"]


def state_share(row: dict[str, Any]) -> str:
    """What must be there of the memory: parameters, two moments and gradients in float32."""
    count = row["facts"].get("parameters")
    if not count or not row["peak_memory_gb"]:
        return harness.ABSENT
    state = 16 * count / harness.GB
    return f"{state:.2f} GB, {state / row['peak_memory_gb']:.0%}"


def scaling_cases(options: Options) -> list[Case]:
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
            case_of(
                options,
                "roberta",
                f"{over} {value}",
                rows,
                length,
                0,
                options.types()[0],
                ("hfseq",),
                size,
                facts={"over": over, "value": value},
                **turns,
            )
        )
    return cases


def scaling_points(rows: Rows, over: str) -> dict[str, list[tuple[float, float]]]:
    """Return by contestant (batch, seconds a step), or (width, seconds a token)."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["case_facts"].get("over") == over and row["median_seconds"]:
            seconds = row["median_seconds"] / (row["amount"] if over == "width" else 1)
            points.setdefault(row["name"], []).append((row["case_facts"]["value"], seconds))
    return points


def exponent(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line through the logarithms: 1 is linear growth."""
    logarithms = [(math.log(x), math.log(y)) for x, y in pairs]
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


def scaling_remarks(rows: Rows) -> list[str]:
    remarks = []
    for over, what in (
        ("batch", "time of a step over the batch (1 is linear)"),
        ("width", "time of a token over the width (FLOPs alone would give up to 2)"),
    ):
        told = []
        for name, pairs in scaling_points(rows, over).items():
            last = f" ({exponent(pairs[-2:]):.2f} between the last two)" if len(pairs) > 2 else ""
            told += [f"{name} {exponent(pairs):.2f}{last}"] if len(pairs) > 1 else []
        remarks += [f"Exponent of the {what}: {', '.join(told)}."] if told else []
    return remarks


def scaling_curves(rows: Rows) -> list[dict[str, Any]]:
    parts = []
    for over, x, y, scale in (
        ("batch", "rows", "seconds a step", 1.0),
        ("width", "width", "microseconds a token", 1e6),
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
    "The step that the training loop compiles (objective, AdamW, gradient norm, donated state) "
    "beside PyTorch's class with sdpa attention and fused AdamW, eager and with `torch.compile`; "
    "bfloat16 is `torch.autocast` there. Same weights, batches, masks and dropout rates; losses "
    "must be within 5 % (`training.py` compares them to 2e-5, without dropout).",
    train_cases,
    harness.DEFAULT,
    "ratio",
    # Dropout differs.
    problems=lambda rows: loss_problems(rows, dict.fromkeys(TOLERANCE, 0.05)),
)
MEMORY = Suite(
    "Peak memory",
    "The most memory that a training process ever held: on a GPU that of the device, on a CPU that "
    "of the process, its libraries and compilation included. State is what must be there: "
    "parameters, two moments and gradients in float32.",
    memory_cases,
    (
        harness.CASE,
        harness.MEMORY,
        ("against PyTorch", lambda row: harness.times(row.get("memory_ratio"))),
        ("state", state_share),
        harness.TIME,
    ),
    "memory",
    memory_finish,
)
SCALING = Suite(
    "Scaling on one device",
    "Training steps of RoBERTa over the batch (time should grow linearly from where the machine is "
    "full) and over the width (the FLOPs of a token grow with its square, its time less so until "
    "the machine's rate is reached).",
    scaling_cases,
    harness.DEFAULT,
    "curves",
    remarks=scaling_remarks,
    curves=scaling_curves,
)
# -- any architecture at any size, e.g. to be compiled for a GPU that is not here

HEAD = 64  # features of a head of attention
RATES = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"),
    *("attn_pdrop", "dropout", "attention_dropout", "activation_dropout", "dropout_rate"),
)
# What a size does not say of an architecture.
OWN: dict[str, dict[str, Any]] = {
    "vq_transformer": {
        "num_attention_heads": 1,
        "head_dim": HEAD,
        "num_codes": 64,
        "block_size": 16,
        "window_size": 16,
    },
}


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    layers: int
    rows: int
    length: int
    vocab_size: int

    def values(self) -> dict[str, int]:
        """Return it under the names that the configurations have."""
        width, heads, places = self.width, max(1, self.width // HEAD), self.length + 8
        values = {"width": width, "wide": 4 * width, "layers": self.layers, "heads": heads}
        return {key: value for name, value in values.items() for key in NAMES[name]} | {
            "d_kv": width // heads,
            "max_position_embeddings": places,
            "n_positions": places,
            "vocab_size": self.vocab_size,
        }


def architectures() -> list[str]:
    from hfseq import plugins

    found = plugins.load().architectures
    return [name for name in found if any(task in found.get(name).heads for task in TASKS)]


def sized_configuration(name: str, size: Size, dropout: float) -> Any:
    from hfseq import plugins

    kind = plugins.load().architectures.get(name).load_config()
    own = kind().to_dict()
    # Identifiers of special tokens that a small vocabulary has; T5 names no start of its own.
    special = {key: i for i, key in enumerate(SPECIAL) if own.get(key) is not None}
    special |= {"decoder_start_token_id": 0} if own.get("is_encoder_decoder") else {}
    given = size.values() | dict.fromkeys(RATES, dropout) | special | OWN.get(name, {})
    return kind(**{key: value for key, value in given.items() if key in own or key in special})


def prepare_sized(
    name: str, recipe: Any, size: Size, *, dropout: float = 0.0, batches: int = 1, **options: Any
) -> Prepared:
    """Build the step of architecture ``name`` under a recipe; ``options`` go to the model class.

    ValueError for an architecture that no objective here trains.
    """
    from hfseq import plugins

    spec = plugins.load().architectures.get(name)
    task = next((task for task in TASKS if task in spec.heads), None)
    if task is None:
        raise ValueError(f"{name} has none of {', '.join(TASKS)}")
    # The mask is the last id of the vocabulary, whatever its size.
    SUBJECTS.setdefault(name, Subject(name, "", task, (), 0, 0, mask_id=10**9))
    config = sized_configuration(name, size, dropout)
    module = spec.load_head(task)(config, _do_init=False, precision=recipe, **options)
    targets = size.length if SUBJECTS[name].objective == "seq2seq" else 0
    return prepare(name, module, size.rows, size.length, targets, batches)


# -- what a compiled step is made of: each kernel of XLA's optimised HLO and its kind. A product is
# an FP8 one only if both of its operands are of an FP8 type where it is computed; one whose
# operands were rounded to FP8 and widened again (emulated) is counted with the others.

FP8_PRODUCT, PRODUCT, ATTENTION = "FP8 products", "other products", "fused attention"
QUANTISATION, OPTIMIZER = "FP8 casts, maxima, scales", "optimizer, norm, state"
COLLECTIVE, COPY, REST = "collectives", "copies", "element-wise and sums"
KINDS = (FP8_PRODUCT, PRODUCT, ATTENTION, QUANTISATION, REST, OPTIMIZER, COLLECTIVE, COPY)

_NAME = re.compile(r"%([\w.\-]+)")
_SIZES = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# What costs nothing, and what only holds others.
_FREE = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
_HOLDERS = {"while", "conditional", "call"}
_MOVES = {"copy", "transpose", "copy-start", "slice", "dynamic-slice", "concatenate", "pad"}


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape as HLO writes it, those of all parts of a tuple."""
    from hfseq.training import collectives

    return sum(size for _, size in collectives.array_shapes(shape))


class Program:
    """The kernels of a compiled program by ``compiled.as_text()``; ValueError if it is none.

    ``kernels`` pairs each instruction that runs as one with its kind.
    """

    def __init__(self, text: str):
        from hfseq.training import collectives

        self._collectives, self._quantises = collectives.COLLECTIVE_OPS, "f8e" in text
        self._parts: dict[str, dict[str, Any]] = {}
        entry = None
        for one in collectives.instructions(text):
            self._parts.setdefault(one.computation, {})[one.name] = one
            entry = one.computation if one.entry else entry
        if entry is None:
            raise ValueError("no ENTRY computation: this is not the text of a compiled program")
        self.kernels = [(kernel, self._kind(kernel)) for kernel in self._running(entry)]

    def kinds(self) -> dict[str, str]:
        return {kernel.name: kind for kernel, kind in self.kernels}

    def counts(self) -> dict[str, int]:
        """Return how many kernels of each kind there are, in the order of ``KINDS``."""
        found = collections.Counter(self.kinds().values())
        return {kind: found[kind] for kind in KINDS if found[kind]}

    def traffic(self) -> list[tuple[Any, str, int]]:
        """Return each kernel, its kind, and the bytes of its operands and results.

        That is what it moves if it reads and writes everything once, a loop's body counted once;
        of what it gathers from only what it takes.
        """
        moved = []
        for kernel, kind in self.kernels:
            known = self._parts[kernel.computation]
            operands = [name for name in _NAME.findall(kernel.attributes) if name in known]
            read = {name: bytes_of(known[name].shape) for name in operands}
            for number, taken in self._gathered(kernel).items():
                read[operands[number]] = min(read[operands[number]], taken)
            moved.append((kernel, kind, bytes_of(kernel.shape) + sum(read.values())))
        return moved

    def _gathered(self, kernel: Any) -> dict[int, int]:
        """Return the bytes that a fusion takes of the operands that it only gathers from."""
        inside = self._parts.get(kernel.calls[0][1], {}) if kernel.opcode == "fusion" else {}

        def taken(name: str) -> float:
            """Bytes that are read of a value: infinite where it may be all, seen through views."""
            total = 0.0
            for one in inside.values():
                operands = _NAME.findall(one.attributes)
                if name not in operands:
                    continue
                if one.opcode in ("bitcast", "reshape", "slice"):
                    total += taken(one.name)
                elif one.opcode in ("gather", "dynamic-slice") and operands[0] == name:
                    total += bytes_of(one.shape)
                else:
                    return math.inf
            return total

        given = [one for one in inside.values() if one.opcode == "parameter"]
        found = {int(one.attributes.split(")")[0]): taken(one.name) for one in given}
        return {number: int(size) for number, size in found.items() if 0 < size < math.inf}

    def _running(self, computation: str) -> Iterator[Any]:
        for one in self._parts[computation].values():
            if one.opcode in _HOLDERS:
                for _, inner in one.calls:
                    yield from self._running(inner)
            elif one.opcode not in _FREE and not one.opcode.endswith("-done"):
                yield one

    def _kind(self, kernel: Any) -> str:
        if kernel.opcode.startswith(self._collectives):
            return COLLECTIVE
        if target := _TARGET.search(kernel.attributes):
            if "matmul" in target[1] or "gemm" in target[1]:
                return self._product(kernel)
            if "fmha" in target[1]:
                return ATTENTION
        inside = self._inside(kernel)
        for one in (*inside, kernel):
            if one.opcode == "dot":
                return self._product(one)
        if self._quantises and self._is_quantisation(kernel, inside):
            return QUANTISATION
        if {kernel.opcode, *(one.opcode for one in inside)} <= _MOVES | _FREE | {"fusion"}:
            return COPY
        return REST if "jvp" in kernel.op_name else OPTIMIZER

    def _inside(self, kernel: Any) -> list[Any]:
        within = []
        for _, name in kernel.calls if kernel.opcode in ("fusion", "async-start") else []:
            for one in self._parts.get(name, {}).values():
                within += [one, *self._inside(one)]
        return within

    def _product(self, product: Any) -> str:
        """Tell an FP8 product by the types of its two operands."""
        known = self._parts[product.computation]
        operands = [known[name] for name in _NAME.findall(product.attributes)[:2] if name in known]
        fp8 = [bool(re.match(r"\(?f8e", operand.shape)) for operand in operands]
        return FP8_PRODUCT if len(fp8) == 2 and all(fp8) else PRODUCT

    def _is_quantisation(self, kernel: Any, inside: Sequence[Any]) -> bool:
        """Tell whether FP8 is made or widened here, or what scales it is found."""
        if "_roll" in kernel.op_name or any("f8e" in one.shape for one in (kernel, *inside)):
            return True
        small = all(size in ("", "1") for size in _SIZES.findall(kernel.shape))
        called = [name for one in inside if one.opcode == "reduce" for _, name in one.calls]
        steps = {step.opcode for name in called for step in self._parts.get(name, {}).values()}
        if "maximum" in steps and (small or any(one.opcode == "abs" for one in inside)):
            return True
        reduces = any(one.opcode == "reduce" for one in inside)
        return small and not reduces and "jvp" in kernel.op_name


# -- steps compiled for an H200 without one: training.py h200

BANDWIDTH, PEAK = 4.8e12, 989e12  # of an H200, bytes a second and half-precision FLOP/s
# Products that share an operand (keys and values of all decoder layers) stay apart, to be counted.
SEPARATE = {"xla_disable_hlo_passes": "dot-merger"}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
PLACES = ("target", "packages", "dump", "threads", "top")


def h200_parser(about: str, **sizes: int) -> argparse.ArgumentParser:
    """Return a parser of what has to be known to compile for a GPU that is not here."""
    texts = {
        "width": "hidden size",
        "layers": "layers of every stack",
        "batch_size": "rows a step",
        "length": "tokens a row",
        "vocab_size": "size of the vocabulary",
    }
    parser = harness.parser(about, **{name: (n, texts[name]) for name, n in sizes.items()})
    parser.add_argument("--target", type=Path, required=True, help="the GPU, as a text proto")
    parser.add_argument("--packages", type=Path, help="folder of the CUDA plugin and compiler")
    return parser


def read_target(path: Path) -> str:
    """Return the description of the GPU; SystemExit if it is none, or would switch FP8 off."""
    if not path.is_file():
        raise SystemExit(f"--target {path}: there is no such file")
    text = path.read_text()
    for field in ("gpu_device_info", "runtime_version"):
        if field not in text:
            raise SystemExit(
                f"--target {path} has no {field}: it is no GpuTargetConfigProto of a GPU with a "
                "CUDA runtime, and XLA would compile without FP8 products"
            )
    return text


def use_packages(folder: Path | None) -> None:
    """Let jax find the CUDA compiler in ``folder``; before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if folder is None:
        return
    compiler = folder / "nvidia" / "cuda_nvcc"
    lacking = [p for p in (folder / "jax_plugins", compiler / "bin" / "ptxas") if not p.exists()]
    if lacking:
        raise SystemExit(
            f"--packages {folder} has no {lacking[0].relative_to(folder)}: fill it with\n"
            f"  pip install --no-deps --target {folder} jax-cuda12-plugin==VERSION "
            "jax-cuda12-pjrt==VERSION nvidia-cuda-nvcc-cu12\n"
            "where VERSION is that of the installed jax"
        )
    sys.path.append(str(folder))
    os.environ["PATH"] = f"{compiler / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    flags = f"--xla_gpu_cuda_data_dir={compiler}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def described_gpu(options: argparse.Namespace) -> Any:
    """Return the sharding of the one GPU that ``--target`` describes."""
    target = read_target(options.target)
    use_packages(options.packages)
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    return NamedSharding(Mesh(np.array(described.devices[:1]), ("data",)), PartitionSpec())


def compile_for(gpu: Any, prepared: Prepared, options: dict[str, Any]) -> Any:
    """Compile a step for the GPU at the sharding ``gpu``; returns the program."""
    import jax

    from hfseq.training import aot

    def there(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=gpu)

    abstract = jax.eval_shape(prepared.random_state, jax.random.key(0))
    arguments = jax.tree.map(there, (abstract, prepared.batches[0]))
    with aot.compiling_for(gpu.mesh.devices.flat[0]):
        traced = jax.jit(prepared.step, donate_argnums=0).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options)


def h200_command(
    script: str, parse: Callable[[Sequence[str]], argparse.Namespace], options: argparse.Namespace
) -> str:
    given, usual = ["--target", options.target.name, "--packages", "DIR"], parse(["--target", "x"])
    for flag, value in vars(options).items():
        if flag not in (*PLACES, "output", "models", "recipes") and value != getattr(usual, flag):
            words = value if isinstance(value, list) else [] if value is True else [value]
            given += [f"--{flag}", *map(str, words)]
    return harness.command(script, given)


def h200_begin(
    name: str,
    script: str,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    given: Sequence[str],
) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """Return the options, the GPU to compile for, and how the result begins."""
    options = parse(given)
    gpu = described_gpu(options)
    return (
        options,
        gpu,
        {
            "benchmark": name,
            "command": h200_command(script, parse, options),
            "machine": harness.machine_facts(),
            "options": harness.options_dict(options, PLACES),
            "target": gpu.mesh.devices.flat[0].device_kind,
            "problems": [],
        },
    )


def parse_h200(given: Sequence[str]) -> argparse.Namespace:
    parser = h200_parser(
        "What training steps move and need on an H200, compiled without one.\n\n--target is XLA's "
        "description of the GPU (GpuTargetConfigProto as text), --packages as for fp8.py h200. Of "
        "every\nkernel of the compiled step the bytes of its operands and results are added up: at "
        "the bandwidth of\nthe GPU they take a time that no kernel can beat, to be compared with "
        "that of the products at its\npeak. Attention is what is chosen there.",
        width=768,
        layers=2,
        vocab_size=50257,
    )
    default = ["roberta:32x512", "gpt2:16x1024", "t5:16x512", "bart:16x512", "llama:8x1024"]
    parser.add_argument("--steps", nargs="+", default=default, help="MODEL:ROWSxLENGTH")
    parser.add_argument("--precision", default="bfloat16", help="recipe (bfloat16)")
    parser.add_argument("--top", type=int, default=0, help="print so many of the largest kernels")
    options = parser.parse_args(given)
    for step in options.steps:
        if not re.fullmatch(r"\w+:[1-9]\d*x[1-9]\d*", step):
            parser.error(f"--steps {step}: give MODEL:ROWSxLENGTH, e.g. gpt2:16x1024")
    return options


def h200_row(step: str, options: argparse.Namespace, gpu: Any) -> dict[str, Any]:
    from hfseq.training import throughput

    name, _, batch = step.partition(":")
    rows, length = map(int, batch.split("x"))
    size = Size(options.width, options.layers, rows, length, options.vocab_size)
    prepared = prepare_sized(name, options.precision, size)
    program = compile_for(gpu, prepared, CUBLAS)
    traffic = Program(program.as_text()).traffic()
    moved: collections.Counter[str] = collections.Counter()
    for _, kind, count in traffic:
        moved[kind] += count
    for kernel, kind, count in sorted(traffic, key=lambda each: -each[2])[: options.top]:
        told = f"{kind:24s} {kernel.shape[:64]:64s} {kernel.op_name}"
        harness.tell(f"{count / 1e6:9.1f} MB  {told}")
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
    kinds = (PRODUCT, REST, OPTIMIZER, COPY)
    columns = [
        "",
        "batch",
        "kernels",
        *kinds,
        "moved",
        "least by bytes",
        "least by products",
        "temporary",
    ]
    lines = [
        [
            row["name"],
            row["group"],
            str(row["kernels"]),
            *(f"{row['bytes'].get(kind, 0) / 1e9:.2f} GB" for kind in kinds),
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
        f"{result['target']} without a GPU (jax {jax}), products by cuBLAS; "
        f"4.8 TB/s, 989 TFLOP/s.\n\n`{result['command']}`"
    )


def h200(given: Sequence[str]) -> int:
    options, gpu, result = h200_begin("h200_step", "training.py h200", parse_h200, given)
    result["rows"] = [h200_row(step, options, gpu) for step in options.steps]
    return harness.publish(result, h200_section(result), options.output, failed=False)


if __name__ == "__main__":
    sys.exit(harness.dispatch({"": steps, "h200": h200}, __doc__, sys.argv[1:]))

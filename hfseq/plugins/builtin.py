"""What hfseq itself registers, through the same hooks as everybody else."""

from __future__ import annotations

from hfseq.plugins.hookspecs import Register, hookimpl

OPTIMIZERS = (
    *("adabelief", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lars", "lion"),
    *("muon", "nadamw", "novograd", "radam", "rmsprop", "sgd"),
)


@hookimpl
def register_objectives(register: Register) -> None:
    """Language modeling (masked, causal), span corruption, denoising, translation, classes."""
    register("mlm", "hfseq.objectives.mlm:MaskedLM")
    register("clm", "hfseq.objectives.clm:CausalLM")
    register("span_mlm", "hfseq.objectives.span_mlm:SpanMaskedLM")
    register("denoising", "hfseq.objectives.denoising:Denoising")
    register("translation", "hfseq.objectives.translation:Translation")
    register("classification", "hfseq.objectives.classification:Classification")


@hookimpl
def register_optimizers(register: Register) -> None:
    """Optax's optimizers under optax's names."""
    for name in OPTIMIZERS:
        register(name, f"hfseq.training.optimizers:{name}")


@hookimpl
def register_tokenizers(register: Register) -> None:
    """The special tokens of the families that tokenizers are trained for most."""
    for name in ("roberta", "gpt2", "bert", "t5", "marian", "vq_transformer"):
        register(name, f"hfseq.data.tokenizers:{name.upper()}")
    register("bart", "hfseq.data.tokenizers:ROBERTA")


@hookimpl
def register_attention(register: Register) -> None:
    """The choice by platform and shape, and the names of all that it chooses among."""
    for name in ("auto", "explicit", "eager", "xla", "cudnn", "flash", "splash"):
        register(name, f"hfseq.nn.attention:{name.upper()}")


@hookimpl
def register_precisions(register: Register) -> None:
    """The plain floating-point types, FP8, and what qwix adds for inference."""
    for name in ("float32", "bfloat16", "float16"):
        register(name, f"hfseq.nn.precision:{name.upper()}")
    register("fp8_delayed", "hfseq.nn.fp8:delayed")
    register("fp8_current", "hfseq.nn.fp8:current")
    for name in ("qwix_int8", "qwix_fp8"):
        register(name, f"hfseq.nn.qwix:{name}")


@hookimpl
def register_trackers(register: Register) -> None:
    """TensorBoard event files, Weights & Biases and JSON lines."""
    register("tensorboard", "hfseq.training.trackers:TensorBoardTracker")
    register("wandb", "hfseq.training.trackers:WandbTracker")
    register("jsonl", "hfseq.training.trackers:JsonlTracker")

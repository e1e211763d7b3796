"""What hfseq itself registers, through the same hooks as everybody else."""

from __future__ import annotations

from hfseq.hookspecs import Register, hookimpl

OPTIMIZERS = (
    *("adabelief", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lars", "lion"),
    *("muon", "nadamw", "novograd", "radam", "rmsprop", "sgd"),
)


@hookimpl
def register_objectives(register: Register) -> None:
    """Masked and causal language modeling, span corruption, denoising and translation."""
    register("mlm", "hfseq.objectives.mlm:MaskedLM")
    register("clm", "hfseq.objectives.clm:CausalLM")
    register("span_mlm", "hfseq.objectives.span_mlm:SpanMaskedLM")
    register("denoising", "hfseq.objectives.denoising:Denoising")
    register("translation", "hfseq.objectives.translation:Translation")


@hookimpl
def register_optimizers(register: Register) -> None:
    """Optax's optimizers under optax's names."""
    for name in OPTIMIZERS:
        register(name, f"hfseq.training.optimizers:{name}")


@hookimpl
def register_attention(register: Register) -> None:
    """XLA's fused attention, cuDNN's flash attention and the explicit products."""
    for name in ("xla", "cudnn", "eager"):
        register(name, f"hfseq.nn.attention:{name}_attention")


@hookimpl
def register_precisions(register: Register) -> None:
    """The plain floating-point types; parameters stay in float32."""
    for name in ("float32", "bfloat16", "float16"):
        register(name, f"hfseq.nn.precision:{name.upper()}")


@hookimpl
def register_trackers(register: Register) -> None:
    """TensorBoard event files, Weights & Biases and JSON lines."""
    register("tensorboard", "hfseq.training.tracking:TensorBoardTracker")
    register("wandb", "hfseq.training.tracking:WandbTracker")
    register("jsonl", "hfseq.training.tracking:JsonlTracker")

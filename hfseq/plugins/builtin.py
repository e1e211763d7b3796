"""The registrations of hfseq itself, which use the same hooks as other plugins."""

from __future__ import annotations

from hfseq.plugins.hookspecs import Register, hookimpl

OPTIMIZERS = (
    *("adabelief", "adafactor", "adagrad", "adam", "adamax", "adamw", "lamb", "lars", "lion"),
    *("muon", "nadamw", "novograd", "radam", "rmsprop", "schedule_free_adamw", "sgd"),
)

#: For each constant in `hfseq.data.tokenizers` that defines special tokens, the model types that
#: use these tokens.
TOKENIZERS = {
    "ROBERTA": ("roberta", "bart", "roberta-prelayernorm"),
    "GPT2": ("gpt2",),
    "BERT": ("bert",),
    "T5": ("t5", "mt5"),
    "MARIAN": ("marian",),
    "VQ_TRANSFORMER": ("vq_transformer",),
    "XLM_ROBERTA": ("xlm-roberta", "mbart"),
    "XGLM": ("xglm",),
    "BLENDERBOT": ("blenderbot", "blenderbot-small"),
}


@hookimpl
def register_objectives(register: Register) -> None:
    """Registers the training objectives."""
    register("mlm", "hfseq.objectives.mlm:MaskedLM")
    register("clm", "hfseq.objectives.clm:CausalLM")
    register("rtd", "hfseq.objectives.pretraining:ReplacedTokens")
    register("sop", "hfseq.objectives.pretraining:SentenceOrder")
    register("span_mlm", "hfseq.objectives.span_mlm:SpanMaskedLM")
    register("denoising", "hfseq.objectives.denoising:Denoising")
    register("translation", "hfseq.objectives.translation:Translation")
    register("classification", "hfseq.objectives.classification:Classification")
    register("token_classification", "hfseq.objectives.token_classification:TokenClassification")
    register("question_answering", "hfseq.objectives.question_answering:QuestionAnswering")
    register("sft", "hfseq.objectives.sft:InstructionTuning")
    register("dpo", "hfseq.objectives.dpo:DPO")
    register("kto", "hfseq.objectives.kto:KTO")
    register("orpo", "hfseq.objectives.orpo:ORPO")
    register("cpo", "hfseq.objectives.cpo:CPO")
    register("reward", "hfseq.objectives.reward:RewardModeling")
    register("embedding", "hfseq.objectives.embedding:Embedding")
    register("cross_encoder", "hfseq.objectives.cross_encoder:CrossEncoderTraining")
    register("sparse_encoder", "hfseq.objectives.sparse_encoder:SparseTraining")
    register("multi_vector", "hfseq.objectives.multi_vector:MultiVector")
    register("summarization", "hfseq.objectives.translation:Summarization")
    register("image_classification", "hfseq.objectives.image_classification:ImageClassification")
    register("image_text", "hfseq.objectives.image_text:ImageText")
    register("image_to_text", "hfseq.objectives.image_to_text:ImageToText")
    register("wav2vec2", "hfseq.objectives.wav2vec2:Wav2Vec2")
    register("ctc", "hfseq.objectives.ctc:CTC")
    register("speech_recognition", "hfseq.objectives.speech_recognition:SpeechRecognition")


@hookimpl
def register_optimizers(register: Register) -> None:
    """Registers Optax optimizers under their Optax names."""
    for name in OPTIMIZERS:
        register(name, f"hfseq.training.optimizers:{name}")


@hookimpl
def register_tokenizers(register: Register) -> None:
    """Registers the special tokens of the model types for which tokenizers can be trained."""
    for family, names in TOKENIZERS.items():
        for name in names:
            register(name, f"hfseq.data.tokenizers:{family}")


@hookimpl
def register_attention(register: Register) -> None:
    """Registers the attention implementations.

    ``auto`` selects one of them, depending on the platform and on the shapes.
    """
    for name in ("auto", "explicit", "eager", "xla", "cudnn", "flash", "splash"):
        register(name, f"hfseq.nn.attention:{name.upper()}")


@hookimpl
def register_precisions(register: Register) -> None:
    """Registers floating-point precisions, FP8 training, and Qwix quantization for inference."""
    for name in ("float32", "bfloat16", "float16"):
        register(name, f"hfseq.nn.precision:{name.upper()}")
    register("fp8_delayed", "hfseq.nn.fp8:delayed_scaling")
    register("fp8_current", "hfseq.nn.fp8:current_scaling")
    for name in ("qwix_int8", "qwix_fp8"):
        register(name, f"hfseq.nn.qwix:{name}")


@hookimpl
def register_trackers(register: Register) -> None:
    """Registers the trackers for TensorBoard, Weights & Biases and JSON lines."""
    register("tensorboard", "hfseq.training.trackers:TensorBoardTracker")
    register("wandb", "hfseq.training.trackers:WandbTracker")
    register("jsonl", "hfseq.training.trackers:JsonlTracker")

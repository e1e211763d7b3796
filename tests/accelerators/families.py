"""A small model of each family, and what its training step looks like on accelerators."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from hfseq import plugins
from hfseq.checkpoints.config import parse_overrides
from hfseq.cli.plan import run as planned
from hfseq.cli.plan.options import OBJECTIVES, Options
from hfseq.data.batches import RowRandom
from hfseq.data.images import load_image_processor
from hfseq.nn.context import RowGuarantees
from hfseq.objectives.base import ProcessorPair
from hfseq.training.arguments import parse
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import Run, build_run
from tests.support import models
from tests.support.images import CLASSES, draw_digits

#: No other size of these models is the same.
LENGTH, TARGETS, WORDS = 384, 136, 77
PLACES = 19 * 19 + 1  # of a image of 304 x 304, and the first

_ENCODER = (
    "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,intermediate_size=512,"
    "vocab_size=1024,max_position_embeddings=514"
)
_DECODER = (
    "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=512,vocab_size=1024"
)
_BOTH = (
    "d_model=256,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
    "decoder_attention_heads=4,encoder_ffn_dim=512,decoder_ffn_dim=512,vocab_size=1024,"
    "max_position_embeddings=512"
)
_T5 = "d_model=256,d_kv=64,d_ff=512,num_layers=1,num_heads=4,vocab_size=1024"
_GPT = "n_embd=256,n_layer=1,n_head=4,n_positions=512,vocab_size=1024"
_MODERN = (
    "hidden_size=256,num_hidden_layers=2,num_attention_heads=4,intermediate_size=512,"
    "vocab_size=1024,max_position_embeddings=512,local_attention=128"
)
_PICTURES = "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,image_size=304,patch_size=16"
#: Of both sides of a model that is made of two.
_SIDES = f"{_ENCODER},image_size=304,patch_size=16"
_CONVOLUTIONS = "embedding_size=64,hidden_sizes=[64,128],depths=[1,1]"

_TWO = "the learned bias of positions is an array of heads and all pairs of positions"
_RELATIVE = "scores of contents with positions are an array of heads and all pairs of positions"
_EXPLICIT = "the explicit form's gradient multiplies scores in float32"
_SHORT = {"v5e": "texts have fewer than 128 places, which splash refuses"}
_CONTRASTIVE = "its loss compares all frames of a row, in float32"
_T5_KERNELS = (
    "two biases have a gradient, each by a kernel of its own; without dropout documents with a "
    "bias are flash's; splash knows no bias"
)


#: Target and dropout rate of the attention weights of each compiled program.
PROGRAMS = {"h200, dropout": ("h200", 0.1), "h200": ("h200", 0.0), "v5e": ("v5e", 0.0)}
#: The reason for a property of all programs, or the reasons by the name of the program.
Reason = str | Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Family:
    """A small model that is compiled for accelerators.

    Attributes:
        sizes: Overrides of its configuration.
        attentions: Number of attention calls.
        dropout: Field of the configuration with the dropout rate of the attention weights. Empty
            if they are not dropped.
        objective: Objective of the training step.
        flash: Number of calls of hfseq's kernels in a step with dropout on an H200, if it is not
            three per attention.
        fused: Number of attention calls that are fused without dropout on an H200, if not all.
        splash: Whether splash is used on a TPU.
        because: Reason why `flash`, `fused` or `splash` differ from the default.
        squares: Reason for results with two axes of a sequence length.
        singles: Reason for float32 products.
        lengths: Sequence lengths.
    """

    sizes: str
    attentions: int
    dropout: str
    objective: str | None = None
    flash: int | None = None
    fused: int | None = None
    splash: bool = True
    because: str = ""
    squares: Reason = ""
    singles: Reason = ""
    lengths: tuple[int, ...] = (LENGTH,)

    @property
    def flash_calls(self) -> int:
        """Number of calls of hfseq's kernels in a step with dropout."""
        return 3 * self.attentions if self.flash is None else self.flash

    @property
    def fused_calls(self) -> int:
        """Number of fused attention calls in the forward pass of a step without dropout."""
        return self.attentions if self.fused is None else self.fused


def says(reason: Reason, program: str) -> bool:
    """Whether a reason is of this program."""
    return bool(reason if isinstance(reason, str) else reason.get(program))


_WEIGHTS = "attention_probs_dropout_prob"
#: By the name of the architecture, and of an objective where it is trained by several.
FAMILIES = {
    "roberta": Family(_ENCODER, 1, _WEIGHTS),
    "bert": Family(_ENCODER, 1, _WEIGHTS),
    "bert, sop": Family(_ENCODER, 1, _WEIGHTS, "sop"),
    "megatron-bert": Family(_ENCODER, 1, _WEIGHTS),
    "roberta-prelayernorm": Family(_ENCODER, 1, _WEIGHTS),
    "xlm-roberta": Family(_ENCODER, 1, _WEIGHTS),
    "electra": Family(f"{_ENCODER},embedding_size=128", 1, _WEIGHTS),
    "electra, rtd": Family(f"{_ENCODER},embedding_size=128", 1, _WEIGHTS, "rtd"),
    "albert": Family(f"{_ENCODER},embedding_size=128", 1, _WEIGHTS),
    "albert, sop": Family(f"{_ENCODER},embedding_size=128", 1, _WEIGHTS, "sop"),
    "roformer": Family(f"{_ENCODER},embedding_size=128", 1, _WEIGHTS),
    "big_bird": Family(f"{_ENCODER},attention_type=original_full", 1, _WEIGHTS),
    "distilbert": Family(
        "dim=256,n_layers=1,n_heads=4,hidden_dim=512,vocab_size=1024,max_position_embeddings=512",
        1, "attention_dropout",
    ),
    "esm": Family(f"{_ENCODER},position_embedding_type=rotary,mask_token_id=6", 1, _WEIGHTS),
    "eurobert": Family(_DECODER, 1, "attention_dropout"),
    "camembert": Family(_ENCODER, 1, _WEIGHTS),
    "data2vec-text": Family(_ENCODER, 1, _WEIGHTS),
    "deberta-v2": Family(
        f'{_ENCODER},relative_attention=true,pos_att_type="p2c|c2p",max_relative_positions=512,'
        "position_biased_input=false", 1, _WEIGHTS, flash=4, splash=False, squares=_RELATIVE,
        because="its scores with positions have a gradient by a kernel of its own; splash knows "
        "no bias",
    ),
    "ernie": Family(f"{_ENCODER},use_task_id=true", 1, _WEIGHTS),
    "gte": Family(_ENCODER, 1, _WEIGHTS),
    "jina_embeddings_v3": Family(_ENCODER, 1, _WEIGHTS),
    # Three embeddings of 128 features would have the size of LENGTH.
    "mobilebert": Family(f"{_ENCODER},intra_bottleneck_size=256,embedding_size=64", 1, _WEIGHTS),
    "mpnet": Family(
        _ENCODER, 1, _WEIGHTS, flash=4, splash=False, squares=_TWO,
        because="its bias has a gradient by a kernel of its own; splash knows no bias",
    ),
    "nomic_bert": Family(_ENCODER, 1, _WEIGHTS),
    "xlm-roberta-xl": Family(_ENCODER, 1, _WEIGHTS),
    "modernbert": Family(_MODERN, 2, "attention_dropout"),
    "fp8_encoder": Family(_ENCODER, 1, _WEIGHTS),
    "gpt2": Family(_GPT, 1, "attn_pdrop"),
    "gptj": Family(f"{_GPT},rotary_dim=32", 1, "attn_pdrop"),
    "gpt_neo": Family(
        "hidden_size=256,num_layers=2,num_heads=4,window_size=128,vocab_size=1024,"
        'attention_types=[[["global","local"],1]],max_position_embeddings=512',
        2, "attention_dropout",
    ),
    "llama": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "mistral": Family(f"{_DECODER},head_dim=64,sliding_window=128", 1, "attention_dropout"),
    "gemma": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "gemma2": Family(
        f"{_DECODER},head_dim=64,sliding_window=128", 1, "attention_dropout", flash=0, fused=0,
        splash=False, because="no kernel caps scores softly", squares="it is explicit",
        singles={"h200, dropout": _EXPLICIT, "h200": _EXPLICIT},
    ),
    "gemma3_text": Family(f"{_DECODER},head_dim=64,sliding_window=128", 1, "attention_dropout"),
    "qwen2": Family(_DECODER, 1, "attention_dropout"),
    "qwen3": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "smollm3": Family(_DECODER, 1, "attention_dropout"),
    "olmo": Family(_DECODER, 1, "attention_dropout"),
    "olmo2": Family(_DECODER, 1, "attention_dropout"),
    "olmo3": Family(f"{_DECODER},sliding_window=128", 1, "attention_dropout"),
    "phi": Family(_DECODER, 1, "attention_dropout"),
    "phi3": Family(_DECODER, 1, "attention_dropout"),
    "granite": Family(_DECODER, 1, "attention_dropout"),
    "glm": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "glm4": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "cohere": Family(_DECODER, 1, "attention_dropout"),
    "cohere2": Family(f"{_DECODER},sliding_window=128", 1, "attention_dropout"),
    "stablelm": Family(_DECODER, 1, "attention_dropout"),
    "gpt_neox": Family(
        "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,intermediate_size=512,"
        "vocab_size=1024", 1, "attention_dropout",
    ),
    "starcoder2": Family(f"{_DECODER},sliding_window=128", 1, "attention_dropout"),
    "ministral": Family(
        f"{_DECODER},head_dim=64,sliding_window=128", 1, "attention_dropout",
    ),
    "exaone4": Family(f"{_DECODER},sliding_window=128", 1, "attention_dropout"),
    "ernie4_5": Family(f"{_DECODER},head_dim=64", 1, ""),
    "seed_oss": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "helium": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "mixtral": Family(
        f"{_DECODER},head_dim=64,num_local_experts=8,sliding_window=128", 1, "attention_dropout",
    ),
    "qwen2_moe": Family(
        f"{_DECODER},num_experts=8,num_experts_per_tok=2,moe_intermediate_size=320,"
        "shared_expert_intermediate_size=448", 1, "attention_dropout",
    ),
    "qwen3_moe": Family(
        f"{_DECODER},num_experts=8,num_experts_per_tok=2,moe_intermediate_size=320",
        1, "attention_dropout",
    ),
    "olmoe": Family(
        f"{_DECODER},num_experts=8,num_experts_per_tok=2", 1, "attention_dropout",
    ),
    "granitemoe": Family(f"{_DECODER},num_local_experts=8", 1, "attention_dropout"),
    "gpt_oss": Family(
        f"{_DECODER},head_dim=64,num_local_experts=8,num_experts_per_tok=2,sliding_window=128",
        1, "attention_dropout", flash=0, fused=0, splash=False,
        because="no kernel supports sinks", squares="it is explicit",
        singles={"h200, dropout": _EXPLICIT, "h200": _EXPLICIT},
    ),
    # With four heads, the fused queries, keys and values would have the size of LENGTH.
    "falcon": Family(
        "hidden_size=320,num_hidden_layers=1,num_attention_heads=5,vocab_size=1024", 1, "",
    ),
    "mamba2": Family(
        "hidden_size=256,num_hidden_layers=1,num_heads=8,head_dim=64,n_groups=1,vocab_size=1024,"
        "chunk_size=128",
        0, "", splash=False, because="it does not attend",
        singles="the state is float32, as in PyTorch",
    ),
    "falcon_mamba": Family(
        "hidden_size=256,num_hidden_layers=1,vocab_size=1024", 0, "", splash=False,
        because="it does not attend",
    ),
    "modernbert-decoder": Family(_MODERN, 2, "attention_dropout"),
    "opt": Family(
        "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,ffn_dim=512,vocab_size=1024,"
        "word_embed_proj_dim=256,max_position_embeddings=512", 1, "attention_dropout",
    ),
    "bloom": Family(
        "hidden_size=256,n_layer=1,n_head=4,vocab_size=1024", 1, "attention_dropout", flash=0,
        splash=False, because="ALiBi is a bias of each key: flash and splash know none such",
        squares="cuDNN takes the bias of all pairs; else it is explicit",
        singles={"h200, dropout": _EXPLICIT},
    ),
    "xglm": Family(
        "d_model=256,num_layers=1,attention_heads=4,ffn_dim=512,vocab_size=1024,"
        "max_position_embeddings=512", 1, "attention_dropout",
    ),
    "vq_transformer": Family(
        "hidden_size=256,num_hidden_layers=1,vocab_size=1024", 0, "", splash=False,
        because="it attends to codes and a window by a form of its own",
        singles="codes are chosen, and read from the cache, in float32 (docs/vq_transformer.md)",
    ),
    "t5": Family(_T5, 3, "dropout_rate", flash=11, splash=False,
                 because=_T5_KERNELS, squares=_TWO),
    "mt5": Family(_T5, 3, "dropout_rate", flash=11, splash=False,
                 because=_T5_KERNELS, squares=_TWO),
    "umt5": Family(_T5, 3, "dropout_rate", flash=11, splash=False,
                   because=_T5_KERNELS, squares=_TWO),
    "longt5": Family(
        f"{_T5},num_decoder_layers=1,local_radius=63", 3, "dropout_rate", flash=7, splash=False,
        because="its encoder attends in blocks, explicitly, or by cuDNN with a bias; the decoder's "
        "bias has a gradient by a kernel of its own; splash knows no bias",
        singles={"h200, dropout": _EXPLICIT},
    ),
    "bart": Family(_BOTH, 3, "attention_dropout"),
    "mbart": Family(_BOTH, 3, "attention_dropout"),
    "m2m_100": Family(_BOTH, 3, "attention_dropout"),
    "marian": Family(_BOTH, 3, "attention_dropout"),
    "pegasus": Family(_BOTH, 3, "attention_dropout"),
    "blenderbot": Family(_BOTH, 3, "attention_dropout"),
    "blenderbot-small": Family(_BOTH, 3, "attention_dropout"),
    "wmt_transformer": Family(_BOTH, 3, "attention_dropout"),
    "encoder-decoder": Family(_ENCODER, 3, _WEIGHTS, "translation", lengths=(LENGTH, TARGETS)),
    "vit": Family(
        f"{_PICTURES},intermediate_size=512", 1, _WEIGHTS, "image_classification",
        lengths=(PLACES,),
    ),
    "dinov2": Family(
        f"{_PICTURES},mlp_ratio=2", 1, _WEIGHTS, "image_classification", lengths=(PLACES,),
    ),
    "beit": Family(
        f"{_PICTURES},intermediate_size=512,use_relative_position_bias=true", 1, _WEIGHTS,
        "image_classification", flash=4, splash=False, lengths=(PLACES,), squares=_TWO,
        because="its bias has a gradient by a kernel of its own; splash knows no bias",
    ),
    "resnet": Family(
        _CONVOLUTIONS, 0, "", "image_classification", splash=False, because="it does not attend",
    ),
    "regnet": Family(
        f"{_CONVOLUTIONS},groups_width=64", 0, "", "image_classification", splash=False,
        because="it does not attend",
    ),
    "clip": Family(
        _SIDES, 2, "attention_dropout", "image_text", lengths=(PLACES, WORDS), squares=_SHORT,
    ),
    "vision-text-dual-encoder": Family(
        _SIDES, 2, _WEIGHTS, "image_text", lengths=(PLACES, WORDS), squares=_SHORT,
    ),
    "vision-encoder-decoder": Family(
        _SIDES, 3, _WEIGHTS, "image_to_text", lengths=(PLACES, TARGETS),
    ),
    "wav2vec2": Family(
        "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,intermediate_size=512,"
        "num_conv_pos_embeddings=8,num_conv_pos_embedding_groups=4,mask_time_prob=0.3",
        1, "attention_dropout", "wav2vec2", squares=_CONTRASTIVE,
        singles=f"{_CONTRASTIVE}; codes are chosen in float32",
    ),
    "whisper": Family(
        f"{_BOTH},max_source_positions=400,max_target_positions=448,"
        "num_mel_bins=80", 3, "attention_dropout", "speech_recognition", lengths=(400, TARGETS),
    ),
}  # fmt: skip
#: What no flag can say: configurations that hold others, or come with a processor.
NESTED = (
    "clip",
    "vision-text-dual-encoder",
    "encoder-decoder",
    "vision-encoder-decoder",
    "whisper",
)
#: What is not compiled, and why.
NOT_COMPILED = {
    "new": "the first model type of GTE, which is compiled",
    "speech-encoder-decoder": "no objective trains it",
    "dinov3_vit": "it has no head that an objective trains",
    "hubert": "the encoder of wav2vec2, which is compiled",
    "wavlm": "only CTC trains it, which this table does not have",
    "siglip": "the objective of images and texts has the loss of CLIP",
    "siglip_text_model": "the half of a SigLIP",
    "siglip_vision_model": "the half of a SigLIP",
    "siglip2": "the objective of images and texts reads images, not patches",
    "siglip2_text_model": "the half of a SigLIP 2",
    "siglip2_vision_model": "the half of a SigLIP 2",
    "clip_text_model": "the half of a CLIP, which is compiled with it",
    "clip_vision_model": "the half of a CLIP, which is compiled with it",
}


def run_of(name: str, devices: Sequence[jax.Device], options: Options) -> tuple[Run, Any]:
    """Build the run of a family on devices that are only described; and the batch of a step."""
    objective, kind = FAMILIES[name].objective, name.split(",")[0]
    if objective in (None, *OBJECTIVES) and kind not in NESTED:
        run = planned.build(options, devices)
        if run.objective.row_guarantees is not None:
            run.objective.row_guarantees = RowGuarantees(max_runs=8)
        return run, planned.abstract_batch(run, 2)
    assert objective is not None
    with tempfile.TemporaryDirectory() as folder:
        flags, given = _made(kind, Path(folder), options)
        arguments = parse(flags, objective=objective)
        run = build_run(arguments, objective, Path(folder, "out"), Progress(), devices, **given)
        assert run.data is not None and run.data.train is not None
        rows = RowRandom(0, 0, np.arange(2))
        batch = run.objective.collate(run.data.train[0], rows, 1)
    return run, planned.abstract_placed_batch(run, batch | {"row": np.arange(2, dtype=np.int32)})


def _made(kind: str, folder: Path, options: Options) -> tuple[list[str], dict[str, Any]]:
    """Write a little data for a family, and return flags and what is given in place of files."""
    objective = FAMILIES[kind].objective
    values: dict[str, Any] = {
        "output_dir": folder / "out",
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "precision": options.precision,
        "attn_implementation": options.attn_implementation,
        "gradient_checkpointing": options.gradient_checkpointing or None,
        "do_train": True,
    }
    if objective == "translation":
        lines = '{"source": "w1 w2", "target": "w3 w4"}\n' * 2
        (folder / "train.jsonl").write_text(lines)
        values |= {
            "train_file": folder / "train.jsonl",
            "source_column": "source",
            "target_column": "target",
            "max_source_length": LENGTH,
            "max_target_length": TARGETS,
            "pad_to_max_length": True,
            "data_cache_dir": folder,
            "validation_split_percentage": 0,
        }
    elif objective in ("wav2vec2", "speech_recognition"):
        soundfile = pytest.importorskip("soundfile")
        noise = np.random.default_rng(0).normal(size=(2, 16_000 * 8)).astype(np.float32) / 9
        for number, sound in enumerate(noise):
            soundfile.write(folder / f"{number}.wav", sound, 16_000)
        (folder / "train.csv").write_text("audio,text\n0.wav,w1 w2\n1.wav,w3\n")
        values |= {"decode_workers": 0}
        if objective == "wav2vec2":  # four widths, of which the longest is the only one
            samples = 320 * LENGTH + 80
            values |= {
                "train_dir": folder,
                "max_duration_in_seconds": samples / 16_000,
                "pad_to_multiple_of": samples,
            }
        else:
            values |= {"train_file": folder / "train.csv", "max_label_length": TARGETS}
    else:
        draw_digits(folder, 1, size=304)
        values |= {"image_size": 304, "decode_workers": 0}
        if objective == "image_classification":
            values |= {"train_dir": folder}
        else:
            lines = "".join(
                json.dumps({"image": f"{name}/0.png", "caption": f"w{name}"}) + "\n"
                for name in CLASSES
            )
            (folder / "train.jsonl").write_text(lines)
            longest = "max_seq_length" if objective == "image_text" else "max_target_length"
            values |= {
                "train_file": folder / "train.jsonl",
                longest: WORDS if objective == "image_text" else TARGETS,
            }
    given: dict[str, Any] = {}
    if kind in NESTED:
        sizes = parse_overrides(options.config_overrides)
        config = getattr(models, f"{kind.replace('-', '_')}_config")(**sizes)
        if objective == "image_text":
            config.projection_dim = 192  # a width that tensor cores take
        words = planned.make_tokenizer(config.get_text_config(decoder=True), sentinels=False)
        if objective == "speech_recognition":
            inputs: Any = WhisperFeatureExtractor(feature_size=80, chunk_length=8)
        else:
            inputs = load_image_processor(None, 304)
        tokenizer = words if objective == "translation" else ProcessorPair(inputs, words)
        plugins.load().objectives.get(objective).configure(config, tokenizer, True)
        given = {"config": config, "tokenizer": tokenizer}
    else:  # all of it is said by flags
        values |= {"model_type": kind, "config_overrides": options.config_overrides}
    return [f"--{name}={value}" for name, value in values.items() if value is not None], given

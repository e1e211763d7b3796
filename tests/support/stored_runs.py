"""Stored training checkpoints: how they were written, and how they are restored and resumed.

The files in `tests/training/stored` represent existing checkpoints of users, so they are not
regenerated when the code changes. Most were written by the code of commit 04f3c5a, each by an
uninterrupted run of a few steps on one device. The folder of a run contains:

- `checkpoints/3`: The checkpoint of step 3, as the run has written it.
- `state.npz`: The same state as arrays by path. Arrays whose dtype NumPy does not support are
  stored as unsigned integers with the same bits.
- `run.json`: The objective, the flags, the dtypes of the arrays that are stored as integers, the
  progress, and the losses of the logged steps after step 3.

This command writes the runs that were added to RUNS, and keeps existing files:

    python -m tests.support.stored_runs --write tests/training/stored

The functions that depend on the interface of hfseq are all in this module. The tests of the stored
checkpoints only use these functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.support import chats, preferences
from tests.support.audio import write_words

STORED = Path(__file__).resolve().parents[1] / "training" / "stored"
STEP = 3
DATA = "{data}"  # placeholder in flags for the folder of the stored data

_BERT = "hidden_size=8,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
_SIDES = (
    "d_model=8,max_position_embeddings=24,encoder_layers=1,decoder_layers=1,"
    "encoder_attention_heads=2,decoder_attention_heads=2,encoder_ffn_dim=16,decoder_ffn_dim=16"
)
_GPT2 = "n_embd=8,n_layer=1,n_head=2,n_positions=24"
_VQ = (
    "hidden_size=16,num_hidden_layers=1,head_dim=8,num_codes=6,window_size=8,block_size=4,"
    "sinusoid_base=100,commitment_cost=0.01,residual_dropout=0.1"
)
_CONVOLUTIONS = (
    "conv_dim=[4,8],conv_stride=[10,10],conv_kernel=[20,10],num_feat_extract_layers=2,"
    "feat_extract_norm=layer,do_stable_layer_norm=true,num_conv_pos_embeddings=4,"
    "num_conv_pos_embedding_groups=2,codevector_dim=8,num_codevectors_per_group=4,"
    "proj_codevector_dim=8,num_negatives=4,mask_time_length=2"
)
_COMMON = {
    "train_file": f"{DATA}/train.jsonl",
    "validation_file": f"{DATA}/valid.jsonl",
    "do_train": True,
    "global_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "max_steps": 6,
    "save_steps": STEP,
    "save_total_limit": 4,
    "logging_steps": 1,
    "report_to": "jsonl",
    "card_samples": 0,
    "compilation_cache_dir": "none",
}
_MLM = {
    "model_type": "roberta",
    "tokenizer_name": f"{DATA}/roberta",
    "max_seq_length": 16,
    "config_overrides": f"{_BERT},max_position_embeddings=24",
}
_CLM = {
    "model_type": "gpt2",
    "tokenizer_name": f"{DATA}/roberta",
    "block_size": 16,
    "config_overrides": _GPT2,
}
_PREFERENCES = {
    "model_type": "llama",
    "tokenizer_name": f"{DATA}/chat",
    "train_file": f"{DATA}/preferences.jsonl",
    "validation_file": None,
    "max_length": 48,
    "eos_token": "<|im_end|>",
    "config_overrides": f"{_BERT},num_key_value_heads=1,max_position_embeddings=48",
}

#: The objective and the flags of each run by name. The runs use different optimizers, because the
#: states of optimizers have different names in checkpoints.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlm": ("mlm", _MLM | {"weight_decay": 0.1, "max_grad_norm": 1.0, "eval_steps": STEP}),
    "clm": ("clm", _CLM | {"optim": "muon", "weight_decay": 0.01}),
    "span_mlm": ("span_mlm", {
        "model_type": "t5", "tokenizer_name": f"{DATA}/t5", "max_seq_length": 16,
        "config_overrides": "d_model=8,d_kv=4,d_ff=16,num_layers=1,num_heads=2",
        "optim": "adafactor",
    }),
    # This run logs every second step. Its checkpoint therefore contains the sums of step 3, which
    # are not logged yet.
    "denoising": ("denoising", {
        "model_type": "bart", "tokenizer_name": f"{DATA}/roberta", "max_seq_length": 16,
        "config_overrides": _SIDES, "optim": "lion", "logging_steps": 2, "max_steps": 8,
    }),
    "translation": ("translation", {
        "model_type": "wmt_transformer", "tokenizer_name": f"{DATA}/marian",
        "config_overrides": _SIDES, "predict_with_generate": False, "scan_layers": True,
        "train_file": f"{DATA}/train-pairs.jsonl", "validation_file": f"{DATA}/valid-pairs.jsonl",
        "max_source_length": 16, "max_target_length": 16,
    }),
    "sft": ("sft", {
        "model_type": "llama", "tokenizer_name": f"{DATA}/chat", "packing": True,
        "train_file": f"{DATA}/chats.jsonl", "validation_file": None, "max_length": 48,
        "assistant_only_loss": True, "eos_token": "<|im_end|>",
        "config_overrides": f"{_BERT},num_key_value_heads=1,max_position_embeddings=48",
    }),
    "dpo": ("dpo", _PREFERENCES | {"packing": True}),
    "kto": ("kto", _PREFERENCES),
    "orpo": ("orpo", _PREFERENCES),
    "cpo": ("cpo", _PREFERENCES | {"loss_type": "simpo", "beta": 2, "cpo_alpha": 0.5}),
    "reward": ("reward", _PREFERENCES | {"pad_token": "<|endoftext|>"}),
    "token_classification": ("token_classification", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 16,
        "train_file": f"{DATA}/tags.jsonl", "validation_file": None,
        "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "question_answering": ("question_answering", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 24,
        "train_file": f"{DATA}/questions.jsonl", "validation_file": None, "doc_stride": 4,
        "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "summarization": ("summarization", {
        "model_type": "bart", "tokenizer_name": f"{DATA}/marian", "config_overrides": _SIDES,
        "train_file": f"{DATA}/summaries.jsonl", "validation_file": None,
        "predict_with_generate": False, "max_source_length": 16, "max_target_length": 8,
    }),
    "embedding": ("embedding", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 16,
        "train_file": f"{DATA}/texts.jsonl", "validation_file": None, "matryoshka_dims": "8,4",
        "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "cross_encoder": ("cross_encoder", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 24,
        "train_file": f"{DATA}/texts.jsonl", "validation_file": None,
        "loss": "multiple_negatives_ranking", "batch_sampler": "no_duplicates",
        "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "sparse_encoder": ("sparse_encoder", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 16,
        "train_file": f"{DATA}/texts.jsonl", "validation_file": None, "mini_batch_size": 3,
        "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "multi_vector": ("multi_vector", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 16,
        "train_file": f"{DATA}/texts.jsonl", "validation_file": None, "embedding_size": 4,
        "query_length": 12, "config_overrides": f"{_BERT},max_position_embeddings=24",
    }),
    "classification": ("classification", {
        "model_type": "bert", "tokenizer_name": f"{DATA}/bert", "max_seq_length": 16,
        "train_file": f"{DATA}/train.tsv", "validation_file": f"{DATA}/valid.tsv",
        "config_overrides": _BERT, "freeze": "embeddings/", "weight_decay": 0.01,
        "weight_decay_mode": "absolute",
    }),
    "image_classification": ("image_classification", {
        "model_type": "vit", "train_file": None, "validation_file": None,
        "train_dir": f"{DATA}/pictures", "image_size": 8, "decode_workers": 0,
        "config_overrides": f"{_BERT},patch_size=4", "optim": "nadamw",
    }),
    "image_text": ("image_text", {
        "model_name_or_path": f"{DATA}/pair", "train_file": f"{DATA}/captions.jsonl",
        "validation_file": None, "max_seq_length": 8, "decode_workers": 0,
    }),
    "image_to_text": ("image_to_text", {
        "model_name_or_path": f"{DATA}/writer", "train_file": f"{DATA}/captions.jsonl",
        "validation_file": None, "max_target_length": 8, "decode_workers": 0,
        "label_smoothing_factor": 0.1, "predict_with_generate": False,
    }),
    "speech_recognition": ("speech_recognition", {
        "model_name_or_path": f"{DATA}/whisper", "train_file": f"{DATA}/sounds.csv",
        "validation_file": None, "max_label_length": 8, "decode_workers": 0,
        "label_smoothing_factor": 0.1, "predict_with_generate": False,
    }),
    "wav2vec2": ("wav2vec2", {
        "train_file": None, "validation_file": None, "train_dir": f"{DATA}/sounds",
        "config_overrides": f"{_BERT},{_CONVOLUTIONS}", "mask_time_prob": 0.5,
        "max_duration_in_seconds": 0.1, "pad_to_multiple_of": 100, "decode_workers": 0,
        "gumbel_temperature_decay": 0.9,
    }),
    "ctc": ("ctc", {
        "train_file": f"{DATA}/sounds.csv", "validation_file": None,
        "config_overrides": f"{_BERT},{_CONVOLUTIONS}", "mask_time_prob": 0.2,
        "max_duration_in_seconds": 0.2, "pad_to_multiple_of": 100, "decode_workers": 0,
    }),
    "fp8": ("mlm", _MLM | {
        "precision": "fp8_delayed", "fp8_amax_history_length": 4,
        "gradient_accumulation_steps": 2,
    }),
    # Each row has four windows, and step 3 trains the third of them.
    "windows": ("clm", {
        "model_type": "vq_transformer", "tokenizer_name": f"{DATA}/bytes",
        "config_overrides": _VQ, "block_size": 32, "update_length": 8, "sample_by": "raw",
        "train_file": f"{DATA}/text8", "validation_file": None, "global_batch_size": 4,
    }),
    "float16": ("clm", _CLM | {"dtype": "float16", "optim": "sgd"}),
    "bfloat16_params": ("clm", _CLM | {"param_dtype": "bfloat16", "optim": "adam"}),
    "streaming": ("mlm", _MLM | {"streaming": True}),
}  # fmt: skip


def names() -> list[str]:
    """Returns the names of the stored runs."""
    return sorted(path.parent.name for path in STORED.glob("*/run.json"))


def record(name: str) -> dict[str, Any]:
    """Returns the contents of the `run.json` of a stored run."""
    return json.loads((STORED / name / "run.json").read_text())


def stored_state(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a stored state by path, in their original dtypes."""
    import ml_dtypes  # a dependency of jax that defines dtypes such as bfloat16

    types = {
        path: getattr(ml_dtypes, dtype_name) for path, dtype_name in record(name)["bits_of"].items()
    }
    with np.load(STORED / name / "state.npz") as arrays:
        return {p: arrays[p].view(types[p]) if p in types else arrays[p] for p in arrays.files}


@dataclasses.dataclass
class ContinuedRun:
    """A run that was resumed from a stored checkpoint."""

    folder: Path
    progress: dict[str, Any]  # read from the checkpoint
    state: dict[str, np.ndarray]  # restored from the checkpoint
    losses: dict[int, float]  # of the steps after the checkpoint


def continue_run(name: str, folder: Path) -> ContinuedRun:
    """Copies the checkpoint of a stored run to `folder`, and resumes the run there."""
    run_record = record(name)
    shutil.copytree(STORED / name / "checkpoints", folder / "checkpoints")
    progress = read_progress(folder)
    no_curve = mock.patch("hfseq.training.run.draw_curve", return_value="")
    with restored_states() as states, no_curve:
        run(run_record["objective"], run_record["flags"], STORED / "data", folder)
    return ContinuedRun(folder, progress, states[0], losses(folder))


def losses(folder: Path) -> dict[int, float]:
    """Returns the training losses of the logged steps after STEP."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["train_loss"] for r in records if "train_loss" in r and r["step"] > STEP}


def names_on_disk(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of the arrays and of the record entries in the checkpoint `folder`."""
    arrays = json.loads((folder / "state" / "_METADATA").read_text())["tree_metadata"]
    record_entries = json.loads((folder / "record" / "metadata").read_text())
    return sorted(arrays), sorted(record_entries)


# -- the functions below depend on hfseq


def run(objective: str, flags: dict[str, Any], data: Path, folder: Path) -> None:
    """Trains on one device with these flags. `data` replaces the placeholder DATA in flags."""
    import jax

    from hfseq.training.arguments import parse
    from hfseq.training.run import main

    all_flags = {**flags, "output_dir": folder, "data_cache_dir": folder.with_name("cache")}
    words = [f"--{name}={value}".replace(DATA, str(data)) for name, value in all_flags.items()]
    main(parse(words, objective=objective), objective, devices=jax.devices()[:1])


def read_progress(folder: Path) -> dict[str, Any]:
    """Returns the progress in the checkpoint of STEP."""
    from hfseq.training.checkpointer import Checkpointer

    return dataclasses.asdict(Checkpointer(folder).read_progress(STEP))


def remove_absolute_path(checkpoint: Path) -> None:
    """Removes the absolute path that orbax writes to a file in a checkpoint."""
    from hfseq.training import checkpointer

    for path in checkpoint.rglob("commit_success.txt"):
        path.write_text("Checkpoint commit was successful.\n")
    (checkpoint / checkpointer.CHECKSUMS_FILE).unlink()
    checkpointer.write_checksums(checkpoint)


@contextmanager
def restored_states() -> Iterator[list[dict[str, np.ndarray]]]:
    """Yields a list, to which each run in the context adds the state that it restores."""
    from hfseq.training.checkpointer import Checkpointer

    states: list[dict[str, np.ndarray]] = []
    real = Checkpointer.restore

    def restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = real(self, *args, **kwargs)
        states.append(arrays_of(state))
        return state

    with mock.patch.object(Checkpointer, "restore", restore):
        yield states


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a state by path, as arrays on the host."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf)
        for path, leaf in leaves
    }


# -- functions that write the stored files


def write(target: Path) -> None:
    """Writes the data, the tokenizers and the runs of RUNS that do not exist yet."""
    if not (target / "data").exists():
        write_data(target / "data")
    if not (target / "data" / "pictures").exists():
        write_images(target / "data")
    if not (target / "data" / "writer").exists():
        write_captioner(target / "data")
    if not (target / "data" / "sounds.csv").exists():
        words = write_words(target / "data" / "sounds", 16, longest=4, seconds=0.02)
        lines = [f"sounds/{number:03}.wav,{word}\n" for number, word in enumerate(words)]
        (target / "data" / "sounds.csv").write_text("audio,text\n" + "".join(lines))
    if not (target / "data" / "whisper").exists():
        write_whisper(target / "data")
    if not (target / "data" / "chats.jsonl").exists():
        chats.write_tokenizer(target / "data" / "chat")
        lines = ({"messages": conversation} for conversation in chats.conversations(40))
        chats.write_lines(target / "data" / "chats.jsonl", lines)
    if not (target / "data" / "preferences.jsonl").exists():
        chats.write_lines(target / "data" / "preferences.jsonl", preferences.pairs(40))
    if not (target / "data" / "tags.jsonl").exists():
        write_tasks(target / "data")
    for name, (objective, run_flags) in RUNS.items():
        if not (target / name).exists():
            with tempfile.TemporaryDirectory() as temporary:
                flags = {n: v for n, v in (_COMMON | run_flags).items() if v is not None}
                write_run(target / name, objective, flags, target / "data", Path(temporary))
            print(name, flush=True)


def write_run(
    target: Path, objective: str, flags: dict[str, Any], data: Path, temporary: Path
) -> None:
    """Trains a run, and stores its checkpoint of STEP, the state, and the losses after STEP.

    The function also resumes the run from this checkpoint, to read the restored state and to check
    that the losses are the same.
    """
    uninterrupted, again = temporary / "whole" / "run", temporary / "again" / "run"
    run(objective, flags, data, uninterrupted)
    expected = losses(uninterrupted)
    assert len(expected) == 3, expected
    shutil.copytree(uninterrupted / "checkpoints" / str(STEP), again / "checkpoints" / str(STEP))
    progress = read_progress(again)
    with restored_states() as states:
        run(objective, flags, data, again)
    assert losses(again) == expected, (losses(again), expected)
    stored_checkpoint = target / "checkpoints" / str(STEP)
    shutil.copytree(uninterrupted / "checkpoints" / str(STEP), stored_checkpoint)
    remove_absolute_path(stored_checkpoint)
    foreign = {p: a.dtype.name for p, a in states[0].items() if a.dtype.kind == "V"}
    bits = {p: a.view(f"u{a.itemsize}") if p in foreign else a for p, a in states[0].items()}
    np.savez_compressed(target / "state.npz", **bits)
    run_record = {"objective": objective, "flags": flags, "bits_of": foreign, "progress": progress}
    text = json.dumps({**run_record, "losses": expected}, indent=1)
    (target / "run.json").write_text(text + "\n")


def write_data(folder: Path) -> None:
    """Writes texts, pairs of texts and labeled sentences, and a tokenizer for each family."""
    from hfseq.data.tokenizers import train_tokenizer

    folder.mkdir(parents=True)
    draw = random.Random(0)
    words = "the law of every land is read by all who live there and do not yet know it".split()
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(50)]
    texts = [text.replace(" not", ". The not") for text in texts]
    for name, part in (("train", texts[:40]), ("valid", texts[40:])):
        cut = [text[:60] for text in part]
        rows = {
            f"{name}.jsonl": [json.dumps({"text": text}) for text in part],
            f"{name}-pairs.jsonl": [
                json.dumps({"source": text, "target": text.upper()}) for text in cut
            ],
            f"{name}.tsv": [f"made\t{len(text) % 2}\t\t{text}" for text in cut],
        }
        for file, lines in rows.items():
            (folder / file).write_text("".join(f"{line}\n" for line in lines))
    (folder / "text8").write_text("".join(draw.choices("abcdefgh \n", k=800)))
    both = [*texts, *(text[:60].upper() for text in texts)]
    for family, tokenizer_texts in (
        ("roberta", texts),
        ("t5", texts),
        ("marian", both),
        ("bert", texts),
    ):
        train_tokenizer(
            tokenizer_texts, family, vocab_size=300, output_dir=folder / family, min_frequency=1
        )
    train_tokenizer([], "vq_transformer", "bytes", output_dir=folder / "bytes")


def write_tasks(folder: Path) -> None:
    """Writes data for token classification, question answering, summarization and embeddings."""
    draw = random.Random(1)
    words = "the law of every land is read by all who live there".split()
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("tags", "questions", "summaries", "texts")
    }
    for number in range(40):
        sampled_words = draw.sample(words, 6)
        text = " ".join(sampled_words)
        tags = ["B-LAW" if word == "law" else "O" for word in sampled_words]
        tables["tags"].append({"tokens": sampled_words, "ner_tags": tags})
        start = text.index(f" {sampled_words[-1]}") + 1
        answers = {"text": [sampled_words[-1]], "answer_start": [start]}
        tables["questions"].append(
            {"id": number, "question": "who", "context": text, "answers": answers}
        )
        tables["summaries"].append({"document": text, "summary": sampled_words[0]})
        tables["texts"].append({"anchor": text, "positive": " ".join(sorted(sampled_words))})
    for name, rows in tables.items():
        chats.write_lines(folder / f"{name}.jsonl", rows)


def write_images(folder: Path) -> None:
    """Writes images in two classes, their captions, and a model that encodes images and texts."""
    from PIL import Image
    from transformers import BertConfig, ViTConfig, ViTImageProcessorPil

    from hfseq import FlaxBertModel, FlaxVisionTextDualEncoderModel, FlaxViTModel

    draw, rows = np.random.default_rng(0), []
    for name, low in (("dark", 0), ("light", 160)):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(8):
            pixels = draw.integers(low, low + 96, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
            rows.append({"image": f"pictures/{name}/{number}.png", "caption": f"all {name} there"})
    (folder / "captions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(
        vision_model=FlaxViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)),
        text_model=FlaxBertModel(
            BertConfig(vocab_size=300, max_position_embeddings=24, **sizes), seed=1
        ),
        projection_dim=8,
    )
    shutil.copytree(folder / "bert", folder / "pair")
    model.save_pretrained(folder / "pair")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "pair")


def write_whisper(folder: Path) -> None:
    """Writes a tiny Whisper model whose inputs have a length of one second."""
    from transformers import AutoTokenizer, WhisperConfig, WhisperFeatureExtractor

    from hfseq import FlaxWhisperForConditionalGeneration

    words = AutoTokenizer.from_pretrained(folder / "roberta")
    tokens = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "decoder_start_token_id": words.bos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    config = WhisperConfig(
        vocab_size=len(words),
        num_mel_bins=8,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=50,
        max_target_positions=16,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **tokens,
    )
    shutil.copytree(folder / "roberta", folder / "whisper")
    FlaxWhisperForConditionalGeneration(config).save_pretrained(folder / "whisper")
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.save_pretrained(folder / "whisper")


def write_captioner(folder: Path) -> None:
    """Writes a tiny image captioning model: an image encoder with a text decoder."""
    from transformers import AutoTokenizer, GPT2Config, ViTConfig, ViTImageProcessorPil

    from hfseq import FlaxGPT2LMHeadModel, FlaxVisionEncoderDecoderModel, FlaxViTModel

    words = AutoTokenizer.from_pretrained(folder / "roberta")
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    tokens = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    decoder = GPT2Config(
        vocab_size=len(words),
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=16,
        add_cross_attention=True,
        pad_token_id=words.pad_token_id,
        **tokens,
    )
    model = FlaxVisionEncoderDecoderModel.from_encoder_decoder_pretrained(
        encoder_model=FlaxViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)),
        decoder_model=FlaxGPT2LMHeadModel(decoder),
    )
    model.config.decoder_start_token_id = words.bos_token_id
    shutil.copytree(folder / "roberta", folder / "writer")
    model.save_pretrained(folder / "writer")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "writer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", type=Path, required=True, metavar="DIR")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    write(parser.parse_args().write)

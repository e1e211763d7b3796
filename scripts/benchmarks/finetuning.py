r"""Compare fine-tuning with hfseq's scripts and with a plain PyTorch loop, on generated data.

    python scripts/benchmarks/finetuning.py --work_dir runs              # all tasks, three seeds
    python scripts/benchmarks/finetuning.py --work_dir runs --tasks qa --seeds 1 2

hfseq and PyTorch start from the same checkpoint with random weights, which PyTorch initializes with
seed 0. They use the same batch size, number of epochs, learning rate schedule, AdamW settings and
dropout rates. The seed of a run determines its data order and dropout masks. The same code
evaluates the predictions of both on the same test examples. The table also lists the best baseline
that does not use a model. Finished runs are reused.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

Example = dict[str, Any]
Batch = dict[str, Any]
PAD, IGNORED = 0, -100
ENCODER = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}
PEGASUS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 256,
    "scale_embedding": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
    "init_std": 0.1,
}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class Task:
    """A task and its training settings.

    Attributes:
        script: Training script of hfseq.
        metric: Metric by which runs are compared.
        unit: Maximum of the metric, 1 or 100. The table shows the metric in percent of it.
        model: Transformers class of the model.
        size: Changes to the configuration of the model.
        rows: Function that tokenizes examples for the PyTorch loop.
        judge: Function that evaluates a PyTorch model and returns the metric.
        length: Maximum tokens per row.
        examples: Number of training examples.
        epochs: Number of epochs.
        learning_rate: Peak learning rate.
        flags: Additional flags of the script.
        batch_size: Examples per step.
        warmup: Warm-up steps.
        weight_decay: Weight decay of AdamW.
    """

    script: str
    metric: str
    unit: float
    model: str
    size: dict[str, Any]
    rows: Callable[[Any, Sequence[Example]], list[Batch]]
    judge: Callable[[Any, Any, Sequence[Example]], float]
    length: int
    examples: int
    epochs: int
    learning_rate: float
    flags: str
    batch_size: int = 16
    warmup: int = 100
    weight_decay: float = 0.01


# -- models and training with PyTorch


def make_tokenizer(examples: Sequence[Example], text_pairs: bool) -> Any:
    """Trains a byte-level BPE tokenizer on the texts of the training examples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    texts = [" ".join(map(str, texts_of(example))) for example in examples]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL.values()),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(texts, trainer)
    pair = "<s> $A </s> $B:1 </s>:1" if text_pairs else "$A </s> $B </s>"
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if text_pairs else "$A </s>",
        pair=pair,
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=256,
        **SPECIAL,
        model_input_names=names if text_pairs else names[::2],
    )


def texts_of(example: Example) -> Sequence[str]:
    """Returns all texts of an example."""
    if "tokens" in example:
        return example["tokens"]
    return [
        example[name] for name in ("question", "context", "document", "summary") if name in example
    ]


def build(task: Task, tokenizer: Any, examples: Sequence[Example]) -> Any:
    """Returns a model with random weights that has a label for each tag in the examples."""
    import transformers

    names = sorted({tag for example in examples for tag in example.get("ner_tags", ())})
    labels = (
        {
            "label2id": {name: number for number, name in enumerate(names)},
            "id2label": dict(enumerate(names)),
        }
        if names
        else {}
    )
    model_class = getattr(transformers, task.model)
    words = {"vocab_size": len(tokenizer), "pad_token_id": PAD}
    return model_class(model_class.config_class(**task.size, **words, **labels))


def tag_rows(tokenizer: Any, examples: Sequence[Example]) -> list[Batch]:
    """Tokenizes words and labels the first token of each word."""
    rows = []
    for example in examples:
        encoded = tokenizer(example["tokens"], is_split_into_words=True)
        words, labels = encoded.word_ids(), []
        for index, word in enumerate(words):
            first = word is not None and word != words[index - 1]
            labels.append(example["ner_tags"][word] if first else None)
        rows.append({"input_ids": encoded["input_ids"], "labels": labels})
    return rows


def read_rows(tokenizer: Any, examples: Sequence[Example]) -> list[Batch]:
    """Tokenizes questions with contexts and marks the first and last token of each answer.

    For examples without an answer, the first token of the row is marked.
    """
    rows = []
    for example in examples:
        encoded = tokenizer(example["question"], example["context"])
        start = end = 0
        if example["answers"]["text"]:
            (text,), (answer_start,) = (
                example["answers"]["text"],
                example["answers"]["answer_start"],
            )
            start = encoded.char_to_token(answer_start, sequence_index=1)
            end = encoded.char_to_token(answer_start + len(text) - 1, sequence_index=1)
        rows.append(
            {
                "input_ids": encoded["input_ids"],
                "token_type_ids": encoded["token_type_ids"],
                "start_positions": start,
                "end_positions": end,
            }
        )
    return rows


def write_rows(tokenizer: Any, examples: Sequence[Example]) -> list[Batch]:
    """Tokenizes documents and their summaries."""
    return [
        {
            "input_ids": tokenizer(example["document"])["input_ids"],
            "labels": tokenizer(text_target=example["summary"])["input_ids"],
        }
        for example in examples
    ]


def batches(rows: Sequence[Batch], size: int, order: Sequence[int], tags: Any) -> Iterator[Batch]:
    """Yields batches of ``size`` rows as tensors, padded to the longest row."""
    import torch

    for begin in range(0, len(order), size):
        batch_rows = [rows[index] for index in order[begin : begin + size]]
        batch = {"attention_mask": [[1] * len(row["input_ids"]) for row in batch_rows]}
        for name in batch_rows[0]:
            batch[name] = [row[name] for row in batch_rows]
        for name, values in batch.items():
            if isinstance(values[0], list):
                longest, fill = max(map(len, values)), IGNORED if name == "labels" else PAD
                values = [list(row) + [fill] * (longest - len(row)) for row in values]
                numbers = tags | {None: IGNORED}
                values = [[numbers.get(value, value) for value in row] for row in values]
            batch[name] = torch.tensor(values)
        yield batch


def torch_run(task: Task, checkpoint: Path, data: dict[str, list[Example]], seed: int) -> float:
    """Trains with a plain loop and returns the metric on the test examples."""
    import torch
    import transformers
    from transformers import AutoTokenizer

    torch.set_num_threads(1)  # more threads slow down models of this size
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows, order = task.rows(tokenizer, data["train"]), list(range(len(data["train"])))
    without_decay = [
        p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n.lower()
    ]
    with_decay = [
        p for p in model.parameters() if not any(p is excluded for excluded in without_decay)
    ]
    optimizer = torch.optim.AdamW(
        [
            {"params": with_decay, "weight_decay": task.weight_decay},
            {"params": without_decay, "weight_decay": 0.0},
        ],
        lr=task.learning_rate,
    )
    steps = task.epochs * -(-len(rows) // task.batch_size)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, task.warmup, steps)
    shuffle = random.Random(seed)
    model.train()
    for epoch in range(task.epochs):
        shuffle.shuffle(order)
        losses = []
        for batch in batches(rows, task.batch_size, order, config.label2id):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        harness.log_progress(
            f"PyTorch, seed {seed}, epoch {epoch + 1}: {statistics.fmean(losses):.3f}"
        )
    model.eval()
    with torch.inference_mode():
        return task.judge(model, tokenizer, data["test"])


def judge_tags(model: Any, tokenizer: Any, examples: Sequence[Example]) -> float:
    """Returns the F1 score of the predicted entities."""
    from hfseq.objectives.metrics import entity_scores

    rows, predictions = tag_rows(tokenizer, examples), []
    order = range(len(rows))
    for batch in batches(rows, 64, order, model.config.label2id):
        labels = batch.pop("labels")
        best = model(**batch).logits.argmax(-1)
        for tags, batch_labels in zip(best, labels, strict=True):
            predictions.append(
                [model.config.id2label[int(tag)] for tag in tags[batch_labels != IGNORED]]
            )
    return entity_scores(predictions, [example["ner_tags"] for example in examples])["f1"]


def judge_answers(model: Any, tokenizer: Any, examples: Sequence[Example]) -> float:
    """Returns the mean F1 score of the answers, in percent."""
    from hfseq.data.question_answering import best_spans, make_windows
    from hfseq.objectives.metrics import answer_scores

    questions, contexts = (
        [example[name] for example in examples] for name in ("question", "context")
    )
    offsets = make_windows(tokenizer, questions, contexts, 256, 128).offsets
    rows, scores = read_rows(tokenizer, examples), []
    for number, batch in enumerate(batches(rows, 1, range(len(rows)), {})):
        output = model(**{name: batch[name] for name in ("input_ids", "token_type_ids")})
        logits = [output.start_logits.numpy(), output.end_logits.numpy()]
        spans, null_score = best_spans(*logits, [offsets[number]], 20, 30)
        best = spans[0]
        answer = "" if null_score > best.score else contexts[number][best.start : best.end]
        scores.append(answer_scores(answer, examples[number]["answers"]["text"])[1])
    return 100 * statistics.fmean(scores)


def judge_summaries(model: Any, tokenizer: Any, examples: Sequence[Example]) -> float:
    """Returns the ROUGE-L score of greedy summaries."""
    from hfseq.objectives.metrics import rouge_scores

    rows, predictions = write_rows(tokenizer, examples), []
    for batch in batches(rows, 64, range(len(rows)), {}):
        del batch["labels"]
        sequences = model.generate(**batch, max_new_tokens=64, do_sample=False, num_beams=1)
        predictions += tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return rouge_scores(predictions, [[example["summary"]] for example in examples]).values[
        "rougeL"
    ]


TASKS = {
    "ner": Task(
        "run_ner_flax.py",
        "f1",
        1.0,
        "RoFormerForTokenClassification",
        ENCODER,
        tag_rows,
        judge_tags,
        128,
        3000,
        3,
        2e-3,
        "",
    ),
    "qa": Task(
        # With a smaller initializer_range, matching questions with names takes many more steps.
        "run_qa_flax.py",
        "f1",
        100.0,
        "RoFormerForQuestionAnswering",
        ENCODER | {"initializer_range": 0.1},
        read_rows,
        judge_answers,
        256,
        3000,
        8,
        2e-3,
        "--version_2_with_negative",
    ),
    "summarization": Task(
        "run_summarization_flax.py",
        "rougeL",
        100.0,
        "PegasusForConditionalGeneration",
        PEGASUS,
        write_rows,
        judge_summaries,
        256,
        3000,
        4,
        2e-3,
        "--line_by_line --max_source_length 160 --max_target_length 65",
    ),
}


# -- training with hfseq, and the command


def hfseq_command(task: Task, name: str, checkpoint: str, data: str, out: str, seed: int) -> str:
    """Returns the command that trains a task with hfseq, with these paths and this seed."""
    length = "" if "--max_source_length" in task.flags else f"--max_seq_length {task.length} "
    return (
        f"scripts/{task.script} --output_dir {out} --model_name_or_path {checkpoint} "
        f"--train_file {data}/train.jsonl --validation_file {data}/validation.jsonl "
        f"--test_file {data}/test.jsonl --do_train --do_eval --do_predict {length}"
        f"{task.flags + ' ' if task.flags else ''}--per_device_train_batch_size {task.batch_size} "
        f"--num_train_epochs {task.epochs} --learning_rate {task.learning_rate:g} "
        f"--warmup_steps {task.warmup} --weight_decay {task.weight_decay:g} --eval_strategy epoch "
        f"--save_strategy no --logging_steps 25 --seed {seed}"
    )


def hfseq_run(task: Task, name: str, folder: Path, seed: int) -> float:
    """Trains with hfseq unless the run is finished, and returns the metric on the test examples."""
    out = folder / f"hfseq-{seed}"
    if not (out / "predict_results.json").exists():
        paths = (str(folder / part) for part in ("checkpoint", "data", out.name))
        command = hfseq_command(task, name, *paths, seed)
        subprocess.run([sys.executable, *shlex.split(command)], check=True, cwd=harness.ROOT)
    return json.loads((out / "predict_results.json").read_text())[f"predict_{task.metric}"]


def read_examples(path: Path) -> list[Example]:
    """Returns the examples of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare(name: str, folder: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Trains a task with hfseq and PyTorch and returns the metric of each seed in percent."""
    import torch

    task, data, checkpoint = TASKS[name], folder / "data", folder / "checkpoint"
    make = ["scripts/make_task_data.py", "--task", name, "--train", str(task.examples)]
    if not (data / "baselines.json").exists():
        command = [sys.executable, *make, "--output_dir", str(data)]
        subprocess.run(command, check=True, cwd=harness.ROOT)
    examples = {split: read_examples(data / f"{split}.jsonl") for split in ("train", "test")}
    if not (checkpoint / "config.json").exists():
        tokenizer = make_tokenizer(examples["train"], text_pairs=name != "summarization")
        torch.manual_seed(0)
        build(task, tokenizer, examples["train"]).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    scores: dict[str, list[float]] = {"hfseq": [], "PyTorch": []}
    for seed in seeds:
        scores["hfseq"].append(100 / task.unit * hfseq_run(task, name, folder, seed))
        path = folder / f"pytorch-{seed}.json"
        if not path.exists():
            harness.write_json(path, torch_run(task, checkpoint, examples, seed))
        scores["PyTorch"].append(100 / task.unit * json.loads(path.read_text()))
    baselines = json.loads((data / "baselines.json").read_text())
    ours, theirs = scores["hfseq"], scores["PyTorch"]
    mean = statistics.fmean(ours)
    return {
        "task": name,
        "metric": task.metric,
        "seeds": list(seeds),
        **scores,
        "baselines": {
            key: 100 / task.unit * value
            for key, value in baselines.items()
            if key.endswith(task.metric)
        },
        "mean_within": min(theirs) <= mean <= max(theirs),
        "ranges_overlap": max(min(ours), min(theirs)) <= min(max(ours), max(theirs)),
        "data": shlex.join(make),
        "command": hfseq_command(task, name, "checkpoint", "data", "OUT", seeds[0]),
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code.

    The exit code is 1 if, for one of the tasks, the range of hfseq's results over all seeds does
    not overlap with the range of PyTorch's results.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for data and runs")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=list(TASKS),
        choices=list(TASKS),
        help="tasks to run (default: all)",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds (default: 1 2 3)"
    )
    output_help = "folder for finetuning.json (default: docs/benchmarks)"
    parser.add_argument(
        "--output_dir", type=Path, default=harness.DOCS / "benchmarks", help=output_help
    )
    options = parser.parse_args(arguments)
    path = options.output_dir / "finetuning.json"
    # Keep earlier results of tasks that are not run now.
    results = {
        result["task"]: result for result in (json.loads(path.read_text()) if path.exists() else [])
    }
    for name in options.tasks:
        results[name] = compare(name, options.work_dir.absolute() / name, options.seeds)
        harness.write_json(path, [results[task] for task in TASKS if task in results])
    columns = [
        "task",
        "metric",
        "hfseq",
        "PyTorch",
        "hfseq's mean within PyTorch's range",
        "best baseline without a model",
    ]
    lines = [
        [
            name,
            result["metric"],
            *(" ".join(f"{score:.1f}" for score in result[side]) for side in ("hfseq", "PyTorch")),
            "yes"
            if result["mean_within"]
            else f"no, {distance_to_range(result):+.2f}"
            f" ({'ranges overlap' if result['ranges_overlap'] else 'ranges apart'})",
            f"{max(result['baselines'].values()):.1f}",
        ]
        for name, result in results.items()
    ]
    table = harness.markdown(columns, lines)
    if options.output_dir == harness.DOCS / "benchmarks":
        harness.write_section(harness.DOCS / "benchmarks.md", "finetuning", table)
    print(table)
    return 0 if all(results[name]["ranges_overlap"] for name in options.tasks) else 1


def distance_to_range(result: dict[str, Any]) -> float:
    """Returns the signed distance of hfseq's mean to the range of PyTorch's results."""
    mean = statistics.fmean(result["hfseq"])
    return mean - (max if mean > max(result["PyTorch"]) else min)(result["PyTorch"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Several processes export a model: the files of one process, and one parameter in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.test_distributed_processes import Processes

LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "query"}
MEASURE = """
import jax
import hfseq.training.callbacks as callbacks
import hfseq.training.export as module
from hfseq import hookimpl

export = module.export

def megabytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(name))

def measure(*arguments):
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = megabytes("VmRSS")
    export(*arguments)
    print("export added", megabytes("VmHWM") - before, "MB", flush=True)

callbacks.export = measure

@hookimpl
def register_optimizers(register):
    pass
"""


def exported(folder: Path) -> dict[str, bytes]:
    names = ("config.json", "tokenizer.json", "adapter_config.json")
    paths = [*folder.glob("*.safetensors"), *(folder / name for name in names)]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        # The vocabulary of 300 tokens is padded to a multiple of the tensor axis.
        ("data=1,tensor=2", {}),
        ("fsdp=2", {"scan_layers": True}),
        ("data=2", {}),
        ("fsdp=2", {"objective": "span_mlm"}),
        ("fsdp=2", LORA),
    ],
)
def test_processes_write_the_files_of_one(flags, train, tmp_path, mesh, options):
    # Without a change of the weights, because sums over devices are rounded differently.
    common = {"max_steps": 1, "learning_rate": 0, "warmup_steps": 0, "eval_strategy": "no"}
    if "use_peft" in options:
        train("base", devices=1, **common)
        common |= {"model_name_or_path": tmp_path / "base", "model_type": None}
        common |= {"config_overrides": None, "tokenizer_name": None}
    options = common | options
    train("one", devices=1, **options)
    objective = str(options.get("objective", "mlm"))
    Processes(flags("two", **options | {"mesh": mesh}), 2, objective=objective).ends(0)
    one, two = exported(tmp_path / "one"), exported(tmp_path / "two")
    assert one.keys() == two.keys() and any(name.endswith("safetensors") for name in one)
    for name, content in one.items():
        assert two[name] == content, name


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_export_does_not_gather_the_model_in_each_process(count, tmp_path):
    import transformers

    from hfseq import FlaxBertForSequenceClassification
    from hfseq.data.tokenizers import train_tokenizer

    config = transformers.BertConfig(
        vocab_size=50_000,
        hidden_size=2048,
        num_hidden_layers=7,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    model = FlaxBertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "model")
    del model
    texts = ["the law of every land is read by all"] * 20
    train_tokenizer(texts, "bert", vocab_size=60, output_dir=tmp_path / "model", min_frequency=1)
    lines = (json.dumps({"sentence": text, "label": i % 2}) for i, text in enumerate(texts))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "measure.py").write_text(MEASURE)
    values = {
        **{"model_name_or_path": tmp_path / "model", "train_file": tmp_path / "train.jsonl"},
        **{
            "plugin": tmp_path / "measure.py",
            "output_dir": tmp_path / "run",
            "mesh": f"fsdp={count}",
        },
        **{"max_steps": 1, "global_batch_size": 4, "max_seq_length": 16, "optim": "sgd"},
        **{"report_to": "none", "card_samples": 0, "compilation_cache_dir": "none"},
        **{"validation_split_percentage": 0, "do_train": True, "save_strategy": "no"},
    }
    words = [f"--{name}={value}" for name, value in values.items()]
    texts = Processes(words, count, objective="classification").ends(0)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size / 2**20
    largest = 50_000 * 2048 * 4 / 2**20
    added = [int(text.split("export added ")[1].split()[0]) for text in texts]
    assert size > 1000
    # Process 0 has one file in memory, which is the whole model here, and all have one parameter,
    # twice while it is copied.
    assert added[0] < size + 2.5 * largest and max(added[1:]) < 2.5 * largest, added
    assert max(added) < size / count + 2 * size

"""Masked-LM training steps of RoBERTa-base: hfseq beside PyTorch, on the same batches and masks.

    python scripts/benchmarks/train_mlm.py                      # the table of docs/benchmarks.md
    python scripts/benchmarks/train_mlm.py --dropout 0 --compile
    python scripts/benchmarks/train_mlm.py --layers 2 --rounds 3 --output /tmp/try

Both train with AdamW from the same weights; PyTorch gets labels of full length, as its data
collator makes them. It runs from a checkout, on the CPU or on an NVIDIA GPU, with what the Python
has: rows of packages that are missing say so. First the losses of three steps without dropout must
agree.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

NAME = "train_mlm"
VOCABULARY, MASK_ID = 50265, 50264
MASKED = 0.15
BATCHES = 4
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HFSEQ = ("jax", "flax", "optax", "transformers")
PYTORCH = ("torch", "transformers")
# Large allocations of glibc in pages of 2 MB: a step then faults in hundreds of pages, not 300,000.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Where the first losses of two implementations may differ, relatively: sums in another order, and
# in bfloat16 rounding at other places.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3}


# -- what both are given


def host_batch(number: int, rows: int, length: int) -> tuple[dict[str, Any], Any]:
    """Return packed rows of one document each, and the random numbers that mask them."""
    import numpy as np

    from hfseq.data.batches import RowRandom

    ids = np.random.default_rng(number).integers(5, MASK_ID, (rows, length), dtype=np.int32)
    batch = {"input_ids": ids, "segment_ids": np.ones_like(ids), "valid": np.ones(rows, bool)}
    return batch, RowRandom(0, number, np.arange(rows))


def configuration(layers: int, dropout: float) -> Any:
    """Return RoBERTa-base's configuration, with another number of layers or dropout if wanted."""
    from transformers import RobertaConfig

    return RobertaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip


def model_flops(layers: int, rows: int, length: int, width: int = 768, wide: int = 3072) -> float:
    """Return the FLOPs that a step needs: encoder, attention, the head at masked tokens.

    What an implementation computes beyond them (logits that no loss reads) is not counted.
    """
    tokens = rows * length
    kernels = layers * (4 * width**2 + 2 * width * wide)
    encoder = tokens * (6.0 * kernels + 12.0 * layers * width * length)
    return encoder + tokens * MASKED * 6.0 * (width**2 + VOCABULARY * width)


# -- the contestants, each in its own process


def hfseq_step(
    dtype: str, rows: int, length: int, layers: int, dropout: float, weights: str
) -> harness.Running:
    """The step that the training loop compiles, with its objective and optimizer."""
    import jax
    import jax.numpy as jnp
    import optax

    from hfseq.data.arguments import DataArguments
    from hfseq.nn import precision
    from hfseq.objectives.mlm import MaskedLM
    from hfseq.training import optimizers, state
    from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM

    config = configuration(layers, dropout)
    model = FlaxRobertaForMaskedLM(config, _do_init=False, precision=precision.precision_for(dtype))
    objective = MaskedLM(DataArguments(mlm_probability=MASKED), tokenizer(), config)
    flags = SimpleNamespace(
        adam_beta1=ADAMW["betas"][0], adam_beta2=ADAMW["betas"][1], adam_epsilon=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"], freeze=[], no_decay=[], max_grad_norm=0.0,
    )  # fmt: skip
    schedule = optax.constant_schedule(ADAMW["lr"])
    optimizer = optimizers.make_optimizer(optimizers.adamw, flags, schedule)
    names = tuple(sorted({"loss", "count", *objective.sums}))
    params = FlaxRobertaForMaskedLM.from_pretrained(weights, config=config).params
    make = jax.jit(
        lambda p: state.make_state(p, optimizer, model.extra, state.zero_window(names)),
        donate_argnums=0,
    )
    current = make(params)
    del params
    step = jax.jit(state.make_step(objective, model, optimizer, 0, False), donate_argnums=0)
    batches = []
    for number in range(BATCHES):
        batch, random = host_batch(number, rows, length)
        collated = objective.collate(batch, random, 1) | {"row": jnp.arange(rows)}
        batches.append({name: jnp.asarray(leaf)[None] for name, leaf in collated.items()})
    done = 0

    def run() -> dict[str, float]:
        nonlocal current, done
        current, found = step(current, batches[done % BATCHES])
        done += 1
        return {"loss": float(found["loss"])}

    device = jax.devices()[0]
    count = sum(leaf.size for leaf in jax.tree.leaves(current["params"]))
    facts = {"device": f"{device.platform} {device.device_kind}", "parameters": count}
    return harness.Running(run, harness.jax_peak_bytes, facts)


def tokenizer() -> SimpleNamespace:
    """What masking asks of a tokenizer: its size, its mask and its special tokens."""

    class Stub(SimpleNamespace):
        def __len__(self) -> int:
            return VOCABULARY

        def get_vocab(self) -> dict[str, int]:
            return {"<mask>": MASK_ID}

    special = [0, 1, 2, 3, MASK_ID]
    return Stub(mask_token_id=MASK_ID, all_special_ids=special, added_tokens_decoder={})


def torch_step(
    dtype: str,
    rows: int,
    length: int,
    layers: int,
    dropout: float,
    weights: str,
    compiled: bool = False,
) -> harness.Running:
    """``RobertaForMaskedLM`` with its default attention (sdpa) and the Trainer's fused AdamW."""
    import numpy as np
    import torch
    from transformers import RobertaForMaskedLM

    from hfseq.objectives.masking import mask_tokens

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RobertaForMaskedLM.from_pretrained(weights, config=configuration(layers, dropout))
    model = model.to(device).train()
    plain = [p for p in model.parameters() if p.ndim < 2]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
    forward = torch.compile(model) if compiled else model
    special = np.zeros(VOCABULARY, bool)
    special[tokenizer().all_special_ids] = True
    batches = []
    for number in range(BATCHES):
        batch, random = host_batch(number, rows, length)
        masked = mask_tokens(
            batch,
            random,
            mask_id=MASK_ID,
            vocab_size=VOCABULARY,
            special=special,
            probability=MASKED,
        )
        batches.append([torch.from_numpy(part).long().to(device) for part in masked])
    done = 0

    def run() -> dict[str, float]:
        nonlocal done
        ids, labels = batches[done % BATCHES]
        done += 1
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = forward(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.item()
        if device == "cuda":
            torch.cuda.synchronize()
        return {"loss": found}

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {
        "device": name,
        "attention": model.config._attn_implementation,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return harness.Running(run, harness.torch_peak_bytes, facts)


def save_weights(folder: str, layers: int) -> harness.Running:
    """Write the weights that all start from, in a process of its own: no one's memory shows it."""
    if not harness.Contestant("", "", "", requires=HFSEQ).missing():
        from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM as Model
    else:
        from transformers import RobertaForMaskedLM as Model
    Model(configuration(layers, 0.1)).save_pretrained(folder)
    return harness.Running(lambda: {}, harness.host_peak_bytes)


# -- the benchmark


def variants(options: argparse.Namespace) -> list[tuple[str, str, dict, dict]]:
    """Return (side, addition to its name, settings, environment); the baseline first."""
    found: list[tuple[str, str, dict, dict]] = [("torch", "", {}, {})]
    if options.compile:
        found.append(("torch", ", compiled", {"compiled": True}, {}))
    found.append(("hfseq", "", {}, {}))
    if options.huge_pages:
        found += [(side, ", huge pages", {}, HUGE_PAGES) for side in ("torch", "hfseq")]
    return found


def contestants(
    options: argparse.Namespace, weights: str, dropout: float
) -> list[harness.Contestant]:
    """Return every variant in every precision."""
    shared = {
        "rows": options.batch, "length": options.length, "layers": options.layers,
        "dropout": dropout, "weights": weights,
    }  # fmt: skip
    names = {"hfseq": "hfseq", "torch": "PyTorch"}
    packages = {"hfseq": HFSEQ, "torch": PYTORCH}
    return [
        harness.Contestant(
            names[side] + suffix, dtype, f"{NAME}:{side}_step",
            shared | {"dtype": dtype} | settings, packages[side], environment,
        )
        for dtype in options.dtypes
        for side, suffix, settings, environment in variants(options)
    ]  # fmt: skip


def disagreements(rows: list[harness.Row]) -> list[str]:
    """Compare the losses of every contestant with those of the first of its group."""
    problems = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group and row.values]
        for row in members[1:]:
            pairs = [
                (a["loss"], b["loss"]) for a, b in zip(row.values, members[0].values, strict=False)
            ]
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            if not worst <= TOLERANCE[group]:
                problems.append(
                    f"{group}: the losses of {row.name} and {members[0].name} differ by "
                    f"{worst:.1e} (allowed {TOLERANCE[group]:.0e}): {pairs}"
                )
    return problems


def summary(
    row: harness.Row, baseline: harness.Row, tokens: int, flops: float, rate: float
) -> dict:
    """Return the numbers of a row of the table; ``None`` where it did not run."""
    seconds = row.median
    return {
        "name": row.name, "precision": row.group, "status": row.status, "seconds": row.seconds,
        "median_seconds": seconds, "spread": row.spread, "start_seconds": row.start_seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "ratio": harness.ratio(row, baseline),
        "mfu": flops / seconds / rate if seconds and rate else None,
        "peak_memory_gb": row.peak_bytes / harness.GB or None,
        "losses": [value["loss"] for value in row.values], "facts": row.facts,
    }  # fmt: skip


def as_table(rows: list[dict]) -> str:
    """Return the Markdown table of ``summary`` rows."""
    columns = ["", "precision", "tokens/s", "ms a step", "against PyTorch", "MFU", "peak memory"]

    def shown(row: dict) -> list[str]:
        if row["status"] != "ok":
            return [f"{row['name']} ({row['status']})", row["precision"], *["-"] * 5]
        spread = f" ± {row['spread']:.0%}" if row["spread"] is not None else ""
        return [
            row["name"], row["precision"], f"{row['tokens_per_second']:.0f}",
            f"{row['median_seconds'] * 1000:.0f}{spread}",
            f"{row['ratio']:.2f}x" if row["ratio"] else "-",
            f"{row['mfu']:.0%}" if row["mfu"] else "-", f"{row['peak_memory_gb']:.2f} GB",
        ]  # fmt: skip

    return harness.table(columns, [shown(row) for row in rows])


def section(result: dict) -> str:
    """Return what docs/benchmarks.md shows of a result: the table, and what it was measured on."""
    machine, options = result["machine"], result["options"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {d}" for d, rate in result["matmul_flops"].items()
    )
    facts = [
        f"RoBERTa-base ({options['layers']} layers), batch {options['batch']}, length "
        f"{options['length']}, dropout {options['dropout']:g}, {options['rounds']} alternating "
        "rounds, an untimed step before each: medians, ± half of the interquartile range.",
        f"{machine['cpu']}, {result['threads']} threads, load {machine['load']:g} at the start "
        f"({', '.join(machine['features']) or 'no AVX2'}); {versions}; measured matrix products: "
        f"{rates or 'none'}.",
        f"`{result['command']}`",
    ]
    return as_table(result["rows"]) + "\n\n" + "\n\n".join(facts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="rows a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a row")
    parser.add_argument("--layers", type=int, default=12, help="layers of the encoder")
    parser.add_argument("--dropout", type=float, default=0.1, help="rate of all dropout")
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contestant")
    parser.add_argument("--threads", type=int, default=None, help="cores for each; all by default")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--huge-pages", action="store_true", help="both with 2 MB pages, too")
    parser.add_argument("--no-check", action="store_true", help="do not compare losses first")
    parser.add_argument(
        "--output",
        type=Path,
        default=harness.ROOT / "docs",
        help="gets benchmarks.md and benchmarks/*.json",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print and write; exit code 1 if losses disagree or nothing ran."""
    options = parse(arguments)
    machine = harness.machine_facts()
    threads = options.threads or machine["cores"]

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "layers": options.layers}
        writer = harness.Contestant(
            "weights", "", f"{NAME}:save_weights", settings, ("transformers",)
        )
        harness.run([writer], rounds=0, warmup=0, threads=threads, report=tell)
        problems = []
        if not options.no_check:
            pairs = contestants(options, folder, 0.0)
            checked = harness.run(pairs, rounds=3, warmup=0, threads=threads, report=tell)
            problems = disagreements(checked)
        rates = harness.matmul_rates(options.dtypes, threads=threads)
        rows = harness.run(
            contestants(options, folder, options.dropout),
            rounds=options.rounds, settle=1, threads=threads, report=tell,
        )  # fmt: skip
    flops = model_flops(options.layers, options.batch, options.length)
    first = {group: next(r for r in rows if r.group == group) for group in options.dtypes}
    tokens = options.batch * options.length
    result = {
        "benchmark": NAME, "command": command(arguments), "machine": machine, "threads": threads,
        "options": {n: v for n, v in vars(options).items() if n != "output"},
        "matmul_flops": rates, "model_flops": flops, "problems": problems,
        "rows": [summary(r, first[r.group], tokens, flops, rates.get(r.group, 0.0)) for r in rows],
    }  # fmt: skip
    harness.write_json(options.output / "benchmarks" / f"{NAME}.json", result)
    harness.write_section(options.output / "benchmarks.md", NAME, section(result))
    print(section(result))
    for problem in problems:
        tell(problem)
    return 1 if problems or not any(row.seconds for row in rows) else 0


def command(arguments: list[str] | None) -> str:
    """Return the command to repeat, without the place where its output went."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--output" in given:
        at = given.index("--output")
        del given[at : at + 2]
    return shlex.join(["python", f"scripts/benchmarks/{NAME}.py", *given])


if __name__ == "__main__":
    sys.exit(main())

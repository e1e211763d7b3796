"""Generation: greedy search, sampling and beam search beside PyTorch's ``generate``."""

from __future__ import annotations

from suites import tables
from suites.base import Case, Options, rivals

TITLE = "Generation"
SUMMARY = (
    "`generate` of both sides, on the same weights and prompts; every row gets the same number of "
    "new tokens. The limit counts the weights and caches that each token has to read. "
    "`generate.py` compares the tokens, too."
)
COLUMNS = (
    tables.CASE, ("new tokens/s", tables.rate), ("ms a call", tables.milliseconds), tables.RATIO,
    tables.LIMIT, tables.MEMORY,
)  # fmt: skip
PICTURE = "ratio"
#: Model, title, mode, beams, batch sizes on a CPU and on a GPU.
SHAPES = (
    ("gpt2", "GPT-2 small", "greedy", 1, (1, 16), (1, 64)),
    ("gpt2", "GPT-2 small", "sampling", 1, (1, 16), (1, 64)),
    ("t5", "T5-small", "beam", 4, (4,), (32,)),
    ("bart", "BART-base", "beam", 4, (4,), (32,)),
)
FACTORIES = {"torch": "contestants:torch_generate", "hfseq": "contestants:hfseq_generate"}


def cases(options: Options) -> list[Case]:
    """Return a case for each mode, batch size and type; PyTorch's ``generate`` runs eagerly."""
    found = []
    new, prompt = options.choose(32, 128, 16, 4), options.choose(64, 128, 32, 6)
    for model, title, mode, beams, cpu, gpu in SHAPES:
        for dtype in options.types(
            options.choose(("float32",), ("bfloat16",), *[("float32",)] * 2)
        ):
            for rows in options.choose(cpu, gpu, cpu[:1], (2,)):
                search = f"beam {beams}" if mode == "beam" else mode
                name = f"{title}, {search}, batch {rows}, {dtype}"
                settings = {
                    "model": model, "mode": mode, "beams": beams, "rows": rows, "length": prompt,
                    "new_tokens": new, "size": options.size(model), "dtype": dtype,
                }  # fmt: skip
                peers = tuple(p for p in options.peers if p != "torch_compile")
                contestants = rivals(options, FACTORIES, settings, name, peers)
                found.append(
                    Case(
                        name, contestants, rows * new, dtype=dtype,
                        rounds=options.choose(3, 7, 3, 1), warmup=options.choose(2, 2, 1, 1),
                        weights=(model, options.size(model)),
                    )
                )  # fmt: skip
    return found

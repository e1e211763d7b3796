"""The flags of run_bert_flax.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfseq.data.arguments import option
from hfseq.errors import UsageError, nearest

PRECISIONS = ("float32", "bfloat16")


@dataclass
class InferenceArguments:
    """What runs, on what, how often. The defaults are those of the old script."""

    model_name_or_path: str | None = option(
        None,
        "Directory or Hub name of a BERT-like encoder; BERT-base, randomly initialised, if none.",
    )
    precision: str = option(
        "bfloat16", "bfloat16 runs both precisions and compares them, float32 that one alone."
    )
    text: list[str] | None = field(
        default=None,
        metadata={"help": "Texts to run instead of random tokens, repeated to fill the batch."},
    )
    text_file: str | None = option(None, "The same, a text a line; blank lines are left out.")
    batch_size: int = option(32, "Rows a run.")
    max_seq_length: int = option(128, "Tokens a row; texts are cut or padded to it.")
    num_warmup: int = option(5, "Untimed runs before, of each precision.")
    num_runs: int = option(100, "Timed runs of each precision, which take turns.")
    config_overrides: str | None = option(
        None, "Without a model: changes to BERT-base, e.g. num_hidden_layers=6."
    )
    seed: int = option(0, "Seed of random weights and tokens.")
    json: str | None = option(
        None, "Write the result to this file; - prints it instead of a table."
    )
    plugin: list[str] = field(
        default_factory=list, metadata={"help": "Plugin files to load, e.g. my_model.py."}
    )
    debug: bool = option(False, "Show tracebacks of errors.")

    def __post_init__(self) -> None:
        problems = []
        if self.precision not in PRECISIONS:
            problems.append(
                f"--precision {self.precision}: give one of {', '.join(PRECISIONS)}"
                f"{nearest(self.precision, PRECISIONS)}"
            )
        least = {"batch_size": 1, "max_seq_length": 1, "num_warmup": 0, "num_runs": 1}
        problems += [
            f"--{name} {getattr(self, name)}: give a number of at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        ]
        if self.text and self.text_file:
            problems.append("--text and --text_file exclude each other: give one of them")
        if (self.text or self.text_file) and not self.model_name_or_path:
            problems.append("text needs a tokenizer: give --model_name_or_path too")
        if self.config_overrides and self.model_name_or_path:
            problems.append(
                "--config_overrides is for the built-in BERT-base: drop it, or --model_name_or_path"
            )
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def precisions(self) -> tuple[str, ...]:
        """What is measured; float32 is the reference of bfloat16."""
        return PRECISIONS if self.precision == "bfloat16" else ("float32",)

"""What lies beside the weights: tokenizer, options of generation, FP8 scales, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hfseq import json_text
from hfseq.errors import first_line
from hfseq.inspection.headers import read_header

Fetch = Callable[[str], str | None]
PLAIN_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
FP8 = "fp8_params.safetensors"


def read_json(fetch: Fetch, name: str, problems: list[str]) -> dict[str, Any]:
    """Return a JSON object, or nothing; what is wrong with it is noted."""
    path = fetch(name)
    if path is None:
        return {}
    try:
        found = json_text.parse(Path(path).read_bytes())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        problems.append(f"{name} cannot be read: {first_line(error)}")
        return {}
    return found


def tokenizer(fetch: Fetch, problems: list[str]) -> dict[str, Any] | None:
    """Return the kind, size and largest id of the tokenizer; None where there is none."""
    settings = read_json(fetch, "tokenizer_config.json", problems)
    found: dict[str, Any] = {"class": settings.get("tokenizer_class"), "file": None}
    ids: list[int] = []
    if (path := fetch("tokenizer.json")) is not None:
        found["file"] = "tokenizer.json"
        ids = _fast(path, problems)
    else:
        name = next((name for name in PLAIN_VOCABULARIES if fetch(name)), None)
        if name is None:
            return None
        found["file"], ids = name, _plain(Path(str(fetch(name))), problems)
    added = settings.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        ids += [int(number) for number in added if str(number).isdecimal()]
    if ids:
        found |= {"entries": len(set(ids)), "largest_id": max(ids)}
    return found


def _fast(path: str, problems: list[str]) -> list[int]:
    from tokenizers import Tokenizer

    try:
        return list(Tokenizer.from_file(path).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the library raises bare Exceptions
        problems.append(f"tokenizer.json cannot be read: {first_line(error)}")
        return []


def _plain(path: Path, problems: list[str]) -> list[int]:
    try:
        if path.suffix == ".json":
            return [int(number) for number in json_text.parse(path.read_bytes()).values()]
        if path.suffix == ".txt":
            return list(range(path.read_text("utf-8").count("\n")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(f"{path.name} cannot be read: {first_line(error)}")
    return []


def generation(fetch: Fetch, problems: list[str]) -> dict[str, Any] | None:
    """Return what generation_config.json sets; None where there is none."""
    if fetch("generation_config.json") is None:
        return None
    found = read_json(fetch, "generation_config.json", problems)
    hidden = ("transformers_version", "_from_model_config")
    return {name: value for name, value in found.items() if name not in hidden}


def fp8(fetch: Fetch) -> dict[str, Any] | None:
    """Return what the file of FP8 scales says; None where there is none."""
    path = fetch(FP8)
    if path is None:
        return None
    header = read_header(path)
    return {
        "file": FP8,
        "recipe": header.metadata.get("recipe"),
        "variables": len(header.tensors),
        "problems": header.problems,
    }


def training(folder: Path) -> dict[str, Any] | None:
    """Return the steps of training checkpoints and the last logged step; None where no run was."""
    steps = sorted(
        int(entry.name)
        for entry in (folder / "checkpoints").glob("*")
        if entry.name.isdecimal() and entry.is_dir()
    )
    log = folder / "metrics.jsonl"
    if not steps and not log.is_file():
        return None
    found: dict[str, Any] = {"checkpoints": steps}
    if log.is_file():
        from hfseq.training.tracking import read_metrics

        records = read_metrics(log)
        found["logged_step"] = max((record["step"] for record in records), default=None)
    return found

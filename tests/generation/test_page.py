"""The page about generation: its examples run, and its table contains every option."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hfseq.generation.options import UNSUPPORTED_IF_REQUESTED, UNSUPPORTED_OPTIONS, Options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "generation.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_examples_run_one_after_the_other(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "(2, 12)" and lines[1] == "(6, 12) (4, 12)"
    assert names["sequences"].shape == (2, 12)


def test_every_option_is_on_the_page():
    inner = {"has_min_length", "timestamp_rules"}
    ours = {field.name for field in dataclasses.fields(Options)} - inner
    missing = [name for name in sorted(ours) if f"`{name}`" not in TEXT]
    assert missing == []


@pytest.mark.slow
def test_every_generation_config_field_is_documented():
    """Every option of Transformers is supported, unsupported with an error, or without effect."""
    from transformers import GenerationConfig

    harmless = {
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config",
        "disable_compile", "prefill_chunk_size", "low_memory", "return_dict_in_generate",
        "transformers_version", "continuous_batching_config", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
        "target_lookbehind", "max_matching_ngram_size",
    }  # fmt: skip
    lengths = {"max_length", "max_new_tokens", "min_length", "stop_strings", "bos_token_id"}
    ours = {field.name for field in dataclasses.fields(Options)} | {"decoder_start_token_id"}
    known_options = (
        ours | lengths | harmless | set(UNSUPPORTED_OPTIONS) | set(UNSUPPORTED_IF_REQUESTED)
    )
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - known_options == set()

"""Language pairs of a checkpoint, by the conventions of its family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hfseq.errors import UsageError
from hfseq.pipelines.translation import Direction, find_direction

NOTHING = SimpleNamespace()
OWN = SimpleNamespace(source_lang="en", target_lang="es")
T5 = SimpleNamespace(
    task_specific_params={
        "summarization": {"prefix": "summarize: "},
        "translation_en_to_de": {"prefix": "translate English to German: "},
        "translation_en_to_fr": {"prefix": "translate English to French: "},
    }
)
PAIR = SimpleNamespace(source_lang="en", target_lang="de", supported_language_codes=[])
MANY = SimpleNamespace(
    source_lang="en", target_lang="roa", supported_language_codes=[">>fra<<", ">>spa<<"]
)
INTO = SimpleNamespace(source_lang="mul", target_lang="en", supported_language_codes=[])
CODES = SimpleNamespace(src_lang="en_XX", lang_code_to_id={"en_XX": 4, "fr_XX": 5, "de_DE": 6})


@pytest.mark.parametrize(
    ("config", "tokenizer", "options", "expected"),
    [
        (NOTHING, NOTHING, {}, Direction()),
        (SimpleNamespace(source_prefix="to es: "), NOTHING, {}, Direction("to es: ")),
        (OWN, NOTHING, {}, Direction()),
        (OWN, NOTHING, {"target_lang": "ES"}, Direction()),
        (T5, NOTHING, {"target_lang": "de"}, Direction("translate English to German: ")),
        (T5, NOTHING, {"source_prefix": ""}, Direction("")),
        (NOTHING, PAIR, {"source_lang": "en", "target_lang": "de"}, Direction()),
        (NOTHING, MANY, {"target_lang": "fra"}, Direction(">>fra<< ")),
        (NOTHING, MANY, {"source_lang": "en", "target_lang": ">>spa<<"}, Direction(">>spa<< ")),
        (NOTHING, INTO, {"source_lang": "fi", "target_lang": "en"}, Direction()),
        (NOTHING, CODES, {"source_lang": "en", "target_lang": "fr"}, Direction("", 5, "en_XX")),
        (
            *(NOTHING, CODES),
            {"source_lang": "de_DE", "target_lang": "en_xx", "source_prefix": "x "},
            Direction("x ", 4, "de_DE"),
        ),
    ],
)
def test_the_direction_follows_from_the_checkpoint_and_the_wish(
    config, tokenizer, options, expected
):
    assert find_direction(config, tokenizer, "m", **options) == expected


@pytest.mark.parametrize(
    ("config", "tokenizer", "options", "parts"),
    [
        (
            NOTHING,
            NOTHING,
            {"target_lang": "es"},
            ("'m' does not define languages", "--target_lang es"),
        ),
        (OWN, NOTHING, {"source_lang": "es"}, ("--source_lang es", "supports en -> es")),
        (T5, NOTHING, {}, ("several languages", "en -> de, en -> fr", "--source_prefix")),
        (T5, NOTHING, {"target_lang": "ro"}, ("does not support --target_lang ro", "en -> fr")),
        (T5, NOTHING, {"source_lang": "en"}, ("(--source_lang en matches 2)",)),
        (NOTHING, PAIR, {"target_lang": "fr"}, ("--target_lang fr", "en -> de")),
        (NOTHING, MANY, {"target_lang": "frq"}, ("did you mean 'fra'?", "en -> fra, en -> spa")),
        (NOTHING, MANY, {}, ("Choose with --source_lang and --target_lang",)),
        (NOTHING, CODES, {"target_lang": "fr"}, ("matches 2",)),
        (NOTHING, CODES, {"source_lang": "en", "target_lang": "es"}, ("fr_XX -> de_DE",)),
    ],
)
def test_unknown_or_ambiguous_pair_is_a_usage_error(config, tokenizer, options, parts):
    with pytest.raises(UsageError) as caught:
        find_direction(config, tokenizer, "m", **options)
    for part in parts:
        assert part in str(caught.value)
    assert all(f"did you mean '{code}'" not in str(caught.value) for code in options.values())


def test_many_codes_are_listed_in_part():
    codes = {f"a{chr(97 + i // 26)}{chr(97 + i % 26)}_XX": i for i in range(100)}
    tokenizer = SimpleNamespace(src_lang="aaa_XX", lang_code_to_id=codes)
    with pytest.raises(UsageError, match="aaa_XX, aab_XX.* and 60 more") as caught:
        find_direction(NOTHING, tokenizer, "m", "aaa", "zzz")
    assert len(str(caught.value)) < 600


def test_codes_of_a_tokenizer_without_a_table_are_its_special_tokens():
    tokens = {"<s>": 0, "eng_Latn": 1, "nob_Latn": 2}
    tokenizer = SimpleNamespace(
        src_lang="eng_Latn", all_special_tokens=list(tokens), convert_tokens_to_ids=tokens.get
    )
    assert find_direction(NOTHING, tokenizer, "m", "eng", "nob") == Direction("", 2, "eng_Latn")

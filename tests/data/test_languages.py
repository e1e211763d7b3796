import pytest

from hfseq.data.languages import find_language, language_code, same_language


@pytest.mark.parametrize(
    "name, code",
    [
        ("en", "en"),
        ("EN", "en"),
        ("eng", "en"),
        ("English", "en"),
        ("en-US", "en"),
        ("eng_Latn", "en"),
        ("pt_BR", "pt"),
        ("Norwegian Bokmål", "nb"),
        ("It", None),  # a word at the start of a sentence
        ("hello", None),
        ("", None),
        ("text_a", None),
    ],
)
def test_codes_and_names(name, code):
    assert language_code(name) == code


def test_language_is_found_by_any_spelling():
    assert find_language(["id", "german", "English"], "en") == "English"
    assert find_language(["pt_PT", "pt_BR"], "pt_BR") == "pt_BR"
    assert find_language(["de"], "en") is None
    assert same_language("xx", "XX") and not same_language("xx", "yy")

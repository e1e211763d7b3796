"""Language codes and English language names, in the spellings of columns and file names."""

from __future__ import annotations

import re
from collections.abc import Iterable

# ISO 639-1, ISO 639-2 and 639-3, and English names of each language.
_TABLE = """
af afr afrikaans | ar ara arabic | az aze azerbaijani | be bel belarusian | bg bul bulgarian
bn ben bengali | bs bos bosnian | ca cat catalan | cs ces cze czech | cy cym wel welsh
da dan danish | de deu ger german | el ell gre greek | en eng english | eo epo esperanto
es spa spanish | et est estonian | eu eus baq basque | fa fas per persian farsi | fi fin finnish
fo fao faroese | fr fra fre french | ga gle irish | gl glg galician | gu guj gujarati
ha hau hausa | he heb hebrew | hi hin hindi | hr hrv croatian | hu hun hungarian
hy hye arm armenian | id ind indonesian | is isl ice icelandic | it ita italian | ja jpn japanese
ka kat geo georgian | kk kaz kazakh | km khm khmer | ko kor korean | la lat latin
lt lit lithuanian | lv lav latvian | mk mkd mac macedonian | ml mal malayalam | mr mar marathi
ms msa may malay | mt mlt maltese | nb nob bokmål bokmaal bokmal norwegian_bokmål | ne nep nepali
nl nld dut dutch | nn nno nynorsk norwegian_nynorsk | no nor norwegian | pa pan punjabi
pl pol polish | ps pus pashto | pt por portuguese | ro ron rum romanian | ru rus russian
se sme northern_sami | si sin sinhala | sk slk slo slovak | sl slv slovenian slovene
sq sqi alb albanian | sr srp serbian | sv swe swedish | sw swa swahili | ta tam tamil
te tel telugu | th tha thai | tl tgl tagalog | tr tur turkish | uk ukr ukrainian | ur urd urdu
uz uzb uzbek | vi vie vietnamese | xh xho xhosa | yo yor yoruba | zh zho chi chinese | zu zul zulu
"""
_LANGUAGES = [names.split() for line in _TABLE.splitlines() for names in line.split("|")]
_CODES = {name: names[0] for names in _LANGUAGES for name in names}
_REGION = re.compile(r"[-_]([a-z]{2}|[a-z]{4}|[0-9]{3})$")  # en-US, eng_Latn, es_419


def language_code(name: str) -> str | None:
    """Returns the ISO 639-1 code of a language.

    Codes are recognized in lower or upper case only, because a capitalized cell such as "It" is
    more likely a word.

    Args:
        name: A code or an English name, e.g. "English", "eng" or "en-US" (all are "en").

    Returns:
        The code, or `None` for an unknown language.
    """
    lowered = name.strip().lower().replace(" ", "_")
    plain = _REGION.sub("", lowered)
    code = _CODES.get(lowered) or _CODES.get(plain)
    is_word = len(plain) < 4 and plain == lowered and name.strip().istitle()
    return None if is_word else code


def same_language(name: str, language: str) -> bool:
    """Returns whether `name` and `language` denote the same language in any spelling."""
    if name.strip().lower() == language.strip().lower():
        return True
    code = language_code(name)
    return code is not None and code == language_code(language)


def find_language(names: Iterable[str], language: str) -> str | None:
    """Returns the element of `names` that denotes `language`, preferring an exact match."""
    names = list(names)
    same = (name for name in names if same_language(name, language))
    return language if language in names else next(same, None)

"""Train tokenizers for each model family, and the tables that training reads off a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.data.vocabulary_bytes import byte_backend
from hfseq.errors import UsageError, nearest

ALGORITHMS = ("bpe", "unigram", "wordpiece", "bytes")
UNLIMITED = 10**30  # transformers' number for a model that takes texts of any length


@dataclass(frozen=True)
class Family:
    """The special tokens of a model family: their roles, ids, and where they go around a text.

    first: tokens with the ids 0, 1, … ; last: tokens with the last ids; single, pair: templates of
    the post-processor; roles: the names transformers gives to the tokens.
    """

    algorithm: str
    first: tuple[str, ...]
    roles: dict[str, str]
    single: str = "$A"
    pair: str = "$A $B"
    last: tuple[str, ...] = ()
    max_length: int = 512

    @property
    def unknown(self) -> str:
        """The token for what the vocabulary lacks."""
        return self.roles["unk_token"]


_ROBERTA = Family(
    algorithm="bpe",
    first=("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    roles={
        "bos_token": "<s>",
        "eos_token": "</s>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    single="<s> $A </s>",
    pair="<s> $A </s> </s> $B </s>",
)
FAMILIES = {
    "roberta": _ROBERTA,
    "bart": _ROBERTA,
    "gpt2": Family(
        algorithm="bpe",
        first=("<|endoftext|>",),
        roles=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        max_length=1024,
    ),
    "bert": Family(
        algorithm="wordpiece",
        first=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        roles={
            f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")
        },
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    ),
    "t5": Family(
        algorithm="unigram",
        first=("<pad>", "</s>", "<unk>"),
        roles={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        single="$A </s>",
        pair="$A </s> $B </s>",
        last=tuple(f"<extra_id_{i}>" for i in reversed(range(100))),  # 0 has the last id, as in T5
    ),
    "marian": Family(
        algorithm="unigram",
        first=("</s>", "<unk>"),
        roles={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        single="$A </s>",
        pair="$A $B </s>",
        last=("<pad>",),
    ),
    "vq_transformer": Family(
        algorithm="bpe",
        first=("<pad>", "</s>", "<unk>"),
        roles={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        max_length=UNLIMITED,
    ),
}


def train_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    family: str,
    algorithm: str | None = None,
    vocab_size: int = 32_000,
    output_dir: str | Path | None = None,
    *,
    min_frequency: int = 2,
    lowercase: bool = False,
    normalizer: Any = None,
    model_max_length: int | None = None,
    show_progress: bool | None = None,
) -> Any:
    """Train a tokenizer with the special tokens of ``family`` and save it in ``output_dir``.

    ``algorithm`` is "bpe" (byte-level), "unigram", "wordpiece", or "bytes", which needs no texts
    (the special tokens and 256 bytes); by default the family's own. ``vocab_size`` counts every
    token, special ones and T5's 100 sentinels too; a small corpus can yield fewer.
    ``min_frequency`` does not apply to unigram. ``normalizer`` is a name ("nfc", "nfkc", "nfd",
    "nfkd") or an object of ``tokenizers.normalizers``.

    Returns what ``AutoTokenizer.from_pretrained(output_dir)`` gives; ``len`` of it is the model's
    vocab_size. (The files name the generic tokenizer class, since the family's own classes rebuild
    the tokenizer and silently lose its normalizer, its sentinels and the space before ``<mask>``.)

    Raises:
        UsageError: an unknown family or algorithm, or a vocab_size that cannot hold its tokens.
    """
    if family not in FAMILIES:
        raise UsageError(
            f"model type '{family}': one of {', '.join(FAMILIES)}{nearest(family, FAMILIES)}"
        )
    spec = FAMILIES[family]
    algorithm = algorithm or spec.algorithm
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm '{algorithm}': one of {', '.join(ALGORITHMS)}")
    if algorithm == "bytes":
        tokenizer = _bytes(spec, family, model_max_length, lowercase or bool(normalizer))
    else:
        backend = train_backend(
            texts, spec, algorithm, vocab_size, min_frequency, lowercase, normalizer, show_progress
        )
        tokenizer = wrap(backend, spec, family, model_max_length)
    return tokenizer if output_dir is None else save_generic(tokenizer, Path(output_dir))


def _bytes(spec: Family, family: str, model_max_length: int | None, changes: bool) -> Any:
    """Return the tokenizer whose tokens are bytes, in which no text is a special token."""
    if changes or spec.last or spec.single != "$A":
        raise UsageError(
            f"a vocabulary of bytes takes a text as it is: '{family}' has tokens around or after "
            "it, or --lowercase or --normalizer is given; use --model_type vq_transformer or gpt2"
        )
    return wrap(byte_backend(spec.first), spec, family, model_max_length, verbatim=True)


def train_backend(
    texts: Iterable[str] | Iterable[list[str]],
    spec: Family,
    algorithm: str,
    vocab_size: int,
    min_frequency: int = 2,
    lowercase: bool = False,
    normalizer: Any = None,
    show_progress: bool | None = None,
) -> Any:
    """Train a ``tokenizers.Tokenizer``; see ``train_tokenizer``."""
    import sys

    from tokenizers import AddedToken, processors

    tokenizer, trainer_class, options = _untrained(spec, algorithm, lowercase, normalizer)
    least = len(spec.first) + len(spec.last) + len(options.get("initial_alphabet", ()))
    if vocab_size <= least:
        raise UsageError(
            f"--vocab_size {vocab_size} is too small: special tokens and alphabet take {least}"
        )
    mask = spec.roles.get("mask_token")
    # RoBERTa's mask takes the space before it; the other way round it would predict a lone space.
    special = [
        AddedToken(token, lstrip=token == mask == "<mask>", special=True) for token in spec.first
    ]
    if algorithm != "unigram":
        options["min_frequency"] = min_frequency
    trainer = trainer_class(
        vocab_size=vocab_size - len(spec.last),
        special_tokens=special,
        show_progress=sys.stderr.isatty() if show_progress is None else show_progress,
        **options,
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:  # the Rust trainers raise nothing more exact
        raise UsageError(
            f"a {algorithm} vocabulary of {vocab_size} cannot be trained: {error}"
        ) from error
    tokenizer.add_special_tokens(list(spec.last))
    if spec.single != "$A":
        around = {
            token
            for token in f"{spec.single} {spec.pair}".replace(":1", "").split()
            if token[0] != "$"
        }
        ids = [(token, tokenizer.token_to_id(token)) for token in sorted(around)]
        template = processors.TemplateProcessing(
            single=spec.single, pair=spec.pair, special_tokens=ids
        )
        bytes_trimmed = [processors.ByteLevel(trim_offsets=True)] if algorithm == "bpe" else []
        tokenizer.post_processor = processors.Sequence([*bytes_trimmed, template])
    return tokenizer


def _untrained(
    spec: Family, algorithm: str, lowercase: bool, normalizer: Any
) -> tuple[Any, Callable, dict]:
    """Return an empty tokenizer, its trainer class, and the options the trainer needs."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if isinstance(normalizer, str):
        normalizer = _named_normalizer(normalizer)
    steps = [normalizer] if normalizer else []
    trainer: Any
    options: dict[str, Any]
    if algorithm == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer, options = (
            trainers.BpeTrainer,
            {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()},
        )
    elif algorithm == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        steps = steps or [normalizers.Nmt(), normalizers.NFKC()]
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer, options = trainers.UnigramTrainer, {"unk_token": spec.unknown}
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=spec.unknown))
        steps.append(normalizers.BertNormalizer(lowercase=lowercase))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer, options = trainers.WordPieceTrainer, {"continuing_subword_prefix": "##"}
    if lowercase and algorithm != "wordpiece":
        steps.append(normalizers.Lowercase())
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer, trainer, options


def _named_normalizer(name: str) -> Any:
    from tokenizers import normalizers

    names = ("nfc", "nfkc", "nfd", "nfkd")
    if name.lower() not in names:
        raise UsageError(f"--normalizer {name}: one of {', '.join(names)}")
    return getattr(normalizers, name.upper())()


def wrap(
    backend: Any,
    spec: Family,
    family: str,
    model_max_length: int | None = None,
    verbatim: bool = False,
) -> Any:
    """Make a tokenizer of transformers that knows the roles of the special tokens.

    With ``verbatim`` their names in a text are text.
    """
    from transformers import PreTrainedTokenizerFast

    options = {"split_special_tokens": True} if verbatim else {}
    segments = ["token_type_ids"] if family == "bert" else []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length or spec.max_length,
        model_input_names=["input_ids", *segments, "attention_mask"],
        **options,
        **spec.roles,
    )
    if len(tokenizer) != backend.get_vocab_size() or max(backend.get_vocab().values()) >= len(
        tokenizer
    ):
        raise UsageError(
            f"the {family} vocabulary lacks one of its special tokens; train with a larger corpus"
        )
    return tokenizer


def save_generic(tokenizer: Any, directory: Path) -> Any:
    """Save ``tokenizer`` as one of no family, and return what ``AutoTokenizer`` makes of it.

    Raises:
        UsageError: that is not the same tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # known to transformers 4 and 5 alike
    file.write_text(json.dumps(config, indent=2) + "\n")
    loaded = AutoTokenizer.from_pretrained(directory)
    sample = f"Ei lita prøve, 1 2  3: {tokenizer.mask_token or ''} ÆØÅ"
    if loaded(sample)["input_ids"] != tokenizer(sample)["input_ids"] or len(loaded) != len(
        tokenizer
    ):
        raise UsageError(
            f"AutoTokenizer reads {directory} as {type(loaded).__name__}, with other ids"
        )
    return loaded


def check_vocabulary(tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding, which would train on NaN.

    Raises:
        UsageError: the largest id is not below ``config.vocab_size``, or there are special tokens
            only (what ``AutoTokenizer`` makes of a directory that has no tokenizer files).
    """
    if (~special_ids(tokenizer)).sum() <= 1:  # T5 makes a lone "▁" of nothing
        raise UsageError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no tokens but special ones; "
            "--tokenizer_name needs a directory or model with tokenizer files"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise UsageError(
            f"the tokenizer's largest id is {largest}, but config.vocab_size is "
            f"{config.vocab_size}; set --config_overrides vocab_size={largest + 1}, or use the "
            "tokenizer the model was made with"
        )


def _table_size(tokenizer: Any, size: int | None) -> int:
    return max(size or 0, max(tokenizer.get_vocab().values()) + 1)


def special_ids(tokenizer: Any, size: int | None = None) -> np.ndarray:
    """True for the ids of special tokens; bool (``size`` or the tokenizer's vocabulary,)."""
    table = np.zeros(_table_size(tokenizer, size), bool)
    table[tokenizer.all_special_ids] = True
    table[[i for i, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    return table


def word_start_table(tokenizer: Any, size: int | None = None) -> np.ndarray:
    """True for the ids that begin a word; bool (``size`` or the tokenizer's vocabulary,).

    Byte-level vocabularies mark the space before a word (``Ġ``), SentencePiece likewise (``▁``),
    WordPiece marks what does not begin one (``##``).

    Raises:
        UsageError: the vocabulary has no such marks.
    """
    vocabulary = tokenizer.get_vocab()
    mark, starts = word_marks(vocabulary)
    if not mark:
        raise UsageError(
            "--whole_word_masking: the tokenizer's vocabulary does not mark where words begin"
        )
    table = np.zeros(_table_size(tokenizer, size), bool)
    for token, i in vocabulary.items():
        table[i] = token.startswith(starts) if starts else not token.startswith(mark)
    return table


def word_marks(vocabulary: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Return the mark of a vocabulary ("" if none), and what tokens that begin a word begin with.

    The second is empty where the mark (``##``) is on the tokens that do not begin one.
    """
    marks = {mark: sum(token.startswith(mark) for token in vocabulary) for mark in ("Ġ", "▁", "##")}
    mark = max(marks, key=lambda candidate: marks[candidate])
    if not marks[mark]:
        return "", ()
    # Of byte-level vocabularies: space, line feed, tab, carriage return.
    return mark, {"Ġ": tuple("ĠĊĉč"), "▁": ("▁",)}.get(mark, ())

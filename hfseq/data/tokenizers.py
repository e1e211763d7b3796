"""Training of tokenizers for model families, and properties of each token as lookup tables."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hfseq import plugins
from hfseq.data.batches import derive_key, permute
from hfseq.errors import DataError, PluginError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.data.arguments import TranslationArguments
Split = TypeVar("Split")
logger = logging.getLogger(__name__)
ALGORITHMS = ("bpe", "unigram", "wordpiece", "bytes")
UNLIMITED = 10**30  # Transformers' model_max_length without a limit


@dataclass(frozen=True)
class TokenizerFamily:
    """The special tokens of a model family and their positions around a text.

    Attributes:
        algorithm: Default algorithm of `train_tokenizer`.
        first: Special tokens with the first ids: 0, 1, ….
        roles: Special tokens by role, e.g. `{"pad_token": "<pad>"}`. The roles are the attribute
            names of Transformers. "unk_token" is required.
        single: Template for a single text, in the syntax of `TemplateProcessing`.
        pair: Template for a pair of texts.
        last: Special tokens with the last ids.
        max_length: Maximum length of a text in tokens.
        lstrip: Special tokens that include the space before them.
        segments: Whether the model has `token_type_ids`.
    """

    algorithm: str
    first: tuple[str, ...]
    roles: dict[str, str]
    single: str = "$A"
    pair: str = "$A $B"
    last: tuple[str, ...] = ()
    max_length: int = 512
    lstrip: tuple[str, ...] = ()
    segments: bool = False

    @property
    def unknown(self) -> str:
        """The token for unknown text."""
        return self.roles["unk_token"]


_SENTENCE_PIECE = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
ROBERTA = TokenizerFamily(
    algorithm="bpe",
    first=("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    roles={
        **{"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"},
        **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    },
    single="<s> $A </s>",
    pair="<s> $A </s> </s> $B </s>",
    lstrip=("<mask>",),  # otherwise the model predicts a separate space
)
GPT2 = TokenizerFamily(
    algorithm="bpe",
    first=("<|endoftext|>",),
    roles=dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    max_length=1024,
)
BERT = TokenizerFamily(
    algorithm="wordpiece",
    first=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    roles={f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")},
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    segments=True,
)
T5 = TokenizerFamily(
    algorithm="unigram",
    first=("<pad>", "</s>", "<unk>"),
    roles=_SENTENCE_PIECE,
    single="$A </s>",
    pair="$A </s> $B </s>",
    # As in T5, <extra_id_0> has the last id.
    last=tuple(f"<extra_id_{i}>" for i in reversed(range(100))),
)
MARIAN = TokenizerFamily(
    algorithm="unigram",
    first=("</s>", "<unk>"),
    roles=_SENTENCE_PIECE,
    single="$A </s>",
    pair="$A $B </s>",
    last=("<pad>",),
)
XLM_ROBERTA = replace(
    ROBERTA, algorithm="unigram", first=("<s>", "<pad>", "</s>", "<unk>"), last=("<mask>",)
)
XGLM = replace(
    XLM_ROBERTA,
    single="</s> $A",
    pair="</s> $A </s> </s> $B",
    last=(),
    lstrip=(),
    roles={role: token for role, token in ROBERTA.roles.items() if role != "mask_token"},
    max_length=2048,
)
BLENDERBOT = replace(
    ROBERTA,
    first=("<pad>", "<s>", "</s>", "<unk>", "<mask>"),
    single="$A </s>",
    pair="$A </s> $B </s>",
)
VQ_TRANSFORMER = TokenizerFamily(
    algorithm="bpe",
    first=("<pad>", "</s>", "<unk>"),
    roles=_SENTENCE_PIECE,
    max_length=UNLIMITED,
)


def train_tokenizer(
    texts: Iterable[str] | Iterable[list[str]],
    family: str,
    algorithm: str | None = None,
    vocab_size: int = 32_000,
    output_dir: str | Path | None = None,
    *,
    min_frequency: int = 2,
    lowercase: bool = False,
    normalizer: str | Normalizer | None = None,
    model_max_length: int | None = None,
) -> PreTrainedTokenizerBase:
    """Trains a tokenizer with the special tokens of a model family.

    The tokenizer is saved with the generic tokenizer class of Transformers. The tokenizer classes
    of the families are not used, because they rebuild the tokenizer when it is loaded. This would
    lose its normalizer, its sentinels, and the setting that `<mask>` includes the space before it.

    Args:
        texts: Texts, or lists of texts.
        family: A family that plugins register ("roberta", "gpt2", …; see `register_tokenizers`).
        algorithm: "bpe" (byte-level), "unigram", "wordpiece", or "bytes" (special tokens and 256
            bytes, without training). Default: the algorithm of the family.
        vocab_size: Number of tokens, including special tokens and T5's 100 sentinels. A small
            corpus can result in a smaller vocabulary.
        output_dir: Directory for the tokenizer. Without it nothing is saved.
        min_frequency: Minimum frequency of merged tokens. Ignored for "unigram".
        lowercase: Whether to lowercase texts.
        normalizer: "nfc", "nfkc", "nfd", "nfkd" or an object of `tokenizers.normalizers`.
        model_max_length: Maximum length of a text in tokens. Default: the maximum of the family.

    Returns:
        The tokenizer, as loaded by `AutoTokenizer.from_pretrained(output_dir)`. Use
        `len(tokenizer)` as the `vocab_size` of a model.

    Raises:
        UsageError: The family or algorithm is unknown, or `vocab_size` is too small.
    """
    spec = plugins.load().tokenizers.get(family)
    if not isinstance(spec, TokenizerFamily):
        raise PluginError(
            f"the tokenizer family '{family}' is {spec!r:.80}, not a "
            "hfseq.data.tokenizers.TokenizerFamily"
        )
    algorithm = algorithm or spec.algorithm
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm '{algorithm}': expected one of {', '.join(ALGORITHMS)}")
    if algorithm == "bytes":
        if lowercase or normalizer or spec.last or spec.single != "$A":
            raise UsageError(
                "a byte vocabulary does not change texts, so it does not support --lowercase, "
                "--normalizer, or families with special tokens around a text or at the end of the "
                f"vocabulary (the family is '{family}'); use --model_type vq_transformer or gpt2"
            )
        tokenizer = wrap_backend(byte_backend(spec.first), spec, model_max_length, verbatim=True)
    else:
        backend = train_backend(
            texts, spec, algorithm, vocab_size, min_frequency, lowercase, normalizer
        )
        tokenizer = wrap_backend(backend, spec, model_max_length)
    return tokenizer if output_dir is None else save_generic(tokenizer, Path(output_dir))


def train_backend(
    texts: Iterable[str] | Iterable[list[str]],
    spec: TokenizerFamily,
    algorithm: str,
    vocab_size: int,
    min_frequency: int = 2,
    lowercase: bool = False,
    normalizer: str | Normalizer | None = None,
) -> Tokenizer:
    """Trains a `tokenizers.Tokenizer`; see `train_tokenizer`."""
    import tokenizers as hf

    if isinstance(normalizer, str):
        names = ("nfc", "nfkc", "nfd", "nfkd")
        if normalizer.lower() not in names:
            raise UsageError(f"--normalizer {normalizer}: expected one of {', '.join(names)}")
        normalizer = getattr(hf.normalizers, normalizer.upper())()
    steps = [normalizer] if normalizer else []
    trainer_class: Callable[..., Any]
    options: dict[str, Any] = {"min_frequency": min_frequency}
    if algorithm == "bpe":
        tokenizer, trainer_class = hf.Tokenizer(hf.models.BPE()), hf.trainers.BpeTrainer
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = hf.decoders.ByteLevel()
        options["initial_alphabet"] = hf.pre_tokenizers.ByteLevel.alphabet()
    elif algorithm == "unigram":
        tokenizer, trainer_class = hf.Tokenizer(hf.models.Unigram()), hf.trainers.UnigramTrainer
        steps = steps or [hf.normalizers.Nmt(), hf.normalizers.NFKC()]
        steps.append(hf.normalizers.Replace(hf.Regex(" {2,}"), " "))
        tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace()
        tokenizer.decoder = hf.decoders.Metaspace()
        options = {"unk_token": spec.unknown}
    else:
        tokenizer = hf.Tokenizer(hf.models.WordPiece(unk_token=spec.unknown))
        trainer_class = hf.trainers.WordPieceTrainer
        steps.append(hf.normalizers.BertNormalizer(lowercase=lowercase))
        tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = hf.decoders.WordPiece()
        options["continuing_subword_prefix"] = "##"
    if lowercase and algorithm != "wordpiece":
        steps.append(hf.normalizers.Lowercase())
    if steps:
        tokenizer.normalizer = hf.normalizers.Sequence(steps)
    least = len(spec.first) + len(spec.last) + len(options.get("initial_alphabet", ()))
    if vocab_size <= least:
        raise UsageError(
            f"--vocab_size {vocab_size} is too small: it must be larger than the number of special "
            f"tokens and characters of the alphabet, {least}"
        )
    special = [hf.AddedToken(t, lstrip=t in spec.lstrip, special=True) for t in spec.first]
    trainer = trainer_class(
        vocab_size=vocab_size - len(spec.last),
        special_tokens=special,
        show_progress=sys.stderr.isatty(),
        **options,
    )
    try:
        tokenizer.train_from_iterator(split_long_words(texts), trainer)
    except Exception as error:  # the Rust trainers raise plain exceptions
        raise UsageError(
            f"cannot train a {algorithm} vocabulary of {vocab_size} tokens: {error}"
        ) from error
    tokenizer.add_special_tokens(list(spec.last))
    if spec.single != "$A":
        around = {*f"{spec.single} {spec.pair}".replace(":1", "").split()} - {"$A", "$B"}
        template = hf.processors.TemplateProcessing(
            single=spec.single,
            pair=spec.pair,
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in sorted(around)],
        )
        bytes_trimmed = [hf.processors.ByteLevel(trim_offsets=True)] if algorithm == "bpe" else []
        tokenizer.post_processor = hf.processors.Sequence([*bytes_trimmed, template])
    return tokenizer


LONGEST_WORD = 10_000  # in characters; the training time is quadratic in the length of a word
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")


def split_long_words(texts: Iterable[str] | Iterable[list[str]]) -> Iterator[list[str]]:
    """Yields lists of texts in which words of more than `LONGEST_WORD` characters are divided.

    Such words are usually digits or base64, which are just as useful for training if they are
    divided.
    """
    for batch in texts:
        parts = []
        for text in [batch] if isinstance(batch, str) else batch:
            words = (range(*match.span(), LONGEST_WORD) for match in _LONG_WORD.finditer(text))
            cuts = [cut for word in words for cut in word[1:]]
            parts += [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
        yield parts


def wrap_backend(
    backend: Tokenizer,
    spec: TokenizerFamily,
    model_max_length: int | None = None,
    verbatim: bool = False,
) -> PreTrainedTokenizerBase:
    """Creates a tokenizer of Transformers with the special tokens of a family.

    Args:
        backend: The trained tokenizer.
        spec: The family.
        model_max_length: Maximum length of a text in tokens. Default: the maximum of the family.
        verbatim: Whether special tokens that occur in a text are tokenized as ordinary text.

    Raises:
        UsageError: The vocabulary lacks a special token.
    """
    from transformers import PreTrainedTokenizerFast

    segments = ["token_type_ids"] if spec.segments else []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length or spec.max_length,
        model_input_names=["input_ids", *segments, "attention_mask"],
        **({"split_special_tokens": True} if verbatim else {}),
        **spec.roles,
    )
    size = len(tokenizer)
    if size != backend.get_vocab_size() or max(backend.get_vocab().values()) >= size:
        raise UsageError(
            "the vocabulary lacks one of its special tokens, "
            f"{', '.join(spec.first + spec.last)}: use a larger corpus"
        )
    return tokenizer


def write_v4_config(folder: Path, generic: bool = False) -> None:
    """Makes the saved files of a Transformers 5 tokenizer readable for Transformers 4.

    In `tokenizer_config.json`, the class name of generic tokenizers is replaced by a name that both
    versions support, and additional special tokens are stored under the key of version 4.

    Args:
        folder: Directory of the tokenizer.
        generic: Whether to write the generic class name even if the tokenizer has its own class.
    """
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    if generic or config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # a dictionary in version 4
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_generic(tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedTokenizerBase:
    """Saves a tokenizer with the generic tokenizer class.

    Returns:
        The tokenizer, as loaded by `AutoTokenizer`.

    Raises:
        UsageError: The loaded tokenizer returns different ids.
    """
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    write_v4_config(directory, generic=True)
    loaded = AutoTokenizer.from_pretrained(directory)
    sample = f"Ei lita prøve, 1 2  3: {tokenizer.mask_token or ''} ÆØÅ"
    ids, other = (t(sample)["input_ids"] for t in (tokenizer, loaded))
    if ids != other or len(loaded) != len(tokenizer):
        raise UsageError(
            f"AutoTokenizer loads {directory} as {type(loaded).__name__}, which does not return "
            "the same token IDs as the saved tokenizer"
        )
    return loaded


JOINT_FAMILY = TokenizerFamily(
    algorithm="unigram",
    first=("<pad>", "<s>", "</s>", "<unk>"),
    roles={"bos_token": "<s>", **_SENTENCE_PIECE},
    single="$A </s>",
    pair="$A $B </s>",
)
JOINT_ALGORITHMS = ("unigram", "bpe")
# Difference between the scores of successive characters that the unigram trainer adds again after
# pruning.
PRUNED_SCORE_STEP = 1e-4
# Scores are rounded to this number of decimal places, because the order of additions varies between
# runs and changes about the 15th digit.
SCORE_DIGITS = 6


def train_joint_tokenizer(
    texts: Iterable[list[str]],
    algorithm: str = "unigram",
    vocab_size: int = 32_000,
    output_dir: str | Path | None = None,
    max_corpus_chars: int = 10_000_000,
) -> PreTrainedTokenizerBase:
    """Trains a tokenizer with a joint vocabulary for the sentences of two languages.

    The special tokens are `<pad>` (id 0), `<s>` (1), `</s>` (2) and `<unk>` (3). `</s>` is appended
    to every text. Decoding restores the text with composed characters (NFC) and single spaces. The
    same texts always result in the same vocabulary.

    Args:
        texts: Lists of sentences, with alternating languages.
        algorithm: "unigram" (as in SentencePiece, with `▁` for spaces and with every character of
            the texts in the vocabulary) or "bpe" (byte-level, so that no token is unknown).
        vocab_size: Number of tokens. A small corpus can result in a smaller vocabulary.
        output_dir: Directory for the tokenizer. Without it nothing is saved.
        max_corpus_chars: Maximum number of characters to train on.

    Returns:
        The tokenizer. `AutoTokenizer.from_pretrained(output_dir)` loads the same tokenizer, even if
        the directory contains the `config.json` of a model. Use `len(tokenizer)` as the
        `vocab_size` of a model.

    Raises:
        UsageError: The algorithm is unknown, or `vocab_size` is too small.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    if algorithm not in JOINT_ALGORITHMS:
        raise UsageError(
            f"--tokenizer_algorithm {algorithm}: expected one of {', '.join(JOINT_ALGORITHMS)}"
        )
    # NFKC is not used, because it replaces "…" by "..." and "½" by "1⁄2". Reference translations
    # keep these characters.
    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFC()])

    def beginning() -> Iterator[str]:
        left = max_corpus_chars
        for text in chain.from_iterable(texts):
            yield (" " if algorithm == "bpe" else "") + text[:left]
            left -= len(text)
            if left <= 0:
                return

    backend = train_backend(beginning(), JOINT_FAMILY, algorithm, vocab_size, normalizer=normalizer)
    if algorithm == "unigram":
        backend = _make_reproducible(backend)
    else:  # a leading space makes the tokens of a word independent of its position
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = wrap_backend(backend, JOINT_FAMILY)
    return tokenizer if output_dir is None else save_generic(tokenizer, Path(output_dir))


def _make_reproducible(backend: Tokenizer) -> Tokenizer:
    """Makes a unigram vocabulary deterministic, and sorts its tokens by score and text.

    The trainer prunes characters from the vocabulary and adds them again at the end. The scores of
    these characters increase by `PRUNED_SCORE_STEP` in the order of a hash table, which varies
    between runs. This function therefore gives the lowest score to all of them.
    """
    state = json.loads(backend.to_str())
    pieces = state["model"]["vocab"]
    special, pieces = pieces[: len(JOINT_FAMILY.first)], pieces[len(JOINT_FAMILY.first) :]
    lowest = min((score for _, score in pieces), default=0.0)
    scored = []
    for piece, score in pieces:
        steps = (score - lowest) / PRUNED_SCORE_STEP
        pruned = (
            len(piece) == 1
            and steps < len(pieces)
            and abs(steps - round(steps)) < PRUNED_SCORE_STEP
        )
        scored.append([piece, round(lowest if pruned else score, SCORE_DIGITS)])
    scored.sort(key=lambda entry: (-entry[1], entry[0]))
    state["model"]["vocab"] = special + scored
    return type(backend).from_str(json.dumps(state))


WORD_FAMILY = TokenizerFamily(
    algorithm="words",
    first=("<pad>", "<unk>", "<sep>"),
    roles={"pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"},
    pair="$A <sep> $B:1",
    segments=True,
)


def train_word_tokenizer(
    texts: Iterable[str], vocab_size: int | None = None
) -> PreTrainedTokenizerBase:
    """Creates a tokenizer whose vocabulary consists of the most frequent words of the texts.

    Words are sequences of letters and digits, or of other characters except whitespace. The first
    ids are special tokens: `<pad>` (0), `<unk>` (1) and `<sep>` (2), which is inserted between the
    texts of a pair. No special tokens are added to a single text.

    Args:
        texts: The texts.
        vocab_size: Maximum number of tokens, including special tokens. Default: no limit.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=WORD_FAMILY.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if vocab_size is not None and vocab_size <= len(WORD_FAMILY.first):
        raise UsageError(
            f"--vocab_size {vocab_size} leaves no space for words: it includes "
            f"{len(WORD_FAMILY.first)} special tokens, {', '.join(WORD_FAMILY.first)}"
        )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size or 2**31 - 1,
        special_tokens=list(WORD_FAMILY.first),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = [("<sep>", tokenizer.token_to_id("<sep>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=WORD_FAMILY.single, pair=WORD_FAMILY.pair, special_tokens=ids
    )
    return wrap_backend(tokenizer, WORD_FAMILY)


TOKENIZER_FILE = "tokenizer.json"
BATCH_PAIRS = 1000


def load_or_train_joint_tokenizer(
    folder: Path, arguments: TranslationArguments, load: Callable[[], Mapping[str, Dataset]]
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in `folder`, or trains and saves it if it does not exist.

    If several processes call this function, one of them trains the tokenizer.

    Args:
        folder: Directory of the tokenizer.
        arguments: The data flags, for algorithm and size.
        load: Function that returns the pairs by split. Called only if a tokenizer is trained.
    """

    def train(pairs: Dataset, temporary: Path) -> None:
        # Source and target alternate, so that the limit of characters applies to both equally.
        # Batches are shuffled, because files are often sorted.
        batches = -(-len(pairs) // BATCH_PAIRS)
        order = permute(np.arange(batches), batches, derive_key("vocabulary")).tolist()
        batches_in_order = (
            pairs[number * BATCH_PAIRS : (number + 1) * BATCH_PAIRS] for number in order
        )
        train_joint_tokenizer(
            (batch[side] for batch in batches_in_order for side in ("source", "target")),
            arguments.tokenizer_algorithm,
            arguments.vocab_size,
            output_dir=temporary,
            max_corpus_chars=arguments.max_corpus_chars,
        )

    return load_or_train(folder, "pairs", load, train)


def load_or_train(
    folder: Path,
    examples_name: str,
    load: Callable[[], Mapping[str, Split]],
    train_and_save: Callable[[Split, Path], None],
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer in `folder`, or creates and saves it if it does not exist.

    If several processes call this function, one of them creates the tokenizer. `tokenizer.json` is
    written last, so that an interrupted run leaves no incomplete tokenizer.

    Args:
        folder: Directory of the tokenizer.
        examples_name: Description of the training data, for messages.
        load: Function that returns the splits. Called only if the tokenizer does not exist.
        train_and_save: Function that trains a tokenizer on the training split and saves it in a
            directory.

    Raises:
        DataError: There is neither a tokenizer nor a training split.
    """
    from filelock import FileLock
    from transformers import AutoTokenizer

    if (folder / TOKENIZER_FILE).exists():
        logger.info("using the tokenizer in %s; remove it to train a new one", folder)
        return AutoTokenizer.from_pretrained(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "tokenizer.lock"
    with FileLock(str(lock)):
        if not (folder / TOKENIZER_FILE).exists():  # another process may have created it
            temporary = folder / "tokenizer.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            splits = load()
            if "train" not in splits:
                raise DataError(
                    f"cannot build a vocabulary without a training split of {examples_name}, "
                    f"and {folder} contains no tokenizer: use --train_file or --tokenizer_name"
                )
            train_and_save(splits["train"], temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == TOKENIZER_FILE):
                os.replace(file, folder / file.name)
            temporary.rmdir()
            logger.info("saved a vocabulary built from the training data in %s", folder)
    lock.unlink(missing_ok=True)
    return AutoTokenizer.from_pretrained(str(folder))


def byte_backend(specials: Sequence[str]) -> Tokenizer:
    """Returns a byte-level tokenizer without merges.

    The special tokens have the first ids, followed by the 256 bytes in order.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*specials, *byte_characters()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> list[str]:
    """Returns the character that represents each byte in byte-level vocabularies.

    This is the mapping of GPT-2, which `tokenizers` uses. Bytes that are visible Latin-1 characters
    are represented by these characters. All other bytes are represented by the characters from
    U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other_characters = count(0x100)
    return [chr(byte if byte in visible else next(other_characters)) for byte in range(256)]


def byte_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Returns the token id of each byte, int32 `(256,)`, if the tokenizer has a byte vocabulary.

    Returns `None` for all other tokenizers, whose tokens may consist of several bytes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    state = json.loads(backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE" or model.get("merges") or state.get("normalizer"):
        return None
    vocabulary = model["vocab"]
    ids = [vocabulary.get(character) for character in byte_characters()]
    return None if None in ids else np.array(ids, np.int32)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token id for padding: the pad token, or 0 if there is none (as in GPT-2)."""
    return 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Checks that a tokenizer is usable with a model.

    Raises:
        UsageError: The tokenizer is not valid, or its ids exceed the model's vocabulary, which
            would result in NaN.
    """
    longest = getattr(tokenizer, "model_max_length", 0)
    # `not >=` also rejects NaN.
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest >= 0:
        raise UsageError(
            f"the tokenizer of '{tokenizer.name_or_path}' has model_max_length {longest!r:.80}, "
            "which is not a valid length: correct tokenizer_config.json"
        )
    if (~special_ids(tokenizer)).sum() <= 1:  # an empty T5 vocabulary contains "▁"
        raise UsageError(
            f"the tokenizer of '{tokenizer.name_or_path}' has only special tokens; "
            "--tokenizer_name requires a directory or model with tokenizer files"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise UsageError(
            f"the tokenizer's largest id is {largest}, but config.vocab_size is "
            f"{config.vocab_size}; use --config_overrides vocab_size={largest + 1}, or the "
            "original tokenizer of the model"
        )


def fit_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Increases `vocab_size` of a new model's configuration for tokens that the tokenizer adds.

    Tokenizer classes add the special tokens of their family to a vocabulary that lacks them. For
    example, GPT-2 adds `<|endoftext|>`, and T5 adds 100 sentinels. A vocabulary with other ids that
    exceed `vocab_size` belongs to another model, so the configuration is not changed.
    """
    ids = {i for i in tokenizer.get_vocab().values() if i >= config.vocab_size}
    added_tokens = tokenizer.added_tokens_decoder
    if not ids or not ids <= added_tokens.keys():
        return
    first, *more_ids = sorted(ids)
    logger.info(
        "increased vocab_size from %d to %d for %s%s, which the tokenizer adds to its vocabulary",
        config.vocab_size,
        max(ids) + 1,
        added_tokens[first],
        f" and {len(more_ids)} more tokens" if more_ids else "",
    )
    config.vocab_size = max(ids) + 1


def special_ids(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> np.ndarray:
    """Returns a lookup table by token id: true for special tokens, bool `(size,)`.

    See `table_size` for the size.
    """
    table = np.zeros(table_size(tokenizer, size), bool)
    table[tokenizer.all_special_ids] = True
    table[[i for i, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    return table


def word_start_table(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> np.ndarray:
    """Returns a lookup table by token id: true for tokens that start a word, bool `(size,)`.

    Byte-level (`Ġ`) and SentencePiece (`▁`) vocabularies mark the space before a word. WordPiece
    vocabularies (`##`) mark tokens that do not start a word. See `table_size` for the size.

    Raises:
        UsageError: The vocabulary does not mark words.
    """
    vocabulary = tokenizer.get_vocab()
    mark, starts = word_marks(vocabulary)
    if not mark:
        raise UsageError(
            "--whole_word_masking: the tokenizer's vocabulary does not mark the start of words"
        )
    table = np.zeros(table_size(tokenizer, size), bool)
    for token, i in vocabulary.items():
        table[i] = token.startswith(starts) if starts else not token.startswith(mark)
    return table


def word_marks(vocabulary: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Determines how a vocabulary marks words.

    Returns:
        A pair. The first element is the mark ("Ġ", "▁" or "##"), or "" if the vocabulary does not
        mark words. The second element contains the characters with which tokens that start a word
        begin. It is empty for "##", because this mark is part of tokens that do not start a word.
    """
    marks = {mark: sum(token.startswith(mark) for token in vocabulary) for mark in ("Ġ", "▁", "##")}
    mark = max(marks, key=lambda candidate: marks[candidate])
    if not marks[mark]:
        return "", ()
    # Byte-level vocabularies: space, line feed, tab, carriage return.
    return mark, {"Ġ": tuple("ĠĊĉč"), "▁": ("▁",)}.get(mark, ())


def table_size(tokenizer: PreTrainedTokenizerBase, size: int | None) -> int:
    """Returns the size of a lookup table: the tokenizer's largest id + 1, or `size` if larger."""
    return max(size or 0, max(tokenizer.get_vocab().values()) + 1)

"""Train tokenizers for each model family, and the tables that training reads off a tokenizer."""

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
UNLIMITED = 10**30  # transformers' number for a model that takes texts of any length


@dataclass(frozen=True)
class TokenizerFamily:
    """The special tokens of a model family: their roles, ids, and where they go around a text.

    ``algorithm`` is what :func:`train_tokenizer` trains by default. ``first`` are the tokens with
    the ids 0, 1, …, ``last`` those with the last ids; ``roles`` are the names that Transformers
    gives to them ("pad_token", …; "unk_token" is needed), ``single`` and ``pair`` the templates of
    the post-processor around one text and two. ``max_length`` is the tokenizer's own limit.
    ``lstrip`` are the tokens that take the space before them, and ``segments`` says that the model
    reads token_type_ids.
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
        """The token for what the vocabulary lacks."""
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
    lstrip=("<mask>",),  # the other way round it would predict a lone space
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
    last=tuple(f"<extra_id_{i}>" for i in reversed(range(100))),  # 0 has the last id, as in T5
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
    """Train a tokenizer with the special tokens of ``family`` and save it in ``output_dir``.

    Families are those that plugins register ("roberta", "gpt2", …; see ``register_tokenizers``).
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
    spec = plugins.load().tokenizers.get(family)
    if not isinstance(spec, TokenizerFamily):
        raise PluginError(
            f"the tokenizer family '{family}' is {spec!r:.80}; register a "
            "hfseq.data.tokenizers.TokenizerFamily"
        )
    algorithm = algorithm or spec.algorithm
    if algorithm not in ALGORITHMS:
        raise UsageError(f"algorithm '{algorithm}': one of {', '.join(ALGORITHMS)}")
    if algorithm == "bytes":
        if lowercase or normalizer or spec.last or spec.single != "$A":
            raise UsageError(
                f"a vocabulary of bytes takes a text as it is: '{family}' has tokens around or "
                "after it, or --lowercase or --normalizer is given; use --model_type "
                "vq_transformer or gpt2"
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
    """Train a ``tokenizers.Tokenizer``; see ``train_tokenizer``."""
    import tokenizers as hf

    if isinstance(normalizer, str):
        names = ("nfc", "nfkc", "nfd", "nfkd")
        if normalizer.lower() not in names:
            raise UsageError(f"--normalizer {normalizer}: one of {', '.join(names)}")
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
            f"--vocab_size {vocab_size} is too small: special tokens and alphabet take {least}"
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
    except Exception as error:  # the Rust trainers raise nothing more exact
        raise UsageError(
            f"a {algorithm} vocabulary of {vocab_size} cannot be trained: {error}"
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


LONGEST_WORD = 10_000  # characters; trainers take a time that grows with the square of it
_LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")


def split_long_words(texts: Iterable[str] | Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield texts, or lists of texts, as lists in which no word is longer than ``LONGEST_WORD``.

    A text is cut where one is: what is without spaces for that long, a line of digits or of base64,
    teaches a tokenizer no more than its parts do.
    """
    for batch in texts:
        parts = []
        for text in [batch] if isinstance(batch, str) else batch:
            words = (range(*match.span(), LONGEST_WORD) for match in _LONG.finditer(text))
            cuts = [cut for word in words for cut in word[1:]]
            parts += [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
        yield parts


def wrap_backend(
    backend: Tokenizer,
    spec: TokenizerFamily,
    model_max_length: int | None = None,
    verbatim: bool = False,
) -> PreTrainedTokenizerBase:
    """Make a tokenizer of transformers that knows the roles of the special tokens.

    With ``verbatim`` their names in a text are text.
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
            f"the vocabulary lacks one of its special tokens, {', '.join(spec.first + spec.last)}: "
            "train with a larger corpus"
        )
    return tokenizer


def write_v4_config(folder: Path, generic: bool = False) -> None:
    """Let Transformers 4 read the settings of a tokenizer that version 5 wrote in ``folder``.

    What version 5 calls a tokenizer of no family (``generic``: whatever it was) has the older name,
    which both know, and its further special tokens have the older key.
    """
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    if generic or config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # version 4 has a dictionary there
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_generic(tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedTokenizerBase:
    """Save ``tokenizer`` as one of no family, and return what ``AutoTokenizer`` makes of it."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    write_v4_config(directory, generic=True)
    loaded = AutoTokenizer.from_pretrained(directory)
    sample = f"Ei lita prøve, 1 2  3: {tokenizer.mask_token or ''} ÆØÅ"
    ids, other = (t(sample)["input_ids"] for t in (tokenizer, loaded))
    if ids != other or len(loaded) != len(tokenizer):
        raise UsageError(
            f"AutoTokenizer reads {directory} as {type(loaded).__name__}, with other ids"
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
PRUNED_SCORE_STEP = (
    1e-4  # between the scores that the unigram trainer gives to characters it would have pruned
)
SCORE_DIGITS = 6  # of a score; the order of additions, which varies, changes the 15th


def train_joint_tokenizer(
    texts: Iterable[list[str]],
    algorithm: str = "unigram",
    vocab_size: int = 32_000,
    output_dir: str | Path | None = None,
    max_corpus_chars: int = 10_000_000,
) -> PreTrainedTokenizerBase:
    """Train one vocabulary on sentences of both languages and save it in ``output_dir``.

    ``texts`` are lists of sentences, the languages in turns, since only the first
    ``max_corpus_chars`` characters count. ``algorithm`` is "unigram" (SentencePiece's, pieces with
    ``▁`` for a space; every character of the texts is in the vocabulary) or "bpe" (byte-level,
    nothing is unknown). Ids are ``<pad>`` 0, ``<s>`` 1, ``</s>`` 2, ``<unk>`` 3; a text is its
    pieces and ``</s>``. Decoding gives back what was written: composed characters (NFC), single
    spaces. Equal texts give an equal vocabulary.

    Returns what ``AutoTokenizer.from_pretrained(output_dir)`` gives, whatever ``config.json`` is
    there; ``len`` of it is the model's vocab_size, less than asked for where the texts are few.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    if algorithm not in JOINT_ALGORITHMS:
        raise UsageError(f"--tokenizer_algorithm {algorithm}: one of {', '.join(JOINT_ALGORITHMS)}")
    # Not NFKC: it would turn "…" into "...", "½" into "1⁄2", and references are not so written.
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
        backend = _reproducible(backend)
    else:  # a text begins with a space, so that a word is the same piece wherever it stands
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer = wrap_backend(backend, JOINT_FAMILY)
    return tokenizer if output_dir is None else save_generic(tokenizer, Path(output_dir))


def _reproducible(backend: Tokenizer) -> Tokenizer:
    """Sort the pieces by score and text, after undoing what hash tables and threads did to scores.

    The trainer adds the characters that it pruned in the order of a hash table, each ``STEP`` above
    the one before; they all get the lowest score.
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
    """Make a vocabulary of the words of ``texts``, the most frequent first.

    Words are runs of letters and digits, or of other characters. Ids are ``<pad>`` 0, ``<unk>`` 1,
    ``<sep>`` 2 between the sentences of a pair, then the words; there is nothing around a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=WORD_FAMILY.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if vocab_size is not None and vocab_size <= len(WORD_FAMILY.first):
        raise UsageError(
            f"--vocab_size {vocab_size} leaves no room for a word: {len(WORD_FAMILY.first)} entries are "
            f"{', '.join(WORD_FAMILY.first)}"
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
BATCH_PAIRS = 1000  # pairs at a time


def load_or_train_joint_tokenizer(
    folder: Path, arguments: TranslationArguments, load: Callable[[], Mapping[str, Dataset]]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``; the first process that finds none there trains it.

    ``arguments`` say of which size and kind, ``load`` returns the splits of pairs.
    """

    def make(pairs: Dataset, temporary: Path) -> None:
        # Both sides in turns, so that a limit takes as much of either; files are often sorted.
        batches = -(-len(pairs) // BATCH_PAIRS)
        order = permute(np.arange(batches), batches, derive_key("vocabulary")).tolist()
        chosen = (pairs[number * BATCH_PAIRS : (number + 1) * BATCH_PAIRS] for number in order)
        train_joint_tokenizer(
            (batch[side] for batch in chosen for side in ("source", "target")),
            arguments.tokenizer_algorithm,
            arguments.vocab_size,
            output_dir=temporary,
            max_corpus_chars=arguments.max_corpus_chars,
        )

    return load_or_train(folder, "pairs", load, make)


def load_or_train(
    folder: Path,
    what: str,
    load: Callable[[], Mapping[str, Split]],
    make: Callable[[Split, Path], None],
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``; the first process that finds none has it made.

    ``make`` gets the training split of what ``load`` returns, and writes to a folder of its own.
    The main file appears last, so a killed run leaves none.
    """
    from filelock import FileLock
    from transformers import AutoTokenizer

    if (folder / TOKENIZER_FILE).exists():
        logger.info("the vocabulary in %s is used; remove it to have another trained", folder)
        return AutoTokenizer.from_pretrained(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "tokenizer.lock"
    with FileLock(str(lock)):
        if not (folder / TOKENIZER_FILE).exists():  # another process may have been quicker
            temporary = folder / "tokenizer.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            splits = load()
            if "train" not in splits:
                raise DataError(
                    f"there are no training {what} to make a vocabulary of, and {folder} has none: "
                    "give --train_file or --tokenizer_name"
                )
            make(splits["train"], temporary)
            for file in sorted(temporary.iterdir(), key=lambda file: file.name == TOKENIZER_FILE):
                os.replace(file, folder / file.name)
            temporary.rmdir()
            logger.info("a vocabulary of the training data is saved in %s", folder)
    lock.unlink(missing_ok=True)
    return AutoTokenizer.from_pretrained(str(folder))


def byte_backend(specials: Sequence[str]) -> Tokenizer:
    """Return a ``tokenizers.Tokenizer``: special tokens first, then byte *b* as ``specials`` + *b*.

    A byte-level BPE without merges, which takes a text as it is; plain ``tokenizers`` reads it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*specials, *byte_characters()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies.

    Visible characters of Latin-1 stand for themselves, the others for those from U+0100 on (the
    table of GPT-2, which ``tokenizers`` uses).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def byte_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the id of each byte, int32 (256,), or None where a token can be more than a byte."""
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
    """The id that fills rows up; any id will do where the tokenizer has none (GPT-2)."""
    return 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding, which would train on NaN."""
    longest = getattr(tokenizer, "model_max_length", 0)
    # What NaN is compared with is false, too.
    if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest >= 0:
        raise UsageError(
            f"the tokenizer of '{tokenizer.name_or_path}' has model_max_length {longest!r:.80}, "
            "which is no length: correct tokenizer_config.json"
        )
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


def special_ids(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> np.ndarray:
    """True for the ids of special tokens; bool (``size`` or the tokenizer's vocabulary,)."""
    table = np.zeros(table_size(tokenizer, size), bool)
    table[tokenizer.all_special_ids] = True
    table[[i for i, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    return table


def word_start_table(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> np.ndarray:
    """True for the ids that begin a word; bool (``size`` or the tokenizer's vocabulary,).

    Byte-level vocabularies mark the space before a word (``Ġ``), SentencePiece likewise (``▁``),
    WordPiece marks what does not begin one (``##``).
    """
    vocabulary = tokenizer.get_vocab()
    mark, starts = word_marks(vocabulary)
    if not mark:
        raise UsageError(
            "--whole_word_masking: the tokenizer's vocabulary does not mark where words begin"
        )
    table = np.zeros(table_size(tokenizer, size), bool)
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


def table_size(tokenizer: PreTrainedTokenizerBase, size: int | None) -> int:
    """Entries of a table by token id: of the tokenizer, and at least ``size``."""
    return max(size or 0, max(tokenizer.get_vocab().values()) + 1)

"""Multi-vector encoders (ColBERT): one vector per token, compared by late interaction.

Source: Khattab and Zaharia, "ColBERT: Efficient and effective passage search via contextualized
late interaction over BERT", 2020.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling.sentence.bi_encoder import apply_dense, replace_dense
from hfseq.modeling.sentence.config import Inputs, ModuleWeights, RetrievalConfig, Run, split_inputs
from hfseq.modeling.sentence.directory import (
    SETTINGS,
    TRANSFORMERS,
    Module,
    SentenceDirectory,
    module_folder,
    modules_json,
    write_json,
)
from hfseq.modeling.sentence.encoder import TextEncoder
from hfseq.modeling.sentence.modules import Dense
from hfseq.modeling.sentence.pooling import l2_normalize
from hfseq.modeling.sentence.similarity import quantize
from hfseq.modeling.sentence.texts import TokenizedTexts, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: The name that sentence-transformers gives to the vectors of tokens.
FEATURES = "token_embeddings"
#: Size of token vectors for models without a projection, to which a random projection is added.
DEFAULT_FEATURES = 128
#: Settings that PyLate writes into config_sentence_transformers.json.
PYLATE_SETTINGS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
    "skiplist_words",
)


@dataclass(frozen=True)
class QueryExpansion:
    """Pads queries with tokens that are scored like the other tokens of the query.

    Attributes:
        length: Number of tokens to which queries are padded.
        strategy: "fixed" also truncates longer queries to `length` tokens. "min" does not.
        attend: Whether the other tokens attend to the added tokens.
        token: The added token. Default: the mask token, or the EOS token if the tokenizer has no
            mask token.
    """

    length: int = 32
    strategy: str = "fixed"
    attend: bool = False
    token: str | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("fixed", "min"):
            raise UsageError(f"unknown strategy {self.strategy!r} (known: fixed, min)")

    def token_id(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Returns the ID of the added token.

        Raises:
            UsageError: The tokenizer has neither a mask token nor an EOS token.
        """
        candidates: list[Any] = [tokenizer.mask_token_id, tokenizer.eos_token_id]
        if self.token is not None:
            candidates = [tokenizer.convert_tokens_to_ids(self.token)]
        token_id = next((value for value in candidates if value is not None), None)
        if token_id is None:
            raise UsageError(
                "query expansion requires a tokenizer with a mask token or an EOS token"
            )
        return token_id


@dataclass(frozen=True)
class MultiVectorConfig(RetrievalConfig):
    """Describes how texts are preprocessed, and which token vectors are scored.

    The attributes of :class:`RetrievalConfig` can be set by keyword. The markers of queries and
    documents, such as "[Q] " and "[D] ", are the prompts "query" and "document".

    Attributes:
        dense: Dense layers that are applied to each hidden state.
        normalize: Whether to scale the vectors to length 1.
        query_length: Maximum number of tokens of queries.
        document_length: Maximum number of tokens of documents.
        query_expansion: How queries are padded with scored tokens, or `None`.
        skiplist_words: Tokens that are not scored, such as punctuation.
        skiplist_tasks: The tasks, "query" or "document", in which ``skiplist_words`` are not
            scored. Texts that are encoded without a task count as documents.
        keep_only_token_ids: If set, only these tokens of documents are scored.
    """

    dense: tuple[Dense, ...] = ()
    normalize: bool = True
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: QueryExpansion | None = None
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    keep_only_token_ids: tuple[int, ...] | None = None
    #: Markers that the tokenizer must not split into several tokens.
    markers: tuple[str, ...] = field(default=(), compare=False)

    model_type: ClassVar[str] = "MultiVectorEncoder"
    default_similarity: ClassVar[str] = "maxsim"
    similarities: ClassVar[tuple[str, ...]] = ("maxsim", "meanmaxsim")

    # -- files

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> MultiVectorConfig:
        """Reads the settings from a directory that sentence-transformers or PyLate wrote."""
        values: dict[str, Any] = {"dense": (), "normalize": False, **_shared_values(directory)}
        supported = ("Transformer", "Dense", "MultiVectorMask", "Normalize", "Dropout")
        for number, module in enumerate(directory.modules):
            if (module.class_name in TRANSFORMERS) != (number == 0):
                raise directory.unsupported(module, supported)
            if module.class_name == "Dense":
                values["dense"] += (Dense.read(directory, module, FEATURES),)
            elif module.class_name == "Normalize":
                values["normalize"] = True
            elif module.class_name == "MultiVectorMask":
                values |= _mask_values(module)
            elif number and module.class_name != "Dropout":
                raise directory.unsupported(module, supported)
        if directory.settings.get("model_type") == "ColBERT":
            # In PyLate's format, the mask and the normalization are not entries of modules.json.
            words = directory.settings.get("skiplist_words")
            values["skiplist_words"] = tuple(string.punctuation if words is None else words)
            values["normalize"] = True
        return cls(**values)

    @classmethod
    def from_stanford(cls, directory: SentenceDirectory) -> MultiVectorConfig:
        """Reads the settings from a directory that Stanford's ColBERT package wrote."""
        metadata = directory.load("artifact.metadata")
        if not metadata:
            logger.warning(
                "'%s' has no artifact.metadata: using the default settings of ColBERT",
                directory.source,
            )
        markers = tuple(
            f"{metadata.get(name) or default} "
            for name, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]"))
        )
        path, tensors = directory.tensors("")
        if "linear.weight" not in tensors:
            raise CheckpointError(
                f"{path} has no tensor 'linear.weight', the projection of ColBERT"
            )
        expansion = QueryExpansion(
            metadata.get("query_maxlen") or 32, attend=bool(metadata.get("attend_to_mask_tokens"))
        )
        return cls(
            dense=(Dense(tensors["linear.weight"].T, None, "Identity"),),
            document_length=metadata.get("doc_maxlen"),
            query_expansion=expansion,
            skiplist_words=tuple(
                string.punctuation if metadata.get("mask_punctuation", True) else ()
            ),
            prompts=dict(zip(("query", "document"), markers, strict=True)),
            markers=markers,
        )

    def write(self, folder: Path, model: Any) -> None:
        """Writes the files in the format of sentence-transformers 6.

        Older versions do not support multi-vector encoders.
        """
        classes = ["base.modules.transformer.Transformer"]
        classes += ["base.modules.dense.Dense"] * len(self.dense)
        classes.append("multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask")
        classes += ["base.modules.normalize.Normalize"] * self.normalize
        mask = {
            "skiplist_words": list(self.skiplist_words),
            "skiplist_tasks": list(self.skiplist_tasks),
            "keep_only_token_ids": None
            if self.keep_only_token_ids is None
            else list(self.keep_only_token_ids),
        }
        features = {"module_input_name": FEATURES, "module_output_name": FEATURES}
        transformer: dict[str, Any] = {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": FEATURES,
        }
        for name in ("max_seq_length", "query_length", "document_length"):
            if (value := getattr(self, name)) is not None:
                transformer[name] = value
        if self.do_lower_case:
            transformer["do_lower_case"] = True
        if (expansion := self.query_expansion) is not None:
            transformer["query_expansion"] = {
                "strategy": expansion.strategy,
                "length": expansion.length,
                "attend": expansion.attend,
                "token": expansion.token,
            }
        mask_number = 1 + len(self.dense)
        contents = {
            "modules.json": modules_json(classes),
            "sentence_bert_config.json": transformer,
            SETTINGS: self.written_settings("6.0.0"),
            f"{module_folder(mask_number, classes[mask_number])}/config.json": mask,
        }
        if self.normalize:
            contents[f"{module_folder(len(classes) - 1, 'Normalize')}/config.json"] = features
        write_json(folder, contents)
        for number, dense in enumerate(self.dense, 1):
            dense.write(folder / module_folder(number, "Dense"), FEATURES)

    # -- tokens

    def register_markers(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes the tokenizer encode each marker in ``markers`` as a single token.

        Markers that are not in the vocabulary are still tokenized like other text.
        """
        vocabulary = tokenizer.get_vocab()
        for marker in self.markers:
            words = [marker, *marker.split(None, 1)[:1]]
            word = next((word for word in words if word in vocabulary), None)
            if word is not None and tokenizer.tokenize(word) != [word]:
                from tokenizers import AddedToken

                token: Any = AddedToken(word, normalized=False, special=True)
                special = "additional_special_tokens"
                tokenizer.add_special_tokens({special: [token]}, replace_extra_special_tokens=False)

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes texts, expands queries, and marks the tokens that are scored.

        The arguments are those of :meth:`RetrievalConfig.tokenize`.
        """
        length = {"query": self.query_length, "document": self.document_length}.get(task or "")
        expansion = self.query_expansion if task == "query" else None
        if expansion is not None:
            if expansion.strategy == "fixed":
                length = expansion.length
            elif length is not None:
                length = max(length, expansion.length)
            if expansion.length > limit:
                raise UsageError(
                    f"query_expansion pads queries to {expansion.length} tokens, but texts can "
                    f"have at most {limit} tokens (--max_seq_length, and the model's positions)"
                )
        limit = min(limit, length or limit)
        tokens = tokenize(tokenizer, texts, limit, prompt, self.do_lower_case)
        skipped = self._skipped_ids(tokenizer, task)
        kept_ids = set(self.keep_only_token_ids or ()) if task != "query" else set()
        if skipped or kept_ids:
            tokens.scored = [
                [item not in skipped and (not kept_ids or item in kept_ids) for item in ids]
                for ids in tokens.ids
            ]
        if expansion is not None:
            _expand(tokens, expansion, expansion.token_id(tokenizer))
        return tokens

    def _skipped_ids(self, tokenizer: PreTrainedTokenizerBase, task: str | None) -> set[int]:
        """Returns the IDs of the tokens in ``skiplist_words`` that are not scored in a task.

        Words that are not a single token of the vocabulary are ignored.
        """
        if not self.skiplist_words or (task or "document") not in self.skiplist_tasks:
            return set()
        ids: Any = tokenizer.convert_tokens_to_ids(list(self.skiplist_words))
        pairs = zip(self.skiplist_words, ids, strict=True)
        unknown = tokenizer.unk_token_id
        return {
            token_id
            for word, token_id in pairs
            if token_id is not None and (token_id != unknown or word == tokenizer.unk_token)
        }

    # -- weights and computation

    @property
    def module_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of the dense layers, by module and name."""
        return {f"dense_{number}": dense.weights for number, dense in enumerate(self.dense)}

    def replace_weights(self, weights: ModuleWeights) -> MultiVectorConfig:
        """Returns these settings with new weights for the dense layers."""
        return replace(self, dense=replace_dense(self.dense, weights))

    def __call__(self, hidden: jax.Array, weights: ModuleWeights | None = None) -> jax.Array:
        """Converts hidden states to float32 token vectors.

        Args:
            hidden: The last hidden states, `(batch, tokens, features)`.
            weights: Weights to use instead of those in the settings.
        """
        vectors = apply_dense(self.dense, hidden, weights).astype(jnp.float32)
        return l2_normalize(vectors) if self.normalize else vectors

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the token vectors of a batch and the mask of the scored tokens.

        The arguments are those of :meth:`RetrievalConfig.embed`.
        """
        model_inputs, mask = split_inputs(inputs)
        return self(run(**model_inputs).last_hidden_state, weights), mask


def _expand(tokens: TokenizedTexts, expansion: QueryExpansion, token_id: int) -> None:
    """Pads the tokens of queries as a `QueryExpansion` describes."""
    lengths = [len(ids) for ids in tokens.ids]
    scored = tokens.scored or [[True] * length for length in lengths]
    added = [max(expansion.length - length, 0) for length in lengths]
    tokens.ids = [[*ids, *[token_id] * n] for ids, n in zip(tokens.ids, added, strict=True)]
    tokens.scored = [[*row, *[True] * n] for row, n in zip(scored, added, strict=True)]
    if not expansion.attend:
        tokens.attended = lengths


def _mask_values(module: Module) -> dict[str, Any]:
    """Reads the settings of the tokens to score from a MultiVectorMask module."""
    settings = module.settings
    tasks = settings.get("skiplist_tasks") or ["document"]
    kept_ids = settings.get("keep_only_token_ids")
    return {
        "skiplist_words": tuple(settings.get("skiplist_words") or ()),
        "skiplist_tasks": (tasks,) if isinstance(tasks, str) else tuple(tasks),
        "keep_only_token_ids": None if kept_ids is None else tuple(kept_ids),
    }


def _shared_values(directory: SentenceDirectory) -> dict[str, Any]:
    """Reads prompts, lengths and query expansion.

    They are read from the files of sentence-transformers 6 or PyLate.
    """
    values = RetrievalConfig.shared_values(directory)
    settings, transformer = directory.settings, directory.transformer
    if values["similarity_fn_name"] not in MultiVectorConfig.similarities:
        values["similarity_fn_name"] = None  # PyLate writes "cosine", although it computes MaxSim
    for name in ("query_length", "document_length"):
        values[name] = transformer.get(name, settings.get(name))
    prompts, markers = dict(values["prompts"]), []
    for task in ("query", "document"):
        marker = settings.get(f"{task}_prefix")
        if marker is not None:
            prompts[task] = marker + prompts.get(task, "").removeprefix(marker)
            markers.append(marker)
    expansion = transformer.get("query_expansion", settings.get("query_expansion"))
    if expansion is not None:
        keys = ("length", "strategy", "attend", "token")
        stored = {key: expansion[key] for key in keys if expansion.get(key) is not None}
        values["query_expansion"] = QueryExpansion(**stored)
    elif (
        "query_expansion" not in {**settings, **transformer}
        and any(name in settings for name in PYLATE_SETTINGS)
        and settings.get("do_query_expansion") is not False
    ):
        flags = ("attend_to_expansion_tokens", "attend_to_mask_tokens")
        attend = next((settings[name] for name in flags if name in settings), False)
        length = settings.get("query_length") or 32
        values["query_expansion"] = QueryExpansion(length, attend=bool(attend))
        values["query_length"] = None
    other_settings = values["other_settings"]
    return values | {
        "prompts": prompts,
        "markers": tuple(filter(None, markers)),
        "other_settings": {
            name: value for name, value in other_settings.items() if name not in PYLATE_SETTINGS
        },
    }


class MultiVectorEncoder(TextEncoder):
    """A multi-vector encoder, which computes one vector per token.

    It consists of a model, its tokenizer and a :class:`MultiVectorConfig`.

    Example:
        >>> model = hfseq.MultiVectorEncoder.from_pretrained("colbert-ir/colbertv2.0")
        >>> queries = model.encode_query(["How old is the law?"])
        >>> documents = model.encode_document(["It was made in 1814.", "Fish live in rivers."])
        >>> model.similarity(queries, documents)
    """

    config_class = MultiVectorConfig
    config: MultiVectorConfig

    @classmethod
    def read_config(
        cls, directory: SentenceDirectory, options: dict[str, Any]
    ) -> MultiVectorConfig:
        """Returns the settings of a multi-vector encoder, also for models of other types.

        A model of Stanford's ColBERT package is converted. For a bi-encoder, the pooling is
        ignored, and the dense layers are applied to the vectors of tokens.
        """
        if not directory.modules:
            architectures = directory.load("config.json").get("architectures") or []
            if "HF_ColBERT" in architectures:
                return MultiVectorConfig.from_stanford(directory)
        elif directory.model_type == "SentenceTransformer":
            layers = [module for module in directory.modules if module.class_name == "Dense"]
            values = RetrievalConfig.shared_values(directory)
            values["similarity_fn_name"] = None
            dense = tuple(Dense.read(directory, layer, "sentence_embedding") for layer in layers)
            return MultiVectorConfig(dense, **values)
        return super().read_config(directory, options)  # type: ignore[return-value]

    @classmethod
    def default_config(cls, config: Any) -> MultiVectorConfig:
        """Returns the default settings for a model without sentence-transformers files."""
        return MultiVectorConfig()

    @classmethod
    def build(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: RetrievalConfig,
        directory: SentenceDirectory,
    ) -> MultiVectorEncoder:
        """Creates the encoder from a loaded model and tokenizer.

        A random projection is added to a model without a projection, and the markers are registered
        with the tokenizer.
        """
        assert isinstance(config, MultiVectorConfig)
        if not config.dense and directory.model_type != cls.config_class.model_type:
            config = replace(config, dense=(random_projection(model.text_config.hidden_size),))
            logger.warning(
                "'%s' has no projection of its token vectors. A random projection to %d features "
                "was added, so the model must be trained",
                *(directory.source, DEFAULT_FEATURES),
            )
        config.register_markers(tokenizer)
        return super().build(model, tokenizer, config, directory)

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        *,
        precision: str = "float32",
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        task: str | None = None,
        params: Any = None,
    ) -> Any:
        """Computes the token vectors of texts, as sentence-transformers does.

        Args:
            sentences: A text or a sequence of texts.
            prompt_name: Name of a stored prompt to prepend to each text.
            prompt: A prompt to prepend to each text.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            precision: "float32", "int8", "uint8", "binary" or "ubinary". For "int8" and "uint8",
                the ranges of features are computed over all texts.
            normalize_embeddings: Whether to scale the vectors to length 1.
            truncate_dim: Number of leading features to keep.
            task: "query" for queries. Other texts are encoded as documents.
            params: Parameters to use instead of those of the model.

        Returns:
            A list with an array `(scored tokens, features)` per text. For a single text, the array
            itself.

        Raises:
            UsageError: An argument is not valid.
        """
        texts, is_single = self.as_list(sentences)
        tokens = self.tokenize(texts, self.config.find_prompt(prompt, prompt_name), task)
        params = self.model.params if params is None else params
        results = self.batches(
            tokens,
            batch_size,
            show_progress_bar,
            lambda inputs: self._embed(params, inputs, task=task),
        )
        vectors: list[np.ndarray] = [np.zeros((0, 0), np.float32)] * len(tokens)
        for numbers, (values, mask) in results:
            token_vectors, scored = np.asarray(values), np.asarray(mask) != 0
            for row, number in enumerate(numbers):
                vectors[number] = token_vectors[row][scored[row]]
        vectors = self.truncate(vectors, truncate_dim)
        if normalize_embeddings:
            vectors = [
                rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
                for rows in vectors
            ]
        if precision != "float32" and vectors:
            ends = np.cumsum([len(rows) for rows in vectors])[:-1]
            vectors = np.split(quantize(np.concatenate(vectors), precision), ends)
        return vectors[0] if is_single else vectors


def random_projection(features: int, size: int = DEFAULT_FEATURES, seed: int = 0) -> Dense:
    """Creates a dense layer without bias, with random weights as in PyTorch's `Linear`.

    Args:
        features: Number of features of the hidden states.
        size: Number of features of the token vectors.
        seed: Seed of the initialization.
    """
    return Dense.random(features, size, seed, use_bias=False)

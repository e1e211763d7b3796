"""The base classes of the retrieval models that users call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import numpy as np

from hfseq.errors import CheckpointError, UsageError
from hfseq.generation.request import text_width
from hfseq.modeling.sentence.config import MODULES_KEY, RetrievalConfig
from hfseq.modeling.sentence.directory import KINDS, SentenceDirectory
from hfseq.modeling.sentence.similarity import pairwise_similarity, similarity
from hfseq.modeling.sentence.texts import TokenizedTexts
from hfseq.nn.cpu import rows_per_chunk
from hfseq.plugins.registry import auto_class_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling.base import FlaxModel

#: Options of ``from_pretrained`` that also apply to the sentence-transformers files and the
#: tokenizer.
DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class RetrievalModel:
    """Base class of retrieval models.

    A retrieval model combines a model, its tokenizer and a configuration. The subclasses are
    :class:`SentenceEncoder`, :class:`CrossEncoder`, :class:`SparseEncoder` and
    :class:`MultiVectorEncoder`. ``RetrievalModel.from_pretrained`` returns an instance of the
    subclass for the type of the saved model.

    Args:
        model: The model.
        tokenizer: The tokenizer of the model.
        config: Describes how texts are preprocessed and how outputs are converted to vectors or
            scores.
    """

    config_class: ClassVar[type[RetrievalConfig]]
    #: The subclasses by model type.
    kinds: ClassVar[dict[str, type[RetrievalModel]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):
            RetrievalModel.kinds[cls.config_class.model_type] = cls

    def __init__(
        self, model: FlaxModel, tokenizer: PreTrainedTokenizerBase, config: RetrievalConfig
    ):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.limit = config.token_limit(model, tokenizer)
        self._embed = jax.jit(self._compute, static_argnames="task")

    # -- loading and saving

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Self:
        """Loads a model from a directory or repository.

        If this method is called on :class:`RetrievalModel`, it returns an instance of the subclass
        for the type of the saved model. If it is called on a subclass such as
        :class:`CrossEncoder`, it also loads models without sentence-transformers files, with the
        default settings of sentence-transformers.

        Args:
            name: The directory or repository.
            **options: The options of :meth:`FlaxPreTrainedModel.from_pretrained`. In addition,
                ``tokenizer`` is a tokenizer to use instead of the saved one.

        Raises:
            CheckpointError: The model has a different type, or files are missing or not valid.
        """
        source = str(name)
        download = {key: options[key] for key in DOWNLOAD_OPTIONS if key in options}
        if not Path(source).is_dir() and (Path(source).exists() or source[:1] in ("/", ".")):
            raise CheckpointError(f"'{source}' is not a directory")
        directory = SentenceDirectory.read(source, download)
        model_type = saved_kind(directory)
        if cls is RetrievalModel:
            if directory.modules and model_type not in cls.kinds:
                raise unknown_kind(directory)
            if model_type not in cls.kinds:
                names = ", ".join(model_class.__name__ for model_class in cls.kinds.values())
                raise CheckpointError(
                    f"'{source}' does not contain a retrieval model, because it has no "
                    "modules.json, which defines the pooling. To load it with default settings, "
                    f"call from_pretrained of one of {names}. To compute vectors with a certain "
                    'pooling, call FlaxAutoModel.encode(..., pooling="mean"), or hfseq embed '
                    "--pooling mean"
                )
            return cls.kinds[model_type]._load(directory, download, options)  # type: ignore[return-value]
        return cls._load(directory, download, options)

    @classmethod
    def _load(
        cls, directory: SentenceDirectory, download: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Self:
        from transformers import AutoTokenizer

        from hfseq.modeling import auto

        options = dict(options)
        source, tokenizer = directory.source, options.pop("tokenizer", None)
        config = cls.read_config(directory, options)
        if config.auto_class is None:
            return cls._build_static(config, directory)
        folder = directory.modules[0].folder if directory.modules else ""
        subfolder = {"subfolder": folder} if folder else {}
        auto_class = getattr(auto, f"Flax{auto_class_name(config.auto_class)}")
        model = auto.load(auto_class, source, **subfolder, **options)
        if tokenizer is None:
            tokenizer = auto.load(AutoTokenizer, source, **subfolder, **download)
        return cls.build(model, tokenizer, config, directory)

    @classmethod
    def _build_static(cls, config: Any, directory: SentenceDirectory) -> Self:
        """Creates an instance for a model that has a static embedding instead of a transformer."""
        from transformers import PreTrainedTokenizerFast

        from hfseq.modeling.sentence.static_embedding import StaticModel

        model: Any = StaticModel(config)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=config.static_embedding.tokenizer)
        return cls.build(model, tokenizer, config, directory)

    @classmethod
    def build(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: RetrievalConfig,
        directory: SentenceDirectory,
    ) -> Self:
        """Creates an instance from a loaded model and its tokenizer."""
        model.sentence_config = config
        return cls(model, tokenizer, config)

    @classmethod
    def read_config(cls, directory: SentenceDirectory, options: dict[str, Any]) -> RetrievalConfig:
        """Returns the settings with which this class loads a model.

        Args:
            directory: The sentence-transformers files of the model.
            options: Options of ``from_pretrained``. Options that only this class reads are removed.

        Raises:
            CheckpointError: The model has a type that this class cannot load.
        """
        model_type = saved_kind(directory)
        if directory.modules and model_type == cls.config_class.model_type:
            return cls.config_class.from_directory(directory)
        if directory.modules:
            raise _other_kind(directory, cls)
        from hfseq.checkpoints.config import auto_config

        download = {key: options[key] for key in DOWNLOAD_OPTIONS if key in options}
        return cls.default_config(auto_config(directory.source, **download))

    @classmethod
    def default_config(cls, config: Any) -> RetrievalConfig:
        """Returns the default settings for a model without sentence-transformers files."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the model, its tokenizer and the files that sentence-transformers reads."""
        model: Any = self.model
        model.sentence_config = self.config
        model.save_pretrained(folder)
        if self.config.auto_class is not None:
            self.tokenizer.save_pretrained(folder)

    # -- computation

    def _compute(self, params: Any, inputs: Mapping[str, Any], task: str | None) -> Any:
        weights = params.get(MODULES_KEY) if hasattr(params, "get") else None

        def run(**model_inputs: Any) -> Any:
            call: Any = self.model
            output = call(**model_inputs, params=params)
            if self.config.auto_class == "Model" and "last_hidden_state" not in output:
                raise UsageError(
                    f"{type(self.model).__name__} returns no hidden states, because it has a head: "
                    "load the model with FlaxAutoModel to encode sentences"
                )
            return output

        return self.config.embed(run, inputs, weights, task)

    @staticmethod
    def as_list(inputs: Any) -> tuple[Sequence[Any], bool]:
        """Returns the inputs as a sequence, and whether they were a single text."""
        return ([inputs], True) if isinstance(inputs, str) else (inputs, False)

    def tokenize(self, texts: Sequence[Any], prompt: str, task: str | None) -> TokenizedTexts:
        """Tokenizes texts. The result has token types only if the model uses them."""
        tokens = self.config.tokenize(
            self.tokenizer, texts, limit=self.limit, prompt=prompt, task=task
        )
        if not self.model.accepts("token_type_ids"):
            tokens.types = None
        return tokens

    def batches(
        self,
        tokens: TokenizedTexts,
        batch_size: int,
        show_progress_bar: bool,
        compute: Any,
    ) -> list[tuple[list[int], Any]]:
        """Runs a function on batches of texts with similar lengths.

        The results stay on the device, so that it computes while the next batch is prepared.

        Args:
            tokens: The tokens of all texts.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            compute: The function, which receives the inputs of a batch.

        Returns:
            For each batch, the indices of its texts and the result. The result may have more rows
            than the batch has texts.
        """
        from tqdm import tqdm

        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        order = sorted(range(len(tokens)), key=lambda number: -len(tokens.ids[number]))
        results = []
        pad = self.tokenizer.pad_token_id or 0
        with tqdm(total=len(tokens), disable=not show_progress_bar, unit=" texts") as bar:
            while order:
                width = text_width(len(tokens.ids[order[0]]), self.limit)
                max_rows = rows_per_chunk(width, batch_size)
                numbers, order = order[:max_rows], order[max_rows:]
                # The batch is padded to a power of 4 or to the maximum number of rows, so that few
                # programs are compiled.
                rows = min(max_rows, 4 ** math.ceil(math.log(len(numbers), 4)))
                results.append((numbers, compute(tokens.batch(numbers, rows, width, pad))))
                bar.update(len(numbers))
        return results

    def vectors(
        self,
        tokens: TokenizedTexts,
        batch_size: int,
        show_progress_bar: bool,
        task: str | None = None,
        params: Any = None,
    ) -> np.ndarray:
        """Returns one float32 vector per text, `(texts, features)`."""
        params = self.model.params if params is None else params
        results = self.batches(
            tokens,
            batch_size,
            show_progress_bar,
            lambda inputs: self._embed(params, inputs, task=task),
        )
        features = int(results[0][1].shape[1]) if results else 0
        vectors = np.zeros((len(tokens), features), np.float32)
        for numbers, part in results:
            vectors[numbers] = np.asarray(part)[: len(numbers)]
        return vectors


class TextEncoder(RetrievalModel):
    """Base class of models that encode queries and documents separately."""

    #: Encodes texts. Each subclass has its own arguments and result.
    encode: Any

    def encode_query(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """Encodes queries, by default with the prompt named "query".

        The arguments and the result are those of :meth:`encode`.
        """
        if prompt is None and prompt_name is None:
            prompt_name = "query"
        return self.encode(
            sentences, prompt_name=prompt_name, prompt=prompt, task="query", **options
        )

    def encode_document(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        **options: Any,
    ) -> Any:
        """Encodes documents, by default with the prompt named "document".

        As in sentence-transformers, every model has a prompt with this name, which may be empty. If
        the model's prompt for documents has a different name, such as "passage", pass this name as
        ``prompt_name``. The arguments and the result are those of :meth:`encode`.
        """
        if prompt is None and prompt_name is None:
            prompt_name = "document"
        return self.encode(
            sentences, prompt_name=prompt_name, prompt=prompt, task="document", **options
        )

    @property
    def similarity_fn_name(self) -> str:
        """Name of the similarity function."""
        return self.config.similarity_fn_name or self.config.default_similarity

    def similarity(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns the similarities of each of `embeddings1` to each of `embeddings2`.

        Returns:
            An array `(len(embeddings1), len(embeddings2))`.
        """
        return similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns the similarities of embeddings at the same index, `(len(embeddings1),)`."""
        return pairwise_similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def truncate(self, vectors: Any, truncate_dim: int | None) -> Any:
        """Truncates vectors to their leading features.

        Args:
            vectors: The vectors.
            truncate_dim: Number of features to keep. Default: the value in the settings, or all.

        Raises:
            UsageError: The vectors have fewer features.
        """
        size = self.config.truncate_dim if truncate_dim is None else truncate_dim
        if size is None or not len(vectors):
            return vectors
        features = vectors[0].shape[-1]
        if not 0 < size <= features:
            raise UsageError(
                f"truncate_dim must be between 1 and {features}, the number of features, not {size}"
            )
        if isinstance(vectors, list):
            return [vector[..., :size] for vector in vectors]
        return vectors[..., :size]

    def token_states(
        self, tokens: TokenizedTexts, batch_size: int, show_progress_bar: bool, params: Any
    ) -> list[np.ndarray]:
        """Returns the last hidden states of each text, `(tokens, features)`."""

        @jax.jit
        def hidden(params: Any, inputs: Mapping[str, Any]) -> jax.Array:
            call: Any = self.model
            inputs = {name: value for name, value in inputs.items() if name != "scoring_mask"}
            return call(**inputs, params=params).last_hidden_state

        params = self.model.params if params is None else params
        results = self.batches(
            tokens, batch_size, show_progress_bar, lambda inputs: hidden(params, inputs)
        )
        states: dict[int, np.ndarray] = {}
        for numbers, part in results:
            for row, number in enumerate(numbers):
                states[number] = np.asarray(part[row, : len(tokens.ids[number])], np.float32)
        return [states[number] for number in range(len(tokens))]


def saved_kind(directory: SentenceDirectory) -> str | None:
    """Returns the model type of a directory, or `None` if its files do not determine one."""
    if directory.modules:
        return directory.model_type
    if not fetches_config(directory):
        return None
    architectures = directory.load("config.json").get("architectures") or []
    if "HF_ColBERT" in architectures:
        return "MultiVectorEncoder"
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return "CrossEncoder"
    return None


def fetches_config(directory: SentenceDirectory) -> bool:
    """Returns whether the directory contains config.json."""
    return directory.fetch("config.json") is not None


def unknown_kind(directory: SentenceDirectory) -> CheckpointError:
    """Returns the error for a directory whose `model_type` hfseq does not know."""
    return CheckpointError(
        f"'{directory.source}' has the unknown model_type '{directory.model_type}' (known: "
        f"{', '.join(KINDS)})"
    )


def _other_kind(directory: SentenceDirectory, cls: type[RetrievalModel]) -> CheckpointError:
    """Returns the error for a directory with a model type that ``cls`` cannot load."""
    if directory.model_type not in KINDS:
        return unknown_kind(directory)
    name = RetrievalModel.kinds[directory.model_type].__name__
    return CheckpointError(
        f"'{directory.source}' contains a {directory.model_type}, which cannot be loaded as a "
        f"{cls.config_class.model_type}. Use hfseq.{name}.from_pretrained, or "
        "hfseq.RetrievalModel.from_pretrained, which selects the class automatically"
    )

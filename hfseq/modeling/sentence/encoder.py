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

#: Options of downloads that apply to the files of sentence-transformers and to the tokenizer.
DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class RetrievalModel:
    """Base class of retrieval models.

    A retrieval model combines a model, its tokenizer and a configuration. The subclasses are
    :class:`SentenceEncoder`, :class:`CrossEncoder`, :class:`SparseEncoder` and
    :class:`MultiVectorEncoder`. ``RetrievalModel.from_pretrained`` returns an instance of the class
    that was saved.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        config: How texts are preprocessed and how outputs are converted to vectors or scores.
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

        Called on a subclass such as :class:`CrossEncoder`, this method also loads models without
        the files of sentence-transformers, with the defaults of sentence-transformers. Called on
        :class:`RetrievalModel`, it returns an instance of the class that was saved.

        Args:
            name: The directory or repository.
            **options: ``tokenizer``, a tokenizer to use instead of the saved one, and the options
                of :meth:`FlaxPreTrainedModel.from_pretrained`.

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
                    f"call from_pretrained of one of {names}. To compute vectors, "
                    'pass the pooling: FlaxAutoModel.encode(..., pooling="mean"), or hfseq embed '
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
        """Returns an object whose model has no transformer."""
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
        """Returns the object after its model and its tokenizer are loaded."""
        model.sentence_config = config
        return cls(model, tokenizer, config)

    @classmethod
    def read_config(cls, directory: SentenceDirectory, options: dict[str, Any]) -> RetrievalConfig:
        """Returns the settings of a model that is loaded as this class.

        Args:
            directory: The files of the model.
            options: Options of ``from_pretrained``. Options of this class are removed.

        Raises:
            CheckpointError: The directory contains a model type that cannot be converted.
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
        """Returns the settings of a model without the files of sentence-transformers."""
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
                    f"{type(self.model).__name__} has a head: load the model with FlaxAutoModel to "
                    "encode sentences"
                )
            return output

        return self.config.embed(run, inputs, weights, task)

    @staticmethod
    def as_list(inputs: Any) -> tuple[Sequence[Any], bool]:
        """Returns a list of inputs, and whether the argument was a single text."""
        return ([inputs], True) if isinstance(inputs, str) else (inputs, False)

    def tokenize(self, texts: Sequence[Any], prompt: str, task: str | None) -> TokenizedTexts:
        """Tokenizes texts. Token types are omitted if the model does not use them."""
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
        """Runs a function on batches of similar lengths.

        The results are not fetched, so that the device computes while the next batch is prepared.

        Args:
            tokens: The tokens of all texts.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            compute: A function of the inputs of a batch.

        Returns:
            For each batch, the numbers of its texts and the result. The result may have more rows
            than there are texts.
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
                # Padded to a power of 4 or to the maximum, so that few programs are compiled.
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
        """Encodes queries. The prompt "query" is the default.

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
        """Encodes documents. The prompt "document" is the default.

        As in sentence-transformers, a model always has the prompt "document", which is empty by
        default. If the document prompt has a different name, such as "passage", pass this name as
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
        """Returns the similarities of all pairs, `(len(embeddings1), len(embeddings2))`."""
        return similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> np.ndarray:
        """Returns the similarity of each pair of equal index, `(len(embeddings1),)`."""
        return pairwise_similarity(self.similarity_fn_name, embeddings1, embeddings2)

    def truncate(self, vectors: Any, truncate_dim: int | None) -> Any:
        """Returns the leading features of vectors.

        Raises:
            UsageError: The vectors have fewer features.
        """
        size = self.config.truncate_dim if truncate_dim is None else truncate_dim
        if size is None or not len(vectors):
            return vectors
        features = vectors[0].shape[-1]
        if not 0 < size <= features:
            raise UsageError(
                f"truncate_dim must be between 1 and the number of features {features}, not {size}"
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
    """Returns the model type in a directory, or `None` if its files do not name one."""
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
    """Returns the error for a directory with an unknown model type."""
    return CheckpointError(
        f"'{directory.source}' has the unknown model_type '{directory.model_type}' (known: "
        f"{', '.join(KINDS)})"
    )


def _other_kind(directory: SentenceDirectory, cls: type[RetrievalModel]) -> CheckpointError:
    """Returns the error for a directory whose model type differs from that of ``cls``."""
    if directory.model_type not in KINDS:
        return unknown_kind(directory)
    name = RetrievalModel.kinds[directory.model_type].__name__
    return CheckpointError(
        f"'{directory.source}' contains a {directory.model_type}, which cannot be loaded as a "
        f"{cls.config_class.model_type}. Use hfseq.{name}.from_pretrained, or "
        "hfseq.RetrievalModel.from_pretrained, which selects the class automatically"
    )

"""Sparse encoders: a text has one weight per vocabulary entry (SPLADE) or latent feature (CSR).

Source: Formal et al., "SPLADE: Sparse lexical and expansion model for first stage ranking", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling.sentence.auto_encoder import SparseAutoEncoder
from hfseq.modeling.sentence.bi_encoder import SentenceConfig
from hfseq.modeling.sentence.config import Inputs, ModuleWeights, RetrievalConfig, Run, split_inputs
from hfseq.modeling.sentence.directory import (
    SETTINGS,
    TRANSFORMERS,
    Module,
    SentenceDirectory,
    module_folder,
    modules_json,
    read_json,
    router_json,
    write_json,
)
from hfseq.modeling.sentence.encoder import TextEncoder
from hfseq.modeling.sentence.modules import write_module
from hfseq.modeling.sentence.texts import TokenizedTexts, tokenize
from hfseq.nn.heads import LogitReduction, reduced_logits

if TYPE_CHECKING:
    from scipy.sparse import csr_array
    from transformers import PreTrainedTokenizerBase

STRATEGIES = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")
#: Folders of the query encoder and of the pooling, for a model with a static query encoder. The
#: transformer is in the model directory itself, so that Transformers and hfseq's training find it.
QUERY_FOLDER, POOLING_FOLDER = "query_0_SparseStaticEmbedding", "document_1_SpladePooling"


@dataclass(frozen=True)
class StaticQueryEncoder:
    """Encodes queries without a transformer.

    The weight of a token is the same in all queries, such as its inverse document frequency.

    Attributes:
        weight: The weight of each vocabulary entry, `(vocab_size,)`.
        tokenizer: The tokenizer for queries.
        frozen: Whether the weights are excluded from training.
    """

    weight: np.ndarray
    tokenizer: PreTrainedTokenizerBase
    frozen: bool = False

    @classmethod
    def read(cls, directory: SentenceDirectory, module: Module) -> StaticQueryEncoder:
        """Reads the encoder from a directory.

        Raises:
            CheckpointError: The file or the tensor with the weights is missing.
        """
        from transformers import AutoTokenizer

        from hfseq.modeling import auto

        tokenizer = auto.load(AutoTokenizer, directory.source, subfolder=module.folder)
        settings, weights_path = module.settings, module.settings.get("path")
        if weights_path is not None:
            name = Path(str(weights_path)).name
            path = directory.fetch(f"{module.folder}/{name}") or directory.fetch(name)
            if path is None:
                raise CheckpointError(
                    f"'{directory.source}': neither the folder {module.folder} nor the model "
                    f"directory contains {name}, the file with the weights of tokens"
                )
            entries = read_json(path)
            weight = np.zeros(len(tokenizer.get_vocab()), np.float32)
            weight[tokenizer.convert_tokens_to_ids(list(entries))] = list(entries.values())
        else:
            path, tensors = directory.tensors(module.folder)
            if "weight" not in tensors:
                raise CheckpointError(
                    f"{path} has no tensor 'weight', the weights of a SparseStaticEmbedding"
                )
            weight = np.asarray(tensors["weight"], np.float32)
        return cls(weight, tokenizer, bool(settings.get("frozen")))

    def __call__(
        self, input_ids: jax.Array, mask: jax.Array, weight: jax.Array | None = None
    ) -> jax.Array:
        """Returns the weights of the distinct tokens of each query, `(batch, vocab_size)`.

        Args:
            input_ids: Token IDs without special tokens, `(batch, tokens)`.
            mask: Mask of the tokens that are not padding, `(batch, tokens)`.
            weight: Weights to use instead of those in the attribute.
        """
        weight = jnp.asarray(self.weight) if weight is None else weight
        rows = jnp.arange(len(input_ids))[:, None]
        present = jnp.zeros((len(input_ids), len(weight)), weight.dtype)
        return present.at[rows, input_ids].max((mask != 0).astype(weight.dtype)) * weight

    def write(self, folder: Path) -> None:
        """Writes the encoder and its tokenizer into ``folder``."""
        write_module(folder, {"frozen": self.frozen}, {"weight": np.asarray(self.weight)})
        self.tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class SparseConfig(RetrievalConfig):
    """Describes how the logits of a masked language model are converted to sparse vectors.

    The attributes of :class:`RetrievalConfig` can be set by keyword.

    Attributes:
        pooling_strategy: "max" or "sum" over the tokens.
        activation_function: "relu" computes a weight as log(1 + relu(logit)). "log1p_relu" applies
            x -> log(1 + x) to this result once more.
        max_active_dims: Number of largest weights to keep by default.
        query_encoder: A static encoder for queries, or `None` to encode queries like documents.
        bi_encoder: For models with an autoencoder (CSR), describes how the dense vectors are
            computed. The attributes above, except `max_active_dims`, then have no effect.
        auto_encoder: The autoencoder, which converts the dense vectors to sparse vectors, or
            `None`.
    """

    pooling_strategy: str = "max"
    activation_function: str = "relu"
    max_active_dims: int | None = None
    query_encoder: StaticQueryEncoder | None = None
    bi_encoder: SentenceConfig | None = None
    auto_encoder: SparseAutoEncoder | None = None

    model_type: ClassVar[str] = "SparseEncoder"
    default_similarity: ClassVar[str] = "dot"
    similarities: ClassVar[tuple[str, ...]] = ("cosine", "dot")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("pooling_strategy", STRATEGIES), ("activation_function", ACTIVATIONS)):
            if (value := getattr(self, name)) not in known:
                raise UsageError(f"unknown {name} {value!r} (known: {', '.join(known)})")

    @property
    def auto_class(self) -> str | None:  # type: ignore[override]
        """Suffix of the class that loads the model, or `None` if there is no transformer."""
        return "ForMaskedLM" if self.bi_encoder is None else self.bi_encoder.auto_class

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> SparseConfig:
        """Reads the settings from a directory that contains a sparse encoder."""
        supported = (
            *("Transformer", "MLMTransformer", "SpladePooling", "Router"),
            "SparseAutoEncoder after the modules of a bi-encoder",
        )
        values: dict[str, Any] = cls.shared_values(directory)
        modules = list(directory.modules)
        if modules[-1].class_name == "SparseAutoEncoder" and directory.query_modules is None:
            auto_encoder = SparseAutoEncoder.read(directory, modules[-1])
            dense = replace(
                directory, modules=modules[:-1], settings={"model_type": SentenceConfig.model_type}
            )
            return cls(
                **values,
                max_active_dims=directory.settings.get("max_active_dims") or auto_encoder.k,
                bi_encoder=SentenceConfig.from_directory(dense),
                auto_encoder=auto_encoder,
            )
        for module in modules:
            if module.class_name not in (*TRANSFORMERS, "SpladePooling", "Dropout"):
                raise directory.unsupported(module, (*supported, "SparseStaticEmbedding"))
        poolings = [module for module in modules if module.class_name == "SpladePooling"]
        if modules[0].class_name not in TRANSFORMERS or len(poolings) != 1:
            raise CheckpointError(
                f"'{directory.source}': a sparse encoder requires a transformer and one "
                "SpladePooling module"
            )
        settings = poolings[0].settings
        values |= {
            name: settings[name]
            for name in ("pooling_strategy", "activation_function")
            if name in settings
        }
        values["max_active_dims"] = directory.settings.get("max_active_dims")
        query = directory.query_modules
        if query is not None:
            if len(query) != 1 or query[0].class_name != "SparseStaticEmbedding":
                names = ", ".join(module.class_name for module in query)
                raise CheckpointError(
                    f"the query route of '{directory.source}' has the unsupported modules {names} "
                    "(supported: SparseStaticEmbedding)"
                )
            values["query_encoder"] = StaticQueryEncoder.read(directory, query[0])
        return cls(**values)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the files in the format of sentence-transformers 5, which version 6 also reads.

        A model with a static query encoder is written as a router with separate modules for queries
        and documents.
        """
        module = "sparse_encoder.models."
        settings = self.written_settings()
        if self.max_active_dims is not None:
            settings["max_active_dims"] = self.max_active_dims
        if self.bi_encoder is not None and self.auto_encoder is not None:
            bi_encoder = replace(
                self.bi_encoder,
                max_seq_length=self.max_seq_length,
                do_lower_case=self.do_lower_case,
            )
            bi_encoder.write(folder, model)
            modules = read_json(folder / "modules.json")
            paths = [entry["type"].removeprefix("sentence_transformers.") for entry in modules]
            self.auto_encoder.write(folder / module_folder(len(paths), "SparseAutoEncoder"))
            paths.append(f"{module}SparseAutoEncoder")
            write_json(folder, {"modules.json": modules_json(paths), SETTINGS: settings})
            return
        pooling = {
            "pooling_strategy": self.pooling_strategy,
            "activation_function": self.activation_function,
            "word_embedding_dimension": model.vocab_size(),
        }
        transformer = {"max_seq_length": self.max_seq_length, "do_lower_case": self.do_lower_case}
        contents: dict[str, Any] = {
            SETTINGS: settings,
            "sentence_bert_config.json": transformer,
        }
        transformer_class, pooling_class = f"{module}MLMTransformer", f"{module}SpladePooling"
        if self.query_encoder is None:
            contents["modules.json"] = modules_json([transformer_class, pooling_class])
            contents["1_SpladePooling/config.json"] = pooling
            write_json(folder, contents)
            return
        contents |= {
            "modules.json": modules_json(["models.Router"]),
            "router_config.json": router_json(
                {
                    "query": {QUERY_FOLDER: f"{module}SparseStaticEmbedding"},
                    "document": {"": transformer_class, POOLING_FOLDER: pooling_class},
                }
            ),
            f"{POOLING_FOLDER}/config.json": pooling,
        }
        write_json(folder, contents)
        self.query_encoder.write(folder / QUERY_FOLDER)

    @property
    def module_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of the modules after the encoder, by module and name.

        For a model with an autoencoder, they include those of the bi-encoder's modules. Otherwise,
        they are the weights of the static query encoder, unless they are frozen.
        """
        if self.bi_encoder is not None and self.auto_encoder is not None:
            return self.bi_encoder.module_weights | {"auto_encoder": self.auto_encoder.weights}
        encoder = self.query_encoder
        return {} if encoder is None or encoder.frozen else {"query": {"weight": encoder.weight}}

    @property
    def module_buffers(self) -> dict[str, dict[str, np.ndarray]]:
        """The statistics of the autoencoder."""
        return {} if self.auto_encoder is None else {"auto_encoder": self.auto_encoder.buffers}

    def replace_weights(self, weights: ModuleWeights) -> SparseConfig:
        """Returns a copy of these settings with new weights and statistics for the modules."""
        if self.bi_encoder is not None and self.auto_encoder is not None:
            return replace(
                self,
                bi_encoder=self.bi_encoder.replace_weights(weights),
                auto_encoder=replace(self.auto_encoder, **weights["auto_encoder"]),
            )
        if self.query_encoder is None or "query" not in weights:
            return self
        return replace(self, query_encoder=replace(self.query_encoder, **weights["query"]))

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes texts, as :meth:`RetrievalConfig.tokenize` describes.

        Queries for a static query encoder are tokenized without special tokens.
        """
        if self.bi_encoder is not None:
            return self.bi_encoder.tokenize(tokenizer, texts, limit=limit, prompt=prompt, task=task)
        if task != "query" or self.query_encoder is None:
            return tokenize(tokenizer, texts, limit, prompt, self.do_lower_case)
        tokenizer = self.query_encoder.tokenizer
        options: dict[str, Any] = {"add_special_tokens": False, "truncation": True}
        limit = min(tokenizer.model_max_length, 1 << 20)
        return TokenizedTexts(
            tokenizer([prompt + text for text in texts], max_length=limit, **options)["input_ids"]
            if len(texts)
            else []
        )

    def activate(self, logits: jax.Array) -> jax.Array:
        """Converts float32 logits to weights."""
        weights = jnp.log1p(jax.nn.relu(logits))
        return jnp.log1p(weights) if self.activation_function == "log1p_relu" else weights

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> jax.Array:
        """Computes the weights of a batch, as :meth:`RetrievalConfig.embed` describes.

        The logits of all tokens are not stored at once if the head of the model is applied with
        :func:`hfseq.nn.vocabulary_logits`. For a model with an autoencoder, the result contains all
        positive latent features, not only the largest ones.
        """
        if self.bi_encoder is not None and self.auto_encoder is not None:
            vectors = self.bi_encoder.embed(run, inputs, weights, task)
            return self.auto_encoder(vectors, weights["auto_encoder"] if weights else None)
        if task == "query" and self.query_encoder is not None:
            weight = weights["query"]["weight"] if weights and "query" in weights else None
            return self.query_encoder(inputs["input_ids"], inputs["attention_mask"], weight)
        model_inputs, mask = split_inputs(inputs)
        reduction = LogitReduction(mask, self.activate, self.pooling_strategy)
        with reduced_logits(reduction):
            logits = run(**model_inputs).logits
        return reduction.reduce(logits, mask) if logits.ndim == 3 else logits


class SparseEncoder(TextEncoder):
    """A sparse encoder, which computes one sparse vector per text.

    It consists of a model, its tokenizer and a :class:`SparseConfig`. The model is a masked
    language model (SPLADE), or an encoder that is followed by an autoencoder (CSR).

    Example:
        >>> model = hfseq.SparseEncoder.from_pretrained("naver/splade-v3-distilbert")
        >>> vectors = model.encode_document(["The law was made in 1814."])
        >>> model.decode(vectors[[0]], top_k=5)
    """

    config_class = SparseConfig
    config: SparseConfig

    @classmethod
    def default_config(cls, config: Any) -> SparseConfig:
        """Returns the default settings for a masked language model.

        They are used if the model has no sentence-transformers files.
        """
        architectures = config.architectures or [""]
        if not architectures[0].endswith("ForMaskedLM"):
            raise CheckpointError(
                "a sparse encoder requires a masked language model, but config.json names the "
                f"class {architectures[0]}"
            )
        return SparseConfig()

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        *,
        convert_to_sparse_tensor: bool = True,
        max_active_dims: int | None = None,
        task: str | None = None,
        params: Any = None,
    ) -> csr_array | np.ndarray:
        """Computes the sparse vectors of texts, as sentence-transformers does.

        Args:
            sentences: A text or a sequence of texts.
            prompt_name: Name of a stored prompt to prepend to each text.
            prompt: A prompt to prepend to each text.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            convert_to_sparse_tensor: Whether to return a sparse SciPy array instead of a dense
                array.
            max_active_dims: Number of largest weights to keep per text.
            task: "query" selects the static query encoder, if the model has one.
            params: Parameters to use instead of those of the model.

        Returns:
            Float32 weights, `(texts, vocab_size)`. For a single text, a sparse array has the shape
            `(1, vocab_size)`, and a dense array has the shape `(vocab_size,)`.

        Raises:
            UsageError: An argument is not valid.
        """
        from scipy.sparse import csr_array, vstack

        texts, is_single = self.as_list(sentences)
        limit = self.config.max_active_dims if max_active_dims is None else max_active_dims
        if limit is not None and limit < 1:
            raise UsageError(f"max_active_dims must be at least 1, not {limit}")
        tokens = self.tokenize(texts, self.config.find_prompt(prompt, prompt_name), task)
        params = self.model.params if params is None else params

        def compute(inputs: Any) -> csr_array:
            vectors = np.array(self._embed(params, inputs, task=task))
            return csr_array(vectors if limit is None else keep_largest(vectors, limit))

        results = self.batches(tokens, batch_size, show_progress_bar, compute)
        if not results:
            auto_encoder = self.config.auto_encoder
            features = self.model.vocab_size() if auto_encoder is None else auto_encoder.hidden_dim
            empty = csr_array((0, features or 0), dtype=np.float32)
            return empty if convert_to_sparse_tensor else empty.toarray()
        numbers = np.concatenate([part for part, _ in results])
        stacked = vstack([rows[: len(part)] for part, rows in results], format="csr")
        vectors = csr_array(stacked)[np.argsort(numbers)]
        if convert_to_sparse_tensor:
            return vectors
        dense = vectors.toarray()
        return dense[0] if is_single else dense

    def decode(self, embeddings: Any, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """Lists the tokens with nonzero weights in sparse vectors.

        Args:
            embeddings: The vectors, `(texts, vocab_size)`.
            top_k: Maximum number of tokens per text. Default: all tokens.

        Returns:
            The tokens and weights of each text, in the order of decreasing weights.
        """
        from scipy.sparse import csr_array

        rows = csr_array(
            np.atleast_2d(embeddings) if isinstance(embeddings, np.ndarray) else embeddings
        )
        decoded = []
        for start, end in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
            ids, values = rows.indices[start:end], rows.data[start:end]
            order = np.argsort(-values, kind="stable")[:top_k]
            tokens: Any = self.tokenizer.convert_ids_to_tokens(ids[order].tolist())
            decoded.append(list(zip(tokens, values[order].tolist(), strict=True)))
        return decoded

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """Returns the mean number of nonzero weights per text, and the fraction of zero weights."""
        from scipy.sparse import csr_array

        rows = csr_array(
            np.atleast_2d(embeddings) if isinstance(embeddings, np.ndarray) else embeddings
        )
        count, size = rows.shape
        if not count or not size:
            return {"active_dims": 0.0, "sparsity_ratio": 1.0}
        active = rows.count_nonzero() / count
        return {"active_dims": float(active), "sparsity_ratio": float(1 - active / size)}


def keep_largest(vectors: np.ndarray, count: int) -> np.ndarray:
    """Sets all values except the ``count`` with the largest absolute value in each row to 0."""
    if count >= vectors.shape[1]:
        return vectors
    indices = np.argpartition(-np.abs(vectors), count - 1, axis=1)[:, :count]
    kept_values = np.zeros_like(vectors)
    rows = np.arange(len(vectors))[:, None]
    kept_values[rows, indices] = vectors[rows, indices]
    return kept_values

"""Bi-encoders: one vector per text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from hfseq.errors import CheckpointError, UsageError, did_you_mean
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
from hfseq.modeling.sentence.modules import Dense
from hfseq.modeling.sentence.pooling import POOLING_MODES, l2_normalize, pool
from hfseq.modeling.sentence.similarity import quantize
from hfseq.modeling.sentence.static_embedding import StaticEmbedding
from hfseq.modeling.sentence.texts import TokenizedTexts, check_texts, prompt_length, tokenize
from hfseq.nn import trees

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The name that sentence-transformers gives to the vectors of texts.
FEATURES = "sentence_embedding"
#: Folder of the transformer of queries. That of documents is in the directory itself.
QUERY_TRANSFORMER = "query_0_Transformer"


@dataclass(frozen=True)
class QueryRoute:
    """The modules for queries in a bi-encoder that encodes queries and documents differently.

    Attributes:
        static_embedding: A static embedding that replaces the transformer and the pooling. With
            `None`, queries have the same transformer and pooling as documents.
        dense: Dense layers after the pooling.
        normalize: Whether to scale the vectors to length 1.
        encoder: A bi-encoder with its own transformer. It takes the place of all other modules.
    """

    static_embedding: StaticEmbedding | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    encoder: SentenceEncoder | None = None


@dataclass(frozen=True)
class SentenceConfig(RetrievalConfig):
    """Describes how texts are preprocessed and how hidden states are converted to vectors.

    The attributes of :class:`RetrievalConfig` can be set by keyword.

    Attributes:
        pooling: Pooling modes. The results of several modes are concatenated.
        include_prompt: Whether the pooling includes the tokens of the prompt.
        dense: Dense layers after the pooling.
        normalize: Whether to scale the vectors to length 1.
        static_embedding: A static embedding that replaces the transformer and the pooling, or
            `None`.
        query_route: The modules for queries, if they differ from those for documents.
        default_route: "query" or "document". The modules for texts that are encoded without a task.
        classifier: The classifier of pairs that the softmax loss trains. It is not saved.
    """

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    static_embedding: StaticEmbedding | None = None
    query_route: QueryRoute | None = None
    default_route: str = "document"
    classifier: Dense | None = None

    model_type: ClassVar[str] = "SentenceTransformer"

    def __post_init__(self) -> None:
        super().__post_init__()
        for mode in self.pooling:
            if mode not in POOLING_MODES:
                raise UsageError(
                    f"unknown pooling '{mode}'{did_you_mean(mode, POOLING_MODES)} "
                    f"(known: {', '.join(POOLING_MODES)})"
                )

    @property
    def auto_class(self) -> str | None:  # type: ignore[override]
        """Suffix of the class that loads the model, or `None` if there is no transformer."""
        return "Model" if self.static_embedding is None else None

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> SentenceConfig:
        """Reads the settings from a directory that contains a bi-encoder."""
        values = cls.shared_values(directory) | _read_modules(directory, directory.modules)
        if not values["pooling"] and values["static_embedding"] is None:
            raise CheckpointError(
                f"modules.json of '{directory.source}' has no Pooling module, which a bi-encoder "
                "requires"
            )
        if directory.query_modules is not None:
            values["query_route"] = _read_query_route(directory, values)
            values["default_route"] = directory.default_route
        return cls(**values)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the files in the format of sentence-transformers 5, which version 6 also reads."""
        first = "Transformer" if self.static_embedding is None else "StaticEmbedding"
        classes = [first] + ["Pooling"] * (self.static_embedding is None)
        number = len(classes)
        classes += ["Dense"] * len(self.dense) + ["Normalize"] * self.normalize
        contents: dict[str, Any] = {SETTINGS: self.written_settings()}
        route = self.query_route
        prefix = "" if route is None else "document_"
        folders = [prefix + module_folder(n, name) if n else "" for n, name in enumerate(classes)]
        if self.static_embedding is None:
            contents["sentence_bert_config.json"] = {
                "max_seq_length": self.max_seq_length,
                "do_lower_case": self.do_lower_case,
            }
            contents[f"{folders[1]}/config.json"] = self._pooling_settings(model)
        else:
            self.static_embedding.write(folder)
        _write_modules(folder, folders[number:], self.dense)
        if route is None:
            contents["modules.json"] = modules_json([f"models.{name}" for name in classes])
        else:
            document = dict(zip(folders, (f"models.{name}" for name in classes), strict=True))
            query = dict(list(document.items())[:2])
            if route.encoder is not None:
                route.encoder.save_pretrained(folder / QUERY_TRANSFORMER)
                modules = read_json(folder / QUERY_TRANSFORMER / "modules.json")
                query = {
                    f"{QUERY_TRANSFORMER}/{entry['path']}".rstrip("/"): entry["type"].removeprefix(
                        "sentence_transformers."
                    )
                    for entry in modules
                }
            elif route.static_embedding is not None:
                query = {"query_0_StaticEmbedding": "models.StaticEmbedding"}
                route.static_embedding.write(folder / "query_0_StaticEmbedding")
            names = ["Dense"] * len(route.dense) + ["Normalize"] * route.normalize
            added = {f"query_{n}_{name}": f"models.{name}" for n, name in enumerate(names, 2)}
            _write_modules(folder, list(added), route.dense)
            contents["modules.json"] = modules_json(["models.Router"])
            routes = {"query": query | added, "document": document}
            contents["router_config.json"] = router_json(routes, self.default_route)
        write_json(folder, contents)

    def _pooling_settings(self, model: Any) -> dict[str, Any]:
        pooling: dict[str, Any] = {
            "word_embedding_dimension": model.text_config.hidden_size,
            **{key: mode in self.pooling for mode, key in POOLING_MODES.items()},
            "include_prompt": self.include_prompt,
        }
        if list(self.pooling) != [mode for mode in POOLING_MODES if mode in self.pooling]:
            # A key of sentence-transformers 6. The older keys do not store the order of the modes.
            pooling["pooling_mode"] = [
                "mean_sqrt_len_tokens" if mode == "mean_sqrt_len" else mode for mode in self.pooling
            ]
        return pooling

    @property
    def features(self) -> int | None:
        """Size of the vectors, or `None` if no dense layer changes the size of pooled states."""
        return self.dense[-1].kernel.shape[1] if self.dense else None

    @property
    def module_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of static embeddings, dense layers and classifier, by module and name."""
        weights = _dense_weights(self.dense)
        if self.static_embedding is not None:
            weights["static_embedding"] = self.static_embedding.weights
        if (route := self.query_route) is not None:
            weights |= {
                f"query_{name}": value for name, value in _dense_weights(route.dense).items()
            }
            if route.static_embedding is not None:
                weights["query_static_embedding"] = route.static_embedding.weights
            if (encoder := route.encoder) is not None:
                weights |= {
                    f"query_{name}": value for name, value in encoder.config.module_weights.items()
                }
                params = trees.flatten(encoder.model.params)
                weights["query_transformer"] = {
                    trees.join(path): np.asarray(leaf) for path, leaf in params.items()
                }
        if self.classifier is not None:
            weights["classifier"] = self.classifier.weights
        return weights

    def replace_weights(self, weights: ModuleWeights) -> SentenceConfig:
        """Returns these settings with new weights for the static embeddings and dense layers."""
        route, static_embedding = self.query_route, self.static_embedding
        if static_embedding is not None:
            static_embedding = replace(static_embedding, **weights["static_embedding"])
        if route is not None:
            query_weights = route_weights(weights, "query")
            query_embedding, encoder = route.static_embedding, route.encoder
            if query_embedding is not None:
                query_embedding = replace(query_embedding, **query_weights["static_embedding"])
            if encoder is not None:
                model: Any = copy.copy(encoder.model)
                model.params = _transformer_params(query_weights)
                config = encoder.config.replace_weights(query_weights)
                encoder = SentenceEncoder(model, encoder.tokenizer, config)
            route = replace(
                route,
                static_embedding=query_embedding,
                dense=replace_dense(route.dense, query_weights),
                encoder=encoder,
            )
        return replace(
            self,
            dense=replace_dense(self.dense, weights),
            static_embedding=static_embedding,
            query_route=route,
        )

    def route(self, task: str | None) -> tuple[str, QueryRoute | None]:
        """Returns the route of a task.

        Returns:
            "query" or "document". The second value contains the modules for queries if the route is
            "query" and they differ from those for documents, otherwise `None`.
        """
        name = self.default_route if task is None else task
        return (name, self.query_route) if name == "query" else (name, None)

    def tokenizer_for(
        self, task: str | None, tokenizer: PreTrainedTokenizerBase
    ) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of a task. See :meth:`RetrievalConfig.tokenizer_for`."""
        _, route = self.route(task)
        return tokenizer if route is None or route.encoder is None else route.encoder.tokenizer

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes texts, as :meth:`RetrievalConfig.tokenize` describes."""
        _, route = self.route(task)
        if route is not None and route.encoder is not None:
            encoder = route.encoder
            limit = min(limit, encoder.limit)
            return encoder.config.tokenize(encoder.tokenizer, texts, limit=limit, prompt=prompt)
        static_embedding = self.static_embedding if route is None else route.static_embedding
        if static_embedding is not None:
            check_texts(texts)
            return static_embedding.tokenize(texts, prompt)
        tokens = tokenize(tokenizer, texts, limit, prompt, self.do_lower_case)
        if prompt and not self.include_prompt:
            hidden = prompt_length(tokenizer, prompt)
            tokens.scored = [
                [position >= hidden for position in range(len(ids))] for ids in tokens.ids
            ]
        return tokens

    def __call__(
        self, hidden: jax.Array, mask: jax.Array, weights: ModuleWeights | None = None
    ) -> jax.Array:
        """Converts hidden states to one vector per text.

        Args:
            hidden: The last hidden states, `(batch, tokens, features)`.
            mask: Mask of the pooled tokens, as in :func:`pool`.
            weights: Weights to use instead of those in the settings.
        """
        vectors = apply_dense(self.dense, pool(hidden, mask, self.pooling), weights)
        return l2_normalize(vectors) if self.normalize else vectors

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> jax.Array:
        """Computes the vectors of a batch, as :meth:`RetrievalConfig.embed` describes."""
        model_inputs, mask = split_inputs(inputs)
        _, route = self.route(task)
        modules: SentenceConfig | QueryRoute = self if route is None else route
        if route is not None and weights:
            weights = route_weights(weights, "query")
        if route is not None and (encoder := route.encoder) is not None:
            params = _transformer_params(weights) if weights else encoder.model.params

            def run_encoder(**inputs: Any) -> Any:
                return run(model=encoder.model, params=params, **inputs)

            return encoder.config.embed(run_encoder, inputs, weights)
        if modules.static_embedding is not None:
            table = weights["static_embedding"] if weights else None
            vectors = modules.static_embedding(inputs["input_ids"], mask, table)
        else:
            vectors = pool(run(**model_inputs).last_hidden_state, mask, self.pooling)
        vectors = apply_dense(modules.dense, vectors, weights)
        return l2_normalize(vectors) if modules.normalize else vectors


def route_weights(weights: ModuleWeights, route: str) -> ModuleWeights:
    """Selects the modules whose names start with a route, such as "query_dense_0".

    The route is removed from their names.
    """
    prefix = f"{route}_"
    return {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def _transformer_params(weights: ModuleWeights) -> dict[str, Any]:
    """Returns the parameters of a transformer whose weights are those of a module."""
    flat = weights["transformer"].items()
    return trees.unflatten({tuple(name.split("/")): leaf for name, leaf in flat})


def _dense_weights(layers: Sequence[Dense]) -> dict[str, dict[str, np.ndarray]]:
    return {f"dense_{number}": dense.weights for number, dense in enumerate(layers)}


def _read_modules(directory: SentenceDirectory, modules: Sequence[Module]) -> dict[str, Any]:
    """Reads the settings from a list of modules that are applied one after the other.

    Raises:
        CheckpointError: A module is not supported.
    """
    values: dict[str, Any] = {"pooling": (), "dense": (), "static_embedding": None}
    supported = ("Transformer", "StaticEmbedding", "Pooling", "Dense", "Normalize", "Dropout")
    first, *later_modules = modules
    if first.class_name == "StaticEmbedding":
        values["static_embedding"] = StaticEmbedding.read(directory, first)
    elif first.class_name not in TRANSFORMERS:
        raise directory.unsupported(first, supported)
    for module in later_modules:
        if module.class_name == "Pooling" and values["static_embedding"] is None:
            values["pooling"] = _pooling_modes(module)
            values["include_prompt"] = module.settings.get("include_prompt", True)
        elif module.class_name == "Dense":
            values["dense"] += (Dense.read(directory, module, FEATURES),)
        elif module.class_name == "Normalize":
            values["normalize"] = True
        elif module.class_name != "Dropout":
            raise directory.unsupported(module, supported)
    return values


def _read_query_route(directory: SentenceDirectory, document: Mapping[str, Any]) -> QueryRoute:
    """Reads the modules for queries.

    Args:
        directory: The directory.
        document: The settings for documents, which `_read_modules` has returned.

    Raises:
        CheckpointError: Queries have the transformer of documents with another pooling.
    """
    assert directory.query_modules is not None
    first = directory.query_modules[0]
    if first.class_name in TRANSFORMERS and first.folder != directory.modules[0].folder:
        return QueryRoute(encoder=SentenceEncoder.load(directory.for_queries()))
    values = _read_modules(directory, directory.query_modules)
    folders = [modules[0].folder for modules in (directory.modules, directory.query_modules)]
    names = ("pooling", "include_prompt")
    is_static = values["static_embedding"] is not None
    if not is_static and (
        len(set(folders)) > 1 or any(values.get(name) != document.get(name) for name in names)
    ):
        raise CheckpointError(
            f"the router of '{directory.source}' has another pooling of the same transformer for "
            "queries than for documents. For queries, hfseq only supports another transformer, a "
            "StaticEmbedding, or other Dense and Normalize modules"
        )
    return QueryRoute(values["static_embedding"], values["dense"], values.get("normalize", False))


def _write_modules(folder: Path, names: Sequence[str], layers: Sequence[Dense]) -> None:
    """Writes dense layers into folders, and creates the folders of modules without weights.

    Args:
        folder: The directory of the model.
        names: Names of the folders. The first ones are those of the dense layers.
        layers: The dense layers.
    """
    for number, name in enumerate(names):
        if number < len(layers):
            layers[number].write(folder / name, FEATURES)
        else:
            (folder / name).mkdir(exist_ok=True)


def _pooling_modes(module: Module) -> tuple[str, ...]:
    """Returns the pooling modes of a module, for the file formats of all versions."""
    modes = module.settings.get("pooling_mode")
    if modes is None:
        modes = [mode for mode, key in POOLING_MODES.items() if module.settings.get(key)] or "mean"
    listed = [modes] if isinstance(modes, str) else modes
    return tuple(mode.removesuffix("_tokens") for mode in listed)


def apply_dense(
    layers: Sequence[Dense], vectors: jax.Array, weights: ModuleWeights | None
) -> jax.Array:
    """Applies dense layers to vectors.

    Args:
        layers: The layers.
        vectors: The vectors, `(..., features)`.
        weights: Weights to use instead of those in the layers, as in ``module_weights``.
    """
    for number, dense in enumerate(layers):
        vectors = dense(vectors, weights[f"dense_{number}"] if weights else None)
    return vectors


def replace_dense(layers: Sequence[Dense], weights: ModuleWeights) -> tuple[Dense, ...]:
    """Returns dense layers with new weights."""
    return tuple(
        replace(dense, **weights[f"dense_{number}"]) for number, dense in enumerate(layers)
    )


class SentenceEncoder(TextEncoder):
    """A bi-encoder: a model, its tokenizer and a :class:`SentenceConfig`.

    Example:
        >>> model = hfseq.SentenceEncoder.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")
        >>> queries = model.encode_query(["How old is the law?"])
        >>> documents = model.encode_document(["It was made in 1814.", "Fish live in rivers."])
        >>> model.similarity(queries, documents)
    """

    config_class = SentenceConfig
    config: SentenceConfig

    def encode(
        self,
        sentences: str | Sequence[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        output_value: str = "sentence_embedding",
        precision: str = "float32",
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        task: str | None = None,
        params: Any = None,
    ) -> Any:
        """Computes the vectors of texts, as sentence-transformers does.

        Texts are sorted by length and padded to one of a few lengths, since the model is compiled
        once per length. Texts that are too long for the model are truncated with a warning.

        Args:
            sentences: A text, a sequence of texts, or a sequence of pairs of texts.
            prompt_name: Name of a stored prompt to prepend to each text.
            prompt: A prompt to prepend to each text.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            output_value: "sentence_embedding", or "token_embeddings" for the hidden states of the
                tokens.
            precision: "float32", "int8", "uint8", "binary" or "ubinary".
                :func:`hfseq.modeling.sentence.similarity.quantize` describes these formats.
            normalize_embeddings: Whether to scale the vectors to length 1.
            truncate_dim: Number of leading features to keep. The truncated vectors are scaled to
                length 1 only if ``normalize_embeddings`` is set.
            task: "query", "document" or `None`. It only has an effect if the model encodes queries
                and documents differently.
            params: Parameters to use instead of those of the model.

        Returns:
            The vectors, `(features,)` for a single text and `(texts, features)` for a sequence.
            With "token_embeddings", the result is an array `(tokens, features)` per text.

        Raises:
            UsageError: An argument is not valid.
        """
        _, route = self.config.route(task)
        prompt = self.config.find_prompt(prompt, prompt_name)
        if route is not None and route.encoder is not None:
            return route.encoder.encode(
                sentences,
                prompt=prompt,
                batch_size=batch_size,
                show_progress_bar=show_progress_bar,
                output_value=output_value,
                precision=precision,
                normalize_embeddings=normalize_embeddings,
                truncate_dim=self.config.truncate_dim if truncate_dim is None else truncate_dim,
            )
        texts, is_single = self.as_list(sentences)
        tokens = self.tokenize(texts, prompt, task)
        if output_value == "token_embeddings":
            if (self.config if route is None else route).static_embedding is not None:
                raise UsageError(
                    "output_value 'token_embeddings' requires a transformer, but this model has a "
                    "StaticEmbedding"
                )
            states = self.token_states(tokens, batch_size, show_progress_bar, params)
            return states[0] if is_single else states
        if output_value != "sentence_embedding":
            raise UsageError(
                f"unknown output_value {output_value!r} (known: sentence_embedding, "
                "token_embeddings)"
            )
        vectors = self.vectors(tokens, batch_size, show_progress_bar, task, params)
        vectors = self.truncate(vectors, truncate_dim)
        if normalize_embeddings:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        if precision != "float32":
            vectors = quantize(vectors, precision)
        return vectors[0] if is_single else vectors

    @classmethod
    def load(cls, directory: SentenceDirectory) -> SentenceEncoder:
        """Loads the bi-encoder that the files of a directory describe."""
        return cls._load(directory, {}, {})

    @classmethod
    def default_config(cls, config: Any) -> SentenceConfig:
        """Returns the settings of a model without sentence-transformers files.

        Decoders are pooled by their last token, and other models by the mean of all tokens.
        """
        architectures = config.architectures or [""]
        is_decoder = architectures[0].endswith("ForCausalLM")
        return SentenceConfig(("lasttoken",) if is_decoder else ("mean",))

    @classmethod
    def convert_config(cls, directory: SentenceDirectory) -> SentenceConfig:
        """Returns settings with which a model of a different type can be used as a bi-encoder."""
        return SentenceConfig(**_transformer_values(directory))


def _transformer_values(directory: SentenceDirectory) -> Mapping[str, Any]:
    values = RetrievalConfig.shared_values(directory)
    return {name: values[name] for name in ("max_seq_length", "do_lower_case")}

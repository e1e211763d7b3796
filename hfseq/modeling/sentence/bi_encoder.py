"""Bi-encoders: one vector per text."""

from __future__ import annotations

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
    write_json,
)
from hfseq.modeling.sentence.encoder import TextEncoder
from hfseq.modeling.sentence.modules import Dense
from hfseq.modeling.sentence.pooling import POOLING_MODES, l2_normalize, pool
from hfseq.modeling.sentence.similarity import quantize
from hfseq.modeling.sentence.texts import TokenizedTexts, prompt_length, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The name of the vectors of texts in sentence-transformers.
FEATURES = "sentence_embedding"


@dataclass(frozen=True)
class SentenceConfig(RetrievalConfig):
    """Describes how sentences are preprocessed and how hidden states are converted to vectors.

    The attributes of :class:`RetrievalConfig` can be set by keyword.

    Attributes:
        pooling: Pooling modes. The results of several modes are concatenated.
        include_prompt: Whether the tokens of the prompt are pooled.
        dense: Dense layers after the pooling.
        normalize: Whether to scale the vectors to length 1.
        classifier: The classifier of pairs that the softmax loss trains. It is not saved.
    """

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
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

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> SentenceConfig:
        """Returns the settings in a directory that contains a bi-encoder."""
        if directory.query_modules is not None:
            raise CheckpointError(
                f"'{directory.source}' is a bi-encoder with the unsupported module Router"
            )
        values: dict[str, Any] = {"pooling": (), "dense": (), **cls.shared_values(directory)}
        supported = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
        if directory.modules[0].class_name not in TRANSFORMERS:
            raise directory.unsupported(directory.modules[0], supported)
        for module in directory.modules[1:]:
            if module.class_name == "Pooling":
                values["pooling"] = _pooling_modes(module)
                values["include_prompt"] = module.settings.get("include_prompt", True)
            elif module.class_name == "Dense":
                values["dense"] += (Dense.read(directory, module, FEATURES),)
            elif module.class_name == "Normalize":
                values["normalize"] = True
            elif module.class_name != "Dropout":
                raise directory.unsupported(module, supported)
        if not values["pooling"]:
            raise CheckpointError(f"modules.json of '{directory.source}' has no Pooling module")
        return cls(**values)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the files in the format of sentence-transformers 5, which version 6 reads too."""
        classes = ["Transformer", "Pooling", *["Dense"] * len(self.dense)]
        classes += ["Normalize"] * self.normalize
        pooling: dict[str, Any] = {
            "word_embedding_dimension": model.text_config.hidden_size,
            **{key: mode in self.pooling for mode, key in POOLING_MODES.items()},
            "include_prompt": self.include_prompt,
        }
        if list(self.pooling) != [mode for mode in POOLING_MODES if mode in self.pooling]:
            # Only the format of sentence-transformers 6 can store the order of the modes.
            pooling["pooling_mode"] = [
                "mean_sqrt_len_tokens" if mode == "mean_sqrt_len" else mode for mode in self.pooling
            ]
        contents = {
            "modules.json": modules_json([f"models.{name}" for name in classes]),
            "sentence_bert_config.json": {
                "max_seq_length": self.max_seq_length,
                "do_lower_case": self.do_lower_case,
            },
            SETTINGS: self.written_settings(),
            "1_Pooling/config.json": pooling,
        }
        write_json(folder, contents)
        for number, dense in enumerate(self.dense, 2):
            dense.write(folder / module_folder(number, "Dense"), FEATURES)
        if self.normalize:
            (folder / module_folder(len(classes) - 1, "Normalize")).mkdir(exist_ok=True)

    @property
    def features(self) -> int | None:
        """Size of the vectors, or `None` if it is that of the pooled hidden states."""
        return self.dense[-1].kernel.shape[1] if self.dense else None

    @property
    def module_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of the dense layers, and of the classifier."""
        weights = {f"dense_{number}": dense.weights for number, dense in enumerate(self.dense)}
        return weights | (
            {} if self.classifier is None else {"classifier": self.classifier.weights}
        )

    def replace_weights(self, weights: ModuleWeights) -> SentenceConfig:
        """Returns these settings with other weights of the dense layers."""
        return replace(self, dense=replace_dense(self.dense, weights))

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes texts. See :meth:`RetrievalConfig.tokenize`."""
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
        """Converts hidden states `(batch, tokens, features)` to one vector per sentence.

        Args:
            hidden: The last hidden states.
            mask: Mask of the pooled tokens, as in :func:`pool`.
            weights: Weights of the dense layers, instead of their own.
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
        """Computes the vectors of a batch. See :meth:`RetrievalConfig.embed`."""
        model_inputs, mask = split_inputs(inputs)
        return self(run(**model_inputs).last_hidden_state, mask, weights)


def _pooling_modes(module: Module) -> tuple[str, ...]:
    """Returns the pooling modes of a module, in the format of version 6 or older."""
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
        vectors: `(..., features)`.
        weights: The weights of the layers as ``module_weights`` returns them, or `None` for the
            own weights of the layers.
    """
    for number, dense in enumerate(layers):
        vectors = dense(vectors, weights[f"dense_{number}"] if weights else None)
    return vectors


def replace_dense(layers: Sequence[Dense], weights: ModuleWeights) -> tuple[Dense, ...]:
    """Returns dense layers with other weights."""
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

        Texts are sorted by length and padded to one of a few lengths. The model is compiled once
        per length. Texts that are longer than the model accepts are truncated with a warning.

        Args:
            sentences: One text or several, or pairs of texts.
            prompt_name: Name of a stored prompt to prepend to each text.
            prompt: A prompt to prepend to each text.
            batch_size: Maximum number of texts per batch.
            show_progress_bar: Whether to show a progress bar.
            output_value: "sentence_embedding", or "token_embeddings" for the hidden states of the
                tokens.
            precision: "float32", "int8", "uint8", "binary" or "ubinary", see
                :func:`hfseq.modeling.sentence.similarity.quantize`.
            normalize_embeddings: Whether to scale the vectors to length 1.
            truncate_dim: Number of leading features to keep. The truncated vectors are scaled to
                length 1 only if ``normalize_embeddings`` is set.
            task: "query", "document" or `None`. It has no effect on bi-encoders.
            params: Parameters to use instead of the model's own.

        Returns:
            Vectors, `(features,)` for a text and `(texts, features)` for a sequence. For
            "token_embeddings", an array `(tokens, features)` per text.

        Raises:
            UsageError: An argument is not valid.
        """
        texts, is_single = self.as_list(sentences)
        tokens = self.tokenize(texts, self.config.find_prompt(prompt, prompt_name), task)
        if output_value == "token_embeddings":
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
    def default_config(cls, config: Any) -> SentenceConfig:
        """Returns the settings of a model without sentence-transformers' files.

        Decoders use the last token, other models the mean.
        """
        architectures = config.architectures or [""]
        is_decoder = architectures[0].endswith("ForCausalLM")
        return SentenceConfig(("lasttoken",) if is_decoder else ("mean",))

    @classmethod
    def convert_config(cls, directory: SentenceDirectory) -> SentenceConfig:
        """Returns settings for the model of another kind in a directory."""
        return SentenceConfig(**_transformer_values(directory))


def _transformer_values(directory: SentenceDirectory) -> Mapping[str, Any]:
    values = RetrievalConfig.shared_values(directory)
    return {name: values[name] for name in ("max_seq_length", "do_lower_case")}

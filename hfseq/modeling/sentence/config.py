"""Settings that all types of retrieval models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling.sentence.directory import OWN_SETTINGS, SentenceDirectory, version_entries
from hfseq.modeling.sentence.texts import TokenizedTexts, tokenize
from hfseq.nn.sharding import SENTENCE_MODULES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling.base import FlaxModel

#: A function that runs the model on keyword arguments such as ``input_ids`` and returns its output.
#: The keywords ``model`` and ``params`` select another model.
Run = Callable[..., Any]
#: The arrays of a batch by name. All except "scoring_mask" are inputs of the model. "scoring_mask"
#: is the mask of the tokens that are pooled or scored. Its default is the attention mask.
Inputs = Mapping[str, Any]
#: Weights of the modules after the encoder, by module and name. They may be traced arrays.
ModuleWeights = Mapping[str, Mapping[str, Any]]
#: The key of a parameter tree that contains the weights of these modules.
MODULES_KEY = SENTENCE_MODULES


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """Base class of the settings of a retrieval model.

    The subclass for each model type describes how texts are preprocessed and how the outputs of the
    model are converted to vectors or scores. It also reads and writes the files of
    sentence-transformers that contain this description.

    Attributes:
        max_seq_length: Maximum number of tokens per text.
        do_lower_case: Whether to convert texts to lower case.
        prompts: Prompts by name.
        default_prompt_name: Name of the default prompt.
        similarity_fn_name: Name of the similarity function, such as "cosine" or "dot". `None`
            stands for the default of the model type.
        truncate_dim: Number of leading features of each vector that are returned by default.
        other_settings: Other entries of `config_sentence_transformers.json`. hfseq does not use
            them, but writes them when the model is saved.
    """

    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    other_settings: Mapping[str, Any] = field(default_factory=dict)

    #: The name of the model type in ``config_sentence_transformers.json``.
    model_type: ClassVar[str]
    #: Suffix of the class that loads the model.
    auto_class: ClassVar[str | None] = "Model"
    default_similarity: ClassVar[str] = "cosine"
    similarities: ClassVar[tuple[str, ...]] = ("cosine", "dot", "euclidean", "manhattan")

    def __post_init__(self) -> None:
        name = self.similarity_fn_name
        if name is not None and name not in self.similarities:
            raise UsageError(
                f"a {self.model_type} does not support the similarity function {name!r} "
                f"(supported: {', '.join(self.similarities)})"
            )

    # -- files

    @classmethod
    def shared_values(cls, directory: SentenceDirectory) -> dict[str, Any]:
        """Reads the attributes of this class, which all model types share, from a directory."""
        settings, transformer = directory.settings, directory.transformer
        prompts = settings.get("prompts") or {}
        similarity = settings.get("similarity_fn_name")
        return {
            "max_seq_length": transformer.get("max_seq_length"),
            "do_lower_case": bool(transformer.get("do_lower_case")),
            "prompts": {name: text or "" for name, text in prompts.items()},
            "default_prompt_name": settings.get("default_prompt_name"),
            "similarity_fn_name": similarity,
            "truncate_dim": settings.get("truncate_dim"),
            "other_settings": {
                key: value for key, value in settings.items() if key not in OWN_SETTINGS
            },
        }

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> RetrievalConfig:
        """Reads the settings from a directory that contains a model of this type.

        Raises:
            CheckpointError: A module is not supported, or a file is missing or not valid.
        """
        raise NotImplementedError

    @classmethod
    def read(cls, source: str, download: Mapping[str, Any]) -> Any:
        """Reads the files of a model of this type.

        Args:
            source: A directory or repository.
            download: Options of downloads.

        Returns:
            The settings, or `None` if there are no sentence-transformers files.

        Raises:
            CheckpointError: The model has a different type, a module is not supported, or a file is
                missing or not valid.
        """
        directory = SentenceDirectory.read(source, download)
        if not directory.modules:
            return None
        if directory.model_type != cls.model_type:
            raise CheckpointError(
                f"'{source}' contains a {directory.model_type}, not a {cls.model_type}"
            )
        return cls.from_directory(directory)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the files that describe this model into its directory.

        Args:
            folder: The directory of the model.
            model: The model.
        """
        raise NotImplementedError

    def written_settings(self, sentence_transformers: str = "5.0.0") -> dict[str, Any]:
        """Returns the content of ``config_sentence_transformers.json``.

        Args:
            sentence_transformers: The lowest version of sentence-transformers that can read the
                files.
        """
        truncate_dim = {} if self.truncate_dim is None else {"truncate_dim": self.truncate_dim}
        return {
            **self.other_settings,
            "__version__": version_entries(sentence_transformers),
            "model_type": self.model_type,
            "prompts": self.all_prompts,
            "default_prompt_name": self.default_prompt_name,
            "similarity_fn_name": self.similarity_fn_name or self.default_similarity,
            **truncate_dim,
        }

    # -- prompts and tokens

    @property
    def all_prompts(self) -> dict[str, str]:
        """The prompts by name. "query" and "document" are always included, by default as ""."""
        return {"query": "", "document": "", **self.prompts}

    def find_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Returns the prompt that precedes each text.

        Args:
            prompt: The text of the prompt. If it is not `None`, the name is ignored.
            prompt_name: The name of a stored prompt. Default: ``default_prompt_name``.

        Raises:
            UsageError: No stored prompt has this name.
        """
        if prompt is not None:
            return prompt
        name = self.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self.all_prompts:
            raise UsageError(f"unknown prompt_name '{name}' (known: {', '.join(self.all_prompts)})")
        return self.all_prompts[name]

    def token_limit(self, model: FlaxModel, tokenizer: PreTrainedTokenizerBase) -> int:
        """Returns the maximum number of tokens per text."""
        limits = self.max_seq_length, model.max_length(), tokenizer.model_max_length
        return min(limit for limit in (*limits, 1 << 20) if limit)

    def tokenizer_for(
        self, task: str | None, tokenizer: PreTrainedTokenizerBase
    ) -> PreTrainedTokenizerBase:
        """Returns the tokenizer of the model that a task uses.

        Args:
            task: "query", "document" or `None`.
            tokenizer: The tokenizer of the main model.
        """
        return tokenizer

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes texts.

        Args:
            tokenizer: The tokenizer of the model.
            texts: Texts, or pairs of texts.
            limit: Maximum number of tokens per text.
            prompt: Prompt that precedes each text, or the first text of each pair.
            task: "query" or "document", if the texts are queries or documents, otherwise `None`.

        Raises:
            UsageError: A value is not a text, or a text has no tokens.
        """
        return tokenize(tokenizer, texts, limit, prompt, self.do_lower_case)

    # -- weights and computation

    @property
    def module_weights(self) -> dict[str, dict[str, np.ndarray]]:
        """The weights of the modules after the encoder, by module and name."""
        return {}

    @property
    def module_buffers(self) -> dict[str, dict[str, np.ndarray]]:
        """Arrays of these modules that training updates without a gradient, by module and name."""
        return {}

    def replace_weights(self, weights: ModuleWeights) -> RetrievalConfig:
        """Returns a copy of these settings with new weights for the modules."""
        return self

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> Any:
        """Computes the vectors or scores of a batch. jax can trace this method.

        Args:
            run: Function that runs the model and returns its output.
            inputs: The arrays of the batch, as in :data:`Inputs`.
            weights: Weights of the modules to use instead of those in the settings.
            task: "query" or "document", if the texts are queries or documents, otherwise `None`.

        Returns:
            The float32 result, which depends on the model type:

            - Bi-encoder: vectors, `(batch, features)`.
            - Sparse encoder: weights, `(batch, vocab_size)`.
            - Multi-vector encoder: token vectors, `(batch, tokens, features)`, and the mask of the
              scored tokens, `(batch, tokens)`.
            - Cross-encoder: logits, `(batch, labels)`.
        """
        raise NotImplementedError


def split_inputs(inputs: Inputs) -> tuple[dict[str, Any], jax.Array]:
    """Separates the inputs of the model from the mask of the tokens that are pooled or scored."""
    model_inputs = {name: value for name, value in inputs.items() if name != "scoring_mask"}
    return model_inputs, inputs.get("scoring_mask", inputs["attention_mask"])

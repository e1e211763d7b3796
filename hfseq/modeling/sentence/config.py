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

#: Runs the model on keyword arguments such as ``input_ids`` and returns its output. The keywords
#: ``model`` and ``params`` run another model instead.
Run = Callable[..., Any]
#: Model inputs by name. "scoring_mask" is not an input of the model. It masks the tokens that are
#: pooled or scored, and defaults to the attention mask.
Inputs = Mapping[str, Any]
#: Weights of the modules after the encoder, by module and name. They may be traced.
ModuleWeights = Mapping[str, Mapping[str, Any]]
#: The entry of a parameter tree with the weights of these modules.
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
    #: Suffix of the model class.
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
        """Returns the values of the shared attributes in the files of a directory."""
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
        """Returns the settings in a directory that contains this model type.

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
            The settings, or `None` without the files of sentence-transformers.

        Raises:
            CheckpointError: The model has a different type, a module is not supported, or a file is
                missing or not valid.
        """
        directory = SentenceDirectory.read(source, download)
        if not directory.modules:
            return None
        if directory.model_type != cls.model_type:
            raise CheckpointError(f"'{source}' is a {directory.model_type}, not a {cls.model_type}")
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
            sentence_transformers: The lowest version that can read the files.
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
        """The prompts, including the names "query" and "document", which always exist."""
        return {"query": "", "document": "", **self.prompts}

    def find_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Returns the prompt that precedes each text.

        Args:
            prompt: The prompt itself, which has priority.
            prompt_name: The name of a prompt. The default is ``default_prompt_name``.

        Raises:
            UsageError: The name is unknown.
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
            prompt: Precedes each text, or the first text of each pair.
            task: "query", "document" or `None`.

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
        """Returns these settings with new weights for the modules."""
        return self

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> Any:
        """Computes the vectors or scores of a batch. This method can be traced.

        Args:
            run: Runs the model and returns its output.
            inputs: The inputs of a batch, see :data:`Inputs`.
            weights: Weights of the modules, instead of those in the settings.
            task: "query", "document" or `None`.

        Returns:
            For a bi-encoder, float32 vectors `(batch, features)`. For a sparse encoder, float32
            weights `(batch, vocab_size)`. For a multi-vector encoder, a pair of float32 token
            vectors `(batch, tokens, features)` and the mask of the scored tokens `(batch, tokens)`.
            For a cross-encoder, float32 logits `(batch, labels)`.
        """
        raise NotImplementedError


def split_inputs(inputs: Inputs) -> tuple[dict[str, Any], jax.Array]:
    """Returns the inputs of the model, and the mask of the tokens that are pooled or scored."""
    model_inputs = {name: value for name, value in inputs.items() if name != "scoring_mask"}
    return model_inputs, inputs.get("scoring_mask", inputs["attention_mask"])

"""Static embeddings: the vector of a text is the mean of fixed vectors of its tokens.

There is no transformer. sentence-transformers calls this module StaticEmbedding. Directories of
Model2Vec have the same files, but other tensor names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.checkpoints import files
from hfseq.errors import CheckpointError, write_atomically
from hfseq.modeling.sentence.directory import Module, SentenceDirectory
from hfseq.modeling.sentence.texts import TokenizedTexts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hfseq.modeling.sentence.config import RetrievalConfig

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class StaticEmbedding:
    """A matrix with a vector for each token, and a tokenizer.

    Attributes:
        embedding: The vectors, `(vocab_size, features)`.
        tokenizer: The tokenizer.
    """

    embedding: np.ndarray
    tokenizer: Tokenizer

    @classmethod
    def read(cls, directory: SentenceDirectory, module: Module) -> StaticEmbedding:
        """Reads the vectors and the tokenizer from a directory.

        Raises:
            CheckpointError: A file is missing or not valid.
        """
        from tokenizers import Tokenizer

        tokenizer_path = directory.fetch(f"{module.folder}/{TOKENIZER_FILE}".lstrip("/"))
        if tokenizer_path is None:
            raise CheckpointError(
                f"'{directory.source}': the folder of the module StaticEmbedding has no "
                f"{TOKENIZER_FILE}"
            )
        path, tensors = directory.tensors(module.folder)
        embedding = tensors.get("embedding.weight")
        if embedding is None:
            embedding = _model2vec_table(path, tensors)
        try:
            tokenizer = Tokenizer.from_file(tokenizer_path)
        except Exception as error:  # the Rust library raises plain Exception
            raise CheckpointError(f"{tokenizer_path} is not valid: {error}") from error
        tokenizer.no_padding()
        if tokenizer.get_vocab_size() > len(embedding):
            raise CheckpointError(
                f"{path} has vectors for {len(embedding)} tokens, but {tokenizer_path} has "
                f"{tokenizer.get_vocab_size()} tokens"
            )
        return cls(np.asarray(embedding, np.float32), tokenizer)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name."""
        return {"embedding": self.embedding}

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> TokenizedTexts:
        """Tokenizes texts without special tokens. An empty text has no tokens.

        Args:
            texts: The texts.
            prompt: Prompt that precedes each text.
        """
        encodings = self.tokenizer.encode_batch(
            [prompt + text for text in texts], add_special_tokens=False
        )
        return TokenizedTexts([encoding.ids for encoding in encodings])

    def __call__(
        self, input_ids: jax.Array, mask: jax.Array, weights: Any | None = None
    ) -> jax.Array:
        """Returns the mean of the token vectors of each text, `(batch, features)`.

        The vector of an empty text is 0.

        Args:
            input_ids: Token IDs, `(batch, tokens)`.
            mask: Mask of the tokens that are not padding, `(batch, tokens)`.
            weights: Weights to use instead of those in the attributes.
        """
        table = jnp.asarray(self.embedding if weights is None else weights["embedding"])
        present = (mask != 0).astype(jnp.float32)
        total = jnp.einsum("btf,bt->bf", table[input_ids].astype(jnp.float32), present)
        return total / jnp.maximum(present.sum(1, keepdims=True), 1)

    def write(self, folder: Path) -> None:
        """Writes the vectors and the tokenizer into ``folder``."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        embedding = np.ascontiguousarray(self.embedding)
        save_file({"embedding.weight": embedding}, folder / files.SAFETENSORS, {"format": "pt"})
        write_atomically(folder / TOKENIZER_FILE, self.tokenizer.to_str(pretty=True))


def _model2vec_table(path: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Computes the vectors of all tokens from the tensors of Model2Vec.

    With the tensor ``mapping``, several tokens share a vector. With the tensor ``weights``, the
    vector of each token is multiplied by a factor.
    """
    if "embeddings" not in tensors:
        raise CheckpointError(
            f"{path} has no tensor 'embedding.weight' or 'embeddings' with the vectors of a "
            f"StaticEmbedding"
        )
    table = np.asarray(tensors["embeddings"])
    if "mapping" in tensors:
        table = table[np.asarray(tensors["mapping"], np.int64)]
    if "weights" in tensors:
        table = table.astype(np.float32) * np.asarray(tensors["weights"], np.float32)[:, None]
    return table


class StaticModel:
    """Replaces the transformer in a model that consists of a static embedding.

    Args:
        sentence_config: The settings, which contain the static embedding.
    """

    def __init__(self, sentence_config: RetrievalConfig):
        self.sentence_config = sentence_config
        #: Empty, because the settings contain the weights of the modules.
        self.params: dict[str, Any] = {}

    def max_length(self) -> None:
        """Returns `None`, because the length of texts is not limited."""

    def accepts(self, name: str) -> bool:
        """Returns whether the model has an input with this name.

        Its only inputs are the token IDs and the attention mask.
        """
        return False

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the files of the model."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.sentence_config.write(Path(folder), self)

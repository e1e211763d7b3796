"""BGE-M3 (Chen et al., 2024): dense, sparse and multi-vector embeddings from one encoder.

The encoder is an XLM-RoBERTa. One linear layer computes a weight for each token, and another one a
vector for each token. The repository of the model stores these layers as `sparse_linear.pt` and
`colbert_linear.pt`. The names of methods, arguments and results are those of `BGEM3FlagModel` in
the package FlagEmbedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.checkpoints.config import fetcher, pop_download_options
from hfseq.checkpoints.torch_files import open_torch_file
from hfseq.errors import CheckpointError, UsageError
from hfseq.modeling.sentence import Dense, RetrievalConfig, RetrievalModel, l2_normalize
from hfseq.modeling.sentence.config import Inputs, ModuleWeights, Run
from hfseq.modeling.sentence.texts import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling.pretrained import FlaxPreTrainedModel

SPARSE_FILE, COLBERT_FILE = "sparse_linear.pt", "colbert_linear.pt"
#: Attributes of the tokenizer with the IDs of tokens that have no sparse weight.
SPECIAL_TOKENS = ("cls_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def read_projection(path: str | None, name: str, source: str, hidden: int) -> Dense:
    """Reads a linear layer that `torch.save` wrote, without PyTorch.

    Args:
        path: The file, or `None` if the model has no such file.
        name: Name of the file, for errors.
        source: Directory or repository of the model, for errors.
        hidden: Number of features of the hidden states.

    Raises:
        CheckpointError: The file does not exist, or is not a linear layer of the right size.
    """
    if path is None:
        raise CheckpointError(
            f"'{source}' has no {name}, so it is not a BGE-M3: load it with FlaxAutoModel to "
            "compute dense embeddings only"
        )
    tensors = open_torch_file(path)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    kernel = shapes.get("weight", ())
    if shapes.keys() != {"weight", "bias"} or len(kernel) != 2 or kernel[1] != hidden:
        raise CheckpointError(
            f"{path} contains tensors with the shapes {shapes}, but a linear layer with {hidden} "
            f"input features has a weight (features, {hidden}) and a bias (features,)"
        )
    weight, bias = (np.asarray(tensors[key].read(...), np.float32) for key in ("weight", "bias"))
    return Dense(np.ascontiguousarray(weight.T), bias, "Identity")


@dataclass(frozen=True, kw_only=True)
class BGEM3Config(RetrievalConfig):
    """Describes how hidden states are converted to dense, sparse and multi-vector embeddings.

    Attributes:
        sparse: Layer with one output feature, which computes the weight of each token.
        colbert: Layer that computes the vector of each token.
    """

    sparse: Dense
    colbert: Dense

    model_type: ClassVar[str] = "BGE-M3"

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes the embeddings of a batch.

        The arguments are those of :meth:`RetrievalConfig.embed`.

        Returns:
            The dense vectors, `(batch, hidden)`, the weights of all tokens, `(batch, tokens)`, and
            the vectors of all tokens except the first, `(batch, tokens - 1, features)`.
        """
        hidden = run(**inputs).last_hidden_state.astype(jnp.float32)
        token_weights = jax.nn.relu(self.sparse(hidden))[..., 0]
        token_vectors = l2_normalize(self.colbert(hidden[:, 1:]))
        return l2_normalize(hidden[:, 0]), token_weights, token_vectors


class BGEM3Encoder(RetrievalModel):
    """Computes dense, sparse and multi-vector embeddings with BGE-M3.

    Args:
        model: The XLM-RoBERTa encoder.
        tokenizer: The tokenizer of the encoder.
        sparse: Layer with one output feature, which computes the weight of each token.
        colbert: Layer that computes the vector of each token.

    Example:
        >>> encoder = BGEM3Encoder.from_pretrained("BAAI/bge-m3")
        >>> output = encoder.encode(["What is BGE M3?"], return_sparse=True)
        >>> output["dense_vecs"].shape
        (1, 1024)
    """

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sparse: Dense,
        colbert: Dense,
    ):
        super().__init__(model, tokenizer, BGEM3Config(sparse=sparse, colbert=colbert))

    @classmethod
    def from_pretrained(cls, source: Any, **kwargs: Any) -> BGEM3Encoder:  # type: ignore[override]
        """Loads the encoder, its tokenizer and the two linear layers.

        Args:
            source: Directory or Hub name.
            **kwargs: Options of `FlaxAutoModel.from_pretrained`, such as `revision` and `dtype`.

        Raises:
            CheckpointError: The file of a linear layer is missing or invalid.
        """
        from transformers import AutoTokenizer

        from hfseq.modeling.auto import FlaxAutoModel

        source, download = str(source), pop_download_options(dict(kwargs))
        fetch = fetcher(source, download)
        model = FlaxAutoModel.from_pretrained(source, **kwargs)
        sparse, colbert = (
            read_projection(fetch(name), name, source, model.config.hidden_size)
            for name in (SPARSE_FILE, COLBERT_FILE)
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **download)
        return cls(model, tokenizer, sparse, colbert)

    def save_pretrained(self, folder: Any) -> None:
        """Raises a UsageError, because the files of the linear layers require PyTorch."""
        raise UsageError(
            f"{COLBERT_FILE} and {SPARSE_FILE} are PyTorch files, which hfseq does not write: save "
            "the encoder with .model.save_pretrained, and copy both files"
        )

    def encode(
        self,
        sentences: str | Sequence[str],
        batch_size: int = 32,
        max_length: int | None = None,
        return_dense: bool = True,
        return_sparse: bool = False,
        return_colbert_vecs: bool = False,
    ) -> dict[str, Any]:
        """Computes the requested embeddings.

        Args:
            sentences: A text or several texts.
            batch_size: Number of texts per forward pass.
            max_length: Maximum number of tokens. Longer texts are truncated. Default: the maximum
                length of the model.
            return_dense: Whether to return `dense_vecs`.
            return_sparse: Whether to return `lexical_weights`.
            return_colbert_vecs: Whether to return `colbert_vecs`.

        Returns:
            A dictionary with these entries. Entries that are not requested are `None`.

            - `dense_vecs`: Unit vectors, float32 `(texts, hidden)`.
            - `lexical_weights`: For each text, a dictionary from token IDs (as strings) to weights.
            - `colbert_vecs`: For each text, the unit vectors of all tokens except the first,
              `(tokens - 1, features)`.

            For a single text, each entry contains the value of this text.
        """
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        limit = self.limit if max_length is None else min(max_length, self.limit)
        if limit < 2:
            raise UsageError(f"max_length={max_length} is too short: use at least 2 tokens")
        tokens = tokenize(self.tokenizer, texts, limit)
        rows = tokens.ids
        dense = np.zeros((len(rows), self.model.config.hidden_size), np.float32)
        lexical: list[dict[str, float]] = [{} for _ in rows]
        colbert: list[Any] = [None for _ in rows]
        results = self.batches(
            tokens, batch_size, False, lambda inputs: self._embed(self.model.params, inputs, None)
        )
        for numbers, (vectors, weights, token_vectors) in results:
            dense[numbers] = np.asarray(vectors)[: len(numbers)]
            for index, number in enumerate(numbers):
                length = len(rows[number])
                if return_sparse:
                    token_weights = np.asarray(weights[index])[:length]
                    lexical[number] = self._lexical(rows[number], token_weights)
                if return_colbert_vecs:
                    colbert[number] = np.asarray(token_vectors[index])[: length - 1]
        output = {
            "dense_vecs": dense if return_dense else None,
            "lexical_weights": lexical if return_sparse else None,
            "colbert_vecs": colbert if return_colbert_vecs else None,
        }
        if isinstance(sentences, str):
            return {name: None if value is None else value[0] for name, value in output.items()}
        return output

    def _lexical(self, row: Sequence[int], weights: np.ndarray) -> dict[str, float]:
        """Returns the weights of the distinct tokens of a text, without special tokens.

        If a token occurs more than once, its largest weight counts.
        """
        special = {getattr(self.tokenizer, name, None) for name in SPECIAL_TOKENS}
        result: dict[str, float] = {}
        for token, weight in zip(row, weights.tolist(), strict=True):
            if token not in special and weight > result.get(str(token), 0.0):
                result[str(token)] = weight
        return result

    def convert_id_to_token(
        self, lexical_weights: Mapping[str, float] | Sequence[Mapping[str, float]]
    ) -> Any:
        """Replaces the token IDs in lexical weights by the texts of the tokens."""
        if not isinstance(lexical_weights, Mapping):
            return [self.convert_id_to_token(weights) for weights in lexical_weights]
        return {
            self.tokenizer.decode([int(token)]): weight for token, weight in lexical_weights.items()
        }

    @staticmethod
    def compute_lexical_matching_score(
        weights_1: Mapping[str, float], weights_2: Mapping[str, float]
    ) -> float:
        """Returns the sum of the products of weights over the tokens that both texts contain."""
        return float(
            sum(
                weights_1[token] * weights_2[token] for token in weights_1.keys() & weights_2.keys()
            )
        )

    @staticmethod
    def colbert_score(query: np.ndarray, passage: np.ndarray) -> float:
        """Returns the MaxSim score of a query and a passage, as a mean over query tokens.

        The score of a query token is its largest dot product with a token of the passage.

        Args:
            query: Vectors of the query's tokens, `(tokens, features)`.
            passage: Vectors of the passage's tokens, `(tokens, features)`.
        """
        return float((query @ passage.T).max(axis=1).mean())

    def compute_score(
        self,
        sentence_pairs: tuple[str, str] | Sequence[tuple[str, str]],
        batch_size: int = 32,
        max_length: int | None = None,
        weights_for_different_modes: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Computes similarity scores of pairs of a query and a passage.

        Args:
            sentence_pairs: A pair or several pairs of texts.
            batch_size: Number of texts per forward pass.
            max_length: Maximum number of tokens per text.
            weights_for_different_modes: Weights of the dense, sparse and multi-vector scores in
                weighted means. Default: 1 for each.

        Returns:
            Scores by name: `dense`, `sparse`, `colbert`, and the weighted means `sparse+dense` and
            `colbert+sparse+dense`. Each value is a list with one score per pair. For a single pair,
            it is a number.
        """
        single = len(sentence_pairs) == 2 and isinstance(sentence_pairs[0], str)
        pairs: list[Any] = [sentence_pairs] if single else list(sentence_pairs)
        for number, pair in enumerate(pairs, 1):
            if isinstance(pair, str) or len(pair) != 2:
                raise UsageError(f"pair {number} must be two texts, not {pair!r:.60}")
        weights = (
            np.ones(3)
            if weights_for_different_modes is None
            else np.asarray(weights_for_different_modes, float)
        )
        if weights.shape != (3,) or not weights[:2].sum():
            raise UsageError(
                f"weights_for_different_modes={weights_for_different_modes} must be three numbers, "
                "for the dense, sparse and multi-vector scores. The sum of the first two must not "
                "be 0"
            )
        queries, passages = (
            self.encode([pair[side] for pair in pairs], batch_size, max_length, True, True, True)
            for side in (0, 1)
        )
        dense = (queries["dense_vecs"] * passages["dense_vecs"]).sum(axis=1)
        sparse, colbert = (
            np.array([score(a, b) for a, b in zip(queries[name], passages[name], strict=True)])
            for name, score in (
                ("lexical_weights", self.compute_lexical_matching_score),
                ("colbert_vecs", self.colbert_score),
            )
        )
        both = dense * weights[0] + sparse * weights[1]
        scores = {
            "colbert": colbert,
            "sparse": sparse,
            "dense": dense,
            "sparse+dense": both / weights[:2].sum(),
            "colbert+sparse+dense": (both + colbert * weights[2]) / weights.sum(),
        }
        lists = {name: np.asarray(values, float).tolist() for name, values in scores.items()}
        return {name: values[0] for name, values in lists.items()} if single else lists

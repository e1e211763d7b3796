"""Vectors of sentences: what sentence-transformers' files say of a model, and how it is done.

A directory of sentence-transformers is an encoder without a head, and small files beside it that
name what follows: pooling over tokens, dense layers, normalising. Both spellings are read; the
older one is written, which all versions and other programs know.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.checkpoints.config import fetcher
from hfseq.errors import CheckpointError, UsageError, did_you_mean, first_line, write_atomically
from hfseq.generation.request import text_width
from hfseq.nn.cpu import rows_per_chunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling.base import FlaxModel

logger = logging.getLogger(__name__)

#: Ways to make one vector of those of all tokens, by the keys of 1_Pooling/config.json; several
#: are put beside each other, in this order.
POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Tanh": jnp.tanh,
    "Identity": lambda x: x,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
}


def pool(hidden: jax.Array, mask: jax.Array, modes: Sequence[str]) -> jax.Array:
    """Return (batch, modes x features) of hidden states (batch, tokens, features).

    Rows have their padding, which ``mask`` (batch, tokens) hides, at the end.
    """
    hidden = hidden.astype(jnp.float32)
    weights = mask.astype(jnp.float32)[..., None]
    made = []
    for mode in modes:
        if mode == "cls":
            made.append(hidden[:, 0])
        elif mode == "max":
            made.append(jnp.where(weights > 0, hidden, -jnp.inf).max(axis=1))
        elif mode == "lasttoken":
            last = hidden.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
            made.append(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
        else:
            own = weights
            if mode == "weightedmean":  # later tokens count more
                own = weights * jnp.arange(1, hidden.shape[1] + 1)[:, None]
            count = jnp.maximum(own.sum(axis=1), 1e-9)
            divisor = jnp.sqrt(count) if mode == "mean_sqrt_len" else count
            made.append((hidden * own).sum(axis=1) / divisor)
    return jnp.concatenate(made, axis=-1)


def l2_normalize(vectors: jax.Array) -> jax.Array:
    """Return vectors of length 1; one of zeros stays one."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling: kernel (in, out), bias (out,) or None, and PyTorch's name."""

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str


@dataclass(frozen=True)
class SentenceConfig:
    """What becomes of the hidden states of a sentence, and of the sentence before."""

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None

    def __post_init__(self) -> None:
        for mode in self.pooling:
            if mode not in POOLING_MODES:
                raise UsageError(
                    f"pooling '{mode}'{did_you_mean(mode, POOLING_MODES)}: choose among {', '.join(POOLING_MODES)}"
                )

    @classmethod
    def read(cls, source: str, download: Mapping[str, Any]) -> SentenceConfig | None:
        """Read the files beside a model; None where it has no modules.json.

        **Raises:** CheckpointError for a module that is not known, and for files that lack
        something.
        """
        fetch = fetcher(source, download)

        def load(name: str) -> dict[str, Any]:
            path = fetch(name)
            if path is None:
                return {}
            try:
                return json.loads(Path(path).read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{path} is not valid JSON: {error}") from error

        modules: Any = load("modules.json")
        if not modules:
            return None
        values: dict[str, Any] = {"pooling": (), "dense": ()}
        for module in modules[1:]:
            kind, folder = str(module["type"]).rsplit(".", 1)[-1], module["path"]
            settings = load(f"{folder}/config.json")
            if kind == "Pooling":
                named = settings.get("pooling_mode")
                if named is not None:
                    named = (named,) if isinstance(named, str) else tuple(named)
                else:
                    named = tuple(mode for mode, key in POOLING_MODES.items() if settings.get(key))
                values["pooling"] = named or ("mean",)
                values["include_prompt"] = settings.get("include_prompt", True)
            elif kind == "Dense":
                values["dense"] = (*values["dense"], _read_dense(source, folder, settings, fetch))
            elif kind == "Normalize":
                values["normalize"] = True
            elif kind != "Dropout":
                raise CheckpointError(
                    f"modules.json of '{source}' has a {kind}, which hfseq does not know; it knows "
                    "Pooling, Dense, Normalize and Dropout"
                )
        if not values["pooling"]:
            raise CheckpointError(f"modules.json of '{source}' has no Pooling")
        first, more = load("sentence_bert_config.json"), load("config_sentence_transformers.json")
        return cls(
            **values,
            max_seq_length=first.get("max_seq_length"),
            do_lower_case=bool(first.get("do_lower_case")),
            prompts=more.get("prompts") or {},
            default_prompt_name=more.get("default_prompt_name"),
        )

    def write(self, folder: Path, features: int) -> None:
        """Write the files beside a model whose hidden states have so many ``features``."""
        from importlib.metadata import version

        kinds = ["Transformer", "Pooling", *["Dense"] * len(self.dense)]
        kinds += ["Normalize"] * self.normalize
        modules = [
            {
                "idx": n,
                "name": str(n),
                "path": f"{n}_{kind}" if n else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for n, kind in enumerate(kinds)
        ]
        written: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {
                "max_seq_length": self.max_seq_length,
                "do_lower_case": self.do_lower_case,
            },
            "config_sentence_transformers.json": {
                "__version__": {
                    "sentence_transformers": "5.0.0",
                    "pytorch": "",
                    "transformers": version("transformers"),
                },
                "prompts": {"query": "", "document": "", **self.prompts},
                "default_prompt_name": self.default_prompt_name,
                "model_type": "SentenceTransformer",
                "similarity_fn_name": "cosine",
            },
            "1_Pooling/config.json": {
                "word_embedding_dimension": features,
                **{key: mode in self.pooling for mode, key in POOLING_MODES.items()},
                "include_prompt": self.include_prompt,
            },
        }
        for number, dense in enumerate(self.dense, 2):
            file = "linear" if dense.activation == "Identity" else "activation"
            written[f"{number}_Dense/config.json"] = {
                "in_features": dense.kernel.shape[0],
                "out_features": dense.kernel.shape[1],
                "bias": dense.bias is not None,
                "activation_function": f"torch.nn.modules.{file}.{dense.activation}",
            }
        if self.normalize:
            (folder / f"{len(kinds) - 1}_Normalize").mkdir(parents=True, exist_ok=True)
        for name, value in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, json.dumps(value, indent=2) + "\n")
        for number, dense in enumerate(self.dense, 2):
            from safetensors.numpy import save_file

            tensors = {"linear.weight": np.ascontiguousarray(dense.kernel.T)}
            tensors |= {} if dense.bias is None else {"linear.bias": dense.bias}
            save_file(tensors, folder / f"{number}_Dense" / "model.safetensors", {"format": "pt"})

    def __call__(self, hidden: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the vectors (batch, features) of hidden states (batch, tokens, features)."""
        vectors = pool(hidden, mask, [mode for mode in POOLING_MODES if mode in self.pooling])
        for dense in self.dense:
            vectors = vectors @ dense.kernel.astype(np.float32)
            vectors = vectors if dense.bias is None else vectors + dense.bias
            vectors = ACTIVATIONS[dense.activation](vectors)
        return l2_normalize(vectors) if self.normalize else vectors


def _read_dense(
    source: str, folder: str, settings: Mapping[str, Any], fetch: Callable[[str], str | None]
) -> Dense:
    activation = str(settings.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    path = fetch(f"{folder}/model.safetensors")
    if path is None or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"'{source}': {folder} has no model.safetensors"
            if path is None
            else f"'{source}': {folder} has the activation {activation}; hfseq knows "
            f"{', '.join(ACTIVATIONS)}"
        )
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        return Dense(tensors["linear.weight"].T, tensors.get("linear.bias"), activation)
    except Exception as error:  # safetensors' own class has no public name
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error


class SentenceEncoder:
    """A model, its tokenizer, and what follows it: sentences in, vectors out."""

    def __init__(
        self, model: FlaxModel, tokenizer: PreTrainedTokenizerBase, sentences: SentenceConfig
    ):
        self.model, self.tokenizer, self.sentences = model, tokenizer, sentences
        limits = sentences.max_seq_length, model.max_length(), tokenizer.model_max_length
        self.limit = min(one for one in (*limits, 1 << 20) if one)

        def vectors(params: Any, inputs: Mapping[str, Any], counted: jax.Array) -> jax.Array:
            output = self.model(**inputs, params=params)
            if "last_hidden_state" not in output:
                raise UsageError(
                    f"{type(model).__name__} has a head: load it by FlaxAutoModel, without, to "
                    "encode sentences"
                )
            return self.sentences(output.last_hidden_state, counted)

        self._vectors = jax.jit(vectors)

    def __call__(
        self,
        sentences: Sequence[str],
        prompt: str = "",
        batch_size: int = 32,
        normalize: bool = False,
        truncate_dim: int | None = None,
        show_progress_bar: bool = False,
        params: Any = None,
    ) -> np.ndarray:
        """Return float32 (sentences, features); see :meth:`FlaxPreTrainedModel.encode`."""
        from tqdm import tqdm

        texts = [prompt + one.strip() for one in sentences]
        if self.sentences.do_lower_case:
            texts = [text.lower() for text in texts]
        # Not truncated by the tokenizer, so that what is cut can be told.
        encoded = self.tokenizer(texts, verbose=False) if texts else {"input_ids": []}
        rows = encoded["input_ids"]
        long = [number for number, row in enumerate(rows) if len(row) > self.limit]
        if long:
            logger.warning(
                "%d of %d sentences are longer than %d tokens and were cut, the first of them: %s",
                len(long),
                len(texts),
                self.limit,
                f"{texts[long[0]]:.60}",
            )
            cut = self.tokenizer(
                [texts[number] for number in long], truncation=True, max_length=self.limit
            )
            for number, row in zip(long, cut["input_ids"], strict=True):
                rows[number] = row
        if empty := [number for number, row in enumerate(rows) if not row]:
            raise UsageError(f"sentence {empty[0] + 1} has no tokens: leave it out")
        hidden_prompt = 0
        if prompt and not self.sentences.include_prompt:
            hidden_prompt = len(self.tokenizer(prompt)["input_ids"]) - 1
        params = self.model.params if params is None else params
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        made: list[tuple[list[int], jax.Array]] = []
        with tqdm(total=len(rows), disable=not show_progress_bar, unit=" sentences") as bar:
            while order:
                width = text_width(len(rows[order[0]]), self.limit)
                most = rows_per_chunk(width, batch_size)
                numbers, order = order[:most], order[most:]
                batch = [rows[number] for number in numbers]
                made.append((numbers, self._batch(batch, hidden_prompt, width, most, params)))
                bar.update(len(numbers))
        features = int(made[0][1].shape[1]) if made else 0
        vectors = np.zeros((len(rows), features), np.float32)
        for numbers, part in made:  # the device computes while the host prepares
            vectors[numbers] = np.asarray(part)[: len(numbers)]
        if truncate_dim is not None:
            vectors = vectors[:, :truncate_dim]
        if normalize or (truncate_dim is not None and self.sentences.normalize):
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def _batch(
        self, rows: Sequence[Sequence[int]], prompt: int, width: int, most: int, params: Any
    ) -> jax.Array:
        """Compute a batch, padded to ``width`` and to one of few numbers of rows."""
        count = min(most, 4 ** math.ceil(math.log(len(rows), 4)))
        inputs = {"input_ids": np.full((count, width), self.tokenizer.pad_token_id or 0, np.int32)}
        mask = inputs["attention_mask"] = np.zeros((count, width), np.int32)
        for number, row in enumerate([*rows, *[rows[-1]] * (count - len(rows))]):
            inputs["input_ids"][number, : len(row)], mask[number, : len(row)] = row, 1
        counted = mask.copy()
        counted[:, :prompt] = 0
        return self._vectors(params, inputs, counted)

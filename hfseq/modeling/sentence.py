"""Sentence embeddings: the files of sentence-transformers and the computation that they describe.

A sentence-transformers model consists of an encoder without a head and further modules: pooling
over tokens, dense layers, and normalization. Small files in its directory describe these modules.
There are two formats of these files. hfseq reads both, and writes the older one, because all
versions of sentence-transformers and other programs support it.
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

from hfseq.checkpoints import files
from hfseq.checkpoints.config import fetcher
from hfseq.errors import CheckpointError, UsageError, did_you_mean, write_atomically
from hfseq.generation.request import text_width
from hfseq.nn.cpu import rows_per_chunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling.base import FlaxModel

logger = logging.getLogger(__name__)

#: Pooling modes and their keys in 1_Pooling/config.json. If a model has several modes, their
#: results are concatenated in this order.
POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
#: Keys of `config_sentence_transformers.json` that hfseq writes itself.
OWN_SETTINGS = ("__version__", "prompts", "default_prompt_name", "similarity_fn_name")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "Tanh": jnp.tanh,
    "Identity": lambda x: x,
    "ReLU": jax.nn.relu,
    "Sigmoid": jax.nn.sigmoid,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
}


def pool(hidden: jax.Array, mask: jax.Array, modes: Sequence[str]) -> jax.Array:
    """Pools hidden states over the tokens of each sentence.

    Args:
        hidden: Hidden states, `(batch, tokens, features)`.
        mask: Mask of the tokens, `(batch, tokens)`. Padding must be on the right.
        modes: Keys of ``POOLING_MODES``. Their results are concatenated.

    Returns:
        Float32 vectors, `(batch, number of modes * features)`.
    """
    hidden = hidden.astype(jnp.float32)
    weights = mask.astype(jnp.float32)[..., None]
    pooled = []
    for mode in modes:
        if mode == "cls":
            pooled.append(hidden[:, 0])
        elif mode == "max":
            pooled.append(jnp.where(weights > 0, hidden, -jnp.inf).max(axis=1))
        elif mode == "lasttoken":
            last = hidden.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
            pooled.append(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
        else:
            mode_weights = weights
            if mode == "weightedmean":  # later tokens have larger weights
                mode_weights = weights * jnp.arange(1, hidden.shape[1] + 1)[:, None]
            count = jnp.maximum(mode_weights.sum(axis=1), 1e-9)
            divisor = jnp.sqrt(count) if mode == "mean_sqrt_len" else count
            pooled.append((hidden * mode_weights).sum(axis=1) / divisor)
    return jnp.concatenate(pooled, axis=-1)


def l2_normalize(vectors: jax.Array) -> jax.Array:
    """Scales vectors to length 1. Zero vectors stay zero."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


@dataclass(frozen=True)
class Dense:
    """A dense layer after the pooling.

    Attributes:
        kernel: Kernel, `(in_features, out_features)`.
        bias: Bias, `(out_features,)`, or `None`.
        activation: Class name of the activation in PyTorch.
        use_residual: Whether the input is added to the output.
        residual: A matrix `(in_features, out_features)` that projects the input before it is added,
            if input and output have different sizes.
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str
    use_residual: bool = False
    residual: np.ndarray | None = None

    def __call__(self, vectors: jax.Array) -> jax.Array:
        """Applies the layer to vectors `(batch, in_features)`."""
        outputs = vectors @ self.kernel.astype(np.float32)
        outputs = outputs if self.bias is None else outputs + self.bias
        outputs = ACTIVATIONS[self.activation](outputs)
        if not self.use_residual:
            return outputs
        return outputs + (vectors if self.residual is None else vectors @ self.residual)


@dataclass(frozen=True)
class SentenceConfig:
    """Describes how sentences are preprocessed and how hidden states are converted to vectors.

    Attributes:
        pooling: Pooling modes. The results of several modes are concatenated.
        include_prompt: Whether the tokens of the prompt are pooled.
        dense: Dense layers after the pooling.
        normalize: Whether to scale the vectors to length 1.
        max_seq_length: Maximum number of tokens per sentence.
        do_lower_case: Whether to convert sentences to lower case.
        prompts: Prompts by name.
        default_prompt_name: Name of the default prompt.
        similarity_fn_name: Name of the similarity function, such as "cosine" or "dot".
        other_settings: Other entries of `config_sentence_transformers.json`. hfseq does not use
            them, but writes them when the model is saved.
    """

    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = "cosine"
    other_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mode in self.pooling:
            if mode not in POOLING_MODES:
                raise UsageError(
                    f"unknown pooling '{mode}'{did_you_mean(mode, POOLING_MODES)} "
                    f"(known: {', '.join(POOLING_MODES)})"
                )

    @classmethod
    def read(cls, source: str, download: Mapping[str, Any]) -> SentenceConfig | None:
        """Reads the files of a model, or returns `None` if it has no modules.json.

        Args:
            source: A directory or repository.
            download: Options of downloads.

        Raises:
            CheckpointError: A module is not supported, or a file is missing or invalid.
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
            module_class, folder = str(module["type"]).rsplit(".", 1)[-1], module["path"]
            settings = load(f"{folder}/config.json")
            if module_class == "Pooling":
                pooling_modes = settings.get("pooling_mode")
                if pooling_modes is not None:
                    listed = [pooling_modes] if isinstance(pooling_modes, str) else pooling_modes
                    pooling_modes = tuple(mode.removesuffix("_tokens") for mode in listed)
                else:
                    pooling_modes = tuple(
                        mode for mode, key in POOLING_MODES.items() if settings.get(key)
                    )
                values["pooling"] = pooling_modes or ("mean",)
                values["include_prompt"] = settings.get("include_prompt", True)
            elif module_class == "Dense":
                values["dense"] = (*values["dense"], _read_dense(source, folder, settings, fetch))
            elif module_class == "Normalize":
                values["normalize"] = True
            elif module_class != "Dropout":
                raise CheckpointError(
                    f"modules.json of '{source}' has the unsupported module {module_class} "
                    "(supported: Pooling, Dense, Normalize, Dropout)"
                )
        if not values["pooling"]:
            raise CheckpointError(f"modules.json of '{source}' has no Pooling module")
        transformer_settings = load("sentence_bert_config.json")
        prompt_settings = load("config_sentence_transformers.json")
        return cls(
            **values,
            max_seq_length=transformer_settings.get("max_seq_length"),
            do_lower_case=bool(transformer_settings.get("do_lower_case")),
            prompts=prompt_settings.get("prompts") or {},
            default_prompt_name=prompt_settings.get("default_prompt_name"),
            similarity_fn_name=prompt_settings.get("similarity_fn_name", "cosine"),
            other_settings={
                key: value for key, value in prompt_settings.items() if key not in OWN_SETTINGS
            },
        )

    def write(self, folder: Path, features: int) -> None:
        """Writes the files that describe the modules after the encoder.

        Args:
            folder: The directory of the model.
            features: Number of features of the hidden states.
        """
        from importlib.metadata import version

        module_classes = ["Transformer", "Pooling", *["Dense"] * len(self.dense)]
        module_classes += ["Normalize"] * self.normalize
        modules = [
            {
                "idx": n,
                "name": str(n),
                "path": f"{n}_{module_class}" if n else "",
                "type": f"sentence_transformers.models.{module_class}",
            }
            for n, module_class in enumerate(module_classes)
        ]
        contents: dict[str, Any] = {
            "modules.json": modules,
            "sentence_bert_config.json": {
                "max_seq_length": self.max_seq_length,
                "do_lower_case": self.do_lower_case,
            },
            "config_sentence_transformers.json": {
                **self.other_settings,
                "__version__": {
                    "sentence_transformers": "5.0.0",
                    "pytorch": "",
                    "transformers": version("transformers"),
                },
                "prompts": {"query": "", "document": "", **self.prompts},
                "default_prompt_name": self.default_prompt_name,
                "model_type": "SentenceTransformer",
                "similarity_fn_name": self.similarity_fn_name,
            },
            "1_Pooling/config.json": {
                "word_embedding_dimension": features,
                **{key: mode in self.pooling for mode, key in POOLING_MODES.items()},
                "include_prompt": self.include_prompt,
            },
        }
        if list(self.pooling) != [mode for mode in POOLING_MODES if mode in self.pooling]:
            # Only the format of sentence-transformers 6 can store the order of the modes.
            contents["1_Pooling/config.json"]["pooling_mode"] = [
                "mean_sqrt_len_tokens" if mode == "mean_sqrt_len" else mode for mode in self.pooling
            ]
        for number, dense in enumerate(self.dense, 2):
            torch_module = "linear" if dense.activation == "Identity" else "activation"
            contents[f"{number}_Dense/config.json"] = {
                "in_features": dense.kernel.shape[0],
                "out_features": dense.kernel.shape[1],
                "bias": dense.bias is not None,
                "activation_function": f"torch.nn.modules.{torch_module}.{dense.activation}",
                **({"use_residual": True} if dense.use_residual else {}),
            }
        if self.normalize:
            (folder / f"{len(module_classes) - 1}_Normalize").mkdir(parents=True, exist_ok=True)
        for name, value in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, json.dumps(value, indent=2) + "\n")
        for number, dense in enumerate(self.dense, 2):
            from safetensors.numpy import save_file

            tensors = {"linear.weight": np.ascontiguousarray(dense.kernel.T)}
            tensors |= {} if dense.bias is None else {"linear.bias": dense.bias}
            if dense.residual is not None:
                tensors["residual.weight"] = np.ascontiguousarray(dense.residual.T)
            save_file(tensors, folder / f"{number}_Dense" / "model.safetensors", {"format": "pt"})

    def __call__(self, hidden: jax.Array, mask: jax.Array) -> jax.Array:
        """Converts hidden states `(batch, tokens, features)` to one vector per sentence.

        The arguments have the same meaning as in :func:`pool`.
        """
        vectors = pool(hidden, mask, self.pooling)
        for dense in self.dense:
            vectors = dense(vectors)
        return l2_normalize(vectors) if self.normalize else vectors


def _read_dense(
    source: str, folder: str, settings: Mapping[str, Any], fetch: Callable[[str], str | None]
) -> Dense:
    activation = str(settings.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    names = (files.SAFETENSORS, files.TORCH_BIN)
    path = next(filter(None, (fetch(f"{folder}/{name}") for name in names)), None)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            raise CheckpointError(
                f"'{source}': {folder} has the unsupported {key} {settings[key]!r} (supported: "
                "'sentence_embedding')"
            )
    if path is None or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"'{source}': {folder} has no {' or '.join(names)}"
            if path is None
            else f"'{source}': {folder} has the unsupported activation {activation} "
            f"(supported: {', '.join(ACTIVATIONS)})"
        )
    tensors = {name: tensor.read(...) for name, tensor in files.open_file(path).tensors.items()}
    try:
        kernel, use_residual = tensors["linear.weight"].T, bool(settings.get("use_residual"))
        projects = use_residual and kernel.shape[0] != kernel.shape[1]
        residual = tensors["residual.weight"].T if projects else None
        return Dense(kernel, tensors.get("linear.bias"), activation, use_residual, residual)
    except (LookupError, ValueError) as error:
        raise CheckpointError(f"{path} is not a dense layer: {error!r}") from error


class SentenceEncoder:
    """Computes sentence embeddings with a model, its tokenizer and a :class:`SentenceConfig`."""

    def __init__(
        self, model: FlaxModel, tokenizer: PreTrainedTokenizerBase, config: SentenceConfig
    ):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        limits = config.max_seq_length, model.max_length(), tokenizer.model_max_length
        self.limit = min(limit for limit in (*limits, 1 << 20) if limit)
        self._uses_token_types = model.accepts("token_type_ids")

        def vectors(params: Any, inputs: Mapping[str, Any], pooled_mask: jax.Array) -> jax.Array:
            output = self.model(**inputs, params=params)
            if "last_hidden_state" not in output:
                raise UsageError(
                    f"{type(model).__name__} has a head: load the model with FlaxAutoModel to "
                    "encode sentences"
                )
            return self.config(output.last_hidden_state, pooled_mask)

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
        """Returns float32 vectors, `(sentences, features)`.

        The arguments have the same meaning as in :meth:`FlaxPreTrainedModel.encode`.
        """
        from tqdm import tqdm

        columns = self._columns(sentences, prompt)
        texts = columns[0]
        # The tokenizer does not truncate here, so that the number of long sentences can be logged.
        encoded = self.tokenizer(*columns, verbose=False) if texts else {"input_ids": []}
        rows, types = encoded["input_ids"], encoded.get("token_type_ids")
        if types is None or not self._uses_token_types or not any(map(any, types)):
            types = [()] * len(rows)  # () means that all types are 0
        long = [number for number, row in enumerate(rows) if len(row) > self.limit]
        if long:
            logger.warning(
                "%d of %d sentences are longer than %d tokens and were truncated. The first is: %s",
                len(long),
                len(texts),
                self.limit,
                f"{texts[long[0]]:.60}",
            )
            truncated = self.tokenizer(
                *([column[number] for number in long] for column in columns),
                truncation=True,
                max_length=self.limit,
            )
            for index, number in enumerate(long):
                rows[number] = truncated["input_ids"][index]
                if types[number]:
                    types[number] = truncated["token_type_ids"][index]
        if empty := [number for number, row in enumerate(rows) if not row]:
            raise UsageError(f"sentence {empty[0] + 1} has no tokens: remove it")
        hidden_prompt = 0
        if prompt and not self.config.include_prompt:
            hidden_prompt = len(self.tokenizer(prompt)["input_ids"]) - 1
        params = self.model.params if params is None else params
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        results: list[tuple[list[int], jax.Array]] = []
        with tqdm(total=len(rows), disable=not show_progress_bar, unit=" sentences") as bar:
            while order:
                width = text_width(len(rows[order[0]]), self.limit)
                max_rows = rows_per_chunk(width, batch_size)
                numbers, order = order[:max_rows], order[max_rows:]
                batch = [(rows[number], types[number]) for number in numbers]
                results.append(
                    (numbers, self._batch(batch, hidden_prompt, width, max_rows, params))
                )
                bar.update(len(numbers))
        features = int(results[0][1].shape[1]) if results else 0
        vectors = np.zeros((len(rows), features), np.float32)
        # The results are only fetched here, so that the device computes during tokenization above.
        for numbers, part in results:
            vectors[numbers] = np.asarray(part)[: len(numbers)]
        if truncate_dim is not None:
            vectors = vectors[:, :truncate_dim]
        if normalize or (truncate_dim is not None and self.config.normalize):
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def _columns(self, sentences: Sequence[Any], prompt: str) -> list[list[str]]:
        """Returns the arguments of the tokenizer.

        If the sentences are texts, the result contains one list with all texts. If they are pairs
        of texts, it contains a list of all first texts and a list of all second texts.

        Raises:
            UsageError: The first sentence is a text and another one is not, or the first one is a
                pair of texts and another one is not.
        """
        size = 1 if not sentences or isinstance(sentences[0], str) else 2
        rows = [(s,) if isinstance(s, str) else tuple(s) for s in sentences]
        for number, row in enumerate(rows, 1):
            if len(row) != size or not all(isinstance(text, str) for text in row):
                wanted = "a text" if size == 1 else "a pair of texts, like the first one"
                raise UsageError(
                    f"sentence {number} must be {wanted}, not {sentences[number - 1]!r:.60}"
                )

        def prepared(text: str, start: str) -> str:
            text = start + text.strip()
            return text.lower() if self.config.do_lower_case else text

        starts = prompt, ""
        return [[prepared(row[side], starts[side]) for row in rows] for side in range(size)]

    def _batch(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        prompt_length: int,
        width: int,
        max_rows: int,
        params: Any,
    ) -> jax.Array:
        """Computes the vectors of a batch.

        Args:
            rows: Token IDs and token types of each sentence. An empty sequence of types means that
                all types are 0.
            prompt_length: Number of leading tokens that are not pooled.
            width: Number of tokens to pad each sentence to.
            max_rows: Maximum batch size. The batch is padded to a power of 4 or to this size, so
                that few programs are compiled.
            params: Parameters of the model.
        """
        count = min(max_rows, 4 ** math.ceil(math.log(len(rows), 4)))
        inputs = {"input_ids": np.full((count, width), self.tokenizer.pad_token_id or 0, np.int32)}
        mask = inputs["attention_mask"] = np.zeros((count, width), np.int32)
        if rows[0][1]:
            inputs["token_type_ids"] = np.zeros((count, width), np.int32)
        for number, (row, types) in enumerate([*rows, *[rows[-1]] * (count - len(rows))]):
            inputs["input_ids"][number, : len(row)], mask[number, : len(row)] = row, 1
            if types:
                inputs["token_type_ids"][number, : len(row)] = types
        pooled_mask = mask.copy()
        pooled_mask[:, :prompt_length] = 0
        return self._vectors(params, inputs, pooled_mask)

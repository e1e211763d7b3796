"""Low-rank adapters (LoRA; Hu et al., 2021), and their files in PEFT's format.

An adapted model adds the product of two low-rank matrices to each targeted kernel. The parameters
of the base model and of the adapters are in one tree. :func:`trainable_paths` returns the paths of
the parameters that training changes. The directory of an adapter contains only these parameters.

The configuration selects modules by their names in PyTorch's module tree, as in PEFT.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx

from hfseq.checkpoints import config as configs
from hfseq.checkpoints import files, weights
from hfseq.errors import CheckpointError, UsageError, WeightsError, did_you_mean
from hfseq.nn import trees
from hfseq.nn.experts import ExpertLayer
from hfseq.nn.layers import Conv1D, Embed, Linear, LowRankConfig

logger = logging.getLogger("hfseq.modeling")

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADAPTER_PART = re.compile(r"^lora_(A|B|embedding_A|embedding_B)$")
#: The default `target_modules` of PEFT, by model type.
DEFAULT_TARGET_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5", "longt5"), ("q", "v")),
    **dict.fromkeys(("gpt2",), ("c_attn",)),
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    **dict.fromkeys(("deberta-v2",), ("query_proj", "value_proj")),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "electra", "roberta-prelayernorm"), ("query", "value")
    ),
    **dict.fromkeys(
        ("bart", "mbart", "m2m_100", "marian", "pegasus", "blenderbot", "blenderbot-small", "opt",
         "gptj", "gpt_neo", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3",
         "smollm3", "stablelm", "whisper"), ("q_proj", "v_proj")
    ),
}  # fmt: skip
#: The `task_type` of PEFT for each task head.
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "Model": "FEATURE_EXTRACTION",
}
#: Module names of the task heads that are newly initialized, by `task_type`. PEFT trains and saves
#: all parameters of these heads.
HEAD_MODULES = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
#: Prefixes of model types whose PyTorch classes do not accept `inputs_embeds`.
NO_EMBEDDINGS = (
    "clip",
    "vit",
    "beit",
    "dinov2",
    "resnet",
    "regnet",
    "wav2vec2",
    "whisper",
    "vision",
)
#: Fields of PEFT's configuration that change the result and that hfseq does not support.
_UNSUPPORTED_FIELDS = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "trainable_token_indices",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Configuration of LoRA adapters, with the fields of PEFT's ``LoraConfig``.

    Attributes:
        r: Rank of the adapters.
        lora_alpha: The output of an adapter is multiplied by ``lora_alpha / r``, or by
            ``lora_alpha / sqrt(r)`` with ``use_rslora``.
        lora_dropout: Dropout rate of the inputs of adapters.
        target_modules: The layers to adapt. A list contains the ends of module names, such as
            ``"q_proj"``. A string is a regular expression that matches whole module names, or
            ``"all-linear"``. `None` selects the default of the model type.
        target_parameters: Kernels of experts to adapt, as ends of parameter names such as
            ``"mlp.experts.gate_up_proj"``.
        exclude_modules: Layers that are not adapted, as a list or a regular expression.
        modules_to_save: Modules that are trained and saved completely. If this includes a tied
            embedding matrix or the head that is tied to it, the two become separate parameters, as
            in PEFT.
        ensure_weight_tying: Whether a tied embedding matrix stays tied if ``modules_to_save``
            contains its full name, such as ``"model.embed_tokens"``.
        bias: Which biases are trained: ``"none"``, ``"all"``, or the biases of adapted layers
            (``"lora_only"``).
        use_rslora: Whether to divide ``lora_alpha`` by ``sqrt(r)`` instead of ``r``.
        rank_pattern: Maps patterns to ranks. Layers whose names end with a pattern get this rank
            instead of ``r``.
        alpha_pattern: Maps patterns to values that replace ``lora_alpha`` in the same way.
        layers_to_transform: Numbers of the layers in which modules are adapted. Default: all.
        layers_pattern: Attribute name of the list of layers that these numbers refer to, such as
            ``"layers"``.
        init_lora_weights: ``True``, ``False`` or ``"gaussian"``. Adapters that PEFT initialized as
            ``"eva"`` or ``"orthogonal"`` can be loaded too.
        task_type: PEFT's name of the task.
        base_model_name_or_path: The base model that the adapter belongs to.
        revision: Branch, tag or commit of the base model on the Hub.
        inference_mode: Whether the configuration was read from a file, as in PEFT.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str | None = None
    exclude_modules: Sequence[str] | str | None = None
    modules_to_save: Sequence[str] | None = None
    ensure_weight_tying: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: Sequence[int] | int | None = None
    layers_pattern: Sequence[str] | str | None = None
    init_lora_weights: bool | str = True
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False
    target_parameters: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.target_parameters and self.lora_dropout:
            raise UsageError(
                f"lora_dropout={self.lora_dropout} must be 0 with target_parameters, as in PEFT: "
                "adapters of experts have no dropout"
            )
        if self.r < 1 or any(rank < 1 for rank in self.rank_pattern.values()):
            raise UsageError(
                f"r={self.r}, rank_pattern={dict(self.rank_pattern)}: ranks must be >= 1"
            )
        if self.bias not in ("none", "all", "lora_only"):
            raise UsageError(f"bias='{self.bias}' must be none, all or lora_only")

    @classmethod
    def read(cls, path: str) -> LoraConfig:
        """Reads ``adapter_config.json``.

        Raises:
            CheckpointError: The file cannot be read.
            UsageError: The file contains options that change the result but are not supported by
                hfseq.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        configs.check_mapping(stored, path)
        if stored.get("peft_type") != "LORA":
            raise UsageError(
                f"{path}: unsupported peft_type {stored.get('peft_type')!r} (supported: LORA)"
            )
        unsupported_fields = [name for name in _UNSUPPORTED_FIELDS if stored.get(name)]
        initialization = stored.get("init_lora_weights", True)
        if unsupported_fields or initialization not in (
            True,
            False,
            None,
            "gaussian",
            "eva",
            "orthogonal",
        ):
            unsupported = [
                *unsupported_fields,
                *([] if unsupported_fields else [f"init_lora_weights={initialization!r}"]),
            ]
            raise UsageError(
                f"{path} has {', '.join(unsupported)}, which hfseq does not support: merge the "
                "adapter with PEFT (merge_and_unload) and load the result"
            )
        field_names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in stored.items() if name in field_names}
        try:
            config = cls(**{name: value for name, value in values.items() if value is not None})
            return dataclasses.replace(config, inference_mode=True)
        except TypeError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def to_peft_dict(self, conv1d: bool) -> dict[str, Any]:
        """Returns the content of ``adapter_config.json``.

        Args:
            conv1d: Whether all adapted layers are GPT-2's Conv1D.
        """
        fields = dataclasses.asdict(self)
        fields |= {"peft_type": "LORA", "inference_mode": True, "fan_in_fan_out": conv1d}
        if not self.ensure_weight_tying:  # unknown to older versions of PEFT
            del fields["ensure_weight_tying"]
        if not self.target_parameters:
            del fields["target_parameters"]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(fields.items())
        }

    def adapter_for(self, name: str) -> LowRankConfig:
        """Returns the settings of the adapter of the layer with the module name ``name``."""

        def value_for_layer(pattern: Mapping[str, Any], default: Any) -> Any:
            matching_keys = (key for key in pattern if re.match(rf"(.*\.)?({key})$", name))
            return pattern[key] if (key := next(matching_keys, None)) is not None else default

        rank = int(value_for_layer(self.rank_pattern, self.r))
        alpha = float(value_for_layer(self.alpha_pattern, self.lora_alpha))
        scale = alpha / (rank**0.5 if self.use_rslora else rank)
        return LowRankConfig(rank, scale, self.lora_dropout, self.init_lora_weights == "gaussian")

    def is_target(self, name: str) -> bool:
        """Returns whether the layer with the module name ``name`` has an adapter."""
        if _matches(self.exclude_modules, name) or self.is_fully_saved(name):
            return False
        target_modules = self.target_modules
        if not _matches(target_modules, name):
            return False
        layers = self.layers_to_transform
        if (
            layers is None
            or isinstance(target_modules, str)
            or name in (target_modules or ())
            or layers == []
        ):
            return True
        pattern = self.layers_pattern or r"[^.]*"
        patterns = [pattern] if isinstance(pattern, str) else pattern
        lead = r".*?\." if not self.layers_pattern else r"(?:^|.*?\.)"
        matches = (re.match(rf"{lead}{layers_name}\.(\d+)\.", name) for layers_name in patterns)
        number = next((int(match[1]) for match in matches if match), None)
        return number in ([layers] if isinstance(layers, int) else layers)

    def is_fully_saved(self, name: str) -> bool:
        """Returns whether ``modules_to_save`` includes a module or parameter, or its parent."""
        parts = name.split(".")
        modules = [".".join(parts[: count + 1]) for count in range(len(parts))]
        # As in PEFT, the string "norm" also matches the end of "input_layernorm".
        ends = tuple(self.modules_to_save or ())
        return any(module.endswith(ends) for module in modules)

    def unties(self, aliases: Mapping[str, str]) -> bool:
        """Returns whether the adapter saves its own version of a tied tensor.

        The model must then have separate parameters for the tied tensors.

        Args:
            aliases: Maps the PyTorch name of a tied tensor to the name of the tensor that it is
                tied to.

        Raises:
            UsageError: The adapter is new and ``ensure_weight_tying`` would have no effect.
        """
        saved = [
            (alias, name)
            for alias, name in aliases.items()
            if self.is_fully_saved(alias) or self.is_fully_saved(name)
        ]
        if not saved or not self.ensure_weight_tying:
            return bool(saved)
        table = saved[0][1].removesuffix(".weight")
        if table not in (self.modules_to_save or ()) and not self.inference_mode:
            raise UsageError(
                f"ensure_weight_tying requires that modules_to_save contains '{table}', the name "
                "of the tied embedding matrix, but it contains "
                f"{', '.join(self.modules_to_save or ()) or 'no names'}"
            )
        return table not in (self.modules_to_save or ())


def _matches(patterns: Sequence[str] | str | None, name: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns or ())


def complete_config(config: LoraConfig, class_name: str, model_type: str) -> LoraConfig:
    """Sets the fields that depend on the model.

    These are ``task_type``, the default of ``target_modules``, and the task heads in
    ``modules_to_save``.

    Args:
        config: The user's configuration.
        class_name: Name of the model class.
        model_type: Model type of the configuration.

    Raises:
        UsageError: The model type has no default targets.
    """
    head = re.search(r"(For\w+|Model)$", class_name)
    task = config.task_type
    # PEFT's model class for FEATURE_EXTRACTION passes `inputs_embeds`, which some models do not
    # accept. Without a task PEFT uses its general model class.
    if task is None and not config.inference_mode and not model_type.startswith(NO_EMBEDDINGS):
        task = TASK_TYPES.get(head[1] if head else "")
    targets = config.target_modules
    if targets is None and config.target_parameters:
        targets = ()
    if targets is None:
        if model_type not in DEFAULT_TARGET_MODULES:
            raise UsageError(
                f"there are no default target_modules for '{model_type}': set target_modules "
                "(--lora_target_modules) to names of layers or to all-linear"
            )
        targets = DEFAULT_TARGET_MODULES[model_type]
    saved = tuple(
        dict.fromkeys((*(config.modules_to_save or ()), *HEAD_MODULES.get(task or "", ())))
    )
    return dataclasses.replace(
        config, task_type=task, target_modules=targets, modules_to_save=saved or None
    )


class AdaptedLayer(NamedTuple):
    """A layer with an adapter.

    Attributes:
        lora: The settings of the adapter.
        linear: Whether it is a linear layer rather than an embedding.
        conv1d: Whether it is GPT-2's Conv1D, whose kernel is `(out_features, in_features)`.
        expert_axes: The axes of a kernel of experts, in the letters of `numpy.einsum`: "eoi" or
            "eio". Empty for other layers.
    """

    lora: LowRankConfig
    linear: bool
    conv1d: bool
    expert_axes: str = ""


def add_adapters(
    module: nnx.Module,
    config: LoraConfig,
    names: weights.WeightMap,
    rngs: nnx.Rngs,
    vocab_size: int | None,
) -> tuple[LoraConfig, dict[trees.Path, AdaptedLayer]]:
    """Adds adapters to the layers of ``module`` that ``config`` targets.

    Args:
        module: A module whose layers are not stacked yet.
        config: A complete configuration.
        names: The weight map of the model, which converts paths to tensor names.
        rngs: Random number generators for the initialization of the adapters.
        vocab_size: Size of the vocabulary. "all-linear" does not include output heads, which are
            recognized by this size.

    Returns:
        The configuration, where names of layers replace "all-linear", and the adapted layers by
        path.

    Raises:
        UsageError: No layer matches one of the ``target_modules``.
    """
    layers: dict[str, Linear | Embed] = {}
    paths: dict[str, trees.Path] = {}
    stored_names: dict[str, str] = {}
    for keys, part in nnx.iter_graph(module):
        if isinstance(part, Embed) or (isinstance(part, Linear) and part.adaptable):
            path = tuple(map(str, keys))
            leaf = "kernel" if isinstance(part, Linear) else "embedding"
            stored_name = names.torch_name((*path, leaf)).rpartition(".")[0]
            name = names.module_name(stored_name)
            layers[name], paths[name], stored_names[name] = part, path, stored_name
    config = _with_module_names(config, stored_names)
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        linear_names = tuple(
            name
            for name, part in layers.items()
            if isinstance(part, Linear)
            and vocab_size not in part.kernel.shape
            and not config.is_fully_saved(name)
        )
        config = dataclasses.replace(config, target_modules=linear_names)
    adapted_names = [name for name in layers if config.is_target(name)]
    target_modules = config.target_modules
    ends = [target_modules] if isinstance(target_modules, str) else list(target_modules or ())
    absent = [end for end in ends if not any(_matches((end,), name) for name in layers)]
    adapted_experts = _add_expert_adapters(module, config, names, rngs)
    if (
        not (adapted_names or adapted_experts)
        or absent
        and not isinstance(target_modules, str)
        and not config.inference_mode
    ):
        known_ends = sorted({name.rpartition(".")[2] for name in layers})
        raise UsageError(
            f"target_modules {', '.join(absent or ends)}: no layer of this model matches. The "
            "names of the linear layers and embeddings of this model end with "
            f"{', '.join(known_ends)}"
        )
    adapted_layers = dict(adapted_experts)
    for name in adapted_names:
        layer, lora = layers[name], config.adapter_for(name)
        layer.add_lora(lora, rngs)
        is_linear, is_conv1d = isinstance(layer, Linear), isinstance(layer, Conv1D)
        adapted_layers[paths[name]] = AdaptedLayer(lora, is_linear, is_conv1d)
    return config, adapted_layers


def _add_expert_adapters(
    module: nnx.Module, config: LoraConfig, names: weights.WeightMap, rngs: nnx.Rngs
) -> dict[trees.Path, AdaptedLayer]:
    """Adds adapters to the kernels of experts in ``target_parameters``.

    Returns:
        The adapted kernels by the path of the parameter.

    Raises:
        UsageError: A target parameter does not exist.
    """
    targets = tuple(config.target_parameters or ())
    kernels: dict[str, tuple[trees.Path, ExpertLayer, str]] = {}
    for keys, part in nnx.iter_graph(module):
        if isinstance(part, ExpertLayer):
            for kernel in part.kernel_names:
                path = (*map(str, keys), kernel)
                kernels[names.module_name(names.torch_name(path))] = path, part, kernel
    absent = [end for end in targets if not any(_matches((end,), name) for name in kernels)]
    if absent:
        ends = sorted({name.split(".", 3)[-1] for name in kernels})
        raise UsageError(
            f"target_parameters {', '.join(absent)}: no kernel of experts of this model matches. "
            + (
                f"The names of these kernels end with {', '.join(ends)}"
                if ends
                else "The model has no experts"
            )
        )
    adapted = {}
    for name, (path, part, kernel) in kernels.items():
        if _matches(targets, name):
            lora = config.adapter_for(name)
            part.add_lora(kernel, lora, rngs)
            axes = "eoi" if part.transposed else "eio"
            adapted[path] = AdaptedLayer(lora, True, False, axes)
    return adapted


def _with_module_names(config: LoraConfig, stored_names: Mapping[str, str]) -> LoraConfig:
    """Replaces layer names in PyTorch files by the names in PyTorch's module tree.

    For some classes, the two names of a layer differ. In ``target_modules`` and
    ``exclude_modules``, users may pass either name.

    Args:
        config: The configuration.
        stored_names: Maps the name of each layer in the module tree to its name in files.
    """

    def module_names(targets: Sequence[str] | str | None) -> Sequence[str] | str | None:
        if isinstance(targets, str):
            matching = [n for n, stored in stored_names.items() if _matches(targets, stored)]
            is_stored = matching and not any(_matches(targets, name) for name in stored_names)
            return tuple(matching) if is_stored else targets
        replaced: list[str] = []
        for end in targets or ():
            matching = [n for n, stored in stored_names.items() if _matches((end,), stored)]
            is_known = any(_matches((end,), name) for name in stored_names)
            replaced += [end] if is_known or not matching else matching
        return tuple(replaced) if targets is not None else None

    return dataclasses.replace(
        config,
        target_modules=module_names(config.target_modules),
        exclude_modules=module_names(config.exclude_modules),
    )


def trainable_paths(
    paths: Iterable[trees.Path], config: LoraConfig, names: weights.WeightMap
) -> set[trees.Path]:
    """Returns the paths of the parameters that training changes.

    These are the adapters, and the modules and biases that ``config`` selects with
    ``modules_to_save`` and ``bias``.
    """
    paths = list(paths)
    adapter_paths = {path for path in paths if is_adapter(path)}
    adapted = {path[:-2] if path[-1] == "kernel" else path[:-1] for path in adapter_paths}

    def is_trainable(path: trees.Path) -> bool:
        name = names.module_name(names.torch_name(path))
        if path in adapter_paths or config.is_fully_saved(name):
            return True
        if path[-1] != "bias" or config.bias == "none":
            return False
        return config.bias == "all" or path[:-1] in adapted

    return {path for path in paths if is_trainable(path)}


def is_adapter(path: trees.Path) -> bool:
    """Returns whether a parameter belongs to an adapter."""
    return any(_ADAPTER_PART.match(part) for part in path[-2:])


# -- files


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A saved adapter.

    Attributes:
        config: The configuration of the adapter.
        source: The directory or repository.
        open: A function that opens the tensors of the adapter.
    """

    config: LoraConfig
    source: str
    open: Callable[[], dict[str, weights.Tensor]]

    @property
    def head(self) -> str | None:
        """The task head that the adapter was trained with, such as "ForCausalLM".

        The result is `None` if the configuration does not contain a known ``task_type``.
        """
        return next((h for h, task in TASK_TYPES.items() if task == self.config.task_type), None)

    @property
    def base(self) -> str:
        """The directory or repository of the base model.

        Raises:
            CheckpointError: The configuration does not name the base model, or the directory of the
                base model does not exist.
        """
        base = self.config.base_model_name_or_path
        if not base:
            raise CheckpointError(
                f"{self.source}/{CONFIG_NAME} has no base_model_name_or_path: set it to the "
                "name or directory of the base model"
            )
        try:
            configs.check_directory(base)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot load the base model of the adapter {self.source}: {error}"
            ) from None
        return base

    def base_download(self, download: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the download options of the base model.

        As in PEFT, ``revision`` and ``subfolder`` in ``download`` apply to the adapter only. The
        revision of the base model is read from adapter_config.json.
        """
        options = {
            name: value for name, value in download.items() if name not in ("revision", "subfolder")
        }
        return (
            options
            if self.config.revision is None
            else options | {"revision": self.config.revision}
        )


def find_base(
    source: str, download: Mapping[str, Any]
) -> tuple[Adapter | None, str, dict[str, Any]]:
    """Returns the adapter at ``source``, if there is one, and where to load the base model from.

    Args:
        source: A directory, file or repository of an adapter or of a model.
        download: Download options for ``source``.

    Returns:
        The adapter or `None`, the directory, file or repository of the base model, and the download
        options for the base model. If ``source`` is not an adapter, ``source`` itself is the base
        model.
    """
    adapter = find_adapter(source, download)
    if adapter is None:
        return None, source, dict(download)
    return adapter, adapter.base, adapter.base_download(download)


# Pairs (repository, revision) without an adapter, so that the Hub is queried only once.
_known_full_models: set[tuple[str, str]] = set()


def find_adapter(source: str, download: Mapping[str, Any]) -> Adapter | None:
    """Returns the adapter at ``source``, or `None` if there is no adapter.

    Args:
        source: A directory, a file or a repository.
        download: Options of downloads.
    """
    remote = not Path(source).exists() and (source, str(download.get("revision")))
    if Path(source).is_file() or remote in _known_full_models:
        return None
    fetch = configs.fetcher(source, download)
    path = None if remote and fetch("config.json") else fetch(CONFIG_NAME)
    if path is None:
        if remote:
            _known_full_models.add(remote)
        return None

    def open_tensors() -> dict[str, weights.Tensor]:
        weights_path = next(
            filter(None, (fetch(name) for name in (WEIGHTS_NAME, "adapter_model.bin"))), None
        )
        if weights_path is None:
            raise CheckpointError(f"{source} has {CONFIG_NAME}, but no {WEIGHTS_NAME}")
        tensors = files.open_file(weights_path).tensors
        unknown_names = [name for name in tensors if not name.startswith(_PREFIX)]
        if unknown_names or not tensors:
            raise WeightsError(
                f"{weights_path}: {unknown_names[:3] or 'no tensor'} is not in PEFT's format"
            )
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    return Adapter(LoraConfig.read(path), source, open_tensors)


def combine_tensors(
    adapter: Adapter,
    base: files.OpenedWeights | None,
    names: weights.WeightMap,
    vocab_size: int | None,
) -> dict[str, weights.Tensor]:
    """Combines the tensors of an adapter with the tensors of its base model.

    Tensors of the base model are left out if the adapter contains them.

    Args:
        adapter: The adapter.
        base: The base model's checkpoint, or `None` to return only the adapter's tensors.
        names: The weight map of the adapted model.
        vocab_size: The model's vocabulary size, for messages.

    Raises:
        WeightsError: The tensors of the adapter do not fit the base model, or do not have the ranks
            of the configuration.
        UsageError: The checkpoint of the base model uses Flax names.
    """
    slots, adapter_tensors = {slot.name: slot for slot in names.slots}, {}
    expert_names = {peft: name for name, peft in _peft_expert_names(names).items()}
    opened = {expert_names.get(name, name): tensor for name, tensor in adapter.open().items()}
    for name, tensor in _without_wrappers(opened).items():
        resolved_name = names.resolve_name(name)
        slot, adapter_tensors[resolved_name] = slots.get(resolved_name), tensor
        if slot is not None and tensor.shape != (expected := names.torch_shape(slot)):
            raise _shape_error(adapter, name, tensor.shape, expected, vocab_size)
    unknown_names = [
        name for name in adapter_tensors if name not in slots and name not in names.aliases
    ]
    # PEFT also adapts the pooler of the base model if the task head does not use it.
    unread = [name for name in unknown_names if re.search(r"(^|\.)pooler\.", name)]
    if unread:
        logger.warning(
            "ignoring tensors of the adapter %s for layers that this head does not use: %s",
            adapter.source,
            ", ".join(unread),
        )
        adapter_tensors = {n: t for n, t in adapter_tensors.items() if n not in unread}
        unknown_names = [name for name in unknown_names if name not in unread]
    if unknown_names:
        base_names = [name.removesuffix(".weight") for name in slots]
        listed = "".join(
            f"\n  {n}{did_you_mean(n.removesuffix('.weight'), base_names)}"
            for n in unknown_names[:6]
        )
        omitted = f"\n  and {len(unknown_names) - 6} more" if unknown_names[6:] else ""
        raise WeightsError(
            f"the adapter {adapter.source} does not fit this base model, which lacks:"
            f"{listed}{omitted}"
        )
    missing = [n for n, slot in slots.items() if is_adapter(slot.path) and n not in adapter_tensors]
    if missing:
        raise WeightsError(
            f"{adapter.source} lacks {len(missing)} of the tensors that its {CONFIG_NAME} requires "
            f"for this base model, such as {missing[0]}"
        )
    if base is None:
        return adapter_tensors
    if base.native:
        raise UsageError(
            f"{base.source} uses Flax names, which adapters do not support: convert the base model "
            "with hfseq convert"
        )
    base_tensors = names.expand_ties(base.tensors)
    replaced = {*adapter_tensors, *(names.tied_name(name) for name in adapter_tensors)}
    return {
        n: t for n, t in base_tensors.items() if names.tied_name(n) not in replaced
    } | adapter_tensors


#: Suffix of the attribute with the adapter of a kernel of experts (`hfseq.nn.ExpertLayer`).
_EXPERT_ADAPTER = "_adapter"


def _peft_expert_names(names: weights.WeightMap) -> dict[str, str]:
    """Maps the names of the adapters of experts to PEFT's names, without their common prefix.

    PEFT wraps the module of the experts once per adapted kernel. The first kernel is in the
    innermost wrapper. The name of a matrix consists of the name of the module, followed by
    ``.base_layer`` for each wrapper around the wrapper of its kernel.
    """
    modules: dict[str, dict[str, list[str]]] = {}
    for slot in names.slots:
        if len(slot.path) > 2 and slot.path[-2].endswith(_EXPERT_ADAPTER):
            module = slot.name.rsplit(".", 2)[0]
            kernel = slot.path[-2].removesuffix(_EXPERT_ADAPTER)
            modules.setdefault(module, {}).setdefault(kernel, []).append(slot.name)
    peft_names = {}
    for module, kernels in modules.items():
        order = sorted(kernels, key=ExpertLayer.kernel_names.index)
        for depth, kernel in enumerate(reversed(order)):
            for name in kernels[kernel]:
                wrapped = names.module_name(module) + ".base_layer" * depth
                peft_names[name] = f"{wrapped}.{name.rpartition('.')[2]}.weight"
    return peft_names


def _without_wrappers(tensors: Mapping[str, weights.Tensor]) -> dict[str, weights.Tensor]:
    """Returns the tensors of an adapter by their names without the components that PEFT adds.

    PEFT wraps each module of `modules_to_save` in a module with two attributes: `modules_to_save`,
    the trained module, and `original_module`, the module of the base model. Files may contain the
    tensors of both, in addition to the tensors under the plain names. The tensors of
    `original_module` are ignored.
    """
    wrapper = re.compile(r"\.(modules_to_save|original_module)\.")
    plain = {
        wrapper.sub(".", name).replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if ".modules_to_save." in name
    }
    return plain | {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if not wrapper.search(name)
    }


def _shape_error(
    adapter: Adapter,
    name: str,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
    vocab_size: int | None,
) -> WeightsError:
    """Returns the error for a tensor of an adapter whose shape does not fit the base model."""
    differing = [
        (size, other) for size, other in zip(shape, expected, strict=False) if size != other
    ]
    if len(shape) == len(expected) and len(differing) == 1 and differing[0][1] == vocab_size:
        return WeightsError(
            f"the adapter {adapter.source} was trained with a vocabulary of {differing[0][0]} "
            f"tokens ({name} has the shape {shape}), but the base model has {vocab_size}: resize "
            f"the base model as before training, or pass vocab_size={differing[0][0]} if the "
            "adapter contains the complete embeddings"
        )
    return WeightsError(
        f"the adapter {adapter.source}: {name} has the shape {shape}, but with the ranks of its "
        f"{CONFIG_NAME} and this base model it must be {expected}"
    )


def write_adapter(
    folder: Path,
    config: LoraConfig,
    adapted: Mapping[trees.Path, AdaptedLayer],
    names: weights.WeightMap,
    leaves: Mapping[trees.Path, Any],
) -> None:
    """Writes the files of an adapter, which PEFT can load.

    Args:
        folder: The directory.
        config: The configuration.
        adapted: The adapted layers.
        names: The weight map of the trained parameters.
        leaves: The trained parameters.
    """
    from safetensors.numpy import save_file

    owners = {slot.name.split(".lora_")[0] for slot in names.slots if is_adapter(slot.path)}
    expert_names = _peft_expert_names(names)

    def peft_name(name: str) -> str:
        if name in expert_names:
            return f"{_PREFIX}{expert_names[name]}"
        head, _, leaf = name.rpartition(".")
        inside = head in owners and not leaf.startswith("lora_")  # the bias of an adapted layer
        name = names.module_name(name)
        head = name.rpartition(".")[0]
        return f"{_PREFIX}{head}.base_layer.{leaf}" if inside else f"{_PREFIX}{name}"

    arrays = names.to_torch(leaves)
    if config.ensure_weight_tying and not config.unties(names.aliases):
        # PEFT saves a tied embedding matrix under all of its names.
        arrays |= {alias: arrays[name] for alias, name in names.aliases.items() if name in arrays}
    tensors = {peft_name(name): array for name, array in arrays.items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config_dict = config.to_peft_dict(all(layer.conv1d for layer in adapted.values()))
    text = json.dumps(config_dict, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def merge_adapters(
    flat: Mapping[trees.Path, Any],
    adapted: Mapping[trees.Path, AdaptedLayer],
    stacked: Mapping[trees.Path, Sequence[trees.Path]],
) -> dict[trees.Path, Any]:
    """Adds each adapter to the kernel or embedding matrix of its layer.

    Args:
        flat: Parameters by path.
        adapted: The adapted layers, one entry per unstacked layer.
        stacked: Maps the path of each stacked layer to the paths of the layers that it contains.

    Returns:
        The parameters by path, without the adapters.
    """
    base = {path: leaf for path, leaf in flat.items() if not is_adapter(path)}
    for path, leaf in base.items():
        heads = [(head, layers[0]) for head, layers in stacked.items() if path[: len(head)] == head]
        single = next(((*first, *path[len(head) :]) for head, first in heads), path)
        if (experts := adapted.get(single)) is not None and experts.expert_axes:
            lora_a, lora_b = (
                np.asarray(flat[(*path[:-1], f"{path[-1]}{_EXPERT_ADAPTER}", name)])
                for name in ("lora_A", "lora_B")
            )
            base[path] = _merge_experts(np.asarray(leaf), lora_a, lora_b, experts)
            continue
        layer = adapted.get(single[:-1])
        if layer is None or path[-1] not in ("kernel", "embedding"):
            continue
        names = (
            ("lora_A", "lora_B")
            if path[-1] == "kernel"
            else ("lora_embedding_A", "lora_embedding_B")
        )
        tail = ("kernel",) if path[-1] == "kernel" else ()
        first, second = (np.asarray(flat[(*path[:-1], name, *tail)], np.float64) for name in names)
        if path[-1] == "kernel":
            product = first @ second  # (in, out), with a leading axis for stacked layers
            product = product.swapaxes(-1, -2) if layer.conv1d else product
        else:
            product = (second @ first).swapaxes(-1, -2)
        weight = np.asarray(leaf)
        base[path] = (weight.astype(np.float64) + layer.lora.scale * product).astype(weight.dtype)
    return base


def _merge_experts(
    kernel: np.ndarray, lora_a: np.ndarray, lora_b: np.ndarray, layer: AdaptedLayer
) -> np.ndarray:
    """Adds the adapters of all experts to their kernel.

    All arrays may have a leading layer axis.
    """
    num_experts, rank = kernel.shape[-3], layer.lora.rank
    lead = kernel.shape[:-3]
    first = lora_a.astype(np.float64).reshape(*lead, num_experts, rank, -1)
    second = lora_b.astype(np.float64).reshape(*lead, -1, rank, num_experts)
    product = np.einsum(f"...ofe,...efi->...{layer.expert_axes}", second, first)
    return (kernel.astype(np.float64) + layer.lora.scale * product).astype(kernel.dtype)

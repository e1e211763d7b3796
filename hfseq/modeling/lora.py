"""Low-rank adapters (LoRA: Hu et al., 2021) in PEFT's format: where they stand, and their files.

An adapted model is the same model with a low-rank product beside the kernels that are targeted;
its parameters are one tree, of which :func:`trained` are those that training changes and an
adapter's directory holds.
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
from hfseq.nn.layers import Conv1D, Embed, Linear, LowRankConfig

logger = logging.getLogger("hfseq.modeling")

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ADAPTER_PART = re.compile(r"^lora_(A|B|embedding_A|embedding_B)$")
#: What PEFT targets where nobody says what, by model type.
DEFAULT_TARGET_MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5", "longt5"), ("q", "v")),
    **dict.fromkeys(("gpt2",), ("c_attn",)),
    **dict.fromkeys(("bloom",), ("query_key_value",)),
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "electra", "roberta-prelayernorm"), ("query", "value")
    ),
    **dict.fromkeys(
        ("bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "opt", "gptj",
         "gpt_neo", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3",
         "smollm3", "whisper"), ("q_proj", "v_proj")
    ),
}  # fmt: skip
#: PEFT's name of a task, by the head.
TASK_TYPES = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "Model": "FEATURE_EXTRACTION",
}
#: What PEFT saves whole beside the adapters of a task, since it is new in every run.
HEAD_MODULES = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
#: Fields of PEFT that change numbers and that hfseq does not have.
_UNSUPPORTED_FIELDS = (
    "use_dora",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "target_parameters",
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
    """Which layers have an adapter, and of what rank: the fields of PEFT's ``LoraConfig``.

    **Arguments:** ``r`` is the rank and ``lora_alpha / r`` the scale (``/ sqrt(r)`` with
    ``use_rslora``); ``lora_dropout`` the share of the input that adapters lose in training;
    ``target_modules`` the ends of checkpoint paths ("q_proj"), one regular expression for whole
    paths, "all-linear", or None for what is usual for the model type; ``exclude_modules`` what is
    spared of them; ``modules_to_save`` what is trained and stored whole; ``bias`` whether biases
    are trained, all or those of adapted layers; ``rank_pattern`` and ``alpha_pattern`` other
    numbers for paths that end so; ``layers_to_transform`` the numbers of the layers, in the list
    ``layers_pattern``.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str | None = None
    exclude_modules: Sequence[str] | str | None = None
    modules_to_save: Sequence[str] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: Sequence[int] | int | None = None
    layers_pattern: Sequence[str] | str | None = None
    init_lora_weights: bool | str = True
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    inference_mode: bool = False  # as PEFT: true of what was read

    def __post_init__(self) -> None:
        if self.r < 1 or any(rank < 1 for rank in self.rank_pattern.values()):
            raise UsageError(f"r={self.r}, rank_pattern={dict(self.rank_pattern)}: ranks are >= 1")
        if self.bias not in ("none", "all", "lora_only"):
            raise UsageError(f"bias='{self.bias}': give none, all or lora_only")

    @classmethod
    def read(cls, path: str) -> LoraConfig:
        """Read ``adapter_config.json``; what changes numbers and is not known is refused."""
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        configs.check_mapping(stored, path)
        if stored.get("peft_type") != "LORA":
            raise UsageError(f"{path}: peft_type is {stored.get('peft_type')!r}, and only LORA is")
        foreign = [name for name in _UNSUPPORTED_FIELDS if stored.get(name)]
        start = stored.get("init_lora_weights", True)
        if foreign or start not in (True, False, None, "gaussian", "eva", "orthogonal"):
            named = [*foreign, *([] if foreign else [f"init_lora_weights={start!r}"])]
            raise UsageError(
                f"{path} has {', '.join(named)}, which changes numbers and which hfseq does not "
                "have: merge the adapter with PEFT (merge_and_unload) and load the result"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in stored.items() if name in known}
        try:
            made = cls(**{name: value for name, value in given.items() if value is not None})
            return dataclasses.replace(made, inference_mode=True)
        except TypeError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def record(self, conv1d: bool) -> dict[str, Any]:
        """Return what PEFT reads; ``conv1d`` tells that all targets are GPT-2's Conv1D."""
        made = dataclasses.asdict(self)
        made |= {"peft_type": "LORA", "inference_mode": True, "fan_in_fan_out": conv1d}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(made.items())
        }

    def lowrank(self, name: str) -> LowRankConfig:
        """Return the adapter of the layer at the checkpoint path ``name``."""

        def own(pattern: Mapping[str, Any], default: Any) -> Any:
            fits = (key for key in pattern if re.match(rf"(.*\.)?({key})$", name))
            return pattern[key] if (key := next(fits, None)) is not None else default

        rank = int(own(self.rank_pattern, self.r))
        alpha = float(own(self.alpha_pattern, self.lora_alpha))
        scale = alpha / (rank**0.5 if self.use_rslora else rank)
        return LowRankConfig(rank, scale, self.lora_dropout, self.init_lora_weights == "gaussian")

    def targets(self, name: str) -> bool:
        """Tell whether the layer at the checkpoint path ``name`` has an adapter."""
        if _matches(self.exclude_modules, name) or self.saves(name):
            return False
        wanted = self.target_modules
        if not _matches(wanted, name):
            return False
        layers = self.layers_to_transform
        if layers is None or isinstance(wanted, str) or name in (wanted or ()) or layers == []:
            return True
        pattern = self.layers_pattern or r"[^.]*"
        patterns = [pattern] if isinstance(pattern, str) else pattern
        lead = r".*?\." if not self.layers_pattern else r"(?:^|.*?\.)"
        found = (re.match(rf"{lead}{one}\.(\d+)\.", name) for one in patterns)
        number = next((int(match[1]) for match in found if match), None)
        return number in ([layers] if isinstance(layers, int) else layers)

    def saves(self, name: str) -> bool:
        """Tell whether the module or parameter at ``name`` is stored whole."""
        return any(
            re.match(rf"(^|.*\.){module}($|\..*)", name) for module in self.modules_to_save or ()
        )


def _matches(wanted: Sequence[str] | str | None, name: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted or ())


def complete_config(config: LoraConfig, class_name: str, model_type: str) -> LoraConfig:
    """Fill in what depends on the model: its task, the usual targets, heads that are new."""
    head = re.search(r"(For\w+|Model)$", class_name)
    task = config.task_type or TASK_TYPES.get(head[1] if head else "")
    targets = config.target_modules
    if targets is None:
        if model_type not in DEFAULT_TARGET_MODULES:
            raise UsageError(
                f"there are no usual layers to adapt in '{model_type}': name them "
                "(target_modules, --lora_target_modules), or all-linear for all"
            )
        targets = DEFAULT_TARGET_MODULES[model_type]
    saved = tuple(
        dict.fromkeys((*(config.modules_to_save or ()), *HEAD_MODULES.get(task or "", ())))
    )
    return dataclasses.replace(
        config, task_type=task, target_modules=targets, modules_to_save=saved or None
    )


class AdaptedLayer(NamedTuple):
    """An adapted layer: its adapter, whether it is a Linear, and one of GPT-2's, (out, in)."""

    lora: LowRankConfig
    linear: bool
    conv1d: bool


def add_adapters(
    module: nnx.Module,
    config: LoraConfig,
    name_of: Callable[[trees.Path], str],
    rngs: nnx.Rngs,
    vocabulary: int | None,
) -> tuple[LoraConfig, dict[trees.Path, AdaptedLayer]]:
    """Add adapters to the layers of ``module``, not stacked yet, that ``config`` targets.

    ``name_of`` gives the checkpoint path of a parameter; a head over the ``vocabulary`` is what
    "all-linear" spares. Returns the configuration with "all-linear" written out, and what was
    adapted, by path. UsageError where nothing is targeted.
    """
    found: dict[str, Linear | Embed] = {}
    paths: dict[str, trees.Path] = {}
    for keys, part in nnx.iter_graph(module):
        if isinstance(part, (Linear, Embed)):
            path = tuple(map(str, keys))
            leaf = "kernel" if isinstance(part, Linear) else "embedding"
            name = name_of((*path, leaf)).rpartition(".")[0]
            found[name], paths[name] = part, path
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        chosen = tuple(
            name
            for name, part in found.items()
            if isinstance(part, Linear)
            and vocabulary not in part.kernel.shape
            and not config.saves(name)
        )
        config = dataclasses.replace(config, target_modules=chosen)
    adapted, wanted = [name for name in found if config.targets(name)], config.target_modules
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    absent = [name for name in names if not any(_matches((name,), other) for other in found)]
    if not adapted or absent and not isinstance(wanted, str) and not config.inference_mode:
        ends = sorted({name.rpartition(".")[2] for name in found})
        raise UsageError(
            f"target_modules {', '.join(absent or names)}: no layer of this model is called so; "
            f"its Linears and tables are {', '.join(ends)}"
        )
    made = {}
    for name in adapted:
        lora = config.lowrank(name)
        found[name].add_lora(lora, rngs)
        kinds = (isinstance(found[name], kind) for kind in (Linear, Conv1D))
        made[paths[name]] = AdaptedLayer(lora, *kinds)
    return config, made


def trainable_paths(
    paths: Iterable[trees.Path], config: LoraConfig, name_of: Callable[[trees.Path], str]
) -> set[trees.Path]:
    """Return which parameters training changes: adapters, and what ``config`` says beside them."""
    paths = list(paths)
    own = {path for path in paths if is_adapter(path)}
    adapted = {path[:-2] if path[-1] == "kernel" else path[:-1] for path in own}

    def chosen(path: trees.Path) -> bool:
        if path in own or config.saves(name_of(path)):
            return True
        if path[-1] != "bias" or config.bias == "none":
            return False
        return config.bias == "all" or path[:-1] in adapted

    return {path for path in paths if chosen(path)}


def is_adapter(path: trees.Path) -> bool:
    """Tell whether a parameter is a part of an adapter."""
    return any(_ADAPTER_PART.match(part) for part in path[-2:])


# -- files


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter's directory: its configuration, and a function that opens its tensors."""

    config: LoraConfig
    source: str
    open: Callable[[], dict[str, weights.Tensor]]

    @property
    def head(self) -> str | None:
        """The head that it was trained with, "ForCausalLM", where its task tells."""
        return next((h for h, task in TASK_TYPES.items() if task == self.config.task_type), None)

    @property
    def base(self) -> str:
        """Where the model is that it was made for; CheckpointError where nobody says, or nothing
        is there."""
        base = self.config.base_model_name_or_path
        if not base:
            raise CheckpointError(
                f"{self.source}/{CONFIG_NAME} names no base_model_name_or_path: write the base's there"
            )
        try:
            configs.check_directory(base)
        except CheckpointError as error:
            raise CheckpointError(f"the base of the adapter {self.source}: {error}") from None
        return base


_known_full_models: set[tuple[str, str]] = set()  # on the Hub, which is asked once


def find_adapter(source: str, download: Mapping[str, Any]) -> Adapter | None:
    """Return the adapter at ``source``, a directory or a repository, if it is one."""
    remote = not Path(source).exists() and (source, str(download.get("revision")))
    if Path(source).is_file() or remote in _known_full_models:
        return None
    fetch = configs.fetcher(source, download)
    path = None if remote and fetch("config.json") else fetch(CONFIG_NAME)
    if path is None:
        if remote:
            _known_full_models.add(remote)
        return None

    def opened() -> dict[str, weights.Tensor]:
        found = next(
            filter(None, (fetch(name) for name in (WEIGHTS_NAME, "adapter_model.bin"))), None
        )
        if found is None:
            raise CheckpointError(f"{source} has {CONFIG_NAME} and no {WEIGHTS_NAME}")
        tensors = files.open_file(found).tensors
        foreign = [name for name in tensors if not name.startswith(_PREFIX)]
        if foreign or not tensors:
            raise WeightsError(f"{found}: {foreign[:3] or 'no tensor'} is not of PEFT's format")
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    return Adapter(LoraConfig.read(path), source, opened)


def combine_tensors(
    adapter: Adapter, base: files.OpenedWeights | None, names: weights.WeightMap
) -> dict[str, weights.Tensor]:
    """Return the tensors of an adapter, and those of its ``base`` that it does not replace.

    **Raises:** WeightsError for paths that the base does not have, and for other ranks.
    """
    slots, found = {slot.name: slot for slot in names.slots}, {}
    for name, tensor in adapter.open().items():
        own = names.resolve_name(name.replace(".base_layer.", "."))
        slot, found[own] = slots.get(own), tensor
        if slot and is_adapter(slot.path) and tensor.shape != names.torch_shape(slot):
            raise WeightsError(
                f"{adapter.source}: {name} is {tensor.shape}; with the ranks of its {CONFIG_NAME} it is "
                f"{names.torch_shape(slot)} in this base"
            )
    strange = [name for name in found if name not in slots and name not in names.aliases]
    if strange:
        known = [name.removesuffix(".weight") for name in slots]
        listed = "".join(
            f"\n  {n}{did_you_mean(n.removesuffix('.weight'), known)}" for n in strange[:6]
        )
        more = f"\n  and {len(strange) - 6} more" if strange[6:] else ""
        raise WeightsError(
            f"the adapter {adapter.source} is not for this base, which lacks:{listed}{more}"
        )
    missing = [n for n, slot in slots.items() if is_adapter(slot.path) and n not in found]
    if missing:
        raise WeightsError(
            f"{adapter.source} lacks {len(missing)} of the tensors that its {CONFIG_NAME} asks for in "
            f"this base, the first of them {missing[0]}"
        )
    if base is None:
        return found
    if base.native:
        raise UsageError(
            f"{base.source} has Flax's own names: write the base anew (hfseq convert) for adapters"
        )
    return {n: t for n, t in base.tensors.items() if names.resolve_name(n) not in found} | found


def write_adapter(
    folder: Path,
    config: LoraConfig,
    adapted: Mapping[trees.Path, AdaptedLayer],
    names: weights.WeightMap,
    leaves: Mapping[trees.Path, Any],
) -> None:
    """Write the directory that PEFT opens: ``leaves`` are the trained parameters."""
    from safetensors.numpy import save_file

    owners = {slot.name.split(".lora_")[0] for slot in names.slots if is_adapter(slot.path)}

    def peft_name(name: str) -> str:
        head, _, leaf = name.rpartition(".")
        inside = head in owners and not leaf.startswith("lora_")  # a bias of an adapted layer
        return f"{_PREFIX}{head}.base_layer.{leaf}" if inside else f"{_PREFIX}{name}"

    tensors = {peft_name(name): array for name, array in names.to_torch(leaves).items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    record = config.record(all(one.conv1d for one in adapted.values()))
    text = json.dumps(record, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def merge_adapters(
    flat: Mapping[trees.Path, Any],
    adapted: Mapping[trees.Path, AdaptedLayer],
    stacked: Mapping[trees.Path, Sequence[trees.Path]],
) -> dict[trees.Path, Any]:
    """Return the parameters with each adapter added to its kernel or table, and no adapters.

    ``adapted`` are the layers one by one, ``stacked`` the paths that scanned ones have.
    """
    base = {path: leaf for path, leaf in flat.items() if not is_adapter(path)}
    for path, leaf in base.items():
        heads = [(head, layers[0]) for head, layers in stacked.items() if path[: len(head)] == head]
        single = next(((*first, *path[len(head) :]) for head, first in heads), path)
        found = adapted.get(single[:-1])
        if found is None or path[-1] not in ("kernel", "embedding"):
            continue
        names = (
            ("lora_A", "lora_B")
            if path[-1] == "kernel"
            else ("lora_embedding_A", "lora_embedding_B")
        )
        tail = ("kernel",) if path[-1] == "kernel" else ()
        first, second = (np.asarray(flat[(*path[:-1], name, *tail)], np.float64) for name in names)
        if path[-1] == "kernel":
            product = first @ second  # (in, out), of a stack one after the other
            product = product.swapaxes(-1, -2) if found.conv1d else product
        else:
            product = (second @ first).swapaxes(-1, -2)
        whole = np.asarray(leaf)
        base[path] = (whole.astype(np.float64) + found.lora.scale * product).astype(whole.dtype)
    return base

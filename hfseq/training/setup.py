"""Builds a run from its flags: tokenizer, configuration, model, sharding, data, optimizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hfseq import plugins
from hfseq.checkpoints import config as config_files
from hfseq.data.arguments import has_arrays
from hfseq.data.batches import Batches, ContinuousBatches, WindowBatches
from hfseq.data.samplers import MixedBatches, MixedRowBatches, MixedRows
from hfseq.data.streaming import StreamingBatches
from hfseq.data.tokenizers import check_vocabulary, fit_vocabulary
from hfseq.errors import CheckpointError, UsageError, first_line
from hfseq.modeling import lora
from hfseq.nn import fp8, sharding, trees
from hfseq.nn.context import platform
from hfseq.nn.precision import choose_precision
from hfseq.objectives.base import Auxiliary
from hfseq.objectives.distillation import with_teacher
from hfseq.training import processes, state
from hfseq.training.arguments import Arguments, ModelArguments, TrainingArguments
from hfseq.training.checkpointer import Checkpointer, Progress
from hfseq.training.optimizers import make_optimizer, make_schedule
from hfseq.training.state import Carry, TrainState, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.objectives.base import Objective

logger = logging.getLogger(__name__)

#: Number of steps of the learning rate schedule in `hfseq plan`, which only plans a run. The
#: optimizer state does not depend on this number.
PLANNED_STEPS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Windows:
    """How rows are split into windows (`--update_length`).

    Each step trains one window of each row in the batch. The model's memory is carried from one
    window to the next.

    Attributes:
        length: Tokens per window.
        count: Windows per row.
        streams: Whether the memory is never reset (`--state_reset never`). Otherwise, it is reset
            at the start of each row.
    """

    length: int
    count: int
    streams: bool


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The size of the batch of a step.

    Attributes:
        rows: Rows per step, over all devices.
        micro_batches: Number of micro-batches of equal size.
        length: Tokens per row that the model processes.
        windows: How rows are split into windows, or `None` if a step trains whole rows.
    """

    rows: int
    micro_batches: int
    length: int
    windows: Windows | None = None


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    Attributes:
        train: The training batches, if the run trains.
        evaluation: The validation batches, if the run evaluates.
        test: The test batches, if the objective computes metrics on the test split. Objectives that
            generate texts for the test split read it themselves.
        length: Tokens of text per row.
        description: The name and the counts of each split, for the model card.
    """

    train: Batches | StreamingBatches | None
    evaluation: Batches | None
    test: Batches | None
    length: int
    description: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The parts of a run that do not change during training.

    `TrainState` and `Progress` contain the parts that change.

    Attributes:
        arguments: The flags.
        objective: The objective.
        model: The model, without parameters.
        tokenizer: The tokenizer or processor.
        layout: The sharding of the parameters.
        data: The data, or `None` if the run is only planned.
        batch: The size of the batch of a step.
        optimizer: The optimizer.
        schedule: The learning rate schedule, or `None` if the run only evaluates.
        total_steps: The number of the last step, counted from 1.
        folder: The local output directory.
        auxiliary: Further models that the objective needs, such as a teacher, by name.
        frozen: Parameters that are used, but neither trained nor saved. The parameters of auxiliary
            models have the key `state.AUXILIARY`.
    """

    arguments: Arguments
    objective: Objective
    model: FlaxPreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: sharding.Layout
    data: RunData | None
    batch: BatchPlan
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    total_steps: int
    folder: Path
    auxiliary: Mapping[str, AuxiliaryPlan] = dataclasses.field(default_factory=dict)
    frozen: Tree = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.layout.mesh

    @property
    def carry(self) -> Carry | None:
        """The layout of the memory that is carried between windows, or `None` without windows."""
        windows = self.batch.windows
        if windows is None:
            return None
        return Carry(self.batch.rows, windows.count, tuple(self.model.stacked_prefixes))

    def initial_state(self, params: Tree, extra: Tree) -> TrainState:
        """Returns the state before the first step. This function is called under `jax.jit`."""
        carry, training = self.carry, self.arguments.training
        return state.make_state(
            params,
            self.optimizer,
            extra,
            tuple(sorted({"loss", "count", *self.objective.sums})),
            self.model.precision.compute_dtype if training.do_train else None,
            None if carry is None else self.model.init_cache(carry.rows, 0),
        )

    def abstract_state(self) -> TrainState:
        """Returns the shapes, dtypes and shardings of the state, without computing it."""
        return self._abstract_state

    def abstract_frozen(self) -> Tree:
        """Returns the shapes, dtypes and shardings of the frozen parameters."""
        trained_paths = self.model.trainable_paths
        shapes = {
            p: shape for p, shape in param_shapes(self.model).items() if p not in trained_paths
        }
        shardings = self.layout.shardings(shapes)
        frozen = trees.unflatten(
            {
                path: jax.ShapeDtypeStruct(
                    self.layout.padded_shape(path, shape),
                    self.arguments.model.param_dtype,
                    sharding=shardings[path],
                )
                for path, shape in shapes.items()
            }
        )
        quantization = self.arguments.model.base_quantization
        if quantization is not None:
            frozen = self.model.quantize(frozen, quantization)
        stored = {
            name: plan.abstract_params()
            for name, plan in self.auxiliary.items()
            if name not in self.objective.precomputed_auxiliary
        }
        return {**frozen, state.AUXILIARY: stored} if stored else frozen

    @functools.cached_property
    def _abstract_state(self) -> TrainState:
        trained_paths, dtype = self.model.trainable_paths, trained_dtype(self.arguments)
        shapes = {p: shape for p, shape in param_shapes(self.model).items() if p in trained_paths}
        params = {
            path: jax.ShapeDtypeStruct(self.layout.padded_shape(path, shape), dtype)
            for path, shape in shapes.items()
        }
        abstract = jax.eval_shape(
            self.initial_state, trees.unflatten(params), self.model.extra_shape_tree
        )
        shardings = state.state_shardings(
            abstract, self.layout.shardings(shapes), self.mesh, self.carry
        )
        return jax.tree.map(
            lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf_sharding
            ),
            abstract,
            shardings,
        )

    def step_function(self, calibrate: bool = False) -> jax.stages.Wrapped:
        """Returns the jitted function `step(state, frozen, batch)` with the shardings of the run.

        The function donates the buffers of the state.

        Args:
            calibrate: Whether the step only measures the FP8 scales, without training.
        """
        training = self.arguments.training
        step = state.make_step(
            self.objective,
            self.model,
            self.optimizer,
            training.seed,
            training.on_non_finite == "skip",
            self.carry,
            calibrate,
        )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        return jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(shardings, None, None),
            out_shardings=(shardings, None),
        )

    @functools.cached_property
    def eval_step(self) -> Callable[..., dict[str, jax.Array]]:
        """The jitted function `evaluate(params, frozen, extra, batch) -> sums`."""
        return jax.jit(
            state.make_eval_step(self.objective, self.model),
            out_shardings=NamedSharding(
                self.mesh, PartitionSpec()
            ),  # all processes read the results
        )

    @functools.cached_property
    def read_extra_metrics(self) -> Callable[[Tree], dict[str, jax.Array]]:
        """The jitted function that computes metrics from the collections of the model."""
        return jax.jit(self.model.extra_metrics)


@dataclasses.dataclass(frozen=True, eq=False)
class AuxiliaryPlan:
    """An auxiliary model of an objective, before its parameters are loaded.

    Attributes:
        structure: The auxiliary model, without parameters.
        arguments: The flags from which its parameters are loaded.
        layout: The sharding of its parameters.
        stored_paths: The paths of the parameters that it does not share with the trained model.
    """

    structure: Auxiliary
    arguments: Arguments
    layout: sharding.Layout
    stored_paths: frozenset[trees.Path]

    def abstract_params(self) -> Tree:
        """Returns the shapes, dtypes and shardings of the parameters that are not shared."""
        shapes = param_shapes(self.structure.model)
        shapes = {path: shape for path, shape in shapes.items() if path in self.stored_paths}
        shardings = self.layout.shardings(shapes)
        return trees.unflatten(
            {
                path: jax.ShapeDtypeStruct(
                    self.layout.padded_shape(path, shape),
                    self.arguments.model.param_dtype,
                    sharding=shardings[path],
                )
                for path, shape in shapes.items()
            }
        )

    def load(self, start: Mapping[trees.Path, jax.Array]) -> Tree:
        """Loads the parameters that are not shared.

        Args:
            start: The parameters of the trained model at the start of the run, by path.
        """
        if self.structure.shared_paths is not None:
            return trees.unflatten({path: jnp.copy(start[path]) for path in self.stored_paths})
        params, extra = make_params(self.arguments, self.structure.model, self.layout)
        self.structure.model.extra = dict(extra)
        return params


def plan_auxiliary(
    arguments: Arguments, objective: Objective, model: FlaxPreTrainedModel, mesh: Mesh
) -> dict[str, AuxiliaryPlan]:
    """Builds the auxiliary models of an objective, without their parameters.

    Args:
        arguments: The flags of the run.
        objective: The objective.
        model: The trained model.
        mesh: The device mesh.
    """
    plans = {}
    for name, request in objective.auxiliary_models().items():
        source = weights_source(arguments)
        shares = model.peft_config is not None and request.source is None
        if shares and source and lora.find_adapter(source, _hub_options(arguments)):
            # The run continues the training of an adapter. The reference is the adapter at the
            # start of the run.
            layout = shard_model(model, mesh, arguments.training.sequence_parallel)
            paths = frozenset(param_shapes(model))
            trained = frozenset(model.trainable_paths)
            plans[name] = AuxiliaryPlan(Auxiliary(model, paths), arguments, layout, trained)
            continue
        flags = dataclasses.replace(
            arguments.model,
            model_name_or_path=request.source or arguments.model.model_name_or_path,
            model_revision="main" if request.source else arguments.model.model_revision,
            param_dtype=request.dtype or arguments.model.param_dtype,
            use_peft=False,
            load_in_4bit=False,
            load_in_8bit=False,
        )
        # Without a pretrained model, the auxiliary model is initialized like the trained model,
        # which requires do_train.
        trains = flags.model_name_or_path is None
        training = dataclasses.replace(arguments.training, do_train=trains, do_eval=True)
        own = dataclasses.replace(arguments, model=flags, training=training)
        config = model.config
        if request.source is not None:
            base, hub = base_model_of(request.source, _hub_options(own))
            config = config_files.auto_config(base, flags.trust_remote_code, **hub)
        structure = build_model(own, config, request.head or objective.task_head(config))
        layout = shard_model(structure, mesh, arguments.training.sequence_parallel)
        paths = frozenset(param_shapes(structure))
        stored = paths & frozenset(model.trainable_paths) if shares else paths
        plans[name] = AuxiliaryPlan(
            Auxiliary(structure, paths if shares else None), own, layout, stored
        )
    return plans


def build_run(
    arguments: Arguments,
    objective_name: str,
    output: Path,
    progress: Progress,
    devices: Sequence[jax.Device] | AbstractMesh | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PreTrainedConfig | None = None,
    with_data: bool = True,
) -> Run:
    """Builds the run that the flags describe.

    Args:
        arguments: The flags.
        objective_name: Name of the objective.
        output: The local output directory.
        progress: The progress of the checkpoint to resume from, or the progress of a new run. The
            function adds the values that must not change when the run is resumed: batch size,
            windows and collections.
        devices: The devices. Default: all. A run that is only planned can pass an abstract mesh,
            which describes devices that do not have to exist.
        tokenizer: Replaces the tokenizer of the flags, for runs that are only planned.
        config: Replaces the configuration of the flags, for runs that are only planned.
        with_data: Whether to load the data. Runs that are only planned do not load it.

    Raises:
        UsageError: The flags, the model, the data or the mesh are invalid, or cannot be combined.
    """
    training = arguments.training
    if isinstance(devices, AbstractMesh):
        mesh: Any = devices
    else:
        mesh = sharding.make_mesh(training.mesh, devices)
        processes.open_connections(mesh)
    objective_class = plugins.load().objectives.get(objective_name)
    if arguments.data.teacher is not None:
        objective_class = with_teacher(objective_class)
    if training.do_predict and not objective_class.supports_predict:
        raise UsageError(
            f"--do_predict: the objective '{objective_name}' does not support a test split, so "
            "drop the flag. Objectives with a test split are clm (only the loss), classification, "
            "tagging, question answering, translation and summarization"
        )
    if tokenizer is None:
        with processes.main_process_first(), _hidden_token_warnings(arguments):
            # Process 0 loads the tokenizer first, because it may have to create it.
            tokenizer = load_tokenizer(arguments, objective_class, output)
    if config is None:
        if arguments.model.use_peft and not arguments.model.model_name_or_path:
            raise UsageError(
                "--use_peft trains an adapter for an existing model: add --model_name_or_path"
            )
        with _hidden_token_warnings(arguments):
            config = load_config(arguments, tokenizer, objective_class)
    model = build_model(
        arguments, config, objective_class.task_head(config, **_hub_options(arguments))
    )
    objective = objective_class(arguments.data, tokenizer, config)
    auxiliary = plan_auxiliary(arguments, objective, model, mesh)
    objective.auxiliary = {name: plan.structure for name, plan in auxiliary.items()}
    objective.prepare(model)  # may add parameters
    layout = shard_model(model, mesh, training.sequence_parallel)
    check_packing(arguments, objective, model)
    if training.do_train:
        _record_collections(model, progress, training.output_dir)
    batch = plan_batch(arguments, objective, model, mesh, progress)
    data = None
    if with_data:
        if training.do_train:
            windows = batch.windows
            model.check_training(batch.rows * (windows.length if windows else batch.length))
        data = _load_data(arguments, tokenizer, objective, batch, sharding.data_shards(mesh))
        shared_values = {"data": data.description, "step to resume from": progress.step or None}
        processes.check_agreement(shared_values, "use the same files in all of them")
        check_best_metric(training, objective, model, data.evaluation)
        if training.do_train:
            record_data(arguments, data, progress)
    total_steps, schedule, optimizer = 0, None, optax.identity()  # without training
    if training.do_train:
        if training.max_steps > 0:
            total_steps = training.max_steps
        elif data is None:
            total_steps = PLANNED_STEPS
        elif isinstance(data.train, Batches):
            total_steps = max(1, round(len(data.train) * training.num_train_epochs))
        else:
            raise UsageError(
                "--streaming requires --max_steps, because the number of steps in an epoch of "
                "streamed data is unknown"
            )
        objective.total_steps = total_steps
        schedule = make_schedule(training, total_steps, getattr(config, "hidden_size", None))
        factory = plugins.load().optimizers.get(training.optim)
        optimizer = make_optimizer(factory, training, schedule, model.stacked_prefixes)
    return Run(
        arguments,
        objective,
        model,
        tokenizer,
        layout,
        data,
        batch,
        optimizer,
        schedule,
        total_steps,
        output,
        auxiliary,
    )


def restore_or_initialize(
    run: Run, checkpointer: Checkpointer, progress: Progress
) -> tuple[Run, TrainState]:
    """Restores the state from a checkpoint, or initializes it.

    The arrays are created with their final sharding, so no host has to hold all parameters or
    optimizer moments.

    Returns:
        The run with its frozen parameters, and the state.
    """
    abstract = run.abstract_state()
    params: Tree = {}
    extra: Tree = {}
    if not progress.step or run.model.peft_config is not None:
        params, extra = make_params(run.arguments, run.model, run.layout)
    stored = {name: plan.load(trees.flatten(params)) for name, plan in run.auxiliary.items()}
    if run.model.peft_config is not None:
        flat, trained_paths = trees.flatten(params), run.model.trainable_paths
        trained_params = {path: leaf for path, leaf in flat.items() if path in trained_paths}
        sizes = [sum(leaf.size for leaf in part.values()) for part in (trained_params, flat)]
        logger.info("trainable parameters: %d of %d (%.3g %%)", *sizes, 100 * sizes[0] / sizes[1])
        params = trees.cast_floating(trees.unflatten(trained_params), trained_dtype(run.arguments))
        frozen = trees.unflatten({p: flat.pop(p) for p in list(flat) if p not in trained_paths})
        if (quantization := run.arguments.model.base_quantization) is not None:
            frozen = run.model.quantize(frozen, quantization)
        run = dataclasses.replace(run, frozen=frozen)
    if stored:
        run = dataclasses.replace(run, frozen={**run.frozen, state.AUXILIARY: stored})
    if progress.step:
        restored = checkpointer.restore(progress.step, abstract)
        output_dir = run.arguments.training.output_dir
        logger.info("resumed from step %d of %s", progress.step, output_dir)
        if run.arguments.training.do_train and progress.step >= run.total_steps:
            logger.warning(
                "nothing is trained: the checkpoint has %d steps, but the run ends at step %d. "
                "Increase --max_steps or --num_train_epochs to continue training",
                progress.step,
                run.total_steps,
            )
        return run, restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    start = jax.jit(run.initial_state, out_shardings=shardings, donate_argnums=0)
    return run, start(params, extra)


def trained_dtype(arguments: Arguments) -> str:
    """Returns the dtype of the trained parameters. LoRA adapters are always float32."""
    return "float32" if arguments.model.use_peft else arguments.model.param_dtype


# -- tokenizer, configuration, model


def _hub_options(arguments: Arguments) -> dict[str, Any]:
    model = arguments.model
    options = {"cache_dir": model.cache_dir, "revision": model.model_revision}
    return {name: value for name, value in options.items() if value is not None}


@contextlib.contextmanager
def _hidden_token_warnings(arguments: Arguments) -> Iterator[None]:
    """Hides warnings about special tokens if a new model is created."""
    config_logger = logging.getLogger("transformers.configuration_utils")

    def is_shown(record: logging.LogRecord) -> bool:
        is_about_tokens = "integer within the vocabulary" in record.getMessage()
        return not (is_about_tokens and weights_source(arguments) is None)

    config_logger.addFilter(is_shown)
    try:
        yield
    finally:
        config_logger.removeFilter(is_shown)


def load_tokenizer(
    arguments: Arguments, objective: type[Objective], folder: Path
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that the flags name, or lets the objective create one in `folder`.

    For an objective without text, the result is an image or audio processor.

    Raises:
        UsageError: The flags name no tokenizer, and the objective cannot create one.
        CheckpointError: The tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    model = arguments.model
    name = model.tokenizer_name or model.model_name_or_path
    if name:
        config_files.check_directory(name)
    processor = objective.load_processor(
        name or weights_source(arguments), arguments.data, **_hub_options(arguments)
    )
    if processor is not None:
        return processor
    if not name:
        processor = objective.make_tokenizer(arguments.data, folder, plugins.load())
        if processor is not None:
            return processor
        raise UsageError(
            "no tokenizer: add --tokenizer_name (a directory or Hub ID), or train one with "
            "scripts/train_tokenizer.py"
        )
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=model.trust_remote_code, **_hub_options(arguments)
        )
    except Exception as error:  # the Rust tokenizers raise plain Exception
        raise CheckpointError(
            f"cannot load the tokenizer '{name}' ({first_line(error)}): use a directory with "
            "tokenizer.json, or a Hub ID"
        ) from error


def load_config(
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase, objective: type[Objective]
) -> PreTrainedConfig:
    """Loads or creates the configuration, and applies `--config_overrides`.

    The objective can provide a default model type, and can change the configuration and the
    tokenizer.

    Raises:
        UsageError: The flags contradict the configuration, or the vocabulary of the tokenizer does
            not match it.
    """
    plugins.register_auto_classes()
    model, hub = arguments.model, _hub_options(arguments)
    source = weights_source(arguments)
    base, hub = base_model_of(source, hub)
    # Without --model_name_or_path, a run that only evaluates loads the model in the output
    # directory. If this is an adapter, the configuration is that of its base model.
    name = model.config_name or (base if base != source else model.model_name_or_path)
    if name:
        config = config_files.auto_config(name, model.trust_remote_code, **hub)
        if model.model_type and model.model_type != config.model_type:
            raise UsageError(
                f"--model_type {model.model_type} contradicts the configuration of {name} "
                f"('{config.model_type}'): drop one of them"
            )
        if model.preset:
            raise UsageError(
                f"--preset {model.preset} is only for training from scratch, but {name} has a "
                "configuration: drop one of them"
            )
    elif model_type := model.model_type or objective.default_model_type:
        config = new_config(
            model_type, tokenizer, model.preset, objective.auto_class if model.bridge else None
        )
    else:
        raise UsageError("no model: add --model_name_or_path, --config_name or --model_type")
    overrides = config_files.parse_overrides(model.config_overrides)
    if overrides:
        config_files.apply_overrides(config, overrides)
    from_scratch = source is None
    if from_scratch and hasattr(config, "vocab_size") and hasattr(tokenizer, "get_vocab"):
        fit_vocabulary(tokenizer, config)
        set_special_tokens(config, tokenizer, overrides)
    objective.configure(config, tokenizer, from_scratch)
    objective.configure_data(config, arguments.data, plugins.load())
    if hasattr(tokenizer, "get_vocab"):  # not an image or audio processor
        both = hasattr(config, "encoder") and hasattr(config, "decoder")
        for part in (config.encoder, config.decoder) if both else (config,):
            check_vocabulary(tokenizer, part)
    return config


def new_config(
    model_type: str,
    tokenizer: PreTrainedTokenizerBase,
    preset: str | None,
    bridged_task: str | None = None,
) -> PreTrainedConfig:
    """Creates a configuration with the vocabulary size and special tokens of the tokenizer.

    Args:
        model_type: The architecture.
        tokenizer: The tokenizer or processor.
        preset: Name of a preset size of the architecture.
        bridged_task: The task of a model that runs PyTorch's code (`--bridge`), or `None` for an
            architecture that hfseq implements.
    """
    loaded = plugins.load()
    if bridged_task is None:
        spec = loaded.architectures.get(model_type)
    else:
        spec = loaded.find_architecture(model_type, bridged_task, bridge=True)
    config_class = spec.load_config()
    sizes = config_files.preset_values(config_class, preset, model_type)
    # The tokenizer takes precedence over the preset.
    values = dict(sizes)
    if hasattr(tokenizer, "__len__"):  # image and audio processors do not have a vocabulary
        values["vocab_size"] = len(tokenizer)
    config = config_class(**(values | special_tokens(config_class, tokenizer)))
    set_start_tokens(config, config_class)
    return config


def special_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the special tokens of the tokenizer, with the names that a configuration uses.

    Args:
        config: A configuration or its class. Tokens for which it has no attribute are omitted.
        tokenizer: The tokenizer.

    Returns:
        The token IDs by attribute name, such as `pad_token_id`.
    """
    names = [f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep")]
    values = {name: getattr(tokenizer, name, None) for name in names if hasattr(config, name)}
    return {name: value for name, value in values.items() if value is not None}


def set_special_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, overrides: Mapping[str, Any]
) -> None:
    """Replaces the special tokens of a new model's configuration by those of the tokenizer.

    A token is not changed if its value in the configuration is `None`, or if the value is a list
    that contains the token of the tokenizer.

    Args:
        config: The configuration, which is modified.
        tokenizer: The tokenizer.
        overrides: The values of `--config_overrides`, which take precedence.
    """
    previous = copy.copy(config)
    changes = []
    for name, value in special_tokens(config, tokenizer).items():
        old = getattr(config, name)
        if name in overrides or old is None or value in (old if isinstance(old, list) else [old]):
            continue
        changes.append(f"{name} {value} instead of {old}")
        setattr(config, name, value)
    if changes:
        logger.info("the configuration uses the tokens of the tokenizer: %s", ", ".join(changes))
        set_start_tokens(config, previous, overrides)
    names = [name for name in config.to_dict() if name.endswith("_token_id")]
    outside = [
        f"{name} {value}"
        for name in names
        if isinstance(value := getattr(config, name), int) and value >= config.vocab_size
    ]
    if outside:
        logger.warning(
            "%s: not in the vocabulary of %d tokens. Set another token with --config_overrides",
            ", ".join(outside),
            config.vocab_size,
        )


def set_start_tokens(
    config: PreTrainedConfig, previous: Any, overrides: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Updates `decoder_start_token_id` and `forced_eos_token_id` after special tokens have changed.

    By default, these tokens are equal to other special tokens. For example,
    `decoder_start_token_id` is EOS in BART, BOS in Blenderbot and PAD in Marian. If such a token
    was equal to another special token before the change, it gets the new value of that token.

    Args:
        config: The configuration, which is modified.
        previous: The configuration before its special tokens changed, or the class with the
            defaults.
        overrides: The values of `--config_overrides`, which take precedence.
    """
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    roles = {getattr(previous, name, None): name for name in names}
    roles.pop(None, None)
    for name in {"decoder_start_token_id", "forced_eos_token_id"} - overrides.keys():
        if (token := getattr(config, name, None)) in roles:
            setattr(config, name, getattr(config, roles[token]))


def build_model(arguments: Arguments, config: PreTrainedConfig, task: str) -> FlaxPreTrainedModel:
    """Builds the model without parameters.

    Args:
        arguments: The flags.
        config: The configuration.
        task: The suffix of the class, e.g. "ForMaskedLM".

    Raises:
        UsageError: The architecture has no class for the task, or the checkpoint requires other
            flags.
    """
    flags, source = arguments.model, weights_source(arguments)
    spec = plugins.load().find_architecture(config.model_type, task, flags.bridge)
    head = spec.load_head(task)
    # Some options depend on the weights in the checkpoint, such as whether the head of T5 is tied.
    checkpoint_options = (
        head.read_checkpoint_options(source, config, **_hub_options(arguments)) if source else {}
    )
    adapter = lora.find_adapter(source, _hub_options(arguments)) if source else None
    if adapter is not None and arguments.training.do_train and not flags.use_peft:
        raise UsageError(
            f"{source} is an adapter: continue training it with --use_peft, or merge it first "
            "(hfseq convert --merge)"
        )
    precision = choose_precision(
        flags.recipe,
        flags.recipe_compute_dtype,
        flags.sites,
        amax_history_length=flags.fp8_amax_history_length,
        margin=flags.fp8_margin,
    )
    model = head(
        config,
        seed=arguments.training.seed,
        _do_init=False,
        precision=precision,
        scan_layers=flags.scan_layers,
        gradient_checkpointing=flags.gradient_checkpointing,
        attn_implementation=flags.attn_implementation,
        peft_config=lora_config(flags) if adapter is None else adapter.config,
        **checkpoint_options,
    )
    fp8.warn_if_narrow(model.precision, getattr(config, "hidden_size", None))
    if flags.gradient_checkpointing and not flags.scan_layers and platform() == "cpu":
        logger.warning(
            "--gradient_checkpointing saves little memory on a CPU without --scan_layers: XLA "
            "recomputes the layers too early"
        )
    # Fine-tuned models inherit the generation settings, such as suppressed tokens and max_length.
    if source:
        base, hub = base_model_of(source, _hub_options(arguments))
        model.load_generation_config(base, **hub)
        model.set_source(source, **_hub_options(arguments))
    return model


def lora_config(flags: ModelArguments) -> lora.LoraConfig | None:
    """Returns the LoRA configuration of the flags, or `None` without `--use_peft`."""
    if not flags.use_peft:
        return None
    targets: list[str] | str | None = flags.lora_target_modules
    if targets is not None and [target.lower() for target in targets] == ["all-linear"]:
        targets = "all-linear"
    return lora.LoraConfig(
        flags.lora_r,
        flags.lora_alpha,
        flags.lora_dropout,
        targets,
        target_parameters=flags.lora_target_parameters,
        modules_to_save=flags.lora_modules_to_save,
        use_rslora=flags.use_rslora,
        base_model_name_or_path=flags.model_name_or_path,
        revision=None if flags.model_revision == "main" else flags.model_revision,
    )


def base_model_of(source: str | None, hub: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the model whose configuration applies to `source`, and the Hub options for it.

    If `source` is an adapter, this is the base model of the adapter, otherwise `source` itself.
    """
    return lora.find_base(source, hub)[1:] if source else (source, dict(hub))


def check_packing(arguments: Arguments, objective: Objective, model: FlaxPreTrainedModel) -> None:
    """Checks that a bridged model can separate the documents in packed rows.

    Raises:
        UsageError: Tokens would attend to other documents in their row.
    """
    from hfseq.objectives.base import Objective

    data: Any = arguments.data
    reads_text = type(objective).make_rows is Objective.make_rows
    packs = reads_text and not data.line_by_line and not objective.cross_documents
    if arguments.model.bridge and packs and not model.accepts("segment_ids"):
        raise UsageError(
            f"--bridge: rows contain several documents, which {model.torch_class_name()} cannot "
            "separate, because not all of its layers use Transformers' attention masks and "
            "position_ids. Add --line_by_line for one document per row, or --cross_documents to "
            "treat a row as one document"
        )


def param_shapes(model: FlaxPreTrainedModel) -> dict[trees.Path, tuple[int, ...]]:
    """Returns the shapes of the parameters by path, without vocabulary padding."""
    return {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}


def shard_model(
    model: FlaxPreTrainedModel, mesh: Mesh, sequence_parallel: bool = False
) -> sharding.Layout:
    """Creates the sharding of a model on a mesh, and makes the model compute on that mesh.

    Args:
        model: The model.
        mesh: The device mesh.
        sequence_parallel: Whether hidden states are sharded along their length between layers.
    """
    shapes = param_shapes(model)
    layout = sharding.Layout(
        mesh, model.sharding_rules(), model.vocab_size(), tuple(model.stacked_prefixes), shapes
    )
    sharding.check_heads(model, mesh)
    model.use_mesh(mesh, layout.axes(shapes), sequence_parallel)
    return layout


def weights_source(arguments: Arguments) -> str | None:
    """Returns the directory or Hub ID of the weights, or `None` for a new initialization.

    By default, a run that does not train loads the weights from its output directory.
    """
    training = arguments.training
    return arguments.model.model_name_or_path or (
        None if training.do_train else training.output_dir
    )


def make_params(
    arguments: Arguments, model: FlaxPreTrainedModel, layout: sharding.Layout
) -> tuple[Tree, Tree]:
    """Loads or initializes the parameters and the collections with their sharding.

    No host has to hold the whole model. Files are read in slices, and the initialization is
    compiled with the shardings of its outputs.

    Returns:
        The parameters, and the model's non-parameter collections.
    """
    shardings = layout.shardings(param_shapes(model))
    source, seed = weights_source(arguments), arguments.training.seed
    dtype = arguments.model.param_dtype
    if source is None:

        def init(key: jax.Array) -> Tree:
            flat = trees.flatten(model.split_collections(model.init_weights(key))[0])
            return trees.unflatten({path: layout.pad(path, leaf) for path, leaf in flat.items()})

        key = jax.random.PRNGKey(seed)
        params = jax.jit(init, out_shardings=trees.unflatten(shardings))(key)
        extra = model.init_extra(key)
        return params if dtype == "float32" else trees.cast_floating(params, dtype), extra
    replicated = NamedSharding(layout.mesh, PartitionSpec())

    def sharding_for(path: trees.Path, shape: tuple[int, ...]) -> NamedSharding:
        return shardings[path] if layout.padded_shape(path, shape) == shape else replicated

    # Quantized weights are dequantized directly to the dtype of the parameters, so that they are
    # rounded only once.
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    loaded = type(model).from_pretrained(
        source,
        config=model.config,
        param_dtype=dtype if is_quantized else None,
        sharding=sharding_for,
        scan_layers=model.scan_layers,
        seed=seed,
        precision=model.precision,
        peft_config=model.peft_config,
        ignore_mismatched_sizes=getattr(arguments.data, "ignore_mismatched_sizes", False),
        **model.checkpoint_arguments,
        **_hub_options(arguments),
    )
    padded = {
        path: jax.device_put(layout.pad(path, leaf), shardings[path])
        for path, leaf in trees.flatten(loaded.split_collections(loaded.params)[0]).items()
    }
    padded |= {
        path: jax.device_put(value, shardings[path]) for path, value in model.module_weights.items()
    }
    extra = jax.device_put(model.add_module_buffers(loaded.extra), replicated)
    return trees.cast_floating(trees.unflatten(padded), dtype), extra


# -- the batch, and values that a resumed run keeps


def _record_collections(model: FlaxPreTrainedModel, progress: Progress, output_dir: str) -> None:
    """Records the sizes of the model's non-parameter collections in `progress`.

    Raises:
        UsageError: The sizes differ from those in the checkpoint from which the run is resumed.
    """

    def describe(sizes: Mapping[str, int]) -> str:
        counts = (f"{name} ({size} values)" for name, size in sizes.items())
        return ", ".join(counts) or "no collections"

    sizes = {
        name: sum(math.prod(leaf.shape) for leaf in trees.flatten(tree).values())
        for name, tree in model.extra_shape_tree.items()
    }
    recorded, precision = progress.collections, model.precision.name
    if recorded is not None and recorded["sizes"] != sizes:
        raise UsageError(
            f"the checkpoint of step {progress.step} was trained with --precision "
            f"{recorded['precision']} and contains {describe(recorded['sizes'])}. With --precision "
            f"{precision} and these flags it would contain {describe(sizes)}. Use the flags of "
            f"that run, or start a new one from its weights: --model_name_or_path "
            f"{output_dir} and a new --output_dir"
        )
    progress.collections = {"precision": precision, "sizes": sizes}


def plan_batch(
    arguments: Arguments,
    objective: Objective,
    model: FlaxPreTrainedModel,
    mesh: Mesh,
    progress: Progress,
) -> BatchPlan:
    """Determines the batch of a step.

    The global batch size is determined first. It is then divided among devices and micro-batches.
    A resumed run has the same windows as before. Unless `--global_batch_size` is set, it also has
    the same global batch size, on any number of devices.

    Raises:
        UsageError: The batch cannot be split over devices and micro-batches.
    """
    training, shards = arguments.training, sharding.data_shards(mesh)
    micro_batches, resumed_rows = training.gradient_accumulation_steps, progress.global_batch_size
    rows = (
        training.global_batch_size or training.per_device_train_batch_size * shards * micro_batches
    )
    if resumed_rows and rows != resumed_rows and training.global_batch_size is None:
        logger.warning(
            "resuming with the global batch size of the run, %d rows (the flags specify %d)",
            resumed_rows,
            rows,
        )
        rows = resumed_rows
    if rows % (shards * micro_batches):
        raise UsageError(
            f"the {rows} rows of a step cannot be split into {shards} data shards x "
            f"{micro_batches} micro-batches: set --global_batch_size to a multiple of "
            f"{shards * micro_batches}"
        )
    progress.global_batch_size = rows
    length = objective.choose_length(model.max_length())
    windows = plan_windows(arguments, objective, model, length)
    record_windows(windows, rows, progress)
    lengths = {"row": length, "target row": objective.target_length(length)}
    if windows:
        lengths["window"] = windows.length
    axes = ["sequence", *(["tensor"] if training.sequence_parallel else [])]
    divisor = math.prod(mesh.shape[name] for name in axes)
    for name, tokens in lengths.items():
        if tokens % divisor:
            flag = "--mesh " + ",".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            flag += " with --sequence_parallel" if training.sequence_parallel else ""
            raise UsageError(
                f"{flag} does not divide the {tokens} tokens of a {name}: use a length that "
                f"is a multiple of {divisor}, or another mesh"
            )
    return BatchPlan(rows, micro_batches, length, windows)


def plan_windows(
    arguments: Arguments, objective: Objective, model: FlaxPreTrainedModel, length: int
) -> Windows | None:
    """Determines how rows of `length` tokens are split into windows.

    Returns:
        The windows, or `None` if whole rows are trained.

    Raises:
        UsageError: The objective, the model or the data do not support `--update_length`.
    """
    training, data = arguments.training, arguments.data
    window, streams = training.update_length, training.state_reset == "never"
    if window is None or not training.do_train:
        return None

    def problems() -> Iterator[str]:
        if not objective.carries_state:
            yield (
                f"the objective '{objective.name}' requires whole rows. Only causal language "
                "modeling (run_clm_flax.py) can train in windows"
            )
        if not model.fixed_state:
            yield (
                f"'{model.config.model_type}' caches keys and values of all tokens, so it does not "
                "have a state of fixed size that can be carried from window to window. Use "
                "vq_transformer, or drop the flag"
            )
        try:
            jax.eval_shape(lambda: model.init_cache(1, 0))
        except UsageError as error:  # the configuration disables the state
            yield str(error)
        if has_arrays(data) and streams:
            yield (
                "`--state_reset never` requires continuous text, but images are independent rows. "
                "Drop --state_reset"
            )
        if length % window:
            divisors = [n for n in range(1, length + 1) if length % n == 0][-6:]
            yield (
                f"rows of {length} tokens cannot be divided into windows of this length: use a "
                f"divisor of the row length (such as {', '.join(map(str, divisors))}), or another "
                "--block_size"
            )
        if data.streaming:
            yield (
                "with --streaming, the next window of an earlier row cannot be read. Drop one of "
                "the two flags"
            )
        if data.line_by_line:
            yield "with --line_by_line, rows have different lengths. Drop one of the two flags"
        if not objective.cross_documents:
            yield (
                "the state is carried across the documents in a packed row. Add --cross_documents "
                "to treat the text as one stream"
            )

    for problem in problems():
        raise UsageError(f"--update_length {window}: {problem}")
    return Windows(window, length // window, streams)


def record_windows(windows: Windows | None, rows: int, progress: Progress) -> None:
    """Records how rows are split into windows, which must not change when a run is resumed.

    Raises:
        UsageError: The windows differ from those of the checkpoint.
    """

    def describe(windows: Mapping[str, int | str] | None) -> str:
        if windows is None:
            return "without --update_length"
        return "with " + " ".join(f"--{name} {value}" for name, value in windows.items())

    current = (
        None
        if windows is None
        else {
            "update_length": windows.length,
            "state_reset": "never" if windows.streams else "sequence",
            "block_size": windows.length * windows.count,
            "global_batch_size": rows,
        }
    )
    if progress.step and current != progress.windows:
        raise UsageError(
            f"the checkpoint of step {progress.step} was trained {describe(progress.windows)}, but "
            f"this run is started {describe(current)}: use the same flags, or another --output_dir"
        )
    progress.windows = current


# -- data


def _load_data(
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    batch: BatchPlan,
    shards: int,
) -> RunData:
    """Loads, tokenizes and packs the splits that the run needs."""
    data, training = arguments.data, arguments.training
    length, windows = objective.row_length(batch.length), batch.windows
    splits: Any = objective.load_splits(plugins.load())
    evaluates = training.do_eval or training.eval_strategy != "no"
    held_out = getattr(data, "validation_split_percentage", 0)
    no_validation = "drop --do_eval" if held_out else "set --validation_split_percentage above 0"
    if training.do_train and not held_out:
        no_validation += ", or train without evaluation (--do_train alone)"
    for split, needed, alternative in (
        ("train", training.do_train, "use only --do_eval"),
        ("validation", evaluates, no_validation),
        ("test", training.do_predict, "set --test_split_percentage, or drop --do_predict"),
    ):
        if needed and split not in splits:
            raise UsageError(f"the data has no {split} split: add --{split}_file, or {alternative}")
    source_description = getattr(splits, "description", {})
    description: dict[str, Any] = (
        {"name": source_description["name"]} if "name" in source_description else {}
    )

    def rows_of(split: str, length: int) -> Any:
        rows, description[split] = objective.make_rows(splits, split, length)
        return rows

    def evaluation_batches(split: str) -> Batches:
        size = training.per_device_eval_batch_size * shards
        return Batches(rows_of(split, length), size, training.seed, shuffle=False)

    train: Batches | StreamingBatches | None = None
    mixture = getattr(data, "mixture", ())
    if mixture and windows is not None:
        raise UsageError("--train_mixture does not support --update_length: drop one of them")
    if training.do_train and mixture:
        rows = rows_of("train", length)
        train, parts = _mixed_batches(objective, data, rows, length, batch.rows, training.seed)
        description["train"] = combine_statistics([description["train"], *parts])
    elif training.do_train and data.streaming:
        logger.info("train: streaming the column '%s'", splits.text_column)
        train = StreamingBatches(
            splits["train"],
            tokenizer,
            splits.text_column,
            length,
            batch.rows,
            training.seed,
            line_by_line=data.line_by_line,
            cross_documents=objective.cross_documents,
            keep_blank=data.keep_blank,
            append_eos=getattr(data, "append_eos", False),
        )
    elif training.do_train and windows is None:
        train = objective.make_batches(rows_of("train", length), batch.rows, training.seed)
    elif training.do_train and windows:
        if windows.streams:  # each row consists of one window
            train = ContinuousBatches(rows_of("train", windows.length), batch.rows, training.seed)
        else:
            rows = rows_of("train", length)
            train = WindowBatches(rows, batch.rows, training.seed, windows.count)
    evaluation = evaluation_batches("validation") if evaluates else None
    test = evaluation_batches("test") if training.do_predict and objective.evaluates_test else None
    if objective.row_guarantees is not None:
        batches = [
            split_batches
            for split_batches in (train, evaluation, test)
            if split_batches is not None
        ]
        bounds = [
            getattr(getattr(split_batches, "rows", None), "max_runs", None)
            for split_batches in batches
        ]
        known_bounds = [bound for bound in bounds if bound is not None]
        max_runs = max(known_bounds) if known_bounds and len(known_bounds) == len(bounds) else None
        objective.row_guarantees = dataclasses.replace(objective.row_guarantees, max_runs=max_runs)
    return RunData(train, evaluation, test, length, description)


def _mixed_batches(
    objective: Objective, data: Any, rows: Any, length: int, batch_rows: int, seed: int
) -> tuple[Batches, list[dict[str, Any]]]:
    """Returns the batches of a mixture, and the statistics of all datasets after the first.

    Args:
        objective: The objective of the run and of the first dataset.
        data: The data flags.
        rows: The rows of the first dataset.
        length: Tokens of text per row.
        batch_rows: Rows per batch, over all processes.
        seed: The random seed.
    """
    objectives, all_rows, statistics = [objective], [rows], []
    for number, (arguments, _) in enumerate(data.mixture):
        if not number:
            continue
        part = objective.part(arguments)
        splits: Any = part.load_splits(plugins.load())
        part_rows, part_statistics = part.make_rows(splits, "train", length)
        objective.add_part(number, part)
        objectives.append(part)
        all_rows.append(part_rows)
        statistics.append(part_statistics)
    weights = [weight for _, weight in data.mixture]
    strategy = data.multi_dataset_batch_sampler
    batches: Batches
    if objective.mixes_rows:
        batches = MixedRowBatches(MixedRows(all_rows), batch_rows, strategy, weights, seed)
        names: Any = "rows"
    else:
        parts = [
            part.make_batches(part_rows, batch_rows, seed)
            for part, part_rows in zip(objectives, all_rows, strict=True)
        ]
        batches, names = MixedBatches(parts, strategy, weights, seed), "batches"
    logger.info(
        "mixture of %d datasets (%s): %s %s per epoch",
        *(len(weights), strategy, ", ".join(map(str, batches.counts)), names),
    )
    return batches, statistics


def combine_statistics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the statistics of several datasets. Numbers with the same name are added."""
    combined = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            is_number = isinstance(value, int | float) and isinstance(
                combined.get(name), int | float
            )
            combined[name] = combined[name] + value if is_number else combined.get(name, value)
    return combined


def record_data(arguments: Arguments, data: RunData, progress: Progress) -> None:
    """Records the values that determine the order of the data.

    If a run is resumed with other values, a warning is logged, because some rows are then used
    twice or not at all.
    """
    counts = data.description.get("train", {})
    values: dict[str, Any] = {"--seed": arguments.training.seed, "row length": data.length}
    values |= {name: value for name, value in counts.items() if isinstance(value, int | str)}
    parts = [part for part, _ in getattr(arguments.data, "mixture", ())] or [arguments.data]
    values["source"] = ", ".join(
        part.dataset_name or ", ".join(Path(name).name for name in part.train_file or ())
        for part in parts
    )
    previous = progress.data or {}
    differences = [
        f"{name} ({previous[name]} before, {value} now)"
        for name, value in values.items()
        if name in previous and previous[name] != value
    ]
    if progress.step and differences:
        logger.warning(
            "resuming at step %d with different data or a different order: %s. Some rows are used "
            "twice or not at all",
            progress.step,
            ", ".join(differences),
        )
    progress.data = values


def check_best_metric(
    training: TrainingArguments,
    objective: Objective,
    model: FlaxPreTrainedModel,
    batches: Batches | None,
) -> None:
    """Checks that evaluations compute the metric of `--metric_for_best_model`.

    Args:
        training: The training flags.
        objective: The objective.
        model: The model.
        batches: The validation batches.

    Raises:
        UsageError: The metric is not computed, or it is not available because evaluations during
            training use a subset of the validation split.
    """
    if batches is None:
        return
    name = training.metric_for_best_model.removeprefix("eval_")
    evaluates_during_training = training.do_train and training.eval_strategy != "no"
    uses_subset = training.max_eval_batches is not None and training.max_eval_batches < len(batches)
    if name == "word_perplexity" and evaluates_during_training and uses_subset:
        raise UsageError(
            f"--metric_for_best_model word_perplexity is not available with --max_eval_batches "
            f"{training.max_eval_batches}, because the number of words is only known for all "
            f"{len(batches)} validation batches: drop --max_eval_batches, or use loss"
        )
    available = objective.reported_metrics("validation")
    if available is not None and name not in available and not model.statistics:
        raise UsageError(
            f"--metric_for_best_model {training.metric_for_best_model}: this metric is not "
            "computed. Available metrics: "
            f"{', '.join(f'eval_{metric}' for metric in sorted(available))}"
        )

"""A run, built from its flags: tokenizer, configuration, model, layout, rows, optimizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hfseq import plugins
from hfseq.checkpoints import config as config_files
from hfseq.data.arguments import has_arrays
from hfseq.data.batches import Batches, ContinuousBatches, WindowBatches
from hfseq.data.streaming import StreamingBatches
from hfseq.data.tokenizers import check_vocabulary
from hfseq.errors import CheckpointError, UsageError, first_line
from hfseq.modeling import lora
from hfseq.nn import fp8, sharding, trees
from hfseq.nn.context import platform
from hfseq.nn.precision import choose_precision
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

#: Steps of the schedule of a run that is only planned; its state is a counter in any case.
PLANNED_STEPS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Windows:
    """How rows are cut: ``count`` windows of ``length`` tokens; ``streams`` never reset."""

    length: int
    count: int
    streams: bool


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A step's batch: ``rows`` in all, in ``micro`` micro-batches of equal size.

    Of a row the model sees ``length`` tokens; with ``windows`` a step takes one window of it.
    """

    rows: int
    micro_batches: int
    length: int
    windows: Windows | None = None


@dataclasses.dataclass(frozen=True)
class RunData:
    """The rows of a run; ``None`` where a split is not needed.

    ``test`` are rows to judge: what an objective writes texts of, it reads itself. ``length`` is
    tokens of text a row.
    """

    train: Batches | StreamingBatches | None
    evaluation: Batches | None
    test: Batches | None
    length: int
    description: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """All of a run that never changes; what does is in a :class:`TrainState` and a ``Progress``.

    ``data`` is None where the run is only planned, and ``schedule`` where it only evaluates.
    ``frozen`` are parameters that the step uses and nothing trains or saves.
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
    frozen: Tree = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.layout.mesh

    @property
    def carry(self) -> Carry | None:
        """How what the model knows of earlier windows is carried, if it is."""
        windows = self.batch.windows
        if windows is None:
            return None
        return Carry(self.batch.rows, windows.count, tuple(self.model.stacked_prefixes))

    def initial_state(self, params: Tree, extra: Tree) -> TrainState:
        """Return the state of step 0; traced."""
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
        """Return the shapes, types and shardings of the state; nothing is computed."""
        return self._abstract_state

    def abstract_frozen(self) -> Tree:
        """Return the shapes, types and shardings of what is used and not trained."""
        trained = self.model.trainable_paths
        shapes = {p: shape for p, shape in param_shapes(self.model).items() if p not in trained}
        places = self.layout.shardings(shapes)
        frozen = trees.unflatten(
            {
                path: jax.ShapeDtypeStruct(
                    self.layout.padded_shape(path, shape),
                    self.arguments.model.param_dtype,
                    sharding=places[path],
                )
                for path, shape in shapes.items()
            }
        )
        kind = self.arguments.model.base_quantization
        return frozen if kind is None else self.model.quantize(frozen, kind)

    @functools.cached_property
    def _abstract_state(self) -> TrainState:
        trained, dtype = self.model.trainable_paths, trained_dtype(self.arguments)
        shapes = {p: shape for p, shape in param_shapes(self.model).items() if p in trained}
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
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        )

    def step_function(self, calibrate: bool = False) -> jax.stages.Wrapped:
        """Return ``step(state, frozen, batch)``, jitted with the run's shardings.

        The state is donated. With ``calibrate`` it measures FP8 scales and trains nothing.
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
        """The jitted ``evaluate(params, frozen, extra, batch) -> sums``."""
        return jax.jit(
            state.make_eval_step(self.objective, self.model),
            out_shardings=NamedSharding(self.mesh, PartitionSpec()),  # every process reads it all
        )

    @functools.cached_property
    def read_extra_metrics(self) -> Callable[[Tree], dict[str, jax.Array]]:
        """The jitted numbers that the model reports of its collections."""
        return jax.jit(self.model.extra_metrics)


def build_run(
    arguments: Arguments,
    objective: str,
    output: Path,
    progress: Progress,
    devices: Sequence[jax.Device] | AbstractMesh | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: PreTrainedConfig | None = None,
    with_data: bool = True,
) -> Run:
    """Build the run that the flags ask for, to leave its model in ``output``.

    ``progress`` is that of the checkpoint to go on from: a resumed run keeps its batch, its windows
    and its collections, and these are recorded there. ``devices`` are all by default; a run that is
    planned takes devices that are only described, a made-up ``tokenizer`` and ``config``, no data.
    What does not fit together of flags, model, data and mesh is a ``UsageError``.
    """
    training = arguments.training
    if isinstance(devices, AbstractMesh):
        mesh: Any = devices
    else:
        mesh = sharding.make_mesh(training.mesh, devices)
        processes.open_connections(mesh)
    kind = plugins.load().objectives.get(objective)
    if training.do_predict and not kind.supports_predict:
        raise UsageError(
            f"--do_predict: '{objective}' training has no test split to judge; clm (its loss) has "
            "it, and what classifies, tags, answers, translates or summarises"
        )
    if tokenizer is None:
        with processes.main_process_first():  # it may have to be made
            tokenizer = load_tokenizer(arguments, kind, output)
    if config is None:
        if arguments.model.use_peft and not arguments.model.model_name_or_path:
            raise UsageError("--use_peft adapts a trained model: give --model_name_or_path")
        config = load_config(arguments, tokenizer, kind)
    model = build_model(arguments, config, kind.auto_class)
    trained = kind(arguments.data, tokenizer, config)
    layout = shard_model(model, mesh, training.sequence_parallel)
    trained.prepare(model)
    if training.do_train:
        _keep_collections(model, progress, training.output_dir)
    batch = plan_batch(arguments, trained, model, mesh, progress)
    data = None
    if with_data:
        if training.do_train:
            windows = batch.windows
            model.check_training(batch.rows * (windows.length if windows else batch.length))
        data = _load_data(arguments, tokenizer, trained, batch, sharding.data_shards(mesh))
        facts = {"data": data.description, "step to go on from": progress.step or None}
        processes.check_agreement(facts, "give all of them the same files")
        check_best_metric(training, trained, model, data.evaluation)
    total, schedule, optimizer = 0, None, optax.identity()  # enough for an evaluation
    if training.do_train:
        if training.max_steps > 0:
            total = training.max_steps
        elif data is None:
            total = PLANNED_STEPS
        elif isinstance(data.train, Batches):
            total = max(1, round(len(data.train) * training.num_train_epochs))
        else:
            raise UsageError("--streaming needs --max_steps: the length of a stream is not known")
        schedule = make_schedule(training, total, getattr(config, "hidden_size", None))
        factory = plugins.load().optimizers.get(training.optim)
        optimizer = make_optimizer(factory, training, schedule, model.stacked_prefixes)
    return Run(
        arguments,
        trained,
        model,
        tokenizer,
        layout,
        data,
        batch,
        optimizer,
        schedule,
        total,
        output,
    )


def restore_or_initialize(
    run: Run, checkpointer: Checkpointer, progress: Progress
) -> tuple[Run, TrainState]:
    """Return the run with what it only uses, and the state to go on from.

    The state is restored, or initialised where it lies; parameters and moments never lie whole on
    one host.
    """
    abstract = run.abstract_state()
    params: Tree = {}
    extra: Tree = {}
    if not progress.step or run.model.peft_config is not None:
        params, extra = make_params(run.arguments, run.model, run.layout)
    if run.model.peft_config is not None:
        flat, trained = trees.flatten(params), run.model.trainable_paths
        own = {path: leaf for path, leaf in flat.items() if path in trained}
        sizes = [sum(leaf.size for leaf in part.values()) for part in (own, flat)]
        logger.info("%d of %d parameters are trained (%.3g %%)", *sizes, 100 * sizes[0] / sizes[1])
        params = trees.cast_floating(trees.unflatten(own), trained_dtype(run.arguments))
        frozen = trees.unflatten({p: flat.pop(p) for p in list(flat) if p not in trained})
        if (kind := run.arguments.model.base_quantization) is not None:
            frozen = run.model.quantize(frozen, kind)
        run = dataclasses.replace(run, frozen=frozen)
    if progress.step:
        restored = checkpointer.restore(progress.step, abstract)
        output_dir = run.arguments.training.output_dir
        logger.info("resumed from step %d of %s", progress.step, output_dir)
        return run, restored
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    start = jax.jit(run.initial_state, out_shardings=shardings, donate_argnums=0)
    return run, start(params, extra)


def trained_dtype(arguments: Arguments) -> str:
    """Return the type of what is trained: of adapters float32, whatever their base has."""
    return "float32" if arguments.model.use_peft else arguments.model.param_dtype


# -- tokenizer, configuration, model


def _hub_options(arguments: Arguments) -> dict[str, Any]:
    model = arguments.model
    options = {"cache_dir": model.cache_dir, "revision": model.model_revision}
    return {name: value for name, value in options.items() if value is not None}


def load_tokenizer(
    arguments: Arguments, objective: type[Objective], folder: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the flags name, or have the objective make one in ``folder``.

    For an objective that reads no text it is the processor of its pictures or sound.
    """
    from transformers import AutoTokenizer

    model = arguments.model
    name = model.tokenizer_name or model.model_name_or_path
    made = objective.load_processor(
        name or weights_source(arguments), arguments.data, **_hub_options(arguments)
    )
    if made is not None:
        return made
    if not name:
        made = objective.make_tokenizer(arguments.data, folder, plugins.load())
        if made is not None:
            return made
        raise UsageError(
            "no tokenizer: give --tokenizer_name (a directory or Hub name), or train one with "
            "scripts/train_tokenizer.py"
        )
    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=model.trust_remote_code, **_hub_options(arguments)
        )
    except Exception as error:  # the Rust reader of tokenizer.json raises nothing more exact
        raise CheckpointError(
            f"cannot load the tokenizer '{name}' ({first_line(error)}): give a directory that "
            "holds tokenizer.json, or a name on the Hub"
        ) from error


def load_config(
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase, objective: type[Objective]
) -> PreTrainedConfig:
    """Load or make the configuration, apply ``--config_overrides`` and check the vocabulary.

    The objective may have a default model type, and adapt the configuration (and the tokenizer).
    """
    plugins.register_auto_classes()
    model, hub = arguments.model, _hub_options(arguments)
    source = weights_source(arguments)
    base = base_model_of(source, hub)
    # What is only judged and names no model may be an adapter, which names its base.
    name = model.config_name or (base if base != source else model.model_name_or_path)
    if name:
        config = config_files.auto_config(name, model.trust_remote_code, **hub)
        if model.model_type and model.model_type != config.model_type:
            raise UsageError(
                f"--model_type {model.model_type} and the configuration of {name} "
                f"('{config.model_type}') disagree: drop one of them"
            )
        if model.preset:
            raise UsageError(
                f"--preset {model.preset} is a size for training from scratch, and {name} has one "
                "already: drop one of them"
            )
    elif model_type := model.model_type or objective.default_model_type:
        config = new_config(model_type, tokenizer, model.preset)
    else:
        raise UsageError("no model: give --model_name_or_path, --config_name or --model_type")
    if model.config_overrides:
        config_files.apply_overrides(config, config_files.parse_overrides(model.config_overrides))
    objective.configure(config, tokenizer, weights_source(arguments) is None)
    objective.configure_data(config, arguments.data, plugins.load())
    if hasattr(tokenizer, "get_vocab"):  # not what makes inputs of pictures or sound
        both = hasattr(config, "encoder") and hasattr(config, "decoder")
        for part in (config.encoder, config.decoder) if both else (config,):
            check_vocabulary(tokenizer, part)
    return config


def new_config(
    model_type: str, tokenizer: PreTrainedTokenizerBase, preset: str | None
) -> PreTrainedConfig:
    """Make a configuration with the tokenizer's vocabulary and special tokens."""
    kind = plugins.load().architectures.get(model_type).load_config()
    sizes = config_files.preset_values(kind, preset, model_type)
    # The tokenizer knows its size and its special tokens better than a preset.
    values = dict(sizes)
    if hasattr(tokenizer, "__len__"):  # what prepares pictures or sound has no vocabulary
        values["vocab_size"] = len(tokenizer)
    for role in ("pad", "bos", "eos", "cls", "sep"):
        name = f"{role}_token_id"
        token = getattr(tokenizer, name, None) if hasattr(kind, name) else None
        if token is not None:
            values[name] = token
    config = kind(**values)
    # BART starts with its end of text, Blenderbot with its beginning.
    roles = {getattr(kind, role, None): role for role in ("bos_token_id", "eos_token_id")}
    roles.pop(None, None)
    for name in ("decoder_start_token_id", "forced_eos_token_id"):
        if (default := getattr(config, name, None)) in roles:
            setattr(config, name, getattr(config, roles[default]))
    return config


def build_model(arguments: Arguments, config: PreTrainedConfig, task: str) -> FlaxPreTrainedModel:
    """Build the structure of the model (no parameters yet)."""
    spec = plugins.load().architectures.get(config.model_type)
    if task not in spec.heads:
        raise UsageError(
            f"architecture '{config.model_type}' has no class {task} "
            f"(it has {', '.join(spec.heads)})"
        )
    flags, head, source = arguments.model, spec.load_head(task), weights_source(arguments)
    # The checkpoint may decide about the structure (T5: is the head tied?).
    told = head.read_checkpoint_options(source, **_hub_options(arguments)) if source else {}
    adapter = lora.find_adapter(source, _hub_options(arguments)) if source else None
    if adapter is not None and arguments.training.do_train and not flags.use_peft:
        raise UsageError(
            f"{source} is an adapter: go on with it by --use_peft, or merge it first "
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
        **told,
    )
    fp8.warn_if_narrow(model.precision, getattr(config, "hidden_size", None))
    if flags.gradient_checkpointing and not flags.scan_layers and platform() == "cpu":
        logger.warning(
            "--gradient_checkpointing saves little memory on a CPU unless layers are scanned: XLA "
            "computes them again before it needs them; add --scan_layers"
        )
    if source:  # what a fine-tuned model inherits: tokens it must not write, its longest output
        place = source if adapter is None else adapter.base
        model.load_generation_config(place, **_hub_options(arguments))
    return model


def lora_config(flags: ModelArguments) -> lora.LoraConfig | None:
    """Return the adapters that the flags ask for, if they do."""
    if not flags.use_peft:
        return None
    targets: list[str] | str | None = flags.lora_target_modules
    if targets is not None and [one.lower() for one in targets] == ["all-linear"]:
        targets = "all-linear"
    return lora.LoraConfig(
        flags.lora_r,
        flags.lora_alpha,
        flags.lora_dropout,
        targets,
        modules_to_save=flags.lora_modules_to_save,
        use_rslora=flags.use_rslora,
        base_model_name_or_path=flags.model_name_or_path,
    )


def base_model_of(source: str | None, hub: Mapping[str, Any]) -> Any:
    """Return where the model is that the adapter at ``source`` was made for, else ``source``."""
    adapter = lora.find_adapter(source, hub) if source else None
    return source if adapter is None else adapter.base


def param_shapes(model: FlaxPreTrainedModel) -> dict[trees.Path, tuple[int, ...]]:
    """Return the shapes of the parameters by path, without padding."""
    return {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}


def shard_model(
    model: FlaxPreTrainedModel, mesh: Mesh, sequence_parallel: bool = False
) -> sharding.Layout:
    """Pair the architecture's sharding rules with the mesh, and have the model compute on it."""
    layout = sharding.Layout(
        mesh, model.sharding_rules(), model.vocab_size(), tuple(model.stacked_prefixes)
    )
    sharding.check_heads(model, mesh)
    model.use_mesh(mesh, layout.axes(param_shapes(model)), sequence_parallel)
    return layout


def weights_source(arguments: Arguments) -> str | None:
    """Return where the weights come from; evaluation alone falls back on the output directory."""
    training = arguments.training
    return arguments.model.model_name_or_path or (
        None if training.do_train else training.output_dir
    )


def make_params(
    arguments: Arguments, model: FlaxPreTrainedModel, layout: sharding.Layout
) -> tuple[Tree, Tree]:
    """Load or initialise the parameters where they belong, and the collections beside them.

    No host holds a whole model: files are read by slices, and a fresh initialisation is compiled
    with its output shardings.
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

    def where(path: trees.Path, shape: tuple[int, ...]) -> NamedSharding:
        return shardings[path] if layout.padded_shape(path, shape) == shape else replicated

    loaded = type(model).from_pretrained(
        source,
        config=model.config,
        sharding=where,
        scan_layers=model.scan_layers,
        seed=seed,
        precision=model.precision,
        peft_config=model.peft_config,
        ignore_mismatched_sizes=getattr(arguments.data, "ignore_mismatched_sizes", False),
        **_hub_options(arguments),
    )
    padded = {
        path: jax.device_put(layout.pad(path, leaf), shardings[path])
        for path, leaf in trees.flatten(loaded.part(loaded.params)[0]).items()
    }
    extra = jax.device_put(loaded.extra, replicated)
    return trees.cast_floating(trees.unflatten(padded), dtype), extra


# -- the batch, and what a resumed run keeps


def _keep_collections(model: FlaxPreTrainedModel, progress: Progress, output_dir: str) -> None:
    """Record what the state holds beside parameters, which a run cannot change on its way."""

    def listed(sizes: Mapping[str, int]) -> str:
        counts = (f"{name} ({size} numbers)" for name, size in sizes.items())
        return ", ".join(counts) or "no collections"

    sizes = {
        name: sum(math.prod(leaf.shape) for leaf in trees.flatten(tree).values())
        for name, tree in model.extra_shape_tree.items()
    }
    before, precision = progress.collections, model.precision.name
    if before is not None and before["sizes"] != sizes:
        raise UsageError(
            f"the checkpoint of step {progress.step} was trained with --precision "
            f"{before['precision']} and holds {listed(before['sizes'])}; with --precision "
            f"{precision} and these flags it would hold {listed(sizes)}. Give the flags of "
            f"the run; or begin another with its weights: --model_name_or_path "
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
    """Return the batch of a step; a resumed run keeps its rows, on any devices, and its windows.

    The global batch is fixed first, and cut per process afterwards.
    """
    training, shards = arguments.training, sharding.data_shards(mesh)
    micro, kept = training.gradient_accumulation_steps, progress.global_batch_size
    rows = training.global_batch_size or training.per_device_train_batch_size * shards * micro
    if kept and rows != kept and training.global_batch_size is None:
        logger.warning(
            "going on with the run's %d rows a step (the flags alone would give %d)", kept, rows
        )
        rows = kept
    if rows % (shards * micro):
        raise UsageError(
            f"a step has {rows} rows, which do not divide by {shards} data shards x {micro} "
            f"micro-batches: give --global_batch_size a multiple of {shards * micro}"
        )
    progress.global_batch_size = rows
    length = objective.choose_length(model.max_length())
    windows = plan_windows(arguments, objective, model, length)
    record_windows(windows, rows, progress)
    lengths = {"row": length, "target row": objective.target_length(length)}
    if windows:
        lengths["window"] = windows.length
    axes = ["sequence", *(["tensor"] if training.sequence_parallel else [])]
    ways = math.prod(mesh.shape[name] for name in axes)
    for name, tokens in lengths.items():
        if tokens % ways:
            flag = "--mesh " + ",".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            flag += " with --sequence_parallel" if training.sequence_parallel else ""
            raise UsageError(
                f"{flag} does not divide the {tokens} tokens of a {name}: give a length that "
                f"is a multiple of {ways}, or another mesh"
            )
    return BatchPlan(rows, micro, length, windows)


def plan_windows(
    arguments: Arguments, objective: Objective, model: FlaxPreTrainedModel, length: int
) -> Windows | None:
    """Return how rows of ``length`` tokens are cut, or None where a row is one step."""
    training, data = arguments.training, arguments.data
    window, streams = training.update_length, training.state_reset == "never"
    if window is None or not training.do_train:
        return None

    def problems() -> Iterator[str]:
        if not objective.carries_state:
            yield (
                f"'{objective.name}' needs a row as a whole; only causal language modelling "
                "(run_clm_flax.py) trains it window by window"
            )
        if not model.fixed_state:
            yield (
                f"'{model.config.model_type}' keeps keys and values of every token it has seen, so "
                "there is no state of fixed size to carry; vq_transformer has one. Drop the flag"
            )
        try:
            jax.eval_shape(lambda: model.init_cache(1, 0))
        except UsageError as error:  # an option of the configuration leaves it without a state
            yield str(error)
        if has_arrays(data) and streams:
            yield (
                "--state_reset never needs one text to read on in, and images are rows of their "
                "own; drop --state_reset"
            )
        if length % window:
            divisors = [n for n in range(1, length + 1) if length % n == 0][-6:]
            yield (
                f"rows of {length} tokens are not whole windows: give a divisor of the row length "
                f"(such as {', '.join(map(str, divisors))}), or another --block_size"
            )
        if data.streaming:
            yield "--streaming has no row to go back to for its next window; drop one of the two"
        if data.line_by_line:
            yield "--line_by_line makes rows of different lengths; drop one of the two"
        if not objective.cross_documents:
            yield (
                "documents that share a row cannot be kept apart by a state that is carried on; "
                "add --cross_documents (the text is one stream)"
            )

    for problem in problems():
        raise UsageError(f"--update_length {window}: {problem}")
    return Windows(window, length // window, streams)


def record_windows(windows: Windows | None, rows: int, progress: Progress) -> None:
    """Record how rows are cut into windows; the state in a checkpoint belongs to that cut."""

    def told(windows: Mapping[str, int | str] | None) -> str:
        if windows is None:
            return "without --update_length"
        return "with " + " ".join(f"--{name} {value}" for name, value in windows.items())

    now = (
        None
        if windows is None
        else {
            "update_length": windows.length,
            "state_reset": "never" if windows.streams else "sequence",
            "block_size": windows.length * windows.count,
            "global_batch_size": rows,
        }
    )
    if progress.step and now != progress.windows:
        raise UsageError(
            f"the checkpoint of step {progress.step} was trained {told(progress.windows)}, "
            f"and the flags say {told(now)}: give the same flags, or another --output_dir"
        )
    progress.windows = now


# -- data


def _load_data(
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    batch: BatchPlan,
    shards: int,
) -> RunData:
    """Load, tokenise and pack the splits that the run needs."""
    data, training = arguments.data, arguments.training
    length, windows = objective.row_length(batch.length), batch.windows
    splits: Any = objective.load_splits(plugins.load())
    evaluates = training.do_eval or training.eval_strategy != "no"
    for split, wanted, instead in (
        ("train", training.do_train, "only --do_eval"),
        ("validation", evaluates, "drop --do_eval"),
        ("test", training.do_predict, "--test_split_percentage, or drop --do_predict"),
    ):
        if wanted and split not in splits:
            raise UsageError(f"the data has no {split} split: give --{split}_file, or {instead}")
    known = getattr(splits, "description", {})
    description: dict[str, Any] = {"name": known["name"]} if "name" in known else {}

    def rows_of(split: str, length: int) -> Any:
        rows, description[split] = objective.make_rows(splits, split, length)
        return rows

    def judged(split: str) -> Batches:
        size = training.per_device_eval_batch_size * shards
        return Batches(rows_of(split, length), size, training.seed, shuffle=False)

    train: Batches | StreamingBatches | None = None
    if training.do_train and data.streaming:
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
        train = Batches(rows_of("train", length), batch.rows, training.seed)
    elif training.do_train and windows:
        if windows.streams:  # a batch is a window of its rows
            train = ContinuousBatches(rows_of("train", windows.length), batch.rows, training.seed)
        else:
            rows = rows_of("train", length)
            train = WindowBatches(rows, batch.rows, training.seed, windows.count)
    evaluation = judged("validation") if evaluates else None
    test = judged("test") if training.do_predict and objective.evaluates_test else None
    if objective.row_layout is not None:
        batches = [one for one in (train, evaluation, test) if one is not None]
        bounds = [getattr(getattr(one, "rows", None), "max_runs", None) for one in batches]
        counted = [bound for bound in bounds if bound is not None]
        most = max(counted) if counted and len(counted) == len(bounds) else None
        objective.row_layout = dataclasses.replace(objective.row_layout, max_runs=most)
    return RunData(train, evaluation, test, length, description)


def check_best_metric(
    training: TrainingArguments,
    objective: Objective,
    model: FlaxPreTrainedModel,
    batches: Batches | None,
) -> None:
    """Refuse to choose by a number that there is not, or not in evaluations of a part.

    ``batches`` are those of the validation split.
    """
    if batches is None:
        return
    name = training.metric_for_best_model.removeprefix("eval_")
    during = training.do_train and training.eval_strategy != "no"
    part = training.max_eval_batches is not None and training.max_eval_batches < len(batches)
    if name == "word_perplexity" and during and part:
        raise UsageError(
            f"--max_eval_batches {training.max_eval_batches} reads a part of the {len(batches)} "
            "validation batches, whose words are not known, so --metric_for_best_model "
            "word_perplexity has no number: drop --max_eval_batches, or choose by loss"
        )
    known = objective.reported_metrics("validation")
    if known is not None and name not in known and not model.statistics:
        raise UsageError(
            f"--metric_for_best_model {training.metric_for_best_model}: there is only "
            f"{', '.join(f'eval_{metric}' for metric in sorted(known))}"
        )

"""Computes a plan: memory, communication, the largest batch and the time of a step."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from hfseq.checkpoints.config import wrap_build_errors
from hfseq.cli.plan import step_compiler
from hfseq.cli.plan.options import Options
from hfseq.cli.plan.run import (
    abstract_batch,
    abstract_mesh,
    build,
    record_attention_choices,
    rows_per_shard,
)
from hfseq.nn import trees
from hfseq.nn.qwix import is_quantized
from hfseq.nn.random import batch_keys
from hfseq.nn.sharding import AXES
from hfseq.training import aot, throughput
from hfseq.training.hardware import Accelerator
from hfseq.training.setup import Run, param_shapes
from hfseq.training.state import AUXILIARY, Batch, Tree, join_frozen, with_auxiliary


class ActivationBytes(NamedTuple):
    """Bytes of activations that are stored for the backward pass.

    Attributes:
        fixed: Bytes that do not depend on the number of rows.
        row: Bytes per row of a micro-batch.
    """

    fixed: float
    row: float

    def total(self, rows: int) -> float:
        """Returns the bytes for a micro-batch of ``rows`` rows."""
        return self.fixed + self.row * rows


def trace_activations(options: Options, remat: bool) -> ActivationBytes:
    """Returns the bytes of activations without sharding, according to a trace of the model.

    Activations are all values that the backward pass reads from the forward pass, except parameters
    and the batch. The layers are traced as a scan over one layer, because the trace of unrolled
    layers contains copies that XLA merges.

    The ``data`` and ``fsdp`` mesh axes do not change the bytes per row. The ``sequence`` axis
    divides them, and the ``tensor`` axis divides some of them.

    Args:
        options: The options of the plan.
        remat: Whether layers are recomputed in the backward pass.
    """
    run = build(options, abstract_mesh("data=1", 1), scan_layers=True, gradient_checkpointing=remat)
    with wrap_build_errors(options.config):
        one_row, two_rows = (activation_bytes(run, rows) for rows in (1, 2))
    return ActivationBytes(max(2 * one_row - two_rows, 0), two_rows - one_row)


def activation_bytes(run: Run, rows: int) -> int:
    """Returns the bytes of activations for a batch of ``rows`` rows on one device."""
    state = run.abstract_state()
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for name, leaf in abstract_batch(run, rows).items()
    }

    def backward(params: Tree, frozen: Tree, extra: Tree, batch: Batch) -> Any:
        inputs, root = with_auxiliary(batch, frozen), jax.random.key(0)
        keys: Any = batch_keys(root, inputs.pop("row"), root)
        if run.objective.uses_step_totals:
            all_params = join_frozen(params, frozen)
            inputs["step_totals"] = run.objective.step_totals(run.model, all_params, inputs, extra)

        def loss(params: Tree) -> jax.Array:
            all_params = join_frozen(params, frozen)
            return run.objective.loss(run.model, all_params, inputs, keys, True, extra=extra)[0]

        return jax.vjp(loss, params)[1]

    frozen = run.abstract_frozen()
    jaxpr = jax.make_jaxpr(backward)(state.params, frozen, state.extra, batch).jaxpr
    inputs = set(jaxpr.invars)
    residuals = {var for var in jaxpr.outvars if not isinstance(var, Literal) and var not in inputs}
    return sum(int(var.aval.size * getattr(var.aval.dtype, "itemsize", 4)) for var in residuals)


def exchange_by_rules(run: Run) -> list[dict[str, Any]]:
    """Returns the collectives of a step that the sharding rules require.

    For each mesh axis, these are:

    - ``data``: gradients are all-reduced once per micro-batch.
    - ``fsdp``: sharded kernels and embedding matrices are all-gathered for the forward pass, and
      again for the backward pass if layers are recomputed. Their gradients are reduce-scattered.
    - ``tensor``: hidden states are all-reduced in both passes of each linear layer whose kernel is
      sharded along its input features, and in the forward pass of a sharded embedding.

    Returns:
        The collectives in the format of :func:`hfseq.cli.plan.step_compiler.compile_step`, the
        largest first. Their bytes are the sizes of the results per device.
    """
    mesh, micro_batches = run.mesh.shape, run.batch.micro_batches
    shapes, trained = param_shapes(run.model), run.model.trainable_paths
    itemsize = _itemsize(run.arguments.model.param_dtype)
    quantized_itemsizes = {
        path: _itemsize(leaf.qvalue.dtype)
        for path, leaf in trees.flatten(run.abstract_frozen()).items()
        if is_quantized(leaf)
    }
    num_gathers = 2 if run.arguments.model.gradient_checkpointing else 1
    tokens = rows_per_shard(run) * run.batch.length / mesh["sequence"]
    hidden_bytes = tokens * _token_bytes(run)
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], count: float, num_bytes: float) -> None:
        if count and any(mesh[axis] > 1 for axis in axes):
            total = totals.setdefault((kind, axes), [0, 0])
            total[0] += count * micro_batches
            total[1] += num_bytes * count * micro_batches

    for path, sharding in run.layout.shardings(shapes).items():
        shape = run.layout.padded_shape(path, shapes[path])
        num_elements = math.prod(sharding.shard_shape(shape))
        shard_bytes = num_elements * quantized_itemsizes.get(path, itemsize)
        num_gradients = int(path in trained)
        axes = [(entry,) if isinstance(entry, str) else entry or () for entry in sharding.spec]
        split_axes = {axis for axis in itertools.chain.from_iterable(axes) if mesh[axis] > 1}
        add("all-reduce", ("data",), num_gradients, shard_bytes)
        if "fsdp" in split_axes:
            add("all-gather", ("fsdp",), num_gathers, shard_bytes * mesh["fsdp"])
            add("reduce-scatter", ("fsdp",), num_gradients, shard_bytes)
        else:
            add("all-reduce", ("fsdp",), num_gradients, shard_bytes)
        tactic = run.layout.tactic(path)
        if tactic in ("row", "embedding") and "tensor" in split_axes:
            is_stacked = len(shape) > len(run.layout.layer_shape(path, shape))
            layers = shape[0] if is_stacked else 1
            passes = 2 if tactic == "row" else 1
            add("all-reduce", ("tensor",), passes * layers, hidden_bytes)
    return [
        {"kind": kind, "axes": list(axes), "count": round(count), "bytes": round(num_bytes)}
        for (kind, axes), (count, num_bytes) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def _token_bytes(run: Run) -> float:
    """Returns the size of the hidden state of one token in bytes."""
    config = run.model.config
    width: float = getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0)
    return width * _itemsize(run.model.precision.compute_dtype)


def wire_seconds(
    collective: dict[str, Any],
    mesh: Mapping[str, int],
    device: Accelerator,
    network: float | None = None,
) -> float | None:
    """Returns the transfer time of a collective: the minimum time on the links between devices.

    The estimate assumes ring algorithms on n devices. In all-gather and all-to-all, each device
    sends (n - 1)/n of the bytes of the result. In all-reduce, each device sends twice as much.
    Devices are ordered as in the mesh, whose last axis, ``sequence``, varies fastest. If a group of
    devices spans several machines, the estimate uses the bandwidth of the network. Otherwise it
    uses the bandwidth of the links between the devices of a machine.

    Args:
        collective: Entry with ``kind``, ``axes`` and ``bytes`` (size of the results per device).
        mesh: Size of each mesh axis.
        device: The accelerator.
        network: Network bandwidth per device in bytes per second. Default:
            ``device.network_bandwidth``.

    Returns:
        Seconds, or `None` if the bandwidth is unknown.
    """
    kind, axes, num_bytes = collective["kind"], collective["axes"], collective["bytes"]
    group_size = math.prod(mesh[axis] for axis in axes)
    if group_size == 1 or not num_bytes:
        return 0.0
    # The bytes that a device sends, relative to the bytes of the result per device. The result of
    # all-reduce is the whole sum, and the result of reduce-scatter is only a part of the sum.
    sent_shares = {
        "all-reduce": 2 * (group_size - 1) / group_size,
        "reduce-scatter": group_size - 1.0,
        "collective-permute": 1.0,
    }
    sent = num_bytes * sent_shares.get(kind, (group_size - 1) / group_size)
    span = math.prod(mesh[axis] for axis in AXES[AXES.index(axes[0]) :])
    spans_machines = bool(device.devices_per_machine) and span > device.devices_per_machine
    network_bandwidth = network or device.network_bandwidth
    bandwidth = network_bandwidth if spans_machines else device.link_bandwidth
    return sent / bandwidth if bandwidth else None


def _itemsize(dtype: DTypeLike | None) -> float:
    """Returns the bytes of a value on an accelerator, where two 4-bit values share a byte."""
    dtype = jnp.dtype(dtype or jnp.float32)
    return 0.5 if dtype in (jnp.uint4, jnp.int4) else dtype.itemsize


def make_plan(options: Options) -> dict[str, Any]:
    """Computes the plan of a training run.

    Args:
        options: The options of the plan.

    Returns:
        The plan as plain values in bytes, FLOPs and seconds, as ``hfseq plan --json`` prints it.

    Raises:
        UsageError: The devices or the model are unknown, or the training script would also reject
            these flags.
    """
    target = aot.device_stub(options.accelerator.name)
    with aot.compiling_for(target):
        run = build(options, abstract_mesh(options.mesh, options.count))
    plan: dict[str, Any] = {
        "run": _run_summary(run),
        "devices": _device_summary(options, run),
        "bytes": _bytes(run),
    }
    programs = _compile(options, run)
    activations: dict[bool, ActivationBytes] = {}
    if not programs.problem:
        choices = programs.results[0]["attention"]
    else:  # without compiled programs, memory and attention come from traces
        with aot.compiling_for(target):
            activations = {remat: trace_activations(options, remat) for remat in (False, True)}
            choices = _trace_attention(options, run)
    plan["attention"] = choices
    names = dict.fromkeys(choice["name"] for choice in choices)
    attention = ", ".join(names) or run.arguments.model.attn_implementation or "none"
    plan["run"]["attention"] = attention
    plan["activations"] = {
        name: round(activations[remat].total(rows_per_shard(run)) / run.mesh.shape["sequence"])
        for name, remat in (("kept", False), ("recomputed", True))
        if activations
    }
    plan["compiled"] = {
        "compiler": programs.compiler,
        "real": programs.is_accelerator,
        "programs": programs.results,
        "problem": programs.problem,
        "passed_over": programs.skip_reason,
    }
    plan["fit"] = _fit(plan, activations, run)
    plan["exchange"] = _exchange(options, run, programs)
    measured = programs.is_accelerator and plan["exchange"]["compiled"]
    plan["time"] = _time(options, run, plan["exchange"]["compiled" if measured else "rules"])
    return plan


def _run_summary(run: Run) -> dict[str, Any]:
    """Returns the entry ``run`` of a plan, which describes the model and a step."""
    model, arguments = run.model, run.arguments
    return {
        "model_type": model.config.model_type,
        "objective": run.objective.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params)),
        "length": run.batch.length,
        "target_length": run.objective.target_length(run.batch.length),
        "rows": run.batch.rows,
        "rows_a_shard": rows_per_shard(run),
        "micro_batches": run.batch.micro_batches,
        "precision": model.precision.name,
        "optimizer": arguments.training.optim,
        "gradient_checkpointing": arguments.model.gradient_checkpointing,
        "scan_layers": arguments.model.scan_layers,
    }


def _device_summary(options: Options, run: Run) -> dict[str, Any]:
    """Returns the entry ``devices`` of a plan, with the memory per device that JAX may use."""
    device = options.accelerator
    share = options.memory_share or float(
        os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or device.memory_fraction
    )
    memory = device.memory_bytes if options.memory_gb is None else options.memory_gb * 1e9
    return {
        "name": device.name,
        "count": options.count,
        "mesh": dict(run.mesh.shape),
        "memory": memory,
        "share": share,
        "usable": memory * share,
    }


def _compile(options: Options, run: Run) -> step_compiler.Programs:
    """Compiles three variants of the step.

    The first variant is the step of the run. The second variant has twice as many rows. The third
    variant uses gradient checkpointing if the run does not, and vice versa.
    """
    if options.no_compile:
        return step_compiler.Programs(problem="--no_compile")
    rows, remat = rows_per_shard(run), run.arguments.model.gradient_checkpointing
    variants = ((rows, remat), (2 * rows, remat), (rows, not remat))
    return step_compiler.compile_in_subprocess(
        options, [{"rows": rows, "remat": remat} for rows, remat in variants]
    )


def _trace_attention(options: Options, run: Run) -> list[dict[str, Any]]:
    """Traces the step and returns the attention implementations that are selected."""
    with record_attention_choices() as choices, wrap_build_errors(options.config):
        batch = abstract_batch(run, rows_per_shard(run))
        jax.eval_shape(run.step_function(), run.abstract_state(), run.abstract_frozen(), batch)
    return choices


def _exchange(
    options: Options, run: Run, programs: step_compiler.Programs
) -> dict[str, list[dict[str, Any]]]:
    """Returns the collectives of a step with their transfer times.

    The entry ``rules`` contains the collectives that the sharding rules require. The entry
    ``compiled`` contains the collectives in the compiled program.
    """
    remat = run.arguments.model.gradient_checkpointing
    compiled: list[Any] = next(
        (result["collectives"] for result in programs.results if result["remat"] == remat), []
    )
    network = options.network_gbs and options.network_gbs * 1e9
    return {
        source: [
            collective
            | {"seconds": wire_seconds(collective, run.mesh.shape, options.accelerator, network)}
            for collective in collectives
        ]
        for source, collectives in (("rules", exchange_by_rules(run)), ("compiled", compiled))
    }


def _time(options: Options, run: Run, exchange: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry ``time`` of a plan.

    The entry contains the FLOPs of a step, the estimated duration of a step, the total transfer
    time of its collectives, the tokens per second, and the days that the training takes. The FLOPs
    include the forward passes of a reference model or a teacher.

    Args:
        options: The options of the plan.
        run: The training run that is planned.
        exchange: The collectives of a step, with their transfer times under ``seconds``.
    """
    sequences, length = run.batch.rows * run.objective.sequences_per_row, run.batch.length
    tokens = sequences * length
    flops = throughput.run_flops(run.model, run.objective, sequences, length)
    for name in run.abstract_frozen().get(AUXILIARY, {}):
        # A forward pass takes a third of the FLOPs of a training step.
        auxiliary = run.objective.auxiliary[name].model
        flops += throughput.run_flops(auxiliary, run.objective, sequences, length) / 3
    peak = options.accelerator.peak_flops(_itemsize(run.model.precision.compute_dtype))
    peak = peak if options.peak_tflops is None else options.peak_tflops * 1e12
    seconds = flops / (options.mfu * peak * options.count)
    wire_times = [collective["seconds"] for collective in exchange]
    return {
        "flops": flops,
        "peak": peak,
        "mfu": options.mfu,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "wire_seconds": None if None in wire_times else sum(filter(None, wire_times)),
        "days": options.tokens and options.tokens / tokens * seconds / 86400,
    }


def _bytes(run: Run) -> dict[str, Any]:
    """Returns the bytes of each part of the memory, in total and per device.

    The entry ``whole`` contains the bytes of parameters and optimizer states that no mesh axis
    shards.
    """
    state = run.abstract_state()
    collections = state.to_dict()
    other_names = collections.keys() - {"params", "opt_state"}
    frozen = run.abstract_frozen()
    own_frozen = {name: part for name, part in frozen.items() if name != AUXILIARY}
    parts = {
        "parameters": {"trained": state.params, "frozen": own_frozen},
        "auxiliary": frozen.get(AUXILIARY, {}),
        "optimizer": state.opt_state,
        "other": {name: collections[name] for name in other_names},
        "gradients": state.params,
        "batch": abstract_batch(run, rows_per_shard(run)),
    }
    sizes = {name: {"all": 0.0, "device": 0.0} for name in (*parts, "whole")}
    for name, tree in parts.items():
        for leaf in jax.tree.leaves(tree):
            shard_shape = leaf.sharding.shard_shape(leaf.shape)
            sizes[name]["all"] += leaf.size * _itemsize(leaf.dtype)
            sizes[name]["device"] += math.prod(shard_shape) * _itemsize(leaf.dtype)
            if name in ("parameters", "optimizer") and shard_shape == leaf.shape:
                sizes["whole"]["device"] += leaf.size * _itemsize(leaf.dtype)
    return jax.tree.map(round, sizes)


def _fit(
    plan: dict[str, Any], activations: dict[bool, ActivationBytes], run: Run
) -> dict[str, Any]:
    """Returns the memory that the run needs per device, and the largest batch.

    The needed memory is that of the compiled step. The memory per row is computed from a second
    compiled step with twice as many rows. If one of these programs was not compiled, the trace of
    the model provides the number.

    Args:
        plan: The plan so far.
        activations: The traced activations without (`False`) and with (`True`) gradient
            checkpointing, or an empty dictionary if the programs were compiled.
        run: The training run that is planned.
    """
    usable, rows = plan["devices"]["usable"], rows_per_shard(run)
    remat = run.arguments.model.gradient_checkpointing
    compiled_bytes = {
        program["rows"]: program["arguments"] + program["temporary"]
        for program in plan["compiled"]["programs"]
        if program["remat"] == remat
    }
    row_bytes = 1.0
    if activations:
        needed, row_bytes = _traced_memory(plan, activations, run)
    if rows in compiled_bytes:
        needed = compiled_bytes[rows]
    if 2 * rows in compiled_bytes:
        row_bytes = (compiled_bytes[2 * rows] - compiled_bytes[rows]) / rows
    row_bytes = max(row_bytes, 1.0)
    one_row = needed - row_bytes * (rows - 1)
    largest = max(int(rows + (usable - needed) // row_bytes), 0)
    return {
        "source": "compiled" if rows in compiled_bytes else "traced",
        "row_source": "compiled" if 2 * rows in compiled_bytes else "traced",
        "needed": round(needed),
        "row": round(row_bytes),
        "left": round(usable - needed),
        "one_row": round(one_row),
        "largest_rows_a_shard": largest if one_row <= usable else 0,
    }


def _traced_memory(
    plan: dict[str, Any], activations: dict[bool, ActivationBytes], run: Run
) -> tuple[float, float]:
    """Returns the needed bytes per device, and the bytes per row, according to the trace."""
    parts, rows = plan["bytes"], rows_per_shard(run)
    remat = run.arguments.model.gradient_checkpointing
    names = ("parameters", "auxiliary", "optimizer", "gradients")
    fixed = sum(parts[name]["device"] for name in names)
    layers = getattr(run.model.config, "num_hidden_layers", 0) or 1
    # While a layer is recomputed, all of its activations are in memory.
    row = activations[remat].row + (activations[False].row / layers if remat else 0)
    row_bytes = row / run.mesh.shape["sequence"] + parts["batch"]["device"] / rows
    return fixed + activations[remat].fixed + row_bytes * rows, row_bytes

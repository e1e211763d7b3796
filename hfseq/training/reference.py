"""Computes the log-probabilities of a reference model once, before training.

The log-probabilities are stored in the output directory, together with a description of the data
and the weights from which they were computed. A resumed run reads the stored log-probabilities.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.data.batches import Batches
from hfseq.errors import UsageError, atomic_replace, write_atomically
from hfseq.nn import sharding, trees
from hfseq.objectives.preference import REFERENCE
from hfseq.training import processes
from hfseq.training.loader import EvaluationLoader
from hfseq.training.setup import Run
from hfseq.training.state import AUXILIARY, TrainState, Tree, join_frozen

logger = logging.getLogger(__name__)

FOLDER = "reference_logps"


def precompute(run: Run, state: TrainState) -> Run:
    """Adds the log-probabilities of the reference model to the rows of a run.

    Without `--precompute_ref_log_probs`, the run is returned unchanged.

    Args:
        run: The run.
        state: The state from which training starts.

    Returns:
        The run without the parameters of the reference model.

    Raises:
        UsageError: The output directory contains log-probabilities that were computed from
            different data or weights.
    """
    objective = run.objective
    if REFERENCE not in objective.precomputed_auxiliary:
        return run
    assert run.data is not None
    auxiliary: Any = run.frozen[AUXILIARY]
    stored = auxiliary[REFERENCE]
    weights = _checksum(run, state, stored)
    splits = {"train": run.data.train, "validation": run.data.evaluation, "test": run.data.test}
    for split, batches in splits.items():
        if not isinstance(batches, Batches):
            continue
        rows: Any = batches.rows
        description = {
            "examples": _digest(rows),
            "weights": weights,
            "precision": run.model.precision.name,
        }
        folder = run.folder / FOLDER
        values = _read(folder, split, description)
        if values is None:
            values = _compute(run, state, rows, split)
            if jax.process_index() == 0:
                _write(folder, split, description, values)
            logger.info("%s: computed the log-probabilities of %d rows", split, len(values))
        else:
            logger.info("%s: read the log-probabilities in %s", split, folder)
        _attach(rows, values)
    frozen = {name: part for name, part in run.frozen.items() if name != AUXILIARY}
    if remaining := {name: part for name, part in auxiliary.items() if name != REFERENCE}:
        frozen[AUXILIARY] = remaining
    return dataclasses.replace(run, frozen=frozen)


def _attach(rows: Any, values: np.ndarray) -> None:
    """Adds the array "reference_logps" to rows.

    Args:
        rows: The rows.
        values: The log-probabilities, `(rows, pairs, answers)`.
    """
    numbers = getattr(rows, "pair_numbers", None)
    if numbers is None:
        rows.arrays["reference_logps"] = values[:, 0]
        return
    by_example = np.zeros((int(numbers.max()) + 1, values.shape[-1]), values.dtype)
    by_example[numbers[numbers >= 0]] = values[numbers >= 0]
    rows.arrays["reference_logps"] = by_example


def _digest(rows: Any) -> str:
    """Returns a hash of the tokens and the loss masks of all rows."""
    digest = blake2b(digest_size=16)
    for start in range(0, len(rows), 1024):
        indices = np.arange(start, min(start + 1024, len(rows)))
        arrays = rows.fetch(indices)
        for name in sorted(arrays):
            if arrays[name].dtype == np.int32:
                digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _checksum(run: Run, state: TrainState, stored: Tree) -> str:
    """Returns a checksum of the parameters of the reference model.

    The checksum is a sum of integers, so it does not depend on how the parameters are split over
    devices.
    """

    def checksum(frozen: Tree, stored: Tree) -> jax.Array:
        structure = run.objective.auxiliary[REFERENCE]
        flat = trees.flatten(frozen) | trees.flatten(stored)
        used = structure.shared_paths if structure.shared_paths is not None else flat
        total = jnp.zeros((), jnp.uint32)
        for path in sorted(path for path in used if path in flat):
            for leaf in jax.tree.leaves(flat[path]):
                values = leaf.reshape(-1).astype(jnp.float32)
                bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
                factors = 2 * jax.lax.iota(jnp.uint32, len(bits)) + 1
                total = total * 31 + (bits * factors).sum(dtype=jnp.uint32)
        return total

    frozen_params = {name: part for name, part in run.frozen.items() if name != AUXILIARY}
    replicated = NamedSharding(run.mesh, PartitionSpec())
    return f"{int(jax.jit(checksum, out_shardings=replicated)(frozen_params, stored)):08x}"


def _compute(run: Run, state: TrainState, rows: Any, split: str) -> np.ndarray:
    """Computes the log-probabilities of all rows, float32 `(rows, pairs, answers)`."""
    objective: Any = run.objective
    training, data = run.arguments.training, run.arguments.data
    size = getattr(data, "precompute_ref_batch_size", None) or training.per_device_eval_batch_size
    batches = Batches(rows, size * sharding.data_shards(run.mesh), training.seed, shuffle=False)

    def logps(params: Tree, frozen: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        inputs: dict[str, Any] = {name: leaf[0] for name, leaf in batch.items()}
        inputs[AUXILIARY] = frozen[AUXILIARY]
        values = objective.reference_logps(inputs, join_frozen(params, frozen), run.model)
        return values.reshape(*inputs["pairs"].shape, -1)

    replicated = NamedSharding(run.mesh, PartitionSpec())
    compiled = jax.jit(logps, out_shardings=replicated)
    loader = EvaluationLoader(batches, objective, run.mesh, 1, training.seed)
    parts = []
    for step, batch, _ in loader.batches(0, len(batches)):
        values = np.asarray(jax.device_get(compiled(state.params, run.frozen, batch)))
        parts.append(values[batches.indices(step)[1]])
    return np.concatenate(parts)


def _read(folder: Path, split: str, description: Mapping[str, str]) -> np.ndarray | None:
    """Returns stored log-probabilities, or `None` if there are none.

    Process 0 reads the files, because the other processes may not have access to its disk.
    """
    content: list[Any] = []
    if jax.process_index() == 0 and (folder / f"{split}.json").exists():
        stored_description = json.loads((folder / f"{split}.json").read_text(encoding="utf-8"))
        values = np.load(folder / f"{split}.npy", allow_pickle=False)
        content = [stored_description, values.shape, values.ravel().tolist()]
    content = next(iter(processes.exchange(content)), [])
    if not content:
        return None
    stored_description, shape, flat = content
    differing = [
        name for name, value in description.items() if stored_description.get(name) != value
    ]
    if differing:
        raise UsageError(
            f"{folder} contains log-probabilities of a reference model that were computed with "
            f"different {' and '.join(differing)}: delete the directory to compute them again, or "
            "use another --output_dir"
        )
    return np.array(flat, np.float32).reshape(shape)


def _write(folder: Path, split: str, description: Mapping[str, str], values: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_replace(folder / f"{split}.npy") as temporary, temporary.open("wb") as file:
        np.save(file, values.astype(np.float32), allow_pickle=False)
    # The description is written last, because its existence means that the values are complete.
    write_atomically(folder / f"{split}.json", json.dumps(dict(description), indent=2) + "\n")

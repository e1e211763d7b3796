"""Checks that compare with newly initialized PyTorch models: files, initial values and dropout.

The docstring of a check states the requirement. If PyTorch is not installed,
:func:`hfseq.testing.torch.torch_model` raises NotRun.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.nn import trees
from hfseq.testing.case import Case, Params, Skipped, assert_close, comparable_outputs, jit
from hfseq.testing.torch import file_tensors, named_once, torch_inputs, torch_model, torch_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fresh_torch_model(case: Case, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Returns a newly initialized model of the PyTorch class that corresponds to the model class.

    Args:
        case: The task head under test.
        seed: Random seed for PyTorch.
        **changes: Configuration attributes to change.
    """
    import torch

    model = torch_model(case)
    config = copy.deepcopy(model.config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return type(model)(config)


def torch_files(case: Case) -> None:
    """hfseq loads all tensors that a new PyTorch model saves, and computes the same outputs."""
    model = fresh_torch_model(case).eval()
    folder = case.folder / "fresh"
    model.save_pretrained(folder)
    loaded, info = case.cls.from_pretrained(folder, output_loading_info=True)
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    assert not problems, f"from_pretrained of a fresh {type(model).__name__} reports {problems}"
    output = jit(lambda params, inputs: comparable_outputs(loaded(**inputs, params=params)))(
        loaded.params, case.inputs
    )
    expected = torch_outputs(case, model, output)
    ours = {name: case.zero_padding(name, np.asarray(output[name])) for name in expected}
    assert_close(ours, expected, case.tolerance, "files of a fresh PyTorch model")


#: Number of initial values to collect for each parameter, and maximum number of seeds for that.
VALUES, MAX_SEEDS = 4096, 32
#: Allowed difference of means and standard deviations, in standard errors of their estimates.
STANDARD_ERRORS = 7.0
#: Relative difference of standard deviations that is always allowed.
SMALLEST_DIFFERENCE = 0.1


def torch_initialization(case: Case) -> None:
    """Initial values have the same mean and standard deviation as PyTorch's.

    Values that do not depend on the seed must be equal. Other values are collected over several
    seeds, and their means and standard deviations may differ by `STANDARD_ERRORS` standard errors.
    """
    smallest = min(leaf.size for leaf in trees.flatten(case.params).values())
    seeds = int(np.clip(VALUES // max(smallest, 1), 4, MAX_SEEDS))

    def initialize(key: jax.Array) -> Params:
        return case.model.split_collections(case.model.init_weights(key, case.model.input_shape))[0]

    keys = jax.random.split(jax.random.key(0), seeds)
    leaves = trees.flatten(jit(jax.vmap(initialize))(jax.vmap(jax.random.key_data)(keys)))
    names = case.model.weight_map
    single = [
        names.to_torch({path: leaf[i] for path, leaf in leaves.items()}) for i in range(seeds)
    ]
    ours = {name: np.stack([arrays[name] for arrays in single]) for name in single[0]}
    theirs: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        model = fresh_torch_model(case, seed)
        in_memory = {name: parameter.detach() for name, parameter in named_once(case, model)}
        for name, tensor in file_tensors(model, in_memory).items():
            theirs.setdefault(names.resolve_name(name), []).append(tensor.float().numpy())
    lines = []
    for name in ours.keys() & theirs.keys():
        if difference := _difference(ours[name], np.stack(theirs[name])):
            lines.append(f"  {name}: {difference}")
    assert not lines, "initial values differ from PyTorch's:\n" + "\n".join(sorted(lines))


def _difference(ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """Describes how initial values differ, if they do.

    Args:
        ours: Values of hfseq, `(seeds, ...)`.
        theirs: Values of PyTorch, `(seeds, ...)`.
    """
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if np.ptp(theirs, axis=0).max(initial=0) == 0 or np.ptp(ours, axis=0).max(initial=0) == 0:
        if not np.allclose(ours, theirs, rtol=1e-6, atol=1e-7):
            return f"{_summary(ours)} instead of {_summary(theirs)}"
        return None
    # PyTorch sets the embedding of the padding token to zero. Leave it out, as it has no effect.
    if theirs.ndim > 2:
        rows = np.abs(theirs).max(axis=(0, *range(2, theirs.ndim))) > 0
        ours, theirs = ours[:, rows], theirs[:, rows]
    spread, count = theirs.std(), theirs.size
    error = STANDARD_ERRORS * spread * np.sqrt(2 / count)
    allowed_share = max(SMALLEST_DIFFERENCE, STANDARD_ERRORS / np.sqrt(count))
    same_mean = abs(ours.mean() - theirs.mean()) <= error
    same_spread = abs(ours.std() / spread - 1) <= allowed_share
    if same_mean and same_spread:
        return None
    return f"{_summary(ours)} instead of {_summary(theirs)}"


def _summary(values: np.ndarray) -> str:
    return f"mean {values.mean():.3g} and standard deviation {values.std():.3g}"


#: Names of configuration attributes that are dropout rates.
DROPOUT_NAME = re.compile(r"(dropout|pdrop|drop_path|drop_prob|drop_rate|layerdrop)")
DROPOUT_RATE = 0.5


def torch_dropout(case: Case) -> None:
    """Every dropout rate that changes PyTorch's outputs in training also changes hfseq's outputs.

    One rate at a time is set to 0.5 and all others to 0. In addition, if all rates are 0, training
    and evaluation mode must give equal outputs, unless the outputs also differ in PyTorch.
    """
    import torch

    reference = torch_model(case)
    rates = [
        name
        for name, value in vars(case.config).items()
        if DROPOUT_NAME.search(name) and isinstance(value, int | float | None)
        if not isinstance(value, bool)
    ]
    if not rates:
        raise Skipped("the configuration has no dropout rate")
    state = reference.state_dict()
    inputs = torch_inputs(case)
    # wav2vec 2.0 masks random spans in training. Disable that, because it is not a dropout.
    masks = {"apply_spec_augment": False} if hasattr(case.config, "apply_spec_augment") else {}

    def torch_changes(name: str | None) -> bool:
        changes: dict[str, Any] = {rate: DROPOUT_RATE * (rate == name) for rate in rates} | masks
        model = fresh_torch_model(case, 0, **changes)
        model.load_state_dict(state)
        torch.manual_seed(0)
        with torch.no_grad():
            evaluated = model.eval()(**inputs)
            try:
                trained = model.train()(**inputs)
            except RuntimeError:
                # Weighted sums of hidden states fail in PyTorch if LayerDrop has skipped a layer.
                if name is None:
                    raise
                return False
        return any(
            not torch.equal(trained[n], evaluated[n])
            for n in _tensors(trained)
            if n in evaluated and trained[n].shape == evaluated[n].shape
        )

    def flax_changes(name: str | None) -> bool:
        config = copy.deepcopy(case.config)
        for rate in rates:
            setattr(config, rate, DROPOUT_RATE if rate == name else 0.0)
        vars(config).update(masks)
        model = case.cls(config, _do_init=False)
        model.extra = case.model.extra

        @jit
        def run(params: Params, inputs: Mapping[str, Any]) -> Any:
            outputs = []
            for train in (True, False):
                options = {"train": train, "dropout_rng": jax.random.key(0)}
                output = model(**inputs, params=params, **options)
                output = output[0] if isinstance(output, tuple) else output
                outputs.append(comparable_outputs(output))
            return outputs

        trained, evaluated = run(case.params, case.inputs)
        return any(not np.array_equal(trained[n], evaluated[n]) for n in evaluated)

    if flax_changes(None) and not torch_changes(None):
        raise AssertionError("with all dropout rates at 0, training changes the outputs")
    missing = [name for name in rates if torch_changes(name) and not flax_changes(name)]
    assert not missing, f"{', '.join(missing)} = {DROPOUT_RATE} has no effect in training"


def _tensors(output: Any) -> list[str]:
    return [name for name, value in output.items() if hasattr(value, "shape")]


CHECKS = (torch_files, torch_initialization, torch_dropout)

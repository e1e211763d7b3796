"""The process that compares model types for `hfseq bridge coverage`.

The process reads one model type per line from standard input. For each type, it writes the fields
of a `Result` as one line of JSON to standard output.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import transformers

from hfseq.errors import failure, one_line
from hfseq_plugins.bridge import comparison, tiny
from hfseq_plugins.bridge.coverage import GRADIENT_TOLERANCE, Result
from hfseq_plugins.bridge.refusals import UnsupportedModel


def compare(model_type: str, checks: Sequence[str] = ("gradient",)) -> Result:
    """Compares a tiny model in the bridge with the same model in PyTorch.

    Args:
        model_type: The model type.
        checks: What to compare besides the forward pass, as in `coverage.CHECKS`.
    """
    result = Result(model_type)
    stage = "configuration"
    try:
        config = tiny.tiny_config(model_type)
        result = dataclasses.replace(result, class_name=tiny.model_class(config).__name__)
        stage = "build"
        model = tiny.tiny_model(model_type)
        stage = "pytorch"
        inputs = tiny.tiny_inputs(model)
        with torch.no_grad():
            theirs = comparison.run_torch(model, inputs)
        if not theirs:
            raise ValueError("the model returns no floating-point values")
        # Some models, such as LeViT, keep tables that were computed without gradients.
        model = tiny.tiny_model(model_type)
        stage = "trace"
        bridged = comparison.Bridged(model, inputs)
        constants = [n for n, x in bridged.constants.items() if isinstance(x, np.ndarray)]
        result = dataclasses.replace(result, constants=tuple(constants))
        stage = "run"
        factors = comparison.loss_factors(theirs) if "gradient" in checks else {}
        gradients: dict[str, Any] = {}
        if factors and bridged.trained:
            try:
                ours, gradients = bridged.gradients(factors)
            except UnsupportedModel as error:
                result = _refused(result, error)
        if not gradients:
            ours = bridged.forward()
        reference = Reference(model, inputs, theirs, factors)
        result = reference.compare(result, ours, gradients)
        if result.status == "differs":
            exact = reference.in_float64()
            result = exact.compare(result, ours, gradients)
            if result.status == "differs" and result.gradient_error is not None:
                result = dataclasses.replace(result, solution=exact.error_of(reference))
        further = {
            name: _check(function, model) for name, function in _CHECKS.items() if name in checks
        }
        return dataclasses.replace(result, checks=further)
    except UnsupportedModel as error:
        return dataclasses.replace(_refused(result, error), stage=stage)
    except Exception as error:
        return dataclasses.replace(result, stage=stage, reason=failure(error))


def _refused(result: Result, error: UnsupportedModel) -> Result:
    return dataclasses.replace(
        result,
        reason=one_line(error),
        operator=error.operator,
        place=str(error.statement or ""),
        solution=error.solution,
    )


def _check(function: Callable[[Any], str], model: Any) -> str:
    try:
        return function(model)
    except UnsupportedModel as error:
        return one_line(f"refused: {error.operator or error} in {error.statement}", 160)
    except Exception as error:
        return failure(error, 120)


_CHECKS: dict[str, Callable[[Any], str]] = {
    "train": comparison.compare_training,
    "files": comparison.compare_files,
    "generate": comparison.compare_generation,
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """PyTorch's outputs and gradients.

    Attributes:
        model: The PyTorch model.
        inputs: The inputs of the model by name.
        outputs: The outputs of the model by name.
        factors: The weights of the outputs in the loss. If empty, no gradients are compared.
    """

    model: Any
    inputs: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor]
    factors: Mapping[str, Any]

    def compare(self, result: Result, ours: Any, gradients: Any) -> Result:
        """Writes the errors to a result, unless the result already has smaller errors.

        Args:
            result: The result.
            ours: The outputs of the bridge by name.
            gradients: The gradients of the bridge by parameter name.

        Returns:
            A copy of the result with the errors.
        """
        dtype = str(self.model.dtype).removeprefix("torch.")
        error, name = comparison.compare_outputs(ours, self.outputs)
        if error is not None and (result.forward_error is None or error < result.forward_error):
            result = dataclasses.replace(
                result, forward_error=error, forward_name=name, reference=dtype
            )
        if not self.factors or result.reason:
            return result
        try:
            _, theirs = comparison.torch_gradients(self.model, self.inputs, self.factors)
        except RuntimeError:  # all parameters are frozen, or gradients are disabled
            theirs = {}
        if not gradients or not theirs:
            return dataclasses.replace(result, has_gradient=False)
        error, name = comparison.compare_gradients(gradients, theirs)
        if error is not None and (result.gradient_error is None or error < result.gradient_error):
            result = dataclasses.replace(
                result, gradient_error=error, gradient_name=name, reference=dtype
            )
        return result

    def error_of(self, reference: Reference) -> str:
        """Returns a sentence if another reference of PyTorch has gradients that differ."""
        _, ours = comparison.torch_gradients(reference.model, reference.inputs, self.factors)
        _, theirs = comparison.torch_gradients(self.model, self.inputs, self.factors)
        error, name = comparison.compare_gradients(ours, theirs)
        if error is None or error <= GRADIENT_TOLERANCE:
            return ""
        return f"PyTorch's gradient of {name} in float32 differs from float64 by {error:.1e}, too"

    def in_float64(self) -> Reference:
        """Returns a reference in float64, or this one if the model only computes in float32."""
        model = copy.deepcopy(self.model).double()
        inputs = comparison.in_float64(self.inputs)
        try:
            with torch.no_grad():
                return Reference(model, inputs, comparison.run_torch(model, inputs), self.factors)
        except RuntimeError:
            return self


def main(checks: Sequence[str]) -> None:
    """Compares each model type that a line of standard input names."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for text in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            result = compare(text.strip(), checks)
        print(json.dumps(dataclasses.asdict(result)), file=answers, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The process that compares model types for `hfseq bridge coverage`.

It reads one model type per line and writes one line of JSON for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import transformers

from hfseq.errors import one_line
from hfseq_plugins.bridge import comparison, tiny
from hfseq_plugins.bridge.coverage import Result
from hfseq_plugins.bridge.refusals import UnsupportedModel


def compare(model_type: str, checks: Sequence[str] = ("gradient",)) -> Result:
    """Compares a tiny model with PyTorch.

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
        stage = "trace"
        bridged = comparison.Bridged(model, inputs)
        stage = "run"
        further = {
            name: _check(function, model) for name, function in _CHECKS.items() if name in checks
        }
        result = dataclasses.replace(result, checks=further)
        if "gradient" not in checks:
            forward = comparison.compare_outputs(bridged.forward(), theirs)
            return dataclasses.replace(result, forward_error=forward[0], forward_name=forward[1])
        factors = comparison.loss_factors(theirs)
        reference = _torch_gradients(model, inputs, factors)
        if isinstance(reference, str) or not bridged.trained:
            reason = reference if isinstance(reference, str) else "it has no trained parameters"
            forward = comparison.compare_outputs(bridged.forward(), theirs)
            return dataclasses.replace(
                result, forward_error=forward[0], forward_name=forward[1], reason=reason
            )
        ours, gradients = bridged.gradients(factors)
        forward = comparison.compare_outputs(ours, theirs)
        gradient = comparison.compare_gradients(gradients, reference)
        return dataclasses.replace(
            result,
            forward_error=forward[0],
            forward_name=forward[1],
            gradient_error=gradient[0],
            gradient_name=gradient[1],
        )
    except UnsupportedModel as error:
        return dataclasses.replace(
            result,
            stage=stage,
            reason=one_line(error),
            operator=error.operator,
            place=str(error.statement or ""),
            solution=error.solution,
        )
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        return dataclasses.replace(result, stage=stage, reason=reason)


def _check(function: Callable[[Any], str], model: Any) -> str:
    try:
        return function(model)
    except Exception as error:
        return one_line(f"{type(error).__name__}: {error}", 120)


_CHECKS: dict[str, Callable[[Any], str]] = {
    "files": comparison.compare_files,
    "generate": comparison.compare_generation,
}


def _torch_gradients(model: Any, inputs: Any, factors: Any) -> Any:
    """Returns PyTorch's gradients, or why it has none."""
    try:
        return comparison.torch_gradients(model, inputs, factors)
    except RuntimeError as error:
        return one_line(f"PyTorch computes no gradients: {error}")


def main(checks: Sequence[str]) -> None:
    """Answers the lines of standard input."""
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

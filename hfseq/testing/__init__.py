"""A set of checks for model architectures.

::

    from hfseq.testing import check_architecture

    def test_my_model():
        check_architecture("my_model", MyConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))

Each check is a small function in :mod:`hfseq.testing.checks` (JAX only) or
:mod:`hfseq.testing.torch` and :mod:`hfseq.testing.fresh` (comparison with the PyTorch class of the
same name). All checks run for every registered task head, and one error lists all failures. The
configuration must be tiny, because the model with each head is compiled about fifteen times.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.errors import UsageError, did_you_mean
from hfseq.testing import checks as jax_checks
from hfseq.testing import fresh as fresh_checks
from hfseq.testing import torch as torch_checks
from hfseq.testing.case import ZERO_GRADIENTS, Case, Report

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedConfig


class NotRunWarning(UserWarning):
    """Some checks that apply to the model could not run.

    The reason is that PyTorch is not installed or that there are too few devices.
    """


def check_architecture(
    name: str,
    config: PreTrainedConfig | Iterable[PreTrainedConfig] | Mapping[str, PreTrainedConfig],
    *,
    heads: Iterable[str] | None = None,
    checks: Iterable[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    torch: bool = True,
    skip: Mapping[str, str] | None = None,
    zero_gradients: Iterable[str] = ZERO_GRADIENTS,
    tolerance: float = 1e-5,
    inputs: Mapping[str, npt.ArrayLike] | None = None,
) -> Report:
    """Runs the checks on an architecture.

    Args:
        name: Name of the registered architecture.
        config: A tiny configuration, or several of them as a list or as a dict with labels for the
            report. It needs a vocabulary of at least 16 tokens and at least 16 positions. If the
            family reserves tokens or positions, it needs as many more.
        heads: The tasks whose heads are checked, such as ``"ForMaskedLM"``. The default is all
            tasks.
        checks: Names of the checks to run. The default is all checks. Each requested check must run
            on at least one head.
        overrides: Maps tasks to configuration attributes that are set for this task. For
            configurations with the attribute ``is_decoder``, the default is ``{"ForCausalLM":
            {"is_decoder": True}}``. For configurations of encoder-decoders, the default also sets
            ``is_encoder_decoder`` to False and ``add_cross_attention`` to True for this task, so
            that the decoder is checked without the encoder.
        torch: Whether to run the checks that compare with PyTorch.
        skip: Checks to skip. Maps the name of a check to the reason why it is skipped.
        zero_gradients: Regular expressions for the paths of parameters whose gradient is expected
            to be zero.
        tolerance: Tolerance of the comparisons with PyTorch. The error is
            ``max|a - b| / max(1, max|b|)``, where ``b`` is PyTorch's result.
        inputs: Additional model inputs by name, for a batch of eight examples.

    Returns:
        A :class:`Report` of the checks that passed, were skipped or could not run, with reasons.

    Raises:
        AssertionError: Checks failed, a requested check did not run, or no check ran.
        UsageError: The architecture, a task or a check does not exist.
    """
    skip = dict(skip or {})
    requested = None if checks is None else list(checks)
    report = run_checks(
        name,
        config,
        heads=heads,
        checks=requested,
        overrides=overrides,
        torch=torch,
        skip=skip,
        zero_gradients=zero_gradients,
        tolerance=tolerance,
        inputs=inputs,
    )
    if report.failed:
        lines = [f"{check}: {reason}" for check, reason in report.failed.items()]
        count = f"{len(lines)} of {len(lines) + len(report.passed)} checks failed for '{name}'"
        raise AssertionError("\n\n".join([count, *lines]))
    ran = {label.rpartition(".")[2] for label in report.passed}
    required = set(requested or ()) - skip.keys()
    if required - ran or not ran:
        missing = ", ".join(sorted(required - ran))
        problem = f"{missing} did not run" if missing else "no check ran"
        raise AssertionError(f"{problem} on any head of '{name}'\n{report}")
    if report.not_run:
        warnings.warn(NotRunWarning(f"'{name}': {report}"), stacklevel=2)
    return report


def run_checks(
    name: str,
    config: PreTrainedConfig | Iterable[PreTrainedConfig] | Mapping[str, PreTrainedConfig],
    *,
    heads: Iterable[str] | None = None,
    checks: Iterable[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    torch: bool = True,
    skip: Mapping[str, str] | None = None,
    zero_gradients: Iterable[str] = ZERO_GRADIENTS,
    tolerance: float = 1e-5,
    inputs: Mapping[str, npt.ArrayLike] | None = None,
) -> Report:
    """Runs the checks on an architecture and returns the report also if checks fail.

    The arguments have the same meaning as in :func:`check_architecture`.

    Raises:
        UsageError: The architecture, a task or a check does not exist.
    """
    from transformers import PreTrainedConfig

    skip = dict(skip or {})
    requested = None if checks is None else list(checks)
    checks_by_name = {
        c.__name__: c
        for c in (
            *jax_checks.CHECKS,
            *((*torch_checks.CHECKS, *fresh_checks.CHECKS) if torch else ()),
        )
    }
    for check in (*(requested or ()), *skip):
        if check not in checks_by_name:
            raise UsageError(
                f"no check '{check}'{did_you_mean(check, checks_by_name)} "
                f"(checks: {', '.join(checks_by_name)})"
            )
    selected = [check for check in checks_by_name if requested is None or check in requested]
    spec, report = plugins.load().architectures.get(name), Report()
    tasks = list(spec.heads if heads is None else heads)
    if isinstance(config, PreTrainedConfig):
        configs = {"": config}
    elif isinstance(config, Mapping):
        configs = {f"[{label}]": base_config for label, base_config in config.items()}
    else:
        configs = {f"[{number}]": base_config for number, base_config in enumerate(config)}
    # A class that serves two tasks is checked once.
    for model_class, task in {spec.load_head(task): task for task in tasks}.items():
        for label, base_config in configs.items():
            case_config, decoder = copy.deepcopy(base_config), {}
            if task == "ForCausalLM" and hasattr(base_config, "is_decoder"):
                decoder = {"is_decoder": True}
                if getattr(base_config, "is_encoder_decoder", False):
                    decoder |= {"is_encoder_decoder": False, "add_cross_attention": True}
            for attribute, value in (overrides or {}).get(task, decoder).items():
                setattr(case_config, attribute, value)
            with tempfile.TemporaryDirectory() as folder:
                zero = tuple(zero_gradients)
                case = Case(
                    task,
                    model_class,
                    case_config,
                    Path(folder),
                    spec,
                    zero,
                    tolerance,
                    extra_inputs=inputs or {},
                    compare_torch=torch,
                )
                for check in selected:
                    full = f"{model_class.__name__}{label}.{check}"
                    report.run(checks_by_name[check], full, case, skip.get(check))
    report.unmoved = _unmoved_fields(list(configs.values()))
    return report


def _unmoved_fields(configs: list[PreTrainedConfig]) -> list[str]:
    """Returns the configuration fields that have their default value in all `configs`.

    Fields that ``PreTrainedConfig`` defines for every model are not included.
    """
    from transformers import PreTrainedConfig

    config_class = type(configs[0])
    common = vars(PreTrainedConfig())
    return [
        name
        for name, default in vars(config_class()).items()
        if not name.startswith("_") and name not in common
        if all(getattr(config, name, default) == default for config in configs)
    ]

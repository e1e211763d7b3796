"""The battery that every architecture passes."""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hfseq import plugins
from hfseq.errors import UsageError, nearest
from hfseq.testing.case import ZERO_GRADIENTS, Case, Report, Skipped


def check_architecture(
    name: str,
    config: Any,
    *,
    heads: Iterable[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    torch: bool = True,
    skip: Mapping[str, str] | None = None,
    zero_gradients: Iterable[str] = ZERO_GRADIENTS,
    tolerance: float = 1e-5,
) -> Report:
    """Run the battery on the architecture ``name``; one AssertionError lists all failures.

    **Arguments:** ``config`` a tiny configuration (vocabulary of at least 16, 16 positions and what
    the family keeps for itself); ``heads`` the tasks to check (``"ForMaskedLM"``; all by default);
    ``overrides`` configuration attributes by task (``{"ForCausalLM": {"is_decoder": True}}``, which
    is the default where the configuration has that attribute; an encoder-decoder's decoder alone is
    tried with attention to an encoder's output); ``torch=False`` leaves PyTorch out;
    ``skip`` maps a check's name to the reason why it cannot hold; ``zero_gradients`` are patterns
    of parameter paths whose gradient is zero for a reason; ``tolerance`` is that of the comparisons
    with PyTorch, relative to ``max(1, max|b|)``.

    **Returns** a :class:`Report`, whose ``skipped`` says what was not checked and why.
    """
    spec = plugins.load().architectures.get(name)
    report = Report()
    for task, classes in _heads(spec, heads).items():
        settings = dict((overrides or {}).get(task, _causal(task, config)))
        with tempfile.TemporaryDirectory() as folder:
            case = Case(
                task, classes, _configured(config, settings), Path(folder), spec,
                tuple(zero_gradients), tolerance,
            )  # fmt: skip
            for check in _checks(torch, skip or {}):
                _run(check, case, dict(skip or {}), report)
    if report.failed:
        lines = [f"{check}: {reason}" for check, reason in report.failed.items()]
        count = f"{len(lines)} of {len(lines) + len(report.passed)} checks failed for '{name}'"
        raise AssertionError("\n\n".join([count, *lines]))
    return report


def _heads(spec: Any, wanted: Iterable[str] | None) -> dict[str, Any]:
    tasks = list(spec.heads if wanted is None else wanted)
    # One class may serve two tasks; it is checked once.
    return {task: cls for cls, task in {spec.load_head(task): task for task in tasks}.items()}


def _causal(task: str, config: Any) -> dict[str, Any]:
    if task != "ForCausalLM" or not hasattr(config, "is_decoder"):
        return {}
    if not getattr(config, "is_encoder_decoder", False):
        return {"is_decoder": True}
    return {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": True}


def _configured(config: Any, settings: Mapping[str, Any]) -> Any:
    config = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def _checks(torch: bool, skip: Mapping[str, str]) -> list[Callable[[Case], None]]:
    from hfseq.testing import checks as testing_checks
    from hfseq.testing import checks as testing_decoding
    from hfseq.testing import torch as testing_torch

    checks: list[Any] = [*testing_checks.CHECKS, *testing_decoding.DECODING_CHECKS]
    checks += testing_torch.CHECKS if torch else ()
    names = [check.__name__ for check in checks]
    for name in skip:
        if name not in names:
            raise UsageError(
                f"no check '{name}'{nearest(name, names)} (checks: {', '.join(names)})"
            )
    return checks


def _run(
    check: Callable[[Case], None], case: Case, skip: Mapping[str, str], report: Report
) -> None:
    name = f"{case.cls.__name__}.{check.__name__}"
    try:
        if check.__name__ in skip:
            raise Skipped(skip[check.__name__])
        check(case)
        report.passed.append(name)
    except Skipped as reason:
        report.skipped[name] = str(reason)
    except AssertionError as error:
        report.failed[name] = str(error)
    except Exception:
        report.failed[name] = traceback.format_exc(limit=-4)

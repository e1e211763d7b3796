"""A battery of tests that every architecture passes, in four lines.

::

    from hfseq.testing import check_architecture

    def test_my_model():
        check_architecture("my_model", MyConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))

Each check is a small function in :mod:`hfseq.testing.checks` (JAX alone) or
:mod:`hfseq.testing.torch` (against the PyTorch class of the same name). All of them run, for every
head that is registered, and one error lists all that failed. The configuration must be tiny: each
head is compiled about ten times.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.errors import UsageError, nearest
from hfseq.testing import checks as jax_checks
from hfseq.testing import torch as torch_checks
from hfseq.testing.case import ZERO_GRADIENTS, Case, Report, Skipped

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_architecture(
    name: str,
    config: PreTrainedConfig,
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
    skip = dict(skip or {})
    checks = {
        check.__name__: check
        for check in (*jax_checks.CHECKS, *(torch_checks.CHECKS if torch else ()))
    }
    for unknown in (check for check in skip if check not in checks):
        raise UsageError(
            f"no check '{unknown}'{nearest(unknown, checks)} (checks: {', '.join(checks)})"
        )
    spec, report = plugins.load().architectures.get(name), Report()
    tasks = list(spec.heads if heads is None else heads)
    # One class may serve two tasks; it is checked once.
    for kind, task in {spec.load_head(task): task for task in tasks}.items():
        changed = copy.deepcopy(config)
        for attribute, value in (overrides or {}).get(task, _alone(task, config)).items():
            setattr(changed, attribute, value)
        with tempfile.TemporaryDirectory() as folder:
            case = Case(task, kind, changed, Path(folder), spec, tuple(zero_gradients), tolerance)
            for check_name, check in checks.items():
                label = f"{kind.__name__}.{check_name}"
                try:
                    if check_name in skip:
                        raise Skipped(skip[check_name])
                    check(case)
                    report.passed.append(label)
                except Skipped as reason:
                    report.skipped[label] = str(reason)
                except AssertionError as error:
                    report.failed[label] = str(error)
                except Exception:
                    report.failed[label] = traceback.format_exc(limit=-4)
    if report.failed:
        lines = [f"{check}: {reason}" for check, reason in report.failed.items()]
        count = f"{len(lines)} of {len(lines) + len(report.passed)} checks failed for '{name}'"
        raise AssertionError("\n\n".join([count, *lines]))
    return report


def _alone(task: str, config: PreTrainedConfig) -> dict[str, bool]:
    """Return what makes a decoder of a configuration that has ``is_decoder``."""
    if task != "ForCausalLM" or not hasattr(config, "is_decoder"):
        return {}
    if not getattr(config, "is_encoder_decoder", False):
        return {"is_decoder": True}
    return {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": True}

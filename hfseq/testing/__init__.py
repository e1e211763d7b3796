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
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfseq import plugins
from hfseq.errors import UsageError, did_you_mean
from hfseq.testing import checks as jax_checks
from hfseq.testing import torch as torch_checks
from hfseq.testing.case import ZERO_GRADIENTS, Case, Report

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedConfig


class NotRunWarning(UserWarning):
    """Checks that apply did not run, for want of PyTorch or of devices."""


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
    """Run the battery on the architecture ``name``; one AssertionError lists all failures.

    **Arguments:** ``config`` a tiny configuration (vocabulary of at least 16, 16 positions and what
    the family keeps for itself), or several, in a list or by a name of yours; ``heads`` the tasks
    to check (``"ForMaskedLM"``; all by default); ``checks`` the names of the checks to run (all by
    default): each of them must run on some head;
    ``overrides`` configuration attributes by task (``{"ForCausalLM": {"is_decoder": True}}``, which
    is the default where the configuration has that attribute; an encoder-decoder's decoder alone is
    tried with attention to an encoder's output); ``torch=False`` leaves PyTorch out;
    ``skip`` maps a check's name to the reason why it cannot hold; ``zero_gradients`` are patterns
    of parameter paths whose gradient is zero for a reason; ``tolerance`` is that of the comparisons
    with PyTorch, relative to ``max(1, max|b|)``; ``inputs`` are given to the model beside those
    that the battery makes for its eight rows.

    **Returns** a :class:`Report`, which says what was not checked and why. What could not run here
    is also told by a :class:`NotRunWarning`, and nothing checked at all is an AssertionError.
    """
    from transformers import PreTrainedConfig

    skip = dict(skip or {})
    wanted = None if checks is None else list(checks)
    known = {c.__name__: c for c in (*jax_checks.CHECKS, *(torch_checks.CHECKS if torch else ()))}
    for check in (*(wanted or ()), *skip):
        if check not in known:
            raise UsageError(
                f"no check '{check}'{did_you_mean(check, known)} (checks: {', '.join(known)})"
            )
    chosen = [check for check in known if wanted is None or check in wanted]
    spec, report = plugins.load().architectures.get(name), Report()
    tasks = list(spec.heads if heads is None else heads)
    if isinstance(config, PreTrainedConfig):
        configs = {"": config}
    elif isinstance(config, Mapping):
        configs = {f"[{label}]": one for label, one in config.items()}
    else:
        configs = {f"[{number}]": one for number, one in enumerate(config)}
    # One class may serve two tasks; it is checked once.
    for kind, task in {spec.load_head(task): task for task in tasks}.items():
        for label, one in configs.items():
            changed, decoder = copy.deepcopy(one), {}
            if task == "ForCausalLM" and hasattr(one, "is_decoder"):
                decoder = {"is_decoder": True}
                if getattr(one, "is_encoder_decoder", False):
                    decoder |= {"is_encoder_decoder": False, "add_cross_attention": True}
            for attribute, value in (overrides or {}).get(task, decoder).items():
                setattr(changed, attribute, value)
            with tempfile.TemporaryDirectory() as folder:
                zero = tuple(zero_gradients)
                case = Case(
                    task,
                    kind,
                    changed,
                    Path(folder),
                    spec,
                    zero,
                    tolerance,
                    extra_inputs=inputs or {},
                )
                for check in chosen:
                    full = f"{kind.__name__}{label}.{check}"
                    report.run(known[check], full, case, skip.get(check))
    if report.failed:
        lines = [f"{check}: {reason}" for check, reason in report.failed.items()]
        count = f"{len(lines)} of {len(lines) + len(report.passed)} checks failed for '{name}'"
        raise AssertionError("\n\n".join([count, *lines]))
    ran = {label.rpartition(".")[2] for label in report.passed}
    asked = set(wanted or ()) - skip.keys()
    if asked - ran or not ran:
        what = ", ".join(sorted(asked - ran)) or "nothing"
        raise AssertionError(f"{what} was checked on no head of '{name}'\n{report}")
    if report.not_run:
        warnings.warn(NotRunWarning(f"'{name}': {report}"), stacklevel=2)
    return report

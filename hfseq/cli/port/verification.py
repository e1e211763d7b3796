"""Checks a port with `hfseq.testing.check_architecture` on a tiny configuration.

If the results of a head differ from PyTorch's, `hfseq.cli.port.bisection` finds the first module
whose results differ. This module needs PyTorch, because the bridge creates the tiny models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq import plugins
from hfseq.cli.port.bisection import Difference, first_difference
from hfseq.errors import UsageError, one_line
from hfseq.plugins import ArchitectureSpec
from hfseq.testing import run_checks
from hfseq.testing.case import ROWS, ZERO_GRADIENTS, Case, Report

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: If one of these checks fails, the port is compared with PyTorch module by module.
COMPARISONS = ("shapes", "torch_parity", "torch_loads_it", "cached_decoding", "eager")
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class HeadResult:
    """The result of the checks of one head.

    Attributes:
        head: The task, such as "ForCausalLM".
        report: The report of `hfseq.testing.run_checks`.
        difference: The first difference between the modules, if a comparison found one.
        inputs: The inputs of the head that `run_checks` cannot create itself.
    """

    head: str
    report: Report
    difference: Difference | None = None
    inputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether no check failed, and at least one passed."""
        return bool(self.report.passed) and not self.report.failed

    def __str__(self) -> str:
        passed, failed = len(self.report.passed), self.report.failed
        lines = [f"{self.head}: {passed} checks passed, {len(failed)} failed"]
        for kind, group in (("skipped", self.report.skipped), ("not run", self.report.not_run)):
            if group:
                names = ", ".join(f"{_check(name)} ({why})" for name, why in group.items())
                lines.append(f"  {kind}: {one_line(names, 600)}")
        for name, reason in failed.items():
            lines.append(f"  FAILED {_check(name)}: {_indented(reason)}")
        if self.difference is not None:
            lines.append("  the first module that differs from PyTorch's:")
            lines.append(f"    {_indented(str(self.difference), 4)}")
        return "\n".join(lines)


def _check(name: str) -> str:
    return name.rpartition(".")[2]


def _indented(text: str, columns: int = 2) -> str:
    return text.strip().replace("\n", "\n" + " " * columns)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Returns a small configuration of a model type for `hfseq.testing.run_checks`.

    Raises:
        UsageError: The configuration cannot be made tiny.
    """
    tiny: Any = importlib.import_module("hfseq_plugins.bridge.tiny")
    try:
        with quiet():
            config = tiny.tiny_config(model_type)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the configuration of {model_type} cannot be made tiny, so the port cannot be "
            f"compared with PyTorch: {one_line(error)}. Write a test that calls "
            "hfseq.testing.check_architecture with a small configuration of your own"
        ) from error
    try:
        text_config = config.get_text_config()
    except ValueError:  # the configuration has several text configurations
        text_config = config
    for part in {id(part): part for part in (config, text_config)}.values():
        # The checks use token IDs of 4 and higher, so the padding ID must be lower than 4.
        if getattr(part, "pad_token_id", 0) not in range(4):
            part.pad_token_id = 0
    _round_vocabularies(config, text_config)
    return config


def _round_vocabularies(*configs: PreTrainedConfig) -> None:
    """Rounds vocabulary sizes up to multiples of eight, so that eight devices can shard them."""
    for config in configs:
        vocab_size = getattr(config, "vocab_size", None)
        if not isinstance(vocab_size, int) or vocab_size % 8 == 0:
            continue
        config.vocab_size = vocab_size + 8 - vocab_size % 8
        try:
            type(configs[0]).from_dict(configs[0].to_dict())
        except Exception:  # the size must equal that of another part of the model
            config.vocab_size = vocab_size


def extra_inputs(model_type: str, config: PreTrainedConfig, model: Any) -> dict[str, np.ndarray]:
    """Returns the inputs of a head that `run_checks` cannot create, such as bounding boxes.

    Args:
        model_type: The model type.
        config: The tiny configuration.
        model: The model of the port.
    """
    import torch
    import transformers

    tiny: Any = importlib.import_module("hfseq_plugins.bridge.tiny")
    sizes: Any = importlib.import_module("hfseq_plugins.bridge.tiny_sizes")
    model_class = getattr(transformers, model.torch_class_name(), None)
    if model_class is None:
        return {}
    special = set(sizes.INPUTS.get(model_type, lambda *_: {})(config, np.random.default_rng(0)))
    with torch.device("meta"):
        reference = model_class._from_config(config)
    inputs = tiny.tiny_inputs(reference)
    names = {name for name in inputs if name in special or _has_own_rank(name, inputs[name])}
    if "input_values" in inputs:  # convolutions may need more samples than the checks have
        names.add("input_values")
        values = inputs["input_values"]
        if (
            values.ndim == 2
            and "attention_mask" in inspect.signature(model_class.forward).parameters
        ):
            inputs["attention_mask"] = np.ones(values.shape, np.int32)
            inputs["attention_mask"][1, values.shape[1] * 2 // 3 :] = 0
            inputs["input_values"] = values * inputs["attention_mask"].astype(np.float32)
            names.add("attention_mask")
    # The tiny inputs have two examples, and the checks need eight.
    return {
        name: np.concatenate([inputs[name]] * (ROWS // len(inputs[name])))
        for name in sorted(names)
        if model.accepts(name) and isinstance(inputs[name], np.ndarray)
    }


def _has_own_rank(name: str, value: Any) -> bool:
    """Returns whether an input has more axes than usual, such as a spectrogram or a video."""
    usual = {"input_features": 2, "input_values": 2, "pixel_values": 4}
    return np.ndim(value) > usual.get(name, 99)


def verify(
    path: Path,
    model_type: str,
    config: PreTrainedConfig,
    heads: Iterable[str] | None = None,
    checks: Sequence[str] | None = None,
    explain: bool = True,
) -> Iterator[HeadResult]:
    """Runs the checks of `hfseq.testing` on each head of a port.

    Args:
        path: The file of the port. It is loaded as a plugin.
        model_type: The model type.
        config: A tiny configuration.
        heads: The tasks to check. Default: all tasks that the file registers.
        checks: Names of the checks. Default: all checks.
        explain: Whether to search for the first module that differs if a check fails.

    Yields:
        The result of each head.

    Raises:
        PluginError: The file cannot be loaded, for instance because it has statements without a
            translation.
    """
    spec = load_port(path, model_type)
    for head in spec.heads if heads is None else heads:
        with quiet():
            yield _verify_head(spec, config, head, checks, explain)


def load_port(path: Path, model_type: str) -> ArchitectureSpec:
    """Loads a port as a plugin and returns the architecture that it registers.

    Raises:
        UsageError: The file does not register the model type.
    """
    with quiet():
        architectures = plugins.load([path]).architectures
    spec = architectures.get(model_type)
    if Path(str(_origin(spec.plugin))).resolve() != path.resolve():
        raise UsageError(f"{path} does not register the model type '{model_type}'")
    return spec


def _origin(plugin: str) -> str | None:
    return next((i.origin for i in plugins.load().infos if i.name == plugin), None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings and progress bars of Transformers while a port is checked."""
    import transformers

    loggers = [logging.getLogger(name) for name in ("hfseq", "hfseq_plugins", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _verify_head(
    spec: ArchitectureSpec,
    config: PreTrainedConfig,
    head: str,
    checks: Sequence[str] | None,
    explain: bool,
) -> HeadResult:
    try:
        inputs = extra_inputs(spec.model_type, config, spec.load_head(head)(config, _do_init=False))
    except Exception:  # the checks report the error
        inputs = {}
    report = run_checks(
        spec.model_type,
        config,
        heads=[head],
        checks=checks,
        inputs=inputs,
        tolerance=TOLERANCE,
    )
    difference = None
    if explain and any(_check(name) in COMPARISONS for name in report.failed):
        with contextlib.suppress(Exception):  # the report already contains the error
            difference = _bisect(spec, config, head, inputs)
    return HeadResult(head, report, difference, inputs)


def _bisect(
    spec: ArchitectureSpec, config: PreTrainedConfig, head: str, inputs: Mapping[str, np.ndarray]
) -> Difference | None:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(
            head,
            spec.load_head(head),
            config,
            Path(folder),
            spec,
            ZERO_GRADIENTS,
            TOLERANCE,
            extra_inputs=inputs,
        )
        return first_difference(case)


def config_source(config: PreTrainedConfig) -> str:
    """Returns a Python expression that creates a configuration.

    The expression passes only values that differ from the defaults, if they are sufficient to
    create an equal configuration.
    """
    name = type(config).__name__
    try:
        changes = _changes(config)
        is_equal = type(config)(**changes).to_dict() == config.to_dict()
    except Exception:  # some classes validate combinations of values or compute attributes
        is_equal = False
    if not is_equal:
        return f"{name}.from_dict({config.to_dict()!r})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in changes.items())})"


def _changes(config: PreTrainedConfig) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    defaults = vars(type(config)())
    changes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in defaults and defaults[name] == value:
            continue
        if isinstance(value, PreTrainedConfig):
            value = {"model_type": value.model_type, **_changes(value)}
        changes[name] = value
    return changes


def array_source(value: np.ndarray) -> str:
    """Returns a Python expression that creates the input of a test.

    A floating-point array becomes random numbers of the same shape. Other arrays consist of two
    examples that repeat, so only these two are written out.
    """
    if np.issubdtype(value.dtype, np.floating):
        return f"np.random.default_rng(0).normal(size={value.shape}).astype(np.float32)"
    repeats = (len(value) // 2, *[1] * (value.ndim - 1))
    return f"np.tile(np.array({value[:2].tolist()}, np.{value.dtype.name}), {repeats})"

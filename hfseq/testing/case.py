"""One task head under test: its inputs, outputs and gradients, and the comparison of results."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.modeling.base import MEDIA_INPUTS
from hfseq.nn import trees
from hfseq.nn.outputs import FlaxModelOutput

if TYPE_CHECKING:
    import numpy.typing as npt

    from hfseq.plugins import ArchitectureSpec

logger = logging.getLogger(__name__)
Batch = Mapping[str, Any]
Params = Mapping[str, Any]
#: Whether the checks compile the models. Without it, many small models are compared faster.
COMPILE = True
ROWS, LENGTH, TARGET_LENGTH, SAMPLES = 8, 16, 12, 90


#: Outputs whose names end with one of these suffixes are not compared.
NOT_COMPARED = ("past_key_values", "hidden_states", "attentions")
#: Name of the output that training adds to the loss, such as the load-balancing loss of experts. It
#: is a sum over tokens. PyTorch's classes return a mean over tokens, `aux_loss`.
AUXILIARY_LOSS = "auxiliary_loss"
#: Regular expressions for the paths of parameters whose gradient is zero. The bias of a key
#: projection adds the same constant to all attention scores of a query, which does not change the
#: softmax. The bias of the logits is a buffer in PyTorch and not trained.
ZERO_GRADIENTS = (r"(key|k_proj)/bias$", r"final_logits_bias$")


class Skipped(Exception):
    """A check does not apply to the model. The message is the reason."""


class NotRun(Skipped):
    """A check applies to the model, but cannot run on this machine. The message is the reason."""


class Side(NamedTuple):
    """The names of the inputs of an encoder or a decoder."""

    ids: str
    mask: str
    segments: str


SOURCE = Side("input_ids", "attention_mask", "segment_ids")
TARGET = Side("decoder_input_ids", "decoder_attention_mask", "decoder_segment_ids")


@dataclasses.dataclass
class Report:
    """The results of :func:`check_architecture`. Print a report to see a summary.

    Attributes:
        passed: Names of the checks that passed, such as ``"FlaxBertModel.eager"``.
        skipped: The reason for each check that does not apply or that the caller skipped.
        not_run: The reason for each check that applies but cannot run here: PyTorch is not
            installed, or there are too few devices.
        failed: The error of each check that failed.
        unmoved: Configuration fields that have their default value in all tested configurations.
    """

    passed: list[str] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    unmoved: list[str] = dataclasses.field(default_factory=list)

    def run(self, check: Callable[[Case], None], name: str, case: Case, skip: str | None) -> None:
        """Runs a check and records the result.

        Args:
            check: The function of the check.
            name: The name of the check in the report.
            case: The task head under test.
            skip: The reason to skip the check, if any.
        """
        started, result = time.perf_counter(), "failed"
        try:
            if skip is not None:
                raise Skipped(skip)
            check(case)
            self.passed.append(name)
            result = "passed"
        except NotRun as reason:
            self.not_run[name] = str(reason)
            result = "not run"
        except Skipped as reason:
            self.skipped[name] = str(reason)
            result = "skipped"
        except AssertionError as error:
            self.failed[name] = str(error)
        except Exception:
            self.failed[name] = traceback.format_exc(limit=-4)
        logger.info("%s %s in %.1f s", name, result, time.perf_counter() - started)

    def __str__(self) -> str:
        groups = {"FAILED": self.failed, "NOT RUN": self.not_run, "skipped": self.skipped}
        lines = [f"{len(self.passed)} checks passed"]
        lines += [
            f"{word} {check}: {reason}"
            for word, group in groups.items()
            for check, reason in group.items()
        ]
        if self.unmoved:
            lines.append(
                "configuration fields that have their default value in all tested configurations: "
                f"{', '.join(self.unmoved)}"
            )
        return "\n".join(lines)


@dataclasses.dataclass
class Case:
    """One task head under test with the values that the checks share.

    Attributes:
        task: Task of the head, such as ``"ForMaskedLM"``.
        cls: The model class.
        config: The configuration.
        folder: A temporary directory.
        spec: The registered architecture.
        zero_gradients: Regular expressions for the paths of parameters whose gradient is expected
            to be zero.
        tolerance: Tolerance of the comparisons with PyTorch.
        shared: Objects that one check creates and other checks reuse, such as the PyTorch model.
        extra_inputs: Additional inputs of the model.
        compare_torch: Whether the checks that compare with PyTorch are requested.
    """

    task: str
    cls: Any
    config: Any
    folder: Path
    spec: ArchitectureSpec
    zero_gradients: tuple[str, ...]
    tolerance: float
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra_inputs: Batch = dataclasses.field(default_factory=dict)
    compare_torch: bool = True

    @property
    def has_torch_class(self) -> bool:
        """Whether results can be compared with a PyTorch class of Transformers."""
        import transformers

        name = self.model.torch_class_name()
        has_torch = importlib.util.find_spec("torch") is not None
        return self.compare_torch and has_torch and hasattr(transformers, name)

    @functools.cached_property
    def model(self) -> Any:
        """The model in float32, with all parameters moved away from their initial values."""
        model = self.cls(self.config)
        random = np.random.default_rng(0)
        model.params = jax.tree.map(
            lambda leaf: leaf + jnp.asarray(random.normal(size=leaf.shape) * 0.05, leaf.dtype),
            model.params,
        )
        return model

    @property
    def gradient_tolerance(self) -> float:
        """The tolerance of gradients in comparisons with PyTorch and with several devices."""
        return self.tolerance * self.gradient_rounding

    @property
    def gradient_rounding(self) -> float:
        """The factor by which tolerances of gradients are larger than those of outputs.

        A gradient is a sum over all n positions of the batch. The rounding error of a sum grows
        like ``sqrt(n)``, so the factor is ``sqrt(n) / 2``.
        """
        sizes = [np.prod(value.shape[:2]) for value in self.inputs.values() if value.ndim > 1]
        terms = max(sizes, default=ROWS)
        if "pixel_values" in self.inputs:
            terms = max(terms, ROWS * self.inputs["pixel_values"][0, 0].size)
        return max(1.0, float(np.sqrt(terms)) / 2)

    @property
    def params(self) -> Params:
        """The parameters without other collections, such as batch statistics."""
        return self.model.split_collections(self.model.params)[0]

    @functools.cached_property
    def sides(self) -> tuple[Side, ...]:
        """The input names of the encoder and the decoder, as far as they exist and read tokens."""
        source = (SOURCE,) if self.model.has_input(SOURCE.ids) else ()
        both = getattr(self.config, "is_encoder_decoder", False)
        return (*source, TARGET) if both and self.model.accepts(TARGET.ids) else source

    @functools.cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        """The model inputs by name: a batch of eight examples.

        The second example is padded on the right. If the lengths of encoder and decoder inputs
        differ, the third example of the decoder inputs is padded instead.
        """
        random, config = np.random.default_rng(1), self.config
        choices = (2,) if self.task == "ForMultipleChoice" else ()
        shapes = {SOURCE: ((ROWS, *choices, LENGTH), 1)} if SOURCE in self.sides else {}
        if TARGET in self.sides:
            # The task head classifies the decoder's hidden state at the index of the source's EOS
            # token, so source and target have the same length and padding.
            alike = self.task == "ForSequenceClassification"
            shapes[TARGET] = ((ROWS, LENGTH), 1) if alike else ((ROWS, TARGET_LENGTH), 2)
        inputs: dict[str, np.ndarray] = {}
        for side, (shape, padded) in shapes.items():
            words = self.model.vocab_size(side.ids)
            ids = random.integers(4 if words > 8 else 0, words, shape).astype(np.int32)
            mask = np.ones_like(ids)
            mask[padded, ..., 10:] = 0
            inputs |= {side.ids: self.apply_padding_and_eos(side, ids, mask), side.mask: mask}
        for name in filter(self.model.has_input, MEDIA_INPUTS):
            shape = self.model.input_shape[1:]
            if name == "pixel_values":
                channels = getattr(config, "num_channels", 3)
                shape = self.model.image_shape() or (channels, 32, 32)
            inputs[name] = random.normal(size=(ROWS, *shape)).astype(np.float32)
        if self.model.has_input("input_values") and "input_values" not in self.extra_inputs:
            inputs |= self.audio_inputs(random)
        if getattr(config, "add_cross_attention", False):
            states = random.normal(size=(ROWS, 5, config.hidden_size))
            inputs["encoder_hidden_states"] = states.astype(np.float32)
            mask = np.array([[1, 1, 1, 1, row % 2] for row in range(ROWS)])
            inputs["encoder_attention_mask"] = mask
        return inputs | {name: np.asarray(value) for name, value in self.extra_inputs.items()}

    @staticmethod
    def audio_inputs(random: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns eight audio examples. The second is padded on the right."""
        values = random.normal(size=(ROWS, SAMPLES)).astype(np.float32)
        mask = np.ones((ROWS, SAMPLES), np.int32)
        mask[1, SAMPLES * 2 // 3 :] = 0
        return {"input_values": values * mask.astype(np.float32), "attention_mask": mask}

    def apply_padding_and_eos(self, side: Side, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Returns ``ids`` with padding where ``mask`` is 0.

        The last token of an encoder-decoder's source is replaced by the EOS token.
        """
        pad = getattr(self.model.text_config, "pad_token_id", None) or 0
        ids = np.where(mask == 1, ids, pad).astype(np.int32)
        end = getattr(self.config, "eos_token_id", None)
        if len(self.sides) == 2 and side == SOURCE and isinstance(end, int):
            np.put_along_axis(ids, mask.sum(-1, keepdims=True) - 1, end, -1)
        return ids

    def variant(self, **options: Any) -> Any:
        """Returns a model without parameters that is created with other options.

        The model has the same collections, such as batch statistics, as :attr:`model`.
        """
        model = self.cls(self.config, _do_init=False, **options)
        if model.extra_shape_tree:
            same = model.stacked_prefixes == self.model.stacked_prefixes
            model.extra = self.model.extra if same else model.init_extra(self.model.key)
        return model

    @functools.cached_property
    def forward(self) -> Callable[..., dict[str, jax.Array]]:
        """The compiled forward pass ``(params, inputs) -> outputs`` without dropout."""
        return compile_forward(self.model)

    @functools.cached_property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs by name."""
        if "outputs" in vars(self) or not COMPILE:
            return {name: value.shape for name, value in self.outputs.items()}
        shapes = jax.eval_shape(self.forward, self.params, self.inputs)
        return {name: value.shape for name, value in shapes.items()}

    @functools.cached_property
    def outputs(self) -> dict[str, np.ndarray]:
        """The outputs for :attr:`inputs`."""
        return to_numpy(self.forward(self.params, self.inputs))

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Random weights for each output.

        The loss of the gradient checks is the sum of all outputs multiplied by these weights.
        """
        random = np.random.default_rng(2)
        return {
            name: self.zero_padding(name, random.normal(size=shape).astype(np.float32))
            for name, shape in self.output_shapes.items()
        }

    def zero_padding(self, name: str, value: np.ndarray) -> np.ndarray:
        """Sets the values of an output at padding to zero, because they are undefined."""
        if not self.is_per_token(name):
            return value
        mask = self.inputs[self.side(name).mask]
        return value * mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))

    def side(self, name: str) -> Side:
        """Returns the input names of the encoder or decoder that computes an output."""
        return self.sides[0] if name.startswith("encoder_") else self.sides[-1]

    def reads_tokens(self, name: str) -> bool:
        """Returns whether the submodel that computes an output has token inputs."""
        if name.startswith("encoder_"):
            return SOURCE in self.sides
        return bool(self.sides) and not name.startswith("vision_")

    @functools.cached_property
    def source(self) -> dict[str, np.ndarray]:
        """The inputs of the encoder of an encoder-decoder."""
        return {n: value for n, value in self.inputs.items() if not n.startswith("decoder_")}

    def is_per_token(self, name: str) -> bool:
        """Returns whether an output has an entry for every token."""
        if not self.reads_tokens(name):
            return False
        shape = self.inputs[self.side(name).ids].shape
        return self.output_shapes[name][: len(shape)] == shape

    def train(
        self,
        model: Any,
        params: Params,
        inputs: Batch | None = None,
        dropout: bool = True,
        excluded: Iterable[str] = (),
    ) -> tuple[dict[str, np.ndarray], dict[trees.Path, np.ndarray]]:
        """Returns the outputs of a training step by name, and the gradients by parameter path.

        Args:
            model: The model.
            params: The parameters of the model.
            inputs: The inputs. The default is :attr:`inputs`.
            dropout: Whether to apply dropout.
            excluded: Names of outputs that are not part of the loss.
        """
        options = {"train": dropout, "dropout_rng": jax.random.key(3)}
        weights = {n: value for n, value in self.weights.items() if n not in set(excluded)}

        def run(params: Params, inputs: Batch) -> Any:
            output = model(**inputs, params=params, **options)
            # In training, some models also return their collections.
            output = comparable_outputs(output[0] if isinstance(output, tuple) else output)
            return sum(jnp.sum(output[name] * weights[name]) for name in weights), output

        step = jit(jax.grad(run, has_aux=True))
        gradient, outputs = step(params, self.inputs if inputs is None else inputs)
        return to_numpy(outputs), to_numpy(trees.flatten(gradient))

    @functools.cached_property
    def results(self) -> tuple[dict[str, np.ndarray], dict[trees.Path, np.ndarray]]:
        """The outputs and the gradient of every parameter, computed by one program.

        The results have no dropout. The loss does not include an auxiliary loss.
        """
        return self.train(self.model, self.params, dropout=False, excluded=[AUXILIARY_LOSS])

    @functools.cached_property
    def gradients(self) -> dict[trees.Path, np.ndarray]:
        """The gradient of every parameter, without dropout."""
        if AUXILIARY_LOSS not in self.output_shapes:
            return self.results[1]
        return self.train(self.model, self.params, dropout=False)[1]

    @functools.cached_property
    def checkpointed_step(self) -> tuple[dict[str, np.ndarray], dict[trees.Path, np.ndarray]]:
        """Outputs and gradients of a training step with gradient checkpointing."""
        return self.train(self.variant(gradient_checkpointing=True), self.params)


def comparable_outputs(output: Any) -> dict[str, jax.Array]:
    """Returns the outputs to compare, by name.

    If an output is the output object of a submodel, such as ``text_model_output``, its
    ``last_hidden_state`` is compared.
    """
    outputs = {}
    for name, value in output.items():
        if isinstance(value, FlaxModelOutput):
            outputs[f"{name}.last_hidden_state"] = value.last_hidden_state
        elif not name.endswith(NOT_COMPARED):
            outputs[name] = value
    return outputs


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles without optimizations on CPUs, because the checks run each function only once.

    If `COMPILE` is false, the function is returned and runs operation by operation.
    """
    if not COMPILE:
        return function
    cpu = jax.default_backend() == "cpu"
    return jax.jit(
        function, compiler_options={"xla_backend_optimization_level": 0} if cpu else None
    )


def compile_forward(
    model: Callable[..., Any], **options: Any
) -> Callable[..., dict[str, jax.Array]]:
    """Compiles ``(params, inputs) -> outputs`` of ``model``."""
    return jit(lambda params, inputs: comparable_outputs(model(**inputs, params=params, **options)))


def to_numpy(tree: Any) -> Any:
    """Copies a tree to NumPy."""
    return jax.tree.map(np.asarray, tree)


def param_leaves(model: Any) -> dict[trees.Path, np.ndarray]:
    """Returns the parameters of a model by path, as NumPy arrays."""
    return to_numpy(trees.flatten(model.split_collections(model.params)[0]))


def relative_error(ours: npt.ArrayLike, theirs: npt.ArrayLike) -> float:
    """Returns ``max|a - b| / max(1, max|b|)``, where a is ``ours`` and b is ``theirs``.

    The error is infinite if the shapes differ or a value is not finite.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.max(np.abs(a - b), initial=0) / max(1.0, np.max(np.abs(b), initial=0)))


def assert_close(
    ours: Mapping[Any, Any],
    theirs: Mapping[Any, Any],
    tolerance: float,
    label: str,
    rounding: float = 0.0,
) -> None:
    """Asserts that two dicts of arrays agree. The message lists all entries that differ.

    Args:
        ours: Arrays of hfseq.
        theirs: Expected arrays with the same keys.
        tolerance: Maximum :func:`relative_error`. 0 requires equal bits and dtypes.
        label: Description of the comparison.
        rounding: Absolute error that is allowed in any case, as a fraction of the largest value of
            all entries. In some entries, such as the gradient of a key projection's bias, large
            terms cancel each other. The error of such an entry is the rounding error of its terms.

    Raises:
        AssertionError: Keys or values differ.
    """
    assert set(ours) == set(theirs), f"{label}: names differ: {sorted(set(ours) ^ set(theirs))}"
    largest = max((np.abs(value).max(initial=0) for value in theirs.values()), default=0)
    lines = []
    for name, value in ours.items():
        difference = relative_error(value, theirs[name])
        scale = max(1.0, np.abs(theirs[name]).max(initial=0))
        allowed_difference = max(tolerance, float(rounding * largest / scale) if rounding else 0.0)
        if not difference <= allowed_difference or (
            not tolerance and value.dtype != theirs[name].dtype
        ):
            label_of_entry = trees.join(name) if isinstance(name, tuple) else name
            lines.append(f"  {label_of_entry}: {difference:.1e}")
    allowed = f"allowed: {tolerance:.0e}" if tolerance else "must be equal to the last bit"
    assert not lines, f"{label} ({allowed}):\n" + "\n".join(lines)

"""Compares the results of a tiny PyTorch model with those of the same model in the bridge."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from hfseq.errors import failure
from hfseq_plugins.bridge import modules, tiny, tiny_sizes, trace
from hfseq_plugins.bridge.coverage import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NOT_COMPARED
from hfseq_plugins.bridge.dtypes import numpy_array, torch_tensor
from hfseq_plugins.bridge.model import bridged_class

#: XLA options that shorten compilation, which takes longer than running a tiny model.
COMPILER_OPTIONS: Any = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
}


def flatten(outputs: Any, prefix: str = "") -> dict[str, Any]:
    """Collects the floating-point arrays or tensors in nested outputs, and names them."""
    if isinstance(outputs, torch.Tensor):
        return {prefix: outputs} if outputs.is_floating_point() else {}
    if isinstance(outputs, jax.Array | np.ndarray):
        return {prefix: outputs} if jnp.issubdtype(outputs.dtype, jnp.floating) else {}
    if isinstance(outputs, Mapping):
        entries: Any = outputs.items()
    elif isinstance(outputs, list | tuple):
        entries = enumerate(outputs)
    else:
        return {}
    arrays: dict[str, Any] = {}
    for name, value in entries:
        arrays |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return arrays


def options_of(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Returns the arguments that disable the cache in the forward pass of a model."""
    parameters = inspect.signature(model.forward).parameters
    if model.config.model_type in tiny_sizes.OWN_CACHE_OPTION:
        return {}
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_cache = hasattr(model.config.get_text_config(), "use_cache")
    if "use_cache" in parameters or (accepts_any and has_cache):
        return {"use_cache": False}
    return {}


def run_torch(
    model: transformers.PreTrainedModel, inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Runs a PyTorch model and returns its floating-point outputs by name."""
    arguments = {name: _torch_input(value) for name, value in inputs.items()}
    return flatten(model(**arguments, **options_of(model)))


def _torch_input(value: Any) -> Any:
    return torch_tensor(value) if isinstance(value, np.ndarray) else value


def error(ours: Any, theirs: Any, least: float = 1.0) -> float:
    """Returns the largest relative difference between two arrays.

    Args:
        ours: The array to check.
        theirs: The reference.
        least: Lower limit of the denominator, which is the largest absolute value of `theirs`.

    Returns:
        The difference. It is infinite if the shapes differ.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(is_same, 0.0, np.abs(a - b)).max()
        largest = np.abs(np.where(np.isfinite(b), b, 0)).max()
    difference = float("inf") if np.isnan(difference) else difference
    return float(difference / max(least, largest))


def tensors_of(model: torch.nn.Module) -> dict[str, jax.Array]:
    """Returns the parameters and stored buffers of a PyTorch model as jax arrays."""
    stored = model.state_dict().keys()
    return {
        name: jnp.asarray(numpy_array(tensor))
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in stored and tensor.dtype != torch.int64
    }


class Bridged:
    """Runs a tiny PyTorch model with the bridge.

    Args:
        model: The PyTorch model.
        inputs: The inputs of the model by name, as NumPy arrays.

    If the PyTorch model is in training mode, the bridge also runs in training mode, and without
    dropout.
    """

    def __init__(self, model: transformers.PreTrainedModel, inputs: Mapping[str, Any]):
        self.module = modules.build(model.config, type(model).__name__)
        self.train = model.training
        if self.train:
            prepare_training(self.module)
        self.tensors = tensors_of(model)
        static = tiny.static_inputs(model.config.model_type)
        self.arrays = {
            name: jnp.asarray(value)
            for name, value in inputs.items()
            if isinstance(value, np.ndarray) and name not in static
        }
        self.constants = {
            name: value for name, value in inputs.items() if name not in self.arrays
        } | options_of(model)
        self.trained = [
            name
            for name, parameter in model.named_parameters()
            if name in self.tensors and parameter.is_floating_point() and parameter.requires_grad
        ]

    def outputs(
        self, tensors: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array]
    ) -> dict[str, Any]:
        """Runs the forward pass.

        Returns:
            The floating-point outputs by name. In training mode, they contain the changed buffers.
        """
        inputs = {**arrays, **self.constants}
        outputs, buffers = trace.call(self.module, tensors, inputs, train=self.train)
        return flatten(outputs) | (flatten(buffers) if self.train else {})

    def forward(self) -> dict[str, jax.Array]:
        """Compiles and runs the forward pass, and returns its floating-point outputs by name."""
        return _run(self.outputs, self.tensors, self.arrays)

    def gradients(
        self, factors: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Returns the outputs and the gradients of a loss.

        Args:
            factors: The weight of each element of the outputs, by output name. The loss is the
                weighted sum of the outputs.

        Returns:
            The outputs by name, and the gradients by parameter name.
        """
        fixed = {n: x for n, x in self.tensors.items() if n not in self.trained}

        def loss(trained: Any, fixed: Any, arrays: Any) -> Any:
            outputs = self.outputs({**trained, **fixed}, arrays)
            total = sum(jnp.sum(outputs[name] * factor) for name, factor in factors.items())
            return total, outputs

        trained = {name: self.tensors[name] for name in self.trained}
        gradients, outputs = _run(jax.grad(loss, has_aux=True), trained, fixed, self.arrays)
        return outputs, gradients


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function with `COMPILER_OPTIONS` and calls it."""
    lowered = jax.jit(function).lower(*arguments)
    try:
        compiled = lowered.compile(COMPILER_OPTIONS)
    except jax.errors.JaxRuntimeError:  # this version of XLA does not know one of the options
        compiled = lowered.compile()
    return compiled(*arguments)


def torch_gradients(
    model: transformers.PreTrainedModel,
    inputs: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Returns PyTorch's outputs and gradients of the loss in `Bridged.gradients`, by name."""
    model.zero_grad()
    with torch.enable_grad():
        outputs = run_torch(model, inputs)
        total = sum((outputs[n] * torch.from_numpy(f)).sum() for n, f in factors.items())
        assert isinstance(total, torch.Tensor)
        total.backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return outputs, gradients


def in_float64(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the float32 arrays in the inputs of a model to float64."""
    is_float32 = {n for n, x in inputs.items() if isinstance(x, np.ndarray) and x.dtype == "f4"}
    return {n: x.astype(np.float64) if n in is_float32 else x for n, x in inputs.items()}


def loss_factors(outputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Draws a random weight for each element of the outputs.

    The loss whose gradients are compared is the weighted sum of the outputs. The weights of an
    output are divided by its number of elements. Outputs that are not finite get no weights.
    """
    random = np.random.default_rng(1)
    return {
        name: (random.normal(size=tuple(value.shape)) / max(1, value.numel())).astype(np.float32)
        for name, value in outputs.items()
        if bool(torch.isfinite(value).all())
    }


def worst(errors: Mapping[str, float]) -> tuple[float | None, str]:
    """Returns the largest error and the name of the output or parameter that has it."""
    if not errors:
        return None, ""
    name = max(errors, key=lambda entry: errors[entry])
    return errors[name], name


def compare_outputs(
    ours: Mapping[str, Any], theirs: Mapping[str, torch.Tensor]
) -> tuple[float | None, str]:
    """Returns the largest error of the outputs and the name of the output that has it."""
    errors = {
        name: error(ours[name], value.detach().numpy()) if name in ours else float("inf")
        for name, value in theirs.items()
    }
    return worst(errors)


def compare_gradients(
    ours: Mapping[str, Any], theirs: Mapping[str, np.ndarray]
) -> tuple[float | None, str]:
    """Returns the largest error of the gradients and the name of the parameter that has it.

    The error of a gradient is relative to the largest value in the gradient of that parameter. If
    a thousandth of the largest value in all gradients is larger, the error is relative to this
    thousandth.
    """
    largest = max((float(np.abs(x).max(initial=0)) for x in theirs.values()), default=0.0)
    least = max(largest * 1e-3, 1e-30)
    errors = {}
    for name, gradient in ours.items():
        reference = theirs.get(name)
        reference = np.zeros(gradient.shape) if reference is None else reference
        errors[name] = error(gradient, reference, least)
    return worst(errors)


def prepare_training(model: torch.nn.Module) -> None:
    """Makes the training mode of a model deterministic and well-conditioned.

    The rates of dropout and of other noise become 0, and SpecAugment is disabled. Batch
    normalization would amplify rounding errors, because a channel of a tiny model may only have two
    values. Its constant `eps` therefore becomes 1.
    """
    configs: list[Any] = [part.config for part in model.modules() if hasattr(part, "config")]
    nested = [entry for config in configs for entry in vars(config).values()]
    configs += [entry for entry in nested if isinstance(entry, transformers.PreTrainedConfig)]
    entries: list[Any] = [*model.modules(), *configs]
    for entry in entries:
        for name, value in list(vars(entry).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(entry, name, 0.0)
        if "Drop" in type(entry).__name__:
            entry.p = 0.0
        if isinstance(entry, torch.nn.modules.batchnorm._BatchNorm):
            entry.eps = 1.0
        if hasattr(entry, "apply_spec_augment"):
            entry.apply_spec_augment = False


def compare_training(model: transformers.PreTrainedModel) -> str:
    """Compares a training step without dropout in the bridge and in PyTorch.

    The outputs, the gradients and the buffers that the step changes must agree in training mode.
    The updates of all optimizers are functions of the gradients. The compared model is a new model
    of the same model type as `model`.

    Returns:
        "agrees", the name and the error of what differs, or why nothing was compared.
    """
    model_type = model.config.model_type
    try:
        inputs = tiny.tiny_inputs(model)
        with torch.no_grad():
            factors = loss_factors(run_torch(_training_model(model_type), inputs))
        reference = _training_model(model_type)
        outputs, theirs = torch_gradients(reference, inputs, factors)
    except Exception as error:
        return not_compared(error)
    bridged = Bridged(_training_model(model_type), inputs)
    if not theirs or not bridged.trained:
        return f"{NOT_COMPARED}: PyTorch computes no gradients"
    ours, gradients = bridged.gradients(factors)
    problem = _difference(ours, gradients, outputs | dict(reference.named_buffers()), theirs)
    if problem:
        reference = _training_model(model_type).double()
        try:
            outputs, theirs = torch_gradients(reference, in_float64(inputs), factors)
        except RuntimeError:  # the model only computes in float32
            return problem
        problem = _difference(ours, gradients, outputs | dict(reference.named_buffers()), theirs)
    return problem or "agrees"


def _training_model(model_type: str) -> transformers.PreTrainedModel:
    model = tiny.tiny_model(model_type).train()
    prepare_training(model)
    return model


def _difference(
    ours: Mapping[str, Any],
    gradients: Mapping[str, Any],
    their_outputs: Mapping[str, torch.Tensor],
    their_gradients: Mapping[str, np.ndarray],
) -> str:
    """Returns the name and the error of an output or a gradient that differs, or ""."""
    compared = {name: value for name, value in their_outputs.items() if name in ours}
    error, name = compare_outputs(ours, compared)
    if error is not None and error > FORWARD_TOLERANCE:
        return f"{name} differs by {error:.1e}"
    error, name = compare_gradients(gradients, their_gradients)
    if error is not None and error > GRADIENT_TOLERANCE:
        return f"the gradient of {name} differs by {error:.1e}"
    return ""


def not_compared(error: Exception) -> str:
    """Returns the result of a check that PyTorch does not support."""
    return f"{NOT_COMPARED}: PyTorch raises {failure(error, 130)}"


def compare_files(model: transformers.PreTrainedModel) -> str:
    """Loads a checkpoint of a model with the bridge, saves it, and loads both in PyTorch.

    Returns:
        "agrees" if all tensors are the same, the names of the first tensors that differ, or why
        nothing was compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, after = f"{folder}/before", f"{folder}/after"
        try:
            model.save_pretrained(before)
            expected = type(model).from_pretrained(before).state_dict()
        except Exception as error:
            return not_compared(error)
        bridged = bridged_class(type(model).__name__)
        bridged.from_pretrained(before, config=model.config).save_pretrained(after)
        again = type(model).from_pretrained(after).state_dict()
    differing = [
        name
        for name, tensor in expected.items()
        if name not in again or not torch.equal(tensor, again[name].to(tensor.dtype))
    ]
    return f"{', '.join(differing[:3])} differ" if differing else "agrees"


def generating_class(config: transformers.PreTrainedConfig) -> Any:
    """Returns the PyTorch class of a model type that generates text, or `None`."""
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    ):
        torch_class: Any = mapping[type(config)] if type(config) in mapping else None
        if torch_class is not None and torch_class.can_generate():
            return torch_class
    return None


def compare_generation(model: transformers.PreTrainedModel, new_tokens: int = 6) -> str:
    """Compares greedy decoding in the bridge and in PyTorch.

    The compared model is a new model of the same model type as `model`. The prompts are texts.

    Returns:
        "agrees", the percentage of tokens that are equal, or why nothing was compared. The
        tokens must be those of PyTorch with or without its cache, which differ for RWKV.
    """
    config = tiny.tiny_config(model.config.model_type)
    generator = generating_class(config)
    if generator is None:
        return f"{NOT_COMPARED}: no class generates text"
    config.is_decoder = True
    prompt = np.random.default_rng(0).integers(4, 60, (2, 8)).astype(np.int32)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    try:
        text_model: Any = tiny.random_model(generator, config)
        defaults = text_model.generation_config
        defaults.eos_token_id, defaults.pad_token_id = None, 0
        if defaults.decoder_start_token_id is None:
            defaults.decoder_start_token_id = 0
        with torch.no_grad():
            cached, theirs = (
                text_model.generate(torch_tensor(prompt), use_cache=use_cache, **options).numpy()
                for use_cache in (True, False)
            )
    except Exception as error:
        return not_compared(error)
    with tempfile.TemporaryDirectory() as folder:
        text_model.save_pretrained(folder)
        bridged = bridged_class(generator.__name__).from_pretrained(folder, config=config)
    ours = np.asarray(bridged.generate(jnp.asarray(prompt), **options).sequences)
    share = max(float((ours == tokens)[:, -new_tokens:].mean()) for tokens in (theirs, cached))
    return "agrees" if share == 1 else f"{share:.0%} of the tokens agree"

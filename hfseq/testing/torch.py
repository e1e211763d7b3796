"""The checks of :func:`hfseq.testing.check_architecture` that compare with a PyTorch class.

The docstring of a check states the requirement. Functions import PyTorch when they need it.
The checks are skipped if Transformers has no PyTorch class with the name of the model class, and
are reported as not run if PyTorch cannot be imported.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.checkpoints.weights import TORCH_LEAF_NAMES, Slot, WeightMap, torch_axes
from hfseq.errors import first_line
from hfseq.nn import trees
from hfseq.testing.case import (
    AUXILIARY_LOSS,
    SOURCE,
    Case,
    NotRun,
    Skipped,
    assert_close,
    comparable_outputs,
    jit,
    param_leaves,
    relative_error,
)
from hfseq.testing.checks import NEW_TOKENS, bfloat16_outputs, generated_tokens, prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Names of outputs that contain hidden states, in the order in which a model computes them.
HIDDEN_STATES = (
    *("encoder_hidden_states", "hidden_states", "decoder_hidden_states"),
    *("text_model_output.hidden_states", "vision_model_output.hidden_states"),
)


#: Model types whose eager attention in Transformers 5.24 gives other outputs than the default
#: implementation: Falcon's adds the biases of ALiBi twice.
WRONG_EAGER_ATTENTION = ("falcon",)


def torch_model(case: Case) -> PreTrainedModel:
    """Saves the model and loads it with PyTorch, with eager attention, in evaluation mode.

    Raises:
        Skipped: Transformers has no corresponding PyTorch class.
        NotRun: PyTorch is not installed.
    """
    if "torch" in case.shared:
        return case.shared["torch"]
    import transformers

    name = case.model.torch_class_name()
    torch_class = getattr(transformers, name, None)
    if torch_class is None:
        raise Skipped(f"transformers has no PyTorch class {name}")
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise NotRun("PyTorch is not installed") from None
        raise NotRun(f"cannot import PyTorch: {first_line(error)}") from None
    case.model.save_pretrained(case.folder / "torch")
    attention = "sdpa" if case.config.model_type in WRONG_EAGER_ATTENTION else "eager"
    model, info = torch_class.from_pretrained(
        case.folder / "torch", attn_implementation=attention, output_loading_info=True
    )
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    assert not problems, f"{name}.from_pretrained reports {problems}"
    # from_pretrained makes parameters trainable that the constructor froze.
    frozen = {
        n
        for n, parameter in torch_class(model.config).named_parameters()
        if not parameter.requires_grad
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    case.shared["torch"] = model.eval()
    return model


def named_once(case: Case, model: PreTrainedModel) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Returns each parameter of a PyTorch model once, with its name.

    A tied parameter has several names. The result contains the first name that is not an alias in
    hfseq.
    """
    aliases = case.model.weight_map.aliases
    parameters: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in parameters or parameters[id(parameter)][0] in aliases:
            parameters[id(parameter)] = (name, parameter)
    return parameters.values()


def file_tensors(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Renames and joins tensors of a PyTorch model as Transformers does when it saves them.

    Transformers splits some tensors when it loads a file, such as a joint projection of queries,
    keys and values. In this case, the names and shapes of parameters in memory differ from those of
    the tensors in files. The tensors of all other models are returned unchanged.

    Args:
        model: The PyTorch model.
        tensors: Parameters or gradients by the name of the parameter in memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Chunk, revert_weight_conversion

    operations = [
        operation
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        for operation in getattr(conversion, "operations", ())
    ]
    if not any(isinstance(operation, Chunk) for operation in operations):
        return dict(tensors)
    return revert_weight_conversion(model, dict(tensors))


def joined_slots(names: WeightMap) -> list[Slot]:
    """Returns the slots of parameters that consist of several stored tensors, such as experts.

    There is one slot for each stored tensor.
    """
    return [slot for slot in names.slots if slot.part]


def torch_loads_it(case: Case) -> None:
    """PyTorch loads exactly the tensors that hfseq saved, and saves them without changes."""
    model = torch_model(case)
    saved_params = param_leaves(case.model)
    save_options: dict[str, dict[str, Any]] = {"single": {}, "sharded": {"max_shard_size": "20KB"}}
    for name, options in save_options.items():
        folder = case.folder / f"from_torch_{name}"
        model.save_pretrained(folder, **options)
        loaded = case.cls.from_pretrained(folder)
        assert_close(param_leaves(loaded), saved_params, 0, f"through PyTorch and back, {name}")


def torch_tree(case: Case) -> None:
    """Parameter paths and shapes follow from PyTorch's names and shapes, as in Transformers 4.

    A path has the same components as PyTorch's name, except for the last one. The ``weight`` of a
    linear layer is a transposed ``kernel``, the ``weight`` of a norm is a ``scale``, and the
    ``weight`` of an embedding is an ``embedding``. If the class defines weight templates, they map
    the names first.
    """
    model = torch_model(case)
    names, shapes = case.model.file_map, case.model.file_map.shapes
    ours = {names.torch_name(path): path for path in shapes}
    # PyTorch's parameters and the buffers that it saves, without aliases.
    saved, buffers = model.state_dict().keys(), model.named_buffers()
    unsaved = map(re.escape, getattr(model, "_keys_to_ignore_on_save", None) or ())
    ignored = (*names.ignored, *unsaved)
    in_memory = dict((*named_once(case, model), *(b for b in buffers if b[0] in saved)))
    modules = dict(model.named_modules())
    theirs = {
        names.resolve_name(name): (name, value)
        for name, value in file_tensors(model, in_memory).items()
        if name not in names.aliases and not any(re.search(pattern, name) for pattern in ignored)
    }
    wrong = []

    def plain(path: trees.Path) -> str:
        return ".".join((*path[:-1], TORCH_LEAF_NAMES.get(path[-1], path[-1])))

    def axes(path: trees.Path, shape: tuple[int, ...]) -> Iterable[int]:
        return torch_axes(path, len(shape)) or range(len(shape))

    for name in ours.keys() & theirs.keys():
        path, (torch_name, value) = ours[name], theirs[name]
        shape, (owner, _, leaf) = tuple(value.shape), torch_name.rpartition(".")
        # Some norms keep the name `weight`, as in Transformers 4.
        if leaf == "weight" != path[-1]:
            class_name = type(modules.get(owner)).__name__
            is_norm = "Norm" in class_name if owner in modules else value.ndim == 1
            norm = "scale" if is_norm else "kernel"
            leaf = "embedding" if "Embedding" in class_name else norm
        leaf = leaf.removeprefix("running_")
        if leaf != path[-1] and name == plain(path):
            wrong.append(f"{trees.join(path)} should end with {leaf}")
        elif shapes[path] != (shape := tuple(shape[at] for at in axes(path, shape))):
            wrong.append(f"{trees.join(path)} has shape {shapes[path]}, but PyTorch's is {shape}")
    missing, surplus = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    assert not missing and not surplus and not wrong, (
        f"PyTorch's names that hfseq lacks: {missing}; hfseq's names that PyTorch lacks: "
        f"{surplus}; wrong paths or shapes: {sorted(wrong)}"
    )


def to_tensor(value: np.ndarray) -> torch.Tensor:
    """Copies an array to PyTorch."""
    import torch

    copied = torch.from_numpy(np.array(value))
    return copied.long() if copied.dtype == torch.int32 else copied


def torch_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Returns the inputs of the case as tensors."""
    return {name: to_tensor(value) for name, value in case.inputs.items()}


def torch_outputs(
    case: Case,
    model: PreTrainedModel,
    names: Iterable[str],
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the requested outputs of the PyTorch model in float32, with zeros at padding."""
    import torch

    with torch.no_grad():
        output = model(**(torch_inputs(case) if inputs is None else inputs))
    return {
        name: case.zero_padding(name, operator.attrgetter(name)(output).float().numpy())
        for name in names
        if name != AUXILIARY_LOSS
    }


def torch_parity(case: Case) -> None:
    """Outputs and all gradients equal PyTorch's.

    If they do not, the error names the first hidden state and the first gradient that differ.
    """
    model = torch_model(case)
    output = model(**torch_inputs(case), output_hidden_states=True)
    our_outputs, our_gradients = case.results
    # PyTorch's classes define auxiliary losses differently.
    outputs = {name: value for name, value in our_outputs.items() if name != AUXILIARY_LOSS}
    theirs = {name: operator.attrgetter(name)(output) for name in outputs}
    sum((theirs[name] * to_tensor(case.weights[name])).sum() for name in outputs).backward()
    errors = {
        name: relative_error(
            *(case.zero_padding(name, v) for v in (value, theirs[name].detach().numpy()))
        )
        for name, value in outputs.items()
    }
    lines = [
        f"  {n}: {difference:.1e}"
        for n, difference in errors.items()
        if not difference <= case.tolerance
    ]
    if lines:
        lines.append(_first_different_state(case, output))
    # PyTorch stores some tensors twice. Each copy then has only a part of hfseq's gradient.
    derived = case.model.derived_weights()
    shared = {
        *derived,
        *(entry.value for entry in derived.values() if isinstance(entry.value, str)),
    }
    names = case.model.weight_map
    in_memory = {
        name: parameter.grad
        for name, parameter in named_once(case, model)
        if parameter.grad is not None and name not in shared
    }
    gradients = {
        names.resolve_name(name): gradient.numpy()
        for name, gradient in file_tensors(model, in_memory).items()
    }
    ours = names.to_torch(our_gradients)
    # to_torch() splits joined parameters into the stored tensors, but PyTorch's class has the
    # joined parameters. Add their gradients.
    ours |= {names.torch_name(slot.path): our_gradients[slot.path] for slot in joined_slots(names)}
    if absent := [name for name in gradients if name not in ours]:
        lines.append(f"  no gradient for PyTorch's parameters {absent}")
    errors = {
        name: relative_error(ours[name], gradients[name]) for name in gradients if name in ours
    }
    allowed = case.gradient_tolerance
    worse = [name for name, value in errors.items() if not value <= allowed]
    if worse:
        first = f"the first of {worse[0]}: {errors[worse[0]]:.1e}"
        lines.append(f"  {len(worse)} of {len(errors)} gradients differ, {first}")
    if AUXILIARY_LOSS in our_outputs:
        lines += _auxiliary_difference(case, model, float(our_outputs[AUXILIARY_LOSS]))
    class_name = type(model).__name__
    tolerances = f"{case.tolerance:.0e}, gradients {allowed:.0e}"
    assert not lines, "\n".join(
        [f"differs from PyTorch's {class_name} (allowed: {tolerances})", *lines]
    )


def _auxiliary_difference(case: Case, model: PreTrainedModel, ours: float) -> list[str]:
    """Compares the auxiliary loss with the `aux_loss` of PyTorch's class, if it returns one.

    PyTorch's `aux_loss` is a mean over tokens, and PyTorch multiplies it by `router_aux_loss_coef`
    when it adds it to the loss. hfseq's auxiliary loss is a sum over tokens and includes this
    factor.

    Args:
        case: The task head under test.
        model: The PyTorch model.
        ours: The auxiliary loss of hfseq.

    Returns:
        A line that describes the difference, or an empty list.
    """
    if "output_router_logits" not in inspect.signature(model.forward).parameters:
        return []
    expected = model(**torch_inputs(case), output_router_logits=True).aux_loss.detach()
    tokens = float(case.inputs[SOURCE.mask].sum())
    factor = float(getattr(case.config, "router_aux_loss_coef", 1.0)) * tokens
    theirs = factor * float(expected)
    if relative_error(ours / tokens, theirs / tokens) <= case.tolerance:
        return []
    return [
        f"  {AUXILIARY_LOSS} is {ours:.6g}, but PyTorch's aux_loss times router_aux_loss_coef "
        f"times the {tokens:.0f} tokens is {theirs:.6g}"
    ]


#: Maximum ratio of hfseq's error in bfloat16 to PyTorch's error, and the relative error that is
#: always allowed.
BFLOAT16_FACTOR, BFLOAT16_ALWAYS = 2.0, 0.02
#: The maximum ratio for outputs with fewer than 100 values. Both errors are maxima of random
#: errors, and the ratio of two maxima of few values often exceeds 2.
BFLOAT16_FACTOR_OF_FEW = 3.0
#: A prediction is clear, and bfloat16 must not change it, if the difference between the two largest
#: logits exceeds this multiple of PyTorch's error.
CLEAR_MARGIN = 8.0


def torch_bfloat16(case: Case) -> None:
    """Errors of bfloat16 are at most twice PyTorch's, and clear predictions do not change.

    Errors of outputs with few values are at most three times PyTorch's.

    The error is the difference from the outputs in float32. The prediction of a token is its
    largest logit. It is clear if, in float32, the largest logit exceeds the second largest by more
    than `CLEAR_MARGIN` times the root mean square error of PyTorch's logits.

    In a model with experts, rounding routes a few tokens to other experts, and not the same tokens
    as in PyTorch. The errors of the median token are compared instead, and no predictions.
    """
    import torch

    has_experts = _num_experts(case) is not None
    error_of = _median_error if has_experts else relative_error
    model = torch_model(case)
    half = copy.deepcopy(model).bfloat16()
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in torch_inputs(case).items()
    }
    expected = torch_outputs(case, model, case.outputs)
    theirs = torch_outputs(case, half, case.outputs, inputs)
    outputs = bfloat16_outputs(case)
    lines = []
    for name, value in expected.items():
        ours = case.zero_padding(name, np.asarray(outputs[name], np.float32))
        error, allowed = error_of(ours, value), error_of(theirs[name], value)
        factor = BFLOAT16_FACTOR if value.size >= 100 else BFLOAT16_FACTOR_OF_FEW
        limit = max(BFLOAT16_ALWAYS, factor * allowed)
        if not error <= limit:
            lines.append(f"  {name}: {error:.1e}, PyTorch's error is {allowed:.1e}")
        if name == "logits" and value.shape[-1] > 1 and not has_experts:
            top = np.sort(value, axis=-1)
            noise = float(np.sqrt(np.mean((theirs[name] - value) ** 2)))
            clear = top[..., -1] - top[..., -2] > CLEAR_MARGIN * noise
            changed = clear & (ours.argmax(-1) != value.argmax(-1))
            if changed.any():
                lines.append(
                    f"  {int(changed.sum())} of {int(clear.sum())} predictions change although the "
                    "two largest logits differ clearly"
                )
    assert not lines, "bfloat16 against float32:\n" + "\n".join(lines)


def _median_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the relative error of the median token: the largest error of each token is used."""
    if ours.ndim < 2 or not math.isfinite(relative_error(ours, theirs)):
        return relative_error(ours, theirs)
    errors = np.abs(ours - theirs).max(-1)
    return float(np.median(errors) / max(1.0, np.abs(theirs).max()))


#: Names of configuration attributes with the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _num_experts(case: Case) -> int | None:
    """Returns the number of experts in the configuration, or `None` for a model without experts."""
    counts = [getattr(case.model.text_config, name, None) for name in EXPERT_COUNTS]
    return next((count for count in counts if isinstance(count, int) and count > 1), None)


def torch_experts(case: Case) -> None:
    """Experts drop no tokens if all tokens choose the same experts, and routers compute in float32.

    All tokens of a sequence are equal, so their experts receive many times the mean number of
    tokens. The outputs must equal PyTorch's outputs. In a bfloat16 model, the softmax of the router
    must be computed in float32 if PyTorch computes it in float32. Otherwise rounding would make
    different scores equal.
    """
    experts = _num_experts(case)
    if experts is None or case.sides != (SOURCE,):
        raise Skipped("the model has no experts")
    model = torch_model(case)
    inputs = dict(case.inputs)
    ids = inputs[SOURCE.ids]
    inputs[SOURCE.ids] = np.broadcast_to(ids[:, :1], ids.shape).copy()
    inputs[SOURCE.mask] = np.ones_like(ids)
    outputs = case.forward(case.params, inputs)
    names = [name for name in case.outputs if name != AUXILIARY_LOSS]
    tensors = {name: to_tensor(value) for name, value in inputs.items()}
    assert_close(
        {name: np.asarray(outputs[name]) for name in names},
        {n: v for n, v in _plain_outputs(model, tensors, names).items()},
        case.tolerance,
        "tokens that choose the same experts",
    )
    variant = case.variant(dtype=jnp.bfloat16)
    program = jax.make_jaxpr(lambda params: comparable_outputs(variant(**inputs, params=params)))(
        case.params
    )
    if any(
        dtype == jnp.bfloat16 and shape[-1:] == (experts,) for dtype, shape in _softmaxes(program)
    ) and _torch_router_is_float32(model, tensors, experts):
        raise AssertionError(
            f"the softmax over {experts} experts is computed in bfloat16, but PyTorch computes it "
            "in float32"
        )


def _plain_outputs(
    model: PreTrainedModel, inputs: Mapping[str, Any], names: Iterable[str]
) -> dict[str, np.ndarray]:
    import torch

    with torch.no_grad():
        output = model(**inputs)
    return {name: operator.attrgetter(name)(output).numpy() for name in names}


def _softmaxes(program: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yields the dtype and shape of every exponential in a jaxpr, including those inside loops."""
    for equation in program.jaxpr.eqns if hasattr(program, "jaxpr") else program.eqns:
        if equation.primitive.name in ("exp", "exp2"):
            value = equation.invars[0].aval
            yield value.dtype, tuple(value.shape)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from _softmaxes(parameter)


def _torch_router_is_float32(
    model: PreTrainedModel, inputs: Mapping[str, Any], experts: int
) -> bool:
    """Returns whether a bfloat16 PyTorch model computes the softmax over experts in float32."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    dtypes = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if "softmax" in str(function) and result.shape[-1:] == (experts,):
                dtypes.append(result.dtype)
            return result

    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad(), Recorder():
        half(**inputs)
    return torch.float32 in dtypes


def torch_generation(case: Case) -> None:
    """Greedy search generates the same tokens as PyTorch.

    The prompts have no padding, padding on the left or padding on the right.
    """
    if not case.model.can_generate():
        raise Skipped("the model does not support generation")
    if case.sides != (SOURCE,) or "encoder_hidden_states" in case.inputs:
        raise Skipped("the check supports only decoder-only models")
    model = torch_model(case)
    import torch

    ids, mask = prompts(case)
    ours = generated_tokens(case, ids, attention_mask=mask)
    options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "num_beams": 1}
    names = ("not padded", "padded on the left", "padded on the right")
    for name, row, row_mask, tokens in zip(names, ids, mask, ours, strict=True):
        text = torch.from_numpy(row[row_mask == 1][None]).long()
        with torch.no_grad():
            expected = model.generate(  # type: ignore[operator]
                text, attention_mask=torch.ones_like(text), do_sample=False, **options
            )
        expected_tokens = expected[0, text.shape[1] :].tolist()
        assert tokens.tolist() == expected_tokens, (
            f"generate() continues a prompt that is {name} with the tokens {tokens.tolist()}, "
            f"but PyTorch continues it with {expected_tokens}"
        )


def _first_different_state(case: Case, theirs: Mapping[str, Any]) -> str:
    """Describes the first hidden state that differs. State 0 is the output of the embeddings."""

    def states(inputs: Mapping[str, Any]) -> dict[str, Any]:
        output = case.model(**inputs, output_hidden_states=True)
        return {name: get_states(output, name) for name in HIDDEN_STATES}

    def get_states(output: Any, name: str) -> tuple[Any, ...]:
        try:
            return operator.attrgetter(name)(output) or ()
        except AttributeError:
            return ()

    ours = jit(states)(case.inputs)
    for name in HIDDEN_STATES:
        mask: Any = 1
        if case.reads_tokens(name):
            mask = case.inputs[case.side(name).mask]
            mask = mask.reshape(-1, mask.shape[-1], 1)
        side = "" if name == "hidden_states" else f" of the {name.partition('_')[0]}"
        for number, (a, b) in enumerate(zip(ours[name], get_states(theirs, name), strict=False)):
            difference = relative_error(np.asarray(a) * mask, b.detach().numpy() * mask)
            if not difference <= case.tolerance:
                location = ("the embeddings" if number == 0 else f"layer {number - 1}") + side
                return (
                    f"  the first hidden state that differs is after {location}: {difference:.1e}"
                )
    return "  no hidden state differs, so the task head differs"


CHECKS = (
    torch_loads_it,
    torch_tree,
    torch_parity,
    torch_bfloat16,
    torch_experts,
    torch_generation,
)

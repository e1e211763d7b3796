"""The checks of :func:`hfseq.testing.check_architecture` that compare with PyTorch's class.

Only this module imports PyTorch. Without PyTorch, or without such a class, the checks are skipped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.checkpoints.weights import TORCH_LEAF_NAMES, Slot, WeightMap, torch_axes
from hfseq.nn import trees
from hfseq.testing.case import (
    AUXILIARY_LOSS,
    SOURCE,
    Case,
    NotRun,
    Skipped,
    assert_close,
    jit,
    param_leaves,
    relative_error,
)
from hfseq.testing.checks import NEW_TOKENS, generated_tokens, prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# In the order of computation.
HIDDEN_STATES = (
    *("encoder_hidden_states", "hidden_states", "decoder_hidden_states"),
    *("text_model_output.hidden_states", "vision_model_output.hidden_states"),
)


def torch_model(case: Case) -> PreTrainedModel:
    """Saves the model and loads it with PyTorch, with eager attention, in evaluation mode."""
    if "torch" in case.shared:
        return case.shared["torch"]
    import transformers

    name = case.model.torch_class_name()
    torch_class = getattr(transformers, name, None)
    if torch_class is None:
        raise Skipped(f"transformers has no PyTorch class {name}")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise NotRun("PyTorch is not installed") from None
    case.model.save_pretrained(case.folder / "torch")
    model, info = torch_class.from_pretrained(
        case.folder / "torch", attn_implementation="eager", output_loading_info=True
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
    """Returns PyTorch's parameters. A tied one has its first name that is not an alias in hfseq."""
    aliases = case.model.weight_map.aliases
    parameters: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in parameters or parameters[id(parameter)][0] in aliases:
            parameters[id(parameter)] = (name, parameter)
    return parameters.values()


def joined_slots(names: WeightMap) -> list[Slot]:
    """Returns the slots of the parts of joined parameters."""
    return [slot for slot in names.slots if slot.part]


def torch_loads_it(case: Case) -> None:
    """PyTorch loads exactly the tensors that hfseq saved, and the round trip preserves them."""
    model = torch_model(case)
    saved_params = param_leaves(case.model)
    save_options: dict[str, dict[str, Any]] = {"single": {}, "sharded": {"max_shard_size": "20KB"}}
    for name, options in save_options.items():
        folder = case.folder / f"from_torch_{name}"
        model.save_pretrained(folder, **options)
        loaded = case.cls.from_pretrained(folder)
        assert_close(param_leaves(loaded), saved_params, 0, f"through PyTorch and back, {name}")


def torch_tree(case: Case) -> None:
    """Paths and shapes follow from the PyTorch names by the naming rule (the v4 tree).

    Names that templates do not map must equal PyTorch's names.
    """
    model = torch_model(case)
    names, shapes = case.model.file_map, case.model.file_map.shapes
    ours = {names.torch_name(path): path for path in shapes}
    # PyTorch's parameters and saved buffers, without aliases.
    saved, buffers = model.state_dict().keys(), model.named_buffers()
    unsaved = map(re.escape, getattr(model, "_keys_to_ignore_on_save", None) or ())
    ignored = (*names.ignored, *unsaved)
    theirs = {
        names.resolve_name(name): (name, value)
        for name, value in (*named_once(case, model), *(b for b in buffers if b[0] in saved))
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
        # Some norms keep PyTorch's name, as in Transformers 4.
        if leaf == "weight" != path[-1]:
            class_name = type(model.get_submodule(owner)).__name__
            norm = "scale" if "Norm" in class_name else "kernel"
            leaf = "embedding" if "Embedding" in class_name else norm
        leaf = leaf.removeprefix("running_")
        if leaf != path[-1] and name == plain(path):
            wrong.append(f"{trees.join(path)} should end with {leaf}")
        elif shapes[path] != (shape := tuple(shape[at] for at in axes(path, shape))):
            wrong.append(f"{trees.join(path)} has shape {shapes[path]}, PyTorch's is {shape}")
    missing, surplus = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    assert not missing and not surplus and not wrong, (
        f"names of PyTorch that hfseq lacks: {missing}; names that PyTorch lacks: {surplus}; "
        f"wrong: {sorted(wrong)}"
    )


def torch_parity(case: Case) -> None:
    """Outputs and all gradients equal PyTorch's. The report names the first ones that differ."""
    model = torch_model(case)
    import torch

    def tensor(value: np.ndarray) -> torch.Tensor:
        copied = torch.from_numpy(np.array(value))
        return copied.long() if copied.dtype == torch.int32 else copied

    inputs = {name: tensor(value) for name, value in case.inputs.items()}
    output = model(**inputs, output_hidden_states=True)
    # PyTorch's classes define auxiliary losses differently.
    excluded = [AUXILIARY_LOSS] if AUXILIARY_LOSS in case.outputs else []
    outputs = {n: value for n, value in case.outputs.items() if n not in excluded}
    theirs = {name: operator.attrgetter(name)(output) for name in outputs}
    sum((theirs[name] * tensor(case.weights[name])).sum() for name in outputs).backward()
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
    # In PyTorch, the gradient of a tensor with a copy is only a part of hfseq's gradient.
    derived = case.model.derived_weights()
    shared = {
        *derived,
        *(entry.value for entry in derived.values() if isinstance(entry.value, str)),
    }
    gradients = {
        case.model.weight_map.resolve_name(name): parameter.grad.numpy()
        for name, parameter in named_once(case, model)
        if parameter.grad is not None and name not in shared
    }
    names = case.model.weight_map
    our_gradients = case.gradients
    if excluded:
        our_gradients = case.train(case.model, case.params, dropout=False, excluded=excluded)[1]
    ours = names.to_torch(our_gradients)
    # PyTorch's class has the joined parameters, not their parts.
    ours |= {names.torch_name(slot.path): our_gradients[slot.path] for slot in joined_slots(names)}
    if absent := [name for name in gradients if name not in ours]:
        lines.append(f"  no gradient for PyTorch's parameters {absent}")
    errors = {
        name: relative_error(ours[name], gradients[name]) for name in gradients if name in ours
    }
    worse = [name for name, value in errors.items() if not value <= case.tolerance]
    if worse:
        first = f"the first of {worse[0]}: {errors[worse[0]]:.1e}"
        lines.append(f"  {len(worse)} of {len(errors)} gradients differ, {first}")
    class_name = type(model).__name__
    assert not lines, "\n".join(
        [f"differs from PyTorch's {class_name} (allowed: {case.tolerance:.0e})", *lines]
    )


def torch_generation(case: Case) -> None:
    """Greedy search returns PyTorch's tokens, for prompts with padding on each side."""
    if not case.model.can_generate():
        raise Skipped("the model does not generate")
    if case.sides != (SOURCE,) or "encoder_hidden_states" in case.inputs:
        raise Skipped("only decoders without encoder are compared")
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
            f"generate() continues a prompt that is {name} with {tokens.tolist()}, and PyTorch "
            f"with {expected_tokens}"
        )


def _first_different_state(case: Case, theirs: Mapping[str, Any]) -> str:
    """Describes the first hidden state that differs. State 0 is that of the embeddings."""

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
                    f"  the first hidden state that differs is that of {location}: {difference:.1e}"
                )
    return "  no hidden state differs, so the head differs"


CHECKS = (torch_loads_it, torch_tree, torch_parity, torch_generation)

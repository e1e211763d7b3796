"""The checks of :func:`hfseq.testing.check_architecture` against PyTorch's class of that name.

PyTorch is imported in here and nowhere else; without it, or without such a class, they are skipped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.checkpoints.weights import TORCH_LEAF_NAMES, torch_axes
from hfseq.nn import trees
from hfseq.testing.case import (
    Case,
    NotRun,
    Skipped,
    assert_close,
    jit,
    param_leaves,
    relative_error,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# In the order in which a model computes them.
HIDDEN_STATES = (
    *("encoder_hidden_states", "hidden_states", "decoder_hidden_states"),
    *("text_model_output.hidden_states", "vision_model_output.hidden_states"),
)


def torch_model(case: Case) -> PreTrainedModel:
    """Save the case's model and load it with the PyTorch class: eager attention, evaluation."""
    if "torch" in case.shared:
        return case.shared["torch"]
    import transformers

    name = case.model.torch_class_name()
    kind = getattr(transformers, name, None)
    if kind is None:
        raise Skipped(f"transformers has no PyTorch class {name}")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise NotRun("PyTorch is not installed") from None
    case.model.save_pretrained(case.folder / "torch")
    model, info = kind.from_pretrained(
        case.folder / "torch", attn_implementation="eager", output_loading_info=True
    )
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    assert not problems, f"{name}.from_pretrained reports {problems}"
    # What the constructor freezes, from_pretrained makes trainable again.
    frozen = {n for n, own in kind(model.config).named_parameters() if not own.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    case.shared["torch"] = model.eval()
    return model


def named_once(case: Case, model: PreTrainedModel) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Return PyTorch's parameters, a tied one under its first name that is no alias here."""
    aliases = case.model.weight_map.aliases
    found: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in found or found[id(parameter)][0] in aliases:
            found[id(parameter)] = (name, parameter)
    return found.values()


def torch_loads_it(case: Case) -> None:
    """PyTorch loads all that hfseq saved and nothing else, and the way back is the identity."""
    model = torch_model(case)
    before = param_leaves(case.model)
    ways: dict[str, dict[str, Any]] = {"single": {}, "sharded": {"max_shard_size": "20KB"}}
    for name, options in ways.items():
        folder = case.folder / f"from_torch_{name}"
        model.save_pretrained(folder, **options)
        again = case.cls.from_pretrained(folder)
        assert_close(param_leaves(again), before, 0, f"through PyTorch and back, {name}")


def torch_tree(case: Case) -> None:
    """Paths and shapes are what the naming rule makes of the PyTorch names (the v4 tree).

    Templates are followed: what they do not name is under PyTorch's name.
    """
    model = torch_model(case)
    names, shapes = case.model.file_map, case.model.file_map.shapes
    ours = {names.torch_name(path): path for path in shapes}
    # PyTorch's parameters and buffers that are saved, without second names.
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
        path, (own, value) = ours[name], theirs[name]
        shape, (owner, _, leaf) = tuple(value.shape), own.rpartition(".")
        # Some norms keep PyTorch's name here too, as they did in Transformers 4.
        if leaf == "weight" != path[-1]:
            kind = type(model.get_submodule(owner)).__name__
            norm = "scale" if "Norm" in kind else "kernel"
            leaf = "embedding" if "Embedding" in kind else norm
        leaf = leaf.removeprefix("running_")
        if leaf != path[-1] and name == plain(path):
            wrong.append(f"{trees.join(path)} should end with {leaf}")
        elif shapes[path] != (shape := tuple(shape[at] for at in axes(path, shape))):
            wrong.append(f"{trees.join(path)} has shape {shapes[path]}, PyTorch's is {shape}")
    missing, surplus = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    assert not missing and not surplus and not wrong, (
        f"PyTorch's names that are missing here: {missing}; names that PyTorch lacks: {surplus}; "
        f"wrong: {sorted(wrong)}"
    )


def torch_parity(case: Case) -> None:
    """Outputs and all gradients equal PyTorch's; the report names the first that differ."""
    model = torch_model(case)
    import torch

    def tensor(value: np.ndarray) -> torch.Tensor:
        copied = torch.from_numpy(np.array(value))
        return copied.long() if copied.dtype == torch.int32 else copied

    inputs = {name: tensor(value) for name, value in case.inputs.items()}
    output = model(**inputs, output_hidden_states=True)
    theirs = {name: operator.attrgetter(name)(output) for name in case.outputs}
    sum((theirs[name] * tensor(value)).sum() for name, value in case.weights.items()).backward()
    errors = {
        name: relative_error(
            *(case.zero_padding(name, v) for v in (value, theirs[name].detach().numpy()))
        )
        for name, value in case.outputs.items()
    }
    lines = [f"  {n}: {apart:.1e}" for n, apart in errors.items() if not apart <= case.tolerance]
    if lines:
        lines.append(_first_different_state(case, output))
    # What PyTorch keeps a copy or constant of has a gradient there that is ours only in part.
    derived = case.model.derived_weights()
    apart = {*derived, *(entry.value for entry in derived.values() if isinstance(entry.value, str))}
    gradients = {
        case.model.weight_map.resolve_name(name): parameter.grad.numpy()
        for name, parameter in named_once(case, model)
        if parameter.grad is not None and name not in apart
    }
    ours = case.model.weight_map.to_torch(case.gradients)
    if absent := [name for name in gradients if name not in ours]:
        lines.append(f"  no gradient for PyTorch's parameters {absent}")
    errors = {
        name: relative_error(ours[name], gradients[name]) for name in gradients if name in ours
    }
    worse = [name for name, value in errors.items() if not value <= case.tolerance]
    if worse:
        first = f"the first of {worse[0]}: {errors[worse[0]]:.1e}"
        lines.append(f"  {len(worse)} of {len(errors)} gradients differ, {first}")
    kind = type(model).__name__
    assert not lines, "\n".join(
        [f"differs from PyTorch's {kind} (allowed: {case.tolerance:.0e})", *lines]
    )


def _first_different_state(case: Case, theirs: Mapping[str, Any]) -> str:
    """Name the first hidden state that differs: 0 is the embeddings, i the output of layer i."""

    def states(inputs: Mapping[str, Any]) -> dict[str, Any]:
        output = case.model(**inputs, output_hidden_states=True)
        return {name: found(output, name) for name in HIDDEN_STATES}

    def found(output: Any, name: str) -> tuple[Any, ...]:
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
        for number, (a, b) in enumerate(zip(ours[name], found(theirs, name), strict=False)):
            apart = relative_error(np.asarray(a) * mask, b.detach().numpy() * mask)
            if not apart <= case.tolerance:
                where = ("the embeddings" if number == 0 else f"layer {number - 1}") + side
                return f"  the first hidden state that differs is that of {where}: {apart:.1e}"
    return "  no hidden state differs: look at the head"


CHECKS = (torch_loads_it, torch_tree, torch_parity)

"""The checks of :func:`hfseq.testing.check_architecture` that need only JAX.

Each check accepts a :class:`hfseq.testing.case.Case`. Its docstring states the requirement. A check
raises an AssertionError if it fails, Skipped if it does not apply to the model, and NotRun if it
cannot run here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.checkpoints.config import add_legacy_keys
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing.case import (
    AUXILIARY_LOSS,
    LENGTH,
    ROWS,
    SOURCE,
    TARGET,
    Case,
    NotRun,
    Params,
    Skipped,
    assert_close,
    comparable_outputs,
    compile_forward,
    jit,
    param_leaves,
    to_numpy,
)

Cache = dict[str, Any]
Step = Callable[..., Any]
# Maximum length in tokens that `long_rows` tests. Configurations under test should be shorter.
MAX_TESTED_LENGTH = 256


def shapes(case: Case) -> None:
    """Outputs are finite, and each output is a scalar or has the batch as its first axis.

    ``jax.eval_shape`` and a model without parameters give the same shapes.
    """
    expected = jax.eval_shape(case.forward, case.params, case.inputs)
    assert case.outputs, "the model returns nothing to compare"
    for name, value in case.outputs.items():
        assert value.shape == expected[name].shape, (
            f"{name} has shape {value.shape}, but jax.eval_shape returns {expected[name].shape}"
        )
        assert value.shape[:1] in ((), (ROWS,)), (
            f"{name} has shape {value.shape} for {ROWS} rows: the first axis must be the batch"
        )
        assert np.isfinite(value).all(), f"{name} is not finite"
    blank = case.variant()
    real = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), case.params)
    abstract = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), blank.abstract_params)
    assert real == abstract, "abstract_params differs from the parameters"


def eager(case: Case) -> None:
    """The model returns the same outputs without ``jax.jit``."""
    outputs = to_numpy(comparable_outputs(case.model(**case.inputs)))
    assert_close(outputs, case.outputs, 1e-5, "eager against jit")


def gradients(case: Case) -> None:
    """Every parameter has a finite gradient that is not zero."""
    bad = []
    for path, gradient in case.gradients.items():
        name = trees.join(path)
        if not gradient.size:  # for example no register tokens
            continue
        if not np.isfinite(gradient).all():
            bad.append(f"{name} is not finite")
        elif not gradient.any() and not re.search("|".join(case.zero_gradients) or "$^", name):
            bad.append(f"{name} is zero: the parameter has no effect")
    assert not bad, "gradients: " + ", ".join(bad)


def save_and_load(case: Case) -> None:
    """Saving and loading preserves every parameter bit for bit.

    The formats are a single file, shards and legacy msgpack.
    """
    save_options: dict[str, dict[str, Any]] = {
        "single": {},
        "sharded": {"max_shard_size": "20kB"},
        "msgpack": {"safe_serialization": False},
    }
    saved_params = param_leaves(case.model)
    for name, options in save_options.items():
        case.model.save_pretrained(case.folder / name, **options)
        loaded = case.cls.from_pretrained(case.folder / name)
        assert_close(param_leaves(loaded), saved_params, 0, f"saved as {name} and loaded again")
        # Saved files also have the keys of Transformers 4, and some configuration classes keep
        # them. Add them on both sides so that they do not count as a difference.
        read, saved = (add_legacy_keys(c.to_dict()) for c in (loaded.config, case.model.config))
        assert read == saved, "the configuration changed"


def scan_layers(case: Case) -> None:
    """Scanning the layers gives the same results as a loop over the layers.

    Outputs are bit-identical, including dropout, and gradients are equal up to rounding. The
    compiler stores some intermediate values for the backward pass and recomputes others, and it may
    store different values in a scan and in a loop. The check uses gradient checkpointing, because
    the compiler then has the least choice.
    """
    try:
        if not case.variant(scan_layers=True).stacked_prefixes:
            raise Skipped("the model has no nn.Layers to scan")
    except UsageError as reason:
        raise Skipped(str(reason)) from None
    case.model.save_pretrained(case.folder / "scan")
    scanned = case.cls.from_pretrained(
        case.folder / "scan", scan_layers=True, gradient_checkpointing=True
    )
    outputs, gradient = case.train(scanned, scanned.params)
    expected = case.checkpointed_step
    try:
        assert_close(outputs, expected[0], 0, "outputs with dropout, scan against loop")
    except AssertionError as error:
        raise AssertionError(f"{error}\n  {_first_different_layer(case, scanned)}") from None
    ours = scanned.weight_map.unstack(gradient)
    theirs = {path: expected[1][path] for path in ours}
    tolerance = 1e-6 * case.gradient_rounding
    assert_close(ours, theirs, tolerance, "gradients, scan against loop", rounding=1e-7)


def _first_different_layer(case: Case, scanned: Any) -> str:
    """Describes the first layer whose output differs between scan and loop."""

    def states(model: Any, params: Params) -> dict[str, Any]:
        options = {"train": True, "dropout_rng": jax.random.key(3), "output_hidden_states": True}
        output = jit(lambda params, inputs: model(**inputs, params=params, **options))(
            params, case.inputs
        )
        return {name: value for name, value in output.items() if name.endswith("hidden_states")}

    ours, loop = states(scanned, scanned.params), case.variant(gradient_checkpointing=True)
    for name, values in states(loop, case.params).items():
        for number, (ours_state, loop_state) in enumerate(zip(ours[name], values, strict=True)):
            if not np.array_equal(ours_state, loop_state):
                description = (
                    f"the output of layer {number - 1}" if number else "the input of layer 0"
                )
                return f"{name}: {description} is the first to differ"
    return "the hidden states of all layers agree, so the task head differs"


def gradient_checkpointing(case: Case) -> None:
    """Recomputing layers in the backward pass does not change the results."""
    outputs, gradient = case.checkpointed_step
    plain = case.train(case.model, case.params)
    assert_close(outputs, plain[0], 1e-6, "outputs with gradient checkpointing")
    label = "gradients with gradient checkpointing"
    assert_close(gradient, plain[1], 1e-6 * case.gradient_rounding, label, rounding=1e-7)


def bfloat16_outputs(case: Case) -> dict[str, jax.Array]:
    """Returns the outputs of a bfloat16 model."""
    if "bfloat16" not in case.shared:
        forward = compile_forward(case.variant(dtype=jnp.bfloat16))
        case.shared["bfloat16"] = forward(case.params, case.inputs)
    return case.shared["bfloat16"]


def bfloat16(case: Case) -> None:
    """Outputs of a bfloat16 model are bfloat16 and close to those in float32.

    An auxiliary loss may be float32. If PyTorch has the model, this check does not compare the
    values, because rounding may select other experts. The check `torch_bfloat16` then compares the
    errors with PyTorch's errors.
    """
    outputs = bfloat16_outputs(case)
    wrong = [
        f"{name} has the dtype {v.dtype}, not bfloat16"
        for name, v in outputs.items()
        if v.dtype != jnp.bfloat16 and not (name == AUXILIARY_LOSS and v.dtype == jnp.float32)
    ]
    assert not wrong, "outputs of a bfloat16 model: " + ", ".join(wrong)
    if case.has_torch_class:
        return
    real = {name: case.zero_padding(name, np.asarray(v, np.float32)) for name, v in outputs.items()}
    expected = {name: case.zero_padding(name, value) for name, value in case.outputs.items()}
    assert_close(real, expected, 0.05, "bfloat16 against float32")


def padding(case: Case) -> None:
    """Padding of source and target on the right does not change the results of real tokens."""
    if not case.sides:
        raise Skipped("the model reads no tokens")
    short, long, cuts = dict(case.inputs), dict(case.inputs), {}
    for side in case.sides:
        ids = case.inputs[side.ids]
        cut = cuts[side] = ids.shape[-1] - 6
        mask = np.ones_like(ids)
        mask[..., cut:] = 0
        ids = case.apply_padding_and_eos(side, ids, mask)
        long |= {side.ids: ids, side.mask: mask}
        short |= {side.ids: ids[..., :cut], side.mask: mask[..., :cut]}
    padded = to_numpy(case.forward(case.params, long))
    expected = to_numpy(case.forward(case.params, short))
    real = {}
    for name, value in padded.items():
        lead = case.inputs[case.side(name).ids].ndim - 1
        index = (slice(None),) * lead + (slice(cuts[case.side(name)]),)
        real[name] = value[index] if case.is_per_token(name) else value
    assert_close(real, expected, 1e-5, "rows padded on the right against rows without padding")


def packing(case: Case) -> None:
    """Documents packed into one row give the same results as separate rows."""
    # A model whose __call__ has **kwargs is assumed to accept segment IDs. The training loop makes
    # the same assumption.
    if not case.sides:
        raise Skipped("the model reads no tokens")
    refused = [side.segments for side in case.sides if not case.model.accepts(side.segments)]
    if refused:
        raise Skipped(f"the model does not accept {', '.join(refused)}")
    names = [name for name in case.outputs if case.is_per_token(name)]
    if not names or case.inputs[case.sides[0].ids].ndim != 2:
        raise Skipped("no output has an entry for every token")
    tokens = {name for side in case.sides for name in (side.ids, side.mask)}
    other_inputs = {n: v for n, v in case.inputs.items() if n not in tokens}
    rows, documents, slices = dict(other_inputs), [dict(other_inputs), dict(other_inputs)], {}
    for side in case.sides:  # two documents per row, and each of them padded
        ids = np.array(case.inputs[side.ids])
        ids[1:3] = ids[3:5, ::-1]  # replace the rows that contain padding
        cut = round(0.6 * ids.shape[1])
        segments = np.where(np.arange(ids.shape[1]) < cut, 1, 2)[None].repeat(ROWS, 0)
        rows |= {side.ids: ids, side.segments: segments.astype(np.int32)}
        slices[side] = slice(cut), slice(cut, None)
        for inputs, part in zip(documents, slices[side], strict=True):
            padded, mask = np.zeros_like(ids), np.zeros_like(ids)
            length = ids[:, part].shape[1]
            padded[:, :length], mask[:, :length] = ids[:, part], 1
            padded[mask == 0] = getattr(case.model.text_config, "pad_token_id", None) or 0
            inputs |= {side.ids: padded, side.mask: mask}
    packed = case.forward(case.params, rows)
    for number, inputs in enumerate(documents):
        alone = to_numpy(case.forward(case.params, inputs))
        parts = {name: slices[case.side(name)][number] for name in names}
        ours = {name: np.asarray(packed[name][:, part]) for name, part in parts.items()}
        theirs = {name: alone[name][:, : ours[name].shape[1]] for name in names}
        assert_close(
            ours, theirs, 1e-5, f"a document packed at index {number} against alone in a row"
        )


def devices(case: Case) -> None:
    """Eight devices with sharded parameters give the outputs and gradients of one device."""
    if jax.device_count() < 8:
        raise NotRun(
            "fewer than 8 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=8 "
            "before importing jax"
        )
    from hfseq.nn.sharding import Layout, make_mesh

    rules = case.model.sharding_rules()
    mesh = make_mesh("data=2,fsdp=2,tensor=2" if rules else "data=2,fsdp=4", jax.devices()[:8])
    flat = trees.flatten(case.params)
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    layout = Layout(mesh, rules, case.model.vocab_size()).shardings(shapes)
    params = trees.unflatten({path: jax.device_put(flat[path], layout[path]) for path in flat})
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    inputs = {name: jax.device_put(value, rows) for name, value in case.inputs.items()}
    split = [path for path in flat if not layout[path].is_fully_replicated]
    assert split, "the sharding rules split no parameter"
    outputs, gradient = case.train(case.model, params, inputs, dropout=False)
    assert_close(outputs, case.outputs, 1e-5, "outputs, eight devices against one")
    label = "gradients, eight devices against one"
    assert_close(gradient, case.gradients, case.gradient_tolerance, label)


#: Number of tokens that `cached_decoding` decodes in one call. The others are decoded one by one.
PROMPT_LENGTH = 5


def cached_decoding(case: Case) -> None:
    """Decoding with a cache gives the outputs of the full forward pass.

    A prompt is decoded in one call, and the following tokens one by one.
    """
    if not case.sides:
        raise Skipped("the model reads no tokens")
    ids = case.inputs[case.sides[-1].ids]
    positions = np.broadcast_to(np.arange(ids.shape[-1], dtype=np.int32), ids.shape)
    begin = _source_and_target if TARGET in case.sides else _one_sequence
    full, cache, step = begin(case, ids, positions)
    if not any(map(case.is_per_token, full)):
        raise Skipped("no output has an entry for every token")

    @jit
    def run(params: Params, cache: Cache, ids: jax.Array, positions: jax.Array) -> Any:
        output = step(params, cache, ids, positions)
        return comparable_outputs(output), output.past_key_values

    parts = []
    for start, stop in itertools.pairwise((0, *range(PROMPT_LENGTH, ids.shape[1] + 1))):
        columns = slice(start, stop)
        outputs, cache = run(case.params, cache, ids[:, columns], positions[:, columns])
        parts.append(to_numpy(outputs))
    names = [name for name in full if case.is_per_token(name) and name in parts[0]]
    if not names:
        raise Skipped("decode() returns none of the outputs to compare")
    ours = {name: np.concatenate([part[name] for part in parts], 1) for name in names}
    assert_close(
        {name: case.zero_padding(name, value) for name, value in ours.items()},
        {name: case.zero_padding(name, full[name]) for name in names},
        1e-5,
        "decoding with a cache against the full forward pass",
    )


def _one_sequence(case: Case, ids: np.ndarray, positions: np.ndarray) -> tuple[dict, Cache, Step]:
    """Prepares `cached_decoding` for a model with one input sequence.

    Returns:
        The outputs of the full forward pass, an empty cache, and a function that decodes the next
        tokens with a cache.
    """
    model, mask = case.model, case.inputs["attention_mask"]
    try:
        cache = model.init_cache(ROWS, LENGTH)
    except UsageError as reason:
        assert not model.can_generate(), f"the model generates, but {reason}"
        raise Skipped(str(reason)) from None
    encoder_inputs = {n: v for n, v in case.inputs.items() if n.startswith("encoder_")}

    def position_inputs(positions: jax.Array | np.ndarray) -> dict[str, Any]:
        # A cache of fixed size contains the position, and the mask covers only the new tokens.
        if model.fixed_state:
            return {"attention_mask": jnp.take_along_axis(mask, positions, axis=1)}
        inputs = {"position_ids": positions} if model.accepts("position_ids") else {}
        return {"attention_mask": mask, **inputs}

    def step(params: Params, cache: Cache, ids: jax.Array, positions: jax.Array) -> Any:
        return model(
            ids,
            past_key_values=cache,
            params=params,
            **encoder_inputs,
            **position_inputs(positions),
        )

    full_inputs = {**encoder_inputs, "input_ids": ids, **position_inputs(positions)}
    return to_numpy(case.forward(model.params, full_inputs)), cache, step


def _source_and_target(
    case: Case, ids: np.ndarray, positions: np.ndarray
) -> tuple[dict, Cache, Step]:
    """Prepares `cached_decoding` for an encoder-decoder.

    Returns:
        The outputs of the full forward pass, a cache that contains the keys and values of the
        encoder, and a function that decodes the next tokens with a cache.
    """
    model, mask = case.model, case.source.get("attention_mask")
    if not hasattr(model.module_class, "encode"):
        raise Skipped("the model has no encode() and decode()")

    @jit
    def begin(params: Params) -> tuple[Any, Cache]:
        encoded = model.encode(**case.source, params=params)
        return encoded, model.init_cache(ROWS, ids.shape[1], encoded, params=params)

    encoded, cache = begin(model.params)
    positioned = model.accepts("decoder_position_ids", "decode")

    def step(params: Params, cache: Cache, ids: jax.Array, positions: jax.Array) -> Any:
        position_inputs = {"decoder_position_ids": positions} if positioned else {}
        return model.decode(
            ids,
            encoded,
            encoder_attention_mask=model.encoder_mask(mask, encoded),
            decoder_attention_mask=case.inputs["decoder_attention_mask"],
            past_key_values=cache,
            params=params,
            **position_inputs,
        )

    return case.outputs, cache, step


#: Constants of the check `generation`: the length of the prompts including padding, the number of
#: padding tokens, and the number of tokens to generate. `generate` pads prompts to one of a few
#: lengths. 7 is not one of them, so this padding is tested too.
GENERATION_PROMPT_LENGTH, PADDED_TOKENS, NEW_TOKENS = 7, 2, 4


def prompts(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token IDs of three prompts and their attention masks.

    The first prompt has no padding, the second is padded on the left, the third on the right.
    """
    shape = (3, GENERATION_PROMPT_LENGTH)
    ids, mask = case.inputs["input_ids"][3:6, : shape[1]], np.ones(shape, np.int32)
    mask[1, :PADDED_TOKENS] = mask[2, -PADDED_TOKENS:] = 0
    pad = getattr(case.model.text_config, "pad_token_id", None) or 0
    return np.where(mask == 1, ids, pad).astype(np.int32), mask


def generated_tokens(case: Case, ids: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """Returns the tokens that greedy search appends to prompts."""
    options = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "num_beams": 1}
    output = case.model.generate(ids, do_sample=False, **options, **inputs)
    return np.asarray(output.sequences)[:, -NEW_TOKENS:]


def generation(case: Case) -> None:
    """Greedy search generates the tokens that full forward passes predict.

    The prompts have no padding, padding on the left or padding on the right.
    """
    if not case.model.can_generate():
        raise Skipped("the model does not support generation")
    if case.sides != (SOURCE,) or "encoder_hidden_states" in case.inputs:
        raise Skipped("the check supports only decoder-only models")
    ids, mask = prompts(case)
    real = generated_tokens(case, ids, attention_mask=mask)
    end = case.model.generation_config.eos_token_id
    ends = [token for token in np.atleast_1d([] if end is None else end)]
    names = ("not padded", "padded on the left", "padded on the right")
    for name, row, row_mask, tokens in zip(names, ids, mask, real, strict=True):
        text = row[row_mask == 1].tolist()
        expected: list[int] = []
        for _ in range(NEW_TOKENS):  # inputs of one shape, so that one program is compiled
            known = np.array([*text, *expected])
            inputs = {"input_ids": np.zeros((1, LENGTH), np.int32)}
            inputs["input_ids"][0, : len(known)] = known
            inputs["attention_mask"] = (np.arange(LENGTH) < len(known)).astype(np.int32)[None]
            # generate() counts positions from 0. Without position_ids, RoBERTa would start after
            # the position of padding.
            if case.model.has_input("position_ids") and case.model.accepts("position_ids"):
                inputs["position_ids"] = np.arange(LENGTH, dtype=np.int32)[None]
            logits = np.array(case.forward(case.model.params, inputs)["logits"])
            logits[..., ends] = -np.inf
            expected.append(int(logits[0, len(known) - 1].argmax()))
        assert tokens.tolist() == expected, (
            f"generate() continues a prompt that is {name} with the tokens {tokens.tolist()}, "
            f"but forward passes over the whole text predict {expected}"
        )


def long_rows(case: Case) -> None:
    """Sequences of the maximum length give finite outputs.

    Longer sequences give finite outputs or raise a UsageError.
    """
    limit = case.model.max_length() if case.sides else None
    if limit is None or limit > MAX_TESTED_LENGTH:
        raise Skipped(
            f"max_length() is {limit}: only limits of up to {MAX_TESTED_LENGTH} tokens are tested"
        )
    for length in (limit, limit + 1):
        inputs = dict(case.inputs)
        for side in case.sides:
            ids = np.take(inputs[side.ids], range(length), axis=-1, mode="wrap")
            inputs[side.mask] = np.ones_like(ids)
            inputs[side.ids] = case.apply_padding_and_eos(side, ids, inputs[side.mask])
        try:
            outputs = case.forward(case.params, inputs)
        except UsageError as error:
            assert length > limit, f"max_length() is {limit}, but rows of that length fail: {error}"
            return
        bad = [name for name, value in outputs.items() if not np.isfinite(value).all()]
        assert not bad, (
            f"{', '.join(bad)} of rows of {length} tokens are not finite: set position_table to "
            "the name of the configuration attribute with the number of position embeddings, and "
            "let max_length() return how many of them tokens can use"
        )


CHECKS = (
    shapes,
    eager,
    gradients,
    save_and_load,
    scan_layers,
    gradient_checkpointing,
    bfloat16,
    padding,
    packing,
    devices,
    cached_decoding,
    generation,
    long_rows,
)

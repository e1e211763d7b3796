"""Parameters apart from the model, and generation with own logits processors."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.frozen_dict import freeze, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from transformers import (
    FlaxBertForSequenceClassification,
    FlaxForcedEOSTokenLogitsProcessor,
    FlaxGPT2LMHeadModel,
    FlaxLogitsProcessor,
    FlaxLogitsProcessorList,
    FlaxMinLengthLogitsProcessor,
    FlaxTemperatureLogitsWarper,
    GPT2Config,
)


class OnlyEvenTokens(FlaxLogitsProcessor):
    def __call__(self, input_ids, scores, cur_len):
        odd = jnp.arange(scores.shape[-1]) % 2 == 1
        return jnp.where(odd, -jnp.inf, scores)


def generation(folder):
    config = GPT2Config.from_pretrained(folder / "gpt2")
    model, params = FlaxGPT2LMHeadModel.from_pretrained(folder / "gpt2", _do_init=False)
    assert model.config.to_dict() == config.to_dict()
    ids = np.random.default_rng(0).integers(3, 64, (2, 5))
    processors = FlaxLogitsProcessorList([OnlyEvenTokens(), FlaxMinLengthLogitsProcessor(8, 2)])
    sequences = model.generate(
        ids, params=params, max_length=12, do_sample=False, logits_processor=processors
    ).sequences
    scores = model(ids, params=params).logits[:, -1]
    chain = FlaxLogitsProcessorList(
        [FlaxTemperatureLogitsWarper(0.5), FlaxForcedEOSTokenLogitsProcessor(12, 2)]
    )
    warped = chain(jnp.asarray(ids), scores, cur_len=5)
    forced = chain(jnp.asarray(ids), scores, cur_len=11)
    assert (np.argmax(forced, -1) == 2).all()
    return {"ids": ids, "sequences": sequences, "scores": scores, "warped": warped}


def transfer(folder):
    """Initializes a model from scratch and copies the encoder of a checkpoint into it."""
    name = folder / "bert"
    model, params = FlaxBertForSequenceClassification.from_pretrained(
        name, _do_init=False, num_labels=3, from_pt=True
    )
    random_params = model.init_weights(jax.random.PRNGKey(1), (1, 12), params)
    flat, loaded = (flatten_dict(unfreeze(tree)) for tree in (random_params, params))
    assert set(flat) == model.required_params and set(loaded) <= set(flat)
    shapes = jax.tree.map(lambda leaf: leaf.shape, unfreeze(model.params_shape_tree))
    assert {path: leaf.shape for path, leaf in flat.items()} == flatten_dict(shapes)
    flat["classifier", "kernel"] = jnp.ones_like(flat["classifier", "kernel"]) * 0.1
    mine = freeze(unflatten_dict(flat))
    mask = unflatten_dict({path: path[-1] == "kernel" for path in flat})
    halves = flatten_dict(model.to_bf16(mine, mask))
    assert {leaf.dtype.name for path, leaf in halves.items() if path[-1] == "bias"} == {"float32"}
    ids = np.random.default_rng(1).integers(3, 64, (2, 12))
    logits = model(ids, params=mine).logits
    model.save_pretrained(folder / "transferred", params=mine)
    return {"bert_ids": ids, "logits": logits}


def main(folder, output):
    folder = Path(folder)
    np.savez(output, **generation(folder), **transfer(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])

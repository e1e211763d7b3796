"""The functional interface: parameters, transformations of JAX, precision, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from transformers import PreTrainedConfig

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import trees
from hfseq.nn.outputs import FlaxBaseModelOutput
from hfseq_plugins.bert.modeling import FlaxBertForCausalLM, FlaxBertForMaskedLM, FlaxBertModel
from tests.support.models import bert_config, close, ids, trees_equal
from tests.support.tiers import first


@pytest.fixture(scope="module")
def model():
    return FlaxBertForMaskedLM(bert_config(num_hidden_layers=1))


@pytest.fixture(scope="module")
def blank():
    return FlaxBertForMaskedLM(bert_config(num_hidden_layers=1), _do_init=False)


# -- parameters ------------------------------------------------------------------------------------


def test_params_are_plain_nested_dicts_in_float32(model):
    def plain(tree):
        return type(tree) is dict and all(
            isinstance(key, str) and (plain(value) if isinstance(value, dict) else True)
            for key, value in tree.items()
        )

    assert plain(model.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}


@pytest.mark.parametrize("dtype", first([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_params_are_float32_for_any_dtype(dtype):
    half = FlaxBertModel(bert_config(num_hidden_layers=1), dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"float32"}
    assert jax.eval_shape(half, ids()).last_hidden_state.dtype == dtype


def test_seed_decides_the_parameters():
    config = bert_config(num_hidden_layers=1)
    params = FlaxBertModel(config, seed=1).params
    assert trees_equal(params, FlaxBertModel(config, seed=1).params)
    assert not trees_equal(params, FlaxBertModel(config, seed=2).params)


def test_initialisation_is_the_familys(model):
    flat = trees.flatten(model.params)
    for path, leaf in flat.items():
        values = np.asarray(leaf)
        if path[-1] == "scale":
            assert (values == 1).all()
        elif path[-1] == "bias":
            assert (values == 0).all()
        else:
            assert abs(values.std() - 0.02) < 0.004 and abs(values.mean()) < 0.004, path


def test_scan_and_loop_start_from_the_same_parameters():
    config = bert_config()
    loop = trees.flatten(FlaxBertModel(config).params)
    scan = FlaxBertModel(config, scan_layers=True)
    listed = scan.weight_map.unstack(trees.flatten(scan.params))
    assert listed.keys() == loop.keys()
    assert all(np.array_equal(listed[path], loop[path]) for path in loop)


def test_required_params_and_shapes_are_known_without_parameters(blank, model):
    assert blank.required_params == model.required_params
    assert ("bert", "embeddings", "word_embeddings", "embedding") in blank.required_params
    shape = blank.params_shape_tree["cls"]["predictions"]["bias"]
    assert isinstance(shape, jax.ShapeDtypeStruct) and shape.shape == (64,)


def test_uninitialized_params_are_inaccessible(blank, model):
    with pytest.raises(
        ValueError, match="`params` cannot be accessed from model when.*_do_init=False"
    ):
        blank.params  # noqa: B018
    with pytest.raises(ValueError, match="`params` cannot be set from model when"):
        blank.params = model.params
    assert close(blank(ids(), params=model.params).logits, model(ids()).logits, 0)


def test_params_setter_accepts_dicts_and_keeps_extra_leaves():
    small = FlaxBertModel(bert_config(num_hidden_layers=1))
    changed = jax.tree.map(lambda leaf: leaf + 1, small.params)
    small.params = freeze({**changed, "more": {"x": jnp.ones(1)}})
    assert type(small.params) is dict and trees_equal(small.params.pop("more"), {"x": jnp.ones(1)})
    assert trees_equal(small.params, changed)


def test_setter_refuses_a_tree_with_holes(model):
    params = trees.thaw(model.params)
    del params["cls"]["predictions"]["bias"]
    with pytest.raises(ValueError, match="Some parameters are missing.*cls/predictions/bias"):
        model.params = params


def test_a_call_with_holes_names_them(model):
    with pytest.raises(ValueError, match="Some parameters are missing.*bert/embeddings"):
        model(ids(), params={"cls": model.params["cls"]})


def test_call_accepts_frozen_dicts(model):
    expected = model(ids()).logits
    assert close(model(ids(), params=freeze(model.params)).logits, expected, 0)


def test_init_weights_is_pure_and_fills_holes(model):
    key = jax.random.PRNGKey(5)
    fresh = model.init_weights(key, (1, 1))
    assert trees_equal(fresh, model.init_weights(key, (1, 1)))
    compiled = jax.jit(lambda key: model.init_weights(key, (1, 1)))(key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), compiled, fresh)
    completed = model.init_weights(key, (1, 1), FrozenDict({"bert": model.params["bert"]}))
    assert trees_equal(completed["bert"], model.params["bert"])
    assert trees_equal(completed["cls"], model.init_weights(key)["cls"])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_casts_change_only_masked_float_leaves(model, name, dtype):
    params = model.params
    cast = getattr(model, f"to_{name}")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cast(model.params))} == {dtype}
    assert cast({"n": jnp.arange(3)})["n"].dtype == jnp.int32
    flat = trees.flatten(model.params)
    mask = trees.unflatten({path: path[-1] != "scale" for path in flat})
    masked = trees.flatten(cast(model.params, mask))
    assert all((leaf.dtype.name == dtype) == (path[-1] != "scale") for path, leaf in masked.items())
    assert model.params is params
    assert trees_equal(model.to_fp32(cast({"x": jnp.ones(2)})), {"x": jnp.ones(2)})


# -- transformations -------------------------------------------------------------------------------


def test_jit_of_keywords_returns_an_output(model):
    run = jax.jit(lambda **inputs: model(**inputs))
    output = run(input_ids=ids(), attention_mask=np.ones_like(ids()))
    assert close(output.logits, model(ids()).logits)


def test_eval_shape_needs_no_parameters(blank):
    params = blank.params_shape_tree
    output = jax.eval_shape(lambda p: blank(ids(), params=p), params)
    assert output.logits.shape == (2, 12, 64)


def test_pmap_and_assignment_of_tracers():
    small = FlaxBertModel(bert_config(num_hidden_layers=1))
    expected = jax.jit(small)(ids(8)).last_hidden_state

    def run(params, tokens):
        small.params = params
        return small(tokens).last_hidden_state

    states = jax.pmap(run, in_axes=(None, 0))(small.params, ids(8)[:, None])
    assert close(states[:, 0], expected)


def test_dropout_depends_only_on_its_key(model):
    run = jax.jit(lambda key: model(ids(), dropout_rng=key, train=True).logits)
    first, again, other = (run(jax.random.PRNGKey(seed)) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert np.array_equal(
        jax.jit(model)(ids(), dropout_rng=jax.random.key(0)).logits, jax.jit(model)(ids()).logits
    )


def test_old_and_typed_keys_are_the_same(model):
    run = jax.jit(lambda key: model(ids(), dropout_rng=key, train=True).logits)
    assert np.array_equal(run(jax.random.PRNGKey(3)), run(jax.random.key(3)))


def test_training_with_dropout_needs_a_key(model):
    with pytest.raises(UsageError, match="train=True with dropout requires dropout_rng"):
        model(ids(), train=True)
    quiet = bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    quiet = FlaxBertModel(quiet)
    assert close(quiet(ids(), train=True)[0], quiet(ids())[0], 0)


def test_gradient_checkpointing_can_be_switched_on_later():
    checkpointed = FlaxBertModel(bert_config(num_hidden_layers=1))
    initial, params = checkpointed(ids())[0], checkpointed.params
    checkpointed.enable_gradient_checkpointing()
    jaxpr = str(jax.make_jaxpr(lambda p: checkpointed(ids(), params=p)[0])(params))
    assert "checkpoint" in jaxpr or "remat" in jaxpr
    assert np.array_equal(checkpointed(ids())[0], initial) and checkpointed.params is params


# -- inputs and outputs ----------------------------------------------------------------------------


def test_inputs_may_be_lists_and_any_integers(model):
    expected = model(ids()).logits
    assert close(model(ids().tolist()).logits, expected, 0)
    assert close(model(ids().astype(np.int64), np.ones((2, 12), bool)).logits, expected, 0)


def test_outputs_may_be_tuples(model):
    output = model(ids(), return_dict=False, output_hidden_states=True)
    assert type(output) is tuple and output[0].shape == (2, 12, 64) and len(output[1]) == 2


def test_first_argument_is_the_main_input(model):
    import inspect

    assert list(inspect.signature(type(model).__call__).parameters)[1] == model.main_input_name


def test_ids_outside_of_the_vocabulary_are_refused(model):
    for wrong in (64, -1):
        tokens = ids()
        tokens[0, 0] = wrong
        with pytest.raises(UsageError, match=f"input_ids contains {wrong}, .*vocabulary of 64"):
            model(tokens)


def test_text_and_unknown_arguments_are_refused(model):
    with pytest.raises(UsageError, match="not text: call the tokenizer first"):
        model("Hello")
    with pytest.raises(TypeError, match="lables"):
        model(ids(), lables=ids())
    with pytest.raises(TypeError, match="FlaxBertModel does not accept.* lables"):
        FlaxBertModel(bert_config(num_hidden_layers=1))(ids(), lables=ids())


def test_no_configuration_is_refused():
    with pytest.raises(ValueError, match="config cannot be None"):
        FlaxBertModel(None)


def test_unknown_names_of_options_are_refused():
    with pytest.raises(UsageError, match="unknown attention implementation 'flsh'"):
        FlaxBertModel(bert_config(), attn_implementation="flsh")
    with pytest.raises(UsageError, match="unknown precision 'bfloat61'.*did you mean 'bfloat16'"):
        FlaxBertModel(bert_config(), precision="bfloat61")
    with pytest.raises(UsageError, match="unknown activation 'gleu'"):
        FlaxBertModel(bert_config(hidden_act="gleu"))


@pytest.mark.parametrize("name", ["xla", "eager"])
def test_attention_implementations_agree(model, name):
    other = FlaxBertForMaskedLM(
        bert_config(num_hidden_layers=1), attn_implementation=name, _do_init=False
    )
    assert close(other(ids(), params=model.params).logits, model(ids()).logits)


def test_precision_by_name_is_precision_by_dtype(model):
    config = bert_config(num_hidden_layers=1)
    by_name = FlaxBertForMaskedLM(config, precision="bfloat16", _do_init=False)
    typed = FlaxBertForMaskedLM(config, dtype=jnp.bfloat16, _do_init=False)
    logits = [m(ids(), params=model.params).logits for m in (by_name, typed)]
    assert logits[0].dtype == jnp.bfloat16 and close(*logits, 0)


# -- the cache -------------------------------------------------------------------------------------


def test_cache_mirrors_the_parameters_and_comes_back_second():
    decoder = FlaxBertForCausalLM(bert_config(is_decoder=True))
    cache = decoder.init_cache(2, 12)
    part = cache["bert"]["encoder"]["layer"]["0"]["attention"]["self"]
    assert part["cached_key"].shape == (2, 12, 4, 8)
    assert part["cache_index"].shape == () and part["cache_index"].dtype == jnp.int32
    positions = np.arange(5)[None].repeat(2, 0)
    decode = jax.jit(functools.partial(decoder, return_dict=False))
    output = decode(ids()[:, :5], np.ones((2, 12)), position_ids=positions, past_key_values=cache)
    assert int(output[1]["bert"]["encoder"]["layer"]["1"]["attention"]["self"]["cache_index"]) == 5
    without = jax.eval_shape(decoder, ids(), past_key_values={})
    assert "past_key_values" not in without


def test_cached_decoding_works_with_scanned_layers():
    config = bert_config(is_decoder=True)
    loop = FlaxBertForCausalLM(config)
    scan = FlaxBertForCausalLM(config, scan_layers=True)
    full, cache, parts = jax.jit(loop)(ids()).logits, scan.init_cache(2, 12), []
    for columns in (slice(0, 7), slice(7, 8), slice(8, 12)):
        positions = np.arange(12)[None, columns].repeat(2, 0)
        output = jax.jit(scan)(ids()[:, columns], position_ids=positions, past_key_values=cache)
        cache = output.past_key_values
        parts.append(output.logits)
    assert close(np.concatenate(parts, 1), full)


def test_classes_without_a_language_head_do_not_generate(model):
    assert not FlaxBertModel.can_generate() and model.generation_config is None
    assert issubclass(FlaxBertModel, FlaxPreTrainedModel) and model.framework == "flax"


# -- the table of positions ------------------------------------------------------------------------


class Tables(nnx.Module):
    """A model that adds embeddings of several tables and does not declare position_table."""

    def __init__(self, config, rngs):
        def make(rows):
            return nn.Embed(rows, 8, nnx.initializers.ones, rngs)

        self.words = make(config.vocab_size)
        for name, rows in config.tables.items():
            setattr(self, name, make(rows))
        self.tables = tuple(config.tables)

    def __call__(self, input_ids, attention_mask=None, rngs=None):
        positions = jnp.arange(input_ids.shape[1])[None]
        states = self.words(input_ids)
        return FlaxBaseModelOutput(
            last_hidden_state=sum((getattr(self, n)(positions) for n in self.tables), states)
        )


class FlaxTables(FlaxPreTrainedModel):
    module_class = Tables


def tables(vocabulary=30, limit=12, **tables):
    config = PreTrainedConfig(
        vocab_size=vocabulary, max_position_embeddings=limit, tables=dict(tables)
    )
    return FlaxTables(config)


@pytest.mark.parametrize(
    ("vocabulary", "table"),
    [
        (30, {"wpe": 12}),
        (30, {"embed_positions": 14}),
        (12, {"position_embeddings": 12}),
    ],
)
def test_an_undeclared_table_of_positions_limits_the_rows(vocabulary, table):
    model = tables(vocabulary, **table)
    assert np.isfinite(jax.jit(model)(np.ones((1, 12), int)).last_hidden_state).all()
    with pytest.raises(
        UsageError, match="13 tokens per sequence.*at most 12 .max_position_embeddings=12"
    ):
        model(np.ones((1, 13), int))


@pytest.mark.parametrize("model", [tables, lambda: tables(vocabulary=12)])
def test_a_model_without_a_table_of_positions_takes_rows_of_any_length(model):
    assert np.isfinite(model()(np.ones((1, 40), int)).last_hidden_state).all()


def test_a_model_may_declare_that_no_table_limits_it(monkeypatch):
    monkeypatch.setattr(FlaxTables, "position_table", "")
    tables(wpe=12)(np.ones((1, 13), int))


def test_empty_parameters_are_not_replaced_by_the_models_own():
    model = FlaxBertModel(bert_config(), seed=0)
    with pytest.raises(ValueError, match="missing: embeddings/LayerNorm/bias"):
        model(np.ones((1, 4), int), params={})

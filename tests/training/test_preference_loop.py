"""Training runs on preferences: DPO, KTO, ORPO, CPO and reward models."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest
import transformers

import hfseq
from hfseq import cli
from hfseq.errors import HfseqError, UsageError
from tests.support import preferences
from tests.support.models import llama_config
from tests.support.tiers import first
from tests.training.conftest import assert_same, check_resume, losses, make_runner

#: The flags of each objective that differ from DPO.
OBJECTIVES = {
    "dpo": {},
    "kto": {"train_file": "train-kto.jsonl", "validation_file": "valid-kto.jsonl"},
    "orpo": {},
    "cpo": {"loss_type": "simpo", "beta": 2, "cpo_alpha": 0.5},
    "reward": {"pad_token": "<|endoftext|>", "center_rewards_coefficient": 0.01},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer, a tiny model and preferences."""
    folder = preferences.write(tmp_path_factory.mktemp("preferences"))
    preferences.save_model(folder)
    wider = {"hidden_size": 48, "seed": 2}
    preferences.save_model(folder, "teacher", **wider)
    for name, options in (("rewards", {}), ("padded", {"pad_token_id": 3})):
        preferences.save_model(
            folder, name, "ForSequenceClassification", num_labels=1, **wider, **options
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(tokenizer), **sizes)
    hfseq.FlaxT5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    return folder


@pytest.fixture
def tune(folder, tmp_path):
    def run(output="run", objective="dpo", **changes):
        files = {"train_file": "train.jsonl", "validation_file": "valid.jsonl"}
        flags = files | OBJECTIVES[objective] | changes
        flags |= {name: folder / flags[name] for name in files}
        defaults = {"model_name_or_path": folder / "model", "global_batch_size": 8}
        defaults |= {"learning_rate": 3e-3, "max_steps": 3, "card_samples": 0}
        return make_runner(objective, tmp_path, **defaults)(output, **flags)

    return run


def first_metrics(folder) -> dict[str, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return next(record for record in records if "train_loss" in record)


def test_a_new_adapter_is_compared_with_its_base(tune, folder):
    """The reference shares the base: the compiled step has no second copy of it as an argument."""
    adapter = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    adapter["max_steps"] = 2
    shared = tune("shared", **adapter)
    assert first_metrics(shared.folder)["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    separate = tune("separate", **adapter, ref_model_name_or_path=folder / "model")
    assert_same(losses(shared.folder), losses(separate.folder), 1e-6)
    assert shared.metrics["eval_loss"] == pytest.approx(separate.metrics["eval_loss"], rel=1e-6)
    references = [
        line.split(" | ")[1]
        for loop in (shared, separate)
        for line in (loop.folder / "README.md").read_text().splitlines()
        if line.startswith("| Reference model |")
    ]
    assert references == ["the base model |", "`model` |"]
    base = hfseq.FlaxLlamaForCausalLM.from_pretrained(folder / "model")
    base_size = sum(leaf.size for leaf in jax.tree.leaves(base.params))

    def argument_bytes(loop):
        run = loop.run
        batch = next(iter(run_batches(run)))
        step = run.step_function().lower(run.abstract_state(), run.frozen, batch).compile()
        return step.memory_analysis().argument_size_in_bytes

    difference = argument_bytes(separate) - argument_bytes(shared)
    assert difference == pytest.approx(4 * base_size, rel=0.01)


def run_batches(run):
    from hfseq.training.loader import Loader

    loader = Loader(run.data.train, run.objective, run.mesh, run.batch.micro_batches, 0)
    for item in loader.batches(0, 1):
        yield item.batch


@pytest.mark.slow
def test_stored_log_probabilities_replace_the_reference(tune, folder, tmp_path):
    live = tune("live", max_steps=2)
    stored = tune("stored", max_steps=2, precompute_ref_log_probs=True)
    assert_same(losses(live.folder), losses(stored.folder), 1e-5)
    assert not stored.run.frozen
    # A resumed run reads them, and refuses those of other data.
    path = stored.folder / "reference_logps" / "train.npy"
    written = path.stat().st_mtime_ns
    tune("stored", max_steps=3, precompute_ref_log_probs=True)
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UsageError, match="reference_logps.* different examples"):
        tune(
            "stored",
            max_steps=4,
            precompute_ref_log_probs=True,
            train_file=folder / "train-strings.jsonl",
        )


@pytest.mark.parametrize("objective", first(["kto", "orpo", "cpo", "reward"], "kto"))
def test_gradient_accumulation_is_exact(tune, objective):
    whole, parts = (
        tune(f"micro-{count}", objective, max_steps=2, gradient_accumulation_steps=count)
        for count in (1, 4)
    )
    assert_same(losses(whole.folder), losses(parts.folder))
    assert all(math.isfinite(value) for value in whole.metrics.values())
    card = (whole.folder / "README.md").read_text()
    assert f"| Method | {whole.run.objective.method} |" in card
    assert "## Citation" in card and f"  - {whole.run.objective.tags[0]}\n".strip() in card


@pytest.mark.parametrize("objective", first(OBJECTIVES))
def test_a_teacher_does_not_depend_on_micro_batches_and_meshes(tune, folder, objective):
    teacher = folder / ("rewards" if objective == "reward" else "teacher")
    options = {"teacher": teacher, "hidden_state_weight": 1.0, "max_steps": 2}
    whole = tune("whole", objective, **options)
    parts = tune("parts", objective, **options, gradient_accumulation_steps=4)
    mesh = "data=2,fsdp=2,tensor=2"
    distributed = tune("mesh", objective, **options, devices=8, mesh=mesh)
    for other in (parts, distributed):
        assert_same(losses(whole.folder), losses(other.folder))
        for name in ("eval_distillation_loss", "eval_hidden_state_distance"):
            assert other.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5)
    card = (whole.folder / "README.md").read_text()
    assert f"| Teacher | `{teacher.name}` |" in card and "hinton2015distilling" in card
    assert all(citation in card for citation in whole.run.objective.citation.split("\n\n"))


@pytest.mark.slow
def test_a_teacher_remains_when_the_reference_is_removed(tune, folder):
    """Also with packed pairs and an adapter."""
    options = {"teacher": folder / "teacher", "packing": True, "use_peft": True}
    options |= {"lora_dropout": 0.0, "max_steps": 2}
    live = tune("live", **options)
    stored = tune("stored", **options, precompute_ref_log_probs=True)
    assert_same(losses(live.folder), losses(stored.folder), 1e-5)
    assert stored.run.frozen["auxiliary"].keys() == {"teacher"}


@pytest.mark.slow
def test_students_approach_their_teacher(tune, folder):
    run = tune(teacher=folder / "teacher", task_weight=0, max_steps=20, learning_rate=1e-2)
    records = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    values = [r["train_distillation_loss"] for r in records if "train_distillation_loss" in r]
    assert values[-1] < 0.7 * values[0]


@pytest.mark.slow
def test_the_card_shows_answers_before_and_after_training(tune, folder):
    """A resumed run has them in its checkpoint."""
    options = {"card_samples": 2, "save_steps": 2, "learning_rate": 0.1}
    tune("run", "orpo", **options, max_steps=2)
    resumed = tune("run", "orpo", **options, max_steps=4)
    content = json.loads((resumed.folder / "run.json").read_text())
    model = hfseq.FlaxAutoModelForCausalLM.from_pretrained(folder / "model")
    rows = resumed.run.data.evaluation.rows
    expected = resumed.run.objective.samples(model, model.params, rows, 2)
    assert content["first_outputs"] == [output or "(nothing)" for _, output in expected]
    assert content["first_outputs"] != [output for _, output in content["sample_outputs"]]
    card = (resumed.folder / "README.md").read_text()
    assert card.count("Before training: ") == card.count("After training: ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_resume_is_bit_exact(tune, objective):
    def run(output, callbacks=(), **options):
        return tune(output, objective, callbacks=callbacks, **options)

    check_resume(run, save_steps=2, max_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "fsdp=2,sequence=2", "data=8"])
def test_losses_do_not_depend_on_the_mesh(tune, objective, mesh):
    single = tune("one", objective)
    devices = math.prod(int(part[-1]) for part in mesh.split(","))
    distributed = tune("many", objective, devices=devices, mesh=mesh)
    assert distributed.run.mesh.size == devices
    assert_same(losses(distributed.folder), losses(single.folder))


@pytest.mark.slow
def test_packed_pairs_have_their_single_losses(tune):
    """The learning rate is zero: all pairs are evaluated with one model."""
    options = {"learning_rate": 0.0, "max_steps": 1, "loss_type": "ipo"}
    alone, packed = (tune(f"packed-{on}", packing=on, **options) for on in (False, True))
    assert len(packed.run.data.train.rows) < len(alone.run.data.train.rows)
    for name in ("eval_loss", "eval_logps/chosen", "eval_logps/rejected", "eval_logits/chosen"):
        assert packed.metrics[name] == pytest.approx(alone.metrics[name], rel=2e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_quantized_base_is_its_own_reference(tune, bits):
    pytest.importorskip("qwix")
    run = tune("quantized", use_peft=True, lora_dropout=0.0, **{bits: True})
    assert first_metrics(run.folder)["train_loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.slow
def test_an_adapter_that_is_trained_further_is_its_own_reference(tune):
    options = {"use_peft": True, "lora_dropout": 0.0, "lora_modules_to_save": "norm"}
    first = tune("first", **options)
    second = tune("second", **(options | {"model_name_or_path": first.folder}))
    assert first_metrics(second.folder)["train_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert losses(second.folder)[3] < math.log(2)


@pytest.mark.slow
def test_bfloat16_starts_at_the_same_constants(tune):
    run = tune("bfloat16", dtype="bfloat16")
    assert first_metrics(run.folder)["train_loss"] == pytest.approx(math.log(2), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
@pytest.mark.parametrize("kind", ["t5", "bart", "wmt_transformer"])
def test_encoder_decoders_learn_preferences(tune, folder, kind, objective):
    sides = "encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
    sizes = {
        "t5": "d_model=16,d_kv=8,d_ff=32,num_layers=1,num_heads=2",
        "bart": f"d_model=16,encoder_ffn_dim=32,decoder_ffn_dim=32,{sides}",
        "wmt_transformer": f"d_model=16,encoder_ffn_dim=32,decoder_ffn_dim=32,{sides}",
    }[kind]
    run = tune(
        f"{kind}-{objective}",
        objective,
        model_name_or_path=None,
        model_type=kind,
        config_overrides=f"{sizes},max_position_embeddings=64" if kind != "t5" else sizes,
        tokenizer_name=folder / "model",
        train_file="train-strings.jsonl",
        validation_file="valid-strings.jsonl",
        max_steps=4,
    )
    steps = losses(run.folder)
    assert steps[4] < steps[1]
    if objective == "dpo":
        assert steps[1] == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.slow
def test_a_reward_model_opens_in_pytorch_with_the_same_rewards(tune, folder):
    torch = pytest.importorskip("torch")
    run = tune("reward", "reward", card_samples=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(run.folder).eval()
    config = json.loads((run.folder / "config.json").read_text())
    assert config["pad_token_id"] == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert config["problem_type"] == "regression" and theirs.score.weight.shape == (1, 32)
    item = preferences.pairs(1, 5)[0]
    ids = tokenizer.apply_chat_template([*item["prompt"], *item["chosen"]], return_dict=False)
    padded = np.array([[*ids, *[tokenizer.pad_token_id] * 3]])
    ours = hfseq.FlaxAutoModelForSequenceClassification.from_pretrained(run.folder)
    with torch.no_grad():
        expected = theirs(
            torch.tensor(padded),
            attention_mask=torch.tensor(padded != tokenizer.pad_token_id).int(),
        )
    result = ours(padded, attention_mask=(padded != tokenizer.pad_token_id).astype(np.int32))
    np.testing.assert_allclose(result.logits, expected.logits.numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_a_trained_adapter_opens_in_peft_and_merged_in_pytorch(tune, folder, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    run = tune("adapter", use_peft=True, lora_target_modules="all-linear")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    theirs = peft.PeftModel.from_pretrained(base, run.folder).eval()
    ids = np.arange(5, 25)[None]
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    ours = hfseq.FlaxAutoModelForCausalLM.from_pretrained(run.folder)
    np.testing.assert_allclose(ours(ids).logits, expected, atol=2e-5)
    merged_folder = tmp_path / "merged"
    assert cli.main(["convert", str(run.folder), str(merged_folder), "--merge"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(merged_folder).eval()
    with torch.no_grad():
        np.testing.assert_allclose(merged(torch.tensor(ids)).logits.numpy(), expected, atol=2e-5)
    templates = (
        transformers.AutoTokenizer.from_pretrained(source).chat_template
        for source in (run.folder, merged_folder, folder / "model")
    )
    assert len(set(templates)) == 1


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("reward", {"pad_token": "<|im_end|>"}, "uses its EOS token as padding"),
        ("reward", {"pad_token": "<nothing>"}, "--pad_token <nothing>"),
        ("kto", {"precompute_ref_log_probs": True}, "--precompute_ref_log_probs: the loss kto"),
        ("kto", {"global_batch_size": 1}, "--global_batch_size 1"),
        ("orpo", {"teacher": "t5"}, "--teacher .*t5 is an encoder-decoder"),
        ("reward", {"teacher": "padded"}, "--teacher .*padded reads the reward .* --pad_token"),
        ("reward", {"teacher": "rewards", "distillation_loss": "cosine"}, "cosine: .* margin_mse"),
    ],
)
def test_contradictory_flags_are_refused(tune, folder, objective, changes, message):
    if "teacher" in changes:
        changes = changes | {"teacher": folder / changes["teacher"]}
    with pytest.raises(UsageError, match=message):
        tune("wrong", objective, **changes)


def test_a_reference_with_a_smaller_vocabulary_is_refused(tune, tmp_path):
    hfseq.FlaxLlamaForCausalLM(llama_config(vocab_size=50)).save_pretrained(tmp_path / "small")
    with pytest.raises(UsageError, match="small has a vocabulary of 50 entries"):
        tune("wrong", ref_model_name_or_path=tmp_path / "small")


def test_an_adapter_without_a_base_is_refused(tune, folder, tmp_path):
    config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "nowhere")}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(HfseqError, match="nowhere"):
        tune("wrong", model_name_or_path=tmp_path / "adapter", tokenizer_name=folder / "model")

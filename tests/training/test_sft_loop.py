"""Supervised fine-tuning runs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

import hfseq
from hfseq.errors import UsageError
from hfseq.training.arguments import parse
from tests.support import chats
from tests.support.chats import END_TOKEN, OPPOSITES, turn
from tests.training.conftest import assert_same, check_resume, losses, make_runner

TINY = (
    "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=64,max_position_embeddings=64"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A folder with a tokenizer, a chat template and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    chats.write_tokenizer(folder / "tokenizer", template=None)
    (folder / "chat.jinja").write_text(chats.TEMPLATE)
    for name, count, seed in (("train", 80, 0), ("valid", 20, 1)):
        lines = ({"messages": conversation} for conversation in chats.conversations(count, seed))
        chats.write_lines(folder / f"{name}.jsonl", lines)
    return folder


@pytest.fixture
def tune(chat, tmp_path):
    return make_runner(
        "sft",
        tmp_path,
        model_type="llama",
        config_overrides=TINY,
        tokenizer_name=chat / "tokenizer",
        chat_template_path=chat / "chat.jinja",
        train_file=chat / "train.jsonl",
        validation_file=chat / "valid.jsonl",
        assistant_only_loss=True,
        eos_token=END_TOKEN,
        global_batch_size=8,
        learning_rate=3e-3,
        max_steps=3,
        card_samples=0,
    )


def answer(folder, question: str) -> str:
    """The answer of a model, by the code in its model card."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = hfseq.FlaxAutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [turn("user", question)], add_generation_prompt=True, return_dict=True, return_tensors="np"
    )
    generated = model.generate(**inputs, max_new_tokens=8).sequences
    answer_ids = generated[0, inputs["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(answer_ids, skip_special_tokens=True)


def test_trained_model_chats(tune):
    layers = {"config_overrides": f"{TINY},num_hidden_layers=1"}
    loop = tune(max_steps=1, card_samples=1, packing=True, **layers)
    assert {"eval_loss", "eval_perplexity", "eval_accuracy"} <= loop.metrics.keys()
    tokenizer = AutoTokenizer.from_pretrained(loop.folder)
    assert tokenizer.chat_template == chats.TEMPLATE and tokenizer.eos_token == END_TOKEN
    generation = json.loads((loop.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [301, 0]
    card = (loop.folder / "README.md").read_text()
    assert "\n- sft\n" in card and card.count("tokenizer.apply_chat_template(") == 2
    assert "pipeline_tag: text-generation" in card and "## Sample outputs" in card
    assert isinstance(answer(loop.folder, "what is not hot"), str)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_learns_to_answer(tune, packing):
    loop = tune(max_steps=150, learning_rate=1e-2, logging_steps=50, packing=packing)
    assert loop.metrics["eval_accuracy"] > 0.95
    answers = {word: answer(loop.folder, f"not {word} is ?") for word in OPPOSITES}
    right = sum(answers[word] == other for word, other in OPPOSITES.items())
    assert right >= 7, answers


@pytest.mark.slow
def test_packed_evaluation_matches_single_examples(tune):
    """The learning rate is zero: the answers of all examples are evaluated with one model."""
    alone, packed = (
        tune(f"packed-{packing}", max_steps=1, learning_rate=0.0, packing=packing)
        for packing in (False, True)
    )
    assert packed.metrics["eval_loss"] == pytest.approx(alone.metrics["eval_loss"], rel=1e-6)
    assert packed.metrics["eval_accuracy"] == alone.metrics["eval_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_resume_is_bit_exact(tune, packing):
    check_resume(tune, save_steps=2, max_steps=5, packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "micro"), [("data=8", 1), ("data=2,fsdp=2,tensor=2", 2), ("fsdp=2,sequence=4", 1)]
)
def test_losses_do_not_depend_on_devices_or_micro_batches(tune, mesh, micro):
    options = {"packing": True, "max_steps": 4}
    single = losses(tune("one", **options).folder)
    distributed = tune("many", devices=8, mesh=mesh, gradient_accumulation_steps=micro, **options)
    assert distributed.run.mesh.size == 8
    assert_same(losses(distributed.folder), single)


@pytest.mark.slow
def test_adapters_train_on_a_frozen_base(tune):
    base_run = tune("base", max_steps=25, learning_rate=1e-2)
    base = base_run.folder
    options = {
        "model_type": None,
        "config_overrides": None,
        "model_name_or_path": base,
        "tokenizer_name": None,
        "chat_template_path": None,
        "use_peft": True,
    }
    adapter_flags = {"max_steps": 40, "lora_target_modules": "all-linear", "learning_rate": 5e-3}
    loop = tune("adapter", **adapter_flags, **options)
    assert loop.metrics["eval_loss"] < base_run.metrics["eval_loss"] - 0.02
    assert (loop.folder / "adapter_model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(loop.folder).chat_template == chats.TEMPLATE
    assert isinstance(answer(loop.folder, "what is not hot"), str)
    again = tune(
        "adapter",
        do_eval=True,
        output_dir=loop.folder,
        **(
            options
            | {
                "use_peft": None,
                "model_name_or_path": None,
                "tokenizer_name": loop.folder,
            }
        ),
    )
    assert np.isclose(again.metrics["eval_loss"], loop.metrics["eval_loss"], rtol=1e-6)


@pytest.mark.slow
def test_prompt_completion_training_with_test_split(tune, chat):
    for name in ("train", "valid"):
        chats.write_lines(chat / f"{name}-pairs.jsonl", chats.pairs(40, len(name)))
    loop = tune(
        train_file=chat / "train-pairs.jsonl",
        validation_file=chat / "valid-pairs.jsonl",
        test_file=chat / "valid-pairs.jsonl",
        assistant_only_loss=None,
        chat_template_path=None,
        eos_token=None,
        max_steps=2,
        do_train=True,
        do_eval=True,
        do_predict=True,
        card_samples=1,
    )
    assert loop.metrics["predict_loss"] == loop.metrics["eval_loss"]
    assert "apply_chat_template" not in (loop.folder / "README.md").read_text()


def test_defaults_are_those_of_trl():
    arguments = parse(["--output_dir", "x"], objective="sft")
    assert arguments.training.learning_rate == 2e-5
    assert parse(["--output_dir", "x"], objective="clm").training.learning_rate == 5e-5
    data = arguments.data
    assert (data.packing, data.packing_strategy, data.assistant_only_loss) == (False, "bfd", False)
    assert data.completion_only_loss is None and data.dataset_text_field == "text"


def test_mismatched_inputs_are_rejected(tune):
    with pytest.raises(UsageError, match=r"--max_length 99 .* at most 64"):
        tune(max_length=99)
    with pytest.raises(UsageError, match="--packing_strategy wrapped: .*bfd"):
        tune(packing_strategy="wrapped")
    with pytest.raises(UsageError, match="'sft' requires whole rows"):
        tune(update_length=8)
    with pytest.raises(UsageError, match="--streaming, --line_by_line"):
        tune(streaming=True)

"""The lm-evaluation-harness model: likelihoods, windows and texts compared with PyTorch."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hfseq
from hfseq import cli
from hfseq.errors import DataError, UsageError
from tests.support import models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="pip install 'hfseq[eval]'")
    from hfseq.pipelines.lm_eval import HfseqLM

TEXT = "the law of every land is read by all who live there, blåbær"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random GPT-2 with 40 positions, and its tokenizer with a chat template."""
    from hfseq.data.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("evaluated") / "gpt2"
    tokenizer = train_tokenizer([[f"{TEXT} {i}" for i in range(30)]], "gpt2", None, 300, folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = models.gpt2_config(vocab_size=len(tokenizer), initializer_range=0.4, **ids)
    hfseq.FlaxGPT2LMHeadModel(config, seed=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(folder) -> Any:
    return HfseqLM(str(folder), batch_size=4)


@pytest.fixture(scope="module")
def reference(folder) -> Any:
    """Returns a function from IDs `(length,)` to PyTorch's log-probabilities."""
    torch = pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()

    def compute(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()

    return compute


def asked(*arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def scored(reference: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Returns PyTorch's result for the last 41 tokens."""
    tokens = (context + continuation)[-41:]
    actual = reference(tokens[:-1])[-len(continuation) :]
    picked = actual[np.arange(len(continuation)), continuation]
    return picked.sum(), actual.argmax(-1).tolist() == continuation


def test_likelihoods_match_pytorch_in_any_batch(evaluated, reference):
    pairs = [
        ("the law of", " every land"),
        ("", "the law"),
        ("who live there, ", "blåbær"),
        (TEXT * 4, " every land"),  # longer than the model's limit
        ("the", " law of every land is read by all"),
        ("read by", " all"),
    ]
    actual = evaluated.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    encode = evaluated.tok_encode
    for (context, continuation), answer in zip(pairs, actual, strict=True):
        previous, following = ([evaluated.prefix_token_id], encode(continuation))
        if context:
            stripped = context.rstrip()
            previous = encode(stripped)
            following = encode(context + continuation)[len(previous) :]
        expected = scored(reference, previous, following)
        assert answer[0] == pytest.approx(expected[0], abs=1e-4) and answer[1] == expected[1]


def test_greedy_generation_is_reported(evaluated, reference):
    context = evaluated.tok_encode("the law of")
    generated: list[int] = []
    for _ in range(4):
        generated.append(int(reference(context + generated)[-1].argmax()))
    other = [*generated[:-1], (generated[-1] + 1) % 300]
    requests = [(("a", "b"), context, generated), (("a", "c"), context, other)]
    actual = evaluated._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [likeliest for _, likeliest in actual] == [True, False]


@pytest.mark.parametrize("repeats", [1, 3, 7])
def test_a_long_text_is_read_in_windows_that_predict_each_token_once(evaluated, reference, repeats):
    text = " ".join([TEXT] * repeats)
    ids = [evaluated.prefix_token_id, *evaluated.tok_encode(text)]
    total, completed = 0.0, 1
    while completed < len(ids):
        end = min(completed + 40, len(ids))
        actual = reference(ids[max(0, end - 41) : end - 1])
        positions = range(completed, end)
        total += sum(actual[position - end, ids[position]] for position in positions)
        completed = end
    (answer,) = evaluated.loglikelihood_rolling([asked(text)], disable_tqdm=True)
    assert isinstance(answer, float) and answer == pytest.approx(total, abs=1e-4 * repeats)


def test_lengths_share_compiled_programs(folder):
    fresh = HfseqLM(str(folder), batch_size=2)
    words = fresh.tok_encode(TEXT * 4)
    requests = [((str(n), ""), words[:n], words[n : n + 1]) for n in range(1, 39)]
    fresh._loglikelihood_tokens(requests, disable_tqdm=True)
    assert fresh._score._cache_size() == 4  # 16, 24, 32 and 40 tokens


def greedy(evaluated: Any, context: str, new: int) -> str:
    ids = np.array([evaluated.tok_encode(context)[-(40 - new) :]])
    generated = np.asarray(evaluated.model.generate(ids, max_new_tokens=new).sequences)
    return evaluated.tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)


def test_texts_are_those_of_generate_up_to_the_first_stop_string(evaluated):
    contexts = ["the law of", "blåbær", TEXT * 4, "read by all who"]
    full = [greedy(evaluated, context, 12) for context in contexts]
    plain = {"until": [], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    asks = [asked(context, plain) for context in contexts]
    assert evaluated.generate_until(asks, disable_tqdm=True) == full
    stops = [full[0][3:5], full[3][4:6]]
    asks = [asked(context, {"until": stops, "max_gen_toks": 12}) for context in contexts]
    cut = [text.split(stops[0])[0].split(stops[1])[0] for text in full]
    assert evaluated.generate_until(asks, disable_tqdm=True) == cut != full


def test_stop_string_in_the_context_is_ignored(evaluated):
    context = "the law of"
    full = greedy(evaluated, context, 8)
    stop = context[-2:] + full[0]
    assert stop not in full
    ask = asked(context, {"until": stop, "max_gen_toks": 8})
    assert evaluated.generate_until([ask, asked("read", ask.args[1])])[0] == full


def test_sampling_is_the_tasks_choice(evaluated):
    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 1.5}
    (text,) = evaluated.generate_until([asked("the law of", options)], disable_tqdm=True)
    assert text != greedy(evaluated, "the law of", 8)


def test_an_adapter_is_its_directory_or_added_to_its_base(folder, tmp_path):
    import jax

    from hfseq.modeling.lora import LoraConfig

    config = LoraConfig(2, target_modules=("c_attn",), base_model_name_or_path=str(folder))
    adapted = hfseq.FlaxGPT2LMHeadModel.from_pretrained(folder, peft_config=config)
    # B is initialized with zeros, which have no effect.
    adapted.params = jax.tree.map(lambda leaf: leaf + 0.1, adapted.params)
    adapted.save_pretrained(tmp_path)
    ask = [asked("the law of", " every land")]
    actual = [HfseqLM(str(tmp_path)), HfseqLM(str(folder), peft=str(tmp_path))]
    first, second = (item.loglikelihood(ask, disable_tqdm=True) for item in actual)
    assert first == second != HfseqLM(str(folder)).loglikelihood(ask, disable_tqdm=True)


def test_invalid_options_are_rejected(folder, evaluated):
    with pytest.raises(UsageError, match="max_length 99 .* 40 positions"):
        HfseqLM(str(folder), max_length=99)
    with pytest.raises(UsageError, match="batch_size must be at least 1, not auto"):
        HfseqLM(str(folder), batch_size="auto")
    with pytest.raises(UsageError, match="256 new tokens .* max_length 40.*max_gen_toks"):
        evaluated.generate_until([asked("the", {"until": ["\n"]})], disable_tqdm=True)
    with pytest.raises(DataError, match="a continuation has 41 tokens"):
        evaluated._loglikelihood_tokens([(("a", "b"), [1], [2] * 41)], disable_tqdm=True)


def test_a_loaded_model_and_its_tokenizer_serve(evaluated):
    ask = [asked("the law of", " every land")]
    other = HfseqLM(evaluated.model, tokenizer=evaluated.tokenizer, max_length=20)
    assert other.max_length == 20
    expected = evaluated.loglikelihood(ask, disable_tqdm=True)[0][0]
    assert other.loglikelihood(ask, disable_tqdm=True)[0][0] == pytest.approx(expected, abs=1e-5)


def test_conversations_are_written_by_the_chat_template(evaluated):
    messages = [{"role": "user", "content": "hi"}]
    assert evaluated.apply_chat_template(messages) == "[user] hi\n[assistant] "
    assert evaluated.chat_template(True) == TEMPLATE
    assert evaluated.tokenizer_name.endswith("__gpt2")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A directory with one task per request type, all on one file of documents."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"text": "The law of every land is", "choices": ["read by all", "blåbær"], "label": 0},
        {"text": "All who live there", "choices": ["see", "read the law", "all"], "label": 1},
        {"text": "Who reads the law?", "choices": ["nobody", "all", "the land"], "label": 1},
    ]
    lines = [json.dumps(row | {"text": f"{n}. {row['text']}"}) for n in range(5) for row in rows]
    (folder / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    common = (
        f"dataset_path: json\ntest_split: test\nfewshot_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'documents.jsonl'}}}}}\n"
    )
    kinds = {
        "riddles": 'output_type: multiple_choice\ndoc_to_text: "{{text}}"\n'
        "doc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "surprises": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "{{text}} {{text}} {{text}} {{text}} {{text}}"\n'
        "metric_list: [{metric: byte_perplexity}]\n",
        "stories": 'output_type: generate_until\ndoc_to_text: "{{text}}"\n'
        'doc_to_target: "{{choices[0]}}"\nmetric_list: [{metric: exact_match}]\n'
        'generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12}\n',
    }
    for name, text in kinds.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{common}{text}", encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("shots", "chat"), [(0, False), (2, False), (1, True)])
def test_samples_match_the_harness_model(folder, tasks, shots, chat):
    for package in ("torch", "accelerate", "peft"):
        pytest.importorskip(package)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = ["riddles", "surprises", "stories"]
    ours, theirs = (
        simple_evaluate(
            model=model,
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=names,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            num_fewshot=shots,
            batch_size=4,
            apply_chat_template=chat,
            device="cpu",
        )
        for model in ("hfseq", "hf")
    )
    for name in names:
        for item, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            for (mine,), (right,) in zip(item["resps"], other["resps"], strict=True):
                if name == "stories":
                    assert mine == right
                elif name == "riddles":
                    assert float(mine[0]) == pytest.approx(float(right[0]), abs=2e-4)
                    assert str(mine[1]) == str(right[1])
                else:
                    assert mine == pytest.approx(right, abs=1e-3)


def evaluate(folder: Path, *arguments: str) -> int:
    return cli.main(["evaluate", str(folder), *arguments])


def test_the_command_prints_the_table_of_the_harness(folder, tasks, tmp_path, capsys):
    output = tmp_path / "scores.json"
    flags = ["--include_path", str(tasks), "--limit", "4", "--output_file", str(output)]
    assert evaluate(folder, "--tasks", "riddles,surprises", *flags) == 0
    table = capsys.readouterr().out
    assert table.startswith("|  Tasks  |") and "|riddles  |" in table and "|acc_norm" in table
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["results"]["riddles"]["sample_len"] == 4 and "samples" not in stored
    flags[-2:] = ["--json", "--num_fewshot", "1", "--batch_size", "3", "--apply_chat_template"]
    assert evaluate(folder, "--task", str(tasks / "riddles.yaml"), *flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["n-shot"]["riddles"] == 1 and printed["config"]["batch_size"] == 3


def test_progress_bars_can_be_disabled(folder, tasks, capsys):
    flags = ["--include_path", str(tasks), "--limit", "1", "--tasks", "riddles"]
    bars = []
    for more in ([], ["--disable_tqdm"]):
        assert evaluate(folder, *flags, *more) == 0
        bars.append(capsys.readouterr().err.count("loglikelihood"))
    assert bars[0] > 0 == bars[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tasks", "ridles"],
            "--tasks ridles: unknown task, group, tag or file; did you mean riddles?",
        ),
        (["--tasks", "riddles", "--limit", "0"], "--limit 0.0 must be above 0"),
        (["--tasks", "riddles", "--batch_size", "0"], "--batch_size 0 must be at least 1"),
        (["--tasks", "riddles", "--output", "/no/where/x"], "--output_file /no/where/x: "),
        (["--tasks", "riddles", "--include_path", "/no/where"], "/no/where is not a directory"),
    ],
)
def test_usage_errors_precede_loading(folder, tasks, flags, message, capsys, monkeypatch):
    import lm_eval.tasks

    full = lm_eval.tasks.TaskManager
    alone = lambda include_path, **_: full(include_path=include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", alone)
    monkeypatch.setattr("hfseq.pipelines.lm_eval.load", None)
    flags = flags if "--include_path" in flags else [*flags, "--include_path", str(tasks)]
    assert evaluate(folder, *flags) == 2
    assert message in capsys.readouterr().err


def test_task_failure_is_a_one_line_error(folder, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("task: bad\ndataset_path: json\ntest_split: test\n")
    assert evaluate(folder, "--tasks", "bad", "--include_path", str(tmp_path)) == 1
    assert "error: lm_eval cannot evaluate bad: " in capsys.readouterr().err.splitlines()[-1]

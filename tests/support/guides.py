"""The commands of the five guides of docs/references.md, and how hfseq answers them.

python -m tests.support.guides   # write the table of commands in docs/references.md
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

from hfseq.errors import UsageError
from tests.scripts.v4_flags import GUIDES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "references.md"
BEGIN, END = "<!-- commands: tests/support/guides.py -->", "<!-- /commands -->"
#: The variable FLAGS of the WMT example, for a TPU v3-32.
WMT_FLAGS = (
    "--config.num_train_steps=25000 --config.warmup_steps=250 --config.checkpoint_every_steps=2500"
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a guide.

    Attributes:
        text: The command as it is written in the guide.
        script: The script of hfseq that does the same.
        objective: The objective of the script, or an empty string if it does not train.
        test: The test that checks how hfseq answers the command.
    """

    text: str
    script: str
    objective: str = ""
    test: str = "test_a_command_is_answered_with_flags_of_hfseq"

    @property
    def line(self) -> str:
        """The command on one line."""
        return " ".join(self.text.replace("\\\n", " ").removesuffix("&").split())

    @property
    def flags(self) -> list[str]:
        """The words after the script, without brackets around optional flags."""
        words = shlex.split(self.line.replace("$FLAGS", WMT_FLAGS))
        scripts = [word.endswith(".py") and not word.startswith("-") for word in words]
        position = len(scripts) - scripts[::-1].index(True)
        return [word.strip("[]") for word in words[position:]]


def _guide_command(objective: str, script: str) -> Command:
    text = GUIDES[objective].replace("HuggingFaceFW/fineweb-2", "oscar").strip()
    text = text.replace("nob_Latn", "unshuffled_deduplicated_no")
    return Command(text, script, objective, "test_a_recipe_runs_as_written")


#: The recipes of Transformers 4's guide, by the model of their configuration.
RECIPES = {
    "FacebookAI/roberta-base": _guide_command("mlm", "run_mlm_flax.py"),
    "openai-community/gpt2": _guide_command("clm", "run_clm_flax.py"),
    "google/t5-v1_1-base": _guide_command("span_mlm", "run_t5_mlm_flax.py"),
    "facebook/bart-base": _guide_command("denoising", "run_bart_dlm_flax.py"),
}
_BYTE_LEVEL = """
from datasets import load_dataset
from tokenizers import trainers, Tokenizer, normalizers, ByteLevelBPETokenizer

# load dataset
dataset = load_dataset("oscar", "unshuffled_deduplicated_no", split="train")

# Instantiate tokenizer
tokenizer = ByteLevelBPETokenizer()

def batch_iterator(batch_size=1000):
    for i in range(0, len(dataset), batch_size):
        yield dataset[i: i + batch_size]["text"]

# Customized training
tokenizer.train_from_iterator(batch_iterator(), vocab_size=%d, min_frequency=2, special_tokens=[
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
])

# Save files to disk
tokenizer.save("./%s/tokenizer.json")
"""
_UNIGRAM = """
import datasets

from t5_tokenizer_model import SentencePieceUnigramTokenizer


vocab_size = 32_000
input_sentence_size = None

# Initialize a dataset
dataset = datasets.load_dataset("oscar", name="unshuffled_deduplicated_no", split="train")

tokenizer = SentencePieceUnigramTokenizer(unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


# Build an iterator over this dataset
def batch_iterator(input_sentence_size=None):
    if input_sentence_size is None:
        input_sentence_size = len(dataset)
    batch_length = 100
    for i in range(0, input_sentence_size, batch_length):
        yield dataset[i: i + batch_length]["text"]


# Train tokenizer
tokenizer.train_from_iterator(
    iterator=batch_iterator(input_sentence_size=input_sentence_size),
    vocab_size=vocab_size,
    show_progress=True,
)

# Save files to disk
tokenizer.save("./norwegian-t5-base/tokenizer.json")
"""
#: The Python code of the recipes, which trains the tokenizer and saves the configuration.
PYTHON = {
    "FacebookAI/roberta-base": (
        _BYTE_LEVEL % (50265, "norwegian-roberta-base"),
        """
from transformers import RobertaConfig

config = RobertaConfig.from_pretrained("FacebookAI/roberta-base", vocab_size=50265)
config.save_pretrained("./norwegian-roberta-base")
""",
    ),
    "openai-community/gpt2": (
        _BYTE_LEVEL % (50257, "norwegian-gpt2"),
        """
from transformers import GPT2Config

config = GPT2Config.from_pretrained("openai-community/gpt2", resid_pdrop=0.0, embd_pdrop=0.0, """
        """attn_pdrop=0.0, vocab_size=50257)
config.save_pretrained("./norwegian-gpt2")
""",
    ),
    "google/t5-v1_1-base": (
        _UNIGRAM,
        """
from transformers import T5Config

config = T5Config.from_pretrained("google/t5-v1_1-base", vocab_size=tokenizer.get_vocab_size())
config.save_pretrained("./norwegian-t5-base")
""",
    ),
    "facebook/bart-base": (
        _BYTE_LEVEL % (50265, "norwegian-bart-base"),
        """
from transformers import BartConfig
config = BartConfig.from_pretrained("facebook/bart-base", vocab_size=50265)
config.save_pretrained("./norwegian-bart-base")
""",
    ),
}
_PYTORCH = r"""--model_type="roberta" \
    --config_name="${MODEL_DIR}" \
    --tokenizer_name="${MODEL_DIR}" \
    --dataset_name="oscar" \
    --dataset_config_name="unshuffled_deduplicated_no" \
    --max_seq_length="128" \
    --weight_decay="0.01" \
    """
_PYTORCH_END = r"""--learning_rate="3e-4" \
    --warmup_steps="1000" \
    --overwrite_output_dir \
    --num_train_epochs="18" \
    --adam_beta1="0.9" \
    --adam_beta2="0.98" \
    --do_train \
    --do_eval \
    --logging_steps="500" \
    """
PYTORCH = (
    Command(
        r"""python3 xla_spawn.py --num_cores ${NUM_TPUS} run_mlm.py --output_dir="./runs" \
    """
        + _PYTORCH
        + r"""--per_device_train_batch_size="128" \
    --per_device_eval_batch_size="128" \
    """
        + _PYTORCH_END
        + r"""--eval_strategy="epoch" \
    --report_to="tensorboard" \
    --save_strategy="no"
""",
        "run_mlm_flax.py",
        "mlm",
        "test_flags_of_the_pytorch_scripts_run_as_written",
    ),
    Command(
        r"""python3 -m torch.distributed.launch --nproc_per_node ${NUM_GPUS} run_mlm.py \
    --output_dir="${MODEL_DIR}" \
    """
        + _PYTORCH
        + r"""--per_device_train_batch_size="32" \
    --per_device_eval_batch_size="32" \
    --gradient_accumulation="4" \
    """
        + _PYTORCH_END
        + r"""--eval_strategy="steps" \
    --report_to="tensorboard" \
    --save_strategy="no"
""",
        "run_mlm_flax.py",
        "mlm",
        "test_flags_of_the_pytorch_scripts_run_as_written",
    ),
)
BERT = Command(
    "python3 run_bert_flax.py --precision bfloat16",
    "run_bert_flax.py",
    "",
    "test_the_inference_command_runs_as_written",
)
TRANSLATE = Command(
    'python3 translate_ai/translate.py --english-query "The cat is blue." '
    "--checkpoint-file checkpoints/chkpt.pt",
    "translate.py",
    "",
    "test_the_translation_command_runs_as_written",
)
_WMT = ("run_translation_flax.py", "translation")
_ENCODER = ("run_classification_flax.py", "classification")
OTHER_COMMANDS = (
    Command(
        r"""python3 main.py --workdir=$HOME/logs/wmt_256 \
    --config.per_device_batch_size=32 \
    --jax_backend_target="grpc://192.168.0.2:8470"
""",
        *_WMT,
    ),
    Command("python3 main.py --workdir=$WORKDIR --config=configs/default.py $FLAGS", *_WMT),
    Command(
        r"""python3 main.py --workdir=$HOME/logs/wmt_256 \
    --config.per_device_batch_size=32 \
    --jax_backend_target="grpc://192.168.0.2:8470" \
    --config.use_fp8=True
""",
        *_WMT,
    ),
    *(
        Command(f"python {name}{flag}", *_ENCODER)
        for name in (
            "test_single_gpu_encoder.py",
            "test_multigpu_encoder.py",
            "test_model_parallel_encoder.py",
        )
        for flag in ("", " --use-fp8")
    ),
    Command("python test_multiprocessing_encoder.py --num-process 8 --process-id 0 &", *_ENCODER),
    Command(
        "numactl --cpunodebind=48  --membind=3 python test_multiprocessing_encoder.py "
        "--num-process 8 --process-id 0 &",
        *_ENCODER,
    ),
    Command(
        r"""python3 ./scripts/launch.py \
    --config=CONFIG_FILE \
    --multihost=MULTIHOST \
    --n_data_shard=N_DATA_SHARD \
    --n_model_shard=N_MODEL_SHARD \
    --workdir=WORKDIR \
    --mode=MODE \
    [--wb_enabled=WB_ENABLED] \
    [--wb_run=WB_RUN]
""",
        "run_clm_flax.py",
        "clm",
    ),
    Command(
        r"""torchrun --nproc_per_node=1 --nnodes 2 --master_port=12345 \
    translate_ai/train.py \
    --dataset-file data/english-spanish.csv \
    --device cuda \
    --mixed-precision bf16 \
    --epochs 10 \
    --learning-rate .004 \
    --batch-size 128 \
    --num-layers 2 \
    --embed-dim 128 \
    --d-model 128 \
    --ffwd-dim 512 \
    --seq-len 128 \
    --max-output-tokens 128 \
    --eval-interval 200 \
    --eval-iters 10 \
    --checkpoint-interval 200 \
    --save-checkpoint checkpoints/chkpt.pt \
    --wandb-project ${WANDB_PROJECT} \
    --wandb-api-key ${WANDB_API_KEY} \
    --distributed
""",
        *_WMT,
    ),
)
COMMANDS = (*RECIPES.values(), *PYTORCH, BERT, *OTHER_COMMANDS, TRANSLATE)


def answer(command: Command) -> str | None:
    """Returns the error that the flags of a command raise, or `None` if they are accepted."""
    from hfseq.training.arguments import parse

    if not command.objective:
        return None  # the tests run the command
    try:
        parse(command.flags, objective=command.objective)
    except UsageError as error:
        return str(error)
    return None


def suggested_flags(error: str) -> list[str]:
    """Returns the flags that an error suggests, without those that it quotes as unknown."""
    text = re.sub(r"unknown flag \S+", "", error)
    return list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z]\w*", text)))


def table() -> str:
    """Returns the table of the commands for docs/references.md."""
    lines = ["| Guide | hfseq | Test |", "|---|---|---|"]
    for command in COMMANDS:
        shown = command.line
        if len(shown) > 140:
            beginning = re.match(r"(?:.* )?[^-\s]\S*\.py --[\w.-]+", shown)
            shown = f"{beginning[0] if beginning else shown} …"
        error = answer(command)
        result = f"runs as it is written: `{command.script}`"
        if error is not None:
            flags = ", ".join(f"`{flag}`" for flag in suggested_flags(error))
            result = f"`{command.script}` answers with the flags of hfseq: {flags}"
        lines.append(f"| `{shown}` | {result} | `test_docs_references.py::{command.test}` |")
    return "\n".join(lines)


def page_with_table(text: str) -> str:
    """Returns the text of docs/references.md with the current table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit()

"""Training steps of small models, compiled for described devices, and what is read of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import tests.support.environment  # noqa: F401  # before anything imports jax, run as a script too

import jax  # isort: skip
import pytest

from hfseq.cli.plan.options import Options
from hfseq.cli.plan.run import abstract_batch, build
from hfseq.nn.context import Rows
from hfseq.training import collectives, described

#: No other size of these models is the same.
LENGTH = 384
WIDTH = 256
TABLE = Path(__file__).with_name("collectives.json")

_ENCODER = (
    "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,intermediate_size=512,"
    "vocab_size=1024,max_position_embeddings=514"
)
_DECODER = (
    "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,"
    "intermediate_size=512,vocab_size=1024"
)
_BOTH = (
    "d_model=256,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
    "decoder_attention_heads=4,encoder_ffn_dim=512,decoder_ffn_dim=512,vocab_size=1024"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A small model: its sizes, how often it attends, and the flag that its weights are dropped by.

    ``squares`` says why there are results with two axes of the length, if there are, ``singles``
    why there are products of float32.
    """

    sizes: str
    attentions: int
    dropout: str
    squares: str = ""
    singles: str = ""


# Not here: bloom, whose ALiBi is a bias of each key alone (cuDNN takes it, and has pairs; with
# dropout it is explicit); longt5, whose attention is local by itself; gpt_neo, whose kinds of
# layers are no flag; models of pictures and sound, which the loop's batches of text do not fit.
FAMILIES = {
    "roberta": Family(_ENCODER, 1, "attention_probs_dropout_prob"),
    "bert": Family(_ENCODER, 1, "attention_probs_dropout_prob"),
    "megatron-bert": Family(_ENCODER, 1, "attention_probs_dropout_prob"),
    "gpt2": Family(
        "n_embd=256,n_layer=1,n_head=4,n_positions=512,vocab_size=1024", 1, "attn_pdrop"
    ),
    "llama": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "mistral": Family(f"{_DECODER},head_dim=64,sliding_window=128", 1, "attention_dropout"),
    "gemma": Family(f"{_DECODER},head_dim=64", 1, "attention_dropout"),
    "opt": Family(
        "hidden_size=256,num_hidden_layers=1,num_attention_heads=4,ffn_dim=512,vocab_size=1024,"
        "word_embed_proj_dim=256,max_position_embeddings=512", 1, "attention_dropout",
    ),
    "distilbert": Family(
        "dim=256,n_layers=1,n_heads=4,hidden_dim=512,vocab_size=1024,max_position_embeddings=512",
        1, "attention_dropout",
    ),
    "electra": Family(f"{_ENCODER},embedding_size=128", 1, "attention_probs_dropout_prob"),
    "albert": Family(f"{_ENCODER},embedding_size=128", 1, "attention_probs_dropout_prob"),
    "roformer": Family(f"{_ENCODER},embedding_size=128", 1, "attention_probs_dropout_prob"),
    "big_bird": Family(
        f"{_ENCODER},attention_type=original_full", 1, "attention_probs_dropout_prob"
    ),
    "gptj": Family(
        "n_embd=256,n_layer=1,n_head=4,n_positions=512,vocab_size=1024,rotary_dim=32", 1,
        "attn_pdrop",
    ),
    "t5": Family(
        "d_model=256,d_kv=64,d_ff=512,num_layers=1,num_heads=4,vocab_size=1024", 3, "dropout_rate",
        squares="the learned bias of positions is an array of heads and all pairs of positions",
    ),
    "bart": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "marian": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "pegasus": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "wmt_transformer": Family(_BOTH, 3, "attention_dropout"),
    "roberta-prelayernorm": Family(_ENCODER, 1, "attention_probs_dropout_prob"),
    "xlm-roberta": Family(_ENCODER, 1, "attention_probs_dropout_prob"),
    "mt5": Family(
        "d_model=256,d_kv=64,d_ff=512,num_layers=1,num_heads=4,vocab_size=1024", 3, "dropout_rate",
        squares="the learned bias of positions is an array of heads and all pairs of positions",
    ),
    "mbart": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "blenderbot": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "blenderbot-small": Family(f"{_BOTH},max_position_embeddings=512", 3, "attention_dropout"),
    "xglm": Family(
        "d_model=256,num_layers=1,attention_heads=4,ffn_dim=512,vocab_size=1024,"
        "max_position_embeddings=512", 1, "attention_dropout",
    ),
    "vq_transformer": Family(
        "hidden_size=256,num_hidden_layers=1,vocab_size=1024", 0, "",
        singles="codes are chosen, and read from the cache, in float32 (docs/vq_transformer.md)",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step, as text and numbers; bytes are those of a device."""

    text: str
    arguments: int
    alias: int
    temporary: int
    state: int
    inputs: int
    exchanged: list[list]

    def calls(self, *targets: str) -> int:
        """How often kernels are called whose custom call, or name, begins so."""
        names = re.findall(r'custom_call_target="([^"]+)"', self.text)
        if any("tpu_custom_call" in name for name in names):
            names = re.findall(r'kernel_name = "(\w+)"|"(splash_mh\w+)"', self.text)
            names = [first or second for first, second in names]
        return sum(name in targets for name in names)

    @property
    def squares(self) -> collections.Counter:
        """Results with two axes of the length, in fusions too."""
        shapes = re.findall(r"\w+\[[\d,]+\]", self.text)
        sizes = {shape: re.findall(r"\d+", shape.split("[")[1]) for shape in set(shapes)}
        return collections.Counter(s for s in shapes if sizes[s].count(str(LENGTH)) > 1)

    @property
    def float32_products(self) -> list[str]:
        """Products of two float32 arrays, of a size that matters."""
        program = list(collectives.instructions(self.text))
        shapes = {(one.computation, one.name): one.shape for one in program}
        found = []
        for one in program:
            if one.opcode not in ("dot", "convolution"):
                continue
            names = re.findall(r"%([\w.\-]+)", one.rest.split(")")[0])
            given = [shapes.get((one.computation, name), "") for name in names[:2]]
            sizes = [math.prod(map(int, re.findall(r"\d+", s.split("{")[0][4:]))) for s in given]
            if all(s.startswith("f32[") for s in given) and min(sizes) >= WIDTH * WIDTH:
                found.append(f"{one.shape} of {given}: {one.op_name}")
        return found


@functools.cache
def compiled(
    family: str, target: str = "h200", mesh: str | None = None, count: int = 1, *,
    dropout: float = 0.1, attention: str | None = None, remat: bool = False,
) -> Step:  # fmt: skip
    """The training loop's own step of rows packed with up to eight documents."""
    if reason := described.missing(described.parse(target)[0].name):
        pytest.skip(reason)
    spec, devices = FAMILIES[family], described.describe(described.parse(target)[0].name, count)
    dropped = f",{spec.dropout}={dropout}" if spec.dropout else ""
    options = Options(
        config=family, devices=f"{target}:{count}", mesh=mesh, length=LENGTH,
        per_device_train_batch_size=2, precision="bfloat16",
        config_overrides=spec.sizes + dropped, attn_implementation=attention,
    )  # fmt: skip
    run = build(options, devices, gradient_checkpointing=remat)
    if run.objective.known_rows is not None:
        run.objective.known_rows = Rows(max_runs=8)
    state, batch = run.abstract_state(), abstract_batch(run, 2)
    program = described.compile_for(
        devices[0], run.step_function(), state, run.frozen, batch, structure_only=True
    )
    memory, text = program.memory_analysis(), program.as_text() or ""
    groups: dict[tuple, list] = {}
    for one in collectives.collectives(text, run.mesh):
        key = (one.kind, "x".join(one.axes))
        group = groups.setdefault(key, [*key, 0, 0])
        group[2] += one.times
        group[3] += one.size * one.times

    def local(tree) -> int:
        leaves = jax.tree.leaves(tree)
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
        return sum(sizes)

    return Step(
        text, memory.argument_size_in_bytes, memory.alias_size_in_bytes,
        memory.temp_size_in_bytes, local(state), local(batch), sorted(groups.values()),
    )  # fmt: skip


#: Programs over several devices, whose exchange the table has.
MESHES = {
    "roberta on h200, data=8": ("roberta", "h200", "data=8", 8, 0.1),
    "t5 on h200, data=8": ("t5", "h200", "data=8", 8, 0.1),
    "roberta on h200, fsdp=8": ("roberta", "h200", "fsdp=8", 8, 0.1),
    "roberta on v5e, data=2,tensor=2": ("roberta", "v5e", "data=2,tensor=2", 4, 0.0),
    "roberta on v6e, fsdp=4": ("roberta", "v6e", "fsdp=4", 4, 0.0),
}


def exchange(name: str) -> Step:
    family, target, mesh, count, dropout = MESHES[name]
    return compiled(family, target, mesh, count, dropout=dropout)


if __name__ == "__main__":  # python -m tests.accelerators.steps
    table = {name: exchange(name).exchanged for name in MESHES}
    lines = [f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in table.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

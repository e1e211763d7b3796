"""Calls of functions of Transformers 4.57's Flax modules, and how their results were recorded.

`python -m tests.dropin.v4_functions SOURCE` takes the functions from a directory that contains the
source code of Transformers 4.57 (`pip download --no-deps transformers==4.57.6`, unzipped), runs
them, and writes their results and the names of all module-level definitions to this directory.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "v4_functions.json"
NAMES = FOLDER / "v4_names.tsv"


def values(*shape: int) -> np.ndarray:
    """Returns different float32 values between -1 and 1."""
    return np.sin(np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


LABELS = np.array([[5, 6, 2, -100], [7, 2, -100, -100]])
PADDED = np.array([[5, 6, 7, 1, 1], [8, 9, 1, 1, 1]])
MASK = np.array([[1] * 9, [1] * 6 + [0] * 3])
TREE = {"a": {"b": values(4, 4), "c": values(4)}, "d": values(8, 4)}

#: The family (or module), the function and its arguments.
CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    *(
        (family, "shift_tokens_right", (LABELS, 1, 2))
        for family in "bart blenderbot blenderbot_small longt5 marian mt5 pegasus t5".split()
    ),
    ("mbart", "shift_tokens_right", (LABELS, 1)),
    *((family, "create_sinusoidal_positions", (9, 6)) for family in ("marian", "pegasus")),
    *((name, "create_sinusoidal_positions", (5, 7)) for name in ("roformer", "marian")),
    ("xglm", "create_sinusoidal_positions", (6, 8)),
    ("xglm", "create_sinusoidal_positions", (6, 8, None)),
    ("gptj", "create_sinusoidal_positions", (7, 6)),
    *(
        (family, *call)
        for family in ("gemma", "llama", "mistral")
        for call in [
            ("create_sinusoidal_positions", (9, 4)),
            ("create_sinusoidal_positions", (5, 8)),
            ("rotate_half", (values(2, 3, 4),)),
            ("apply_rotary_pos_emb", (values(2, 3, 1, 4), values(3, 1, 4), values(3, 1, 4) + 1)),
        ]
    ),
    ("gptj", "rotate_every_two", (values(1, 2, 3, 4),)),
    ("gptj", "apply_rotary_pos_emb", (values(1, 2, 3, 4), (values(1, 2, 2), values(1, 2, 2) + 1))),
    *(
        (family, "create_position_ids_from_input_ids", (PADDED, 1))
        for family in ("roberta", "roberta_prelayernorm", "xlm_roberta")
    ),
    ("roberta", "create_position_ids_from_input_ids", (np.stack([PADDED, PADDED[::-1]]), 1)),
    ("distilbert", "get_angles", (np.arange(4)[:, None], np.arange(6)[None], 6)),
    ("distilbert", "positional_encoding", (4, 6)),
    ("bloom", "build_alibi_tensor", (MASK, 4)),
    ("beit", "relative_position_index_init", ((2, 3),)),
    ("beit", "ones_with_scale", (None, (3,), 0.5)),
    ("dinov2", "ones_with_scale", (None, (3,), 0.5)),
    ("electra", "identity", (values(3),)),
    ("whisper", "sinusoidal_embedding_init", (None, (5, 6))),
    ("longt5", "_pad_to_multiple", (values(2, 5), 3, 1, 7)),
    ("longt5", "_split_into_blocks", (values(2, 5, 2), 3, 1)),
    ("longt5", "_concatenate_3_blocks", (values(2, 3, 2, 2), 1, 2)),
    ("longt5", "_make_3block_relative_position_ids", (3,)),
    ("longt5", "_mask_local_attention_mask", (np.ones((1, 2, 3, 9), bool), 3)),
    ("longt5", "_get_local_attention_mask", (MASK, 4)),
    ("longt5", "_make_global_fixed_block_ids", (MASK, 4)),
    ("longt5", "_make_global_fixed_block_ids", (MASK, 16)),
    ("longt5", "_make_side_relative_position_ids", (MASK, 2)),
    ("longt5", "_create_global_aggregates", (values(1, 4, 2), np.array([[0, 0, 1, -1]]), 2)),
    ("wav2vec2", "_compute_mask_indices", ((3, 20), 0.5, 3)),
    ("wav2vec2", "_compute_mask_indices", ((2, 9), 0.1, 4, None, 2)),
    ("wav2vec2", "_sample_negative_indices", ((2, 9, 4), 3)),
    ("wav2vec2", "_sample_negative_indices", ((2, 9, 4), 3, MASK)),
    ("modeling_flax_utils", "quick_gelu", (values(4),)),
    ("modeling_flax_utils", "flax_shard_checkpoint", (TREE,)),
    ("modeling_flax_utils", "flax_shard_checkpoint", (TREE, 100)),
    ("modeling_flax_utils", "flax_shard_checkpoint", (TREE, "1KB")),
]


def module_name(family: str) -> str:
    """Returns the module of a family, or the module itself."""
    if family.startswith("modeling_"):
        return f"transformers.{family}"
    return f"transformers.models.{family}.modeling_flax_{family}"


def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls a function with a fixed seed. Returns nested lists."""
    import jax

    np.random.seed(3)  # noqa: NPY002  # the functions use the global generator
    # Most functions require JAX arrays. Those that use NumPy's generator do not.
    convert = jax.tree.map if "ndices" not in function.__name__ else lambda _, value: value
    result = function(*convert(_to_jax, arguments))
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), result)


def _to_jax(value: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value) if isinstance(value, np.ndarray) and value.ndim else value


def _definitions(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield "function", node.name
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id != "__all__":
                yield "variable", node.targets[0].id


def _functions(path: Path) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import flatten_dict
    from transformers.utils.hub import convert_file_size_to_int

    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "math": math}
    scope |= {"flatten_dict": flatten_dict, "convert_file_size_to_int": convert_file_size_to_int}
    scope |= {"FLAX_WEIGHTS_NAME": "flax_model.msgpack"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        if node.name == "sinusoidal_embedding_init":  # its default was `jnp.float_`
            node.args.defaults = [ast.parse("jnp.float32").body[0].value]
    exec(compile(tree, path, "exec"), scope)
    return scope


def record(source: Path) -> None:
    """Writes the results and the names."""
    paths = sorted({*source.glob("modeling_flax_*.py"), *source.glob("generation/flax_*.py")})
    paths += sorted(source.glob("models/*/modeling_flax_*.py"))
    lines = []
    for path in paths:
        module = ".".join(["transformers", *path.relative_to(source).with_suffix("").parts])
        kinds: dict[str, list[str]] = {"function": [], "class": [], "variable": []}
        for kind, name in dict.fromkeys(_definitions(path)):
            kinds[kind].append(name)
        lines += [f"{module}\t{kind}\t{' '.join(names)}" for kind, names in kinds.items() if names]
    NAMES.write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = []
    for family, name, arguments in CASES:
        relative = module_name(family).removeprefix("transformers.").replace(".", "/")
        results.append(run(_functions(source / f"{relative}.py")[name], arguments))
    text = ",\n".join(json.dumps(result, separators=(",", ":")) for result in results)
    RESULTS.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))

"""``hfseq port``: the passes that make a port readable, on small functions and classes."""

from __future__ import annotations

import ast
import re
from textwrap import dedent

import pytest

from hfseq.cli.port.modernize import modernize
from hfseq.cli.port.simplify import simplify, simplify_function

FUNCTIONS = {
    "swapped axes": (
        """
        def f(self, x):
            query = self.q(x).swapaxes(1, 2)
            return nn.attend(query.swapaxes(1, 2), x, x, mask=None)
        """,
        """
        def f(self, x):
            query = self.q(x)
            return nn.attend(query, x, x)
        """,
    ),
    "axes that another statement reads": (
        """
        def f(self, x):
            query = self.q(x).swapaxes(1, 2)
            return query.swapaxes(1, 2) + query.shape[1]
        """,
        """
        def f(self, x):
            query = self.q(x).swapaxes(1, 2)
            return query.swapaxes(1, 2) + query.shape[1]
        """,
    ),
    "second default": (
        """
        def f(self, ids, positions=None):
            if positions is None:
                positions = jnp.cumsum(ids, axis=1)
            if positions is None:
                positions = jnp.arange(ids.shape[1])
            return self.embed(positions[:, :].astype(positions.dtype))
        """,
        """
        def f(self, ids, positions=None):
            if positions is None:
                positions = jnp.cumsum(ids, axis=1)
            return self.embed(positions)
        """,
    ),
    "condition of an outer branch": (
        """
        def f(config):
            if config.kind == 'a':
                layer = A(config) if config.kind == 'a' else B(config)
            else:
                layer = A(config) if config.kind == 'a' else B(config)
            return layer
        """,
        """
        def f(config):
            if config.kind == 'a':
                layer = A(config)
            else:
                layer = B(config)
            return layer
        """,
    ),
    "rows and back": (
        """
        def f(self, x):
            shape = x.shape
            x = x.reshape(-1, x.shape[-1])
            residual = x
            x = self.fc(x)
            x = (residual + x).reshape(shape)
            return self.norm(x)
        """,
        """
        def f(self, x):
            residual = x
            x = self.fc(x)
            x = residual + x
            return self.norm(x)
        """,
    ),
    "value of a branch that a later statement reads": (
        """
        def f(self, x, y):
            if self.first:
                residual = x
            else:
                residual = y
            return self.mlp(residual) + residual
        """,
        """
        def f(self, x, y):
            if self.first:
                residual = x
            else:
                residual = y
            return self.mlp(residual) + residual
        """,
    ),
    "field that is assigned in between": (
        """
        def f(self, config):
            old = config.width
            config.width = config.width // 2
            self.small = Layer(config)
            config.width = old
        """,
        """
        def f(self, config):
            old = config.width
            config.width = config.width // 2
            self.small = Layer(config)
            config.width = old
        """,
    ),
    "slices of size one": (
        """
        def f(self, x):
            start, end = F.split(x, 1, dim=-1)
            start = F.squeeze(start, dim=-1)
            end = F.squeeze(end, dim=-1)
            return Output(start, end)
        """,
        """
        def f(self, x):
            start, end = jnp.unstack(x, axis=-1)
            return Output(start, end)
        """,
    ),
}


def text(source: str) -> str:
    return ast.unparse(ast.parse(dedent(source)))


def written(nodes: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(nodes, [])))


@pytest.mark.parametrize(("source", "expected"), FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_statements_without_effect_are_removed_and_others_stay(source, expected):
    tree = ast.parse(dedent(source))
    simplify_function(tree.body[0])
    assert ast.unparse(ast.fix_missing_locations(tree)) == text(expected)


def test_parameters_that_no_call_needs_are_removed_with_their_arguments():
    source = """
        def unused(x):
            return x
        class Positions(nnx.Module):
            def __init__(self, size, rngs, scale=1):
                self.size = size
                self.other = size
            def __call__(self, mask=None, start=0, positions=None):
                if positions is None:
                    positions = jnp.cumsum(mask, axis=1)[:, start:]
                return positions * self.size
        class Model(nnx.Module):
            def __init__(self, config, rngs):
                self.positions = Positions(config.size, rngs)
            def __call__(self, input_ids, *, rngs=None):
                positions = jnp.arange(input_ids.shape[1])
                return self.positions(input_ids, 0, positions=positions)
    """
    nodes = simplify(ast.parse(dedent(source)).body, {"Model"})
    assert written(nodes) == text("""
        class Positions(nnx.Module):
            def __init__(self, size):
                self.size = size
            def __call__(self, positions):
                return positions * self.size
        class Model(nnx.Module):
            def __init__(self, config, rngs):
                self.positions = Positions(config.size)
            def __call__(self, input_ids, *, rngs=None):
                positions = jnp.arange(input_ids.shape[1])
                return self.positions(positions=positions)
    """)


def test_equal_layers_are_created_by_one_statement():
    source = """
        class Model(nnx.Module):
            def __init__(self, config, rngs):
                self.q = nn.Linear(config.size, config.size, init, rngs)
                self.k = nn.Linear(config.size, config.size, init, rngs)
                self.v = nn.Linear(config.size, config.size, init, rngs)
                self.o = nn.Linear(config.inner, config.size, init, rngs)
            def __call__(self, x):
                return self.o(self.q(x) + self.k(x) * self.v(x))
    """
    result = written(simplify(ast.parse(dedent(source)).body, {"Model"}))
    call = "nn.Linear(config.size, config.size, init, rngs)"
    names = re.escape("self.q, self.k, self.v")
    assert re.search(rf"{names}\)? = \({re.escape(call)} for _ in range\(3\)\)", result)
    assert "self.o = nn.Linear(config.inner" in result and result.count("nn.Linear(") == 2


ATTENTION = """
class SelfAttention(nn.Module):
    def forward(self, hidden_states, attention_mask=None):
        q = self.q(hidden_states)
        k = self.k(hidden_states)
        v = self.v(hidden_states)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = nn.functional.softmax(scores, dim=-1)
        probs = self.dropout(probs)
        c = torch.matmul(probs, v)
        c = c.permute(0, 2, 1, 3).contiguous()
        shape = c.size()[:-2] + (self.size,)
        c = c.view(*shape)
        outputs = (c, probs)
        return outputs
"""


@pytest.mark.parametrize(
    ("old", "new", "is_rewritten"),
    [
        ("", "", True),
        ("scores / math.sqrt(self.head_size)", "scores / 2", False),
        ("self.dropout(probs)", "self.dropout(probs) * head_mask", False),
        ("softmax(scores, dim=-1)", "softmax(scores, dim=-2)", False),
    ],
)
def test_only_complete_patterns_of_attention_are_rewritten(old, new, is_rewritten):
    source = ATTENTION.replace(old, new) if old else ATTENTION
    assert source != ATTENTION or not old
    tree = ast.parse(source)
    modernize(tree)
    assert (
        "attention_interface(self, q, k, v, attention_mask" in ast.unparse(tree)
    ) == is_rewritten
    assert ("torch.matmul" in ast.unparse(tree)) != is_rewritten

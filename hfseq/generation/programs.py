"""Running a search: compiled as a whole, step by step for streaming, or eagerly for debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hfseq.generation.beam import BeamSearch
from hfseq.generation.plan import Operands, Plan
from hfseq.generation.search import SearchState, TokenSearch

#: Compiled programs that a model keeps; the oldest goes when there are more plans than this.
KEPT_PROGRAMS = 64


class Programs(dict):
    """The compiled programs of one model. Copies and pickles of the model start without any."""

    def __deepcopy__(self, memo: Any) -> Programs:
        return Programs()

    def __reduce__(self) -> tuple[Any, tuple]:
        return Programs, ()

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the program under ``key``, made if need be."""
        if key not in self:
            while len(self) >= KEPT_PROGRAMS:
                del self[next(iter(self))]
            self[key] = make()
        return self[key]


def search(model: Any, plan: Plan, operands: Operands) -> TokenSearch | BeamSearch:
    """Return the search that the options ask for."""
    kind = BeamSearch if plan.options.num_beams > 1 else TokenSearch
    return kind(model, plan, operands)


def run(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with one ``lax.while_loop``; everything is traced."""
    chosen: Any = search(model, plan, operands)
    return chosen.result(jax.lax.while_loop(chosen.unfinished, chosen.advance, chosen.begin()))


def run_eagerly(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with a Python loop, each operation at once: a debugger can look at everything."""
    chosen: Any = search(model, plan, operands)
    state = chosen.begin()
    while chosen.unfinished(state):
        state = chosen.advance(state)
    return chosen.result(state)


def run_compiled(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search with a program that is compiled once for a plan and the shapes of the operands."""
    program = find_program(
        model, plan, "run", lambda: jax.jit(lambda operands: run(model, plan, operands))
    )
    return program(operands)


def steps(model: Any, plan: Plan, operands: Operands) -> Iterator[tuple[np.ndarray, SearchState]]:
    """Search step by step: yield the new tokens (rows,) and the state after each step."""
    begin, advance, unfinished = find_program(model, plan, "steps", lambda: _stepwise(model, plan))
    state = begin(operands)
    while unfinished(operands, state):
        state, tokens = advance(operands, state)
        yield np.asarray(tokens), state


def _stepwise(model: Any, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> SearchState:
        return TokenSearch(model, plan, operands).begin()

    def advance(operands: Operands, state: SearchState) -> tuple[SearchState, jax.Array]:
        new = TokenSearch(model, plan, operands).advance(state)
        place = state.length
        return new, jax.lax.dynamic_slice_in_dim(new.sequences, place, 1, axis=1)[:, 0]

    def unfinished(operands: Operands, state: SearchState) -> bool:
        return bool(state.length < operands.stop_length) and not np.asarray(state.finished).all()

    return jax.jit(begin), jax.jit(advance, donate_argnums=1), unfinished


def find_program(model: Any, plan: Plan, kind: str, make: Callable[[], Any]) -> Any:
    """Return what the model keeps as ``kind`` for a plan, made if need be."""
    programs = vars(model).setdefault("_generation_programs", Programs())
    return programs.find((kind, plan.key(), getattr(model, "_options", None)), make)

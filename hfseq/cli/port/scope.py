"""Describes the class and the method that are being translated, and registers lifts.

A lift replaces a common piece of PyTorch code as a whole, see `hfseq.cli.port.lifting`.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from hfseq.cli.port.source import SourceClass

#: Stands for `hfseq.cli.port.translation.Translator`, which cannot be imported here because its
#: module imports this one.
Translator = Any

#: Names that translated methods may read without defining them, with their default values. A method
#: that reads such a name gets it as an argument, and all callers of the method pass it on.
IMPLICIT_ARGUMENTS = {
    "tied_embeddings": "None",
    "segment_ids": "None",
    "rngs": "None",
    "init": "None",
    "return_weights": "False",
    "output_attentions": "False",
    "output_hidden_states": "False",
}


@dataclasses.dataclass(frozen=True)
class Marker:
    """A statement without a translation.

    Attributes:
        reason: Why the statement has no translation.
        path: The path of Transformers' file.
        line: The line of the statement.
        source: The text of the statement.
    """

    reason: str
    path: str
    line: int
    source: str


@dataclasses.dataclass(eq=False)
class PortedClass:
    """A translated class.

    Attributes:
        source: The class of Transformers.
        name: The name of the translated class.
        node: The definition of the translated class, as soon as it exists.
        arguments: The arguments of `__call__`, without `self`.
        methods: The arguments of each other method, without `self`.
        constructor_arguments: The arguments of the constructor, without `self` and `rngs`.
        attributes: Attributes that the constructor must assign because methods read them, with the
            expressions of their values.
        properties: Properties that compute buffers.
        takes_rngs: Whether the constructor takes `rngs`.
        rngs_position: The number of arguments of the constructor before `rngs`.
    """

    source: SourceClass
    name: str
    node: ast.ClassDef | None = None
    arguments: list[str] = dataclasses.field(default_factory=list)
    methods: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    constructor_arguments: list[str] = dataclasses.field(default_factory=list)
    attributes: dict[str, str] = dataclasses.field(default_factory=dict)
    properties: list[ast.stmt] = dataclasses.field(default_factory=list)
    takes_rngs: bool = False
    rngs_position: int = 1

    @property
    def draws(self) -> bool:
        """Whether a call uses random keys."""
        return "rngs" in self.arguments

    @property
    def collects(self) -> bool:
        """Whether a call can return the hidden states and attention weights of layers."""
        return "output_hidden_states" in self.arguments


@dataclasses.dataclass(eq=False)
class Scope:
    """The method that is being translated.

    Attributes:
        translator: The translator of the file.
        own: The class in the model file that contains the method.
        ported: The translation of that class.
        method: The name of the method.
        report: Records that a node has no translation.
        outputs: Name of the variable with the output of the base model or encoder, if any.
        runs_layers: Whether the method runs layers with `nn.run_layers`.
        ties_last: Whether the last element of `hidden_states` is `last_hidden_state`.
        is_vision: Whether the class is a model whose only inputs are images.
        masks: Local variables that hold a function that creates masks, with the name of the
            function. The name `""` means that the configuration chooses between full causal
            attention and a sliding window.
    """

    translator: Translator
    own: SourceClass
    ported: PortedClass
    method: str
    report: Callable[[ast.AST, str], None]
    outputs: str = ""
    runs_layers: bool = False
    ties_last: bool = True
    is_vision: bool = False
    masks: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether the class is a model, whose arguments users pass."""
        return self.own.kind == "model"


class Visitor(Protocol):
    """Translates expressions, as `hfseq.cli.port.expressions.Expressions` does."""

    def visit(self, node: ast.AST) -> Any:
        """Translates a statement or an expression."""

    def construct(self, node: ast.Call) -> ast.expr | None:
        """Translates a call that creates a layer."""

    def enter(self, function: ast.FunctionDef) -> None:
        """Begins the translation of a function."""


#: Translates a statement before its expressions are translated. `None` means that the lift does not
#: apply.
StatementLift = Callable[[Scope, ast.stmt], list[ast.stmt] | None]
#: Translates a call, including its arguments.
CallLift = Callable[[Scope, Visitor, ast.Call], ast.expr | None]


@dataclasses.dataclass(frozen=True)
class Substitute:
    """Describes how a module of `hfseq.nn` replaces a whole class.

    Attributes:
        construct: Returns the call that creates the module, from the call that creates the PyTorch
            module.
        call: Returns the call of the module, from the function and the translated arguments of the
            call of the PyTorch module.
    """

    construct: Callable[[Scope, ast.Call], ast.expr]
    call: Callable[[ast.expr, list[ast.expr], dict[str, ast.expr]], ast.expr]


#: Returns the `Substitute` for a class, or `None` if the lift does not apply.
ClassLift = Callable[["Translator", SourceClass], Substitute | None]

STATEMENT_LIFTS: list[StatementLift] = []
CALL_LIFTS: list[CallLift] = []
CLASS_LIFTS: list[ClassLift] = []


def statement_lift(function: StatementLift) -> StatementLift:
    """Registers a lift that translates statements."""
    STATEMENT_LIFTS.append(function)
    return function


def call_lift(function: CallLift) -> CallLift:
    """Registers a lift that translates calls."""
    CALL_LIFTS.append(function)
    return function


def class_lift(function: ClassLift) -> ClassLift:
    """Registers a lift that replaces whole classes."""
    CLASS_LIFTS.append(function)
    return function

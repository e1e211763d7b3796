"""What the lifts know about the class and the method that they translate."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from hfseq.cli.port.source import SourceClass

#: The `hfseq.cli.port.translation.Translator`, whose module imports this one.
Translator = Any

#: Names that translated methods may read without defining them. A method that reads one gets it as
#: an argument, and its callers pass it on.
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
        reason: Why there is none.
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
        node: The translated class.
        arguments: The arguments of the call, without `self`.
        constructor_arguments: The arguments of the constructor, without `self` and `rngs`.
        attributes: Configuration fields that methods read as attributes of the module.
        properties: Properties that compute buffers.
        takes_rngs: Whether the constructor takes random keys.
        rngs_position: The number of arguments of the constructor before the random keys.
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
    """The method that is translated.

    Attributes:
        translator: The translator of the file.
        own: The class.
        ported: The translated class.
        method: The name of the method.
        report: Records that a node has no translation.
        outputs: Name of the variable with the output of the base model or encoder, if any.
        runs_layers: Whether the method runs layers with `nn.run_layers`.
        ties_last: Whether the last element of `hidden_states` is `last_hidden_state`.
        masks: The functions that variables stand for and that build masks. `""` stands for causal
            attention with the window of the configuration, if any.
    """

    translator: Translator
    own: SourceClass
    ported: PortedClass
    method: str
    report: Callable[[ast.AST, str], None]
    outputs: str = ""
    runs_layers: bool = False
    ties_last: bool = True
    masks: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether the class is a model, whose arguments users pass."""
        return self.own.kind == "model"


class Visitor(Protocol):
    """Translates expressions, see `hfseq.cli.port.expressions.Expressions`."""

    def visit(self, node: ast.AST) -> Any:
        """Translates a statement or an expression."""

    def construct(self, node: ast.Call) -> ast.expr | None:
        """Translates the constructor of a layer."""

    def enter(self, function: ast.FunctionDef) -> None:
        """Begins a function."""


#: Translates a statement before its expressions are translated. `None` means that the lift does not
#: apply.
StatementLift = Callable[[Scope, ast.stmt], list[ast.stmt] | None]
#: Translates a call, including its arguments.
CallLift = Callable[[Scope, Visitor, ast.Call], ast.expr | None]


@dataclasses.dataclass(frozen=True)
class Substitute:
    """A counterpart of `hfseq.nn` that replaces a whole class.

    Attributes:
        construct: Builds the call of the constructor from the call in PyTorch.
        call: Builds a call of the module from the call in PyTorch, with translated arguments.
    """

    construct: Callable[[Scope, ast.Call], ast.expr]
    call: Callable[[ast.expr, list[ast.expr], dict[str, ast.expr]], ast.expr]


#: Returns the substitute of a class, or `None`.
ClassLift = Callable[["Translator", SourceClass], Substitute | None]

STATEMENT_LIFTS: list[StatementLift] = []
CALL_LIFTS: list[CallLift] = []
CLASS_LIFTS: list[ClassLift] = []


def statement_lift(function: StatementLift) -> StatementLift:
    """Registers a lift of statements."""
    STATEMENT_LIFTS.append(function)
    return function


def call_lift(function: CallLift) -> CallLift:
    """Registers a lift of calls."""
    CALL_LIFTS.append(function)
    return function


def class_lift(function: ClassLift) -> ClassLift:
    """Registers a lift of classes."""
    CLASS_LIFTS.append(function)
    return function

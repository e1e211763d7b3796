"""The error for models whose PyTorch code jax cannot trace, with the location of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from hfseq.errors import UsageError


class Statement(NamedTuple):
    """The location of a statement in PyTorch code.

    Attributes:
        file: The path below `site-packages`, such as `transformers/models/led/modeling_led.py`.
        line: Line number, starting at 1.
        function: Name of the function or method that contains the statement.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}"


class UnsupportedModel(UsageError):
    """Raised for PyTorch code that jax cannot trace.

    Attributes:
        operator: The operator, such as `aten.nonzero.default`, or the kind of statement that is not
            supported.
        statement: The location in the model's code, or `None` if it is unknown.
        solution: What the user can do.
    """

    def __init__(self, problem: str, *, operator: str, solution: str, code: CodeType | None = None):
        self.problem, self.operator, self.solution = problem, operator, solution
        self.statement = current_statement() if code is None else _statement(code)
        place = f" ({self.statement})" if self.statement else ""
        super().__init__(f"the bridge cannot run this model: {problem}{place}. {solution}")


#: Parts of the paths of files that do not belong to a model's own code.
_ENGINE = (f"{Path(__file__).parent}/", "/torch/", "/jax/", "/contextlib.py", "/copy.py")
#: Parts of the paths of Transformers' helpers. A statement in a helper is only reported if no
#: modeling file calls the helper.
_HELPERS = ("/transformers/utils/", "/transformers/masking_utils.py", "/transformers/integrations/")


def model_frame(start: FrameType | None = None) -> FrameType | None:
    """Returns the innermost frame that belongs to the model's own code.

    Args:
        start: The frame at which the search starts. Default: the frame of the caller.

    Returns:
        The frame, or `None` if no frame belongs to the model's code.
    """
    frame = start or sys._getframe(1)
    helper = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _ENGINE) and not name.startswith("<"):
            if not any(part in name for part in _HELPERS):
                return frame if "/transformers/" in name or helper is None else helper
            helper = helper or frame
        frame = frame.f_back  # type: ignore[assignment]
    return helper


def current_statement() -> Statement | None:
    """Returns the location of the statement in the model's code that is being executed."""
    frame = model_frame(sys._getframe(1))
    return None if frame is None else _statement(frame.f_code, frame.f_lineno)


def _statement(code: CodeType, line: int | None = None) -> Statement:
    """Returns a line in the code of a function. Default: the first line of the function."""
    path = Path(code.co_filename)
    parts = path.parts
    package = max((i for i, part in enumerate(parts) if part == "site-packages"), default=-1) + 1
    file = "/".join(parts[package:]) if package else path.name
    return Statement(file, line or code.co_firstlineno, code.co_name)

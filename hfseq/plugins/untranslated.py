"""Markers in the files of ``hfseq port`` for statements of PyTorch without a translation."""

from __future__ import annotations

import ast
from pathlib import Path

from hfseq.errors import PluginError


class NotTranslated(PluginError):
    """Marks a statement of a PyTorch model file that ``hfseq port`` could not translate.

    Args:
        reason: Why the statement cannot be translated.
        line: The line of the statement in Transformers' model file.
    """

    def __init__(self, reason: str, line: int):
        super().__init__(f"{reason} (line {line} of the PyTorch model file)")


def refuse_untranslated(path: str) -> None:
    """Raises an error if a file contains markers, so that an incomplete port cannot be used.

    A port with markers calls this function at its end. The call does nothing once each
    ``NotTranslated("reason", line)`` of the file is replaced with code.

    Args:
        path: The path of the file, usually ``__file__``.

    Raises:
        PluginError: The file contains markers. The message lists them with their lines.
    """
    markers = [
        (node.lineno, *(ast.literal_eval(argument) for argument in node.args))
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == NotTranslated.__name__
    ]
    if markers:
        lines = [f"line {at}: {NotTranslated(*rest)}" for at, *rest in sorted(markers)]
        count = len(lines)
        raise PluginError(
            f"{Path(path).name} has {count} statement{'s' * (count > 1)} without a translation: "
            f"{'; '.join(lines)}. Replace each NotTranslated(...) with code"
        )

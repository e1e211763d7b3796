"""Errors that people can act on, and the exit codes they end a command with.

Every message names the value, where it came from and what would work. Commands end with exit code 2
for usage (wrong flags, impossible combinations) and 1 for everything else; a traceback is shown
only with ``--debug``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class HfseqError(Exception):
    """Anything that goes wrong for a reason the user can see and mend."""

    exit_code = 1


class UsageError(HfseqError, ValueError):
    """A flag, an argument or a combination of them that cannot work."""

    exit_code = 2


class PluginError(HfseqError):
    """A plugin that cannot be found, imported or registered."""


class PluginConflict(PluginError):
    """Two plugins claim one name."""


class DataError(HfseqError, ValueError):
    """Training or evaluation data that cannot be read or used."""


class CheckpointError(HfseqError, OSError):
    """A checkpoint file or directory that is absent, unreadable or damaged."""


class WeightsError(HfseqError, ValueError):
    """Weights whose names, shapes or types do not fit the model."""


class NonFiniteLoss(HfseqError):
    """The loss became NaN or infinite; the last good checkpoint is kept."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a ``did you mean`` clause for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def run_command(function: Callable[[], int | None], debug: bool = False) -> int:
    """Run ``function`` and turn its outcome into an exit code.

    Errors of hfseq and of the operating system become one line on standard error; with ``debug``
    they keep their traceback. Ctrl-C gives 130, as shells expect.
    """
    try:
        return function() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (HfseqError, OSError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)

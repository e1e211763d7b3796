"""Errors that people can act on, and the exit codes they end a command with.

Every message names the value, where it came from and what would work. Commands end with exit code 2
for usage (wrong flags, impossible combinations) and 1 for everything else; a traceback is shown
only with ``--debug``.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable

from hfseq.redaction import redact

#: What shells give a program that wrote to a closed pipe: 128 + SIGPIPE.
CLOSED_PIPE = 141


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


class ConfigError(CheckpointError, ValueError):
    """A configuration that cannot be read, or that describes no model."""


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


def run_command(
    function: Callable[[], int | None], debug: bool = False, messages: bool = False
) -> int:
    """Run ``function`` and turn its outcome into an exit code.

    Errors of hfseq and of the operating system become one line on standard error; with ``debug``
    they keep their traceback. Ctrl-C gives 130, and a reader that has had enough (``| head -1``)
    141, as shells expect. ``messages`` shows what hfseq has to tell by the way, too.
    """
    if messages:
        _show_messages()
    try:
        code = function() or 0
        sys.stdout.flush()  # what goes wrong here would else go wrong after the end
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE
    except (HfseqError, OSError) as error:
        if debug:
            print(redact(traceback.format_exc()), file=sys.stderr)
            return getattr(error, "exit_code", 1)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_output()
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except Exception:  # a fault of ours, with all that helps to mend it
        print(redact(traceback.format_exc()), file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Send to nowhere what standard output still holds; Python writes it at the very end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_messages() -> None:
    """Print log messages such as "resumed from step 500" to standard error, as they are."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("hfseq", "hfseq_plugins"):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False  # absl, which orbax brings along, prints what arrives at the root

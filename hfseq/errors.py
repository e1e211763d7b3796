"""How hfseq fails: typed errors with exit codes, one line without secrets, files whole or not.

Every message names the value, where it came from and what would work. Commands end with exit code 2
for usage (wrong flags, impossible combinations) and 1 for everything else; a traceback is shown
only with ``--debug``.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

#: What shells give a program that wrote to a closed pipe: 128 + SIGPIPE.
CLOSED_PIPE_EXIT_CODE = 141

#: Variables whose values must be nowhere but in the environment.
SECRET_VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
)

_SHORT = 6  # letters; a variable that holds less is no secret, and would blank out words
# Not a part of a path or of a longer name, as `hf_corpus/train.txt` is.
_HUB_TOKEN = re.compile(r"(?<![\w/\\-])(?<!\w\.)hf_[A-Za-z0-9]{30,}(?![\w/\\-]|\.\w)")
_URL_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_URL_QUERY = re.compile(
    r"(?i)([?&](?:[\w-]*(?:token|signature|secret|password|credential|api[_-]?key)|sig|key)=)"
    r"[^&\s'\"#]+"
)


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


def run_command(
    function: Callable[[], int | None], debug: bool = False, show_log: bool = False
) -> int:
    """Run ``function`` and turn its outcome into an exit code.

    Errors of hfseq and of the operating system become one line on standard error; with ``debug``
    they keep their traceback. Ctrl-C gives 130, and a reader that has had enough (``| head -1``)
    141, as shells expect. ``messages`` shows what hfseq has to tell by the way, too, such as
    "resumed from step 500".
    """
    if show_log:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        for name in ("hfseq", "hfseq_plugins"):
            log = logging.getLogger(name)
            log.addHandler(handler)
            log.setLevel(logging.INFO)
            log.propagate = False  # absl, which orbax brings, prints what arrives at the root
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Strangers' texts have what no encoding has: half of a pair, from an escape in JSON.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = function() or 0
        sys.stdout.flush()  # what goes wrong here would else go wrong after the end
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return CLOSED_PIPE_EXIT_CODE
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


def exit_with_parent(parent: int) -> None:
    """Let this process end within a second of ``parent``, which started it, whatever ended that.

    A killed process cannot end its children, and they would go on without it.
    """

    def watch() -> None:
        # Not PR_SET_PDEATHSIG: it comes when the thread ends that started this process.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end_with", daemon=True).start()


def _drop_output() -> None:
    """Send to nowhere what standard output still holds; Python writes it at the very end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def redact(text: str, token: str | None = None) -> str:
    """Hide ``token``, tokens of the Hub, values of secret variables and credentials in URLs.

    Values are hidden where they stand as whole words. A token of the Hub is ``hf_`` and at least
    30 letters or digits, and no part of a path or of a longer name.
    """
    known = [token, *(os.environ.get(name) for name in SECRET_VARIABLES)]
    for secret in known:
        if secret and (secret == token or len(secret) > _SHORT):
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "<token>", text)
    text = _HUB_TOKEN.sub("<token>", text)
    return _URL_QUERY.sub(r"\1<token>", _URL_USER.sub("", text))


def redact_values(values: object, hide: Callable[[str], str] = redact) -> Any:
    """Apply ``hide`` to every text in lists and dictionaries."""
    if isinstance(values, str):
        return hide(values)
    if isinstance(values, dict):
        return {name: redact_values(value, hide) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, hide) for value in values]
    return values


def redact_private(text: str) -> str:
    """Hide tokens and the user's home directory."""
    text, home = redact(text), str(Path.home())
    if len(home) == 1:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w-]|\.\w)", "~", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def one_line(text: object, most: int = 300) -> str:
    """Fold a message of several lines into one of at most ``most`` characters."""
    return " ".join(str(text).split())[:most]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a ``did you mean`` clause for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse JSON text.

    Python takes the last of equal keys; with ``unique`` they are an error.

    **Raises:** ``json.JSONDecodeError`` (a ValueError) for text that is no JSON, no UTF-8, nested
    too deeply, or has an integer of thousands of digits.
    """

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r:.80} stands there twice")
        return content

    try:
        return json.loads(text, object_pairs_hook=refuse_twins if unique_keys else None)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        nested = isinstance(error, RecursionError)
        begin = text[:100].decode("utf-8", "replace") if isinstance(text, bytes) else text[:100]
        reason = "it is nested too deeply" if nested else str(error)
        raise json.JSONDecodeError(reason, begin, 0) from error


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Give the name of a file to write, which then replaces ``path``.

    A failure leaves what was there, and no file of its own.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; a failure leaves what was there, and no file of its own."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

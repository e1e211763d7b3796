"""Errors with exit codes, redaction of secrets, and atomic file writes.

Each error message names the value, its source, and a solution. Commands end with exit code 2 for
usage errors (wrong flags, impossible combinations) and 1 for all other errors. Tracebacks are only
shown with `--debug`.
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

#: Exit code after writing to a closed pipe, as in shells: 128 + SIGPIPE.
CLOSED_PIPE_EXIT_CODE = 141

#: Environment variables whose values must not appear in any output.
SECRET_VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
)

# Values of secret variables with at most this many characters are hardly secrets, and redacting
# them would hide ordinary words.
_SHORT = 6
# Matches Hub tokens, but not parts of a path or of a longer name such as `hf_corpus/train.txt`.
_HUB_TOKEN = re.compile(r"(?<![\w/\\-])(?<!\w\.)hf_[A-Za-z0-9]{30,}(?![\w/\\-]|\.\w)")
_URL_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_URL_QUERY = re.compile(
    r"(?i)([?&](?:[\w-]*(?:token|signature|secret|password|credential|api[_-]?key)|sig|key)=)"
    r"[^&\s'\"#]+"
)


class HfseqError(Exception):
    """Base class of errors that the user can fix."""

    exit_code = 1


class UsageError(HfseqError, ValueError):
    """A flag, an argument, or a combination of them is invalid."""

    exit_code = 2


class PluginError(HfseqError):
    """A plugin cannot be found, imported or registered."""


class PluginConflict(PluginError):
    """Two plugins register the same name."""


class DataError(HfseqError, ValueError):
    """Training or evaluation data cannot be read or used."""


class CheckpointError(HfseqError, OSError):
    """A checkpoint file or directory is missing, unreadable or damaged."""


class ConfigError(CheckpointError, ValueError):
    """A configuration cannot be read, or does not describe a model."""


class WeightsError(HfseqError, ValueError):
    """Names, shapes or dtypes of weights do not match the model."""


class NonFiniteLoss(HfseqError):
    """The loss became NaN or infinite. The last good checkpoint is kept."""


@contextlib.contextmanager
def _printed_log() -> Iterator[None]:
    """Prints the messages of hfseq's loggers during the `with` block, then restores the loggers."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in ("hfseq", "hfseq_plugins")]
    settings = [(log.level, log.propagate) for log in loggers]
    for log in loggers:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        # absl, a dependency of orbax, prints all records of the root logger.
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, propagate) in zip(loggers, settings, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


def run_command(
    function: Callable[[], int | None], debug: bool = False, show_log: bool = False
) -> int:
    """Runs a function as a command, and converts its outcome to an exit code.

    Errors of hfseq and of the operating system are printed as one line on standard error. Ctrl-C
    results in 130, and a closed output pipe (`| head -1`) in 141, as in shells.

    Args:
        function: The function. Returns an exit code, or `None` for 0.
        debug: Whether to print tracebacks.
        show_log: Whether to print log messages of level INFO, such as "resumed from step 500".

    Returns:
        The exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Output can contain unpaired surrogates (from JSON escapes). No encoding supports them.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _printed_log() if show_log else contextlib.nullcontext():
            code = function() or 0
        sys.stdout.flush()  # raise write errors here instead of at exit
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
    except Exception:  # a bug: print the traceback
        print(redact(traceback.format_exc()), file=sys.stderr)
        return 1


def expand_home(words: Iterable[str]) -> list[str]:
    """Expands `~` in words such as `--flag=~/path`, where shells do not expand it."""
    return [
        "=".join((flag, os.path.expanduser(value))) if flag.startswith("--") and equals else word
        for word in words
        for flag, equals, value in [word.partition("=")]
    ]


def exit_with_parent(parent: int) -> None:
    """Makes this process exit within a second after its parent process has ended.

    A parent that is killed cannot end its child processes, so each child watches its parent.

    Args:
        parent: The ID of the parent process.
    """

    def watch() -> None:
        # PR_SET_PDEATHSIG is unsuitable: Linux sends that signal when the parent's thread that
        # started this process ends, even if the parent process continues.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="exit_with_parent", daemon=True).start()


def _drop_output() -> None:
    """Discards buffered standard output, which Python would write at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def redact(text: str, token: str | None = None) -> str:
    """Removes secrets from a text: Hub tokens, values of secret variables, and credentials in URLs.

    The values of the environment variables in `SECRET_VARIABLES` are only removed where they are
    whole words. A Hub token consists of `hf_` and at least 30 letters or digits, and is not a part
    of a path or of a longer name.

    Args:
        text: The text.
        token: A further secret to remove.
    """
    secrets = [token, *(os.environ.get(name) for name in SECRET_VARIABLES)]
    for secret in secrets:
        if secret and (secret == token or len(secret) > _SHORT):
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "<token>", text)
    text = _HUB_TOKEN.sub("<token>", text)
    return _URL_QUERY.sub(r"\1<token>", _URL_USER.sub("", text))


def redact_values(values: object, hide: Callable[[str], str] = redact) -> Any:
    """Applies `hide` to all texts in nested lists and dictionaries."""
    if isinstance(values, str):
        return hide(values)
    if isinstance(values, dict):
        return {name: redact_values(value, hide) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, hide) for value in values]
    return values


def redact_private(text: str) -> str:
    """Removes secrets, and replaces the user's home directory with `~`."""
    text, home = redact(text), str(Path.home())
    if len(home) == 1:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w-]|\.\w)", "~", text)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error message, or the error type if it has none.

    If the line introduces others, as in "one of:", all lines are joined to one.
    """
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    if first.endswith((":", ",", "(", "[", "{")):
        return one_line(text, 600)
    return first or type(error).__name__


def one_line(text: object, max_length: int = 300) -> str:
    """Joins the lines of a message, and truncates it after a word to `max_length` characters."""
    line = " ".join(str(text).split())
    if len(line) <= max_length:
        return line
    first = line[: max_length - 3]
    words = first.rpartition(" ")[0]
    return f"{words if len(words) > max_length // 2 else first}..."


def without_folders(text: str) -> str:
    """Removes the directories of temporary files and of installed packages from a message."""
    return re.sub(r"(/[\w.+-]+)*/(tmp\w+|site-packages)/", "", text)


def failure(error: BaseException, max_length: int = 300) -> str:
    """Returns the class and the message of an error on one line, for files of results."""
    return one_line(without_folders(f"{type(error).__name__}: {error}"), max_length)


def import_problem(error: BaseException, packages: str | Iterable[str], requirement: str) -> str:
    """Returns a clause about optional packages that cannot be imported.

    The clause distinguishes a package that is not installed from one whose import fails, for
    instance because a dependency of the package is missing.

    Args:
        error: The error of the import statement.
        packages: Names of the packages in import statements.
        requirement: What to install with pip.
    """
    names = [packages] if isinstance(packages, str) else list(packages)
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    clause = f"requires {' and '.join(names)}"
    if isinstance(cause, ModuleNotFoundError):
        if cause.name is None or cause.name.partition(".")[0] in names:
            quote = "'" if "[" in requirement else ""
            return f"{clause}: pip install {quote}{requirement}{quote}"
    reason = f"{type(cause).__name__}: {first_line(cause)}"
    return f"{clause}, whose import fails ({reason}). pip check lists unmet requirements"


@contextlib.contextmanager
def optional_import(
    feature: str, packages: str | Iterable[str], requirement: str
) -> Iterator[None]:
    """Converts errors of the import statements in the `with` block to `UsageError`.

    Args:
        feature: What requires the packages, for the message.
        packages: Names of the packages in import statements.
        requirement: What to install with pip.
    """
    try:
        yield
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise UsageError(f"{feature} {import_problem(error, packages, requirement)}") from error


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns a "did you mean" clause with the closest candidate, or an empty string.

    The dashes before the names of flags are not compared.
    """
    names = {candidate.lstrip("-"): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lstrip("-"), list(names), n=1, cutoff=0.6)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parses JSON.

    Args:
        text: The JSON text.
        unique_keys: Whether duplicate keys are an error. Otherwise the last one is used.

    Raises:
        json.JSONDecodeError: The text is not valid JSON or UTF-8, is nested too deeply, or contains
            an integer with thousands of digits. With ``unique_keys``, also for a duplicate key.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"duplicate key {duplicate!r:.80}")
        return content

    try:
        return json.loads(text, object_pairs_hook=reject_duplicates if unique_keys else None)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        is_nested = isinstance(error, RecursionError)
        begin = text[:100].decode("utf-8", "replace") if isinstance(text, bytes) else text[:100]
        reason = "it is nested too deeply" if is_nested else str(error)
        raise json.JSONDecodeError(reason, begin, 0) from error


@contextlib.contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file that replaces `path` at the end of the `with` block.

    If the block raises an error, the old file is kept and the temporary file is deleted.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path` as UTF-8. If writing fails, the old file is kept."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two markers of a file, such as the table of a Markdown file.

    Raises:
        DataError: The file does not contain both markers.
    """
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    before, found_begin, rest = content.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise DataError(f"{path} does not contain the lines '{begin}' and '{end}'")
    write_atomically(path, f"{before}{begin}\n\n{text}\n{end}{after}")

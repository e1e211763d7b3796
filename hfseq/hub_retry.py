"""Which failures of the Hub pass by themselves, how long to wait, and how to explain the rest.

Knows the Hub's client only by the shape of its errors, so that nothing is imported here.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hfseq.redaction import redact

logger = logging.getLogger("hfseq.hub")

ATTEMPTS = 4
LONGEST_WAIT = 300.0
PASSING = frozenset({408, 409, 412, 429, 500, 502, 503, 504})

T = TypeVar("T")


def with_retries(call: Callable[[], T], attempts: int = ATTEMPTS) -> T:
    """Call until it succeeds, waiting 1, 2, 4 ... seconds (or what the Hub says) after failures.

    Only what may pass by itself is retried: the statuses in PASSING and failed connections.
    """
    for attempt in range(attempts):
        try:
            return call()
        except Exception as error:
            wait = _seconds_to_wait(error, attempt)
            if wait is None or attempt + 1 == attempts:
                raise
            logger.info("%s; trying again in %.0f s", explain(error), wait)
            time.sleep(wait)
    raise AssertionError("unreachable")


def _seconds_to_wait(error: BaseException, attempt: int) -> float | None:
    """Seconds until a retry makes sense; None if it never does."""
    status, response = _status(error)
    if status is None:
        return 2.0**attempt if _is_connection_error(error) else None
    if status not in PASSING:
        return None
    asked = response.headers.get("Retry-After") or _ratelimit_reset(response.headers)
    wait = float(asked) if asked and asked.isdigit() else 2.0**attempt
    return wait if wait <= LONGEST_WAIT else None


def _ratelimit_reset(headers: Any) -> str | None:
    match = re.search(r"\br=0;t=(\d+)", headers.get("ratelimit", ""))
    return match[1] if match else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: BaseException) -> tuple[int | None, Any]:
    """HTTP status and response of the first error in the chain that has them."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if response is not None:
            return response.status_code, response
    return None, None


def _is_connection_error(error: BaseException) -> bool:
    # The client's HTTP library was httpx and is httpx2: recognise its errors by their base's name.
    names = {base.__name__ for link in _chain(error) for base in type(link).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "TimeoutError"})


def is_hub_error(error: BaseException) -> bool:
    """Whether the network, the Hub or its client may have caused this, rather than our own code."""
    return isinstance(error, (OSError, ValueError, RuntimeError)) or _is_connection_error(error)


def explain(error: BaseException) -> str:
    """Say in one line what went wrong and what to do about it."""
    status, response = _status(error)
    if status is not None:
        reason = _explain_status(error, status, response)
    elif _is_connection_error(error):
        root = list(_chain(error))[-1]
        return f"no connection to the Hub ({one_line(root) or type(root).__name__})"
    else:
        root = list(_chain(error))[-1]
        reason = "" if root is error else f"{type(root).__name__}: {one_line(root)}"
    if type(error) in (ValueError, RuntimeError):  # these say which file it was
        return f"{one_line(error)} {reason}".strip()
    return reason or one_line(error) or type(error).__name__


def _explain_status(error: BaseException, status: int, response: Any) -> str:
    hint = _STATUS_HINTS.get(status, "the Hub answered with an error; try again later")
    if status == 401 and type(error).__name__ == "RepositoryNotFoundError":
        hint = "no such repository, or it is private; check the name or run `hf auth login`"
    said = response.headers.get("X-Error-Message") or getattr(error, "server_message", None)
    return f"HTTP {status}: {hint}" + (f" [the Hub says: {one_line(said)}]" if said else "")


_STATUS_HINTS = {
    400: "the Hub rejected the request",
    401: "not logged in, or the token is not valid; run `hf auth login` or set HF_TOKEN",
    402: "the account's quota or plan does not allow this",
    403: "no permission; use a token with write access to this repository, or accept its terms",
    404: "no such repository (or it is private and the token has no access to it)",
    409: "the repository has changed meanwhile",
    412: "the repository has changed meanwhile",
    413: "a file is too large for the Hub",
    429: "too many requests; wait and try again",
    507: "the storage quota is used up",
}


def one_line(text: object) -> str:
    """Fold a message of several lines into one of at most 300 characters."""
    return " ".join(str(text).split())[:300]

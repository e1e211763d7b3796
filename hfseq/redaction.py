"""Secrets are taken out of whatever is written: messages, tracebacks, logs, cards."""

from __future__ import annotations

import os
import re
from typing import Any

#: Variables whose values must be nowhere but in the environment.
VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
)
_SHORT = 6  # letters; a variable that holds less is no secret, and would blank out words
_HUB = re.compile(r"\bhf_\w{4,}")
_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_QUERY = re.compile(
    r"(?i)([?&](?:[\w-]*(?:token|signature|secret|password|credential|api[_-]?key)|sig|key)=)"
    r"[^&\s'\"#]+"
)


def redact(text: str, token: str | None = None) -> str:
    """Hide ``token``, tokens of the Hub, values of secret variables and credentials in URLs."""
    known = [token, *(os.environ.get(name) for name in VARIABLES)]
    for secret in known:
        if secret and (secret == token or len(secret) > _SHORT):
            text = text.replace(secret, "<token>")
    text = _HUB.sub("<token>", text)
    return _QUERY.sub(r"\1<token>", _USER.sub("", text))


def redact_values(values: Any) -> Any:
    """Apply :func:`redact` to every text in lists and dictionaries."""
    if isinstance(values, str):
        return redact(values)
    if isinstance(values, dict):
        return {name: redact_values(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value) for value in values]
    return values


__all__ = ["redact", "redact_values"]

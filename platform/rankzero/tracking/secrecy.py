"""What looks like a secret, and text without it. Pure. Better one harmless value too many blotted out than one kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

BLOT = "[secret]"
_NAME = (  # `token` and `auth` end there: tokenizer, max_tokens and author are no secrets
    r"[\w.\-]*(?:secret|passw(?:or)?d|passphrase|credential|(?:api|access|private)[_\-]?key|(?:token|auth)(?![a-z]))"
    r"[\w.\-]*"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_ASSIGNMENT = re.compile(
    rf"(?P<name>\b{_NAME}[\"']?\s*(?:=|:)\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,;)\]}}]+)", re.IGNORECASE
)
_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*://)[^/\s@]+@", re.IGNORECASE)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w\-]{16,}"
    r"|\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_\-]{20,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}|\bdapi[0-9a-f]{32}\b"
    r"|\beyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*",
    re.DOTALL,
)


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or an option of this name would hold a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def text_without_secrets(text: str) -> str:
    """Return `text` with keys, tokens, passwords and credentials in URLs blotted out."""
    text = url_without_secrets(_SHAPES.sub(BLOT, text))
    return _ASSIGNMENT.sub(lambda found: found["name"] + BLOT, text)


def url_without_secrets(text: str) -> str:
    """Return `text` with the user and password of every URL taken out."""
    return _USERINFO.sub(lambda found: found["scheme"], text)


def command_without_secrets(argv: Sequence[str]) -> str:
    """Return a command line as one would type it, without secrets, whichever way an option got its value."""
    words: list[str] = []
    for word in argv:
        follows_secret = bool(words) and words[-1].startswith("-") and is_secret_name(words[-1].lstrip("-"))
        words.append(BLOT if follows_secret else text_without_secrets(word))
    return shlex.join(words)

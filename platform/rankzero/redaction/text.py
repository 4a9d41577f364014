"""Redact secrets in texts, URLs, settings, command lines and logs.

The patterns rather redact a harmless value than keep a secret.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence

from rankzero import config
from rankzero.config.values import choices
from rankzero.redaction.assignments import BLOT, WORD, is_harmless, is_secret_name, without_assigned

NOTIFY = "RANKZERO_NOTIFY"
"""The variable with a webhook's address, which is a secret in any text."""
# Values of a setting that is not used.
_UNSET = ("", "none", "true", "false")
_KEY = re.compile(r"[\w.\-+~@/\[\]]{1,256}")
_OPTION = re.compile(
    rf"(?P<name>(?<![\w\-])--[\w\-]{{0,40}}?(?:{WORD})[\w.\-]{{0,64}}[ \t]{{1,32}})"
    r"(?![=:])(?:\"[^\"\n]*\"|'[^'\n]*'|\S)+"
)
_USERINFO = re.compile(r"(?P<scheme>://)(?:[^/\s:@]{0,256}:[^\s\"'<>]{0,512}@|[^/\s]{1,4096}@)")
_ENCODED = re.compile(
    r"(?P<scheme>(?::|%(?:25)?3A)%(?:25)?2F%(?:25)?2F)"
    r"(?:(?!%(?:25)?(?:2F|3A|40))[^\s\"'<>&]){0,128}"
    r"(?:%(?:25)?3A[^\s\"'<>&]{0,256})?%(?:25)?40",
    re.I,
)
_SIGNATURE = re.compile(
    r"(?P<name>[?&](?:sig|(?:X-\w{2,8}-)?(?:Signature|Credential|Security-Token))=)[^&\s\"']+", re.I
)
_GAP = r"(?:[ \t]{1,8}|[ \t\r]{0,8}\n[+\-]?[ \t]{0,32})"
# A .netrc. In a line of its own, the value must not look like a word of prose.
_LOGIN = re.compile(
    rf"(?P<name>(?:\bmachine{_GAP}\S{{1,256}}"
    r"|^[+\- ]?[ \t]{0,32}(?:default|login[ \t]{1,8}\S{1,256}(?=[ \t\r]{0,8}\n)))"
    rf"(?:{_GAP}(?:login|account){_GAP}\S{{1,256}}){{0,2}}{_GAP}password{_GAP}"
    r"|^[+\- ]?[ \t]{0,32}password[ \t]{1,8}"
    r"(?=[a-z]{0,64}[^\sa-z.,:])(?=\S{1,256}[ \t\r]{0,8}$))\S+",
    re.MULTILINE,
)
# Assignments of a Dockerfile and of csh have no sign.
_ENV = re.compile(
    r"(?P<name>^[+\- ]?[ \t]{0,32}(?:ENV|[Ss]et[Ee]nv)[ \t]{1,32}"
    rf"[\w.\-]{{0,64}}?(?:{WORD})[\w.\-]{{0,64}}[ \t]{{1,32}})[^\s=][^\n]*",
    re.MULTILINE,
)
_HOOK = re.compile(
    r"(?P<name>\b(?:hooks\.slack\.com/(?:services|workflows|triggers)/"
    r"|discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/"
    r"|webhook\.office\.com/webhookb2/|api\.telegram\.org/(?:file/)?bot))[^\s\"'<>\\]+"
)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w\-]{16,}"
    r"|\bnpm_[A-Za-z0-9]{30,}|\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_\-]{20,}"
    r"|\b[sr]k_(?:live|test)_\w{16,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|\bSG\.[\w\-]{16,64}\.[\w\-]{16,}|\bdapi[0-9a-f]{32}\b|\bAIza[\w\-]{35}"
    r"|\bya29\.[\w\-]{20,}|\bpypi-[\w\-]{40,}"
    r"|(?<![\w\-])eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*|\b[Bb]earer\s{1,8}[\w.~+/=\-]{8,}",
    re.DOTALL,
)


def text_without_secrets(text: str) -> str:
    """Return `text` with keys, tokens, passwords and credentials in URLs redacted."""
    text = text.replace(os.environ.get(NOTIFY) or BLOT, BLOT)
    text = without_assigned(url_without_secrets(_SHAPES.sub(BLOT, text)))
    for pattern in (_OPTION, _SIGNATURE, _LOGIN, _ENV, _HOOK):
        text = pattern.sub(lambda found: found["name"] + BLOT, text)
    return text


def line_without_secrets(text: str, most: int = 500) -> str:
    """Return the first `most` characters of `text_without_secrets`."""
    # Redact before the cut: half a secret is not recognised. Answers of servers are megabytes.
    return text_without_secrets(text[: 40 * most])[:most]


def settings_without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by key, with values redacted that are secret by name or by shape."""
    return {key: _setting_without_secret(key, value) for key, value in settings.items()}


def rendered_without_secrets(experiment: object) -> dict[str, str]:
    """Return the texts of an experiment's settings, with secrets redacted.

    A value that a `Literal` lists is no secret, nor is that of a setting that `search` varies.
    """
    texts, search = config.rendered(experiment), getattr(type(experiment), "search", {})
    return settings_without_secrets(texts) | {
        leaf.key: texts[leaf.key]
        for leaf in config.leaves(experiment)
        if leaf.key in search or leaf.value in choices(leaf.annotation)
    }


def blotted(experiment: object) -> dict[str, str]:
    """Return only the settings that `rendered_without_secrets` changes, redacted."""
    texts, redacted = config.rendered(experiment), rendered_without_secrets(experiment)
    return {key: value for key, value in redacted.items() if value != texts[key]}


def url_without_secrets(text: str) -> str:
    """Return `text` without the user and password of each URL in it."""
    for pattern in (_USERINFO, _ENCODED):
        text = pattern.sub(lambda found: found["scheme"], text)
    return text


def command_without_secrets(argv: Sequence[str]) -> str:
    """Return a command line as a user would type it, without secrets.

    An option's value may be the next word, or stand behind a ``=`` in the same word.
    """
    words: list[str] = []
    for word in argv:
        key, sign, value = word.partition("=")
        option, _, given = words[-1].partition("=") if words else ("", "", "")
        if option.startswith("-") and not given and is_secret_name(option.lstrip("-")):
            words.append(BLOT)
        elif sign and _KEY.fullmatch(key) and is_secret_name(key):
            # All of the word is the password, further lines included.
            words.append(key + sign + _setting_without_secret(key, value))
        else:
            words.append(text_without_secrets(word))
    return shlex.join(words)


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))


def log_without_secrets() -> None:
    """Set up this process's log on standard error so that secrets are redacted."""
    handler = logging.StreamHandler()
    # Also in tracebacks: an error of a database has the password of its URL in it.
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # If a line cannot be written, `logging` would print its arguments without the formatter.
    logging.raiseExceptions = False


def _setting_without_secret(key: str, value: str) -> str:
    if not is_secret_name(key) or value in _UNSET:
        return text_without_secrets(value)
    # A value of several words is secret as a whole, whatever the first word is.
    is_one_word = value.split() == [value]
    return value if is_one_word and is_harmless(f"{key}={value}", 0, len(key) + 1) else BLOT

"""What looks like a secret, and text without it. Pure. Better one harmless value too many blotted out than one kept."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from rankzero.redaction.assignments import (
    BLOT,
    WORD,
    is_secret_name,
    tells_nothing,
    without_assigned,
)

NO_SECRETS = ("", "none", "true", "false")  # values of a setting that is not used
_KEY = re.compile(r"[\w.\-+~@/\[\]]{1,256}")
_OPTION = re.compile(
    rf"(?P<name>(?<![\w\-])--[\w\-]{{0,40}}?(?:{WORD})[\w.\-]{{0,64}}[ \t]{{1,32}})"
    r"(?![=:])(?:\"[^\"\n]*\"|'[^'\n]*'|\S)+"
)
_USERINFO = re.compile(r"(?P<scheme>://)(?:[^/\s:@]{0,256}:[^\s\"'<>]{0,512}@|[^/\s]{1,4096}@)")
_ENCODED = re.compile(
    r"(?P<scheme>(?::|%(?:25)?3A)%(?:25)?2F%(?:25)?2F)(?:(?!%(?:25)?(?:2F|3A|40))[^\s\"'<>&]){0,128}"
    r"(?:%(?:25)?3A[^\s\"'<>&]{0,256})?%(?:25)?40",
    re.I,
)
_SIGNATURE = re.compile(
    r"(?P<name>[?&](?:sig|(?:X-\w{2,8}-)?(?:Signature|Credential|Security-Token))=)[^&\s\"']+", re.I
)
_GAP = r"(?:[ \t]{1,8}|[ \t]{0,8}\n[+\-]?[ \t]{0,32})"
_LOGIN = re.compile(  # a .netrc; a line of its own where the word looks like none of prose
    rf"(?P<name>(?:\bmachine{_GAP}\S{{1,256}}"
    r"|^[+\- ]?[ \t]{0,32}(?:default|login[ \t]{1,8}\S{1,256}(?=[ \t]{0,8}\n)))"
    rf"(?:{_GAP}(?:login|account){_GAP}\S{{1,256}}){{0,2}}{_GAP}password{_GAP}"
    r"|^[+\- ]?[ \t]{0,32}password[ \t]{1,8}(?=[a-z]{0,64}[^\sa-z.,:])(?=\S{1,256}[ \t]{0,8}$))\S+",
    re.MULTILINE,
)
_ENV = re.compile(  # of a Dockerfile, of csh
    rf"(?P<name>^[+\- ]?[ \t]{{0,32}}(?:ENV|[Ss]et[Ee]nv)[ \t]{{1,32}}[\w.\-]{{0,64}}?(?:{WORD})[\w.\-]{{0,64}}"
    r"[ \t]{1,32})"
    r"[^\s=][^\n]*",
    re.MULTILINE,
)
_HOOK = re.compile(r"(?P<name>\bhooks\.slack\.com/(?:services|workflows|triggers)/)[^\s\"'<>\\]+")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w\-]{16,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_\-]{20,}|\b[sr]k_(?:live|test)_\w{16,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|\bSG\.[\w\-]{16,64}\.[\w\-]{16,}|\bdapi[0-9a-f]{32}\b|\bAIza[\w\-]{35}|\bya29\.[\w\-]{20,}|\bpypi-[\w\-]{40,}"
    r"|(?<![\w\-])eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*|\b[Bb]earer\s{1,8}[\w.~+/=\-]{8,}",
    re.DOTALL,
)


def text_without_secrets(text: str) -> str:
    """Return `text` with keys, tokens, passwords and credentials in URLs blotted out."""
    text = without_assigned(url_without_secrets(_SHAPES.sub(BLOT, text)))
    for pattern in (_OPTION, _SIGNATURE, _LOGIN, _ENV, _HOOK):
        text = pattern.sub(lambda found: found["name"] + BLOT, text)
    return text


def line_without_secrets(text: str, most: int = 500) -> str:
    """Return the first `most` characters of `text_without_secrets`: a secret that is cut in two is not recognised."""
    return text_without_secrets(text[: 40 * most])[:most]  # answers of servers are megabytes


def settings_without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by key, the values of those that are secret by name or by shape blotted out."""
    return {key: _without_secret(key, value) for key, value in settings.items()}


def _without_secret(key: str, value: str) -> str:
    if not is_secret_name(key) or value in NO_SECRETS:
        return text_without_secrets(value)
    return value if _is_harmless(key, "=", value) else BLOT


def _is_harmless(key: str, sign: str, value: str) -> bool:
    """Tell whether a whole value, one word, is none that a secret of this name would be."""
    return value.split() == [value] and tells_nothing(key + sign + value, 0, len(key + sign))


def blotted(settings: Mapping[str, str]) -> dict[str, str]:
    """Return only those settings that `settings_without_secrets` changes, as it leaves them."""
    return {
        key: value
        for key, value in settings_without_secrets(settings).items()
        if value != settings[key]
    }


def url_without_secrets(text: str) -> str:
    """Return `text` with the user and password of every URL taken out."""
    for pattern in (_USERINFO, _ENCODED):
        text = pattern.sub(lambda found: found["scheme"], text)
    return text


def command_without_secrets(argv: Sequence[str]) -> str:
    """Return a command line as one would type it, without secrets, whichever way an option got its value."""
    words: list[str] = []
    for word in argv:
        follows_secret = (
            bool(words) and words[-1].startswith("-") and is_secret_name(words[-1].lstrip("-"))
        )
        words.append(BLOT if follows_secret else _word_without_secrets(word))
    return shlex.join(words)


def _word_without_secrets(word: str) -> str:
    """Return a word of a command line without secrets: all of `password=…` is the password, its further lines, too."""
    key, sign, value = word.partition("=")
    if _KEY.fullmatch(key) and is_secret_name(key) and value not in NO_SECRETS:
        return word if _is_harmless(key, sign, value) else key + sign + BLOT
    return text_without_secrets(word)

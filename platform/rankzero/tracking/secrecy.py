"""What looks like a secret, and text without it. Pure. Better one harmless value too many blotted out than one kept.

Every pattern starts at a fixed word and looks a bounded distance around it, so that a line of a
megabyte (a notebook's picture, in a diff) takes a moment and not a day.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

BLOT = "[secret]"
NO_SECRETS = ("", "none", "true", "false")  # values of a setting that is not used
_WORD = (  # `token` and `auth` end there: tokenizer, max_tokens and author are no secrets
    r"(?i:secret|passw(?:or)?d|passphrase|credential|authorization"
    r"|(?:api|access|private|account|shared|signing|encryption|master|ssh|gpg)[_\-]?key"
    r"|(?:db|sql|smtp|ftp|mail|user|admin|root|proxy)_?pass\b|(?<=_)pwd\b)"
    r"|(?:[Tt]oken|[Aa]uth|[Cc]ookie)(?![a-z])|(?:TOKEN|AUTH|COOKIE)(?![A-Z])"
)
_SPACE = r"[^\S\n]{0,32}"
_PLAIN = r"(?:[+\-]?\d{1,6}|[Tt]rue|[Ff]alse|[Nn]one|null)[,;)\]}]{0,3}(?:\s|\Z)"  # pad_token_id=0 tells nothing
_NAME = re.compile(_WORD)
_ASSIGNMENT = re.compile(  # to the end of the line, unless the value is one string and something follows it
    rf"(?P<name>(?:{_WORD})[\w.\-]{{0,64}}(?:{_SPACE}(?:[\"']?\]?{_SPACE}[:=>]|[\"']{_SPACE},))(?!{_SPACE}{_PLAIN}){_SPACE})"
    rf"(?:(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')(?={_SPACE}(?:[,;)\]}}]|$))"
    rf"|[(\[{{]{_SPACE}\n(?:(?![+\- \t]{{0,40}}[)\]}}])[^\n]{{0,2000}}\n?){{0,20}}|(?:\\|[|>][+\-]?){_SPACE}\n[^\n]*"
    rf"|(?P<quotes>\"\"\"|''')(?s:.{{0,4000}}?)(?:(?P=quotes)|\Z)|[^\n]+)",
    re.MULTILINE,
)
_OPTION = re.compile(rf"(?P<name>(?<![\w\-])--[\w\-]{{0,40}}?(?:{_WORD})[\w.\-]{{0,64}}[ \t]{{1,32}})[^\s=:]\S*")
_USERINFO = re.compile(r"(?P<scheme>://)(?:[^/\s:@]{0,256}:[^\s\"'<>]{0,512}@|[^/\s]{1,4096}@)")
_SIGNATURE = re.compile(
    r"(?P<name>[?&](?:sig|(?:X-\w{2,8}-)?(?:Signature|Credential|Security-Token))=)[^&\s\"']+", re.I
)
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w\-]{16,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_\-]{20,}|\b[sr]k_(?:live|test)_\w{16,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|\bdapi[0-9a-f]{32}\b|\bAIza[\w\-]{35}|\bya29\.[\w\-]{20,}|\bpypi-[\w\-]{40,}"
    r"|(?<![\w\-])eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*|\b[Bb]earer\s{1,8}[\w.~+/=\-]{8,}",
    re.DOTALL,
)


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or an option of this name would hold a secret."""
    return _NAME.search(name) is not None


def text_without_secrets(text: str) -> str:
    """Return `text` with keys, tokens, passwords and credentials in URLs blotted out."""
    text = url_without_secrets(_SHAPES.sub(BLOT, text))
    for pattern in (_ASSIGNMENT, _OPTION, _SIGNATURE):
        text = pattern.sub(lambda found: found["name"] + BLOT, text)
    return text


def line_without_secrets(text: str, most: int = 500) -> str:
    """Return the first `most` characters of `text_without_secrets`: a secret that is cut in two is not recognised."""
    return text_without_secrets(text[: 40 * most])[:most]  # answers of servers are megabytes


def settings_without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings by key, the values of those that are secret by name or by shape blotted out."""
    return {key: _without_secret(key, value) for key, value in settings.items()}


def _without_secret(key: str, value: str) -> str:
    return BLOT if is_secret_name(key) and value not in NO_SECRETS else text_without_secrets(value)


def blotted(settings: Mapping[str, str]) -> dict[str, str]:
    """Return only those settings that `settings_without_secrets` changes, as it leaves them."""
    return {key: value for key, value in settings_without_secrets(settings).items() if value != settings[key]}


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

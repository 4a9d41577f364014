"""Redact values whose names say that they are secret: ``password = …`` to the end of the value.

Each pattern starts at a fixed word and looks a bounded distance around it. A line of a megabyte,
such as a notebook's image in a diff, therefore takes seconds and not hours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BLOT = "[secret]"

# "pass" alone is also a word of tests and of training: forward pass, first pass, must pass.
_WORDS_BEFORE = (
    "forward backward first second third last next final single multi one two num n per each every"
    " full fast slow low high band all by render should must tests to not will"
)
_PASS = (
    r"(?i:pass(?<![a-z]pass)"
    + "".join(rf"(?<!{word}[_ -]pass)" for word in _WORDS_BEFORE.split())
    # Neither passes nor pass_through, neither "result": "pass" nor pytest's PASS: name.
    + r"(?![a-z_\-]))(?!(?<=\bPASS):)(?!\\{0,8}[\"'][^\S\n]{0,4},)"
)
_STRONG = (
    r"(?i:secret|passw(?:or)?d|passphrase|credential|authorization"
    r"|(?:api|access|private|account|shared|signing|encryption|master|ssh|gpg)[_\-]?key"
    r"|(?:db|sql|smtp|ftp|mail|user|admin|root|proxy)_?pass\b|(?<=_)pwd\b)"
    rf"|{_PASS}"
)
# tokenizer, max_tokens and author are no secrets.
_WEAK = r"(?:[Tt]oken|[Aa]uth)(?![a-z])|(?:TOKEN|AUTH)(?![A-Z])"
WORD = rf"{_STRONG}|{_WEAK}|[Cc]ookie(?![a-z])|COOKIE(?![A-Z])"
_NAME, _STRONG_NAME, _WEAK_NAME = re.compile(WORD), re.compile(_STRONG), re.compile(_WEAK)

# Values that are no secret: True, 0.1, and after some names any number (password_length=8).
_ENDED = r"[,;)\]}]{0,3}(?:\s|\Z)"
_SWITCH = re.compile(rf"(?:[Tt]rue|[Ff]alse|[Nn]one|null){_ENDED}")
_NUMBER = re.compile(rf"[+\-]?\d{{1,6}}(?:\.\d{{0,6}})?(?:e[+\-]?\d{{1,3}})?{_ENDED}")
_COUNT = re.compile(rf"\d{{1,3}}{_ENDED}")
_NUMBERED_NAME = re.compile(
    r"(?i:length|len|size|count|min|max|retries|attempts|version|days|hours|minutes|seconds|age"
    r"|ttl|timeout|\.py)\W*\Z"
)
_BARE_PASS = re.compile(r"(?<![_\-])pass", re.I)  # pass: 12, fail: 3
_PARAMETER = re.compile(r"[._](?:weight|bias)\W*\Z")  # size mismatch for token_embedding.weight: …

_SPACE = r"[^\S\n]{0,32}"
_MARK = (
    r"(?:\\{0,8}[\"']|&quot;|&#3[49];)"  # A quote, also an escaped one in a notebook or in JSON.
)
_ASSIGNMENT = re.compile(
    rf"(?:{WORD})[\w.\-]{{0,64}}{_SPACE}"
    rf"(?:(?P<mark>{_MARK})?\]?{_SPACE}(?P<sign>[?+|.]{{0,2}}=|[:>])|{_MARK}{_SPACE},){_SPACE}"
)
_STRING = r"(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
_NEXT_STRING = re.compile(rf"[+\-]?[ \t]*[rbfuRBFU]{{0,2}}{_STRING}{_SPACE}(?:[,;)\]}}]|$)")
_QUOTED = re.compile(r"[+\-]?[ \t]*[rbfuRBFU]{0,2}[\"']")
_TRIPLE = re.compile(r"[rbfuRBFU]{0,2}(\"\"\"|''')")
# A value that only says that it stands below: YAML's block, tag, anchor or comment.
_BELOW = re.compile(r"(?:[!&]\S{1,64}\s{0,8}){0,2}(?:[|>][+\-\d]{0,2}\s{0,32})?(?:#.*)?")
_KEY_ALONE = re.compile(r"[+\- ]?[ \t]{0,128}(?:-[ \t]{1,8}){0,4}[\w.\-\"'\\<{]{0,64}")
_STATEMENT = re.compile(r"[+\- ]?[ \t]{0,128}(?:if|elif|while|case|for|with)\b")
_HUNK = re.compile(r"@@ |diff --git ")
# Lines that one value may have.
_MAX_LINES = 40


def is_secret_name(name: str) -> bool:
    """Return whether a variable or an option of this name would hold a secret."""
    return _NAME.search(name) is not None


def without_assigned(text: str) -> str:
    """Return `text` without the values that are assigned to secret names.

    Redacts from the value to the end of its line, and the further lines of the value.
    """
    lines, kept, at = text.split("\n"), list[str](), 0
    while at < len(lines):
        line, at = lines[at], at + 1
        for found in _ASSIGNMENT.finditer(line):
            if not is_harmless(line, found.start(), found.end()):
                end = _end_of_value(lines, at, found)
                redacted = end > at or found.end() < len(line)
                line, at = line[: found.end()] + BLOT * redacted, end
                break
        kept.append(line)
    return "\n".join(kept)


def is_harmless(text: str, start: int, end: int) -> bool:
    """Return whether the value behind the name and sign at `start:end` is no secret.

    A value is harmless if it is a switch, or a number that no secret of this name would be, or
    if the name is that of a model's parameter.
    """
    name = text[start:end]
    if _SWITCH.match(text, end) or (_PARAMETER.search(name) and _is_weak(name)):
        return True
    if not _NUMBER.match(text, end):
        return False
    if _NUMBERED_NAME.search(name) or (_BARE_PASS.match(text, start) and _COUNT.match(text, end)):
        return True
    return _is_weak(name)


def _is_weak(name: str) -> bool:
    # "token" and "auth" are words of machine learning, too.
    return _WEAK_NAME.search(name) is not None and _STRONG_NAME.search(name) is None


def _end_of_value(lines: Sequence[str], at: int, found: re.Match[str]) -> int:
    """Return the index of the first line behind a value whose name stands in line ``at - 1``."""
    head, value = found.string[: found.start()], found.string[found.end() :]
    # In a diff the first column is a mark, and not indentation.
    marked = head[:1] in ("+", "-", " ")
    own_indent = _indent(head[marked:], " \t-")
    is_below = _may_stand_below(found, head) and (
        _BELOW.fullmatch(value) is not None or (value[0] in "\"'" and value.count(value[0]) == 1)
    )
    triple = _TRIPLE.match(value)
    quotes = triple[1] if triple and value.count(triple[1]) == 1 else ""
    depth = _open_brackets(value)
    if _is_weak(found[0]) and value[:1] not in ("(", "[", "{"):
        # token_embedding = Embedding( opens a bracket of code. A string in it may be a secret.
        depth = depth if at < len(lines) and _QUOTED.match(lines[at]) else 0
    end = at
    for number in range(at, min(at + _MAX_LINES, len(lines))):
        before, line = lines[number - 1].rstrip(), lines[number]
        if _HUNK.match(line):
            break
        text = line[1:] if marked and line[:1] in ("+", "-", " ") else line
        is_item = number == end and text.lstrip().startswith("- ") and _indent(text) == own_indent
        if not (
            quotes
            or depth > 0
            or before.endswith("\\")
            or (is_below and (not text.strip() or is_item or _indent(text) > own_indent))
            or (before[-1:] not in (",", ";") and _NEXT_STRING.match(text))
        ):
            break
        end = number + 1 if text.strip() else end
        depth = max(0, depth + _open_brackets(text)) if depth > 0 else 0
        quotes = "" if quotes and quotes in text else quotes
    return end


def _may_stand_below(found: re.Match[str], head: str) -> bool:
    """Return whether the value may begin below its name.

    It may not behind ``if token:``, a tag in a sentence, or one of several arguments.
    """
    sign = found["sign"]
    if sign is None:
        return False
    if sign.endswith("=") or (sign == ":" and found["mark"] and not _STATEMENT.match(head)):
        return True
    return _KEY_ALONE.fullmatch(head) is not None and ("<" in head) == (sign == ">")


def _indent(line: str, blank: str = " \t") -> int:
    return len(line) - len(line.lstrip(blank))


def _open_brackets(line: str) -> int:
    # The first 2,000 characters only: the pattern takes quadratic time on a string without an end.
    code = re.sub(rf"\\.|{_STRING}", "", line[:2000])
    return sum(map(code.count, "([{")) - sum(map(code.count, ")]}"))

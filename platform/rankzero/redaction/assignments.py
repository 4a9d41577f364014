"""Values whose names say that they are secret, to where they end: a string, a line, the lines below. Pure.

Every pattern starts at a fixed word and looks a bounded distance around it, so that a line of a
megabyte (a notebook's picture, in a diff) takes a moment and not a day.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

BLOT = "[secret]"
_PASSES = (  # `pass` alone has a second meaning
    "forward backward first second third last next final single multi one two num n per each every full fast slow"
    " low high band all by render should must tests to not will"
)
_PASS = (  # no bypass, passes, pass_through; "result": "pass", and a test's PASS: name
    rf"(?i:pass(?<![a-z]pass){''.join(rf'(?<!{word}[_ -]pass)' for word in _PASSES.split())}(?![a-z_\-]))"
    r"(?!(?<=\bPASS):)(?!\\{0,8}[\"'][^\S\n]{0,4},)"
)
_STRONG = (
    r"(?i:secret|passw(?:or)?d|passphrase|credential|authorization"
    r"|(?:api|access|private|account|shared|signing|encryption|master|ssh|gpg)[_\-]?key"
    r"|(?:db|sql|smtp|ftp|mail|user|admin|root|proxy)_?pass\b|(?<=_)pwd\b)"
    rf"|{_PASS}"
)
_WEAK = r"(?:[Tt]oken|[Aa]uth)(?![a-z])|(?:TOKEN|AUTH)(?![A-Z])"  # tokenizer, max_tokens and author are no secrets
WORD = rf"{_STRONG}|{_WEAK}|[Cc]ookie(?![a-z])|COOKIE(?![A-Z])"
_NAME = re.compile(WORD)
_STRONG_NAME = re.compile(_STRONG)
_WEAK_NAME = re.compile(_WEAK)
_ORDINARY = re.compile(  # whose number is no secret: password_length=8, secrets.py:12
    r"(?i:length|len|size|count|min|max|retries|attempts|version|days|hours|minutes|seconds|age|ttl|timeout|\.py)\W*\Z"
)
_BARE_PASS = re.compile(r"(?<![_\-])pass", re.I)  # pass: 12, fail: 3
_ENDED = r"[,;)\]}]{0,3}(?:\s|\Z)"
_PARAMETER = re.compile(
    r"[._](?:weight|bias)\W*\Z"
)  # size mismatch for token_embedding.weight: copying
_SWITCH = re.compile(rf"(?:[Tt]rue|[Ff]alse|[Nn]one|null){_ENDED}")
_NUMBER = re.compile(
    rf"[+\-]?\d{{1,6}}(?:\.\d{{0,6}})?(?:e[+\-]?\d{{1,3}})?{_ENDED}"
)  # pad_token_id=0 tells nothing
_COUNT = re.compile(rf"\d{{1,3}}{_ENDED}")

_SPACE = r"[^\S\n]{0,32}"
_MARK = r"(?:\\{0,8}[\"']|&quot;|&#3[49];)"  # a quote, also within a string: of a notebook, of JSON in JSON
_STRING = r"(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
_ENDS = rf"(?={_SPACE}(?:[,;)\]}}]|$))"
_ASSIGNMENT = re.compile(  # to the end of the line, unless the value is one string and something follows it
    rf"(?P<name>(?:{WORD})[\w.\-]{{0,64}}{_SPACE}(?:(?P<mark>{_MARK})?\]?{_SPACE}(?P<sign>[?+|.]{{0,2}}=|[:>])"
    rf"|{_MARK}{_SPACE},){_SPACE})"
    rf"(?:(?P<string>{_STRING}){_ENDS}"
    rf"|(?P<escapes>\\{{1,8}})(?P<quote>[\"'])[^\n]*?(?<!\\)(?P=escapes)(?P=quote)"
    rf"(?=[\"']|{_SPACE}(?:[,;)\]}}]|(?P=escapes)[nrt]|$))"
    rf"|[rbfuRBFU]{{0,2}}(?P<quotes>\"\"\"|''')(?s:.{{0,4000}}?)(?:(?P=quotes)|\Z)|(?P<rest>[^\n]*))",
    re.MULTILINE,
)
_MORE_STRINGS = re.compile(
    rf"(?:\n[+\-]?[ \t]{{0,128}}[rbfuRBFU]{{0,2}}{_STRING}{_ENDS}){{0,20}}", re.MULTILINE
)
_QUOTED_LINE = re.compile(r"\n[+\- ]?[ \t]{0,128}[rbfuRBFU]{0,2}[\"'](?=\S)")
_BRACKET = re.compile(rf"\\.|{_STRING}|\s#[^\n]*|[()\[\]{{}}]")
_CLOSES = re.compile(r"[+\-]?[ \t]{0,128}[)\]}]")
_HUNK = re.compile(r"@@ |diff --git ")
_ALONE = re.compile(
    r"[+\- ]?[ \t]{0,128}(?:-[ \t]{1,8}){0,4}[\w.\-\"'\\<{]{0,64}"
)  # a key's line: no `if token:`
_STATEMENT = re.compile(
    r"[+\- ]?[ \t]{0,128}(?:if|elif|while|case|for|with)\b"
)  # if name == "password":
_BELOW = re.compile(  # a value that says only that it stands below: YAML's blocks, tags, anchors, comments
    r"(?:[!&]\S{1,64}\s{0,8}){0,2}(?:[|>][+\-\d]{0,2}\s{0,32})?(?:#.*)?"
)
_LINES = 20


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or an option of this name would hold a secret."""
    return _NAME.search(name) is not None


def without_assigned(text: str) -> str:
    """Return `text` without the values of what has a secret's name."""
    pieces: list[str] = []
    at = 0
    while found := _ASSIGNMENT.search(text, at):
        named = found.end("name")
        end = named if tells_nothing(text, found.start(), named) else _end_of_value(text, found)
        pieces += (text[at:named], BLOT if end > named else "")
        at = end
    return "".join([*pieces, text[at:]])


def tells_nothing(text: str, start: int, named: int) -> bool:
    """Tell whether the name at `start:named` is a parameter's, or the value a switch, or a number no secret is."""
    name = text[start:named]
    if _SWITCH.match(text, named) or (_PARAMETER.search(name) and _is_weak(name)):
        return True
    if not _NUMBER.match(text, named):
        return False
    if _ORDINARY.search(name) or (_BARE_PASS.match(text, start) and _COUNT.match(text, named)):
        return True
    return _is_weak(name)


def _is_weak(name: str) -> bool:
    """Tell whether a name is one of `token` or `auth` only, which are words of machine learning, too."""
    return _WEAK_NAME.search(name) is not None and _STRONG_NAME.search(name) is None


def _end_of_value(text: str, found: re.Match[str]) -> int:
    """Return where a value ends, which may be some lines further on."""
    if found["string"] is not None:
        return _end(_MORE_STRINGS.match(text, found.end()), found.end())
    value = found["rest"]
    if value is None:
        return found.end()
    if _BELOW.fullmatch(value):
        return max([stop for _, stop in _lines_below(text, found)], default=found.end())
    if value[0] in "\"'" and value.count(value[0]) == 1:
        closed = (stop for line, stop in _lines_below(text, found) if value[0] in line)
        return max(next(closed, 0), _end_of_continued(text, found))
    return _end_of_continued(text, found)


def _end(found: re.Match[str] | None, otherwise: int) -> int:
    return otherwise if found is None else found.end()


def _lines_behind(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Yield the lines behind the one that ends at `at`, with where each ends."""
    for _ in range(_LINES):
        if at >= len(text):
            return
        start, at = at + 1, text.find("\n", at + 1)
        at = len(text) if at < 0 else at
        yield text[start:at], at


def _lines_below(text: str, found: re.Match[str]) -> Iterator[tuple[str, int]]:
    """Yield the lines that are more deeply indented than a key's, in a diff as well, or a list right below it."""
    head = text[max(0, found.start() - 400) : found.start()].rpartition("\n")[2]
    if not _may_stand_below(found, head):
        return
    marked = head[:1] in ("+", "-", " ")  # the first column is a diff's, or that of all lines
    own, last = _indent(head[marked:], " \t-"), found.end()
    for line, stop in _lines_behind(text, last):
        if marked and line[:1] not in ("+", "-", " ", ""):
            return
        next_to_it, line = stop - len(line) - 1 == last, line[marked:]
        if line.strip() and (_indent(line) > own or (next_to_it and _is_item(line, own))):
            last = stop
            yield line, stop
        elif line.strip():
            return


def _may_stand_below(found: re.Match[str], head: str) -> bool:
    """Tell whether a value can be below: not behind `if token:`, a tag in a sentence, or one of several arguments."""
    if found["sign"] is None:
        return False
    if found["sign"].endswith("=") or (
        found["sign"] == ":" and found["mark"] and not _STATEMENT.match(head)
    ):
        return True
    return _ALONE.fullmatch(head) is not None and ("<" in head) == (found["sign"] == ">")


def _indent(line: str, blank: str = " \t") -> int:
    """Return how many columns of a line are blank."""
    return len(line) - len(line.lstrip(blank))


def _is_item(line: str, column: int) -> bool:
    """Tell whether a line is an item of YAML's list, in the column of the key that it belongs to."""
    return _indent(line) == column and line.lstrip().startswith("- ")


def _end_of_continued(text: str, found: re.Match[str]) -> int:
    """Return the end of a value that goes on while a bracket is open, or a line ends in a backslash."""
    value, end = found["rest"], found.end()
    depth = _depth(value, 0)
    if value[0] not in "([{" and _is_weak(found["name"]) and not _QUOTED_LINE.match(text, end):
        depth = 0  # token_embedding = Embedding(
    goes_on = _goes_on(value) and (
        _is_spaced(found) or not value.rstrip()[:-1].endswith((" ", "\t"))
    )
    for line, stop in _lines_behind(text, end):
        inside, depth = depth, _depth(line, depth)
        if (
            not (inside or goes_on)
            or _HUNK.match(line)
            or (inside and not depth and _CLOSES.match(line))
        ):
            break
        end, goes_on = stop, _goes_on(line)
    return end


def _is_spaced(found: re.Match[str]) -> bool:
    """Tell whether this is an assignment as no shell has it, in which a backslash would end the value."""
    return (found["sign"] or "").endswith("=") and found["name"][-1:].isspace()


def _goes_on(line: str) -> bool:
    """Tell whether a line ends in a backslash that is not itself escaped."""
    line = line.rstrip()
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _depth(line: str, depth: int) -> int:
    """Return how many brackets are open after a line that begins with `depth` of them; 0 where it closes one more."""
    for found in _BRACKET.finditer(line, 0, 2000):
        if found[0] in "([" or (
            found[0] == "{" and (depth or not found.start())
        ):  # no body of a function
            depth += 1
        elif found[0] in ")]" or (found[0] == "}" and depth):
            depth -= 1
        if depth < 0:
            return 0
    return depth

"""What looks like a secret, and text without it. Pure. Better one harmless value too many blotted out than one kept.

Every pattern starts at a fixed word and looks a bounded distance around it, so that a line of a
megabyte (a notebook's picture, in a diff) takes a moment and not a day.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

BLOT = "[secret]"
NO_SECRETS = ("", "none", "true", "false")  # values of a setting that is not used
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
_WORD = rf"{_STRONG}|{_WEAK}|[Cc]ookie(?![a-z])|COOKIE(?![A-Z])"
_NAME = re.compile(_WORD)
_STRONG_NAME = re.compile(_STRONG)
_WEAK_NAME = re.compile(_WEAK)
_ORDINARY = re.compile(  # whose number is no secret: password_length=8, secrets.py:12
    r"(?i:length|len|size|count|min|max|retries|attempts|version|days|hours|minutes|seconds|age|ttl|timeout|\.py)\W*\Z"
)
_BARE_PASS = re.compile(r"(?<![_\-])pass", re.I)  # pass: 12, fail: 3
_ENDED = r"[,;)\]}]{0,3}(?:\s|\Z)"
_SWITCH = re.compile(rf"(?:[Tt]rue|[Ff]alse|[Nn]one|null){_ENDED}")
_NUMBER = re.compile(rf"[+\-]?\d{{1,6}}{_ENDED}")  # pad_token_id=0 tells nothing
_COUNT = re.compile(rf"\d{{1,3}}{_ENDED}")

_SPACE = r"[^\S\n]{0,32}"
_MARK = r"(?:\\{0,8}[\"']|&quot;|&#3[49];)"  # a quote, also within a string: of a notebook, of JSON in JSON
_STRING = r"(?:\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
_ENDS = rf"(?={_SPACE}(?:[,;)\]}}]|$))"
_ASSIGNMENT = re.compile(  # to the end of the line, unless the value is one string and something follows it
    rf"(?P<name>(?:{_WORD})[\w.\-]{{0,64}}{_SPACE}(?:(?P<mark>{_MARK})?\]?{_SPACE}(?P<sign>[?+|.]{{0,2}}=|[:>])"
    rf"|{_MARK}{_SPACE},){_SPACE})"
    rf"(?:(?P<string>{_STRING}){_ENDS}"
    rf"|(?P<escapes>\\{{1,8}})(?P<quote>[\"'])[^\n]*?(?<!\\)(?P=escapes)(?P=quote)"
    rf"(?=[\"']|{_SPACE}(?:[,;)\]}}]|(?P=escapes)[nrt]|$))"
    rf"|[rbfuRBFU]{{0,2}}(?P<quotes>\"\"\"|''')(?s:.{{0,4000}}?)(?:(?P=quotes)|\Z)|(?P<rest>[^\n]*))",
    re.MULTILINE,
)
_MORE_STRINGS = re.compile(rf"(?:\n[+\-]?[ \t]{{0,128}}[rbfuRBFU]{{0,2}}{_STRING}{_ENDS}){{0,20}}", re.MULTILINE)
_QUOTED_LINE = re.compile(r"\n[+\- ]?[ \t]{0,128}[rbfuRBFU]{0,2}[\"'](?=\S)")
_BRACKET = re.compile(rf"\\.|{_STRING}|\s#[^\n]*|[()\[\]{{}}]")
_CLOSES = re.compile(r"[+\-]?[ \t]{0,128}[)\]}]")
_HUNK = re.compile(r"@@ |diff --git ")
_ALONE = re.compile(r"[+\- ]?[ \t]{0,128}(?:-[ \t]{1,8}){0,4}[\w.\-\"'\\<{]{0,64}")  # a key's line: no `if token:`
_STATEMENT = re.compile(r"[+\- ]?[ \t]{0,128}(?:if|elif|while|case|for|with)\b")  # if name == "password":
_BELOW = re.compile(  # a value that says only that it stands below: YAML's blocks, tags, anchors, comments
    r"(?:[!&]\S{1,64}\s{0,8}){0,2}(?:[|>][+\-\d]{0,2}\s{0,32})?(?:#.*)?"
)
_KEY = re.compile(r"[\w.\-+~@/\[\]]{1,256}")
_LINES = 20

_OPTION = re.compile(rf"(?P<name>(?<![\w\-])--[\w\-]{{0,40}}?(?:{_WORD})[\w.\-]{{0,64}}[ \t]{{1,32}})[^\s=:]\S*")
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
    rf"(?P<name>^[+\- ]?[ \t]{{0,32}}(?:ENV|[Ss]et[Ee]nv)[ \t]{{1,32}}[\w.\-]{{0,64}}?(?:{_WORD})[\w.\-]{{0,64}}"
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


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or an option of this name would hold a secret."""
    return _NAME.search(name) is not None


def text_without_secrets(text: str) -> str:
    """Return `text` with keys, tokens, passwords and credentials in URLs blotted out."""
    text = _without_assigned(url_without_secrets(_SHAPES.sub(BLOT, text)))
    for pattern in (_OPTION, _SIGNATURE, _LOGIN, _ENV, _HOOK):
        text = pattern.sub(lambda found: found["name"] + BLOT, text)
    return text


def _without_assigned(text: str) -> str:
    """Return `text` without the values of what has a secret's name."""
    pieces: list[str] = []
    at = 0
    while found := _ASSIGNMENT.search(text, at):
        named = found.end("name")
        end = named if _tells_nothing(text, found.start(), named) else _end_of_value(text, found)
        pieces += (text[at:named], BLOT if end > named else "")
        at = end
    return "".join([*pieces, text[at:]])


def _tells_nothing(text: str, start: int, named: int) -> bool:
    """Tell whether the value of the name at `start:named` is a switch, or a number that no secret would be."""
    if _SWITCH.match(text, named):
        return True
    if not _NUMBER.match(text, named):
        return False
    name = text[start:named]
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
    if found["sign"].endswith("=") or (found["sign"] == ":" and found["mark"] and not _STATEMENT.match(head)):
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
    goes_on = _goes_on(value) and (_is_spaced(found) or not value.rstrip()[:-1].endswith((" ", "\t")))
    for line, stop in _lines_behind(text, end):
        inside, depth = depth, _depth(line, depth)
        if not (inside or goes_on) or _HUNK.match(line) or (inside and not depth and _CLOSES.match(line)):
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
        if found[0] in "([" or (found[0] == "{" and (depth or not found.start())):  # no body of a function
            depth += 1
        elif found[0] in ")]" or (found[0] == "}" and depth):
            depth -= 1
        if depth < 0:
            return 0
    return depth


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
    for pattern in (_USERINFO, _ENCODED):
        text = pattern.sub(lambda found: found["scheme"], text)
    return text


def command_without_secrets(argv: Sequence[str]) -> str:
    """Return a command line as one would type it, without secrets, whichever way an option got its value."""
    words: list[str] = []
    for word in argv:
        follows_secret = bool(words) and words[-1].startswith("-") and is_secret_name(words[-1].lstrip("-"))
        words.append(BLOT if follows_secret else _word_without_secrets(word))
    return shlex.join(words)


def _word_without_secrets(word: str) -> str:
    """Return a word of a command line without secrets: all of `password=…` is the password, its further lines, too."""
    key, sign, value = word.partition("=")
    if _KEY.fullmatch(key) and is_secret_name(key) and value not in NO_SECRETS:
        return word if _tells_nothing(word, 0, len(key + sign)) else key + sign + BLOT
    return text_without_secrets(word)

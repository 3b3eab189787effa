"""The text of ``bash -c``: enough of the shell's grammar to find where a command's arguments end, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATOR = re.compile(r"&>>?|[0-9]*(?:>>|>&|>\||<<<|<<|<&|<>|>|<)|&&|\|\||;;|[|;&()\n]")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command.

    Attributes:
        text: Its value, quotes removed; variables are left as they are written.
        begin: Offset of its first character.
        end: Offset after its last character.
    """

    text: str
    begin: int
    end: int


def commands(text: str) -> list[tuple[Word, ...]]:
    """The simple commands of a script, each up to its first redirection.

    Raises:
        ValueError: A quote or a substitution is not closed.
    """
    found: list[tuple[Word, ...]] = []
    words: list[Word] = []
    redirected = False
    for item in _items(text):
        if isinstance(item, Word):
            words += [] if redirected else [item]
        elif "<" in item or ">" in item:
            redirected = True
        else:
            found += [tuple(words)] if words else []
            words, redirected = [], False
    return [*found, tuple(words)] if words else found


def _items(text: str) -> Iterator[Word | str]:
    """Words and operators in order."""
    at = 0
    while at < len(text):
        if blank := _BLANK.match(text, at) or _COMMENT.match(text, at):
            at = blank.end()
        elif operator := _OPERATOR.match(text, at):
            yield operator.group()
            at = operator.end()
        else:
            word = _word(text, at)
            yield word
            at = word.end


def _word(text: str, begin: int) -> Word:
    value: list[str] = []
    at = begin
    while at < len(text) and not (text[at] in " \t" or (_OPERATOR.match(text, at) and not text[at].isdigit())):
        if text.startswith("\\\n", at):
            break
        piece, at = _piece(text, at)
        value.append(piece)
    return Word("".join(value), begin, at)


def _piece(text: str, at: int) -> tuple[str, int]:
    """One character, quoted part or substitution that begins at ``at``, and where it ends."""
    char = text[at]
    if char == "\\":
        return text[at + 1 : at + 2], at + 2
    if char == "'":
        end = _index(text, "'", at + 1)
        return text[at + 1 : end], end + 1
    if char == "`":
        end = _index(text, "`", at + 1)
        return text[at : end + 1], end + 1
    if text.startswith(("$(", "${"), at):
        end = _closed(text, at + 2, ")" if text[at + 1] == "(" else "}")
        return text[at:end], end
    if char == '"':
        return _double_quoted(text, at + 1)
    return char, at + 1


def _double_quoted(text: str, at: int) -> tuple[str, int]:
    value: list[str] = []
    while at < len(text) and text[at] != '"':
        if text[at] == "'":
            piece, at = "'", at + 1
        else:
            piece, at = _piece(text, at)
        value.append(piece)
    if at >= len(text):
        raise ValueError("a double quote is not closed")
    return "".join(value), at + 1


def _closed(text: str, at: int, closing: str) -> int:
    """Offset after the bracket that closes a substitution."""
    while at < len(text):
        if text[at] == closing:
            return at + 1
        nested = text[at] == "(" and closing == ")"
        at = _closed(text, at + 1, ")") if nested else _piece(text, at)[1]
    raise ValueError(f"a '{closing}' is missing")


def _index(text: str, char: str, at: int) -> int:
    end = text.find(char, at)
    if end < 0:
        raise ValueError(f"a {char} is not closed")
    return end

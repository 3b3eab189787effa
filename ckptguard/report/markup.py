"""HTML and SVG elements. Text is escaped unless an element made it, so that nothing a run printed becomes markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

from ckptguard.report.words import printable

_VOID = frozenset({"meta", "link", "input", "br"})


class Markup(str):
    """Text that is markup already: what ``element`` returned."""

    __slots__ = ()


type Content = str | int | Iterable[Content] | None


def element(tag: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        tag: Its name.
        content: Elements, text, or collections of these; None is left out.
        attributes: ``class_`` stands for ``class`` and ``data_x`` for ``data-x``; True is an attribute without a value, and
            False or None leave it out.
    """
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_text(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{tag}{said}>" if tag in _VOID else f"<{tag}{said}>{joined(content)}</{tag}>")


def joined(content: Content) -> Markup:
    """Everything in it, one after another."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    if isinstance(content, (str, int)):
        return Markup(_text(str(content)))
    return Markup("".join(map(joined, content)))


def _text(text: str) -> str:
    return html.escape(printable(text))

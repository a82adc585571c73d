"""Builds HTML and SVG. What is not markup already is escaped, so text from data can never become markup."""

from __future__ import annotations

from html import escape
from typing import Any

_VOID = ("meta", "br", "col")


class Html(str):
    """Markup made by `el`, which leaves it as it is; every other text is escaped there."""

    __slots__ = ()


def el(name: str, /, *children: Any, **attributes: Any) -> Html:
    """Return an element. Children are markup, text, numbers, lists of those, or None; attributes
    that are None are left out.

    `class_` is the attribute class, `aria_label` aria-label and so on.
    """
    # Names of attributes come from this package alone; values may come from data, and are escaped.
    found = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = [name, *(f'{key}="{escape(str(value))}"' for key, value in found.items())]
    opening = f"<{' '.join(words)}>"
    return Html(opening) if name in _VOID else Html(f"{opening}{join(*children)}</{name}>")


def join(*children: Any) -> Html:
    """Return several children as one element of markup."""
    return Html("".join(_markup(child) for child in children))


def _markup(child: Any) -> str:
    """Return a child as markup, escaped unless it is markup."""
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, list | tuple):
        return join(*child)
    return escape(str(child))

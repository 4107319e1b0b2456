"""Names with fields in brackets, "mxfp8(rule=floor)", as text and back; which names there are is not known here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence

EXPLANATIONS: list[Callable[[str], str]] = []
"""What modules above add: each is asked what an unknown name is elsewhere, and answers "" or a text ending in "; "."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """What an unknown name is elsewhere, or as a question the known one that begins like it, or else the nearest.

    A text that ends in a blank, or "" where none is near.
    """
    for explain in EXPLANATIONS:
        if explanation := explain(name):
            return explanation
    known = list(known)
    near = [other for other in known if name and other.startswith(name)]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def parse_fields(
    text: str, name: str, options: str, known: Mapping[str, object], having: Callable[[str], Sequence[str]]
) -> dict[str, object]:
    """The fields of `options`, what follows the opening bracket of a text.

    known   fields of the name with the values that they have; one of True or False takes these alone
    having  the names that have a field
    Raises ValueError for what is no field, or for a field that is there twice.
    """
    if not options.endswith(")"):
        raise ValueError(f"format {text!r} lacks the closing bracket; write {name}(field=value, ...)")
    found: dict[str, object] = {}
    for option in filter(None, (part.strip() for part in options[:-1].split(","))):
        field, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not field:
            raise ValueError(f"format {text!r}: {option!r} must be field=value with one of {', '.join(known)}")
        if field not in known:
            others = f"; {field} is a field of {', '.join(having(field))}" if having(field) else ""
            raise ValueError(f"format {text!r}: {name} has no field {field!r}; it has {', '.join(known)}{others}")
        if field in found:
            raise ValueError(f"format {text!r} gives {field!r} twice; give each field once")
        found[field] = _value(value)
        if isinstance(known[field], bool) and not isinstance(found[field], bool):
            raise ValueError(f"format {text!r}: {option!r} is not a truth value; write {field}=true or {field}=false")
    return found


def render(name: str, fields: Mapping[str, object]) -> str:
    """The name, with its fields in brackets where there are any."""
    options = ",".join(f"{field}={_text(value)}" for field, value in fields.items())
    return f"{name}({options})" if options else name


def _value(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    rows, times, columns = text.partition("x")
    if times and rows.isdigit() and columns.isdigit():
        return (int(rows), int(columns))
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)

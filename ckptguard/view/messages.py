"""Values as plain JSON and back: what nodes tell each other, and the record in a view.

The types of a dataclass's fields say how to read it. What comes from another node or from a file is checked against them.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import zstandard

_PLAIN = (str, int, float, bool, type(None))
_LARGEST_BYTES = 1 << 30


def to_plain(value: Any) -> Any:
    """A frozen value as dicts, lists and scalars; keys become text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    assert isinstance(value, _PLAIN), value
    return value


def from_plain[T](cls: type[T], plain: Any) -> T:
    """The value that ``to_plain`` was given.

    Raises:
        ValueError: It is not of that type; names the field.
    """
    return typing.cast("T", _read(cls, plain, cls.__name__))


def packed(value: Any) -> str:
    """A value as text that is short also for long listings."""
    return base64.b85encode(zstandard.compress(json.dumps(to_plain(value)).encode(), 1)).decode()


def unpacked[T](cls: type[T], text: str) -> T:
    """The value that ``packed`` was given.

    Raises:
        ValueError: It is not one.
    """
    try:
        data = zstandard.decompress(base64.b85decode(text), max_output_size=_LARGEST_BYTES)
    except zstandard.ZstdError as error:
        raise ValueError(f"cannot be unpacked: {error}") from error
    return from_plain(cls, json.loads(data))


@cache
def _fields(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(kind: Any, plain: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, _expect(plain, dict, where), where)
    if origin is tuple:
        of = arguments[0]
        return tuple([_read(of, item, where) for item in _expect(plain, list, where)])
    if origin is Mapping:
        key, of = arguments
        items = _expect(plain, dict, where).items()
        return types.MappingProxyType({_key(key, name, where): _read(of, item, where) for name, item in items})
    if origin is typing.Literal:
        if plain not in arguments:
            raise ValueError(f"{where}: {plain!r} is none of {', '.join(map(repr, arguments))}")
        return plain
    if origin in (types.UnionType, typing.Union):
        return None if plain is None else _read(next(a for a in arguments if a is not type(None)), plain, where)
    return _expect(plain, kind, where)


def _dataclass(kind: type, plain: dict[str, Any], where: str) -> Any:
    hints = _fields(kind)
    unknown = plain.keys() - hints.keys()
    missing = [f.name for f in dataclasses.fields(kind) if _is_required(f) and f.name not in plain]
    if unknown or missing:
        raise ValueError(
            f"{where}: unknown {', '.join(sorted(unknown)) or 'none'}, missing {', '.join(missing) or 'none'}"
        )
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in plain.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _key(kind: type, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{where}: {text!r} is no {kind.__name__}") from error


def _expect(plain: Any, kind: type, where: str) -> Any:
    if not isinstance(plain, kind) or (kind is int and isinstance(plain, bool)):
        raise ValueError(f"{where}: {type(plain).__name__}, expected {kind.__name__}")
    return plain

"""Mappings -> validated frozen dataclasses; a wrong key or value names the nearest right one.

Configuration dies at the door: Hydra's and vLLM's mappings become plain dataclasses here, and no
other code sees them.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError, hint

T = TypeVar("T")


def from_mapping(cls: type[T], given: Mapping[str, Any], where: str) -> T:
    """Build a configuration dataclass, nested ones from nested mappings.

    Args:
        cls: A dataclass.
        given: Its values by field name; lists become tuples.
        where: Name of the section, for messages; empty for the whole configuration.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has another type.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Server:
        ...     port: int = 80
        >>> from_mapping(Server, {"prot": 8000}, "server")
        Traceback (most recent call last):
        ...
        policy.errors.ConfigError: Unknown key 'prot' in server; did you mean 'port'?
    """
    section = where or "the configuration"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section} is {given!r}; make it a mapping of keys to values.")
    known = {spec.name: spec for spec in fields(cls)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ConfigError(f"Unknown key '{key}' in {section}; {hint(key, known, 'known:')}")
    for name, spec in known.items():
        required = spec.default is MISSING and spec.default_factory is MISSING
        if required and name not in given:
            raise ConfigError(f"{section} has no '{name}'; give one.")
    hints, prefix = get_type_hints(cls), f"{where}." if where else ""
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in given.items()})


def _convert(type_hint: Any, value: Any, where: str) -> Any:
    """Check a value against its type type_hint; build nested dataclasses and tuples."""
    origin, arguments = get_origin(type_hint), get_args(type_hint)
    if type_hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        return _convert(options[0], value, where)
    if is_dataclass(type_hint):
        if isinstance(value, type_hint):  # type: ignore[arg-type]
            return value
        return from_mapping(type_hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        return _one_of(arguments, value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; make it a mapping of keys to values.")
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if type_hint is float and type(value) is int:
        return float(value)
    if type(value) is not type_hint:
        raise ConfigError(f"{where} is {value!r}; make it of type {type_hint.__name__}.")
    return value


def _one_of(options: Sequence[Any], value: Any, where: str) -> Any:
    if value in options:
        return value
    raise ConfigError(f"{where} is {value!r}; {hint(value, options)}")


def _tuple(arguments: Sequence[Any], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{where} is {value!r}; make it a list.")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        arguments = [arguments[0]] * len(value)
    if len(arguments) != len(value):
        raise ConfigError(f"{where} is {value!r}; make it a list of {len(arguments)} values.")
    return tuple(
        _convert(argument, item, f"{where}[{index}]")
        for index, (argument, item) in enumerate(zip(arguments, value, strict=True))
    )

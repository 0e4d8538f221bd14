"""One way to configure: a msgspec struct, its TOML file, its command-line options, all with the same few keys.

A configuration is a frozen, keyword-only `msgspec.Struct`; each field is `Annotated[T, msgspec.Meta(description=...)]`
with a default, and T is int, float, str, bool, a Literal, one of these or None, or a list or tuple of them. (A bound on
a number that may be None goes inside: `Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description=...)]`.) A field
`task_batch` is `task-batch` in the file and `--task-batch` on the command line. Every value is checked where it enters,
with one sentence that names the option or the file and key; checks across fields belong in the struct's
`__post_init__`, which raises ConfigError. A struct with a field `preset` has a class variable `PRESETS`: by name,
values for its fields, which go before the defaults. Nothing here knows an algorithm; `asyncflow.options` calls it for a
command.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w
from msgspec import inspect

from asyncflow.errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)


def resolve(config: type[Config], given: Mapping[str, Any], config_file: str | None = None) -> Config:
    """Return the configuration: defaults, replaced by the preset's, by the TOML file's, by the given values.

    given: values by field name, as typed on the command line (text, or already of the field's type).
    Raises ConfigError: a file that cannot be read, an unknown key, or a value of the wrong type or range.
    """
    types = field_types(config)
    values: dict[str, Any] = {}
    for key, value in (_read_toml(config_file) if config_file is not None else {}).items():
        name = key.replace("-", "_")
        if name not in types:
            raise ConfigError(f'{config_file}: unknown key "{key}"{suggestion(key, map(toml_key, types))}')
        if name in values:
            raise ConfigError(f'{config_file}: the key "{toml_key(name)}" is given twice; keep one spelling')
        values[name] = _checked(value, types[name], f"{config_file}: {key}", strict=True)
    for name, value in given.items():
        values[name] = _checked(value, types[name], f"--{toml_key(name)}", strict=False)
    preset = getattr(config, "PRESETS", {}).get(values.get("preset"), {})
    return config(**{name: value for name, value in preset.items() if name in types} | values)


def dump(config: msgspec.Struct) -> str:
    """Return the configuration as TOML, which `resolve` reads back to an equal one; a key that is None is left out."""
    values = ((field.name, getattr(config, field.name)) for field in msgspec.structs.fields(config))
    return tomli_w.dumps({toml_key(name): value for name, value in values if value is not None})


def toml_key(name: str) -> str:
    """The field `task_batch` is written `task-batch`."""
    return name.replace("_", "-")


def field_types(config: type[msgspec.Struct]) -> dict[str, Any]:
    """Each field's annotated type by name; every field has a default, which is None where the field may be None."""
    types = {}
    for field in msgspec.structs.fields(config):
        assert not field.required, f"{config.__name__}.{field.name} has no default"
        assert not _is_optional(field.type) or field.default is None, f"TOML cannot say None for {field.name}"
        types[field.name] = field.type
    return types


def describe(kind: inspect.Type) -> str:
    """What a value of this type looks like, for error messages: "an integer of at least 1"."""
    match kind:
        case inspect.Metadata():
            return describe(kind.type)
        case inspect.UnionType():
            return " or ".join(describe(member) for member in kind.types if not isinstance(member, inspect.NoneType))
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"an integer{_bounds(kind)}"
        case inspect.FloatType():
            return f"a finite number{_bounds(kind)}"
        case inspect.StrType():
            return "a text that is not empty" if kind.min_length else "a text"
        case inspect.ListType() | inspect.VarTupleType():
            return f"a list{' that is not empty' if kind.min_length else ''}, each entry {describe(kind.item_type)}"
    raise AssertionError(f"a configuration cannot hold {kind}")


def suggestion(word: str, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what was meant, or all that is known."""
    known = sorted(words)
    close = difflib.get_close_matches(word.replace("_", "-"), known, n=1)
    return f'; did you mean "{close[0]}"?' if close else f"; known are {', '.join(known)}"


def _checked(value: Any, type_: Any, where: str, *, strict: bool) -> Any:
    try:
        result = msgspec.convert(value, type_, strict=strict)
        if not _is_finite(result):
            raise msgspec.ValidationError
    except msgspec.ValidationError:
        typed = not strict and isinstance(value, str) and value != ""  # shown as it was typed, without quotes
        shown = value if typed else json.dumps(value, default=str, ensure_ascii=False)
        raise ConfigError(f"{where}: expected {describe(inspect.type_info(type_))}, got {shown}") from None
    return result


def _is_finite(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    words = {"of at least": kind.ge, "above": kind.gt, "of at most": kind.le, "below": kind.lt}
    return " and".join(f" {word} {bound:g}" for word, bound in words.items() if bound is not None)


def _is_optional(type_: Any) -> bool:
    kind = inspect.type_info(type_)
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    return isinstance(kind, inspect.UnionType) and any(isinstance(member, inspect.NoneType) for member in kind.types)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None

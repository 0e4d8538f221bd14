"""The click side of a configuration: options made from a struct's fields, and one sentence for whatever goes wrong.

A command receives the resolved configuration, never raw option values:

    @click.command()
    @options(Settings)
    def main(config: Settings) -> None: ...

Called by the commands in algorithms/; `run` is the entry point of each.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import click
import msgspec
from click.core import ParameterSource
from msgspec import inspect

from asyncflow.config import field_types, resolve, toml_key
from asyncflow.errors import AsyncflowError

Function: TypeAlias = Callable[..., Any]

SILENCE_S = 5.0
"""How long a rank other than 0 waits before it ends with an error that rank 0 reports."""


def options(config: type[msgspec.Struct]) -> Callable[[Function], Function]:
    """Give a function an option for each field, and `--config FILE`; it is called with `config=` the resolved struct.

    Options that the function adds itself pass through. Raises ConfigError, as `asyncflow.config.resolve`, when called.
    """
    types = field_types(config)

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*args: Any, config_file: str | None, **values: Any) -> Any:
            source = click.get_current_context().get_parameter_source
            given = {name: values.pop(name) for name in types if source(name) is ParameterSource.COMMANDLINE}
            own = {name: value for name, value in values.items() if name not in types}
            return function(*args, config=resolve(config, given, config_file), **own)

        defaults = config()
        made = [_option(name, inspect.type_info(type_), getattr(defaults, name)) for name, type_ in types.items()]
        file_help = "TOML file with the same keys; options on the command line go before it."
        made.append(click.option("--config", "config_file", metavar="FILE", help=file_help))
        decorated: Function = command
        for option in reversed(made):  # click lists the outermost decorator first
            decorated = option(decorated)
        return decorated

    return decorate


def run(command: click.Command, args: Sequence[str] | None = None, name: str = "asyncflow") -> int:
    """Run a command and return its exit code; an error that a user can meet is printed as one sentence."""
    try:
        result = command.main(args, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except AsyncflowError as error:
        return _fail(str(error), error.exit_code)
    except click.Abort:
        return _fail("interrupted", 130)
    return result if isinstance(result, int) else 0


def _fail(sentence: str, exit_code: int) -> int:
    """Under torchrun every rank meets the same error: rank 0 says so, and the others leave it the time to."""
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"Error: {sentence}", err=True)
    else:  # torchrun ends all ranks as soon as one has ended
        time.sleep(SILENCE_S)
    return exit_code


def _option(name: str, kind: inspect.Type, default: Any) -> Callable[[Function], Function]:
    assert isinstance(kind, inspect.Metadata), f"{name} has no description"
    flag, help_, inner = toml_key(name), (kind.extra_json_schema or {})["description"], kind.type
    if isinstance(inner, inspect.BoolType):
        return click.option(f"--{flag}/--no-{flag}", name, default=default, show_default=True, help=help_)
    # Values stay text here: resolve() checks them, with the same words as for a file.
    multiple = isinstance(inner, inspect.ListType | inspect.VarTupleType)
    text = tuple(map(str, default)) if multiple else None if default is None else str(default)
    shown = default not in (None, "")
    return click.option(
        f"--{flag}", name, metavar=_metavar(inner), multiple=multiple, default=text, show_default=shown, help=help_
    )


def _metavar(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _metavar(kind.type)
        case inspect.UnionType():
            return _metavar(kind.types[0])
        case inspect.ListType() | inspect.VarTupleType():
            return _metavar(kind.item_type)
        case inspect.LiteralType():
            return f"[{'|'.join(map(str, kind.values))}]"
        case inspect.IntType():
            return "N"
        case inspect.FloatType():
            return "X"
    return "TEXT"

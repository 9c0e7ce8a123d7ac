"""From an options model to a typer command: each field becomes a flag, and the help says which variable it also is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from embedq.option_base import ENV_PREFIX, Options, is_tuple


def with_options(options: type[Options]) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Give a command function `f(..., options)` the flags of `options`.

    The function's other parameters stay the command's arguments. Its return value is the exit status.
    """

    def decorate(function: Callable[..., int]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "options"]
        names = list(options.model_fields)

        def command(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            loaded = options.load(given)
            raise typer.Exit(function(**arguments, options=loaded))

        parameters = [*own, *(_parameter(options, name) for name in names)]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        return command

    return decorate


def _parameter(options: type[Options], name: str) -> inspect.Parameter:
    field = options.model_fields[name]
    flags = options.flag(name).split(",")
    kind: Any
    metavar: str | None
    if _is_flag(field):
        kind, metavar = bool | None, None
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    elif is_tuple(field.annotation):
        kind, metavar = list[str] | None, _metavar(field.annotation) + ",..."
    else:
        # Text here, whatever the field's type: pydantic reads it, as it reads the variable and the file.
        kind, metavar = str | None, _metavar(field.annotation)
    option = typer.Option(
        *flags, help=_help(name, field), metavar=metavar, show_default=False, rich_help_panel=_panel(options, name)
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _is_flag(field: FieldInfo) -> bool:
    return field.annotation is bool or bool in get_args(field.annotation)


def _metavar(annotation: Any) -> str:
    members = [_bare(member) for member in (annotation, *get_args(annotation))]
    for member in members:
        if get_origin(member) is Literal:
            rest = [m.__name__ for m in members if isinstance(m, type) and m is not type(None)]
            return "|".join([*map(str, get_args(member)), *map(str.upper, rest)])
        if isinstance(member, type) and issubclass(member, Enum):
            return "|".join(value.value for value in member)
    for member in members:
        if member in (int, float, str):
            return str(member.__name__).upper().replace("STR", "TEXT")
        if isinstance(member, type) and member.__name__ == "Path":
            return "PATH"
    return "TEXT"


def _bare(annotation: Any) -> Any:
    """`int` of `Annotated[int, ...]`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _help(name: str, field: FieldInfo) -> str:
    parts = [field.description or ""]
    default = field.default
    if default not in (None, PydanticUndefined, (), "") and not isinstance(default, bool):
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        if shown != ".":
            parts.append(f"[default: {shown}]")
    parts.append(f"[{ENV_PREFIX}{name.upper()}]")
    return " ".join(parts)


def _panel(options: type[Options], name: str) -> str | None:
    """Group long lists of flags by the model that introduces them."""
    for base in reversed(options.__mro__):
        if base is not options and name in getattr(base, "__annotations__", {}) and issubclass(base, Options):
            title = (base.__doc__ or "").strip().rstrip(".")
            return title if title and not base.__name__.startswith("_") else PANELS.get(base.__name__)
    return None


PANELS = {
    "_BrokerFields": "Queue",
    "_MetricsFields": "Metrics",
    "_EngineFields": "Model and engine",
    "_WorkerFields": "Worker processes",
}

"""What the options of all commands share. Command line flags, `EMBEDQ_*` variables and keys of `embedq.toml` are three
doors to the same fields; a flag wins over a variable, a variable over the file.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from embedq_broker.settings import BrokerSettings
from embedq_schemas.errors import UsageError
from embedq_worker.engine.settings import EngineSettings
from embedq_worker.settings import WorkerSettings
from pydantic import ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

ENV_PREFIX = "EMBEDQ_"
TOML_FILE = "embedq.toml"
# Names of types hold commas of their own: `timestamp[us, tz=UTC]`.
_COMMA = re.compile(r",(?![^\[(<]*[\])>])")
_OTHER_VARIABLES = ("EMBEDQ_FAULTS", "EMBEDQ_TEST_")
"""Variables read elsewhere: by the fault points and by the tests."""


class Options(BaseSettings):
    """Base of every command's options."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, toml_file=TOML_FILE, extra="ignore", frozen=True, enable_decoding=False
    )

    #: Fields whose flag is not their name.
    flags: ClassVar[dict[str, str]] = {
        "redis_url": "--redis",
        "output": "--output,-o",
        "model": "--model,-m",
        "output_roots": "--output-root",
        "id_field": "--id",
        "text_field": "--text",
        "run": "--run",
    }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: Any, info: Any) -> Any:
        """Lists come from variables as comma-separated text."""
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, str) and is_tuple(annotation):
            return [part.strip() for part in _COMMA.split(value) if part.strip()]
        return value

    @classmethod
    def load(cls, given: dict[str, Any]) -> typing.Self:
        """Options from what the command line gave, the environment and the file; raises UsageError.

        None in `given`, or an empty list, means that the flag was not given.
        """
        _check_toml_keys()
        _warn_of_unknown_variables()
        # A list is comma-separated text through every door; a flag may be repeated besides.
        texts = {name: ",".join(value) if isinstance(value, list | tuple) else value for name, value in given.items()}
        given = {name: text for name, text in texts.items() if text is not None and given[name] not in ([], ())}
        try:
            return cls(**given)
        except ValidationError as error:
            raise UsageError(cls._complaint(error, given)) from None
        except ValueError as error:
            # A file that is not TOML, or a variable that is not of its field's form.
            raise UsageError(f"{TOML_FILE} or an {ENV_PREFIX}* variable cannot be read: {error}") from None

    @classmethod
    def _complaint(cls, error: ValidationError, given: dict[str, Any]) -> str:
        """One sentence about the first wrong value, naming the door it came through."""
        first, *others = error.errors(include_url=False)
        name = str(first["loc"][0])
        alternatives = [other["msg"] for other in others if other["loc"][:1] == first["loc"][:1]]
        message = " or ".join(dict.fromkeys(map(_plainly, (first["msg"], *alternatives)))).replace(
            " or must be ", " or "
        )
        if name in given:
            door = cls.flag(name).partition(",")[0]
        elif (variable := ENV_PREFIX + name.upper()) in os.environ:
            door = variable
        else:
            door = f"{name} in {TOML_FILE}"
        if message.startswith(f"{door} "):
            return message
        clause = message if message.startswith("must") else f"is refused: {message}"
        return f"{door} {clause}, found {str(first.get('input'))[:80]!r}"

    @classmethod
    def flag(cls, name: str) -> str:
        """The flag of a field, with its short form after a comma."""
        return cls.flags.get(name, "--" + name.replace("_", "-"))


def _plainly(message: str) -> str:
    """pydantic's words as a clause about a flag."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    message = re.sub(r"<[\w.]+: ('[^']*')>", r"\1", message)  # a member of an enumeration, as Python writes it
    return message.replace("Input should be", "must be", 1).replace("String should", "must", 1)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Raise a value that a component's own model refuses as UsageError."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        where = f"{Options.flag(name).partition(',')[0]}: " if name else ""
        raise UsageError(f"{where}{_plainly(first['msg'])}") from None


def is_tuple(annotation: Any) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(is_tuple(member) for member in typing.get_args(annotation))
    return typing.get_origin(annotation) is tuple


def _check_toml_keys() -> None:
    """A misspelt key must not be silently without effect."""
    try:
        with open(TOML_FILE, "rb") as file:
            content = tomllib.load(file)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"{TOML_FILE} cannot be read: {error}") from None
    if tables := [name for name, value in content.items() if isinstance(value, dict)]:
        raise UsageError(f"{TOML_FILE} has a table [{tables[0]}]; keys stand at the top, for every command alike")
    known = {name for command in ALL_OPTIONS for name in command.model_fields}
    if unknown := sorted(set(content) - known):
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{TOML_FILE} has a key that no command knows: {', '.join(unknown)}{hint}")


def _warn_of_unknown_variables() -> None:
    """A misspelt variable must not be silently without effect; but others may use the prefix, so it is no error."""
    known = {ENV_PREFIX + name.upper() for command in ALL_OPTIONS for name in command.model_fields}
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and name not in known and not name.startswith(_OTHER_VARIABLES):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            print(f"note: {name} is no variable of embedq{hint}", file=sys.stderr)


ALL_OPTIONS: list[type[Options]] = []
"""The options of every command: keys of `embedq.toml` and variables that none of them has are misspelt."""


def register(*commands: type[Options]) -> None:
    """Make commands' options known. Fields without a description get that of the component they belong to."""
    for options in commands:
        ALL_OPTIONS.append(options)
        for base in (BrokerSettings, WorkerSettings):
            bare = [name for name, field in options.model_fields.items() if not field.description]
            _inherit(options, base, tuple(name for name in bare if name in base.model_fields))
        for name, source in EngineSettings.model_fields.items():
            target = "engine" if name == "kind" else name
            if target in options.model_fields and not options.model_fields[target].description:
                options.model_fields[target].description = source.description


def _inherit(options: type[Options], base: type[Any], names: tuple[str, ...]) -> None:
    """Describe fields of `options` as the component's own settings model does, so that each text stands once."""
    for name in names:
        source = base.model_fields[name]
        options.model_fields[name].description = source.description

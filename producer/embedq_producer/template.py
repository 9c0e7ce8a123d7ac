"""`"{title}\\n\\n{body}"`: a text made of several fields."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Self

from embedq_schemas.errors import UsageError


@dataclass(frozen=True)
class Template:
    """Literal text around the values of fields. `{{` and `}}` stand for braces; nothing but field names is allowed."""

    source: str
    parts: tuple[tuple[str, str | None], ...]
    """Literal text, each followed by a field's name or, in the end, by None."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """Raises UsageError where `source` is no template of at least one field."""
        parts: list[tuple[str, str | None]] = []
        try:
            for literal, field, spec, conversion in Formatter().parse(source):
                if spec or conversion:
                    raise UsageError(f"--template takes field names alone, found a format in {{{field}...}}")
                if field is not None and (not field.strip() or any(mark in field for mark in "[]!:")):
                    raise UsageError(f"--template takes field names alone, found {{{field}}}")
                parts.append((literal, field))
        except ValueError as error:
            raise UsageError(f"--template cannot be read: {str(error).lower()}") from None
        if not any(field for _, field in parts):
            raise UsageError("--template names no field; write the fields' names in braces, as in '{title} {body}'")
        return cls(source, tuple(parts))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, each once."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

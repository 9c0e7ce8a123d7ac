"""Where in a corpus a reader stands: the one value a killed producer needs to go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from embedq_schemas.errors import CodecError

_FIELDS = ("file", "offset", "line", "ordinal", "chunks")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How much of the corpus lies before this point. Always between two documents, or at the end of a file."""

    file: int
    """Files of the corpus before the one this point lies in."""
    offset: int
    """Bytes of this file before this point, decompressed, a byte order mark included; rows where it is a table."""
    line: int
    """Lines, elements or rows of this file before this point, blank ones included; the next one is `line + 1`."""
    ordinal: int
    """Documents of all files before this point, bad ones included."""
    chunks: int = 0
    """Chunks that long documents before this point were cut into, beyond one each."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CodecError(f"A corpus position's {name} must be an integer >= 0, found {value!r}.")

    @property
    def next_ordinal(self) -> int:
        """What the next document, or its first chunk, takes."""
        return self.ordinal + self.chunks

    def to_json(self) -> str:
        """One JSON object of the fields, `chunks` if there are any, without whitespace; `from_json` is its inverse."""
        fields = asdict(self)
        if not self.chunks:
            del fields["chunks"]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, source: str) -> Self:
        """Read what `to_json` wrote; raises CodecError on anything else."""
        try:
            fields = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise CodecError(f"A corpus position is not JSON: {error}.") from error
        if not isinstance(fields, dict) or sorted({"chunks": 0} | fields) != sorted(_FIELDS):
            raise CodecError(f"A corpus position must be a JSON object of {', '.join(_FIELDS)}.")
        return cls(**fields)


START = Position(file=0, offset=0, line=0, ordinal=0)

"""Where in a corpus a reader stands: the one value a killed producer needs to go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Self

from embedq_schemas.errors import CodecError

_FIELDS = ("file", "offset", "line", "ordinal", "chunks", "sent")
_OPTIONAL = ("chunks", "sent")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How much of the corpus lies before this point: between two documents, two chunks, or at the end of a file."""

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
    sent: int = 0
    """Chunks and bad documents behind this point that are done: where many documents follow, or a long one is cut."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CodecError(f"A corpus position's {name} must be an integer >= 0, found {value!r}.")

    @property
    def next_ordinal(self) -> int:
        """What the next document or chunk takes."""
        return self.ordinal + self.chunks + self.sent

    @property
    def in_file(self) -> Position:
        """The same place, as a reader knows it that cuts nothing."""
        return replace(self, chunks=0, sent=0)

    def to_json(self) -> str:
        """One JSON object of the fields, `chunks` and `sent` if there are any, without whitespace; see `from_json`."""
        fields = {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, source: str) -> Self:
        """Read what `to_json` wrote; raises CodecError on anything else."""
        try:
            fields = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise CodecError(f"A corpus position is not JSON: {error}.") from error
        if not isinstance(fields, dict) or sorted(dict.fromkeys(_OPTIONAL, 0) | fields) != sorted(_FIELDS):
            raise CodecError(f"A corpus position must be a JSON object of {', '.join(_FIELDS)}.")
        return cls(**fields)


START = Position(file=0, offset=0, line=0, ordinal=0)

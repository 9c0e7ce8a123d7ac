"""Whatever bytes a file holds: no exception, every ordinal accounted for once, and the same blocks after any stop."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

import pytest
from embedq_producer.blocks import CorpusBlock, ReadOptions
from embedq_producer.corpus import corpus_of_stream
from embedq_producer.formats import Format, of_content, packed_with
from embedq_producer.position import START, Position
from embedq_producer.reader import read_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENS = {
    Format.JSON: [b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"null", b'"id"', b'"text"', b'{"text":"a"}', b",",
                  b'{"id":"b","text":"]"},', b'{"id":1,"text":"x","m":{"n":2}},'],
    Format.CSV: [b",", b'"', b"\n", b"\r\n", b"a", b'a,"b"\n', b'"x\ny",z\n', b"1,2,3\n", b'","', b"\n\n", b"\r"],
    Format.JSONL: [b"\n", b"{", b"}", b'{"text":"a"}\n', b'{"id":"b","text":"c","m":{"n":"o"}}\n', b'"', b" "],
    Format.TEXT: [b"\n", b"\r", b"a line\n", b" ", b"\t"],
}  # fmt: skip
OPENINGS = {Format.JSON: b"[", Format.CSV: b"id,text\n"}
OPTIONS = st.builds(
    lambda count, size, longest, nested: ReadOptions(
        block_documents=count, block_bytes=size, max_line_bytes=longest, metadata=("m.n",) if nested else ()
    ),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([1, 30, 1 << 20]),
    st.sampled_from([12, 40, 1 << 20]),
    st.booleans(),
)


class Trickle(io.BytesIO):
    """Gives `step` bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._step if size is None or size < 0 else min(self._step, size))


@pytest.mark.parametrize("kind", TOKENS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_are_documents_and_rejects_and_the_same_ones_after_any_stop(
    kind: Format, data: st.DataObject
) -> None:
    piece = (
        st.sampled_from(TOKENS[kind]) | st.binary(max_size=3) | st.sampled_from(["é", "文", "\ufeff"]).map(str.encode)
    )
    content = OPENINGS.get(kind, b"") + b"".join(data.draw(st.lists(piece, max_size=40)))
    if packed_with(content) or of_content(content) in (Format.PARQUET, Format.ARROW):
        return
    options = data.draw(OPTIONS)

    def read(start: Position = START, step: int = 1 << 20) -> list[CorpusBlock]:
        corpus = corpus_of_stream(cast(BinaryIO, Trickle(content, step)), "fuzz", kind)
        return list(read_corpus(corpus, options=options, start=start))

    blocks = read()
    assert read(step=data.draw(st.sampled_from([1, 2, 5]))) == blocks
    for index, block in enumerate(blocks):
        block.documents.validate(full=True)
        ordinals = block.documents["ordinal"].to_pylist() + [reject.ordinal for reject in block.rejects]
        size = block.end.ordinal - block.start.ordinal
        assert len(set(ordinals)) == len(ordinals) == size - block.duplicates
        assert all(block.start.ordinal <= ordinal < block.end.ordinal for ordinal in ordinals)
        assert read(start=block.end) == blocks[index + 1 :]

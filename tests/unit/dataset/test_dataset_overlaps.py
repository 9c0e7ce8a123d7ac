"""Which files may hold doubled rows: those that share an ordinal with another, and no others."""

from __future__ import annotations

from embedq_schemas.manifest import PublishedFile
from hypothesis import given
from hypothesis import strategies as st

from embedq.dataset.compaction import _overlapping

ORDINALS = st.sets(st.integers(0, 25), min_size=1, max_size=8)


def spans(ordinals: set[int]) -> tuple[int, ...]:
    """Inclusive ranges, flattened, as a manifest has them."""
    firsts = sorted(o for o in ordinals if o - 1 not in ordinals)
    lasts = sorted(o for o in ordinals if o + 1 not in ordinals)
    return tuple(edge for pair in zip(firsts, lasts, strict=True) for edge in pair)


@given(st.lists(ORDINALS, min_size=1, max_size=6))
def test_files_that_share_an_ordinal_are_found(contents: list[set[int]]) -> None:
    files = [
        PublishedFile(token=f"{i:032x}", run="r", rows=len(own), size_bytes=1, tokens=0, ordinals=spans(own))
        for i, own in enumerate(contents)
    ]
    shared = {
        files[i].token
        for i, own in enumerate(contents)
        if any(own & other for j, other in enumerate(contents) if j != i)
    }
    assert _overlapping(files) == shared

"""Where a command is to cut long texts into chunks: the reader of its corpus gets a splitter."""

from __future__ import annotations

from dataclasses import replace

from embedq_producer.blocks import ReadOptions
from embedq_schemas.encoding import EncodingOptions, OnLong
from embedq_schemas.errors import UsageError
from embedq_worker.checkpoint import Checkpoint


def cut_long_texts(options: ReadOptions, encoding: EncodingOptions, checkpoint: Checkpoint) -> ReadOptions:
    """`options` by which a corpus is read as its chunks, where `encoding` asks for chunks; raises UsageError."""
    if encoding.on_long is not OnLong.CHUNK:
        return options
    try:
        from embedq_worker.tokenization import TextTokenizer
        from embedq_worker.tokenization.chunking import Chunker
    except ImportError:
        raise UsageError("--on-long chunk needs a tokenizer; `pip install 'embedq[tokenizer]'` adds it") from None
    tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=checkpoint.max_length)
    return replace(options, splitter=Chunker(tokenizer, encoding))

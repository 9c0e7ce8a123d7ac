"""From questions to vectors: the query prompt, the tokenizer and the engine of a dataset's model, in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from embedq_schemas.encoding import EncodingOptions
from embedq_schemas.errors import EngineError, UsageError
from embedq_worker.checkpoint import Checkpoint
from embedq_worker.engine import EngineSettings, PackedBatch, load_engine
from embedq_worker.tokenization import TextTokenizer, Tokenized
from numpy.typing import NDArray

from embedq.options import named_prompt

_INSTRUCT = re.compile(r"Instruct: .*(\nQuery: ?)", re.DOTALL)


def query_prompt(
    checkpoint: Checkpoint, *, prompt: str | None = None, name: str | None = None, instruction: str | None = None
) -> str:
    """The text before every question: as asked, else the checkpoint's `query` prompt, its default prompt, or nothing.

    `instruction` takes the place of the task in a prompt of the form `Instruct: {task}\\nQuery:`.

    Raises:
        UsageError: more than one is asked for, there is no such prompt, or it takes no instruction.
    """
    if sum(given is not None for given in (prompt, name, instruction)) > 1:
        raise UsageError("--prompt, --prompt-name and --instruction exclude each other")
    if prompt is not None:
        return prompt
    if name is not None:
        return named_prompt(checkpoint.prompts, name)
    own = checkpoint.prompts.get("query", checkpoint.prompts.get(checkpoint.default_prompt_name or "", ""))
    if instruction is None:
        return own
    form = _INSTRUCT.fullmatch(own)
    if form is None:
        raise UsageError(f"the model's query prompt {own!r} takes no instruction; give the whole text with --prompt")
    return f"Instruct: {instruction}{form[1]}"


def embed_questions(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    questions: Sequence[str],
    *,
    prompt: str = "",
    encoding: EncodingOptions | None = None,
) -> NDArray[np.float32]:
    """Unit vectors of `questions`: float32 [n, dimensions], comparable with a dataset made with `encoding`.

    Raises:
        UsageError: a question cannot be tokenized.
        ModelError: the model cannot run as asked.
        EngineError: the forward pass fails.
    """
    encoding = encoding or EncodingOptions()
    tokenizer = TextTokenizer.load(checkpoint.tokenizer_file, max_length=checkpoint.max_length)
    tokenized = tokenizer.encode_as(pa.array(questions, pa.string()), encoding, prompt=prompt)
    for row, message in tokenized.errors.items():
        raise UsageError(f"question {row + 1} cannot be tokenized: {message}")
    engine = load_engine(checkpoint, settings)
    try:
        parts = [
            engine.encode(batch, dimensions=encoding.dimensions)
            for batch in _batches(tokenized, engine.max_batch_tokens)
        ]
    finally:
        engine.close()
    vectors = np.concatenate(parts)
    if not np.isfinite(vectors).all():
        raise EngineError("the vector of a question holds NaN or infinity; try --dtype float32")
    return vectors


def _batches(tokenized: Tokenized, max_tokens: int) -> Iterator[PackedBatch]:
    """At most `max_tokens` tokens a batch, and at least one question."""
    offsets, start, count = tokenized.offsets, 0, len(tokenized.offsets) - 1
    while start < count:
        end = max(start + 1, int(np.searchsorted(offsets, offsets[start] + max_tokens, side="right")) - 1)
        yield PackedBatch(tokenized.input_ids[offsets[start] : offsets[end]], offsets[start : end + 1] - offsets[start])
        start = end

"""Clients from PyPI, unmodified, against a real gateway."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai import OpenAIEmbedding
from stack import Stack

from embedq import AsyncClient

TEXTS = ["a queue of documents", "Wörter und Sätze", "文章を埋め込む", "the last one 😀"]
ALIAS = "text-embedding-3-small"
README = Path(__file__).parents[3] / "README.md"


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
def expected(stack: Stack) -> np.ndarray:
    """The same texts through the queue itself."""

    async def embed() -> np.ndarray:
        async with AsyncClient(stack.server.url, "default") as queue:
            return await queue.embed(TEXTS, timeout_s=60)

    return asyncio.run(embed())


def assert_same(found: object, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found, np.float32), expected, atol=2e-3)


def test_openai_gets_the_queues_vectors_in_order_with_exact_usage(
    client: openai.OpenAI, stack: Stack, expected: np.ndarray
) -> None:
    # The client asks for base64 by itself and turns it into numbers.
    answer = client.embeddings.create(model=ALIAS, input=TEXTS)
    assert answer.model == ALIAS
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    assert_same([item.embedding for item in answer.data], expected)
    singly = sum(client.embeddings.create(model=ALIAS, input=text).usage.prompt_tokens for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == singly


def test_openai_float_and_base64_are_the_same_numbers(client: openai.OpenAI, stack: Stack) -> None:
    as_text = stack.embed(TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    decoded = np.frombuffer(base64.b64decode(as_text), "<f4")
    numbers = client.embeddings.create(model=ALIAS, input=TEXTS[0], encoding_format="float").data[0].embedding
    assert_same(numbers, decoded)


def test_openai_dimensions_are_cut_and_normalised(client: openai.OpenAI, expected: np.ndarray) -> None:
    answer = client.embeddings.create(model=ALIAS, input=TEXTS, dimensions=8)
    cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    assert_same([item.embedding for item in answer.data], cut)


def test_openai_async_clients_share_the_gateway(stack: Stack, expected: np.ndarray) -> None:
    async def embed() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused") as client:
            calls = (client.embeddings.create(model=ALIAS, input=text) for text in TEXTS * 8)
            return [answer.data[0].embedding for answer in await asyncio.gather(*calls)]

    assert_same(asyncio.run(embed()), np.tile(expected, (8, 1)))


def test_openai_errors_name_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=ALIAS, input=["short", "long " * 200])
    assert refused.value.param == "input[1]"
    assert refused.value.code == "too_long"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="gpt-9", input="a")
    assert unknown.value.code == "model_not_found"


def test_openai_lists_the_model_and_its_alias(client: openai.OpenAI, stack: Stack) -> None:
    assert [model.id for model in client.models.list()] == [stack.model.name, ALIAS]
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_openai_files_and_batches_run_from_upload_to_download(client: openai.OpenAI, expected: np.ndarray) -> None:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": ALIAS, "input": TEXTS[i % 4]},
        }
        for i in range(40)
    ]
    lines[7]["body"] = {"model": ALIAS, "input": TEXTS, "encoding_format": "base64"}
    lines[9]["body"] = {"model": ALIAS, "input": "long " * 200}
    lines[11]["body"] = {"model": "gpt-9", "input": "a"}
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    upload = client.files.create(file=("corpus.jsonl", io.BytesIO(content)), purpose="batch")
    assert (upload.filename, upload.bytes, upload.purpose) == ("corpus.jsonl", len(content), "batch")
    assert client.files.content(upload.id).content == content
    batch = client.batches.create(
        input_file_id=upload.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"night": "7"}
    )
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status == "completed":
            break
        time.sleep(0.1)
    assert batch.status == "completed"
    assert batch.metadata == {"night": "7"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 38, 2)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert [line["custom_id"] for line in output] == [f"r{i}" for i in range(40) if i not in (9, 11)]
    assert {line["custom_id"]: line["response"]["body"]["error"]["code"] for line in errors} == {
        "r9": "too_long",
        "r11": "model_not_found",
    }
    for line in output:
        vectors = [item["embedding"] for item in line["response"]["body"]["data"]]
        if line["custom_id"] == "r7":
            rows = np.stack([np.frombuffer(base64.b64decode(text), "<f4") for text in vectors])
            assert_same(rows, expected)
        else:
            assert_same(vectors[0], expected[int(line["custom_id"][1:]) % 4])
    assert upload.id in [file.id for file in client.files.list(purpose="batch")]
    assert batch.id in [found.id for found in client.batches.list(limit=1)]
    assert client.files.delete(upload.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(upload.id)


def test_langchain_embeds_documents_and_queries(stack: Stack, expected: np.ndarray) -> None:
    # By itself it sends ids of OpenAI's tokenizer, whose files it fetches from the network; they mean nothing to
    # another model, so every user of an OpenAI-compatible server switches this off.
    embeddings = OpenAIEmbeddings(
        model=ALIAS, base_url=f"{stack.url}/v1", api_key="unused", check_embedding_ctx_length=False
    )
    assert_same(embeddings.embed_documents(TEXTS), expected)
    assert_same(embeddings.embed_query(TEXTS[2]), expected[2])


def test_llama_index_embeds_texts(stack: Stack, expected: np.ndarray) -> None:
    embedding = OpenAIEmbedding(model=ALIAS, api_base=f"{stack.url}/v1", api_key="unused")
    assert_same(embedding.get_text_embedding_batch(TEXTS), expected)
    assert_same(embedding.get_query_embedding(TEXTS[1]), expected[1])


def test_hugging_face_speaks_to_the_tei_route(stack: Stack, expected: np.ndarray) -> None:
    client = InferenceClient(f"{stack.url}/embed")
    assert_same(client.feature_extraction(TEXTS[3]), expected[3:])
    assert_same(client.feature_extraction("long " * 200, truncate=True, normalize=True).shape, np.array([1, 32]))
    with_prompt = client.feature_extraction(TEXTS[0], prompt_name="query")
    assert_same(with_prompt[0], stack.embed(TEXTS[0], input_type="query")["data"][0]["embedding"])
    assert np.abs(with_prompt - expected[0]).max() > 0.01


def test_unnormalised_vectors_are_what_tei_clients_ask_for(stack: Stack, expected: np.ndarray) -> None:
    raw = np.array(stack.post("/embed", json={"inputs": TEXTS, "normalize": False}).json())
    norms = np.linalg.norm(raw, axis=1, keepdims=True)
    assert np.abs(norms - 1).max() > 0.01
    assert_same(raw / norms, expected)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_readmes_curl_examples_work(stack: Stack) -> None:
    section = README.read_text().partition("\n## Over HTTP\n")[2].partition("\n## ")[0]
    commands = [command.replace("\\\n", "") for command in re.findall(r"curl (?:[^\n\\]|\\\n)*", section)]
    assert len(commands) >= 2
    for command in commands:
        here = command.replace("localhost:8080", stack.url.removeprefix("http://"))
        here = here.replace("Qwen/Qwen3-Embedding-0.6B", stack.model.name)
        done = subprocess.run(
            ["bash", "-c", here.replace("curl ", "curl -sS --fail-with-body ", 1)], capture_output=True
        )
        assert done.returncode == 0, (here, done.stdout, done.stderr)
        assert json.loads(done.stdout)

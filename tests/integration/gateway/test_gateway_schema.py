"""The OpenAPI document is true: whatever fits it, or does not, is answered as it says, and never with a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from stack import Gateway, Stack

WITHOUT_INPUT = ("GET /v1/models", "GET /info", "GET /model", "GET /health", "GET /ready", "GET /metrics")
OPERATIONS = (
    "POST /v1/embeddings",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "POST /embed",
    "GET /info",
    "GET /model",
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "DELETE /v1/files/{file_id}",
    "POST /v1/batches",
    "GET /v1/batches",
    "GET /v1/batches/{batch_id}",
    "POST /v1/batches/{batch_id}/cancel",
    "GET /health",
    "GET /ready",
    "GET /metrics",
)


KEY = "key-of-the-schema-tests"


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """With an API key, so that what happens without one is tried, too."""
    with stack.another(data=tmp_path_factory.mktemp("data"), EMBEDQ_API_KEYS=KEY) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Any:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


def test_every_operation_is_tried(gateway: Gateway) -> None:
    paths = gateway.get("/openapi.json").json()["paths"]
    assert {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods} == set(OPERATIONS)


def test_without_keys_no_operation_asks_for_one(stack: Stack) -> None:
    document = stack.get("/openapi.json").json()
    assert "securitySchemes" not in document["components"]
    assert '"401"' not in stack.get("/openapi.json").text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fits_the_schema_is_answered_as_documented(api: Any, operation: str) -> None:
    # A schema cannot know which prompts, models, files and dimensions there are.
    call(api, operation, GenerationMode.POSITIVE, [positive_data_acceptance])


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in WITHOUT_INPUT])
def test_what_breaks_the_schema_is_refused_as_documented(api: Any, operation: str) -> None:
    # Unknown query parameters and headers are ignored, as everywhere; unknown fields of a body are not.
    ignored = [negative_data_rejection] if operation.startswith("GET") else []
    call(api, operation, GenerationMode.NEGATIVE, ignored)


def call(api: Any, operation: str, mode: GenerationMode, excluded: list[Any]) -> None:
    method, path = operation.split(" ")

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=excluded, timeout=60)

    answered()

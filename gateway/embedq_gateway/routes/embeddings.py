"""`POST /v1/embeddings` and `GET /v1/models`, as OpenAI's API has them."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from embedq_gateway.answers import embeddings_body, to_json
from embedq_gateway.body import off_loop
from embedq_gateway.errors import ApiError
from embedq_gateway.inputs import check_model, embeddings_request, read_request
from embedq_gateway.routes.common import Tenant, TheGateway
from embedq_gateway.spec import EMBEDDINGS_REQUEST, EMBEDS, errors, json_body
from embedq_gateway.watch import ServedModel

router = APIRouter()


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or float32 little-endian in base64.")


class Usage(BaseModel):
    prompt_tokens: int = Field(description="Tokens the model has seen, special ones and prompt included.")
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """Vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """The model of the queue."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "embedq"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingsAnswer,
    responses=errors(*EMBEDS),
    openapi_extra=json_body(EMBEDDINGS_REQUEST),
)
async def create_embeddings(request: Request, tenant: Tenant, gateway: TheGateway) -> Response:
    """Embed a text, a list of texts, a list of token ids, or a list of such lists."""
    async with gateway.bodies.json(request) as body:
        asked = await off_loop(len(body), lambda: embeddings_request(body))
        model = gateway.embedder.model()
        aliases = gateway.settings.model_alias
        inputs, options = await off_loop(len(body), lambda: read_request(asked, model, gateway.limits, aliases))
        vectors, tokens = await gateway.embedder.embed(request, inputs, options)
    content = await off_loop(
        vectors.nbytes, lambda: to_json(embeddings_body(vectors, tokens, asked.model, as_base64=asked.base64))
    )
    return Response(content, media_type="application/json")


@router.get("/v1/models", response_model=ModelList, responses=errors(401, 503))
async def list_models(tenant: Tenant, gateway: TheGateway) -> ModelList:
    """The served model and its aliases."""
    model = gateway.embedder.model()
    return ModelList(data=[Model(id=name) for name in dict.fromkeys((model.id, *gateway.settings.model_alias))])


@router.get("/v1/models/{model_id:path}", response_model=Model, responses=errors(401, 404, 503))
async def get_model(model_id: str, tenant: Tenant, gateway: TheGateway) -> Model:
    """One of the names the model is served under."""
    model: ServedModel = gateway.embedder.model()
    try:
        check_model(model_id, model, gateway.settings.model_alias)
    except ApiError as error:
        error.param = "model_id"
        raise
    return Model(id=model_id)

"""text-embeddings-inference's routes, for clients that speak it; and those of jina-embedding-server beside them."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, RootModel
from starlette.responses import Response

from embedq_gateway.answers import to_json
from embedq_gateway.body import off_loop
from embedq_gateway.inputs import read_request, tei_request
from embedq_gateway.routes.common import Tenant, TheGateway
from embedq_gateway.spec import EMBEDS, TEI_REQUEST, errors, json_body

router = APIRouter()


class Vectors(RootModel[list[list[float]]]):
    """One vector per input, in their order."""


class Info(BaseModel):
    """What is served, and the limits of a request."""

    model_id: str
    model_sha: str | None = Field(description="Revision of the model repository, where it has one.")
    model_fingerprint: str = Field(description="Equal fingerprints give equal vectors.")
    embedding_dimension: int
    prompts: list[str] = Field(description="Names for `prompt_name`.")
    max_input_length: int = Field(description="Tokens per text, special ones included.")
    max_client_batch_size: int = Field(description="Texts per request.")
    max_concurrent_requests: int
    auto_truncate: bool = Field(description="What happens to a longer text where `truncate` is not given.")
    version: str


@router.post("/embed", response_model=Vectors, responses=errors(*EMBEDS), openapi_extra=json_body(TEI_REQUEST))
async def embed(request: Request, tenant: Tenant, gateway: TheGateway) -> Response:
    """Embed `inputs`: a text or a list of texts."""
    async with gateway.bodies.json(request) as body:
        asked = await off_loop(len(body), lambda: tei_request(body))
        model = gateway.embedder.model()
        aliases = gateway.settings.model_alias
        inputs, options = await off_loop(len(body), lambda: read_request(asked, model, gateway.limits, aliases))
        vectors, _ = await gateway.embedder.embed(request, inputs, options, param="inputs")
    content = await off_loop(vectors.nbytes, lambda: to_json(list(vectors)))
    return Response(content, media_type="application/json")


@router.get("/info", response_model=Info, responses=errors(401, 503))
@router.get("/model", response_model=Info, responses=errors(401, 503))
async def info(tenant: Tenant, gateway: TheGateway) -> Info:
    """The served model and the limits of a request."""
    model, settings = gateway.embedder.model(), gateway.settings
    return Info(
        model_id=model.id,
        model_sha=model.revision or None,
        model_fingerprint=model.fingerprint,
        embedding_dimension=model.dimension,
        prompts=sorted(model.prompts),
        max_input_length=model.max_length,
        max_client_batch_size=settings.max_inputs,
        max_concurrent_requests=settings.max_in_flight,
        auto_truncate=False,
        version=version("embedq"),
    )

"""The HTTP application: OpenAI endpoints, health and metrics."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from engine.credentials import Keys
from meta_server.answers import Answers
from meta_server.errors import Failure, FailureKind, RequestFailed
from meta_server.frontend import Frontend
from meta_server.openai.api_keys import ApiKeys
from meta_server.openai.body_limit import BodyLimit
from meta_server.openai.chat import ChatRenderer, chat_requests
from meta_server.openai.completions import CompletionRenderer, completion_requests
from meta_server.openai.errors import bad_body, error_response, on_http_exception
from meta_server.openai.farewell import Farewell
from meta_server.openai.logprobs import TokenNames
from meta_server.openai.response import GenerationResponse
from meta_server.openai.schema import ChatBody, CompletionBody, GenerationBody
from meta_server.validation import check_request_id


def create_app(frontend: Frontend, keys: Keys | None = None) -> FastAPI:
    """Every error body has OpenAI's form; see `meta_server.openai.errors`. `keys`: one of them is asked for."""
    app = FastAPI(title="Sluice", docs_url="/docs", redoc_url=None)
    validator = frontend.validator
    names = TokenNames(validator.tokenizer)
    card = {
        "id": validator.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sluice",
        "max_model_len": validator.max_model_len,
    }

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        call_id = _call_id(body, request)
        answers = Answers(frontend, await completion_requests(frontend, body, call_id))
        renderer = CompletionRenderer(body, call_id, validator.name, names)
        return GenerationResponse(answers, renderer, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        call_id = _call_id(body, request)
        answers = Answers(frontend, await chat_requests(frontend, body, call_id))
        renderer = ChatRenderer(body, call_id, validator.name, names)
        return GenerationResponse(answers, renderer, bool(body.stream))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        validator.check_model(name)
        return card

    @app.get("/health")
    async def health() -> Response:
        if frontend.ready:
            return JSONResponse({"status": "ready"})
        missing = frontend.registry.missing()
        text = f"no complete {missing} group is ready" if missing else "the meta server is shutting down"
        return error_response(Failure(FailureKind.UNAVAILABLE, text))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(frontend.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(RequestFailed)
    async def on_request_failed(request: Request, error: RequestFailed) -> Response:
        frontend.metrics.refused()
        return error_response(error.failure)

    @app.exception_handler(RequestValidationError)
    async def on_bad_body(request: Request, error: RequestValidationError) -> Response:
        frontend.metrics.refused()
        return error_response(bad_body(error))

    app.add_middleware(BodyLimit)
    if keys is not None:
        app.add_middleware(ApiKeys, keys=keys)
    app.add_middleware(Farewell, draining=lambda: frontend.draining)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_http_exception)
    return app


def _call_id(body: GenerationBody, request: Request) -> str:
    """The client's id for this call, from the body or the X-Request-Id header, else a new one. Raises RequestFailed."""
    call_id = body.request_id or request.headers.get("x-request-id")
    if call_id is None:
        return secrets.token_hex(12)
    check_request_id(call_id)
    return call_id

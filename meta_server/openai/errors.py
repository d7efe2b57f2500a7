"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from meta_server.errors import Failure, FailureKind, shown


def error_body(failure: Failure) -> dict[str, Any]:
    return _body(failure.message, failure.kind.openai_type, failure.param, failure.kind.http_status)


def error_response(failure: Failure) -> JSONResponse:
    headers = {"Retry-After": "1"} if failure.kind in (FailureKind.BUSY, FailureKind.UNAVAILABLE) else None
    return JSONResponse(error_body(failure), failure.kind.http_status, headers=headers)


def unauthorized(message: str) -> JSONResponse:
    """401 as OpenAI answers it."""
    body = _body(message, "invalid_request_error", None, "invalid_api_key")
    return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})


def bad_body(error: RequestValidationError) -> Failure:
    """What is wrong with a body that is not JSON or has fields of wrong types; names every field at fault."""
    texts: dict[str, list[str]] = {}
    for item in error.errors():
        kind, location = item["type"], item["loc"]
        if kind == "json_invalid":
            reason = item.get("ctx", {}).get("error", "")
            return Failure(FailureKind.INVALID, f"the body is not JSON: {reason} at character {location[-1]}")
        if len(location) < 2:
            return Failure(FailureKind.INVALID, "the body must be a JSON object, sent as application/json")
        got = "" if kind == "missing" else f" (got {shown(item['input'])})"
        texts.setdefault(str(location[1]), []).append(f"{item['msg']}{got}")
    message = "; ".join(f"{field}: {' or '.join(dict.fromkeys(reasons))}" for field, reasons in texts.items())
    return Failure(FailureKind.INVALID, message, next(iter(texts), None))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, bodies that no JSON parser takes, and our own defects."""
    status, detail = (error.status_code, str(error.detail)) if isinstance(error, HTTPException) else (500, str(error))
    headers = error.headers if isinstance(error, HTTPException) else None
    kind = "not_found_error" if status == 404 else "invalid_request_error" if status < 500 else "internal_error"
    message = f"{request.method} {request.url.path}: {detail}"
    if status == 400:
        cause = error.__cause__
        message = "the body is not JSON, or it is nested too deeply"
        if isinstance(cause, UnicodeDecodeError):
            message = f"the body is not UTF-8: {cause.reason} at byte {cause.start}"
    return JSONResponse(_body(message, kind, None, status), status, headers=headers)


def _body(message: str, kind: str, param: str | None, code: int | str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

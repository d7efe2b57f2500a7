"""Prints one streamed completion as it arrives: text, or token ids where the checkpoint has no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from sluice.v1 import client_pb2, common_pb2

from deploy.client import ClientError


def stream_completion(
    responses: Iterable[client_pb2.GenerateResponse], out: TextIO
) -> tuple[client_pb2.GenerateResponse, str]:
    """Writes text to `out` as it comes, then a line break. Returns the last message and what was written.

    Raises ClientError when the stream ends without a final message.
    """
    last = client_pb2.GenerateResponse()
    said, ids = "", list[int]()
    for last in responses:
        ids.extend(token.id for token in last.tokens)
        said += last.text
        out.write(last.text)
        out.flush()
    if last.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        raise ClientError("the stream ended before the request was finished")
    if not said:
        said = ",".join(map(str, ids))
        out.write(said)
    out.write("\n")
    out.flush()
    return last, said


def summary(last: client_pb2.GenerateResponse) -> str:
    """One line about a finished completion."""
    reason = common_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    usage = last.usage
    return (
        f"[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated, finish: {reason}, "
        f"first token after {usage.ttft_seconds:.2f} s]"
    )

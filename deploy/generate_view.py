"""Prints one streamed completion as it arrives: text, or token ids where the checkpoint has no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from sluice.v1 import client_pb2, common_pb2

from deploy.client import ClientError


def stream_completion(
    responses: Iterable[client_pb2.GenerateResponse], out: TextIO, notes: TextIO
) -> client_pb2.GenerateResponse:
    """Writes text to `out` as it comes and a one-line summary to `notes`. Returns the last message.

    Raises ClientError when the stream ends without a final message.
    """
    last = client_pb2.GenerateResponse()
    text_seen, ids = False, list[int]()
    for last in responses:
        ids.extend(token.id for token in last.tokens)
        if last.text:
            text_seen = True
            out.write(last.text)
            out.flush()
    if last.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED:
        raise ClientError("the stream ended before the request was finished")
    out.write("\n" if text_seen else ",".join(map(str, ids)) + "\n")
    out.flush()
    reason = common_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower()
    usage = last.usage
    notes.write(
        f"[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated, finish: {reason}, "
        f"first token after {usage.ttft_seconds:.2f} s]\n"
    )
    return last

"""Small parts that the answers of both endpoints share."""

from __future__ import annotations

from typing import Any

from sluice.v1 import client_pb2, common_pb2

FINISH: dict[int, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORTED: "abort",
}
"""`finish_reason` of a choice."""


def choice_request_id(call_id: str, index: int, total: int) -> str:
    """The request id of one of `total` choices of a call; the call's own id when there is only one."""
    return call_id if total == 1 else f"{call_id}-{index}"


class Totals:
    """Sums the usage of a call; a prompt with several choices counts once."""

    def __init__(self) -> None:
        self._prompt = self._completion = self._cached = 0

    def add(self, usage: client_pb2.Usage, new_prompt: bool) -> None:
        self._completion += usage.completion_tokens
        if new_prompt:
            self._prompt += usage.prompt_tokens
            self._cached += usage.cached_tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

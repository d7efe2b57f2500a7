"""Clients that ask questions until they are told to stop, and judge every answer."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence

import httpx

from tests.chaos.questions import Question
from tests.chaos.record import Record

REQUEST_TIMEOUT_S = 60.0
"""`runtime.request_timeout_s` of the deployment: no request may live longer."""

_GRACE_S = 20.0  # for a loaded machine
_META_RECOVERY_S = 40.0
_CLEAR_ERRORS = (429, 503, 504)  # busy, nobody left to serve it, its time is over
_CANCELLED = 0.15
_PAUSE_S = 0.2
_RETRY_S = 0.5  # longer after an error


class Clients:
    """`count` threads, each with a random generator of its own, so that a seed asks the same questions again."""

    def __init__(self, url: str, questions: Sequence[Question], record: Record, seed: int, count: int) -> None:
        self._url = url
        self._questions = questions
        self._record = record
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/client/{index}"),), daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the requests under way; one without an end is a violation."""
        self._stopping.set()
        end = time.monotonic() + REQUEST_TIMEOUT_S + 2 * _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._record.violation("a client still waits for the end of its request")

    def _run(self, rng: random.Random) -> None:
        with httpx.Client(base_url=self._url, timeout=httpx.Timeout(REQUEST_TIMEOUT_S + _GRACE_S)) as client:
            while not self._stopping.is_set():
                question = rng.choice(self._questions)
                leave_after = rng.randrange(question.max_tokens + 1) if rng.random() < _CANCELLED else None
                ended = Request(client, question, self._record, leave_after).ask()
                pause_s = rng.expovariate(1 / _PAUSE_S)
                self._stopping.wait(pause_s if ended in ("right", "cancelled") else pause_s + _RETRY_S)


class Request:
    """One streamed completion. `leave_after`: the client disconnects after so many tokens; None = it stays."""

    def __init__(self, client: httpx.Client, question: Question, record: Record, leave_after: int | None) -> None:
        self._client = client
        self._question = question
        self._record = record
        self._leave_after = leave_after
        self._tokens: list[int] = []
        self._id = "without an id"
        self._began = time.monotonic()

    def ask(self) -> str:
        """How it ended: "right", "cancelled", "cut" or "error 503" and the like; violations are recorded."""
        try:
            ended = self._stream()
        except httpx.TimeoutException:
            self._violation(f"no end within {time.monotonic() - self._began:.0f} s")
            ended = "endless"
        except httpx.HTTPError as error:
            ended = "cut"
            if not self._record.meta_was_down(self._began, _META_RECOVERY_S):
                self._violation(f"the connection broke, but the meta server lives: {error!r}")
        self._record.count(ended)
        lived = time.monotonic() - self._began
        if lived > REQUEST_TIMEOUT_S + _GRACE_S:
            self._violation(f"it lived for {lived:.0f} s")
        mistake = self._question.mistake(self._tokens, ended == "right")
        if mistake is not None:
            self._violation(f"wrong answer: {mistake}")
        return ended

    def _stream(self) -> str:
        body = {
            "prompt": list(self._question.prompt),
            "max_tokens": self._question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return self._error(response.status_code, response.read().decode(errors="replace"))
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return "right"
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                self._id = event.get("id", self._id)
                if "error" in event:
                    return self._error(int(event["error"]["code"]), event["error"]["message"])
                for choice in event["choices"]:
                    self._tokens += choice.get("token_ids") or []
                if self._leave_after is not None and len(self._tokens) >= self._leave_after:
                    return "cancelled"
        self._violation("the stream ended without [DONE]")
        return "truncated"

    def _error(self, status: int, text: str) -> str:
        self._record.tell(f"{self._question.name} ended after {len(self._tokens)} tokens with {status}: {text[:300]}")
        if status not in _CLEAR_ERRORS:
            self._violation(f"error {status}: {text[:300]}")
        return f"error {status}"

    def _violation(self, text: str) -> None:
        self._record.violation(f"{self._question.name} ({self._id}) after {len(self._tokens)} tokens: {text}")


def ask_all(url: str, questions: Sequence[Question], record: Record, tries: int, between: Callable[[], None]) -> None:
    """Every question once more, one after the other, with nobody disturbed: each must be answered."""
    with httpx.Client(base_url=url, timeout=httpx.Timeout(REQUEST_TIMEOUT_S + _GRACE_S)) as client:
        for question in questions:
            for _ in range(tries):
                if Request(client, question, record, None).ask() == "right":
                    break
                between()
            else:
                record.violation(f"{question.name} is not answered any more, {tries} times in a row")

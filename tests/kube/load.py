"""Requests to the deployment's Service: one streamed answer, and a steady load of which no request may fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import httpx

from tests.e2e.test_equal_to_transformers import prompt_of
from tests.oracle import Oracle, assert_tokens_match

URL = "http://sluice.sluice:8000"
TIMEOUT_S = 120.0


def plain() -> httpx.Client:
    """In the clear and without a key, as the deployment is at first."""
    return httpx.Client(base_url=URL, timeout=TIMEOUT_S, trust_env=False)


def stream(
    prompt: Sequence[int],
    max_tokens: int,
    seen: list[int] | None = None,
    connect: Callable[[], httpx.Client] = plain,
) -> list[int]:
    """The token ids of one streamed answer, over a connection of its own; `seen` grows with them.

    Raises httpx.HTTPError, or AssertionError when the answer is an error or does not end.
    """
    tokens = [] if seen is None else seen
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with (
        connect() as client,
        client.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as answer,
    ):
        if answer.status_code != 200:
            raise AssertionError(f"status {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return tokens
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            tokens += event["choices"][0].get("token_ids") or []
    raise AssertionError(f"the stream ended without [DONE] after {len(tokens)} tokens")


class Asked:
    """One streamed request on a thread of its own."""

    def __init__(self, prompt: Sequence[int], max_tokens: int, connect: Callable[[], httpx.Client] = plain) -> None:
        self.tokens: list[int] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(prompt, max_tokens, connect))
        self._thread.start()

    def wait_for(self, tokens: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.tokens) < tokens and self._thread.is_alive():
            assert time.monotonic() < deadline, f"only {len(self.tokens)} tokens within {TIMEOUT_S} s"
            time.sleep(0.01)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> list[int]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"no end within {TIMEOUT_S} s, after {len(self.tokens)} tokens"
        if self._failure is not None:
            raise self._failure
        return self.tokens

    def _ask(self, prompt: Sequence[int], max_tokens: int, connect: Callable[[], httpx.Client]) -> None:
        try:
            stream(prompt, max_tokens, self.tokens, connect)
        except BaseException as failure:
            self._failure = failure


class Load:
    """A few clients, each asking one thing after the other while the block runs; every answer must be the oracle's."""

    LENGTHS = (40, 150, 200)
    NEW_TOKENS = 24

    def __init__(self, oracle: Oracle) -> None:
        self._expected = {length: oracle.greedy(prompt_of(length), self.NEW_TOKENS) for length in self.LENGTHS}
        self._ending = threading.Event()
        self._failures: list[str] = []
        self.served = 0
        self._threads = [threading.Thread(target=self._ask, args=(length,)) for length in self.LENGTHS]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        if kind is None:
            assert not self._failures, "\n".join(self._failures)
            assert self.served >= len(self.LENGTHS)

    def wait_for_more(self, answers: int) -> None:
        wanted, deadline = self.served + answers, time.monotonic() + TIMEOUT_S
        while self.served < wanted and not self._failures:
            assert time.monotonic() < deadline, f"fewer than {answers} answers within {TIMEOUT_S} s"
            time.sleep(0.1)

    def _ask(self, length: int) -> None:
        while not self._ending.is_set():
            begun = time.monotonic()
            try:
                assert_tokens_match(stream(prompt_of(length), self.NEW_TOKENS), self._expected[length])
                self.served += 1
            except (httpx.HTTPError, AssertionError) as failure:
                at = time.strftime("%H:%M:%S")
                self._failures.append(f"{at}, {time.monotonic() - begun:.1f} s: {type(failure).__name__}: {failure}")
            self._ending.wait(0.2)

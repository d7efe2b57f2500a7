"""What the tests ask a deployment."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.v1 import client_pb2, common_pb2

from deploy.client import Client

PROMPT = [(7 * i) % 250 + 5 for i in range(300)]


def greedy(client: Client, max_tokens: int) -> Iterator[int]:
    """Tokens of a greedy completion of `PROMPT`, as they come."""
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = client_pb2.GenerateRequest(tokens=client_pb2.TokenIds(ids=PROMPT), sampling=sampling)
    for response in client.generate(request):
        yield from (token.id for token in response.tokens)


def pids(client: Client) -> dict[str, int]:
    """Process ids of the workers that are ready, by worker."""
    return {w.info.worker_id: w.info.pid for w in client.status().workers if w.health == "ready"}

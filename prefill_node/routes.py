"""Where each request's KV goes from this rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from sluice.v1 import worker_pb2

from prefill_node.link import Endpoint, TransferRefused
from prefill_node.steps import OpenRoute

_OPENERS = 4  # hand-shakes under way at once; one with a dead peer takes its whole deadline


class Connector(Protocol):
    """The part of `Publisher` used here."""

    def connect(self, destination: worker_pb2.Destination) -> Endpoint:
        """Blocks for a new peer's hand-shake; raises TransferRefused."""


class Route(NamedTuple):
    """A request's way to decode."""

    endpoint: Endpoint
    generation: int  # of decode's reservation
    cached_tokens: int  # leading prompt tokens decode has already
    begun_again: int = 0  # how often the request has been, after rows were published


class Routes:
    """The routes of the requests this rank knows. Hand-shakes run on threads of their own, so nobody waits for them.

    `open`, `adopt`, `get` and `drop` are called by one thread; a request dropped while its route is being opened gets
    none.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._routes: dict[str, Route | int] = {}  # a number: the attempt under way to open it
        self._openers = ThreadPoolExecutor(_OPENERS, thread_name_prefix="route-opener")

    def open(self, command: OpenRoute, on_opened: Callable[[OpenRoute, Route | str], None]) -> None:
        """Begins to open the route; `on_opened` gets it, or why there is none, on another thread."""
        self._routes[command.request_id] = command.attempt
        destination = command.destination

        def connect() -> Route:
            endpoint = self._connector.connect(destination)
            return Route(endpoint, destination.generation, destination.cached_tokens)

        def report(opened: Future[Route]) -> None:
            if opened.cancelled():
                return
            error = opened.exception()
            if error is None:
                on_opened(command, opened.result())
            else:
                on_opened(command, str(error) if isinstance(error, TransferRefused) else repr(error))

        self._openers.submit(connect).add_done_callback(report)

    def is_wanted(self, command: OpenRoute) -> bool:
        """False when the request of a route was dropped meanwhile."""
        return self._routes.get(command.request_id) == command.attempt

    def adopt(self, command: OpenRoute, route: Route) -> None:
        """Keeps an opened route that is still wanted."""
        self._routes[command.request_id] = route

    def get(self, request_id: str) -> Route | None:
        """None when the request is unknown or its route is not open yet."""
        route = self._routes.get(request_id)
        return route if isinstance(route, Route) else None

    def begin_again(self, request_id: str) -> None:
        """What is published from now on replaces what was published before."""
        if (route := self.get(request_id)) is not None:
            self._routes[request_id] = route._replace(begun_again=route.begun_again + 1)

    def drop(self, request_id: str) -> None:
        """Forgets the request's route; the connection to its peer stays for others."""
        self._routes.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._routes)

    def close(self) -> None:
        self._openers.shutdown(wait=False, cancel_futures=True)

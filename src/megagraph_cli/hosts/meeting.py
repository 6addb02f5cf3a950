"""How hosts find each other: host 0 listens at its address until all others have called."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from megagraph_cli import __version__
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.hosts.address import Hosts, check_own
from megagraph_cli.hosts.link import Closed, Link, Message

_RETRY_S = 0.2
_BACKLOG = 128
"""Callers that may wait at once, strangers among them; one more would be heard of only a second later."""
_HELLO_S = 10.0
"""Whoever calls says who it is within this time, or is no host of ours."""


def welcome(hosts: Hosts, command: str) -> dict[int, Link]:
    """On host 0: links to all other hosts by rank, once all have come.

    The port is free again afterwards, for torchrun. Raises MgraphError: an address or port that cannot be had, hosts
    that were not told the same (2), a host that does not come in time (5).
    """
    check_own(hosts)
    links: dict[int, Link] = {}
    try:
        with _listener(hosts) as listener:
            deadline = time.monotonic() + hosts.join_s
            while len(links) < hosts.count - 1:
                _accept(listener, hosts, command, links, deadline)
                _forget_gone(links)
    except BaseException as error:
        said = error.message if isinstance(error, MgraphError) else "it was interrupted"
        for link in links.values():
            _refuse(link, said)
        raise
    for link in links.values():
        link.send({"kind": "welcome"})
    return links


def _listener(hosts: Hosts) -> socket.socket:
    try:
        return socket.create_server(("", hosts.port), backlog=max(hosts.count, _BACKLOG))
    except OSError as error:
        raise MgraphError(
            f"--rdzv-endpoint {hosts.endpoint}: port {hosts.port} cannot be had here ({error.strerror}); name "
            "a free one on every host"
        ) from error


def _accept(listener: socket.socket, hosts: Hosts, command: str, links: dict[int, Link], deadline: float) -> None:
    """The next caller, if it is one of the hosts that are still missing."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise _missing(hosts, sorted(set(range(1, hosts.count)) - set(links)))
    listener.settimeout(min(left_s, 1.0))
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    link = Link(connection)
    try:
        hello = link.receive(min(_HELLO_S, left_s))
    except Closed:
        link.close()  # somebody else's
        return
    if hello["kind"] != "hello":
        link.close()
        return
    refusal = _difference(hello, hosts, command)
    if refusal is not None:
        _refuse(link, refusal)
        raise MgraphError(refusal)
    rank = int(hello["rank"])
    _forget_gone(links)
    if rank in links or not 0 < rank < hosts.count:
        _refuse(link, f"two hosts say --node-rank {rank}; give each its own")
        return
    links[rank] = link


def _forget_gone(links: dict[int, Link]) -> None:
    """Without the hosts that called and were stopped since: they may be started again."""
    for rank in [rank for rank, link in links.items() if link.gone]:
        links.pop(rank).close()


def _refuse(link: Link, why: str) -> None:
    link.send({"kind": "refused", "message": why})
    link.finish()
    link.close()


def _hello(hosts: Hosts, command: str) -> Message:
    return {"kind": "hello", "rank": hosts.rank, "count": hosts.count, "command": command, "version": __version__}


def _difference(hello: Message, hosts: Hosts, command: str) -> str | None:
    """What the caller was told otherwise than host 0."""
    mine = _hello(hosts, command)
    if set(hello) != set(mine) or not isinstance(hello["rank"], int):
        return f"a host does not speak as mgraph {__version__} does; install the same version on every host"
    for key, called in (("version", "mgraph"), ("command", "mgraph"), ("count", "--nnodes")):
        if hello[key] != mine[key]:
            return (
                f"host {hello['rank']} runs {called} {hello[key]} but host 0 runs {called} {mine[key]}; "
                "run the same command, of the same version, on every host"
            )
    return None


def _missing(hosts: Hosts, ranks: list[int]) -> MgraphError:
    who = f"host {ranks[0]}" if len(ranks) == 1 else "hosts " + ", ".join(map(str, ranks))
    return MgraphError(
        f"{who} did not come to {hosts.endpoint} within {hosts.join_s:.0f} s; run the same command there with "
        f"--node-rank {ranks[0]}, and see that this port can be reached",
        EXIT_WORKER,
    )


def call(hosts: Hosts, command: str) -> Link:
    """On any other host: the link to host 0, once it has all. Raises MgraphError (2, 5), as ``welcome``."""
    deadline = time.monotonic() + hosts.join_s
    while True:
        connection = _connect(hosts, deadline)
        link = Link(connection)
        link.send(_hello(hosts, command))
        try:
            answer = link.receive(hosts.join_s + _HELLO_S)
        except Closed as error:
            link.close()
            if time.monotonic() < deadline:  # it was not listening for us yet
                time.sleep(_RETRY_S)
                continue
            raise MgraphError(f"host 0 at {hosts.endpoint} {error}; look at its own message", EXIT_WORKER) from error
        except BaseException:
            link.close()
            raise
        if answer["kind"] == "welcome":
            return link
        link.close()
        raise MgraphError(f"host 0: {answer.get('message', 'it refused')}")


def _connect(hosts: Hosts, deadline: float) -> socket.socket:
    why = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((hosts.address, hosts.port), timeout=min(left_s, 5.0))
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(_RETRY_S)
            continue
        if connection.getsockname() == connection.getpeername():
            # TCP let us call ourselves: nobody listens there yet.
            with suppress(OSError):
                connection.close()
            time.sleep(_RETRY_S)
            continue
        return connection
    raise MgraphError(
        f"host 0 does not answer at {hosts.endpoint} ({why}) within {hosts.join_s:.0f} s; start the same command there "
        "with --node-rank 0, or correct --rdzv-endpoint",
        EXIT_WORKER,
    )

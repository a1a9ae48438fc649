"""Resolves an engine's host name: a headless Service's name has an address for each pod."""

from __future__ import annotations

import asyncio
import socket

_NO_SUCH_NAME = {socket.EAI_NONAME, socket.EAI_NODATA}


async def resolve(host: str, port: int) -> tuple[str, ...] | None:
    """Return the IP addresses of a host, sorted; empty if there is no such name.

    A host with addresses of both families counts with its IPv4 addresses only, or each engine
    would count twice.

    Returns:
        None if the lookup failed. The addresses known before may still be valid then.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return () if error.errno in _NO_SUCH_NAME else None
    except OSError:
        return None
    except UnicodeError:  # an impossible name, such as one with an empty label
        return ()
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = {str(address[0]) for kind, *_, address in found if kind == family}
        if addresses:
            return tuple(sorted(addresses))
    return ()


def host_and_port(address: str, port: int) -> str:
    """Join an IP address and a port to ``host:port``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

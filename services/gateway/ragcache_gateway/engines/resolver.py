"""The addresses behind an engine's name: a headless Service's name stands for all of its pods."""

from __future__ import annotations

import asyncio
import socket

_NO_SUCH_NAME = {socket.EAI_NONAME, socket.EAI_NODATA}


async def resolve(host: str, port: int) -> tuple[str, ...] | None:
    """IP addresses of host, sorted; none if there is no such name.

    None if nobody could say, which is no reason to believe that those known before are gone. Of a
    host with addresses of both families only the older one's, or it would count twice.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return () if error.errno in _NO_SUCH_NAME else None
    except OSError:
        return None
    except UnicodeError:  # a name that cannot be, such as one with an empty label
        return ()
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = {str(address[0]) for kind, *_, address in found if kind == family}
        if addresses:
            return tuple(sorted(addresses))
    return ()


def host_and_port(address: str, port: int) -> str:
    """An IP address and a port as one text."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

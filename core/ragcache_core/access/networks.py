"""Which addresses the sources of a collection may have.

Authors of a collection choose its URLs, and a pod of the platform reads them. Without a limit, an
author reaches all that this pod reaches: other pods, the node and the cloud's metadata service.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from ragcache_core.errors import InvalidInput

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA_ADDRESSES: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "169.254.169.254",  # most clouds
            "169.254.170.2",  # credentials of AWS tasks
            "169.254.170.23",  # credentials of AWS pods
            "fd00:ec2::254",  # AWS
            "fd00:ec2::23",
            "fd20:ce::254",  # Google
            "100.100.100.200",  # Alibaba
            "192.0.0.192",  # Oracle
            "168.63.129.16",  # Azure's host agent, which has a public address
        ),
    )
)
"""Services that give a cloud machine its credentials."""

_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that are public are in it. Source: RFC 4291 section 2.4, IANA's registry."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Decides whether a source may have an address.

    Public addresses are open. Private, shared, link-local, loopback, multicast and reserved ones
    are closed unless a network of ``allowed`` has them. A metadata service needs an entry of its
    own, with this one address: a wide network never opens it.
    """

    allowed: tuple[Network, ...] = ()

    def allows(self, address: Address) -> bool:
        """Whether a source may have an address."""
        inner = _embedded(address)
        if inner in METADATA_ADDRESSES:
            return any(one.num_addresses == 1 and inner in one for one in self.allowed)
        if any(inner in one for one in self.allowed):
            return True
        if isinstance(inner, ipaddress.IPv6Address) and inner not in _GLOBAL_UNICAST:
            return False
        return inner.is_global and not inner.is_multicast


PUBLIC_ONLY: Final = AddressRules()


def parse_networks(field: str, texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse networks like ``10.0.0.0/8``, or single addresses.

    Raises:
        InvalidInput: A text is no network; the error has this field.
    """
    found: list[Network] = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise InvalidInput(
                field, f"{text!r} is no network", "write networks like 10.1.0.0/16"
            ) from error
    return tuple(found)


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that translators and tunnels make of an IPv6 address, else itself.

    Source: RFC 4291 section 2.5.5, RFC 6052 section 2.1, RFC 3056 section 2.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address
    is_compatible = address in _COMPATIBLE and int(address) > 1  # no loopback and no unspecified
    if address in _NAT64 or is_compatible:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address

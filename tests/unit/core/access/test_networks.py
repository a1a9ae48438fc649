"""Which addresses sources may have."""

from __future__ import annotations

import ipaddress

import pytest

from ragcache_core.access.networks import PUBLIC_ONLY, AddressRules, parse_networks
from ragcache_core.errors import InvalidInput

CLOSED = (
    *("127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "224.0.0.1", "255.255.255.255", "198.18.0.1", "168.63.129.16", "192.0.0.192"),
    *("::1", "::", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1"),
    *("fec0::1", "4000::1", "5f00::1", "fe00::1", "100::1"),
    # Other spellings of IPv4 addresses.
    *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "64:ff9b:1::1"),
)
OPEN = ("93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34", "64:ff9b::5db8:d822")


def allows(rules: AddressRules, address: str) -> bool:
    return rules.allows(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", CLOSED)
def test_addresses_that_are_not_public_are_closed(address: str) -> None:
    assert not allows(PUBLIC_ONLY, address)


@pytest.mark.parametrize("address", OPEN)
def test_public_addresses_are_open(address: str) -> None:
    assert allows(PUBLIC_ONLY, address)


def test_an_allowed_network_is_open() -> None:
    rules = AddressRules(parse_networks("n", ["10.1.0.0/16", "fd12::/16", "::1"]))
    assert all(allows(rules, one) for one in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "::1"))
    assert not any(allows(rules, one) for one in ("10.2.0.1", "fd13::1", "127.0.0.1"))


def test_a_metadata_service_needs_an_entry_of_its_own() -> None:
    wide = AddressRules(parse_networks("n", ["0.0.0.0/0", "::/0"]))
    assert allows(wide, "10.0.0.1")
    for address in ("169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254"):
        assert not allows(wide, address)
    assert allows(AddressRules(parse_networks("n", ["169.254.169.254"])), "169.254.169.254")


@pytest.mark.parametrize("text", ["10.0.0.1/8", "host", "", "10.0.0.0/33"])
def test_what_is_no_network_names_the_field(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no network") as raised:
        parse_networks("--allow-network", [text])
    assert raised.value.field == "--allow-network"

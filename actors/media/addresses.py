"""Which addresses a server may fetch from on behalf of its clients: those of the public internet alone."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE = IPv6Network("::/96")
"""The old form of an IPv4 address within IPv6."""
_LAST_4 = 2**32 - 1


def is_public(text: str) -> bool:
    """True for an address that every host of the internet may name; an address within another one counts too."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return all(_is_public(part) for part in (address, *_within(address)))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_loopback or address.is_unspecified
    )


def _within(address: IPv4Address | IPv6Address) -> list[IPv4Address]:
    """IPv4 addresses that an IPv6 address may lead to."""
    if isinstance(address, IPv4Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in (*_NAT64, _COMPATIBLE)):
        found.append(IPv4Address(int(address) & _LAST_4))
    return [inner for inner in found if inner is not None]

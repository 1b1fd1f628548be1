"""IPv4 and IPv6 addresses: of a network interface, of MASTER_ADDR, and the address on which rank 0 listens."""

import os
import socket

import psutil

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def use_interface(interface: str | None) -> None:
    """Make gloo and NCCL use one network interface, such as "ib0".

    None leaves the choice to them, but gloo uses the loopback if MASTER_ADDR is the loopback or not set.

    Raises:
        ValueError: no such interface has an address.
    """
    if interface is not None:
        interface_addresses(interface)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    elif os.environ.get("MASTER_ADDR", LOOPBACK[0]) in LOOPBACK:
        if "lo" in dict(socket.if_nameindex()).values():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def interface_addresses(interface: str) -> list[str]:
    """Return the addresses of a network interface, IPv4 first, without link-local IPv6 ones.

    Raises:
        ValueError: no such interface has an address; the message lists those that have one.
    """
    families = socket.AF_INET, socket.AF_INET6
    found = {
        name: [e.address for kind in families for e in entries if e.family == kind and e.address[:5] != "fe80:"]
        for name, entries in psutil.net_if_addrs().items()
    }
    if not found.get(interface):
        raise ValueError(
            f"--interface {interface}: no such interface with an IP address on {socket.gethostname()} "
            f"(available: {', '.join(sorted(name for name in found if found[name]))})"
        )
    return found[interface]


def listen_address(master: str, interface: str | None) -> str | None:
    """Return the address on which rank 0 listens, or None for all addresses of the node.

    Args:
        master: MASTER_ADDR, a name or an address, to which the other ranks connect.
        interface: the only interface on which to listen, or None.

    Raises:
        ValueError: `master` has no address, or is not an address of `interface`.
    """
    address = _resolve(master)
    if address.startswith("127.") or address == "::1":
        return address
    if interface is None:
        return None
    own = interface_addresses(interface)
    if address not in own:
        raise ValueError(
            f"--interface {interface} has the address {own[0]} on rank 0's node, but the launcher gave the other ranks "
            f"{master} ({address}): start it with --master_addr {own[0]}"
        )
    return address


def _resolve(name: str) -> str:
    """Return the address of a name, IPv4 if it has both kinds."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR={name} has no address on {socket.gethostname()} ({error.strerror}): give the address of rank "
            "0's node, deepspeed --master_addr ADDRESS or torchrun --master-addr ADDRESS"
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])

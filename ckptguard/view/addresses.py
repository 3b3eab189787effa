"""By which address other nodes reach this one."""

from __future__ import annotations

import ipaddress
import socket
import time

from ckptguard.core.errors import EnvironmentFailedError, UsageError

_ANYWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): never local, so that the default route is asked for
_RETRY_SECONDS = 0.5


def own_address(host: str, port: int, timeout_seconds: float) -> str:
    """The address of this machine on the interface by which it reaches a host. Nothing is sent.

    A machine reaches itself by a loopback address where its own name stands for one (``127.0.1.1`` in Debian's /etc/hosts);
    others do not, so then the address on the way out is taken, unless a loopback address was asked for.

    Raises:
        EnvironmentFailedError: The name stays unknown for so long, or nothing leads there.
    """
    found = _source_address(_resolved(host, port, timeout_seconds), host)
    if not ipaddress.ip_address(found).is_loopback or host == "localhost" or _is_address(host):
        return found
    try:
        return _source_address((socket.AF_INET, (_ANYWHERE, port)), host)
    except EnvironmentFailedError:
        return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolved(host: str, port: int, timeout_seconds: float) -> tuple[int, tuple[object, ...]]:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise EnvironmentFailedError(
                    f"{host}, where the nodes meet, is not known on this node after {timeout_seconds:g} s: {error.strerror}",
                    next_step="Give --rdzv with a name or an address of node 0 that every node knows.",
                ) from error
            time.sleep(min(_RETRY_SECONDS, timeout_seconds))
        else:
            return family, address


def _source_address(target: tuple[int, tuple[object, ...]], host: str) -> str:
    family, address = target
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        try:
            way.connect(address)
        except OSError as error:
            raise EnvironmentFailedError(
                f"{host}, where the nodes meet, cannot be reached from this node: {error.strerror}",
                next_step="Check the network, or say where to meet with --rdzv.",
            ) from error
        return str(way.getsockname()[0]).partition("%")[0]


def of_interface(name: str) -> str:
    """A network interface's first IPv4 address, else its first IPv6 address, of those that hold beyond one link.

    Raises:
        UsageError: There is no such interface, or it has no such address.
    """
    import psutil  # type: ignore[import-untyped]  # has no types of its own

    there = psutil.net_if_addrs()
    if name not in there:
        raise UsageError(f"--interface {name}: not on this node", next_step=f"There are {', '.join(sorted(there))}.")
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in there[name]:
            if one.family == family and not ipaddress.ip_address(one.address.partition("%")[0]).is_link_local:
                return str(one.address)
    raise UsageError(f"--interface {name}: has no address", next_step="Give another one, or --address.")

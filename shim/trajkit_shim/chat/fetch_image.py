"""Fetches images at URLs of clients, from public hosts only.

A client could otherwise read what only this machine can reach. So each address of the
host must be public, the connection goes to one of these addresses, whatever the name
resolves to later, and redirects are not followed.
"""

import asyncio
import socket
from ipaddress import IPv6Address, IPv6Network, ip_address

import httpx

from trajkit_shim.json_input import refuse

_SECONDS = 20.0
# addresses of IPv4 within IPv6, whose own rules would not apply
_EMBEDDED = IPv6Network("64:ff9b::/96"), IPv6Network("::/96")


def fetch_image(url: str, where: str, *, max_bytes: int) -> bytes:
    """Return what is at a URL, on a thread without an event loop.

    Raises `GatewayError` (400) if the URL is not http or https, its host is unknown or not
    public, or the answer is not 200, too long or too late. ``where`` is the place of the
    URL in the request.
    """
    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("expected a data URL with base64, or http or https")
        address = _public_address(parsed.host, parsed.port or 0)
        return asyncio.run(_download(parsed, address, max_bytes))
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        refuse(where, f"the image was not fetched: {error}", code="image_not_fetched")


def _public_address(host: str, port: int) -> str:
    """An address of a host that has only public ones."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not all(map(is_public, addresses)):
        raise ValueError(f"the host {host!r} is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is of the public internet."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and (
        ip.ipv4_mapped
        or ip.sixtofour
        or ip.teredo
        or ip.is_site_local
        or any(ip in network for network in _EMBEDDED)
    ):
        return False
    return ip.is_global and not ip.is_multicast


async def _download(url: httpx.URL, address: str, max_bytes: int) -> bytes:
    data = bytearray()
    try:
        async with (
            asyncio.timeout(_SECONDS),
            httpx.AsyncClient(trust_env=False, timeout=None) as client,
            client.stream(
                "GET",
                url.copy_with(host=address),
                headers={"host": url.netloc.decode(), "accept-encoding": "identity"},
                # the certificate is that of the name
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            if response.status_code != 200:
                raise ValueError(f"the server answered {response.status_code}")
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > max_bytes:
                    raise ValueError(f"it is longer than {max_bytes} bytes")
    except TimeoutError as error:
        raise ValueError(f"it took longer than {_SECONDS:g} seconds") from error
    return bytes(data)

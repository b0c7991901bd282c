"""Fetches images at URLs of clients, from public hosts only.

A client could otherwise read what only this machine can reach. So each address of the
host must be public, the connection goes to one of these addresses, whatever the name
resolves to later, and redirects are not followed.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import cache
from ipaddress import IPv6Address, IPv6Network, ip_address

import httpx

from trajkit_shim.errors import GatewayError

# for all images of a request, and how many of them are fetched at once
_SECONDS = 20.0
_AT_ONCE = 4
# addresses of IPv4 within IPv6, whose own rules would not apply
_EMBEDDED = IPv6Network("64:ff9b::/96"), IPv6Network("::/96")


async def fetch_images(
    urls: Collection[str], *, max_bytes: int, max_total_bytes: int
) -> dict[str, bytes]:
    """Return what is at the URLs of a request, at least one.

    ``max_bytes`` limits each, ``max_total_bytes`` all together. Raises `GatewayError`
    (400) if a URL is not http or https, its host is unknown or not public, the answer is
    not 200, or they exceed a limit or take too long together.
    """
    slots, found = asyncio.Semaphore(_AT_ONCE), {url: bytearray() for url in urls}

    async def fetch(client: httpx.AsyncClient, url: str) -> None:
        data = found[url]
        try:
            async with slots, aclosing(_chunks(client, httpx.URL(url))) as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) > max_bytes:
                        raise ValueError(f"it is longer than {max_bytes} bytes")
                    if sum(map(len, found.values())) > max_total_bytes:
                        most = f"more than {max_total_bytes} bytes together"
                        raise ValueError(f"the images at URLs have {most}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _not_fetched(url, error) from error

    # the loop would wait for it
    context = await asyncio.to_thread(_ssl_context)
    # another name at the same address needs a connection, and a certificate, of its own
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        async with (
            httpx.AsyncClient(
                trust_env=False, timeout=None, verify=context, limits=limits
            ) as client,
            asyncio.timeout(_SECONDS),
            asyncio.TaskGroup() as group,
        ):
            tasks = {url: group.create_task(fetch(client, url)) for url in urls}
    except ExceptionGroup as errors:
        # the first cancelled the others
        raise errors.exceptions[0] from None
    except TimeoutError as error:
        # the last ones may have ended in the same moment
        late = max(tasks, key=lambda url: tasks[url].cancelled())
        raise _not_fetched(late, f"it took longer than {_SECONDS:g} seconds") from error
    return {url: bytes(data) for url, data in found.items()}


@cache
def _ssl_context() -> ssl.SSLContext:
    """The certificates of this process. To read them takes some 30 ms."""
    return httpx.create_ssl_context(trust_env=False)


def _not_fetched(url: str, why: object) -> GatewayError:
    message = f"{url[:200]}: the image was not fetched: {why}"
    return GatewayError(message, code="image_not_fetched")


async def _public_address(host: str, port: int) -> str:
    """An address of a host that has only public ones."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
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


async def _chunks(client: httpx.AsyncClient, url: httpx.URL) -> AsyncGenerator[bytes]:
    """Yield what is at a URL."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("expected a data URL with base64, or http or https")
    address = await _public_address(url.host, url.port or 0)
    async with client.stream(
        "GET",
        url.copy_with(host=address),
        headers={"host": url.netloc.decode(), "accept-encoding": "identity"},
        # the certificate is that of the name
        extensions={"sni_hostname": url.host},
    ) as response:
        if response.status_code != 200:
            raise ValueError(f"the server answered {response.status_code}")
        async for chunk in response.aiter_raw():
            yield chunk

"""Fetches images at URLs of clients, from public hosts only.

A client could otherwise read what only this machine can reach. So each address of the
host must be public, the connection goes to one of these addresses, whatever the name
resolves to later, and redirects are not followed.
"""

import asyncio
import socket
import ssl
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from functools import cache
from ipaddress import IPv6Address, IPv6Network, ip_address

import httpx

from trajkit_shim.errors import GatewayError

# for all images of a request
_SECONDS = 20.0
# the IPv6 addresses that IANA has assigned to hosts of the internet
_UNICAST = IPv6Network("2000::/3")


async def fetch_images(
    urls: Collection[str], max_bytes: int, max_total_bytes: int
) -> dict[str, bytes]:
    """Return what is at the URLs of a request, which are fetched one after another.

    ``max_bytes`` limits each, ``max_total_bytes`` all together. Raises `GatewayError`
    (400) if a URL is not http or https, its host is unknown or not public, the answer is
    not 200, or they exceed a limit or take too long together.
    """
    found: dict[str, bytes] = {}
    url, total = "", 0
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
        ):
            for url in urls:
                data = bytearray()
                async with await _opened(client, httpx.URL(url)) as response:
                    if response.status_code != 200:
                        raise ValueError(f"the server answered {response.status_code}")
                    async for chunk in response.aiter_raw():
                        data += chunk
                        if len(data) > max_bytes:
                            raise ValueError(f"it is longer than {max_bytes} bytes")
                        if total + len(data) > max_total_bytes:
                            most = f"more than {max_total_bytes} bytes together"
                            raise ValueError(f"the images at URLs have {most}")
                found[url] = bytes(data)
                total += len(data)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        why: object = error
        if isinstance(error, TimeoutError):
            why = f"it took longer than {_SECONDS:g} seconds"
        message = f"{url[:200]}: the image was not fetched: {why}"
        raise GatewayError(message, code="image_not_fetched") from error
    return found


@cache
def _ssl_context() -> ssl.SSLContext:
    """The certificates of this process. To read them takes some 30 ms."""
    return httpx.create_ssl_context(trust_env=False)


async def _opened(
    client: httpx.AsyncClient, url: httpx.URL
) -> AbstractAsyncContextManager[httpx.Response]:
    """The answer of a URL's host, which must have only public addresses."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("expected a data URL with base64, or http or https")
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(url.host, url.port or 0, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    if not all(map(is_public, addresses)):
        raise ValueError(f"the host {url.host!r} is not public")
    return client.stream(
        "GET",
        url.copy_with(host=addresses[0]),
        headers={"host": url.netloc.decode(), "accept-encoding": "identity"},
        # the certificate is that of the name
        extensions={"sni_hostname": url.host},
    )


def is_public(address: str) -> bool:
    """Whether an address is of the public internet."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and (ip not in _UNICAST or ip.sixtofour):
        return False
    return ip.is_global and not ip.is_multicast

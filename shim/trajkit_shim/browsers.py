"""Refuses requests that a browser sends for a web page.

A page of any site can send requests to this machine, which have an ``Origin``. It can
also let its own name point to this machine's address, which is then the ``Host``.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from trajkit_shim.errors import GatewayError

# no site has such a name
_PRIVATE = (".localhost", ".local", ".internal")


def check_no_browser(headers: Headers, hosts: Collection[str]) -> None:
    """Raise a 403 for a web page's request, or for a ``Host`` that a page may have.

    Addresses, names without a dot, those of private networks and ``hosts`` are no page's.
    """
    if "origin" in headers:
        message = f"origin: {headers['origin']!r}: requests of web pages are refused"
        raise GatewayError(message, 403, code="browser_refused")
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(_PRIVATE) or name in hosts:
            return
        ipaddress.ip_address(name)
    except ValueError:
        rule = "not an address or name of this gateway (trajkit serve --allow-host)"
        message = f"host: {host!r}: {rule}"
        raise GatewayError(message, 403, code="unknown_host") from None

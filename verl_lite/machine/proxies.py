"""The proxy of the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY), which httpx uses for every server by default.

A proxy cannot reach a server on this machine, so clients here get `local_mounts`.
"""

import urllib.parse
import urllib.request

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def local_mounts() -> dict[str, None]:
    """Returns the argument `mounts` of a client of httpx that sends requests to this machine without a proxy."""
    mounts: dict[str, None] = {}
    for host in _LOCAL_HOSTS:
        # an IPv6 address has brackets in a URL
        name = f"[{host}]" if ":" in host else host
        mounts[f"all://{name}"] = None
    return mounts


def proxy_note(url: str) -> str:
    """Returns a note for the message about a failed request if a proxy was in between; "" otherwise."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    for name in (parts.scheme, "all"):
        is_used = name in proxies and host not in _LOCAL_HOSTS and not urllib.request.proxy_bypass(host)
        if is_used:
            return (
                f"\nThe request went through the proxy of {name.upper()}_PROXY. If it must not, add {host} to NO_PROXY "
                "in the environment"
            )
    return ""

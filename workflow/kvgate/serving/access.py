"""Who may ask: names of this machine, pages of other origins, and the key. Standard library only, Python 3.9."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgate.serving.fields import Bad

_TOKENS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")  # names of headers, as a preflight asks for them
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
_KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Access:
    """hosts: names beside localhost; origins: of pages that may ask (`*`: all); keys: none where everybody may."""

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: tuple[str, ...] = field(default=(), repr=False)

    def check(self, headers: Any, local: bool) -> None:
        """Raises Bad (403) where a page of somebody else asks. local: only this machine reaches the address.

        A page can make its own name mean this machine: then Host has that name. A page that asks from elsewhere has
        its own name in Origin.
        """
        host = headers.get("Host", "")
        known = _name(host) in ("", "localhost", *self.hosts) or loopback(_name(host))
        if local and not known:
            raise Bad("Host: got {!r}, allowed: localhost or --allow-host NAME".format(host[:60]), status=403)
        origin = headers.get("Origin")
        own = (known or _is_address(_name(host))) and origin in ("http://" + host, "https://" + host)
        if origin is not None and not own and not self._allowed(origin):
            raise Bad("Origin: got {!r}, allowed: --allow-origin ORIGIN".format(origin[:60]), status=403)

    def check_key(self, headers: Any) -> None:
        """Raises Bad (401) without a key that is right. Says nothing of what was sent."""
        if not self.keys:
            return
        scheme, _, sent = headers.get("Authorization", "").partition(" ")
        got = sent.strip().encode("latin-1", "replace")
        right = [hmac.compare_digest(got, key.encode()) for key in self.keys]
        if scheme.lower() != "bearer" or not any(right):
            raise Bad("Authorization: no key or a wrong one, allowed: Bearer KEY", None, "invalid_api_key", 401)

    def cors(self, headers: Any) -> dict[str, str]:
        """The headers that let the page that asks read the answer, where it may."""
        origin = headers.get("Origin")
        if origin is None or not self._allowed(origin):
            return {"Vary": "Origin"} if self.origins else {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": "Retry-After"}

    def preflight(self, headers: Any, methods: str) -> dict[str, str]:
        """The answer to OPTIONS: a browser asks before it sends JSON or a key to another origin."""
        found = {"Allow": methods}
        if "Access-Control-Allow-Origin" not in self.cors(headers):
            return found
        asked = headers.get("Access-Control-Request-Headers", "")
        names = asked if _TOKENS.fullmatch(asked) else "Authorization, Content-Type"
        found.update(
            {
                "Access-Control-Allow-Methods": methods,
                "Access-Control-Allow-Headers": names,
                "Access-Control-Max-Age": "600",
            }
        )
        if headers.get("Access-Control-Request-Private-Network") == "true":
            found["Access-Control-Allow-Private-Network"] = "true"
        return found

    def _allowed(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins


def origin(text: str) -> str:
    """An argparse type. Raises ValueError."""
    if text not in ("*", "null") and not _ORIGIN.fullmatch(text):
        raise ValueError("--allow-origin: got {!r}, allowed: *, null, or SCHEME://HOST[:PORT]".format(text))
    return text.lower()


def keys(given: list[str], files: list[Path]) -> tuple[str, ...]:
    """Those of the command line and of files with one a line. Raises ValueError, which has no key in it."""
    found = list(given)
    for path in files:
        try:
            lines = [x.strip() for x in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
            raise ValueError("--api-key-file {}: {}".format(path, why)) from None
        if not any(lines):
            raise ValueError("--api-key-file {}: got no key, allowed: one a line".format(path))
        found += filter(None, lines)
    if not all(_KEY.fullmatch(x) for x in found):
        raise ValueError("API key: got an empty one or other characters, allowed: printable ASCII without spaces")
    return tuple(found)


def _name(host: str) -> str:
    """Of `name:port`, `[::1]:port`, `name`, `[::1]`."""
    name, _, port = host.rpartition(":")
    return (name if port.isdigit() else host).strip("[]").lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return False


def loopback(name: str) -> bool:
    """Whether an address is this machine's own."""
    return _is_address(name) and ipaddress.ip_address(name).is_loopback

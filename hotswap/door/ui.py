"""`/ui`: the page on which people watch a fleet, one file that needs nothing of elsewhere.

The page reads `/admin` with the key of an operator, which it keeps in its memory and sends in a header. So
there is no session on the server and no cookie, which a browser adds to requests that other sites make: they
can forge nothing. Where operators need no key, a POST still must say that it is JSON, which browsers send to
another site only if that allows it, and a door allows none. The cost is that a reload asks for the key again,
which password managers fill in. Events are read by `fetch`, since an `EventSource` sends no header.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from hotswap.door.keys import KeyRing

__all__ = ["Page"]


class Page:
    """The page, and the headers that allow a browser nothing but what the page is made of.

    Args:
        ring: Says whether operators need a key, which the page then asks for before anything else.
    """

    def __init__(self, ring: KeyRing) -> None:
        page = resources.files("hotswap.door").joinpath("page.html").read_bytes()
        scripts, styles = (_hashes(page, tag) for tag in (b"script", b"style"))
        policy = (
            "default-src 'none'",
            f"script-src {scripts}",
            f"style-src {styles}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
        self._ring, self._page = ring, page
        self._asking_page = page.replace(b"<html ", b'<html data-key="needed" ', 1)
        self._headers = {
            "content-security-policy": "; ".join(policy),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }

    async def page(self, _: Request) -> Response:
        """Answer with the page, which holds nothing of the fleet."""
        page = self._asking_page if self._ring.has_operators else self._page
        return Response(page, headers=self._headers, media_type="text/html")


def _hashes(page: bytes, tag: bytes) -> str:
    """The hashes of what stands in the page between tags, as a policy names them."""
    texts: list[bytes] = re.findall(rb"<%s\b[^>]*>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)

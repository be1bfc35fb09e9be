"""Patterns of URLs that images are fetched from."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import SplitResult, unquote, urlsplit

HTTPS_PORT = 443


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """URLs that are allowed: https://HOST[:PORT]/PATH, with * for any text in host and path.

    Attributes:
        host: Pattern of the host.
        port: The port.
        path: Pattern of the path.
    """

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> "UrlPattern":
        """Return the pattern that a text describes.

        Raises:
            ValueError: It describes none.
        """
        parts = urlsplit(text)
        if parts.scheme != "https" or not parts.hostname or parts.username is not None:
            raise ValueError(f"must be https://HOST[:PORT]/PATH; got {text!r}")
        return cls(parts.hostname, parts.port or HTTPS_PORT, parts.path or "/*")

    def matches(self, url: SplitResult) -> bool:
        """Return whether a URL is allowed; one that leaves a folder, as /a/../b does, is not."""
        # Some servers read /..;x/ as /../ (parameters of a segment, RFC 3986, 3.3).
        return (
            ".." not in re.split(r"[/\\;]", unquote(url.path))
            and fnmatchcase(url.hostname or "", self.host)
            and (url.port or HTTPS_PORT) == self.port
            and fnmatchcase(url.path or "/", self.path)
        )

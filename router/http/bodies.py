"""The bases of all bodies and their parts."""

from urllib.parse import quote

import structlog
from pydantic import BaseModel, ConfigDict

log = structlog.get_logger(__name__)

MAX_NAMES = 20
"""Maximum members that a log line or header names."""
MAX_NAME = 60
"""Maximum characters of each."""


class Strict(BaseModel):
    """JSON of which every member is known and of its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenBody(BaseModel):
    """A JSON object that may have unknown members, which are ignored.

    Clients label what they send (`cache_control`, `provider_specific_fields`), and keep what other
    servers answered. A member by whose meaning the answer would be another one is declared, and
    refused by name; see `no_ops.py`.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def model_post_init(self, _: object) -> None:
        """Log what is passed over."""
        if self.model_extra:
            log.debug("members_ignored", part=type(self).__name__, names=self.ignored())

    def ignored(self) -> list[str]:
        """Return the names of members that are passed over, as a header can have them."""
        names = sorted(self.model_extra or ())[:MAX_NAMES]
        return [quote(name[:MAX_NAME], safe="[]", errors="replace") for name in names]

"""Base classes of request bodies and their parts."""

from urllib.parse import quote

import structlog
from pydantic import BaseModel, ConfigDict

log = structlog.get_logger(__name__)

MAX_NAMES = 20
"""Maximum number of members that a log line or header names."""
MAX_NAME = 60
"""Maximum characters of each name."""


class Strict(BaseModel):
    """A JSON object without unknown members or conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenBody(BaseModel):
    """A JSON object that may have unknown members, which are ignored.

    Clients add labels (`cache_control`, `provider_specific_fields`) and send back members of other
    servers' responses. Members that would change the response are declared in `no_ops.py` and
    rejected by name.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    def model_post_init(self, _: object) -> None:
        """Log the ignored members."""
        if self.model_extra:
            log.debug("members_ignored", part=type(self).__name__, names=self.ignored())

    def ignored(self) -> list[str]:
        """Return the names of ignored members, encoded for a header."""
        names = sorted(self.model_extra or ())[:MAX_NAMES]
        return [quote(name[:MAX_NAME], safe="[]", errors="replace") for name in names]

"""The base of all bodies and their parts."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """JSON of which every member is known and of its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

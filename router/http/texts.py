"""What the bodies of requests about whole texts have in common: embeddings, scores, classes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, create_model

from octavo.router.http import no_ops
from octavo.router.http.bodies import OpenBody
from octavo.router.http.no_ops import only
from octavo.router.http.schema import MAX_REQUEST_ID

if TYPE_CHECKING:
    Refused = OpenBody
else:
    Refused = create_model("Refused", __base__=OpenBody, **no_ops.members(no_ops.TEXTS))


class TextsBody(Refused):
    """A body's common members.

    Attributes:
        params: HTTP names of fields of the protobuf request.
        truncate: Whether longer texts are cut, as `truncate_prompt_tokens: -1` says too.
    """

    params: ClassVar[Mapping[str, str]] = {}

    model: str = ""
    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, only(-1)] = None
    priority: int | None = None
    request_id: Annotated[str | None, Field(max_length=MAX_REQUEST_ID)] = None
    user: str | None = None

    def message(self, request_id: str) -> Any:  # noqa: ANN401 - each body has its own
        """Convert to a protobuf request; see `options`.

        Raises:
            InvalidArgumentError: A value does not fit its field's type.
        """
        raise NotImplementedError

    def answer(self, response: Any) -> Any:  # noqa: ANN401 - each body has its own
        """Return the JSON of a response."""
        raise NotImplementedError

    def options(self, request_id: str) -> dict[str, Any]:
        """Return the client's arguments that all such requests have.

        Args:
            request_id: The id of a request that names none.
        """
        return {
            "model": self.model,
            "truncate": bool(self.truncate) or self.truncate_prompt_tokens is not None,
            "priority": self.priority or 0,
            "request_id": self.request_id or request_id,
        }


class Counted(Protocol):
    """A response that counts tokens."""

    @property
    def token_counts(self) -> Any:  # noqa: ANN401 - a repeated field
        """Tokens of each text."""


def usage(response: Counted) -> dict[str, int]:
    """Return the tokens of a response's texts, in the form of OpenAI's API."""
    tokens = sum(response.token_counts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}

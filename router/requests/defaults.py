"""A model's own defaults for what a request does not set."""

from dataclasses import dataclass
from typing import Self

from octavo.v1 import engine_pb2, generation_pb2, sampling_pb2


@dataclass(frozen=True, slots=True)
class Defaults:
    """An engine's defaults for what requests do not set.

    Attributes:
        sampling: The sampling parameters; only those that the model has are set.
        max_tokens: Maximum tokens per output; None: as many as there is room for.
    """

    sampling: sampling_pb2.SamplingParams
    max_tokens: int | None

    @classmethod
    def of(cls, info: engine_pb2.GetEngineInfoResponse) -> Self:
        """Return the defaults of an engine's model."""
        has_max_tokens = info.HasField("default_max_tokens")
        return cls(info.default_sampling, info.default_max_tokens if has_max_tokens else None)

    def fill_in(self, message: generation_pb2.GenerateRequest) -> None:
        """Set the sampling parameters that a request does not set; a beam search has none.

        From here on they are like those that the client sent: the request keeps them if it
        migrates to an engine with other defaults.
        """
        if message.HasField("beam"):
            return
        filled = sampling_pb2.SamplingParams()
        filled.CopyFrom(self.sampling)
        filled.MergeFrom(message.sampling)  # what is set there wins, neutral values too
        message.sampling.CopyFrom(filled)

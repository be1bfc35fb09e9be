"""A model's own defaults for what a request does not set."""

from octavo.v1 import generation_pb2, sampling_pb2


def fill_in(message: generation_pb2.GenerateRequest, defaults: sampling_pb2.SamplingParams) -> None:
    """Set the sampling parameters that a request does not set; a beam search has none.

    From here on they are like those that the client sent: the request keeps them if it
    migrates to an engine with other defaults.
    """
    if message.HasField("beam"):
        return
    filled = sampling_pb2.SamplingParams()
    filled.CopyFrom(defaults)
    filled.MergeFrom(message.sampling)  # what is set there wins, neutral values too
    message.sampling.CopyFrom(filled)

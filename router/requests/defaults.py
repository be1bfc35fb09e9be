"""A model's default parameters."""

from octavo.v1 import generation_pb2, sampling_pb2


def fill_in(message: generation_pb2.GenerateRequest, defaults: sampling_pb2.SamplingParams) -> None:
    """Fill in a request's unset sampling parameters, except for beam search.

    The request then keeps them even if it migrates to an engine with other defaults.
    """
    if message.HasField("beam"):
        return
    filled = sampling_pb2.SamplingParams()
    filled.CopyFrom(defaults)
    filled.MergeFrom(message.sampling)  # the client's values win, even neutral ones
    message.sampling.CopyFrom(filled)

"""Engines with traced or eager steps, and their outputs."""

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper

LENGTHS = (1, 2, 3, 17, 40)


def engine(model, mode, dtype="float32", quantization="none", **settings):
    """Return an engine; in mode `auto` its step must be traced."""
    given = {"num_blocks": 64, "swap_space": 0, "compile": mode, "dtype": dtype}
    given |= {"quantization": quantization, **settings}
    stepper = Stepper(build(EngineSettings(model=str(model), **given)))
    assert stepper.parts.executor.compiled == (mode == "auto")
    return stepper


def outputs(stepper, **sampling):
    """Return tokens and log-probabilities of prompts, one at a time and together."""
    groups = []
    for length in LENGTHS:
        groups.append(stepper.submit(range(3, 3 + length), 6, **sampling))
        stepper.run()
    groups += [stepper.submit(range(7, 7 + length), 6, **sampling) for length in LENGTHS]
    stepper.run()
    drawn = {group.request.request_id: [] for group in groups}
    for draw in stepper.sampled:
        drawn[draw.group.request.request_id].append(draw)
    return list(drawn.values())


def check_equal(model, *settings, tolerance, **more):
    """Assert that a traced and an eager engine give the same outputs.

    Args:
        model: Its directory or file.
        *settings: Settings, as for `engine`.
        tolerance: Maximum difference of log-probabilities.
        **more: See `settings`.
    """
    found, expected = (
        outputs(engine(model, mode, *settings, **more), logprobs=3) for mode in ("auto", "off")
    )
    for drawn, wanted in zip(found, expected, strict=True):
        for one, other in zip(drawn, wanted, strict=True):
            assert abs(one.logprob.logprob - other.logprob.logprob) < tolerance
            if one.token_id != other.token_id:  # a tie within the tolerance: later tokens differ
                assert tolerance > 1e-3
                break

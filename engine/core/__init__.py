"""The engine's core: a loop in its own thread that computes step after step."""

from octavo.engine.core.loop import HEARTBEAT_SECONDS, EngineCore
from octavo.engine.execution.failures import EngineFailedError, StepError

__all__ = ["HEARTBEAT_SECONDS", "EngineCore", "EngineFailedError", "StepError"]

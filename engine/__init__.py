"""The engine: one model replica; it owns tokens and memory."""

from octavo.engine import _environment as _environment

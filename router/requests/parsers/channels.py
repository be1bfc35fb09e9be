"""Messages in channels, the harmony format of gpt-oss.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

A call is a message to a tool: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>.
"""

import re
from typing import ClassVar

from octavo.router.requests.parsers.parser import Buffer, Parser, Piece, PieceKind

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Channels(Parser):
    """Split an output into reasoning, content and calls, by its messages' channels and recipients.

    Args:
        begun: The prompt's part of the message that the output continues, after its last
            `<|start|>`.
    """

    markers: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, begun: str = "assistant") -> None:
        self._buffer = Buffer()
        self._header = ""
        self._kind: PieceKind | None = None  # of the current message; None in its header
        self._arguments = False  # whether the message has any
        self.feed(begun)
        if self._kind is not None:
            self._buffer.rest()  # end of the prompt, outside markers

    @property
    def reasons(self) -> bool:
        """Whether the last text is within reasoning."""
        return self._kind == PieceKind.REASONING

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""
        self._buffer.add(text)
        pieces: list[Piece] = []
        while True:
            if self._kind is None:
                header, marker = self._buffer.until((MESSAGE, *ENDS, START))
                self._header += header
                if marker is None:
                    return pieces
                if marker == MESSAGE:
                    self._open(pieces)
                self._header = ""
            else:
                body, marker = self._buffer.until((*ENDS, START))
                self._give(body, pieces)
                if marker is None:
                    return pieces
                self._close(pieces)

    def flush(self) -> list[Piece]:
        """Return the held pieces: the output has ended."""
        pieces: list[Piece] = []
        if self._kind is not None:
            self._give(self._buffer.rest(), pieces)
            self._close(pieces)
        elif not any(marker in self._header for marker in self.markers):
            # No header: the model broke the format.
            text = (self._header + self._buffer.rest()).removeprefix("assistant")
            if text.strip():
                pieces.append(Piece(PieceKind.CONTENT, text))
        return pieces

    def _open(self, pieces: list[Piece]) -> None:
        channel = self._header.partition(CHANNEL)[2].split()
        recipient = _TO.search(self._header)
        self._arguments = False
        if recipient is not None:
            self._kind = PieceKind.ARGUMENTS
            pieces.append(Piece(PieceKind.CALL, recipient[1]))
        else:
            self._kind = PieceKind.REASONING if channel[:1] == ["analysis"] else PieceKind.CONTENT

    def _give(self, text: str, pieces: list[Piece]) -> None:
        if text:
            assert self._kind is not None
            self._arguments = True
            pieces.append(Piece(self._kind, text))

    def _close(self, pieces: list[Piece]) -> None:
        if self._kind == PieceKind.ARGUMENTS and not self._arguments:
            pieces.append(Piece(PieceKind.ARGUMENTS, "{}"))
        self._kind = None

"""Parts of documents that are made from the sources, each between two comments in Markdown."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MadePart:
    """The place of a generated part in its document.

    Attributes:
        document: The file's path from the repository's root.
        name: The part's name in its two comments.
        target: The target of make that generates the part.
    """

    document: Path
    name: str
    target: str

    def insert(self, text: str, made: str) -> str:
        """Return the document's text with `made` in place of the old part.

        Raises:
            ValueError: The text has no such place.
        """
        begin, end = f"<!-- {self.name}: made by `make {self.target}` -->", f"<!-- /{self.name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{self.document} has no place for {self.name}: {begin} ... {end}")
        return f"{before}{begin}\n\n{made}\n\n{end}{after}"

    def renew(self, made: str) -> None:
        """Replace the part in its document."""
        self.document.write_text(self.insert(self.document.read_text(), made))

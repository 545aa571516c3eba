"""What a training run shows: progress, curves, tables. Only rank 0 shows anything."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Curve:
    """One run's history."""

    label: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def to_json(self) -> str:
        """Return all of it as text, for a checkpoint."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Curve:
        """Return what `to_json` was called on."""
        return cls(**json.loads(text))


def memory_mb(device: torch.device) -> float:
    """Return this process's memory: peak on the GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


class Progress:
    """A bar on a terminal, a line now and then elsewhere, scalars for TensorBoard."""

    def __init__(self, curve: Curve, steps: int, show: bool, tensorboard: str | None) -> None:
        self.curve, self.steps, self.show = curve, steps, show
        self.bar: Any = None
        self.writer: Any = None
        self.started = time.perf_counter() - curve.seconds  # of the part before a resumed one
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            done = len(curve.losses)
            self.bar = tqdm(
                total=steps, initial=done, desc=curve.label, unit="step", dynamic_ncols=True
            )
        if show and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(Path(tensorboard, curve.label)))

    def step(self, loss: float, tokens: int, scalars: dict[str, float], memory: float) -> None:
        """Record one step; `tokens` counts those of all ranks."""
        curve = self.curve
        curve.losses.append(loss)
        curve.tokens += tokens
        curve.seconds = time.perf_counter() - self.started
        if not self.show:
            return
        done = len(curve.losses)
        speed = curve.tokens / curve.seconds
        smooth = sum(curve.losses[-10:]) / len(curve.losses[-10:])
        text = f"loss {smooth:.3f}, {speed:,.0f} tokens/s, {memory:,.0f} MB a rank"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif done == 1 or done % 25 == 0 or done == self.steps:
            print(f"{curve.label} step {done}/{self.steps}: {text}", flush=True)
        if self.writer is not None:
            for name, value in {"loss": loss, "tokens_per_second": speed, **scalars}.items():
                self.writer.add_scalar(name, value, done)

    def validation(self, loss: float) -> None:
        """Record a validation loss at the present step."""
        self.curve.validation.append((len(self.curve.losses), loss))
        if self.writer is not None:
            self.writer.add_scalar("validation_loss", loss, len(self.curve.losses))

    def close(self) -> None:
        """Finish the bar and the event file."""
        if self.bar is not None:
            self.bar.close()
        if self.writer is not None:
            self.writer.close()


def plot(curves: list[Curve], path: str) -> None:
    """Draw training losses (mean of 10 steps) as lines and validation losses as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for curve in curves:
        smooth = [
            sum(part) / len(part)
            for part in (curve.losses[max(0, i - 9) : i + 1] for i in range(len(curve.losses)))
        ]
        (line,) = axes.plot(range(1, len(smooth) + 1), smooth, label=f"{curve.label}, training")
        if curve.validation:
            steps, losses = zip(*curve.validation, strict=True)
            axes.plot(
                steps, losses, "o", color=line.get_color(), label=f"{curve.label}, validation"
            )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def heading(text: str) -> None:
    """Print a line that starts a section."""
    print(f"\n---- {text}", flush=True)

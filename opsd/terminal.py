"""What a run shows while it runs: one progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS = (("train/objective", "loss", ".4f"), ("train/divergence", "divergence", ".4f"), ("rollout/mean_len", "length", ".0f"))


class Terminal:
    """Writes to standard output. `every` says after how many steps a plain line is due where there is no terminal; `quiet`: it
    writes nothing, since another rank does."""

    def __init__(self, *, every: int, quiet: bool) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self.every = every
        self.progress: Progress | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def steps(self, *, first: int, total: int) -> Iterator[None]:
        """Shows the steps reported inside."""
        if self.console.quiet or not self.console.is_terminal:
            yield
            return
        bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
        with Progress(*bar, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console) as self.progress:
            self.task = self.progress.add_task("training", total=total, completed=first, state="")
            yield
        self.progress = None

    def step(self, step: int, total: int, metrics: dict[str, float], tokens_per_s: float) -> None:
        """One optimizer step."""
        shown = [f"{label} {metrics[name]:{form}}" for name, label, form in COLUMNS if name in metrics]
        state = "  ".join([*shown, f"{tokens_per_s:,.0f} tokens/s"])
        if self.progress is not None:
            self.progress.update(self.task, completed=step, state=state)
        elif step % self.every == 0 or step in (1, total):
            self.say(f"step {step}/{total}  {state}")

"""A training loop with a budget of wall time or steps, a progress bar, and a checkpoint to resume from."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from cluster.train.optimizer import Optimizers, clock_factor


class ThreadChoice:
    """Chooses the number of torch threads of each step on a shared machine: all `threads`, or one fewer.

    A step is as slow as its slowest thread, so while other work takes a core, one thread can be faster than two. Steps
    use the count whose latest step was faster. Every `explore`-th step tries the other count.
    """

    def __init__(self, threads: int, explore: int = 10) -> None:
        self.threads, self.explore = threads, explore
        self._counts = sorted({threads, max(1, threads - 1)})
        self._recent: dict[int, float] = {}
        self._step = 0
        self._used = threads

    def set(self) -> None:
        """Choose the count for the next step and set it in torch."""
        best = min(self._counts, key=lambda count: self._recent.get(count, 0.0))  # an untried count comes first
        others = [count for count in self._counts if count != best]
        self._step += 1
        self._used = others[0] if others and self._step % self.explore == 0 else best
        torch.set_num_threads(self._used)

    def record(self, seconds: float) -> None:
        """Record the time of the step that ran with the chosen count."""
        self._recent[self._used] = seconds


@dataclass(frozen=True)
class TrainingRun:
    """One training run: its label, its checkpoint file, its budget (`minutes`, `steps`), and seconds between saves."""

    label: str
    checkpoint: Path
    minutes: float = math.inf
    steps: float = math.inf
    save_every_s: float = 240.0


def train_for(
    run: TrainingRun,
    module: nn.Module,
    optimizers: Optimizers,
    loss_at: Callable[[int], torch.Tensor],
    evaluate: Callable[[], str],
) -> tuple[int, float]:
    """Minimise `loss_at(step)` until the run's `minutes` or `steps` are spent; return (steps, seconds).

    Both returned numbers include the run before a resume, and exclude evaluation and saving. The learning rate follows
    the spent share of the budget. With a budget of `minutes`, a slow machine does fewer steps, but the learning rate
    still decays to the end. With a budget of `steps`, every machine does the same steps.
    """
    step, elapsed, budget, checkpoint = 0, 0.0, run.minutes * 60.0, run.checkpoint
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(stored["module"])
        optimizers.load_state_dict(stored["optimizers"])
        step, elapsed = int(stored["step"]), float(stored["elapsed"])
    saved, smooth = elapsed, 0.0
    threads = ThreadChoice(torch.get_num_threads())

    def spent() -> float:
        return max(elapsed / budget, step / run.steps)

    with tqdm(total=100, initial=round(100 * spent()), unit="%", desc=run.label, mininterval=5.0) as bar:
        while spent() < 1.0:
            started = time.monotonic()
            threads.set()
            loss = loss_at(step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers.step(clock_factor(spent()))
            step += 1
            seconds = time.monotonic() - started
            threads.record(seconds)
            elapsed += seconds
            value = float(loss.detach())
            smooth = value if smooth == 0.0 else 0.95 * smooth + 0.05 * value
            bar.set_postfix(step=step, threads=torch.get_num_threads(), loss=f"{smooth:.3f}", refresh=False)
            bar.update(round(100 * spent()) - bar.n)
            if elapsed - saved > run.save_every_s or spent() >= 1.0:
                saved = elapsed
                _save(checkpoint, module, optimizers, step, elapsed)
                bar.write(f"{run.label}: step {step}, {elapsed:.0f} s, loss {smooth:.4f}, {evaluate()}")
    torch.set_num_threads(threads.threads)
    return step, elapsed


def _save(path: Path, module: nn.Module, optimizers: Optimizers, step: int, elapsed: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"module": module.state_dict(), "optimizers": optimizers.state_dict(), "step": step, "elapsed": elapsed}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)  # atomic: an interrupted save leaves the previous checkpoint

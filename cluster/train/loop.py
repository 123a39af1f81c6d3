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

    A step is as slow as its slowest thread. So while other work takes a core, one thread can be faster than two. A step
    uses the count whose latest step was faster, but every `explore_every`-th step tries the other count.
    """

    def __init__(self, threads: int, explore_every: int = 10) -> None:
        self.threads, self.explore_every = threads, explore_every
        self._candidates = sorted({threads, max(1, threads - 1)})
        self._latest_seconds: dict[int, float] = {}
        self._step = 0
        self._current = threads

    def set(self) -> None:
        """Choose the count for the next step and set it in torch."""
        fastest = min(
            self._candidates, key=lambda count: self._latest_seconds.get(count, 0.0)
        )  # an untried count comes first
        other_counts = [count for count in self._candidates if count != fastest]
        self._step += 1
        self._current = other_counts[0] if other_counts and self._step % self.explore_every == 0 else fastest
        torch.set_num_threads(self._current)

    def record(self, seconds: float) -> None:
        """Record the time of the step that ran with the chosen count."""
        self._latest_seconds[self._current] = seconds


@dataclass(frozen=True)
class TrainingRun:
    """One training run: its label, its checkpoint file, its budget (`minutes` of training time and `steps`; infinite if
    not given), and the seconds of training between saves.
    """

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

    If the checkpoint file exists, training resumes from it, and both returned numbers include what came before. The
    seconds exclude evaluation and saving. After each save, the text that `evaluate` returns is printed.

    The learning rate follows the spent share of the budget. With a budget of `minutes`, a slow machine does fewer
    steps, but the learning rate still decays to the end. With a budget of `steps`, every machine does the same steps.
    """
    step, elapsed, budget, checkpoint = 0, 0.0, run.minutes * 60.0, run.checkpoint
    if checkpoint.exists():
        saved_state = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(saved_state["module"])
        optimizers.load_state_dict(saved_state["optimizers"])
        step, elapsed = int(saved_state["step"]), float(saved_state["elapsed"])
    saved_at, mean_loss = elapsed, 0.0
    threads = ThreadChoice(torch.get_num_threads())

    def budget_share() -> float:
        return max(elapsed / budget, step / run.steps)

    with tqdm(total=100, initial=round(100 * budget_share()), unit="%", desc=run.label, mininterval=5.0) as progress:
        while budget_share() < 1.0:
            started_at = time.monotonic()
            threads.set()
            loss = loss_at(step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers.step(clock_factor(budget_share()))
            step += 1
            seconds = time.monotonic() - started_at
            threads.record(seconds)
            elapsed += seconds
            loss_value = float(loss.detach())
            mean_loss = loss_value if mean_loss == 0.0 else 0.95 * mean_loss + 0.05 * loss_value
            progress.set_postfix(step=step, threads=torch.get_num_threads(), loss=f"{mean_loss:.3f}", refresh=False)
            progress.update(round(100 * budget_share()) - progress.n)
            if elapsed - saved_at > run.save_every_s or budget_share() >= 1.0:
                saved_at = elapsed
                _save(checkpoint, module, optimizers, step, elapsed)
                progress.write(f"{run.label}: step {step}, {elapsed:.0f} s, loss {mean_loss:.4f}, {evaluate()}")
    torch.set_num_threads(threads.threads)
    return step, elapsed


def _save(path: Path, module: nn.Module, optimizers: Optimizers, step: int, elapsed: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"module": module.state_dict(), "optimizers": optimizers.state_dict(), "step": step, "elapsed": elapsed}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)  # atomic: an interrupted save leaves the previous checkpoint

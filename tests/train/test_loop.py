"""The training loop by the clock: resuming, learning-rate schedule, choice of the thread count, and Muon's update."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cluster.train.loop import ThreadChoice, TrainingRun, train_for
from cluster.train.optimizer import Optimizers, clock_factor, orthogonalize


def test_orthogonalize_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 16, 40), (1, 40, 16)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert bool(((values > 0.5) & (values < 1.4)).all())


def test_learning_rate_warms_up_and_decays_to_its_minimum() -> None:
    assert clock_factor(0.0) == pytest.approx(0.05)
    assert clock_factor(0.015) == pytest.approx(1.0)
    assert clock_factor(0.5) == pytest.approx(0.02 + 0.98 * 0.5 / 0.985)
    assert clock_factor(1.0) == pytest.approx(0.02)
    assert clock_factor(1.3) == pytest.approx(0.02)


def test_thread_choice_prefers_the_faster_thread_count() -> None:
    threads_before = torch.get_num_threads()
    choice = ThreadChoice(2, explore_every=10)
    used_thread_counts: list[int] = []
    for _ in range(30):
        choice.set()
        count = torch.get_num_threads()
        used_thread_counts.append(count)
        choice.record({1: 1.0, 2: 5.0}[count])
    torch.set_num_threads(threads_before)
    assert used_thread_counts.count(1) > 20
    assert 2 in used_thread_counts[10:]


def test_finished_training_run_resumes_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the clock returns 10 ms more than the call before, so every machine takes the same steps."""
    readings = itertools.count(step=0.01)
    monkeypatch.setattr("cluster.train.loop.time", SimpleNamespace(monotonic=lambda: next(readings)))

    def train() -> tuple[nn.Linear, int]:
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        optimizers = Optimizers([module.weight], [module.bias], matrix_lr=0.02, other_lr=0.01)
        x = torch.eye(4)
        steps, _ = train_for(
            TrainingRun("linear", tmp_path / "linear.pt", minutes=0.002),
            module,
            optimizers,
            lambda _: (module(x) - 1).pow(2).mean(),
            lambda: "",
        )
        return module, steps

    first_module, steps = train()
    resumed_module, resumed_steps = train()
    assert steps == resumed_steps == 12
    assert torch.equal(first_module.weight, resumed_module.weight)


def test_training_run_by_steps_ignores_the_clock_and_resumes_the_rest(tmp_path: Path) -> None:
    """The learning rate depends on the step count, and a resumed run takes only the remaining steps."""
    module = nn.Linear(4, 4)
    optimizers = Optimizers([module.weight], [module.bias], matrix_lr=0.02, other_lr=0.01)
    rates: list[float] = []

    def loss_at(step: int) -> torch.Tensor:
        rates.append(optimizers.optimizers[0].param_groups[0]["lr"])
        return module.weight.sum()

    def train(steps: int) -> int:
        run = TrainingRun("linear", tmp_path / "linear.pt", steps=steps)
        return train_for(run, module, optimizers, loss_at, str)[0]

    assert train(10) == 10
    assert rates[1:] == [pytest.approx(0.02 * clock_factor(step / 10)) for step in range(9)]
    assert train(10) == 10
    assert len(rates) == 10, "the finished run took a step"
    assert train(12) == 12
    assert len(rates) == 12, "the resumed run repeated steps"

"""The cost of prompt rows, how many of them a step holds, and how prompts and decoding requests share the step time.
Machines are simulated.
"""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from cluster.config import EngineConfig
from cluster.config.resolved import ResolvedSettings
from cluster.engine.calibrate import StepLimits, TrialLoad, fit
from cluster.engine.captures import CHUNK_SIZES
from cluster.engine.scheduler import Scheduler
from cluster.kv.cache import KVCache
from cluster.kv.page_table import PageTable
from cluster.observability.step_times import MAX_PREFIX_READ_SHARE, StepTimes
from tests.unit.engine.test_scheduler import advance, sequence, sequence_of

PACE = StepTimes(0.5, 4, ((1, 320.0), (9, 640.0)), 0.0, ((4, 320.0), (104, 1320.0)), 0.02, 0.01)
"""An empty step takes 280 us. Each decoding request adds 40 us, each prompt row 10 us."""


@dataclass(frozen=True)
class Machine:
    """A simulated machine; all times are in microseconds. Reading takes `read_us`, and `token_read_us` per KV token
    read. Computing takes `row_us` per row, and `pair` per pair of a row and a token that the row sees. A step takes the
    longer of the two if they `overlap`, otherwise their sum. A step that decodes takes `draft_us` more for drafting.
    """

    tree: int
    read_us: float
    row_us: float
    token_read_us: float
    pair: float
    draft_us: float = 0.0
    overlap: bool = True

    def step(self, decodes: int, committed: int, rows: int = 0, start: int = 0) -> float:
        pairs = decodes * self.tree * committed + rows * start + rows * rows / 2
        computing_us = self.row_us * (decodes * self.tree + rows) + self.pair * pairs
        reading_us = self.read_us + self.token_read_us * (decodes * committed + (start if rows else 0))
        total_us = max(reading_us, computing_us) if self.overlap else reading_us + computing_us
        return total_us + (self.draft_us if decodes else 0.0)

    def time(self, load: TrialLoad) -> float:
        return self.step(load.decodes, load.committed, load.rows, load.start)

    def pace(self, share: float, chunk: int, groups: int = 1) -> StepTimes:
        return fit(self.time, StepLimits(64, chunk, 40000), share, self.tree, groups)


CPU = Machine(tree=4, read_us=6000.0, row_us=350.0, token_read_us=1.2, pair=0.25, draft_us=2000.0, overlap=False)
EIGHT_B = Machine(tree=4, read_us=5300.0, row_us=32.0, token_read_us=0.044, pair=0.0018, draft_us=900.0)
"""An 8B target in bfloat16 on an H100: 16 GB at 3 TB/s, 16 GFLOP a row at 500 TFLOP/s."""


def scheduler_of(
    pace: StepTimes | None,
    chunk: int,
    mixed: int | None = None,
    tokens: int = 6000,
    chunk_sizes: tuple[int, ...] = (),
) -> Scheduler:
    config = EngineConfig(model_path="", chunked_prefill_size=chunk, mixed_prefill_size=mixed)
    cache = KVCache(tokens // 8 + 64, PageTable(8, tokens + 512, 16, torch.device("cpu")), False)
    return Scheduler(ResolvedSettings.from_settings(config), cache, 6, pace, chunk_sizes)


@dataclass(frozen=True)
class PrefillRun:
    """The steps of one prompt beside decoding requests. For every step: its time in microseconds, that time divided by
    the time of decoding alone, and its prompt rows.
    """

    step_us: list[float]
    slowdowns: list[float]
    rows: list[int]


def run_prompt(scheduler: Scheduler, machine: Machine, prompt: int) -> PrefillRun:
    """Run a prompt of `prompt` tokens to its end on `machine`, beside the requests that decode already."""
    prompt_state, prefill_run = sequence("long", prompt), PrefillRun([], [], [])
    scheduler.waiting.append(prompt_state)
    while prompt_state.prefilling:
        plan = scheduler.schedule()
        decode_load = (len(plan.decodes), max((s.committed for s, _ in plan.decodes), default=0))
        start = plan.chunks[0].start if plan.chunks else 0
        prefill_run.step_us.append(machine.step(*decode_load, plan.prompt_rows, start))
        prefill_run.slowdowns.append(prefill_run.step_us[-1] / machine.step(*decode_load))
        prefill_run.rows.append(plan.prompt_rows)
        advance(plan)
    return prefill_run


def run_prompt_beside_decodes(scheduler: Scheduler, decodes: int) -> PrefillRun:
    """Run a prompt of 8192 tokens beside `decodes` decoding requests on the machine `CPU`."""
    decoding(scheduler, decodes)
    return run_prompt(scheduler, CPU, 8192)


def prompt_us_alone(machine: Machine, prompt: int, chunk: int) -> float:
    """Return the microseconds that a prompt takes in chunks of `chunk` rows while no request decodes."""
    return sum(machine.step(0, 0, chunk, start) for start in range(0, prompt, chunk))


def decoding(scheduler: Scheduler, count: int) -> None:
    """Have `count` requests decode, without end."""
    scheduler.waiting.extend(sequence(f"d{i}", 8, 100000) for i in range(count))
    advance(scheduler.schedule())


@pytest.mark.parametrize("start", [0, 1, 999, 8000])
@pytest.mark.parametrize("allowance", [0.5, 70.0, 640.0, 50000.0])
def test_max_rows_is_the_largest_count_within_the_allowance(start: int, allowance: float) -> None:
    rows = PACE.max_rows(16, start, 700, allowance)
    assert rows == 0 or PACE.cost(16, start, rows) <= allowance
    assert rows == 700 or PACE.cost(16, start, rows + 1) > allowance
    least = PACE.min_rows(16, start, 700)
    assert MAX_PREFIX_READ_SHARE * PACE.cost(16, start, least) >= start * PACE.prefix or least == 700
    assert least == 1 or MAX_PREFIX_READ_SHARE * PACE.cost(16, start, least - 1) < start * PACE.prefix


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_prefill_budget_gives_prompt_rows_their_share_of_the_step(share: float) -> None:
    pace = StepTimes(share, 4, PACE.decode, 0.0, PACE.target, 0.0, 0.0)
    own_committed, busiest_us = [100] * 4, pace.decoding([100] * 8)

    def allowance(pace: StepTimes, committed: list[int], busiest: float) -> float:
        return pace.prefill_budget(committed, busiest).allowance

    assert allowance(pace, own_committed, 0) / (
        allowance(pace, own_committed, 0) + pace.decoding(own_committed)
    ) == pytest.approx(share)
    step_us = busiest_us / (1 - share)
    assert allowance(pace, own_committed, busiest_us) + pace.decoding(own_committed) == pytest.approx(step_us), (
        "this rank's idle time is free"
    )
    assert allowance(pace, [], busiest_us) + 280.0 == pytest.approx(step_us), "an empty step takes time too"
    assert allowance(pace, [100] * 8, pace.decoding(own_committed)) == pytest.approx(step_us - busiest_us), (
        "this rank is the busiest"
    )
    two_groups = replace(pace, crowd=0.5, groups=2)
    assert allowance(two_groups, [], busiest_us) == pytest.approx(step_us - 280.0 - (busiest_us - 280.0) / 3), (
        "this rank works for the other group's rows too"
    )


def test_context_length_raises_decode_time_and_prompt_row_cost() -> None:
    pace = StepTimes(0.5, 4, PACE.decode, 0.5, PACE.target, 0.02, 0.01)
    assert pace.decoding([1000, 3000]) == pytest.approx(360.0 + 0.5 * 2 * 3000)
    assert pace.cost(4, 1000, 10) == pytest.approx(100.0 + 20.0 + 100.0)
    assert pace.cost(4, 1000, 0) == 0.0


@pytest.mark.parametrize("machine", [CPU, EIGHT_B])
def test_fitted_step_times_match_the_machine(machine: Machine) -> None:
    pace = machine.pace(0.5, 512)
    for decodes in (1, 2, 4, 8):
        committed = [300] * decodes
        assert pace.decoding(committed) == pytest.approx(machine.step(decodes, 300), rel=0.1)
        for start, rows in ((0, 30), (100, 200), (3000, 100), (8000, 40)):
            predicted_us = pace.decoding(committed) + pace.cost(decodes * machine.tree, start, rows)
            assert predicted_us == pytest.approx(machine.step(decodes, 300, rows, start), rel=0.25)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("machine", "decodes"), [(CPU, 4), (CPU, 1), (EIGHT_B, 4), (EIGHT_B, 7)])
def test_decodes_and_long_prompt_get_their_shares_of_step_time(machine: Machine, decodes: int, share: float) -> None:
    scheduler = scheduler_of(machine.pace(share, 1024), 1024, tokens=20000)
    decoding(scheduler, decodes)
    prefill_run = run_prompt(scheduler, machine, 8192)
    mean = sum(prefill_run.slowdowns) / len(prefill_run.slowdowns)
    assert 0.85 / (1 - share) <= mean <= 1.1 / (1 - share), "decoding requests keep their share"
    assert sum(prefill_run.step_us) <= 1.35 / share * prompt_us_alone(machine, 8192, 1024), "the prompt gets the rest"
    assert sum(prefill_run.rows) == 8192


@pytest.mark.parametrize("decodes", [1, 3, 7])
def test_chunks_of_captured_sizes_take_the_same_share(decodes: int) -> None:
    """Chunks are rounded down to a captured size. The time saved goes to the next steps."""
    prefill_run, run_without_sizes = (
        run_prompt_beside_decodes(scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=40000, chunk_sizes=sizes), decodes)
        for sizes in (CHUNK_SIZES, ())
    )
    assert {rows for rows in prefill_run.rows[:-1] if rows <= CHUNK_SIZES[-1]} <= {0, *CHUNK_SIZES}
    assert not {rows for rows in run_without_sizes.rows[:-1] if rows} <= set(CHUNK_SIZES), (
        "chunks must have other sizes too"
    )
    assert sum(prefill_run.step_us) == pytest.approx(sum(run_without_sizes.step_us), rel=0.1)
    assert sum(prefill_run.slowdowns) / len(prefill_run.slowdowns) == pytest.approx(
        sum(run_without_sizes.slowdowns) / len(run_without_sizes.slowdowns), rel=0.05
    )


def test_only_whole_prompts_join_a_chunk_of_a_captured_size() -> None:
    """A second prompt waits if only a part of it would fit, so that the step can be captured."""
    scheduler = scheduler_of(PACE, 300, chunk_sizes=CHUNK_SIZES)
    allowed_rows = PACE.max_rows(0, 0, 300, PACE.prefill_budget([], 360).allowance)
    scheduler.waiting.extend([sequence("a", 4000), sequence("b", 4000), sequence("c", 1)])
    plan = scheduler.schedule(360)
    assert plan.prompt_rows in CHUNK_SIZES and allowed_rows not in CHUNK_SIZES
    assert [chunk.sequence.request.request_id for chunk in plan.chunks] == ["a"]


def test_long_prompt_with_one_decode_on_a_large_model_takes_few_steps() -> None:
    """An earlier rule, with a guessed base of 256 rows and a stretch of 1.3, took 656 steps."""
    scheduler = scheduler_of(EIGHT_B.pace(0.5, 2048), 2048, tokens=40000)
    decoding(scheduler, 1)
    prefill_run = run_prompt(scheduler, EIGHT_B, 32768)
    assert len(prefill_run.step_us) <= 220
    assert max(prefill_run.slowdowns) <= 2.2
    assert sum(prefill_run.step_us) <= 2.5 * prompt_us_alone(EIGHT_B, 32768, 2048)
    assert min(n for n in prefill_run.rows[:-1] if n) >= 90


def test_chunk_dominated_by_prefix_reads_waits_until_budget_covers_its_cost() -> None:
    """Reading 8000 tokens takes as long as the whole step of one request. So a step must not read them for a single
    row, and their cost must count.
    """
    machine = Machine(tree=1, read_us=2000.0, row_us=100.0, token_read_us=0.5, pair=0.001, overlap=False)
    scheduler = scheduler_of(machine.pace(0.25, 512), 512, tokens=20000)
    decoding(scheduler, 1)
    prefill_run = run_prompt(scheduler, machine, 10000)
    late_rows = prefill_run.rows[-60:-1]
    assert 0 in late_rows, "some steps must have no prompt rows"
    assert min(n for n in late_rows if n) > 20
    assert sum(prefill_run.slowdowns[-60:-1]) / 59 == pytest.approx(1 / 0.75, rel=0.15)


def test_chunks_are_full_size_without_decodes_and_limited_with_decodes() -> None:
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.append(sequence("a", 4000))
    sizes = []
    for busiest in (0, 360, 360, 360, 0):
        plan = scheduler.schedule(busiest)
        assert plan.decode_us == 0
        sizes.append(plan.prompt_rows)
        advance(plan)
    assert sizes[0] == sizes[-1] == 300
    assert sizes[1] == PACE.max_rows(0, 300, 300, PACE.prefill_budget([], 360).allowance) < 60
    assert sizes[1] >= sizes[3] > 0


def test_several_prompts_share_the_prefill_allowance() -> None:
    scheduler = scheduler_of(PACE, 300)
    scheduler.waiting.extend([sequence("a", 10), sequence("b", 5), sequence("c", 4000), sequence("d", 100)])
    plan = scheduler.schedule(360)
    assert [chunk.sequence.request.request_id for chunk in plan.chunks] == ["a", "b", "c"]
    assert plan.prompt_rows == PACE.max_rows(0, 0, 300, PACE.prefill_budget([], 360).allowance)


def test_second_prompt_waits_when_the_remaining_allowance_covers_no_row() -> None:
    """Beside a long prompt in progress, the allowance left is less than one row of another prompt costs. The other
    prompt waits, and holds no pages.
    """
    pace = StepTimes(0.5, 4, PACE.decode, 0.0, PACE.target, 0.6, 0.0)
    scheduler = scheduler_of(pace, 300, tokens=12000)
    scheduler.waiting.extend([sequence("a", 450), sequence("b", 450)])
    advance(scheduler.schedule())
    advance(scheduler.schedule())
    [a, b] = scheduler.running
    assert (a.committed, b.committed) == (450, 150)
    scheduler.waiting.append(c := sequence("c", 3000))
    for _ in range(3):
        plan = scheduler.schedule(400)
        assert [chunk.sequence for chunk in plan.chunks] == [b]
        assert (plan.admitted, plan.first_admitted, [*scheduler.waiting]) == ([], [], [c])
        advance(plan)
    assert c.committed == 0 and c.lease is None
    scheduler.release(b)
    assert any(scheduler.schedule(400).admitted == [c] for _ in range(20)), "c starts once b's overdraft is paid"


def test_prompt_rows_cost_more_while_other_groups_prefill() -> None:
    """Two ranks share their MLPs: both ranks do a third of the work for each row."""
    machine, share = CPU, 1 / 3

    def time(load: TrialLoad) -> float:
        crowd_us = machine.row_us * share * load.rows if load.all_groups else 0.0
        return machine.time(load) + crowd_us

    pace = fit(time, StepLimits(64, 512, 8000), 0.5, 4, 2)
    assert pace.crowd == pytest.approx(share, rel=0.1)
    assert pace.cost(4, 0, 30, 1) == pytest.approx(pace.cost(4, 0, 30) * (1 + pace.crowd))
    assert machine.pace(0.5, 512).crowd == 0.0, "one group has no others to work for"
    scheduler = scheduler_of(pace, 512)
    scheduler.waiting.append(sequence("a", 4000))
    rows_without_peers = scheduler.schedule(20000).prompt_rows
    assert 0 < scheduler.schedule(20000, 1).prompt_rows < rows_without_peers


def test_noisy_calibration_still_gives_usable_step_times() -> None:
    """Measured times are up to three times too long. Still the cost of rows never falls with their number, and a prompt
    ends.
    """
    rng = Random(5)
    for _ in range(30):
        pace = fit(lambda load: CPU.time(load) * rng.uniform(1, 3), StepLimits(64, 512, 8000), 0.5, 4, 2)
        assert 0.0 <= pace.crowd <= 1.0
        costs = [pace.cost(16, start, rows) for start in (0, 4000) for rows in range(0, 512, 7)]
        assert costs[:74] == sorted(costs[:74]) and costs[74:] == sorted(costs[74:])
        scheduler = scheduler_of(pace, 512, tokens=20000)
        decoding(scheduler, 4)
        assert len(run_prompt(scheduler, CPU, 3000).step_us) < 1000


def test_calibration_fit_runs_a_bounded_number_of_loads() -> None:
    loads: list[TrialLoad] = []

    def time(load: TrialLoad) -> float:
        loads.append(load)
        return EIGHT_B.time(load)

    fit(time, StepLimits(4096, 4096, 100), 0.5, 4, 8)
    assert len(loads) <= 12
    assert max(load.rows + load.start for load in loads) <= 4096
    loads.clear()
    tiny = fit(time, StepLimits(1, 1, 1), 0.5, 4, 1)
    assert {load.start + load.committed for load in loads} == {0}
    assert tiny.max_rows(4, 0, 1, 1e9) == 1
    loads.clear()
    small = fit(time, StepLimits(8, 16, 100), 0.5, 4, 1)
    assert (small.token, small.prefix, small.pair) == (0.0, 0.0, 0.0), "noise over a few tokens must not count"
    assert {load.start + load.committed for load in loads} == {0}


@pytest.mark.parametrize("radix", [False, True])
def test_admitted_request_gets_prompt_rows_in_the_same_step(radix: bool) -> None:
    """Prompts have all lengths, and some have a cached prefix that must be read. A step that admits a prompt must also
    run some of its rows.
    """
    rng = Random(3)
    cache = KVCache(700, PageTable(8, 4000, 16, torch.device("cpu")), radix)
    pace = StepTimes(0.5, 4, PACE.decode, 0.0, PACE.target, 0.2, 0.01)
    config = EngineConfig(model_path="", chunked_prefill_size=300)
    scheduler, admitted_count = Scheduler(ResolvedSettings.from_settings(config), cache, 6, pace), 0
    for number in range(40):
        scheduler.waiting.append(sequence_of(f"{number}", [rng.randrange(2)] * rng.randint(1, 500), 4))
    for _ in range(600):
        plan = scheduler.schedule(400)
        with_rows = [chunk.sequence for chunk in plan.chunks]
        assert all(state in with_rows for state in plan.admitted)
        admitted_count += len(plan.admitted)
        advance(plan)
        for state in [state for state in scheduler.running if not state.prefilling and state.remaining_tokens <= 0]:
            scheduler.release(state)
    assert admitted_count >= 40 and not scheduler.waiting

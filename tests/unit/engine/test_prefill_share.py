"""What prompt rows cost, how many of them a step holds, and what that does to both sides on machines made up here."""

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
from tests.unit.engine.test_scheduler import advance, of_tokens, sequence

PACE = StepTimes(0.5, 4, ((1, 320.0), (9, 640.0)), 0.0, ((4, 320.0), (104, 1320.0)), 0.02, 0.01)
"""A step of its own takes 280 us, a decoding request 40, a prompt row 10."""


@dataclass(frozen=True)
class Machine:
    """A machine whose step takes the longer of reading (`read` us, and `slot` per token read) and computing (`row` us,
    and `pair` per token that it sees), and `levels` us of drafting.
    """

    tree: int
    read: float
    row: float
    slot: float
    pair: float
    levels: float = 0.0
    overlap: bool = True

    def step(self, decodes: int, committed: int, rows: int = 0, start: int = 0) -> float:
        seen = decodes * self.tree * committed + rows * start + rows * rows / 2
        computing = self.row * (decodes * self.tree + rows) + self.pair * seen
        reading = self.read + self.slot * (decodes * committed + (start if rows else 0))
        both = max(reading, computing) if self.overlap else reading + computing
        return both + (self.levels if decodes else 0.0)

    def time(self, load: TrialLoad) -> float:
        return self.step(load.decodes, load.committed, load.rows, load.start)

    def pace(self, share: float, chunk: int, groups: int = 1) -> StepTimes:
        return fit(self.time, StepLimits(64, chunk, 40000), share, self.tree, groups)


CPU = Machine(tree=4, read=6000.0, row=350.0, slot=1.2, pair=0.25, levels=2000.0, overlap=False)
EIGHT_B = Machine(tree=4, read=5300.0, row=32.0, slot=0.044, pair=0.0018, levels=900.0)
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
class Ride:
    """A prompt taken beside decoding requests: of every step its time, its time over decoding alone, its rows."""

    times: list[float]
    ratios: list[float]
    rows: list[int]


def rode(scheduler: Scheduler, machine: Machine, prompt: int) -> Ride:
    """Take a prompt of `prompt` tokens on `machine`."""
    long, ride = sequence("long", prompt), Ride([], [], [])
    scheduler.waiting.append(long)
    while long.prefilling:
        plan = scheduler.schedule()
        own = (len(plan.decodes), max((s.committed for s, _ in plan.decodes), default=0))
        start = plan.chunks[0].start if plan.chunks else 0
        ride.times.append(machine.step(*own, plan.prompt_rows, start))
        ride.ratios.append(ride.times[-1] / machine.step(*own))
        ride.rows.append(plan.prompt_rows)
        advance(plan)
    return ride


def ridden(scheduler: Scheduler, decodes: int) -> Ride:
    """A long prompt beside `decodes` requests on the machine `CPU`."""
    decoding(scheduler, decodes)
    return rode(scheduler, CPU, 8192)


def alone(machine: Machine, prompt: int, chunk: int) -> float:
    """Microseconds of the same prompt with nobody beside it."""
    return sum(machine.step(0, 0, chunk, start) for start in range(0, prompt, chunk))


def decoding(scheduler: Scheduler, count: int) -> None:
    """`count` requests that decode and go on doing so."""
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
    own, eight = [100] * 4, pace.decoding([100] * 8)

    def allowance(pace: StepTimes, committed: list[int], busiest: float) -> float:
        return pace.prefill_budget(committed, busiest).allowance

    assert allowance(pace, own, 0) / (allowance(pace, own, 0) + pace.decoding(own)) == pytest.approx(share)
    whole = eight / (1 - share)
    assert allowance(pace, own, eight) + pace.decoding(own) == pytest.approx(whole), "what this rank idles is free"
    assert allowance(pace, [], eight) + 280.0 == pytest.approx(whole), "a step costs something whatever is in it"
    assert allowance(pace, [100] * 8, pace.decoding(own)) == pytest.approx(whole - eight), "it is the busiest itself"
    two = replace(pace, crowd=0.5, groups=2)
    assert allowance(two, [], eight) == pytest.approx(whole - 280.0 - (eight - 280.0) / 3), (
        "it works for the others too"
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
        own = [300] * decodes
        assert pace.decoding(own) == pytest.approx(machine.step(decodes, 300), rel=0.1)
        for start, rows in ((0, 30), (100, 200), (3000, 100), (8000, 40)):
            given = pace.decoding(own) + pace.cost(decodes * machine.tree, start, rows)
            assert given == pytest.approx(machine.step(decodes, 300, rows, start), rel=0.25)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(("machine", "decodes"), [(CPU, 4), (CPU, 1), (EIGHT_B, 4), (EIGHT_B, 7)])
def test_decodes_and_long_prompt_get_their_shares_of_step_time(machine: Machine, decodes: int, share: float) -> None:
    scheduler = scheduler_of(machine.pace(share, 1024), 1024, tokens=20000)
    decoding(scheduler, decodes)
    ride = rode(scheduler, machine, 8192)
    mean = sum(ride.ratios) / len(ride.ratios)
    assert 0.85 / (1 - share) <= mean <= 1.1 / (1 - share), "those who decode keep theirs"
    assert sum(ride.times) <= 1.35 / share * alone(machine, 8192, 1024), "and the prompt has what is left"
    assert sum(ride.rows) == 8192


@pytest.mark.parametrize("decodes", [1, 3, 7])
def test_chunks_of_captured_sizes_take_the_same_share(decodes: int) -> None:
    """Rounding down leaves time over, which the next steps get."""
    ride, free = (
        ridden(scheduler_of(CPU.pace(0.5, 1024), 1024, tokens=40000, chunk_sizes=sizes), decodes)
        for sizes in (CHUNK_SIZES, ())
    )
    assert {rows for rows in ride.rows[:-1] if rows <= CHUNK_SIZES[-1]} <= {0, *CHUNK_SIZES}
    assert not {rows for rows in free.rows[:-1] if rows} <= set(CHUNK_SIZES), "without sizes they are as long as may be"
    assert sum(ride.times) == pytest.approx(sum(free.times), rel=0.1)
    assert sum(ride.ratios) / len(ride.ratios) == pytest.approx(sum(free.ratios) / len(free.ratios), rel=0.05)


def test_only_whole_prompts_join_a_chunk_of_a_captured_size() -> None:
    """A second prompt that would be cut waits, so that the step stays one that can be captured."""
    scheduler = scheduler_of(PACE, 300, chunk_sizes=CHUNK_SIZES)
    allowed_rows = PACE.max_rows(0, 0, 300, PACE.prefill_budget([], 360).allowance)
    scheduler.waiting.extend([sequence("a", 4000), sequence("b", 4000), sequence("c", 1)])
    plan = scheduler.schedule(360)
    assert plan.prompt_rows in CHUNK_SIZES and allowed_rows not in CHUNK_SIZES
    assert [chunk.sequence.request.request_id for chunk in plan.chunks] == ["a"]


def test_long_prompt_with_one_decode_on_a_large_model_takes_few_steps() -> None:
    """What a base guessed as 256 rows and a stretch of 1.3 made 656 steps."""
    scheduler = scheduler_of(EIGHT_B.pace(0.5, 2048), 2048, tokens=40000)
    decoding(scheduler, 1)
    ride = rode(scheduler, EIGHT_B, 32768)
    assert len(ride.times) <= 220
    assert max(ride.ratios) <= 2.2
    assert sum(ride.times) <= 2.5 * alone(EIGHT_B, 32768, 2048)
    assert min(n for n in ride.rows[:-1] if n) >= 90


def test_chunk_dominated_by_prefix_reads_waits_until_budget_covers_its_cost() -> None:
    """Reading 8000 tokens takes as long as the whole step of one request: no step for a row each, and no free ride."""
    machine = Machine(tree=1, read=2000.0, row=100.0, slot=0.5, pair=0.001, overlap=False)
    scheduler = scheduler_of(machine.pace(0.25, 512), 512, tokens=20000)
    decoding(scheduler, 1)
    ride = rode(scheduler, machine, 10000)
    late = ride.rows[-60:-1]
    assert 0 in late, "some steps go without"
    assert min(n for n in late if n) > 20
    assert sum(ride.ratios[-60:-1]) / 59 == pytest.approx(1 / 0.75, rel=0.15)


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
    """A long prompt in flight leaves less than a row of another one costs: that one waits on, and has no pages."""
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
    assert any(scheduler.schedule(400).admitted == [c] for _ in range(20)), "once what b overdrew is paid"


def test_prompt_rows_cost_more_while_other_groups_prefill() -> None:
    """Two ranks share their MLPs: a third of a row's work is done by both."""
    machine, share = CPU, 1 / 3

    def time(load: TrialLoad) -> float:
        more = machine.row * share * load.rows if load.all_groups else 0.0
        return machine.time(load) + more

    pace = fit(time, StepLimits(64, 512, 8000), 0.5, 4, 2)
    assert pace.crowd == pytest.approx(share, rel=0.1)
    assert pace.cost(4, 0, 30, 1) == pytest.approx(pace.cost(4, 0, 30) * (1 + pace.crowd))
    assert machine.pace(0.5, 512).crowd == 0.0, "a group alone"
    scheduler = scheduler_of(pace, 512)
    scheduler.waiting.append(sequence("a", 4000))
    alone = scheduler.schedule(20000).prompt_rows
    assert 0 < scheduler.schedule(20000, 1).prompt_rows < alone


def test_noisy_calibration_still_gives_usable_step_times() -> None:
    """Times that are off by up to three times: still no row for free, no chunk without end, no step without rows."""
    rng = Random(5)
    for _ in range(30):
        pace = fit(lambda load: CPU.time(load) * rng.uniform(1, 3), StepLimits(64, 512, 8000), 0.5, 4, 2)
        assert 0.0 <= pace.crowd <= 1.0
        counts = [pace.cost(16, start, rows) for start in (0, 4000) for rows in range(0, 512, 7)]
        assert counts[:74] == sorted(counts[:74]) and counts[74:] == sorted(counts[74:])
        scheduler = scheduler_of(pace, 512, tokens=20000)
        decoding(scheduler, 4)
        assert len(rode(scheduler, CPU, 3000).times) < 1000


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
    assert (small.token, small.prefix, small.pair) == (0.0, 0.0, 0.0), "noise over a few tokens is no cost of a token"
    assert {load.start + load.committed for load in loads} == {0}


@pytest.mark.parametrize("radix", [False, True])
def test_admitted_request_gets_prompt_rows_in_the_same_step(radix: bool) -> None:
    """Prompts of all lengths, some with a prefix in memory that has to be read: none is admitted for no row at all."""
    rng = Random(3)
    cache = KVCache(700, PageTable(8, 4000, 16, torch.device("cpu")), radix)
    pace = StepTimes(0.5, 4, PACE.decode, 0.0, PACE.target, 0.2, 0.01)
    config = EngineConfig(model_path="", chunked_prefill_size=300)
    scheduler, admitted = Scheduler(ResolvedSettings.from_settings(config), cache, 6, pace), 0
    for number in range(40):
        scheduler.waiting.append(of_tokens(f"{number}", [rng.randrange(2)] * rng.randint(1, 500), 4))
    for _ in range(600):
        plan = scheduler.schedule(400)
        riding = [chunk.sequence for chunk in plan.chunks]
        assert all(one in riding for one in plan.admitted)
        admitted += len(plan.admitted)
        advance(plan)
        for one in [one for one in scheduler.running if not one.prefilling and one.remaining_tokens <= 0]:
            scheduler.release(one)
    assert admitted >= 40 and not scheduler.waiting

"""Whether nodes could hold gangs, against trying all ways to lay their bundles; and what is said if not."""

import random
from itertools import product

import pytest

from cluster.actors import placement
from cluster.actors.cluster_capacity import Layout, Strategy, capacity_problem, gangs_that_fit
from cluster.actors.gpus import hide_other_gpus
from cluster.actors.placement import check_gpu_shares

GPU = {"GPU": 1.0, "CPU": 4.0}


def node(gpus: float, cpus: float = 64.0, kind: str = "") -> dict[str, float]:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **({f"accelerator_type:{kind}": 1.0} if kind else {})}


def gang(world: int, strategy: Strategy = "PACK", gangs: int = 1, **more: float) -> Layout:
    return Layout(({**GPU, **more},) * world, strategy, gangs)


def laid(gangs: int, world: int, strategy: Strategy, slots: list[int]) -> bool:
    """Whether there is a way to lay the bundles of all gangs on nodes with so many slots, by trying all."""
    for places in product(range(len(slots)), repeat=gangs * world):
        of_gang = [places[at * world : (at + 1) * world] for at in range(gangs)]
        if strategy == "STRICT_PACK" and any(len(set(one)) > 1 for one in of_gang):
            continue
        if strategy == "STRICT_SPREAD" and any(len(set(one)) < world for one in of_gang):
            continue
        if all(places.count(at) <= room for at, room in enumerate(slots)):
            return True
    return False


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_gangs_that_fit_equals_a_brute_force_search(strategy: Strategy) -> None:
    draw = random.Random(strategy)
    for _ in range(60):
        slots = [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]
        world = draw.randint(1, 3)
        fit = gangs_that_fit(gang(world, strategy), [node(room) for room in slots])
        assert laid(fit, world, strategy, slots), (slots, world)
        assert not laid(fit + 1, world, strategy, slots), (slots, world)


def test_gangs_that_fit_has_no_rounding_errors_for_fractional_resources() -> None:
    tenth = Layout(({"CPU": 0.1},) * 10)
    assert gangs_that_fit(tenth, [{"CPU": 1.0}]) == 1
    assert gangs_that_fit(tenth, [{"CPU": 0.9}]) == 0


def test_capacity_problem_handles_bundles_of_different_resources() -> None:
    two = ({"GPU": 1.0, "CPU": 1.0}, {"CPU": 8.0})
    assert capacity_problem(Layout(two), [{"GPU": 1.0, "CPU": 2.0}, {"CPU": 8.0}]) == ""
    assert "STRICT_PACK" in capacity_problem(Layout(two, "STRICT_PACK"), [{"GPU": 1.0, "CPU": 8.0}, {"CPU": 8.0}])
    assert "tp_size 2" in capacity_problem(Layout(two), [{"GPU": 1.0, "CPU": 8.0}])


EIGHT = node(8, kind="H100")


@pytest.mark.parametrize(
    ("layout", "nodes", "said"),
    [
        (gang(8), [node(0)], ["no node of the cluster has a GPU: set device to cpu"]),
        (
            gang(8, **{"accelerator_type:A100": 0.001}),
            [node(0), EIGHT],
            ["accelerator_type A100: no node of the cluster has it, nodes have H100: set it to H100", "ray start"],
        ),
        (gang(1, **{"accelerator_type:A100": 0.001}), [node(1)], ["no node names any accelerator: remove it"]),
        (gang(1, TPU=1), [EIGHT], ["asks for 'TPU'"]),
        (Layout(({"GPU": 9.0},)), [EIGHT], ["no node holds a bundle of {GPU: 9}", "{GPU: 8}", "lower the bundle"]),
        (gang(16), [EIGHT], ["tp_size 16", "(GPU 16 of 8)", "lower tp_size to 8"]),
        (gang(16, "STRICT_PACK"), [EIGHT, EIGHT], ["strategy STRICT_PACK: 16", "set strategy to PACK", "tp_size to 8"]),
        (gang(3, "STRICT_SPREAD"), [EIGHT, EIGHT], ["STRICT_SPREAD: 3", "strategy to SPREAD", "tp_size to 2"]),
        (gang(8, gangs=3), [EIGHT, EIGHT], ["deployment_config.num_replicas: 3 gangs of 8", "lower num_replicas"]),
        (gang(8, "STRICT_PACK", 2), [node(12)], ["hold 1 of them with strategy STRICT_PACK"]),
    ],
)
def test_capacity_problem_names_the_field_and_the_remedy(
    layout: Layout, nodes: list[dict[str, float]], said: list[str]
) -> None:
    words = capacity_problem(layout, nodes)
    assert all(part in words for part in said), words


@pytest.mark.parametrize(
    ("bundles", "said"),
    [([{"GPU": 2.0}], "GPU: 1 in its bundle and tp_size"), ([{"GPU": 0.5}] * 2, "cannot share one; set GPU: 1")],
)
def test_gpu_shares_allow_at_most_one_gpu_per_rank_and_no_sharing(bundles: list[dict[str, float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_gpu_shares(bundles)
    check_gpu_shares([{"GPU": 0.5}])
    check_gpu_shares([{"GPU": 1.0}] * 8)


@pytest.mark.parametrize(
    ("holder", "world", "wait_s"),
    [
        ("app/other/gang", 8, 30),
        ("app/deployment/old", 8, 630),
        ("app/deployment/gang", 8, 30),
        ("app/other/gang", 9, 10),
    ],
)
def test_capacity_wait_depends_on_the_placement_group_that_holds_the_gpus(
    monkeypatch: pytest.MonkeyPatch, holder: str, world: int, wait_s: float
) -> None:
    monkeypatch.setattr(placement.ray, "nodes", lambda: [{"Alive": True, "Resources": EIGHT}])
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {**EIGHT, "GPU": 1.0})
    table = {"id": {"name": holder, "state": "CREATED", "bundles": {0: {"GPU": 7.0, "CPU": 1.0}}}}
    monkeypatch.setattr(placement, "placement_group_table", lambda: table)
    lack = placement._shortage_of(Layout((GPU,) * world, redeploy_wait_s=600), "app/deployment/gang")
    assert lack.wait_s == wait_s
    if world == 8:
        assert "GPU: needs 8, free 1 of 8" in lack.reason
        assert (f"held by {holder} {{GPU: 7}}" in lack.reason) == (holder != "app/deployment/gang")


def test_hide_other_gpus_sets_cuda_visible_devices_to_the_gpus_of_the_rank() -> None:
    of_node = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    hide_other_gpus(("6",), of_node)
    assert of_node == {"CUDA_VISIBLE_DEVICES": "6"}
    hide_other_gpus((), of_node)
    assert of_node == {"CUDA_VISIBLE_DEVICES": "6"}

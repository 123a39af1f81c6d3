"""How many gangs fit on the nodes, compared with a brute-force search, and the message when they do not fit."""

import random
from itertools import product

import pytest

from cluster.actors import placement
from cluster.actors.cluster_capacity import Layout, Strategy, capacity_problem, gangs_that_fit
from cluster.actors.gpus import hide_other_gpus
from cluster.actors.placement import check_gpu_shares

GPU = {"GPU": 1.0, "CPU": 4.0}


def node(gpus: float, cpus: float = 64.0, accelerator: str = "") -> dict[str, float]:
    return {
        "CPU": cpus,
        **({"GPU": gpus} if gpus else {}),
        **({f"accelerator_type:{accelerator}": 1.0} if accelerator else {}),
    }


def gang_layout(world: int, strategy: Strategy = "PACK", gangs: int = 1, **more_resources: float) -> Layout:
    return Layout(({**GPU, **more_resources},) * world, strategy, gangs)


def fits_by_brute_force(gangs: int, world: int, strategy: Strategy, slots: list[int]) -> bool:
    """Return whether the bundles of all gangs fit on nodes with `slots[i]` slots each. Tries every assignment."""
    for node_of_bundle in product(range(len(slots)), repeat=gangs * world):
        nodes_of_gangs = [node_of_bundle[index * world : (index + 1) * world] for index in range(gangs)]
        if strategy == "STRICT_PACK" and any(len(set(nodes_of_gang)) > 1 for nodes_of_gang in nodes_of_gangs):
            continue
        if strategy == "STRICT_SPREAD" and any(len(set(nodes_of_gang)) < world for nodes_of_gang in nodes_of_gangs):
            continue
        if all(node_of_bundle.count(index) <= slot_count for index, slot_count in enumerate(slots)):
            return True
    return False


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_gangs_that_fit_equals_a_brute_force_search(strategy: Strategy) -> None:
    draw = random.Random(strategy)
    for _ in range(60):
        slots = [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]
        world = draw.randint(1, 3)
        gang_count = gangs_that_fit(gang_layout(world, strategy), [node(slot_count) for slot_count in slots])
        assert fits_by_brute_force(gang_count, world, strategy, slots), (slots, world)
        assert not fits_by_brute_force(gang_count + 1, world, strategy, slots), (slots, world)


def test_gangs_that_fit_has_no_rounding_errors_for_fractional_resources() -> None:
    tenth = Layout(({"CPU": 0.1},) * 10)
    assert gangs_that_fit(tenth, [{"CPU": 1.0}]) == 1
    assert gangs_that_fit(tenth, [{"CPU": 0.9}]) == 0


def test_capacity_problem_handles_bundles_of_different_resources() -> None:
    bundles = ({"GPU": 1.0, "CPU": 1.0}, {"CPU": 8.0})
    assert capacity_problem(Layout(bundles), [{"GPU": 1.0, "CPU": 2.0}, {"CPU": 8.0}]) == ""
    assert "STRICT_PACK" in capacity_problem(Layout(bundles, "STRICT_PACK"), [{"GPU": 1.0, "CPU": 8.0}, {"CPU": 8.0}])
    assert "tp_size 2" in capacity_problem(Layout(bundles), [{"GPU": 1.0, "CPU": 8.0}])


EIGHT_GPU_NODE = node(8, accelerator="H100")


@pytest.mark.parametrize(
    ("layout", "nodes", "expected_parts"),
    [
        (gang_layout(8), [node(0)], ["no node of the cluster has a GPU: set device to cpu"]),
        (
            gang_layout(8, **{"accelerator_type:A100": 0.001}),
            [node(0), EIGHT_GPU_NODE],
            ["accelerator_type A100: no node of the cluster has it, nodes have H100: set it to H100", "ray start"],
        ),
        (gang_layout(1, **{"accelerator_type:A100": 0.001}), [node(1)], ["no node names any accelerator: remove it"]),
        (gang_layout(1, TPU=1), [EIGHT_GPU_NODE], ["asks for 'TPU'"]),
        (
            Layout(({"GPU": 9.0},)),
            [EIGHT_GPU_NODE],
            ["no node holds a bundle of {GPU: 9}", "{GPU: 8}", "lower the bundle"],
        ),
        (gang_layout(16), [EIGHT_GPU_NODE], ["tp_size 16", "(GPU 16 of 8)", "lower tp_size to 8"]),
        (
            gang_layout(16, "STRICT_PACK"),
            [EIGHT_GPU_NODE, EIGHT_GPU_NODE],
            ["strategy STRICT_PACK: 16", "set strategy to PACK", "tp_size to 8"],
        ),
        (
            gang_layout(3, "STRICT_SPREAD"),
            [EIGHT_GPU_NODE, EIGHT_GPU_NODE],
            ["STRICT_SPREAD: 3", "strategy to SPREAD", "tp_size to 2"],
        ),
        (
            gang_layout(8, gangs=3),
            [EIGHT_GPU_NODE, EIGHT_GPU_NODE],
            ["deployment_config.num_replicas: 3 gangs of 8", "lower num_replicas"],
        ),
        (gang_layout(8, "STRICT_PACK", 2), [node(12)], ["hold 1 of them with strategy STRICT_PACK"]),
    ],
)
def test_capacity_problem_names_the_field_and_the_remedy(
    layout: Layout, nodes: list[dict[str, float]], expected_parts: list[str]
) -> None:
    problem = capacity_problem(layout, nodes)
    assert all(part in problem for part in expected_parts), problem


@pytest.mark.parametrize(
    ("bundles", "expected_message"),
    [([{"GPU": 2.0}], "GPU: 1 in its bundle and tp_size"), ([{"GPU": 0.5}] * 2, "cannot share one; set GPU: 1")],
)
def test_gpu_shares_allow_at_most_one_gpu_per_rank_and_no_sharing(
    bundles: list[dict[str, float]], expected_message: str
) -> None:
    with pytest.raises(ValueError, match=expected_message):
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
    monkeypatch.setattr(placement.ray, "nodes", lambda: [{"Alive": True, "Resources": EIGHT_GPU_NODE}])
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {**EIGHT_GPU_NODE, "GPU": 1.0})
    table = {"id": {"name": holder, "state": "CREATED", "bundles": {0: {"GPU": 7.0, "CPU": 1.0}}}}
    monkeypatch.setattr(placement, "placement_group_table", lambda: table)
    shortage = placement._shortage_of(Layout((GPU,) * world, redeploy_wait_s=600), "app/deployment/gang")
    assert shortage.wait_s == wait_s
    if world == 8:
        assert "GPU: needs 8, free 1 of 8" in shortage.reason
        assert (f"held by {holder} {{GPU: 7}}" in shortage.reason) == (holder != "app/deployment/gang")


def test_hide_other_gpus_sets_cuda_visible_devices_to_the_gpus_of_the_rank() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    hide_other_gpus(("6",), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "6"}
    hide_other_gpus((), environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "6"}

"""Finds the other gangs of the same deployment by actor name, so that each replica can report the metrics of all gangs.

Each replica has one gang of ranks. Each rank is an actor (a shard) with the name
`<deployment>/<gang>#<rank>.<incarnation>` in Aerie's namespace. Replicas cannot call each other. So rank 0 of a gang
also keeps the latest registry sample of its replica (the replica's metrics, serialised).
"""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from cluster.actors.gang import NAMESPACE, Gang
from cluster.observability.exposition import with_replica

ANSWER_TIMEOUT_S = 0.8


def gang_name(deployment: str, gang: str) -> str:
    """Return the full name of a gang: the name of its placement group, and the beginning of its shards' names."""
    return f"{deployment}/{gang}"


async def deployment_samples(gang: Gang) -> list[bytes]:
    """Return the registry samples of all ranks of all gangs of the deployment, and the samples of the other replicas.
    Rank 0 of a gang keeps the sample of the gang's replica. This replica's own sample is left out, because the caller
    has a newer one. Shards that do not answer in time are left out too.
    """
    other_shards = await asyncio.to_thread(_other_shards, gang.spec.name)
    own_samples = [_samples(shard, gang.spec.name, is_own=True) for shard in gang.shards]
    sample_lists = await asyncio.gather(
        *own_samples, *(_samples(shard, name, is_own=False) for name, shard in other_shards)
    )
    return [sample for samples in sample_lists for sample in samples]


async def publish(gang: Gang, sample: bytes) -> None:
    """Leave the replica's own sample on rank 0 of its gang, for the other replicas to read. While the gang restarts,
    rank 0 of the next incarnation gets it.
    """
    gang.keep_sample(sample)
    if not gang.shards:
        return
    try:
        await gang.shards[0].keep_serving_sample.remote(sample)
    except RayError:
        return  # `Gang.watch` notices a dead shard


def replica_id_of(gang: str) -> str:
    """Return the id of the Serve replica that owns a gang, from the gang's name; see `gang_name`."""
    return gang.rpartition("/")[2]


def _other_shards(own_gang: str) -> list[tuple[str, Any]]:
    """Return (gang name, shard) for each shard (the actor of one rank) of the deployment's other gangs. A shard that
    ends while it is looked up is left out.
    """
    deployment, _, _ = own_gang.rpartition("/")
    shards = []
    for entry in list_named_actors(all_namespaces=True):
        name = str(entry["name"])
        if (
            entry["namespace"] == NAMESPACE
            and name.startswith(f"{deployment}/")
            and not name.startswith(f"{own_gang}#")
        ):
            try:
                shards.append((name.rpartition("#")[0], ray.get_actor(name, namespace=NAMESPACE)))
            except ValueError:
                continue
    return shards


async def _samples(shard: Any, gang: str, *, is_own: bool) -> list[bytes]:
    """Return the samples that a shard holds, or an empty list if it does not answer in time. The sample of the rank
    gets the label of its replica. If `is_own` is True, the gang belongs to this replica, whose own sample is left out.
    """

    async def answer() -> list[bytes]:
        samples: list[bytes] = await shard.metrics.remote()
        return samples

    try:
        samples = await asyncio.wait_for(answer(), ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError):
        return []
    rank_sample, *replica_samples = samples
    return [with_replica(rank_sample, replica_id_of(gang)), *([] if is_own else replica_samples)]

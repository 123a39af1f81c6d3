"""The engine settings that the router of a replica uses."""

from types import SimpleNamespace

import pytest

from cluster.api.serve import host
from cluster.api.serve.settings import parse
from cluster.arch.resolve import check_models
from tests.parity.harness import VOCAB, tiny_pair
from tests.unit.models import draft_folders as write


def test_router_uses_the_number_of_levels_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MTP layers make two levels, so the chain has three nodes. The default would be three levels."""
    draft = write.mtp("mimo", 2, vocab=VOCAB)
    kwargs = {"speculative_draft_model_path": draft, "speculative_num_draft_tokens": 3, "device": "cpu"}
    loading = {"model_id": "m", "model_source": tiny_pair()[0]}
    settings = parse({"llm_configs": [{"model_loading_config": loading, "engine_kwargs": kwargs}]})
    check_models(settings.llm.engine_config())
    replica = SimpleNamespace(unique_id="one")
    context = SimpleNamespace(app_name="a", deployment="d", replica_id=replica, rank=SimpleNamespace(rank=0))
    monkeypatch.setattr(host.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(host, "cluster_gpus", lambda: 0.0)
    gang_host = host.GangHost(settings, "none")
    assert (gang_host.config.speculative_num_steps, gang_host.config.speculative_algorithm) == (2, "NEXTN")
    assert gang_host.router._balancer._step_rows == 3

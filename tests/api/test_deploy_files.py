"""The layouts in the comments of deploy/serve.yaml are as valid as the one that it deploys; probes do no harm."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.api.serve.settings import LLMConfig, parse
from tests.api.layouts import FILE, commented


def test_commented_gpu_layouts_of_serve_yaml_are_valid() -> None:
    one_host, two_hosts, replicas = commented()
    llm = parse(one_host["args"]).llm
    layout = llm.layout()
    assert layout.world == llm.engine_config().attn_dp_size == 8
    assert layout.strategy == "STRICT_PACK" and layout.bundles[0]["GPU"] == 1
    assert layout.redeploy_wait_s == 600  # a redeploy in place waits for the streams of the replica that leaves

    given = one_host["args"]["llm_configs"][0]
    wide = LLMConfig.model_validate(
        {**given, **two_hosts, "engine_kwargs": {**given["engine_kwargs"], **two_hosts["engine_kwargs"]}}
    )
    assert wide.layout().world == 16 and wide.layout().strategy == "PACK"
    many = LLMConfig.model_validate({**given, **replicas})
    assert many.deployment_config["max_replicas_per_node"] == 1


def test_zero_max_surge_percent_makes_a_new_gang_wait_for_the_leaving_gang() -> None:
    given = yaml.safe_load(FILE.read_text())["applications"][0]["args"]
    assert parse(given).llm.layout().redeploy_wait_s == 0
    given["llm_configs"][0]["deployment_config"]["max_surge_percent"] = 0
    assert parse(given).llm.layout().redeploy_wait_s == 60


def test_layout_holds_the_least_gang_count_and_the_placement_wait() -> None:
    given = yaml.safe_load(FILE.read_text())["applications"][0]["args"]["llm_configs"][0]

    def changed(engine: dict[str, Any] | None = None, **llm: Any) -> LLMConfig:
        return LLMConfig.model_validate({**given, "engine_kwargs": engine or {}, **llm})

    assert (changed().layout().gangs, changed().layout().wait_s) == (1, None)
    assert changed(deployment_config={"num_replicas": 3}).layout().gangs == 3
    scaled = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 8}}
    assert changed(deployment_config=scaled).layout().gangs == 2
    patient = {"bundle_per_worker": {"CPU": 1}, "wait_s": 600}
    assert changed(placement_group_config=patient).layout().wait_s == 600
    half = {"bundle_per_worker": {"GPU": 0.5}}
    assert changed(placement_group_config=half).device(1.0)[0] == "cuda"
    with pytest.raises(ValueError, match="ranks of one gang cannot share one"):
        changed({"tp_size": 2}, placement_group_config=half)


def test_deploy_configs_listen_on_loopback_or_set_api_keys() -> None:
    service = yaml.safe_load((FILE.parent / "rayservice.yaml").read_text())["spec"]
    kubernetes = yaml.safe_load(service["serveConfigV2"])
    here = [yaml.safe_load((FILE.parent / name).read_text()) for name in ("serve.yaml", "local.yaml")]
    for config in (*here, kubernetes):
        settings = parse(config["applications"][0]["args"])
        assert config["http_options"]["host"] == "127.0.0.1" or settings.api_keys_file
        assert not settings.allow_unauthenticated
    mounted = parse(kubernetes["applications"][0]["args"]).api_keys_file
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        folders = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {v["name"]: v.get("secret") for v in pod["volumes"]}[folders[str(Path(mounted or "").parent)]]
    container = (FILE.parent / "Dockerfile").read_text()
    assert '"http_host=0.0.0.0", "--set", "allow_unauthenticated=true"' in container
    words = FILE.read_text()
    for line in ("api_keys_file: /etc/aerie/api-keys", "allow_unauthenticated: true"):
        commented = yaml.safe_load(line)
        assert f"# {line}" in words
        parse({**yaml.safe_load(words)["applications"][0]["args"], **commented})


def test_kubernetes_probes_do_not_end_a_pod_while_its_gang_restarts() -> None:
    cluster = yaml.safe_load((FILE.parent / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        (worker,) = group["template"]["spec"]["containers"]
        assert worker["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}, "requests wait meanwhile"
        assert "livenessProbe" not in worker, "/health is 503 while a gang restarts"
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert "readinessProbe" not in head, "the head has no replica; KubeRay asks it itself"
    check = (FILE.parent / "Dockerfile").read_text().split("HEALTHCHECK", 1)[1]
    assert "http://127.0.0.1:8000/health" in check

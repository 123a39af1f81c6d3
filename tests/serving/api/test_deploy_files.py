"""The files in deploy/: the commented layouts are valid, every config is safe by default, and probes end no pod."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.api.serve.settings import LLMConfig, parse
from tests.serving.api.layouts import SERVE_YAML, commented_layouts


def test_commented_gpu_layouts_of_serve_yaml_are_valid() -> None:
    one_host, two_hosts, replicas = commented_layouts()
    llm = parse(one_host["args"]).llm
    layout = llm.layout()
    assert layout.world == llm.engine_config().attn_dp_size == 8
    assert layout.strategy == "STRICT_PACK" and layout.bundles[0]["GPU"] == 1
    assert layout.redeploy_wait_s == 600  # an in-place redeploy waits for the streams of the leaving replica

    llm_config = one_host["args"]["llm_configs"][0]
    two_host_llm = LLMConfig.model_validate(
        {**llm_config, **two_hosts, "engine_kwargs": {**llm_config["engine_kwargs"], **two_hosts["engine_kwargs"]}}
    )
    assert two_host_llm.layout().world == 16 and two_host_llm.layout().strategy == "PACK"
    replicated_llm = LLMConfig.model_validate({**llm_config, **replicas})
    assert replicated_llm.deployment_config["max_replicas_per_node"] == 1


def test_zero_max_surge_percent_makes_a_new_gang_wait_for_the_leaving_gang() -> None:
    app_args = yaml.safe_load(SERVE_YAML.read_text())["applications"][0]["args"]
    assert parse(app_args).llm.layout().redeploy_wait_s == 0
    app_args["llm_configs"][0]["deployment_config"]["max_surge_percent"] = 0
    assert parse(app_args).llm.layout().redeploy_wait_s == 60


def test_layout_holds_the_least_gang_count_and_the_placement_wait() -> None:
    llm_config = yaml.safe_load(SERVE_YAML.read_text())["applications"][0]["args"]["llm_configs"][0]

    def changed_config(engine_kwargs: dict[str, Any] | None = None, **llm_settings: Any) -> LLMConfig:
        return LLMConfig.model_validate({**llm_config, "engine_kwargs": engine_kwargs or {}, **llm_settings})

    assert (changed_config().layout().gangs, changed_config().layout().wait_s) == (1, None)
    assert changed_config(deployment_config={"num_replicas": 3}).layout().gangs == 3
    autoscaled_deployment = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 8}}
    assert changed_config(deployment_config=autoscaled_deployment).layout().gangs == 2
    placement_with_wait = {"bundle_per_worker": {"CPU": 1}, "wait_s": 600}
    assert changed_config(placement_group_config=placement_with_wait).layout().wait_s == 600
    half_gpu_placement = {"bundle_per_worker": {"GPU": 0.5}}
    assert changed_config(placement_group_config=half_gpu_placement).device(1.0)[0] == "cuda"
    with pytest.raises(ValueError, match="ranks of one gang cannot share one"):
        changed_config({"tp_size": 2}, placement_group_config=half_gpu_placement)


def test_deploy_configs_listen_on_loopback_or_set_api_keys() -> None:
    service = yaml.safe_load((SERVE_YAML.parent / "rayservice.yaml").read_text())["spec"]
    kubernetes_config = yaml.safe_load(service["serveConfigV2"])
    local_configs = [yaml.safe_load((SERVE_YAML.parent / name).read_text()) for name in ("serve.yaml", "local.yaml")]
    for config in (*local_configs, kubernetes_config):
        settings = parse(config["applications"][0]["args"])
        assert config["http_options"]["host"] == "127.0.0.1" or settings.api_keys_file
        assert not settings.allow_unauthenticated
    keys_file = parse(kubernetes_config["applications"][0]["args"]).api_keys_file
    for group in service["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        folders = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {v["name"]: v.get("secret") for v in pod["volumes"]}[folders[str(Path(keys_file or "").parent)]]
    dockerfile = (SERVE_YAML.parent / "Dockerfile").read_text()
    assert '"http_host=0.0.0.0", "--set", "allow_unauthenticated=true"' in dockerfile
    yaml_text = SERVE_YAML.read_text()
    for line in ("api_keys_file: /etc/aerie/api-keys", "allow_unauthenticated: true"):
        commented_setting = yaml.safe_load(line)
        assert f"# {line}" in yaml_text
        parse({**yaml.safe_load(yaml_text)["applications"][0]["args"], **commented_setting})


def test_kubernetes_probes_do_not_end_a_pod_while_its_gang_restarts() -> None:
    cluster = yaml.safe_load((SERVE_YAML.parent / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        (worker,) = group["template"]["spec"]["containers"]
        assert worker["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}, "the proxy holds requests"
        assert "livenessProbe" not in worker, "/health is 503 while a gang restarts"
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert "readinessProbe" not in head, "the head has no replica, and KubeRay has its own probe of the head"
    healthcheck_line = (SERVE_YAML.parent / "Dockerfile").read_text().split("HEALTHCHECK", 1)[1]
    assert "http://127.0.0.1:8000/health" in healthcheck_line

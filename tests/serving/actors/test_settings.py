import argparse
import re
from pathlib import Path

import pytest
import yaml

from cluster.actors.placement import bundle_of_each_rank, device_of, layout_of
from cluster.api.launch import flags
from cluster.api.launch.overlay import apply_overrides
from cluster.api.launch.plan import LOCAL_DEPLOYMENT, make_plan
from cluster.api.serve.settings import DEPLOYMENT_OPTIONS, parse, resolve_engine_paths, resolve_path
from cluster.config import ConfigError, EngineConfig
from cluster.config.aliases import ALIASES
from cluster.paths.checkout import CHECKOUT
from tests.support.tiny_checkpoints import draft_folder, target_folder


def args(**llm_settings):
    """The arguments of an application with one LLM config, which has a model and these settings."""
    return {"llm_configs": [{"model_loading_config": {"model_id": "m", "model_source": "/models/m"}, **llm_settings}]}


def test_ray_serve_llm_settings_are_accepted():
    settings = parse(
        args(
            engine_kwargs={
                "max_model_len": 512,
                "speculative_config": {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3},
            },
            accelerator_type="H100",
            placement_group_config={"bundle_per_worker": {"CPU": 2, "GPU": 1}, "strategy": "STRICT_PACK"},
            deployment_config={"num_replicas": 2},
        )
    )
    config = settings.llm.engine_config()
    assert (config.model_path, config.context_length, config.speculative_num_steps) == ("/models/m", 512, 3)
    (bundle,) = settings.llm.layout().bundles
    assert bundle == {"CPU": 2, "GPU": 1, "accelerator_type:H100": 0.001}


@pytest.mark.parametrize(
    ("raw_args", "expected_message"),
    [
        ({"llm_configs": []}, "exactly one entry, got 0"),
        ({"llm_configs": [args()["llm_configs"][0]] * 2}, "exactly one entry, got 2"),
        ({"llm_config": []}, "unknown setting 'llm_config'; did you mean 'llm_configs'"),
        (args(engine_kwarg={}), "unknown setting 'engine_kwarg'; did you mean 'engine_kwargs'"),
        (args(engine_kwargs={"page_sise": 1}), "unknown setting 'page_sise'; did you mean 'page_size'"),
        (args(engine_kwargs={"page_size": 0}), "page_size: Input should be greater"),
        (args(engine_kwargs={"page_size": 1, "block_size": 1}), "'block_size' sets 'page_size', which is already set"),
        (args(engine_kwargs={"model": "x"}), "use model_loading_config.model_source"),
        (args(deployment_config={"num_replica": 1}), "'deployment_config.num_replica'; did you mean 'num_replicas'"),
        (args(deployment_config={"placement_group_bundles": []}), "use placement_group_config"),
        (args(placement_group_config={"strategy": "PACK"}), "needs bundle_per_worker or bundles"),
        (args(placement_group_config={"bundles": [{"CPU": 1}] * 2}), "has 2 entries for 1 rank(s)"),
        (args(placement_group_config={"bundle_per_worker": {"CPU": 1}, "strategy": "TIGHT"}), "strategy"),
        (args(lora_config={}), "'lora_config' is not honoured"),
        (args(llm_engine="vLLM"), "'llm_engine' is not honoured"),
        ({**args(), "ingress": "relay"}, "ingress: Input should be 'direct'"),
        ({**args(), "ingress_deployment_config": {"num_replicas": 2}}, "needs ingress: resilient"),
        (
            {**args(), "ingress": "resilient", "ingress_deployment_config": {"placement_group_strategy": "PACK"}},
            "unknown setting 'ingress_deployment_config.placement_group_strategy'; use placement_group_config",
        ),
        ({"llm_configs": ["/no/such.yaml"]}, "cannot read config '/no/such.yaml'"),
    ],
)
def test_unsupported_setting_is_refused_by_name(raw_args, expected_message):
    with pytest.raises(ConfigError) as raised:
        parse(raw_args)
    assert expected_message in str(raised.value)
    assert "pydantic" not in str(raised.value)


def test_llm_configs_may_name_a_file(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(args()["llm_configs"][0]))
    assert parse({"llm_configs": str(file)}).llm == parse(args()).llm


def test_deploy_files_are_valid_and_match_the_default_plan():
    plan = make_plan(None, ["model_path=models/demo/target"])
    assert plan.url == "http://127.0.0.1:8000"
    serve_config = yaml.safe_load((CHECKOUT / "deploy" / "serve.yaml").read_text())
    ray_service = yaml.safe_load((CHECKOUT / "deploy" / "rayservice.yaml").read_text())
    kubernetes_config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    for config in (serve_config, kubernetes_config):
        (application,) = config["applications"]
        assert application["import_path"] == plan.file.applications[0].import_path
        parse(application["args"])
    assert make_plan(str(CHECKOUT / "deploy" / "serve.yaml"), []).engine == plan.engine
    deploy_llm = parse(serve_config["applications"][0]["args"]).llm
    assert deploy_llm.engine_config() == plan.settings.llm.engine_config()


def set_all(*overrides: str) -> dict:
    """A small config with these overrides applied. The original config must stay unchanged."""
    base = {"applications": [{"args": args(engine_kwargs={"block_size": 4, "speculative_algorithm": "EAGLE3"})}]}
    merged = apply_overrides(base, overrides)
    assert base["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]["block_size"] == 4
    return merged


def test_overrides_replace_values_of_the_config():
    merged = set_all(
        "http_port=8123",
        "dtype=float64",
        "page_size=16",
        "deployment_config.num_replicas=2",
        "max_ongoing_requests=7",
        "model_id=other",
        "tokenizer=/t",
        "placement_group_config.bundle_per_worker.CPU=2",
        "speculative_config.num_speculative_tokens=2",
    )
    llm = merged["applications"][0]["args"]["llm_configs"][0]
    assert merged["http_options"] == {"port": 8123}
    assert llm["engine_kwargs"] == {
        "speculative_algorithm": "EAGLE3",
        "dtype": "float64",
        "page_size": 16,
        "speculative_num_steps": 2,
    }
    assert llm["deployment_config"] == {"num_replicas": 2, "max_ongoing_requests": 7}
    assert llm["model_loading_config"]["model_id"] == "other"
    assert llm["model_loading_config"]["tokenizer_source"] == "/t"
    assert llm["placement_group_config"] == {"bundle_per_worker": {"CPU": 2}}


def test_name_shared_by_engine_and_serve_sets_the_engine_option():
    for name in sorted({*EngineConfig.model_fields, *ALIASES} & set(DEPLOYMENT_OPTIONS)):
        llm = set_all(f"{name}=7", f"deployment_config.{name}=9")["applications"][0]["args"]["llm_configs"][0]
        assert llm["engine_kwargs"][ALIASES.get(name, name)] == 7
        assert llm["deployment_config"] == {name: 9}, "the full name sets Serve's option"
    assert make_plan(None, ["max_queued_requests=7"]).engine.max_queued_requests == 7


def test_null_speculative_algorithm_turns_speculation_off():
    llm = set_all("speculative_eagle_topk=4", "speculative_algorithm=null")["applications"][0]["args"]["llm_configs"][0]
    assert llm["engine_kwargs"] == {"block_size": 4, "speculative_algorithm": None}


@pytest.mark.parametrize("override", ["speculative_config.method=null", "speculative_draft_model_path=null"])
def test_other_null_spellings_turn_speculation_off(override):
    llm = set_all("speculative_eagle_topk=4", override)["applications"][0]["args"]["llm_configs"][0]
    (name,) = set(llm["engine_kwargs"]) - {"block_size"}
    assert llm["engine_kwargs"][name] is None


def test_another_model_drops_the_draft_of_the_config_file(tmp_path):
    target, draft = target_folder(), draft_folder(target_folder())
    assert make_plan(None, []).engine.speculative_draft_model_path is not None
    plan = make_plan(None, [f"model_path={target}"])
    assert plan.engine.model_path == target
    assert plan.engine.speculative_draft_model_path is None
    assert plan.settings.llm.model_loading_config.model_id == Path(target).name
    assert "models/demo/draft" in plan.unused_draft_note and "--draft" in plan.unused_draft_note
    # settings that the user gives stay, in any order
    for overrides in (
        [f"model_path={target}", f"speculative_draft_model_path={draft}", "model_id=mine"],
        ["model_id=mine", f"speculative_draft_model_path={draft}", f"model_path={target}"],
    ):
        plan = make_plan(None, overrides)
        assert (plan.engine.speculative_draft_model_path, plan.unused_draft_note) == (draft, "")
        assert plan.settings.llm.model_loading_config.model_id == "mine"
    demo_plan = make_plan(None, ["model_path=models/demo/target"])
    assert demo_plan.engine.speculative_draft_model_path is not None and not demo_plan.unused_draft_note


def plan_of(*arguments: str):
    """The plan that `aerie serve` makes of these command-line arguments."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    args = parser.parse_args(arguments)
    return make_plan(args.config, flags.overrides_of(args), flags.model_of(args))


def test_serve_needs_only_a_model_folder(tmp_path, monkeypatch):
    target, draft = target_folder(), draft_folder(target_folder())
    plan = plan_of(target)
    assert plan.engine == EngineConfig(model_path=target)
    assert plan.settings.llm.model_loading_config.model_id == Path(target).name
    assert plan.settings.llm.deployment_config == LOCAL_DEPLOYMENT
    plan = plan_of(
        target, "--draft", draft, "--served-model-name", "null", "--port", "8123", "--host", "::1", "--tp", "2",
        "--dp", "2", "--max-model-len", "99", "--set", "http_port=8124", "--set", "max_running_requests=3",
    )  # fmt: skip
    assert plan.url == "http://[::1]:8124", "--set overrides --port"
    assert plan.settings.llm.model_loading_config.model_id == "null"
    assert plan.engine == EngineConfig(
        model_path=target,
        speculative_draft_model_path=draft,
        tp_size=2,
        attn_dp_size=2,
        context_length=99,
        max_running_requests=3,
    )
    assert plan_of("--model-path", target).engine.model_path == plan_of("--model", target).engine.model_path == target
    with pytest.raises(ConfigError, match="given twice"):
        plan_of(target, "--model", target)
    monkeypatch.chdir(Path(target).parent)
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    assert plan_of(Path(target).name).engine.model_path == target, "from the working directory"


def test_model_folder_replaces_the_model_of_a_config_file():
    target = target_folder()
    plan = plan_of(target, "--config", str(CHECKOUT / "deploy" / "local.yaml"))
    assert (plan.engine.model_path, plan.engine.tp_size) == (target, 2)
    assert plan.engine.speculative_draft_model_path is None and plan.unused_draft_note


@pytest.mark.parametrize(
    ("speculative_config", "expected_message"),
    [({"method": "eagle3", "model": "/d"}, "'/d'"), ("eagle3", ""), (None, "")],
)
def test_dropped_draft_is_named_in_the_note_for_every_spelling(tmp_path, speculative_config, expected_message):
    file = tmp_path / "serve.yaml"
    application = {"args": args(engine_kwargs={"speculative_config": speculative_config})}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    plan = plan_of(target_folder(), "--config", str(file))
    assert plan.engine.speculative_draft_model_path is None
    assert expected_message in plan.unused_draft_note and bool(plan.unused_draft_note) == bool(expected_message)


def test_default_deployment_options_match_local_yaml():
    local = yaml.safe_load((CHECKOUT / "deploy" / "local.yaml").read_text())
    assert local["applications"][0]["args"]["llm_configs"][0]["deployment_config"] == LOCAL_DEPLOYMENT


def test_speculative_algorithm_that_does_not_fit_the_draft_is_refused():
    target, draft = target_folder(), draft_folder(target_folder())
    plan_of(target, "--draft", draft, "--set", "speculative_algorithm=EAGLE3")
    with pytest.raises(ConfigError, match=r"speculative_algorithm NEXTN does not fit.*EAGLE3 or leave it out"):
        plan_of(target, "--draft", draft, "--set", "speculative_algorithm=NEXTN")


def test_overrides_apply_to_llm_configs_from_a_file(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(args(engine_kwargs={"page_size": 4})["llm_configs"][0]))
    for entry in (str(file), [str(file)]):
        merged = apply_overrides({"applications": [{"args": {"llm_configs": entry}}]}, ["dtype=float64"])
        (llm,) = merged["applications"][0]["args"]["llm_configs"]
        assert llm["engine_kwargs"] == {"page_size": 4, "dtype": "float64"}


@pytest.mark.parametrize(
    ("base", "expected_message"),
    [
        ({"applications": []}, "applications must be a list with one entry"),
        ({"applications": None}, "applications must be a list with one entry"),
        ({"applications": ["x"]}, "applications must be a list with one entry"),
        ({"applications": [{"args": 3}]}, "applications.args must be a mapping, got 3"),
        ({"applications": [{"args": {"llm_configs": 3}}]}, "llm_configs must be a list"),
        ({"applications": [{"args": {"llm_configs": [3]}}]}, "llm_configs must hold a mapping"),
        ({"applications": [{"args": args(engine_kwargs=3)}]}, "engine_kwargs must be a mapping, got 3"),
        (
            {"applications": [{"args": args(engine_kwargs={"speculative_config": "eagle3"})}]},
            "engine_kwargs.speculative_config must be a mapping, got 'eagle3'",
        ),
    ],
)
def test_config_file_with_a_wrong_structure_is_refused_by_field_name(base, expected_message):
    with pytest.raises(ConfigError, match=re.escape(expected_message)):
        apply_overrides(base, ["dtype=float64"])


def test_overrides_fill_empty_parts_of_a_config_file():
    empty = {"applications": [{"args": {"llm_configs": [{"engine_kwargs": None, "deployment_config": None}]}}]}
    merged = apply_overrides({**empty, "http_options": None}, ["dtype=float64", "http_port=1", "num_replicas=2"])
    assert merged["http_options"] == {"port": 1}
    assert merged["applications"][0]["args"]["llm_configs"][0]["deployment_config"] == {"num_replicas": 2}


def test_every_engine_path_is_resolved_from_aerie_home(tmp_path, monkeypatch):
    names = ("model_path", "tokenizer_path", "speculative_draft_model_path", "speculative_token_map")
    for name in names:
        (tmp_path / f"{name}.json").touch()
    monkeypatch.setenv("AERIE_HOME", str(tmp_path))
    resolved = resolve_engine_paths(EngineConfig(**{name: f"{name}.json" for name in names}))
    assert [getattr(resolved, name) for name in names] == [str(tmp_path / f"{name}.json") for name in names]


@pytest.mark.parametrize(
    ("override", "expected_message"),
    [
        ("dtyp=float64", "unknown setting 'dtyp'; did you mean 'dtype'"),
        ("http_prot=1", "unknown setting 'http_prot'; did you mean 'http_port'"),
        ("nothing", "--set takes key=value"),
        ("http_port=0", "http_options.port"),
        ("http_port=eighty", "http_options.port"),
        ("http_host=0.0.0.0", "there are no API keys"),
        ("model_path=/no/such/model", "/no/such/model"),
        ("speculative_num_draft_tokens=99", "speculative_num_draft_tokens"),
        ("speculative_draft_model_path=/no/draft", "speculative_draft_model_path"),
        ("mem_fraction_static=1.5", "mem_fraction_static"),
        ("speculative_token_map=/no/map.json", "speculative_token_map"),
        ("deployment_config.replicas=2", "deployment_config.replicas"),
        ("http_options.prot=1", "unknown setting 'prot'; did you mean 'port'"),
        ("api_keys_file=keys", "api_keys_file 'keys' must be an absolute path"),
        ("api_keys_fil=/keys", "did you mean 'api_keys_file'"),
        ("allow_unauthenticate=true", "did you mean 'allow_unauthenticated'"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override, expected_message):
    with pytest.raises(ConfigError) as raised:
        make_plan(None, [override])
    assert expected_message in str(raised.value)


def test_plan_counts_cpus_for_the_initial_replicas():
    for overrides, replicas in (
        ([], 1),
        (["num_replicas=3"], 3),
        (["num_replicas=auto"], 1),
        (["autoscaling_config.max_replicas=100"], 1),
        (["deployment_config.autoscaling_config.initial_replicas=2"], 2),
    ):
        plan = make_plan(None, [o if o.startswith(("num", "dep")) else f"deployment_config.{o}" for o in overrides])
        assert (plan.replicas, plan.resources("CPU")) == (replicas, replicas * float(plan.engine.tp_size))


def test_relative_paths_resolve_from_home_then_working_directory_then_checkout(tmp_path, monkeypatch):
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    (home / "a").mkdir(parents=True)
    (cwd / "a").mkdir(parents=True)
    (cwd / "b").mkdir()
    monkeypatch.setenv("AERIE_HOME", str(home))
    monkeypatch.chdir(cwd)
    assert resolve_path("a") == str(home / "a")
    assert resolve_path("b") == str(cwd / "b")
    assert resolve_path("deploy") == str(CHECKOUT / "deploy")
    assert resolve_path("nowhere") == "nowhere"
    assert resolve_path("/a") == "/a"


def test_rank_order_groups_nodes_with_the_own_node_first():
    nodes = {0: "far", 1: "own", 2: "far", 3: "own", 4: "third"}
    assert bundle_of_each_rank(nodes, own_node="own") == (1, 3, 0, 2, 4)
    assert bundle_of_each_rank(nodes, own_node="elsewhere") == (0, 2, 1, 3, 4)


GPU, CPU = {"GPU": 1.0}, {"CPU": 1.0}


@pytest.mark.parametrize(
    ("configured_device", "bundles", "accelerator", "gpus", "expected_device", "expected_reason"),
    [
        ("auto", None, None, 0, "cpu", "no GPU"),
        ("auto", None, None, 2, "cuda", "the cluster has 2 GPU(s)"),
        ("auto", None, "H100", 0, "cuda", "accelerator_type is H100"),
        ("auto", [CPU], None, 2, "cpu", "does not reserve a GPU"),
        ("auto", [GPU, CPU], None, 2, "cpu", "does not reserve a GPU for each rank"),
        ("auto", [GPU, GPU], None, 0, "cuda", "placement_group_config reserves GPUs"),
        ("cpu", None, None, 2, "cpu", "device: cpu"),
        ("cuda", None, None, 0, "cuda", "no GPU yet"),
    ],
)
def test_device_follows_reserved_and_available_gpus(
    configured_device, bundles, accelerator, gpus, expected_device, expected_reason
):
    chosen_device, chosen_reason = device_of(configured_device, bundles, accelerator, gpus)
    assert chosen_device == expected_device
    assert expected_reason in chosen_reason


def test_cuda_ranks_reserve_a_gpu_each_and_cpu_ranks_none():
    llm = parse(args(engine_kwargs={"tp_size": 2})).llm
    assert llm.layout(llm.device(2.0)[0]).bundles == ({"CPU": 1.0, "GPU": 1.0},) * 2
    assert llm.layout(llm.device(0.0)[0]).bundles == ({"CPU": 1.0},) * 2
    with pytest.raises(ConfigError, match="device is cuda but placement_group_config gives a rank no GPU"):
        parse(args(engine_kwargs={"device": "cuda"}, placement_group_config={"bundle_per_worker": {"CPU": 1}}))


def test_plan_refuses_more_gpus_than_the_machine_has():
    plan = plan_of(target_folder(), "--tp", "2")
    plan.check_resources({"GPU": 0.0})
    plan.check_resources({"GPU": 2.0})
    with pytest.raises(ConfigError, match="need 2 GPU, and this machine has 1; lower tp_size"):
        plan.check_resources({"GPU": 1.0})
    with pytest.raises(ConfigError, match="need 1 GPU, and this machine has 0; set device to cpu"):
        plan_of(target_folder(), "--set", "device=cuda").check_resources({"GPU": 0.0})
    make_plan(None, []).check_resources({"GPU": 1.0})  # the demo runs on the CPU on every machine


def test_default_layout_has_a_bundle_for_each_rank():
    assert layout_of(1).bundles == ({"CPU": 1.0},)
    assert layout_of(2, device="cuda").bundles == ({"CPU": 1.0, "GPU": 1.0},) * 2
    with pytest.raises(ValueError, match="give one each"):
        layout_of(2, bundles=[{"CPU": 1.0}])


def test_dockerfile_serves_the_local_config():
    text = (Path(CHECKOUT) / "deploy" / "Dockerfile").read_text()
    assert "deploy/local.yaml" in text and "USER ray" in text

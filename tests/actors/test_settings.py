from pathlib import Path

import pytest
import yaml

from cluster.actors.placement import layout_of, rank_order
from cluster.api.plan import lay_over, make_plan
from cluster.api.settings import CHECKOUT, parse, resolve_path
from cluster.config import ConfigError


def args(**llm):
    return {"llm_configs": [{"model_loading_config": {"model_id": "m", "model_source": "/models/m"}, **llm}]}


def test_ray_serve_llm_words_are_understood():
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
    ("given", "said"),
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
def test_what_cannot_be_honoured_is_refused_by_name(given, said):
    with pytest.raises(ConfigError) as refused:
        parse(given)
    assert said in str(refused.value)
    assert "pydantic" not in str(refused.value)


def test_an_entry_may_be_a_file(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(args()["llm_configs"][0]))
    assert parse({"llm_configs": str(file)}).llm == parse(args()).llm


def test_every_deploy_file_is_valid_and_the_two_defaults_serve_the_same():
    plan = make_plan(None, ["model_path=models/demo/target"])
    assert plan.url == "http://127.0.0.1:8000"
    served = yaml.safe_load((CHECKOUT / "deploy" / "serve.yaml").read_text())
    service = yaml.safe_load((CHECKOUT / "deploy" / "rayservice.yaml").read_text())
    on_kubernetes = yaml.safe_load(service["spec"]["serveConfigV2"])
    for config in (served, on_kubernetes):
        (application,) = config["applications"]
        assert application["import_path"] == plan.file.applications[0].import_path
        parse(application["args"])
    assert make_plan(str(CHECKOUT / "deploy" / "serve.yaml"), []).engine == plan.engine
    ours = parse(served["applications"][0]["args"]).llm
    assert ours.engine_config() == plan.settings.llm.engine_config()


def set_all(*overrides: str) -> dict:
    base = {"applications": [{"args": args(engine_kwargs={"block_size": 4, "speculative_algorithm": "EAGLE3"})}]}
    made = lay_over(base, overrides)
    assert base["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]["block_size"] == 4
    return made


def test_settings_are_laid_over_the_config():
    made = set_all(
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
    llm = made["applications"][0]["args"]["llm_configs"][0]
    assert made["http_options"] == {"port": 8123}
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


def test_speculation_is_switched_off_with_one_word():
    llm = set_all("speculative_eagle_topk=4", "speculative_algorithm=null")["applications"][0]["args"]["llm_configs"][0]
    assert llm["engine_kwargs"] == {"block_size": 4, "speculative_algorithm": None}


@pytest.mark.parametrize(
    ("override", "said"),
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
        ("deployment_config.replicas=2", "deployment_config.replicas"),
        ("http_options.prot=1", "unknown setting 'prot'; did you mean 'port'"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override, said):
    with pytest.raises(ConfigError) as refused:
        make_plan(None, [override])
    assert said in str(refused.value)


def test_a_local_ray_has_room_for_the_first_replicas():
    for overrides, replicas in (
        ([], 1),
        (["num_replicas=3"], 3),
        (["num_replicas=auto"], 1),
        (["autoscaling_config.max_replicas=100"], 1),
        (["deployment_config.autoscaling_config.initial_replicas=2"], 2),
    ):
        plan = make_plan(None, [o if o.startswith(("num", "dep")) else f"deployment_config.{o}" for o in overrides])
        assert (plan.replicas, plan.resources("CPU")) == (replicas, replicas * float(plan.engine.tp_size))


def test_relative_paths_are_found_from_home_the_working_directory_and_the_checkout(tmp_path, monkeypatch):
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


def test_ranks_follow_nodes_own_node_first():
    nodes = {0: "far", 1: "own", 2: "far", 3: "own", 4: "third"}
    assert rank_order(nodes, own_node="own") == (1, 3, 0, 2, 4)
    assert rank_order(nodes, own_node="elsewhere") == (0, 2, 1, 3, 4)


def test_default_bundles():
    assert layout_of(1).bundles == ({"CPU": 1.0},)
    assert layout_of(2, device="cuda").bundles == ({"CPU": 1.0, "GPU": 1.0},) * 2
    with pytest.raises(ValueError, match="give one each"):
        layout_of(2, bundles=[{"CPU": 1.0}])


def test_the_container_serves_the_local_config():
    text = (Path(CHECKOUT) / "deploy" / "Dockerfile").read_text()
    assert "deploy/local.yaml" in text and "USER ray" in text

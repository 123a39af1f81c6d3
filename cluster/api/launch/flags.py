"""The flags of `aerie serve`, and the setting that each of `FLAGS` overrides. `--set` overrides any setting."""

import argparse
from pathlib import Path
from typing import NoReturn

from cluster.api.launch.overlay import Override
from cluster.api.launch.plan import existing_path_or_name
from cluster.arch.hub.names import HUB_NAME
from cluster.chat.formats.choose import REASONING_NAMES, TOOL_NAMES
from cluster.config import ConfigError

FLAGS: dict[str, str] = {
    "host": "http_host",
    "port": "http_port",
    "served_model_name": "model_id",
    "tp_size": "tp_size",
    "dp_size": "attn_dp_size",
    "context_length": "context_length",
    "dtype": "dtype",
    "draft": "speculative_draft_model_path",
    "api_keys_file": "api_keys_file",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the model, the address and the settings."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"the target: its folder, or {HUB_NAME}; without it and --config, the demo pair",
    )
    parser.add_argument("--model-path", "--model", metavar="MODEL", help="another way to give MODEL")
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help="a draft for it (EAGLE, EAGLE-3, MTP layers or an assistant): its folder or its name on a hub",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: the folder's name, or that on the hub)",
    )
    _add_sizes(parser)
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help=f"how the model writes calls of tools: {', '.join(TOOL_NAMES)} (default: auto, by its chat template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help=f"how it marks what it thinks: {', '.join(REASONING_NAMES)} (default: auto)",
    )
    parser.add_argument("--api-key", "--admin-api-key", type=_refuse_key, help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="a Serve config; the other options override it")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one setting: an engine setting (mem_fraction_static=0.5), http_host, http_port, or a dotted key "
        "(deployment_config.num_replicas=2); speculative_algorithm=null turns speculation off; may be repeated",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the address, the ranks, the context and who may use the server."""
    parser.add_argument("--host", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument("--tp-size", "--tp", "--tensor-parallel-size", type=int, metavar="N", help="ranks (default: 1)")
    parser.add_argument(
        "--dp-size",
        "--dp",
        "--data-parallel-size",
        type=int,
        metavar="N",
        help="attention groups that these ranks form, each with requests of its own; divides --tp (default: 1)",
    )
    parser.add_argument(
        "--context-length",
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="most tokens of prompt and output together (default: the model's)",
    )
    parser.add_argument("--dtype", help="auto, bfloat16, float16, float32 or float64 (default: auto)")
    parser.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="who may use the server: keys as `aerie keys` makes them (env: AERIE_API_KEY, AERIE_ADMIN_API_KEY)",
    )


def _refuse_key(key: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        "every user of the machine can read a command line: set the variable AERIE_API_KEY (AERIE_ADMIN_API_KEY), or "
        "use --api-keys-file"
    )


def model_of(args: argparse.Namespace) -> str | None:
    """Return the target's folder or hub name, given as MODEL or as --model-path. None means the config's model.

    Raises:
        ConfigError: it is given twice.
    """
    if args.model is not None and args.model_path is not None:
        raise ConfigError("the model is given twice, as MODEL and as --model-path; give it once")
    model: str | None = args.model if args.model is not None else args.model_path
    return model


def overrides_of(args: argparse.Namespace) -> list[Override]:
    """Return the overrides of the flags, then the overrides of `--set`, so `--set` wins if both name a setting."""
    flag_values = {flag: getattr(args, flag) for flag in FLAGS}
    if flag_values["draft"] is not None:
        flag_values["draft"] = existing_path_or_name(flag_values["draft"])
    if flag_values["api_keys_file"] is not None:
        flag_values["api_keys_file"] = str(Path(flag_values["api_keys_file"]).absolute())
    flags: list[Override] = [(FLAGS[flag], value) for flag, value in flag_values.items() if value is not None]
    return [*flags, *args.overrides]

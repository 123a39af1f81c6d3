"""`aerie serve`: serves one model on its own Ray, or on a running Ray cluster, until a signal stops it.

The settings are checked before anything starts. Then Ray starts while a thread imports the Serve application, the
application is deployed, and its URL is printed once `/health` answers 200. On SIGINT or SIGTERM new calls are refused;
when the open calls have ended, Serve ends, then Ray, and no process is left. Warnings and errors of all processes
appear on the terminal as they come. The log holds them too, and stays after the server has ended.
"""

import argparse
import functools
import importlib
import logging
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import ray
from ray.exceptions import RayError

from cluster.actors.local_ray import LocalRay, num_local_gpus, uses_haproxy
from cluster.api.core.api_keys import SCOPE_OF_VARIABLE
from cluster.api.launch import flags
from cluster.api.launch.console import Console
from cluster.api.launch.plan import ServePlan, check_port, make_plan
from cluster.api.launch.shared_ray import check_alive
from cluster.api.launch.stop import StopSignals, drain
from cluster.api.proxy.middleware import CALLBACK, IMPORT_PATH
from cluster.arch.hub import HubModel, fetch, hub_models
from cluster.config import ConfigError
from cluster.observability.logs import LogFormat, LogSettings, configure, default_path, remove_old_logs
from cluster.paths.cache_folder import cache_folder, default_folder_problem

logger = logging.getLogger(__name__)

POLL_S = 0.1
DELETE_TIMEOUT_S = 2.0
EXIT_FAILED = 1
MAX_ERROR_LINES = 12  # the last lines of an error from Ray that the terminal shows


class StartError(RuntimeError):
    """The application did not start; the message is for the terminal."""


class StartPhases:
    """Measures how long each part of the start takes."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Record that phase `name` ends now and the next phase begins."""
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `aerie serve`."""
    flags.add_arguments(parser)
    parser.add_argument(
        "--address", metavar="ADDRESS", help="deploy to this running Ray cluster ('auto' finds it) (env: RAY_ADDRESS)"
    )
    parser.add_argument(
        "--log-file",
        metavar="FILE",
        help="the log of the whole server (default: one per start in ~/.cache/aerie/logs; the latest 20 are kept)",
    )
    parser.add_argument("--log-format", choices=get_args(LogFormat), help="lines of text, or one JSON object per line")
    parser.add_argument("--verbose", action="store_true", help="print the logs of Ray's processes")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Return 0 if a signal stopped the server, even during the start, and 1 if the server
    did not start.

    Raises:
        ConfigError: a setting or file cannot be used.
    """
    signals = StopSignals()
    with signals.installed():
        return _serve(args, signals)


def _serve(args: argparse.Namespace, signals: StopSignals) -> int:
    phases = StartPhases()
    address = args.address or os.environ.get("RAY_ADDRESS")
    plan = make_plan(args.config, flags.overrides_of(args), flags.model_of(args))
    if plan.unused_draft_note:
        _report(plan.unused_draft_note)
    if address:
        _check_environment()
    plan = _with_log_options(plan, args, own_ray=not address)
    name = plan.file.applications[0].name
    check_port(plan.http)
    if address:
        check_alive(address)
    else:
        plan.check_resources({"GPU": num_local_gpus()})
    log = plan.settings.log(name)
    configure(log, to_stderr=False)
    phases.end("settings")
    if models := hub_models(plan.engine):
        try:
            _fetch(plan, models, None if address else signals)
        except KeyboardInterrupt:
            _report("stopping before the start was over")
            return 0
        phases.end("download")
    os.environ.setdefault(CALLBACK, IMPORT_PATH)
    _report_locations(plan, log, address)
    with ThreadPoolExecutor(1) as executor:
        app_import = executor.submit(importlib.import_module, "cluster.api.serve.application")
        cluster = None if address else _local_ray(plan, args.verbose)
        signals.on_second_signal(functools.partial(_delete_application, name) if cluster is None else cluster.kill)
        console = None if address or args.verbose else Console(log.path)
        deployed = ready = False
        try:
            signals.check()
            _connect(cluster, address)
            signals.release()  # `ray.init` has returned: SIGTERM need not be blocked any longer
            signals.check()
            phases.end("ray")
            deployed = True
            _deploy(plan, app_import, phases, signals)
            _wait_ready(plan, signals)
            ready = True
            phases.end("model")
            _report(f"started in {phases}")
            print(f"READY {plan.url}/v1", flush=True)
            signals.wait()
            _report("stopping")
            drain(importlib.import_module("ray.serve"), name, plan.settings.drain_timeout_s, _report)
        except (RuntimeError, RayError, TimeoutError) as error:
            _report("\n".join(str(error).splitlines()[-MAX_ERROR_LINES:]) or type(error).__name__, error=True)
            return EXIT_FAILED
        except KeyboardInterrupt:
            _report("stopping before the start was over")
        finally:
            if console is not None:
                console.stop()
            _shut_down(cluster, plan, graceful=deployed if cluster is None else ready)
            _report(f"ended; the log stays: {log.path}")
    return 0


def _check_environment() -> None:
    """Refuse API keys in this process's environment, because the nodes of a running cluster do not get it.

    Raises:
        ConfigError: a variable of `SCOPE_OF_VARIABLE` is set.
    """
    if any(variable in os.environ for variable in SCOPE_OF_VARIABLE):
        raise ConfigError(
            f"{' and '.join(SCOPE_OF_VARIABLE)} reach a running cluster only where they are set before `ray start`; "
            "unset them here, or use --api-keys-file with the same path on every node"
        )


def _report_locations(plan: ServePlan, log: LogSettings, address: str | None) -> None:
    """Print the path of the log, the names of the API keys, and what an operator must know about this machine."""
    if uses_haproxy():
        _report("HAProxy's statistics and metrics pages listen on all addresses; Serve has no setting for that")
    _report(f"log: {log.path}" + (" on every node" if address else ""))
    if reason := default_folder_problem():
        _report(f"{reason}: logs, and kernels that are compiled here, go to {cache_folder()}")
    if plan.keys is not None:
        _report(f"API keys: {plan.keys}")


def _fetch(plan: ServePlan, models: dict[str, HubModel], signals: StopSignals | None) -> None:
    """Print the commits of the hub models, and download the files that this machine's cache lacks. `signals` is None
    for a shared cluster: there each node downloads the files when its ranks start.

    Raises:
        ConfigError: the files cannot be downloaded, or the models cannot be served.
        KeyboardInterrupt: a signal came during the download.
    """
    for model in models.values():
        _report(f"{model.name}: revision {model.revision} is commit {model.commit}")
    if signals is not None:
        fetched = fetch(plan.engine, signals.check)
        for name, model in models.items():
            _report(f"{model.name}: in {getattr(fetched, name)}")


def _with_log_options(plan: ServePlan, args: argparse.Namespace, *, own_ray: bool) -> ServePlan:
    """Return the plan with the log options of the command line. If no log file is set, a server with its own Ray
    (`own_ray`) gets a new log file, and old log files are removed.
    """
    log_options: dict[str, str] = {}
    if args.log_file is not None:
        log_options["log_file"] = str(Path(args.log_file).absolute())
    elif plan.settings.log_file is None and own_ray:
        path = default_path(f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        remove_old_logs(path.parent)
        log_options["log_file"] = str(path)
    if args.log_format is not None:
        log_options["log_format"] = args.log_format
    return replace(plan, settings=plan.settings.model_copy(update=log_options))


def _delete_application(name: str) -> None:
    """Ask Serve to delete the application from a shared cluster. This runs in a thread, because a signal handler, which
    calls this function, must take no locks.
    """
    serve = importlib.import_module("ray.serve")
    thread = threading.Thread(target=serve.delete, args=(name,), kwargs={"_blocking": False}, daemon=True)
    thread.start()
    thread.join(timeout=DELETE_TIMEOUT_S)


def _local_ray(plan: ServePlan, verbose: bool) -> LocalRay:
    """Return a local Ray cluster for this server only, which is not started yet. It has at least the CPUs that the plan
    needs, even if the machine has fewer: Ray uses the number only to schedule, and reserves no cores.
    """
    cpus = max(os.cpu_count() or 1, round(plan.resources("CPU") + plan.replicas + 0.5))
    return LocalRay(num_cpus=cpus, verbose=verbose)


def _connect(cluster: LocalRay | None, address: str | None) -> None:
    if cluster is not None:
        cluster.start()
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster answers at {address!r} (--address or RAY_ADDRESS): {error}") from None


def _deploy(plan: ServePlan, app_import: "Future[Any]", phases: StartPhases, signals: StopSignals) -> None:
    """Start Serve and deploy the application, without waiting for the model.

    Raises:
        KeyboardInterrupt: a signal came meanwhile.
    """
    application_module = app_import.result()
    signals.check()
    serve = application_module.serve
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location=plan.file.proxy_location,
        http_options=plan.http.model_dump(exclude_none=True),
        logging_config=plan.file.logging_config,
    )
    phases.end("serve")
    signals.check()
    target = serve.RunTarget(
        target=application_module.build_app(plan.settings),
        name=plan.file.applications[0].name,
        route_prefix=plan.file.applications[0].route_prefix,
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _wait_ready(plan: ServePlan, signals: StopSignals) -> None:
    """Wait until `/health` of the proxy answers 200.

    Raises:
        ConfigError: the engine refused its settings or files.
        StartError: the application failed for another reason.
        KeyboardInterrupt: a signal came meanwhile.
    """
    serve = importlib.import_module("ray.serve")
    name = plan.file.applications[0].name
    while True:
        time.sleep(POLL_S)
        signals.check()
        application = serve.status().applications.get(name)
        if application is None:
            continue
        if application.status == "RUNNING":
            if _is_healthy(plan.url):
                return
        elif application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            error_text = "\n".join([application.message, *(d.message for d in application.deployments.values())])
            # Serve reports the replica's exception as a traceback in text; its last ConfigError is the cause.
            if config_errors := re.findall(r"ConfigError: (.*)", error_text):
                raise ConfigError(config_errors[-1])
            raise StartError(f"the application did not start ({application.status}):\n{error_text}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _shut_down(cluster: LocalRay | None, plan: ServePlan, *, graceful: bool) -> None:
    """End this server: its own Ray cluster, or on a shared cluster (`cluster` is None) only the application.

    If `graceful` is false, neither Serve nor the application is shut down first: nothing is served yet, and Serve would
    wait until the replica has started.
    """
    serve = importlib.import_module("ray.serve")
    if cluster is None:
        try:
            if graceful and ray.is_initialized():
                serve.delete(plan.file.applications[0].name)
        finally:
            ray.shutdown()
        return
    with Path(os.devnull).open("w") as devnull, redirect_stdout(devnull):  # Ray prints a line for each ended actor
        try:
            if graceful and ray.is_initialized():
                serve.shutdown()
        finally:
            cluster.stop()


def _report(text: str, *, error: bool = False) -> None:
    logger.log(logging.ERROR if error else logging.INFO, "%s", text)
    print(f"aerie serve: {text}", file=sys.stderr if error else sys.stdout, flush=True)

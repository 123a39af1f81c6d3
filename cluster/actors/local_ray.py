"""A private Ray cluster on this machine that lives as long as this process. The cluster listens on loopback only, and
requires a token unless RAY_AUTH_MODE says otherwise. Its folder is removed at the end.

`aerie serve` and the tests use it. It shares no ports, folder or lifetime with a Ray that `ray start` has started.
"""

import functools
import inspect
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.parameter
import ray._private.ray_constants as ray_constants
import ray._private.services
from ray._private.accelerators import get_accelerator_manager_for_resource

from cluster.actors.ray_folder import OwnedFolder, remove_orphans

import psutil  # type: ignore[import-untyped]  # isort: skip  # Ray's own copy, found after `import ray`

MIB = 1 << 20
STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 2.0


@dataclass(slots=True)
class LocalRay:
    """A local Ray cluster of the given size; Ray finds the CPUs and GPUs that are None. `start` and `stop` may each be
    called once.
    """

    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_mib: int = 128
    verbose: bool = False
    _folder: OwnedFolder | None = None
    _processes: list[psutil.Process] = field(default_factory=list)

    def start(self) -> None:
        """Start Ray and connect this process to it."""
        remove_orphans()
        self._folder = OwnedFolder()
        prepare_environment(self._folder.path)
        earlier_processes = set(psutil.Process().children(recursive=True))
        try:
            with _without_helpers(with_logs=self.verbose), _own_process_group():
                ray.init(
                    address="local",
                    num_cpus=self.num_cpus,
                    num_gpus=self.num_gpus,
                    object_store_memory=self.object_store_mib * MIB,
                    include_dashboard=False,
                    log_to_driver=self.verbose,
                    logging_level=logging.INFO if self.verbose else logging.ERROR,
                    _temp_dir=str(self._folder.ray_folder),
                )
        finally:  # also after a failed start, which may leave processes
            self._processes = [p for p in psutil.Process().children(recursive=True) if p not in earlier_processes]

    def stop(self) -> None:
        """Stop Ray, wait until its processes are gone, and remove its folder."""
        started = self._all_processes()
        try:
            ray.shutdown()
            _, alive = psutil.wait_procs(started, timeout=STOP_TIMEOUT_S)
            _kill(alive, timeout_s=1.0)
        finally:
            self._remove_folder()

    def kill(self) -> None:
        """Kill all of Ray's processes now, and remove its folder. Use this only if this process is about to exit."""
        try:
            _kill(self._all_processes(), KILL_TIMEOUT_S)
        finally:
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def _all_processes(self) -> list[psutil.Process]:
        """Return the processes that `start` has started and all their descendants."""
        processes: dict[int, psutil.Process] = {}
        for process in self._processes:
            try:
                processes |= {p.pid: p for p in (process, *process.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
        return list(processes.values())


def _kill(processes: list[psutil.Process], timeout_s: float) -> None:
    """Kill processes and wait until they are gone; some may have ended already."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)


@contextmanager
def _without_helpers(with_logs: bool) -> Iterator[None]:
    """Make `ray.init` skip three helper processes that are not needed here; this saves 4 s on two cores, and 280 MB.

    They are the autoscaler's monitor, the dashboard's server (it starts even with include_dashboard=False, and
    `ray.init` waits for it) and, unless `with_logs`, the log monitor. `ray.init` has no arguments that skip them, so
    this function patches Ray's internals. If a version of Ray has other internal names, the helpers start, which only
    costs time and memory.
    """
    parameter: Any = ray._private.parameter
    node: Any = ray._private.node.Node
    params = getattr(parameter, "RayParams", None)
    start_api_server = getattr(node, "start_api_server", None)
    if params is None or start_api_server is None:
        yield
        return
    accepted = inspect.signature(params).parameters
    helper_options = {"no_monitor": True, "include_log_monitor": with_logs}
    parameter.RayParams = functools.partial(params, **{k: v for k, v in helper_options.items() if k in accepted})
    node.start_api_server = lambda self, **_: None
    try:
        yield
    finally:
        parameter.RayParams = params
        node.start_api_server = start_api_server


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Make `ray.init` start Ray's processes in one process group of their own, with SIGTERM unblocked.

    A signal to this process's group (Ctrl-C in a terminal, or `timeout`) then reaches only this process, which ends Ray
    in order. Ray's reaper is in the new group, and ends the new group when this process is gone. If a version of Ray
    has other internal names, its processes start in this process's group, with this thread's signal mask.
    """
    services: Any = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:
        yield
        return
    leader = 0  # id of the first process started, whose group the later ones join

    def start(*args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> Any:
        nonlocal leader

        def prepare() -> None:
            if preexec_fn is not None:
                preexec_fn()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            try:
                os.setpgid(0, leader)
            except OSError:  # the leader has ended, and so has its group
                os.setpgid(0, 0)

        process = popen(*args, preexec_fn=prepare, **options)
        leader = leader or process.pid
        return process

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = popen


def prepare_environment(folder: Path) -> None:
    """Set Ray's environment variables for this process and its children. Variables that are already set are kept,
    except RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER.

    `ray.init` of a new cluster turns token authentication on by itself unless RAY_AUTH_MODE is set otherwise.
    """
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default niceness of workers is 15: a rank beside busy programs would get one CPU second in thirty.
        "RAY_worker_niceness": "0",
        # Serve replaces a dead proxy after three failed health checks. The defaults of both settings are 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    }
    if uses_haproxy():
        haproxy_folder = folder / "haproxy"
        defaults |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy_folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy_folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy_folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy_folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy_folder / "server-state"),
            # These two ports must be fixed numbers, and another Ray on this machine may use the defaults.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(_unused_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(_unused_port()),
            # A stopping replica waits this long, so that load balancers notice. Here the only load balancer is Serve's
            # HAProxy, which needs little time.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # With False, Ray's node address is 127.0.0.1, and all its servers bind to loopback.
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        ensure_token(folder)


def num_local_gpus() -> int:
    """Return how many GPUs Ray would find on this machine."""
    manager = get_accelerator_manager_for_resource("GPU")
    return 0 if manager is None else int(manager.get_current_node_num_accelerators())


def uses_haproxy() -> bool:
    """Return whether Serve is configured to use HAProxy instead of its own proxy."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def ensure_token(folder: Path) -> None:
    """Create the token file that Ray looks for, readable by its owner only, unless the environment sets a token or the
    file exists. If the home folder is not writable, the file is created in `folder` and RAY_AUTH_TOKEN_PATH is set to
    its path.
    """
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    try:
        _write_token(Path.home() / ".ray" / "auth_token")
    except FileExistsError:
        return
    except (RuntimeError, OSError):
        token_path = folder / "auth_token"
        _write_token(token_path)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)


def _write_token(path: Path) -> None:
    """Write a new random token to `path`. Raises OSError if the file exists or cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))

"""The server's log file: the content of a line, lines of several processes in one file, and rotation at its limit."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ConfigError
from cluster.observability import logs
from cluster.observability.logs import (
    LogFollower,
    LogSettings,
    SharedFile,
    configure,
    level_and_logger,
    remove_old_logs,
    request_id,
)

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    level = logging.getLogger("cluster").level
    yield
    for logger, handler in logs._installed:
        logger.removeHandler(handler)
        handler.close()
    logs._installed.clear()
    logging.getLogger("cluster").setLevel(level)


@pytest.mark.parametrize("without_propagation", [(), ("ray.serve",), ("ray",)])
def test_log_line_has_time_level_logger_rank_and_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_propagation: tuple[str, ...]
) -> None:
    for name in ("ray", "ray.serve"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", name not in without_propagation)
    path = tmp_path / "new" / "server.log"
    configure(LogSettings(str(path)), rank=3, to_stderr=False)
    token = request_id.set("cmpl-7")
    logging.getLogger("cluster.actors.gang").error("rank %d died", 1)
    request_id.reset(token)
    logging.getLogger("cluster.api.serve.application").info("well", extra={"fields": {"status": 200, "nothing": None}})
    logging.getLogger("httpx").info("not ours")
    logging.getLogger("httpx").warning("not ours, and a warning")
    logging.getLogger("ray.serve").warning("of Serve")
    first, second, third, fourth = path.read_text().splitlines()
    assert re.fullmatch(TIME + r" ERROR cluster\.actors\.gang \[rank 3\] \[request cmpl-7\] rank 1 died", first)
    assert re.fullmatch(TIME + r" INFO cluster\.api\.serve\.application \[rank 3\] well status=200", second)
    assert "WARNING httpx" in third and "WARNING ray.serve" in fourth
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_configure_again_replaces_the_previous_log_file(tmp_path: Path) -> None:
    for name in ("a", "b", "b"):
        configure(LogSettings(str(tmp_path / name)), to_stderr=False)
    logging.getLogger("cluster.x").info("once")
    assert (tmp_path / "a").read_text() == ""
    assert (tmp_path / "b").read_text().count("once") == 1


def test_json_log_writes_one_object_per_line_for_any_message(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # pytest's handlers cannot report half a surrogate pair
        configure(LogSettings(str(path), "json"), rank=0, to_stderr=False)
        try:
            raise KeyError("x\ny")
        except KeyError:
            logging.getLogger("cluster.x").exception("a\nb \ud800", extra={"fields": {"status": 500}})
    (line,) = path.read_text().splitlines()
    data = json.loads(line)
    assert data["message"] == "a\nb \ud800" and data["rank"] == 0 and data["status"] == 500
    assert "KeyError" in data["exception"] and re.fullmatch(TIME, data["time"])


def test_json_format_survives_formatters_that_ray_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` sets Ray's own format, with local time, on every handler of the logger `ray`."""
    ray = logging.getLogger("ray")
    monkeypatch.setattr(ray, "propagate", False)
    monkeypatch.setattr(ray, "handlers", [])
    path = tmp_path / "server.log"
    configure(LogSettings(str(path), "json"), to_stderr=False)
    for handler in ray.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("ray.serve").warning("of Serve")
    logging.getLogger("cluster.x").info("ours")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [("ray.serve", "of Serve"), ("cluster.x", "ours")]
    assert all(re.fullmatch(TIME, line["time"]) for line in lines)


def test_log_time_takes_milliseconds_from_the_created_time(tmp_path: Path) -> None:
    """Ray's record factory changes `created` but not `msecs`, so the two may disagree."""
    record = logging.makeLogRecord(
        {"name": "x", "levelname": "INFO", "msg": "x", "created": 1764172800.0004, "msecs": 999.0}
    )
    assert logs.TextLines().format(record).startswith("2025-11-26T16:00:00.000Z ")


def test_log_indents_and_escapes_message_text_that_imitates_a_log_line(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    configure(LogSettings(str(path)), to_stderr=False)
    logging.getLogger("cluster.x").warning("id %s", "a\n2026-01-01T00:00:00.000Z ERROR cluster.y \x1b[31m\r fake")
    first, second = path.read_text().splitlines()
    assert second.startswith("    2026") and "\\x1b[31m\\r" in second
    assert level_and_logger(first) == (logging.WARNING, "cluster.x")
    assert level_and_logger(second) == (0, "")


def test_shared_log_lines_of_processes_do_not_mix_and_the_file_rotates(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    code = (
        "import logging, sys\n"
        "from cluster.observability.logs import SharedFile\n"
        "handler = SharedFile(sys.argv[1], limit_bytes=120_000)\n"
        "logger = logging.getLogger('x')\n"
        "logger.addHandler(handler)\n"
        "for i in range(500):\n"
        "    logger.warning('%s %d %s', sys.argv[2], i, sys.argv[2] * 200)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abcd"]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    log_text = Path(f"{path}.1").read_text() + (path.read_text() if path.exists() else "")
    for line in log_text.splitlines():
        assert re.fullmatch(r"([abcd]) \d+ \1{200}", line), line
    assert Path(f"{path}.1").stat().st_size < 140_000
    assert sorted(name.name for name in tmp_path.iterdir()) in (["server.log", "server.log.1"], ["server.log.1"])


def test_second_handler_does_not_rotate_an_already_rotated_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    first, second = (SharedFile(str(path), limit_bytes=10) for _ in range(2))
    first.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line of some length", None, None))
    second._rotate()  # as if its own line had reached the limit before the first handler rotated the file
    assert Path(f"{path}.1").read_text() == "a line of some length\n" and not path.exists()
    second.emit(logging.LogRecord("x", logging.INFO, "", 0, "more", None, None))
    assert path.read_text() == "more\n"
    first.close()
    second.close()


def test_unwritable_log_file_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_file '.*' cannot be written: .*; set log_file"):
        configure(LogSettings(str(tmp_path / "file" / "server.log")))


def test_device_file_is_never_rotated() -> None:
    handler = SharedFile("/dev/null", limit_bytes=0)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "y", None, None))
    assert Path("/dev/null").is_char_device()
    handler.close()


def test_closing_a_log_twice_does_not_touch_a_reused_file_descriptor(tmp_path: Path) -> None:
    handler = SharedFile(str(tmp_path / "server.log"))
    handler.close()
    with (tmp_path / "other").open("w") as other_file:
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "late", None, None))
        handler.close()
        other_file.write("here")
    assert (tmp_path / "other").read_text() == "here"
    assert (tmp_path / "server.log").read_text() == ""


def test_log_keeps_its_file_open_while_reopening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.log"
    handler = SharedFile(str(path))
    path.unlink()
    record = logging.LogRecord("x", logging.INFO, "", 0, "y", None, None)
    with monkeypatch.context() as patched:
        patched.setattr(handler, "_open", lambda: os.open(tmp_path / "no" / "folder", os.O_WRONLY))
        patched.setattr(handler, "handleError", lambda record: None)
        handler.emit(record)
    os.fstat(handler._file)
    handler.emit(record)
    assert path.read_text() == "y\n"
    handler.close()


def test_log_follower_returns_complete_lines_and_continues_after_rotation(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    follower = LogFollower(str(path))
    assert follower.lines() == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert follower.lines() == ["one"]
        file.write("o\n")
    assert follower.lines() == ["two"]
    path.rename(f"{path}.1")
    assert follower.lines() == []
    path.write_text("three\n")
    assert follower.lines() == ["three"]


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_log_follower_survives_a_temporary_open_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """The file may be rotated between two system calls of the follower."""
    path = tmp_path / "server.log"
    path.write_text("before\n")
    follower = LogFollower(str(path))
    with path.open("a") as file:
        file.write("one\n")
    with monkeypatch.context() as patched:

        def raise_error(*_: object, **__: object) -> None:
            raise error(str(path))

        patched.setattr(Path, "open", raise_error)
        assert follower.lines() == []
    if error is FileNotFoundError:
        path.rename(f"{path}.1")
        path.write_text("two\n")
        assert follower.lines() == ["two"]
    else:
        assert follower.lines() == ["one"]


def test_remove_old_logs_retains_the_logs_of_the_latest_servers(tmp_path: Path) -> None:
    for age, name in enumerate(["serve-c.log", "serve-b.log.1", "serve-a.log", "mine.log"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    remove_old_logs(tmp_path, max_logs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.log", "serve-b.log.1", "serve-c.log"]


def test_remove_old_logs_ignores_a_log_removed_by_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("serve-a.log", "serve-b.log"):
        (tmp_path / name).touch()
    listed_files = [*tmp_path.glob("*"), tmp_path / "serve-gone.log"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed_files))
    remove_old_logs(tmp_path, max_logs=0)
    assert list(tmp_path.iterdir()) == []

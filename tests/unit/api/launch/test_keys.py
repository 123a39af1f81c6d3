"""`aerie keys` prints a key once and stores its hash. A server that reads the file meanwhile sees a complete file."""

import stat
import threading
from pathlib import Path

import pytest

from cluster.api.core.api_keys import ApiKeys
from cluster.api.launch import keys as command
from cluster.cli import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def create_key(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["keys", "create", *arguments]) == 0
    out, err = capsys.readouterr()
    assert "shown this once" in err and out.strip() not in err
    return out.removesuffix("\n")


def scope_of(file: Path, token: str) -> str | None:
    found = ApiKeys(file).find(token.encode())
    return found and f"{found.name} {found.scope}"


def test_keys_are_created_listed_and_removed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ann = create_key(capsys, str(file), "ann")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ann.startswith("sk-aerie-") and len(ann) == len("sk-aerie-") + 43, "256 random bits"
    assert ann not in file.read_text()
    file.write_text("# ours\n" + file.read_text().rstrip("\n"))
    file.chmod(0o640)
    bob = create_key(capsys, str(file), "bob", "--scope", "admin")
    assert (scope_of(file, ann), scope_of(file, bob), scope_of(file, bob[:-1])) == ("ann use", "bob admin", None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "the mode that the owner set stays"
    assert main(["keys", "list", str(file)]) == 0
    assert capsys.readouterr().out == "ann use\nbob admin\n"
    assert main(["keys", "remove", str(file), "ann"]) == 0
    assert (scope_of(file, ann), scope_of(file, bob)) == (None, "bob admin")
    assert file.read_text().startswith("# ours\n")
    assert main(["keys", "remove", str(file), "bob"]) == 0
    assert file.read_text() == "# ours\n"
    assert list(file.parent.iterdir()) == [file], "no temporary file is left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "FILE", "ann"], "has a key 'ann' already"),
        (["create", "FILE", "a b"], "NAME must be 1 to 64"),
        (["remove", "FILE", "bob"], "has no key 'bob'"),
        (["list", "/no/such/file"], "No such file"),
        (["create", "/no/such/folder/file", "ann"], "No such file"),
    ],
)
def test_failed_keys_command_reports_the_error_and_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    create_key(capsys, str(file), "ann")
    text_before = file.read_text()
    assert main(["keys", *(str(file) if argument == "FILE" else argument for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == text_before and list(file.parent.iterdir()) == [file]


def test_keys_create_leaves_a_malformed_file_unchanged(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("sk-aerie-a-key-in-the-wrong-place\n")
    assert main(["keys", "create", str(file), "ann"]) == 2
    err = capsys.readouterr().err
    assert "line 1" in err and "wrong-place" not in err
    assert file.read_text() == "sk-aerie-a-key-in-the-wrong-place\n"


def test_concurrent_changes_lose_no_key_and_readers_see_complete_files(file: Path) -> None:
    command.create(file, "first", "use")
    stop, read_errors = threading.Event(), []

    def read_repeatedly() -> None:
        while not stop.is_set():
            try:
                ApiKeys(file)
            except Exception as error:
                read_errors.append(error)

    def write_keys(writer: int) -> None:
        for number in range(15):
            command.create(file, f"{writer}.{number}", "use")
        for number in range(0, 15, 2):
            command.remove(file, f"{writer}.{number}")

    reader = threading.Thread(target=read_repeatedly)
    writers = [threading.Thread(target=write_keys, args=(writer,)) for writer in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert read_errors == []
    assert len(file.read_text().splitlines()) == 1 + 4 * 7

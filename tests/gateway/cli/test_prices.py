from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.gateway.cli.conftest import Penstock, ok, refused


@pytest.fixture
def priced(penstock: Penstock) -> Penstock:
    """With a route ``m`` and a tenant ``acme``."""
    ok(penstock("pool", "set", "p"))
    ok(penstock("route", "set", "m", "--pool", "p", "--context-length", "100000"))
    ok(penstock("tenant", "create", "acme"))
    return penstock


def table(text: str) -> list[dict[str, str]]:
    head, *lines = text.splitlines()
    names = head.split()
    return [dict(zip(names, line.split(), strict=True)) for line in lines]


def test_routes_are_declared_changed_and_deleted(penstock: Penstock) -> None:
    refused(penstock("route", "set", "m"), "--pool", "--context-length")
    refused(penstock("route", "set", "m", "--pool", "p", "--context-length", "100"), "penstock pool set p")
    ok(penstock("pool", "set", "p"))
    assert ok(penstock("pool", "list")) == "p\n"
    ok(penstock("route", "set", "m", "--pool", "p", "--context-length", "100", "--tokenizer", "o200k_base"))
    ok(penstock("route", "set", "m", "--timeout", "7.5", "--unpriced", "serve"))
    line = ok(penstock("route", "list")).splitlines()[1].split()
    assert line == ["m", "p:model=m", "100", "100", "100", "7.5", "serve", "o200k_base", "-", "2"]
    refused(penstock("route", "set", "m", "--timeout", "8", "--if-version", "1"), "version 2")
    assert ok(penstock("route", "set", "m", "--tokenizer", "none")).splitlines()[1].split()[-2:] == ["-", "3"]
    refused(penstock("pool", "delete", "p"), "routes use")
    refused(penstock("route", "delete", "n"), "no route")
    ok(penstock("route", "delete", "m", "--if-version", "3"))
    ok(penstock("pool", "delete", "p"))
    refused(penstock("pool", "delete", "p"), "no pool")
    assert [line.split()[2:4] for line in ok(penstock("audit")).splitlines()[1:]][:2] == [
        ["delete", "pool"],
        ["delete", "route"],
    ]


def test_prices_of_every_kind_are_set_and_listed_with_those_to_come(priced: Penstock) -> None:
    assert "no price" in ok(priced("price", "list", "m"))
    refused(priced("price", "list", "n"), "no route")
    refused(priced("price", "set", "m", "--input", "0.000003", "--output", "1"), "per million")
    refused(priced("price", "set", "n", "--input", "1", "--output", "1"), "no route")
    refused(priced("price", "set", "m", "--input", "1", "--output", "1", "--tenant", "nobody"), "nobody")
    refused(priced("price", "set", "m", "--input", "1", "--output", "1", "--compute", "2"), "compute_ceiling_s")
    ok(priced("price", "set", "m", "--input", "1", "--output", "2", "--from", "2020-01-01"))
    (plain,) = table(ok(priced("price", "list", "m")))
    assert plain | {"ID": ""} == {
        "ROUTE": "m",
        "FROM": "2020-01-01T00:00:00Z",
        "UNTIL": "-",
        "FOR": "charge",
        "INPUT/M": "1.000000000",
        "OUTPUT/M": "2.000000000",
        "SOURCE": "-",
        "ID": "",
    }
    later = (datetime.now(UTC) + timedelta(days=30)).date().isoformat()
    kinds = ("--cached-input", "0.1", "--reasoning", "3", "--request", "0.001", "--image", "0.02")
    compute = ("--compute", "2.5", "--compute-ceiling", "60")
    ok(priced("price", "set", "m", "--input", "1", "--output", "2", "--from", later, *kinds, *compute))
    ok(priced("price", "set", "m", "--input", "1", "--output", "2", "--tenant", "acme"))
    ok(priced("price", "set", "m", "--input", "0", "--output", "0", "--basis", "cost"))
    rows = table(ok(priced("price", "list", "m")).replace("CACHED/M", "CACHED"))
    assert [(row["FOR"] if len(row["FOR"]) < 10 else "tenant", row["REASONING/M"]) for row in rows] == [
        ("charge", "-"),
        ("charge", "3.000000000"),
        ("cost", "-"),
        ("tenant", "-"),
    ]
    assert (rows[1]["CACHED"], rows[1]["IMAGE"], rows[1]["COMPUTE/H"]) == ("0.100000000", "0.020000000", "2.500000000")
    assert len(table(ok(priced("price", "list", "m", "--tenant", "acme")))) == 1
    assert len(table(ok(priced("price", "list", "m", "--basis", "cost")))) == 1


def test_a_tenants_own_price_ends(priced: Penstock) -> None:
    (own,) = table(ok(priced("price", "set", "m", "--input", "1", "--output", "2", "--tenant", "acme")))
    (ended,) = table(ok(priced("price", "end", own["ID"])))
    assert ended["UNTIL"] != "-"
    refused(priced("price", "end", own["ID"]), "already")
    refused(priced("price", "end", "00000000-0000-0000-0000-000000000000"), "no price")


def test_a_hosted_models_price_is_shown_first_and_then_set(priced: Penstock) -> None:
    wanted = ("price", "import", "m", "--provider", "openai", "--model", "gpt-4o", "--tenant", "acme")
    shown = priced(*wanted, "--dry-run")
    assert "input_usd_per_mtok = 2.5" in ok(shown)
    assert "Not imported" in shown.stderr
    assert "no price" in ok(priced("price", "list", "m"))
    ok(priced(*wanted))
    line = ok(priced("price", "list", "m", "--tenant", "acme")).splitlines()[1]
    assert "openai/gpt-4o" in line
    assert "2.500000000" in line
    refused(priced("price", "import", "m", "--provider", "opnai", "--model", "gpt-4o"), "did you mean openai")

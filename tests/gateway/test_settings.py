"""What may stand in the environment, and what is said when it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import _RANGES, Settings, SettingsError, load_settings

ENVIRONMENT = {"DATABASE_URL": "postgresql://u:p@h/db", "REDIS_URL": "redis://:p@h:6379/0"}


def test_every_number_has_a_range_that_holds_its_default() -> None:
    defaults = load_settings(ENVIRONMENT)
    numbers = {name for name in Settings.__struct_fields__ if type(getattr(defaults, name)) in (int, float)}
    assert set(_RANGES) == numbers


@pytest.mark.parametrize("name", _RANGES)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e300", "-inf", "many", "0x10"])
def test_numbers_out_of_range_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        load_settings(ENVIRONMENT | {f"PENSTOCK_{name.upper()}": value})


def test_the_opening_wait_stays_below_the_minute_that_admission_believes() -> None:
    assert _RANGES["lease_renewal_s"][1] + _RANGES["redis_timeout_s"][1] < 60


@pytest.mark.parametrize("token", ["short", "x" * 15, "x" * 20 + "\n", "x" * 20 + " y", "é" * 20])
def test_a_fleet_token_must_fit_into_a_header(token: str) -> None:
    with pytest.raises(SettingsError, match="fleet_token") as caught:
        load_settings(ENVIRONMENT | {"PENSTOCK_FLEET_TOKEN": token})
    assert token not in str(caught.value)


@pytest.mark.parametrize("variable", ["DATABASE_URL", "REDIS_URL"])
@pytest.mark.parametrize("url", ["nonsense", "redis://:topsecret/x@h:1/0", "postgresql://:x@topsecret@h:1/0"])
def test_urls_that_cannot_be_read_are_refused_without_repeating_them(variable: str, url: str) -> None:
    with pytest.raises(SettingsError, match=variable) as caught:
        load_settings(ENVIRONMENT | {variable: url})
    assert "topsecret" not in str(caught.value)


def test_settings_are_read_from_the_environment() -> None:
    settings = load_settings(ENVIRONMENT | {"PENSTOCK_PORT": "81", "PENSTOCK_LEASE_S": "20", "PENSTOCK_DRAIN_S": "0"})
    assert (settings.port, settings.lease_s, settings.drain_s) == (81, 20.0, 0.0)


def test_origins_are_listed_with_commas_or_in_a_file(tmp_path: Path) -> None:
    listed = load_settings(ENVIRONMENT | {"PENSTOCK_CORS_ORIGINS": " https://a.example.com, http://localhost:3000,"})
    assert listed.cors_origins == ("https://a.example.com", "http://localhost:3000")
    assert load_settings(ENVIRONMENT).cors_origins == ()
    assert load_settings(ENVIRONMENT | {"PENSTOCK_CORS_ORIGINS": "*"}).cors_origins == ("*",)
    file = tmp_path / "settings.toml"
    file.write_text('cors_origins = ["https://a.example.com", "chrome-extension://abcdef", "http://[::1]:3000"]')
    assert len(load_settings(ENVIRONMENT | {"PENSTOCK_CONFIG": str(file)}).cors_origins) == 3
    file.write_text('cors_origins = "https://a.example.com"')
    with pytest.raises(SettingsError, match="cors_origins"):
        load_settings(ENVIRONMENT | {"PENSTOCK_CONFIG": str(file)})


@pytest.mark.parametrize(
    "origin",
    [
        *("https://a.example.com/", "https://a.example.com/x", "a.example.com", "https://A.example.com", "null", "**"),
        *("https://a.example.com:443", "http://a.example.com:80", "https://*.example.com", "https://u:p@a.com"),
        *("https://", "https://a b", "https://é.com"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="cors_origins has"):
        load_settings(ENVIRONMENT | {"PENSTOCK_CORS_ORIGINS": f"https://good.example.com,{origin}"})

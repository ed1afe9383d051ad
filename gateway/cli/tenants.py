"""``penstock tenant``: create tenants, set what they may, list and archive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

import click
import msgspec

from gateway.billing.usage import usd_text
from gateway.cli.policy_values import GivenPolicy, policy_option
from gateway.cli.session import Session, run
from gateway.cli.values import UNLIMITED, LimitType, PercentType, Unlimited, UsdType, all_pages, echo_table, show_time
from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.tenants.principal import BudgetPeriod, Metric, RateWindow
from gateway.tenants.records import LimitRecord, TenantRecord
from gateway.tenants.specs import PERIODS, LimitSpec, TenantChange, TenantSettings

F = TypeVar("F", bound=Callable[..., Any])
_COUNTS: dict[str, tuple[Metric, RateWindow | None]] = {
    "requests_per_minute": ("requests", "minute"),
    "tokens_per_minute": ("tokens", "minute"),
    "max_concurrent": ("concurrent", None),
}


def _options(command: F) -> F:
    options = (
        click.option("--requests-per-minute", type=LimitType(), help="0 refuses every request."),
        click.option("--tokens-per-minute", type=LimitType(), help="Of prompt and output together."),
        click.option("--max-concurrent", type=LimitType(), help="Requests that may run at once."),
        click.option("--budget", type=UsdType(), help="Most that may be charged in one period."),
        click.option("--period", type=click.Choice(PERIODS), help="Period of the budget. [default: month]"),
        click.option("--timezone", metavar="ZONE", help="IANA zone whose midnights begin periods. [default: UTC]"),
        click.option("--markup", type=PercentType(), help="Added to list prices. [default: 0]"),
        click.option(
            "--redis-loss",
            type=click.Choice(("fail_closed", "fail_open")),
            help="While Redis is away: refuse requests, or serve them and account for them after. "
            "[default: fail_closed]",
        ),
        click.option("--weight", type=float, help="Share among tenants of a busy worker. [default: 1]"),
        click.option(
            "--webhook-url",
            metavar="URL|none",
            help="Told when a budget's threshold is crossed; its secret is shown once.",
        ),
        policy_option("answer_cache", CachePolicy, "--cache", "Of the answer cache"),
        policy_option("prompt_log", PromptLogPolicy, "--prompt-log", "Of the prompt log"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class _Given:
    """What the options ask for; None: not given."""

    counts: dict[str, int | Unlimited]
    budget: int | Unlimited | None
    period: BudgetPeriod | None
    settings: dict[str, Any]
    policies: dict[str, GivenPolicy]

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Given:
        given = {name: value for name, value in options.items() if value is not None}
        settings: dict[str, Any] = {name: given[name] for name in ("timezone", "redis_loss", "weight") if name in given}
        if "markup" in given:
            settings["markup_bp"] = given["markup"]
        if "webhook_url" in given:
            settings["webhook_url"] = None if given["webhook_url"] == "none" else given["webhook_url"]
        counts = {name: given[name] for name in _COUNTS if name in given}
        policies: dict[str, GivenPolicy] = {
            name: given[name] for name in ("answer_cache", "prompt_log") if name in given
        }
        return cls(counts, given.get("budget"), given.get("period"), settings, policies)

    def all_settings(self, before: TenantRecord | None) -> dict[str, Any]:
        """With policies as they are to be; ``before``: the tenant, if it is there already."""
        usual: dict[str, Any] = {"answer_cache": NO_POLICY, "prompt_log": NO_LOG}
        changed = {
            name: given.applied(getattr(before, name) if before else usual[name])
            for name, given in self.policies.items()
        }
        return self.settings | changed

    @property
    def nothing(self) -> bool:
        return not (self.counts or self.settings or self.policies) and self.budget is None and self.period is None


@click.group()
def tenant() -> None:
    """Create tenants, set what they may, list and archive them."""


@tenant.command()
@click.argument("name")
@_options
def create(name: str, **options: Any) -> None:
    """Create a tenant. Limits that are not given do not exist."""
    given = _Given.of(options)
    limits, _ = _limits((), given)
    settings = TenantSettings(**given.all_settings(None))
    record = run(lambda session: session.directory.create_tenant(session.actor, name, settings=settings, limits=limits))
    click.echo(f"Tenant {record.name} created. Give it a key: penstock key create --tenant {record.name}")
    _show_webhook_secret(record)


@tenant.command(name="set")
@click.argument("name")
@_options
def set_(name: str, **options: Any) -> None:
    """Change a tenant; what is not given stays. `unlimited` lifts a limit.

    --budget and --period change the one budget that a tenant has; for several, and for limits of other kinds, use
    `penstock limit`.
    """
    given = _Given.of(options)
    if given.nothing:
        raise click.UsageError("give at least one thing to change")

    async def work(session: Session) -> tuple[TenantRecord, list[LimitRecord]]:
        limits, lifted = _limits(await session.directory.list_limits(name), given)
        before = await session.directory.tenant(name)
        record = await session.directory.update_tenant(
            session.actor,
            name,
            TenantChange(**given.all_settings(before)),
            # A policy is changed as it was read.
            if_version=before.version if given.policies else None,
            limits=limits,
            lifted=lifted,
        )
        return record, await session.directory.list_limits(name)

    record, limits = run(work)
    _show([(record, limits)])
    _show_webhook_secret(record)


@tenant.command(name="rename")
@click.argument("name")
@click.argument("new_name")
def rename(name: str, new_name: str) -> None:
    """Give a tenant another name. Its keys, limits and usage stay."""
    record = run(lambda session: session.directory.update_tenant(session.actor, name, TenantChange(name=new_name)))
    click.echo(f"Tenant {name} is {record.name} from now on.")


@tenant.command(name="archive")
@click.argument("name")
@click.confirmation_option(prompt="Its keys stop working at once and for good. Archive it?")
def archive(name: str) -> None:
    """End a tenant: its keys stop working. Its usage stays on record."""
    record = run(lambda session: session.directory.archive_tenant(session.actor, name))
    click.echo(f"Tenant {record.name} is archived since {show_time(record.archived_at)}.")


@tenant.command(name="list")
@click.option("--archived", is_flag=True, help="Those too that are archived.")
def list_(archived: bool) -> None:
    """List the tenants and their limits."""

    async def work(session: Session) -> list[tuple[TenantRecord, list[LimitRecord]]]:
        directory = session.directory
        records = await all_pages(
            lambda after: directory.list_tenants(after=after, limit=1000, archived=archived), lambda last: last.name
        )
        return [(record, await directory.list_limits(record.id)) for record in records]

    if shown := run(work):
        _show(shown)
    else:
        click.echo("There are no tenants yet. Create one: penstock tenant create NAME")


def _limits(before: Sequence[LimitRecord], given: _Given) -> tuple[list[LimitSpec], list[UUID]]:
    """What to set and the ids of what to lift, so that of the tenant's own limits those given are in force."""
    mine = [limit for limit in before if limit.subject == "tenant"]
    specs: list[LimitSpec] = []
    lifted: list[UUID] = []
    for name, amount in given.counts.items():
        metric, window = _COUNTS[name]
        old = [limit for limit in mine if (limit.metric, limit.window) == (metric, window)]
        if amount == UNLIMITED:
            lifted += [limit.id for limit in old]
        else:
            specs.append(_spec(old[0] if old else None, metric=metric, window=window, amount=amount))
    if given.budget is not None or given.period is not None:
        _budget([limit for limit in mine if limit.metric == "budget"], given, specs, lifted)
    return specs, lifted


def _budget(old: list[LimitRecord], given: _Given, specs: list[LimitSpec], lifted: list[UUID]) -> None:
    if given.budget is None and not old:
        raise click.UsageError("--period belongs to a budget; give --budget too")
    if len(old) > 1:
        raise click.UsageError("the tenant has several budgets; change them by `penstock limit`")
    before = old[0] if old else None
    period = given.period or (before.window if before else "month")
    if before is not None and (given.budget == UNLIMITED or before.window != period):
        lifted.append(before.id)
    if given.budget != UNLIMITED:
        amount = given.budget if given.budget is not None else before.amount  # type: ignore[union-attr]
        specs.append(_spec(before, metric="budget", window=period, amount=amount))


def _spec(before: LimitRecord | None, **values: Any) -> LimitSpec:
    """A limit in place of ``before``, as hard and with the same thresholds."""
    spec = LimitSpec(**values)
    return msgspec.structs.replace(spec, hard=before.hard, thresholds=before.thresholds) if before else spec


def _show_webhook_secret(record: TenantRecord) -> None:
    if record.webhook_secret is not None:
        click.echo(f"Secret of the webhook, shown this once: {record.webhook_secret}", err=True)


def _show(shown: list[tuple[TenantRecord, list[LimitRecord]]]) -> None:
    rows = []
    for record, limits in shown:
        mine = {(limit.metric, limit.window): limit.amount for limit in limits if limit.subject == "tenant"}
        counts = [mine.pop(kind, None) for kind in _COUNTS.values()]
        budgets = [(window, mine.pop(("budget", window))) for window in PERIODS if ("budget", window) in mine]
        others = len(mine) + sum(limit.subject != "tenant" for limit in limits)
        rows.append(
            (
                record.name,
                *("-" if count is None else count for count in counts),
                "; ".join(f"{usd_text(amount)} per {window}" for window, amount in budgets) or "-",
                record.timezone,
                others,
                f"{Decimal(record.markup_bp) / 100:f}%",
                record.answer_cache.mode or "off",
                record.prompt_log.level,
                show_time(record.created_at),
                show_time(record.archived_at),
            )
        )
    numbers = ("REQUESTS/MIN", "TOKENS/MIN", "CONCURRENT", "OTHER LIMITS", "MARK-UP")
    headers = (
        "TENANT",
        *numbers[:3],
        "BUDGET USD",
        "TIMEZONE",
        *numbers[3:],
        "CACHE",
        "PROMPT LOG",
        "CREATED",
        "ARCHIVED",
    )
    echo_table(headers, rows, numbers=numbers)

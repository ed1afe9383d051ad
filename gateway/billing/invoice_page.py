"""An invoice as an HTML page: one file without anything from elsewhere, made to be read and to be printed on A4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from itertools import groupby
from typing import Final

from gateway.billing.invoices import Invoice
from gateway.billing.markup import Markup, element, joined
from gateway.billing.report_rows import UsageRow
from gateway.billing.usage import usd_text

_CSS: Final = """
:root { --ink: #14181f; --soft: #5b6472; --line: #dfe3e8; --wash: #f5f7f9; --accent: #0b5c6b; }
* { box-sizing: border-box; }
html { background: #e9edf0; -webkit-text-size-adjust: 100%; }
body { margin: 0; color: var(--ink); font: 400 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "Liberation Sans", Arial, sans-serif; font-variant-numeric: tabular-nums; -webkit-print-color-adjust: exact;
  print-color-adjust: exact; }
main { background: #fff; max-width: 210mm; min-height: 297mm; margin: 32px auto; padding: 20mm 18mm 16mm;
  border-top: 6px solid var(--accent); box-shadow: 0 1px 3px rgb(20 24 31 / 12%), 0 12px 40px rgb(20 24 31 / 10%); }
header { display: flex; justify-content: space-between; align-items: flex-start; gap: 24px; }
h1 { margin: 0; font-size: 34px; line-height: 1.1; font-weight: 700; letter-spacing: -0.02em; }
.number { margin: 6px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.badge { display: inline-block; margin-top: 10px; padding: 2px 10px; border-radius: 99px; font-size: 12px;
  font-weight: 600; color: #7a4a00; background: #fdf0d5; }
.due { text-align: right; }
.due b { display: block; font-size: 34px; line-height: 1.1; font-weight: 700; letter-spacing: -0.02em;
  white-space: nowrap; }
.label { display: block; color: var(--soft); font-size: 11px; font-weight: 600; letter-spacing: 0.06em;
  text-transform: uppercase; }
.exact { color: var(--soft); font-size: 12px; white-space: nowrap; }
dl { display: flex; flex-wrap: wrap; gap: 16px 32px; margin: 32px 0 28px;
  padding: 18px 0; border: solid var(--line); border-width: 1px 0; }
dl div { flex: 1 1 44mm; }
dd { margin: 2px 0 0; overflow-wrap: anywhere; }
dd small { display: block; color: var(--soft); font-size: 12px; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: 12.5px; }
caption { text-align: left; padding-bottom: 8px; font-size: 15px; font-weight: 700; }
th, td { padding: 7px 0 7px 12px; text-align: right; vertical-align: baseline; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; overflow-wrap: anywhere; }
thead th { color: var(--soft); font-size: 11px; font-weight: 600; border-bottom: 1.5px solid var(--ink);
  vertical-align: bottom; white-space: normal; }
tbody td, tbody th { border-bottom: 1px solid var(--line); font-weight: 400; }
tbody tr.project th, tbody tr.project td { padding-top: 16px; font-weight: 700; }
tbody tr.model th { padding-left: 12px; color: var(--soft); }
tfoot th, tfoot td { padding-top: 10px; border-top: 1.5px solid var(--ink); font-weight: 700; }
.fine { color: #8b93a0; font-weight: 400; }
td small { display: block; color: var(--soft); font-size: 11px; font-weight: 400; }
.empty { padding: 28px 0; color: var(--soft); text-align: center; }
.sum { margin: 20px 0 0 auto; width: 92mm; max-width: 100%; background: var(--wash); border-radius: 6px;
  padding: 12px 16px; break-inside: avoid; }
.sum div { display: flex; justify-content: space-between; gap: 24px; }
.sum .total { margin-top: 4px; font-size: 17px; font-weight: 700; }
footer { margin-top: 32px; color: var(--soft); font-size: 11.5px; line-height: 1.45; }
footer p { margin: 0 0 4px; }
@media (max-width: 700px) {
  main { margin: 0; padding: 24px 20px; min-height: 100vh; box-shadow: none; }
  header { flex-direction: column; } .due { text-align: left; } .sum { width: 100%; }
}
@page { size: A4; margin: 16mm 16mm 18mm;
  @bottom-right { content: counter(page) " / " counter(pages); color: #5b6472; font: 9pt system-ui, sans-serif; } }
@media print {
  html { background: none; }
  body { font-size: 9.5pt; }
  main { margin: 0; padding: 0; max-width: none; min-height: 0; box-shadow: none; border-top: 0; }
  .scroll { overflow: visible; }
  table { font-size: 9pt; } thead th, td small { font-size: 8pt; }
  thead { display: table-header-group; } tfoot { display: table-row-group; }
  tr { break-inside: avoid; } tr.project { break-after: avoid; }
}
"""
_Count = Callable[[UsageRow], int]
_Part = tuple[str, _Count]
_COLUMNS: Final[tuple[tuple[str, _Count, tuple[_Part, ...]], ...]] = (
    # Title, number, and what of it is told beneath.
    ("Requests", lambda row: row.requests, ()),
    (
        "Input tokens",
        lambda row: row.prompt_tokens,
        (("cached", lambda row: row.cached_tokens), ("written to cache", lambda row: row.cache_write_tokens)),
    ),
    ("Output tokens", lambda row: row.completion_tokens, (("reasoning", lambda row: row.reasoning_tokens),)),
    ("Images", lambda row: row.images, ()),
)


def invoice_page(invoice: Invoice) -> bytes:
    """A whole document, UTF-8."""
    head = joined(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"Invoice {invoice.number}"),
        element("style", Markup(_CSS)),
    )
    body = element("main", _header(invoice), _facts(invoice), _lines(invoice), _sum(invoice), _footer(invoice))
    page = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{page}\n".encode()


def _header(invoice: Invoice) -> Markup:
    badge = Markup("") if invoice.final else element("span", "Preliminary: the sums may still grow", class_="badge")
    return element(
        "header",
        element("div", element("h1", "Invoice"), element("p", invoice.number, class_="number"), badge),
        element(
            "div",
            element("span", "Total", class_="label"),
            element("b", f"${_grouped(invoice.total_usd)}"),
            element("span", f"exactly {_grouped(invoice.charged_usd)} USD", class_="exact"),
            class_="due",
        ),
    )


def _facts(invoice: Invoice) -> Markup:
    last = f"{invoice.start.day} to {_day(_last_day(invoice))}"
    issued = invoice.issued_at.astimezone(invoice.end.tzinfo)
    facts = (
        ("Billed to", invoice.tenant, invoice.tenant_id),
        ("Period", f"{invoice.start:%B %Y}", last),
        ("Issued", _day(issued.date()), f"{issued:%H:%M}, times in {invoice.timezone}"),
    )
    return element(
        "dl",
        *(
            element("div", element("dt", name, class_="label"), element("dd", value, element("small", more)))
            for name, value, more in facts
        ),
    )


def _lines(invoice: Invoice) -> Markup:
    if not invoice.lines:
        return element("p", "Nothing was used in this month.", class_="empty")
    columns = [
        (count, parts)
        for title, count, parts in _COLUMNS
        if title != "Images" or any(count(line) for line in invoice.lines)
    ]
    titles = ["Project and model", *(title for title, _, _ in _COLUMNS[: len(columns)]), "Amount, USD"]
    body: list[str] = []
    for _, each in groupby(invoice.lines, key=lambda line: line.project_id):
        of_project = list(each)
        body.append(_row("project", str(of_project[0].project), of_project, columns))
        body += [_row("model", str(line.model), [line], columns) for line in of_project]
    return element(
        "div",
        element(
            "table",
            element("caption", "Usage by project and model"),
            element("thead", element("tr", *(element("th", title, scope="col") for title in titles))),
            element("tbody", *body),
            element("tfoot", _row("all", "Total", invoice.lines, columns)),
        ),
        class_="scroll",
    )


def _row(
    kind: str, name: str, lines: Sequence[UsageRow], columns: Sequence[tuple[_Count, tuple[_Part, ...]]]
) -> Markup:
    amount = sum(line.charged_nano_usd for line in lines)
    cells = [
        element(
            "td",
            f"{sum(map(count, lines)):,}",
            *(element("small", f"{part:,} {told}") for told, of in parts if (part := sum(map(of, lines)))),
        )
        for count, parts in columns
    ]
    scope = "rowgroup" if kind == "project" else "row"
    return element("tr", element("th", name, scope=scope), *cells, element("td", _amount(amount)), class_=kind)


def _sum(invoice: Invoice) -> Markup:
    return element(
        "div",
        element("div", element("span", "Exact sum"), element("span", f"{_grouped(invoice.charged_usd)} USD")),
        element(
            "div",
            element("span", "Total, to the cent"),
            element("span", f"${_grouped(invoice.total_usd)}"),
            class_="total",
        ),
        class_="sum",
    )


def _footer(invoice: Invoice) -> Markup:
    return element(
        "footer",
        element(
            "p",
            "Every amount is the exact sum of what single requests were charged; only the total is rounded, half to "
            "even. Tokens that are told beneath a number are part of it.",
        ),
        element("p", f"Requests admitted from {invoice.start.isoformat()} on and before {invoice.end.isoformat()}."),
    )


def _amount(nano_usd: int) -> Markup:
    """Dollars and cents to be read at a glance, what is below them in a lighter tone."""
    text = _grouped(usd_text(nano_usd))
    return joined(text[:-7], element("span", text[-7:], class_="fine"))


def _grouped(amount: str) -> str:
    whole, _, fraction = amount.partition(".")
    return f"{int(whole):,}.{fraction}"


def _last_day(invoice: Invoice) -> date:
    return date.fromordinal(invoice.end.date().toordinal() - 1)


def _day(day: date) -> str:
    return f"{day.day} {day:%B %Y}"

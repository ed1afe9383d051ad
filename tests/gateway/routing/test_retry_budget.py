from __future__ import annotations

from gateway.routing.retry_budget import MEMORY_S, RATIO, RESERVE, RESERVE_PER_S, TIDY_ABOVE, RetryBudget, RetryBudgets
from tests.gateway.routing.support import HandClock


def retries(budget: RetryBudget) -> int:
    count = 0
    while budget.withdraw():
        count += 1
    return count


def test_a_gateway_with_few_requests_has_a_reserve_that_fills_again_by_time() -> None:
    clock = HandClock()
    budget = RetryBudget(clock)
    assert retries(budget) == RESERVE
    clock.time += 5 / RESERVE_PER_S
    assert retries(budget) == 5
    clock.time += 3600
    assert retries(budget) == RESERVE


def test_in_the_long_run_retries_are_a_share_of_the_requests() -> None:
    clock = HandClock()
    budget = RetryBudget(clock)
    made = 0
    for _ in range(10_000):  # a hundred a second, all of which fail and want five retries
        clock.time += 0.01
        budget.deposit()
        made += sum(budget.withdraw() for _ in range(5))
    assert 0.95 < made / (10_000 * RATIO + 100 * RESERVE_PER_S + RESERVE) < 1.05


def test_a_busy_gateway_saves_for_the_death_of_a_backend_but_not_for_ever() -> None:
    clock = HandClock()
    budget = RetryBudget(clock)
    for _ in range(50_000):  # 500 a second
        clock.time += 0.002
        budget.deposit()
    clock.time += 3600
    for _ in range(50_000):
        clock.time += 0.002
        budget.deposit()
    assert 0.9 < (retries(budget) - RESERVE) / (500 * RATIO * MEMORY_S) < 1.1
    for _ in range(50_000):
        clock.time += 0.002
        budget.deposit()
    clock.time += 10 * MEMORY_S
    assert retries(budget) == RESERVE


def test_a_route_that_fails_leaves_others_their_retries_and_is_forgotten_in_time() -> None:
    clock = HandClock()
    budgets = RetryBudgets(clock)
    assert retries(budgets.of("all-down")) == RESERVE
    assert not budgets.of("all-down").withdraw()
    assert budgets.of("well").withdraw()
    for number in range(3 * TIDY_ABOVE):
        budgets.of(f"deleted-{number}")
        assert len(budgets._budgets) <= TIDY_ABOVE
    assert not budgets.of("all-down").withdraw()

"""The token budget follows measured step times: in its bounds, close to the target, robust to outliers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import assume, given
from hypothesis import strategies as st

from hotswap.backends.torch.budget import TokenBudget

MIN, MAX = 64, 8192


def run(budget: TokenBudget, step_s: Callable[[int], float], steps: int) -> list[float]:
    """Run full steps, and return the time of each."""
    times: list[float] = []
    for _ in range(steps):
        num_tokens = budget.tokens
        times.append(step_s(num_tokens))
        budget.observe(num_tokens, times[-1])
    return times


@given(fixed_s=st.floats(0, 0.08), token_s=st.floats(1e-6, 1e-2))
def test_it_finds_the_largest_budget_within_the_target(fixed_s: float, token_s: float) -> None:
    budget = TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX)
    times = run(budget, lambda num_tokens: fixed_s + token_s * num_tokens, 300)
    fitting = (0.1 - fixed_s) / token_s
    assert max(MIN, min(0.9 * fitting, MAX) - 1) <= budget.tokens <= max(MIN, fitting)
    assert all(time <= 0.1 + 1e-9 for time in times) or fitting < MIN, "not even while it searches"


@given(seed=st.integers(0, 2**32), spread=st.floats(0.01, 0.3))
def test_few_steps_are_late_however_much_they_vary(seed: int, spread: float) -> None:
    random, budget = Random(seed), TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX)
    times = run(budget, lambda n: (0.02 + 1e-4 * n) * random.lognormvariate(0, spread), 600)
    assert sum(time > 0.1 for time in times[100:]) <= 0.06 * 500
    assert sum(times[100:]) / 500 > 0.1 / (1 + 5 * spread), "nor is the target missed by far"


@given(outlier=st.floats(1, 1e4))
def test_one_slow_step_has_a_short_effect(outlier: float) -> None:
    budget = TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX)

    def step_s(num_tokens: int) -> float:
        return 0.02 + 1e-4 * num_tokens

    run(budget, step_s, 300)
    before = budget.tokens
    budget.observe(before, outlier * step_s(before))
    assert budget.tokens >= before // 4
    run(budget, step_s, 40)
    assert budget.tokens >= 0.9 * before


def test_it_follows_when_steps_become_slower_and_faster() -> None:
    budget = TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX)
    for token_s in (1e-4, 8e-4, 5e-5):
        run(budget, lambda num_tokens, token_s=token_s: 0.01 + token_s * num_tokens, 100)  # type: ignore[misc]
        assert 0.85 * 0.09 / token_s <= budget.tokens <= 0.09 / token_s


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e3)), max_size=50))
def test_it_stays_within_its_bounds_and_is_deterministic(steps: list[tuple[int, float]]) -> None:
    budgets = [TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX) for _ in range(2)]
    for step in steps:
        for budget in budgets:
            budget.observe(*step)
            assert MIN <= budget.tokens <= MAX
    assert budgets[0].tokens == budgets[1].tokens


@given(num_tokens=st.integers(1, 10_000), step_s=st.floats(0, 0.1))
def test_steps_below_the_budget_and_the_target_are_ignored(num_tokens: int, step_s: float) -> None:
    budget = TokenBudget(0.1, min_tokens=MIN, max_tokens=MAX)
    run(budget, lambda n: 0.02 + 1e-4 * n, 300)
    before = budget.tokens
    assume(num_tokens < before)
    budget.observe(num_tokens, step_s)
    assert budget.tokens == before

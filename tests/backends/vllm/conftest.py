"""These tests need vLLM, which has an environment of its own: `make test` runs them there."""

from collections.abc import Generator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# They compare the tokens of requests that ran beside others with those of a run alone. On some CPUs (an Intel
# Xeon with AMX, in fp32) these differ in vLLM itself, and then there is nothing to compare.
COMPARING = (
    "test_more_requests_than_the_engine_can_hold_all_come_to_their_end",
    "test_requests_are_resumed_exactly",
    "test_the_same_request_gives_the_same_tokens_beside_any_others",
    "test_two_hundred_moves_at_random_tokens_change_nothing",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a comparison that failed where vLLM's tokens depend on the batch."""
    try:
        return (yield)
    except (AssertionError, ExceptionGroup):
        if not item.name.startswith(COMPARING):
            raise
        from tests.backends.vllm.batch_dependence import depends_on_the_batch

        if not depends_on_the_batch():
            raise
    pytest.skip("on this CPU vLLM gives a request other tokens beside others than alone")

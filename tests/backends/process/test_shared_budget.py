"""A budget that several processes share is one: what ends a process in any way frees what it held."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from hotswap import DeviceBudget, DeviceLease
from hotswap.backends.process import SharedDeviceBudget
from hotswap.backends.process.budget_table import BudgetTable
from hotswap.backends.process.shared_accounts import SharedAccounts
from hotswap.errors import ConfigError, OutOfMemory
from tests.test_device_budget import SIZE, Budgets

# Takes and gives what it is told, a line of JSON each.
PROCESS = """
import json, sys
from hotswap.backends.process import SharedDeviceBudget

budget = SharedDeviceBudget(sys.argv[1], 100)
lease = budget.lease(sys.argv[2], int(sys.argv[3]), on_wanted=lambda: lease.give(lease.owed_bytes))
for line in sys.stdin:
    verb, size = json.loads(line)
    print(json.dumps(getattr(lease, verb)(size)), flush=True)
lease.close()
"""


class SharedBudgets(Budgets):
    """The same, with two budgets of one name, as two processes have them."""

    def __init__(self) -> None:
        super().__init__()
        name = f"test-{os.getpid()}"
        self.budget = SharedDeviceBudget(name, SIZE)
        self.other = SharedDeviceBudget(name, SIZE)

    def budget_of(self, name: str) -> DeviceBudget:
        return self.other if name in "bd" else self.budget

    def teardown(self) -> None:
        for lease in self.leases.values():
            lease.close()
        assert not left_of(self.budget.name)


TestSharedBudgets = SharedBudgets.TestCase
TestSharedBudgets.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def left_of(name: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"hotswap-budget-*-{name}")]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Generator[str]:
    """A name that no other test uses, of which nothing is left in the end."""
    name = f"{abs(hash(request.node.nodeid)) % 10**9}-{os.getpid()}"
    yield name
    assert not left_of(name)


class Process:
    """Another process with a lease."""

    def __init__(self, name: str, holder: str, floor: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, name, holder, str(floor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, verb: str, size: int) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, size]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


def test_processes_lend_each_other_memory_and_hear_of_it(name: str) -> None:
    told = threading.Event()
    lease = SharedDeviceBudget(name, SIZE).lease("here", 10, on_free=told.set)
    with Process(name, "there", floor=20) as there:
        assert there.ask("take", 90)
        if not lease.take(60):  # the other gives what it owes at once, maybe within the call
            assert told.wait(30)
            assert lease.take(60)
        assert not there.ask("take", 50)
        assert lease.budget.free_bytes == 0
        assert "there: 40 bytes" in repr(lease.budget)
    assert lease.available_bytes == 40
    lease.close()


def test_what_a_killed_process_held_is_free_and_its_name_too(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    lease = SharedDeviceBudget(name, SIZE).lease("here", on_free=told.set)
    with Process(name, "there", floor=70) as there:
        assert there.ask("take", 90)
        there.process.send_signal(signal.SIGSTOP)
        os.waitpid(there.process.pid, os.WUNTRACED)  # it is stopped, and cannot give anything
        assert not lease.take(60)
        there.process.kill()
        assert told.wait(30)
    assert lease.take(60)
    assert "'there' has ended, which held 90 bytes" in caplog.text
    with Process(name, "there", floor=40) as there:
        assert there.ask("take", 40)
    lease.close()


def test_a_thread_that_looks_after_the_last_lease_was_closed_does_not_make_the_table_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, closed = threading.Event(), threading.Event()
    look = SharedAccounts._look

    def look_late(accounts: SharedAccounts) -> None:
        arrived.set()
        assert closed.wait(30)
        look(accounts)

    monkeypatch.setattr(SharedAccounts, "_look", look_late)
    here, there = SharedDeviceBudget(name, SIZE), SharedDeviceBudget(name, SIZE)
    holds, lacks = here.lease("holds"), there.lease("lacks")
    assert holds.take(60)
    before = set(threading.enumerate())
    lacks.want(75)  # which wakes the thread of `here`
    assert arrived.wait(30)
    holds.close()
    lacks.close()
    made = list[BudgetTable]()
    monkeypatch.setattr(BudgetTable, "lock", lambda table: made.append(table))
    closed.set()
    for thread in before:
        if thread.name.startswith("device budget"):
            thread.join(30)
    assert not made


def test_a_process_that_is_killed_at_any_moment_leaves_a_budget_that_can_be_used(name: str) -> None:
    lease = SharedDeviceBudget(name, SIZE).lease("here", 10)
    script = (
        PROCESS.partition("for line")[0] + "print(1, flush=True)\nwhile True: lease.take(1); lease.give(1)"
    )
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", script, name, "there", "20"], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(50):
                assert lease.take(10)
                lease.give(10)
            process.kill()
        assert lease.take(SIZE)
        lease.give(SIZE)
    lease.close()


def test_a_stopped_process_that_has_the_table_makes_no_other_wait_for_ever(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotswap.backends.process.budget_table._LOCK_S", 0.1)
    lease = SharedDeviceBudget(name, SIZE).lease("here")
    script = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX);"
        "print(1, flush=True); sys.stdin.read()"
    )
    (table,) = Path("/dev/shm").glob(f"hotswap-budget-*-{name}/table")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(table)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(OutOfMemory, match=f"locked by process {process.pid} .*stopped"):
            lease.take(1)
        process.kill()
    assert lease.take(1)
    lease.close()


def test_another_size_under_one_name_is_refused_while_there_are_leases(name: str) -> None:
    lease = SharedDeviceBudget(name, "1 GiB").lease("a")
    other = SharedDeviceBudget(name, "2 GiB")
    with pytest.raises(ConfigError, match="has 2 GiB here and 1 GiB in another"):
        other.lease("b")
    lease.close()
    other.lease("b").close()


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a" * 41, 3, "ü"])
def test_names_that_could_be_no_directory_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="name"):
        SharedDeviceBudget(bad, 1)


def test_a_table_of_something_else_is_refused_and_stays(name: str) -> None:
    budget = SharedDeviceBudget(name, SIZE)
    lease = budget.lease("a")
    (table,) = Path("/dev/shm").glob(f"hotswap-budget-*-{name}/table")
    kept = table.read_bytes()
    table.write_bytes(b"something else, longer than a header")
    with pytest.raises(ConfigError, match="is no table of a device budget"):
        SharedDeviceBudget(name, SIZE).lease("b")
    table.write_bytes(kept)
    lease.close()


def test_it_can_be_pickled_and_threads_end_with_the_last_lease(name: str) -> None:
    budget: SharedDeviceBudget = pickle.loads(pickle.dumps(SharedDeviceBudget(name, SIZE)))
    assert (budget.name, budget.size_bytes) == (name, SIZE)
    before = set(threading.enumerate())
    lease: DeviceLease = budget.lease("a")
    started = set(threading.enumerate()) - before
    (thread,) = [thread for thread in started if thread.name.startswith("device budget")]
    lease.close()
    thread.join(30)
    assert not thread.is_alive()


def test_leases_that_the_table_could_not_hold_are_refused(name: str) -> None:
    budget = SharedDeviceBudget(name, SIZE)
    with pytest.raises(ConfigError, match="letters"):
        budget.lease("a" * 101)
    leases = [budget.lease("\N{SKULL}" * 96 + str(number)) for number in range(512)]
    with pytest.raises(ConfigError, match="at most 512 leases"):
        budget.lease("a")
    assert SharedDeviceBudget(name, SIZE).held_bytes == 0
    for lease in leases:
        lease.close()


def test_a_place_of_another_user_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    place = Path("/dev/shm") / f"hotswap-budget-12345-{name}"
    place.mkdir()
    try:
        with pytest.raises(ConfigError, match="is no directory of this user"):
            SharedDeviceBudget(name, SIZE).lease("a")
    finally:
        place.rmdir()

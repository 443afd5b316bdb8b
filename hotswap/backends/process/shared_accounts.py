"""The accounts of a device budget of which other processes have some, and the thread that hears of these."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from hotswap.backends.process.budget_table import MOST_LEASES, MOST_LETTERS, BudgetTable, TableRow
from hotswap.budget_accounts import BudgetAccount, BudgetAccounts, call_all, size_text
from hotswap.errors import ConfigError, HotswapError

__all__ = ["SharedAccounts"]

log = logging.getLogger("hotswap")

# How often a process that has leases looks for others that have ended.
_WATCH_S: Final = 1.0


class SharedAccounts(BudgetAccounts):
    """Accounts that are read from a table when they are entered, and written when they are left.

    Those of leases of this object stay the same objects. Others are made anew, and their callbacks wake the
    process that has the lease, whose thread calls the callbacks there.

    Args:
        name: Of the budget.
        size: Of the memory in bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        super().__init__(size)
        self._name, self._table = name, BudgetTable(name, size)
        self._own: dict[str, BudgetAccount] = {}
        self._members: dict[str, str] = {}  # of the accounts of other processes, by holder
        self._rows: tuple[TableRow, ...] = ()
        self._listener: _Listener | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._write()
        finally:
            self._lock.release()

    # ------------------------------------------------------------------ with the lock

    def _read(self) -> None:
        """Lock the table and take over what other processes have changed in it."""
        rows = self._table.lock()
        if rows is not self._rows:
            self._rows = rows
            me = "" if self._listener is None else self._listener.member
            self._members = {row.holder: row.member for row in rows if row.member != me}
            others = {row.holder: self._other(row) for row in rows if row.holder in self._members}
            self.by_holder = others | self._own

    def _write(self) -> None:
        """Write what has changed, and unlock the table."""
        try:
            if not self._own and self._listener is not None:
                self._listener.end()
                self._listener = None
            rows = tuple(map(self._row, self.by_holder.values()))
            if sorted(rows) != sorted(self._rows) or not rows:
                self._table.write(rows)
                self._rows = rows
        finally:
            self._table.unlock(keep=bool(self._own))

    def open(self, account: BudgetAccount) -> None:
        if len(self.by_holder) >= MOST_LEASES or len(account.holder) > MOST_LETTERS:
            raise ConfigError(
                f"A shared device budget has at most {MOST_LEASES} leases, and names of holders at most "
                f"{MOST_LETTERS} letters."
            )
        self._sweep()
        super().open(account)
        if self._listener is None:
            try:
                self._listener = _Listener(self._table, self._look)
            except BaseException:
                del self.by_holder[account.holder]
                raise
        self._own[account.holder] = account

    def close(self, account: BudgetAccount) -> list[Callable[[], object]]:
        waiting = super().close(account)
        if self._own.get(account.holder) is account:
            del self._own[account.holder]
        return waiting

    def take(self, account: BudgetAccount, size: int) -> bool:
        return super().take(account, size) or (self._sweep() and super().take(account, size))

    def _sweep(self) -> bool:
        """Remove the accounts of processes that have ended; return whether there were any."""
        ended = {member for member in set(self._members.values()) if not self._table.is_alive(member)}
        for holder in [holder for holder, member in self._members.items() if member in ended]:
            del self._members[holder]
            held = size_text(self.by_holder.pop(holder).held)
            log.warning("The process of %r has ended, which held %s of budget %r.", holder, held, self._name)
        for member in ended:
            self._table.forget(member)
        return bool(ended)

    def _other(self, row: TableRow) -> BudgetAccount:
        wake = partial(self._table.wake, row.member)
        return BudgetAccount(row.holder, row.floor, row.ceiling, wake, wake, row.held, row.wanted)

    def _row(self, account: BudgetAccount) -> TableRow:
        member = self._members.get(account.holder)
        if member is None:
            assert self._listener is not None, "there are leases"
            member = self._listener.member
        return TableRow(account.holder, member, account.floor, account.ceiling, account.held, account.wanted)

    # ------------------------------------------------------------------ on the listener's thread

    def _look(self) -> None:
        """Tell the holders of this process what has changed in others."""
        callbacks = list[Callable[[], object]]()
        with self._lock:
            if not self._own:
                return  # the last lease was closed meanwhile: to look would make the table again
            self._read()
            try:
                self._sweep()
                for account in self._own.values():
                    if account.on_wanted is not None and self.owed(account):
                        callbacks.append(account.on_wanted)
                    if account.on_free is not None and account.wanted:
                        callbacks.append(account.on_free)
            finally:
                self._write()
        call_all(callbacks)


class _Listener:
    """A process in the table, and the thread that looks at it when others say so, and once a second.

    Args:
        table: It is locked.
        look: What the thread calls.

    Raises:
        ConfigError: it cannot be told.
    """

    def __init__(self, table: BudgetTable, look: Callable[[], None]) -> None:
        self.member = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._table, self._look, self._ended = table, look, False
        self._socket = table.bind(self.member)
        self._socket.settimeout(_WATCH_S)
        threading.Thread(target=self._run, name=f"device budget {self.member}", daemon=True).start()

    def end(self) -> None:
        """Leave the table; the thread ends."""
        self._ended = True
        self._table.wake(self.member)

    def _run(self) -> None:
        with self._socket:
            while not self._ended:
                with suppress(TimeoutError):
                    self._socket.recv(1)
                if not self._ended:
                    self._look_safely()
        self._table.forget(self.member)

    def _look_safely(self) -> None:
        try:
            self._look()
        except HotswapError as exc:  # another process has the table: the next look may find more
            log.warning("A device budget could not be looked at: %s", exc)

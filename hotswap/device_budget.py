"""`DeviceBudget`: the memory of one device, shared by several engines.

Each holder (an engine) has a lease with a *floor*, which it can always take, and a *ceiling*. What is above
the floors goes to whichever holder asks first. A holder that lacks memory is noted with what it wants; those
that hold more than their floor are asked for it, and the first is told when memory comes free:

    take -> False: wanted_bytes is noted -> on_wanted of others -> they give -> on_free -> take -> True

The budget only counts: allocating and freeing is up to the holders. Take before you allocate, and give after
you have freed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial

from hotswap.budget_accounts import BudgetAccount, BudgetAccounts, call_all, size_text
from hotswap.checks import check_callables, check_counts, check_strings
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes

__all__ = ["DeviceBudget", "DeviceLease"]


class DeviceBudget:
    """Counts the bytes of a device that engines of one process share (`SharedDeviceBudget`: of several).

    The leases never hold more than the size in total, and the floor of each lease is always available to it:
    the sum over all leases of `max(held_bytes, floor_bytes)` is at most the size.

    All methods, also those of leases, are synchronous and short, and may be called from any thread. Sizes are
    bytes, given as a number or as text such as `"40 GiB"`.

    Args:
        size_bytes: The size of the memory.
        name: What views call the budget; drawn at random if none is given.

    Raises:
        ConfigError: the size is no size, or 0.
    """

    def __init__(self, size_bytes: int | str, *, name: str = "") -> None:
        check_strings(ConfigError, name=name)
        self._name = name or uuid.uuid4().hex[:8]
        self._size_bytes = parse_bytes(size_bytes, "size_bytes")
        if not self._size_bytes:
            raise ConfigError("size_bytes is 0; give the bytes that the engines share.")
        self._accounts = self._make_accounts()
        self._leases: dict[BudgetAccount, DeviceLease] = {}

    @property
    def name(self) -> str:
        """What views call the budget."""
        return self._name

    @property
    def size_bytes(self) -> int:
        """The size of the memory."""
        return self._size_bytes

    @property
    def held_bytes(self) -> int:
        """What all leases hold."""
        with self._accounts:
            return self._accounts.held

    @property
    def free_bytes(self) -> int:
        """What any lease could take: neither held, nor part of a floor."""
        with self._accounts:
            return self._accounts.free

    @property
    def leases(self) -> tuple[DeviceLease, ...]:
        """The open leases, oldest first."""
        with self._accounts:
            return tuple(self._leases.values())

    def lease(
        self,
        holder: str,
        floor_bytes: int | str = 0,
        ceiling_bytes: int | str | None = None,
        on_wanted: Callable[[], object] | None = None,
        on_free: Callable[[], object] | None = None,
    ) -> DeviceLease:
        """Open a lease, which holds nothing yet. Close it when the holder ends.

        The callbacks run on the thread of the call that caused them, outside the budget's lock. They should
        return quickly: a holder with a thread or a loop of its own schedules its work there. An error that a
        callback raises is logged.

        Args:
            holder: The name of the holder, such as an engine's id.
            floor_bytes: What the holder can always take. Default: 0.
            ceiling_bytes: What it can hold at most. Default: `None`, the size of the budget.
            on_wanted: Called when this holder has more than its floor and another holder begins to lack
                memory: `owed_bytes` says how much of it to give, if it can be spared. A holder that cannot
                spare it then looks at `owed_bytes` again when it can.
            on_free: Called when memory came free while this holder has `wanted_bytes`: take again. It may
                also be called when another holder has taken the memory already.

        Raises:
            ConfigError: the holder has no name, or an open lease; the floor is above the ceiling; or the
                floors of all leases exceed the size.
            OutOfMemory: other holders have too much above their floors at the moment for this floor.
        """
        check_strings(ConfigError, holder=holder)
        if not holder:
            raise ConfigError("holder is ''; give the name of the holder, such as an engine's id.")
        check_callables(ConfigError, on_wanted=on_wanted, on_free=on_free)
        floor = parse_bytes(floor_bytes, "floor_bytes")
        ceiling = self._size_bytes
        if ceiling_bytes is not None:
            ceiling = min(ceiling, parse_bytes(ceiling_bytes, "ceiling_bytes"))
        account = BudgetAccount(holder, floor, ceiling, on_wanted, on_free)
        with self._accounts:
            self._accounts.open(account)
            lease = DeviceLease(self, self._accounts, account, partial(self._close, account))
            self._leases[account] = lease
        return lease

    def _close(self, account: BudgetAccount) -> None:
        with self._accounts:
            waiting = self._accounts.close(account)
            self._leases.pop(account, None)
        call_all(waiting)

    def _make_accounts(self) -> BudgetAccounts:
        return BudgetAccounts(self._size_bytes)

    def __repr__(self) -> str:
        with self._accounts:
            parts = "; ".join(map(str, self._accounts.by_holder.values())) or "no leases"
            held = self._accounts.held
        return f"<{type(self).__name__} [{size_text(held)} of {size_text(self._size_bytes)} held | {parts}]>"


class DeviceLease:
    """What one holder has of a `DeviceBudget`; made by `DeviceBudget.lease`.

    Attributes:
        holder: The name of the holder.
    """

    def __init__(
        self,
        budget: DeviceBudget,
        accounts: BudgetAccounts,
        account: BudgetAccount,
        close: Callable[[], None],
    ) -> None:
        self.holder = account.holder
        self._budget, self._accounts, self._account, self._close = budget, accounts, account, close

    @property
    def budget(self) -> DeviceBudget:
        """The budget that the lease is of."""
        return self._budget

    @property
    def floor_bytes(self) -> int:
        """What the holder can always take."""
        return self._account.floor

    @property
    def ceiling_bytes(self) -> int:
        """What the holder can hold at most."""
        return self._account.ceiling

    @property
    def held_bytes(self) -> int:
        """What the holder has taken and not given back."""
        return self._account.held

    @property
    def wanted_bytes(self) -> int:
        """What the holder lacks: of the last `take` that the budget could not fulfil, or of `want`."""
        return self._account.wanted

    @property
    def available_bytes(self) -> int:
        """What the holder could take now; another thread may take it first, save what the floor covers."""
        with self._accounts:
            return self._accounts.available(self._account)

    @property
    def reachable_bytes(self) -> int:
        """What the holder could take if the others had no more than their floors."""
        with self._accounts:
            return self._accounts.reachable(self._account)

    @property
    def owed_bytes(self) -> int:
        """What other holders lack now, at most what this one holds above its floor.

        Giving it is a request: memory that is in use stays.
        """
        with self._accounts:
            return self._accounts.owed(self._account)

    @property
    def others_lack_bytes(self) -> int:
        """What other holders want and their floors do not cover, whether this one could give it or not."""
        with self._accounts:
            return self._accounts.others_lack(self._account)

    def take(self, size_bytes: int) -> bool:
        """Take bytes, all or nothing; return whether they were taken.

        Up to `floor_bytes` it always succeeds. If the bytes are refused because other holders have them, they
        are noted as `wanted_bytes` (what is above the own ceiling is not). If that is more than was noted,
        the others are asked by their `on_wanted`, and the bytes are tried once more, for those that give at
        once. A success clears `wanted_bytes`. A closed lease takes nothing.

        Raises:
            ConfigError: the size is negative or no whole number.
        """
        check_counts(ConfigError, 0, size_bytes=size_bytes)
        accounts, account = self._accounts, self._account
        with accounts:
            if accounts.take(account, size_bytes):
                return True
            exceeds = account.held + size_bytes > account.ceiling
            asked = accounts.note(account, 0 if exceeds else size_bytes)
        if not asked:
            return False
        call_all(asked)
        with accounts:
            return accounts.take(account, size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give back bytes, whose memory is free already; holders that want some are told by `on_free`.

        Raises:
            ConfigError: the holder has fewer bytes, or the size is no whole number from 0 on.
        """
        check_counts(ConfigError, 0, size_bytes=size_bytes)
        with self._accounts:
            if size_bytes > self._account.held:
                raise ConfigError(
                    f"{self.holder!r} gives back {size_bytes} bytes of a device budget and has taken "
                    f"{self._account.held}; give back what was taken, once."
                )
            self._account.held -= size_bytes
            waiting = self._accounts.waiting(self._account) if size_bytes else []
        call_all(waiting)

    def want(self, size_bytes: int) -> None:
        """Note that the holder lacks bytes, without taking any; 0 withdraws the note.

        If they are more than was noted, the other holders are asked for them.

        Raises:
            ConfigError: the size is negative or no whole number.
        """
        check_counts(ConfigError, 0, size_bytes=size_bytes)
        account = self._account
        with self._accounts:
            asked = self._accounts.note(account, min(size_bytes, account.ceiling - account.held))
        call_all(asked)

    def close(self) -> None:
        """End the lease: give back all that it holds, and its floor. A second call does nothing."""
        self._close()

    def __repr__(self) -> str:
        account = self._account
        wants = f", wants {size_text(account.wanted)}" if account.wanted else ""
        floor, ceiling = size_text(account.floor), size_text(account.ceiling)
        held = size_text(account.held)
        return f"<DeviceLease {self.holder} [{held} held, floor {floor}, ceiling {ceiling}{wants}]>"

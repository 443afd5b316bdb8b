"""The accounts of the holders of a device budget: who has how much of it, and who lacks some."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hotswap.errors import ConfigError, OutOfMemory

__all__ = ["BudgetAccount", "BudgetAccounts", "call_all", "size_text"]

_log = logging.getLogger("hotswap")


@dataclass(slots=True, eq=False)
class BudgetAccount:
    """What a holder has; entering the accounts guards it."""

    holder: str
    floor: int
    ceiling: int
    on_wanted: Callable[[], object] | None
    on_free: Callable[[], object] | None
    held: int = 0
    wanted: int = 0

    @property
    def reserved(self) -> int:
        """What no other holder can take."""
        return max(self.held, self.floor)

    @property
    def lacking(self) -> int:
        """The wanted bytes that the floor does not cover."""
        return max(self.held + self.wanted, self.floor) - self.reserved

    def __str__(self) -> str:
        wants = f", wants {size_text(self.wanted)}" if self.wanted else ""
        return f"{self.holder}: {size_text(self.held)}, floor {size_text(self.floor)}{wants}"


class BudgetAccounts(AbstractContextManager[None]):
    """The accounts of all holders of one budget, locked while they are entered.

    Callers enter them for all that follows, and make the callbacks outside.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.by_holder: dict[str, BudgetAccount] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def held(self) -> int:
        return sum(account.held for account in self.by_holder.values())

    @property
    def free(self) -> int:
        return self.size - sum(account.reserved for account in self.by_holder.values())

    def open(self, account: BudgetAccount) -> None:
        """Add an account, or raise the error of `DeviceBudget.lease`."""
        holder, floor = account.holder, account.floor
        names = ", ".join(map(repr, self.by_holder)) or "no holder"
        if holder in self.by_holder:
            raise ConfigError(f"{holder!r} has a lease of this budget; give each holder a name of its own.")
        if floor > account.ceiling:
            raise ConfigError(
                f"The floor of {holder!r} is {size_text(floor)}, and it may hold at most "
                f"{size_text(account.ceiling)}; lower floor_bytes."
            )
        floors = sum(other.floor for other in self.by_holder.values())
        if floors + floor > self.size:
            raise ConfigError(
                f"A floor of {size_text(floor)} for {holder!r} exceeds the budget, which has "
                f"{size_text(self.size)}, and the floors of {names} take {size_text(floors)}; lower a floor, "
                "or make the budget larger."
            )
        if floor > self.free:
            raise OutOfMemory(
                f"The budget has {size_text(self.free)} free, and the floor of {holder!r} is "
                f"{size_text(floor)}; {names} must give memory back first. Try again later."
            )
        self.by_holder[holder] = account

    def close(self, account: BudgetAccount) -> list[Callable[[], object]]:
        """Remove an account, unless that was done; return the callbacks of those that want memory."""
        if self.by_holder.get(account.holder) is not account:
            return []
        del self.by_holder[account.holder]
        account.held = account.wanted = account.floor = account.ceiling = 0
        return self.waiting(account)

    def available(self, account: BudgetAccount) -> int:
        return min(account.ceiling - account.held, account.reserved - account.held + self.free)

    def reachable(self, account: BudgetAccount) -> int:
        """What the holder could take if the others had no more than their floors."""
        floors = sum(other.floor for other in self.by_holder.values() if other is not account)
        return min(account.ceiling, self.size - floors) - account.held

    def take(self, account: BudgetAccount, size: int) -> bool:
        if size > self.available(account):
            return False
        account.held += size
        account.wanted = 0
        return True

    def note(self, account: BudgetAccount, wanted: int) -> list[Callable[[], object]]:
        """Note what is wanted; return the callbacks of others that are to be asked for it."""
        rises, account.wanted = wanted > account.wanted, wanted
        if not (rises and account.lacking):
            return []
        others = (other for other in self.by_holder.values() if other is not account)
        return [other.on_wanted for other in others if other.on_wanted is not None and self.owed(other)]

    def waiting(self, giver: BudgetAccount) -> list[Callable[[], object]]:
        """The callbacks of other holders that want memory."""
        others = (other for other in self.by_holder.values() if other is not giver)
        return [other.on_free for other in others if other.on_free is not None and other.wanted]

    def others_lack(self, account: BudgetAccount) -> int:
        return sum(other.lacking for other in self.by_holder.values() if other is not account)

    def owed(self, account: BudgetAccount) -> int:
        """What the other holders lack beyond what is free, at most what this one has above its floor."""
        spare = account.held - account.floor
        lacking = self.others_lack(account) if spare > 0 else 0
        return min(spare, max(0, lacking - self.free)) if lacking else 0


def call_all(callbacks: Iterable[Callable[[], object]]) -> None:
    """Call what holders gave; an error is logged."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("A holder of a device budget failed to handle a change of the budget")


def size_text(size_bytes: int) -> str:
    """Return a size in the unit in which people would say it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"

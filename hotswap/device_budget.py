"""`DeviceBudget`: the memory of one device, shared by several engines of one process.

Each holder (an engine) has a lease with a *floor*, which it can always take, and a *ceiling*. What is above
the floors goes to whichever holder asks first. A holder that lacks memory is noted with what it wants; those
that hold more than their floor are asked for it, and the first is told when memory comes free:

    take -> False: wanted_bytes is noted -> on_wanted of others -> they give -> on_free -> take -> True

The budget only counts: allocating and freeing is up to the holders. Take before you allocate, and give after
you have freed.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator

from hotswap.checks import check_callables, check_counts, check_strings
from hotswap.errors import ConfigError, OutOfMemory
from hotswap.hardware import parse_bytes

__all__ = ["DeviceBudget", "DeviceLease"]

_log = logging.getLogger("hotswap")


class DeviceBudget:
    """Counts the bytes of a device that engines of one process share.

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
        self._lock = threading.Lock()
        self._leases: dict[str, DeviceLease] = {}

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
        with self._lock:
            return sum(lease._held for lease in self._leases.values())

    @property
    def free_bytes(self) -> int:
        """What any lease could take: neither held, nor part of a floor."""
        with self._lock:
            return self._free()

    @property
    def leases(self) -> tuple[DeviceLease, ...]:
        """The open leases, oldest first."""
        with self._lock:
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
            ConfigError: the holder has an open lease; the floor is above the ceiling; or the floors of all
                leases exceed the size.
            OutOfMemory: other holders have too much above their floors at the moment for this floor.
        """
        check_strings(ConfigError, holder=holder)
        check_callables(ConfigError, on_wanted=on_wanted, on_free=on_free)
        floor = parse_bytes(floor_bytes, "floor_bytes")
        ceiling = self._size_bytes
        if ceiling_bytes is not None:
            ceiling = min(ceiling, parse_bytes(ceiling_bytes, "ceiling_bytes"))
        with self._lock:
            self._check(holder, floor, ceiling)
            lease = DeviceLease(self, holder, floor, ceiling, on_wanted, on_free)
            self._leases[holder] = lease
        return lease

    def _check(self, holder: str, floor: int, ceiling: int) -> None:
        if holder in self._leases:
            raise ConfigError(f"{holder!r} has a lease of this budget; give each holder a name of its own.")
        if floor > self._size_bytes or floor > ceiling:
            raise ConfigError(
                f"The floor of {holder!r} is {_size(floor)}, and it may hold at most {_size(ceiling)}; lower "
                "floor_bytes."
            )
        floors = sum(lease._floor for lease in self._leases.values())
        if floors + floor > self._size_bytes:
            raise ConfigError(
                f"A floor of {_size(floor)} for {holder!r} exceeds the budget, which has "
                f"{_size(self._size_bytes)}, and the floors of {self._names()} take {_size(floors)}; lower a "
                "floor, or make the budget larger."
            )
        if floor > self._free():
            raise OutOfMemory(
                f"The budget has {_size(self._free())} free, and the floor of {holder!r} is {_size(floor)}; "
                f"{self._names()} must give memory back first. Try again later."
            )

    # ------------------------------------------------------------------ for leases, under the lock

    def _free(self) -> int:
        return self._size_bytes - sum(max(lease._held, lease._floor) for lease in self._leases.values())

    def _names(self) -> str:
        return ", ".join(map(repr, self._leases)) or "no holder"

    def _owed(self, lease: DeviceLease) -> int:
        """What the other holders lack beyond what is free, at most what this one has above its floor."""
        spare = lease._held - lease._floor
        if spare <= 0:
            return 0
        lacking = self._lacking(lease)
        return min(spare, max(0, lacking - self._free())) if lacking else 0

    def _lacking(self, lease: DeviceLease) -> int:
        return sum(other._lacking for other in self._leases.values() if other is not lease)

    def _asked(self, wanter: DeviceLease) -> list[Callable[[], object]]:
        """The callbacks of holders that can give something to one that lacks memory."""
        others = (other for other in self._leases.values() if other is not wanter)
        return [other._on_wanted for other in others if other._on_wanted is not None and self._owed(other)]

    def _waiting(self, giver: DeviceLease) -> list[Callable[[], object]]:
        """The callbacks of other holders that want memory."""
        others = (other for other in self._leases.values() if other is not giver)
        return [other._on_free for other in others if other._on_free is not None and other._wanted]

    def __repr__(self) -> str:
        with self._lock:
            parts = "; ".join(map(str, self._descriptions())) or "no leases"
            held = sum(lease._held for lease in self._leases.values())
        return f"<DeviceBudget [{_size(held)} of {_size(self._size_bytes)} held | {parts}]>"

    def _descriptions(self) -> Iterator[str]:
        for lease in self._leases.values():
            wants = f", wants {_size(lease._wanted)}" if lease._wanted else ""
            yield f"{lease.holder}: {_size(lease._held)}, floor {_size(lease._floor)}{wants}"


class DeviceLease:
    """What one holder has of a `DeviceBudget`; made by `DeviceBudget.lease`.

    Attributes:
        holder: The name of the holder.
    """

    def __init__(
        self,
        budget: DeviceBudget,
        holder: str,
        floor_bytes: int,
        ceiling_bytes: int,
        on_wanted: Callable[[], object] | None,
        on_free: Callable[[], object] | None,
    ) -> None:
        self.holder = holder
        self._budget, self._floor, self._ceiling = budget, floor_bytes, ceiling_bytes
        self._on_wanted, self._on_free = on_wanted, on_free
        self._held = self._wanted = 0
        self._closed = False

    @property
    def budget(self) -> DeviceBudget:
        """The budget that the lease is of."""
        return self._budget

    @property
    def floor_bytes(self) -> int:
        """What the holder can always take."""
        return self._floor

    @property
    def ceiling_bytes(self) -> int:
        """What the holder can hold at most."""
        return self._ceiling

    @property
    def held_bytes(self) -> int:
        """What the holder has taken and not given back."""
        return self._held

    @property
    def wanted_bytes(self) -> int:
        """What the holder lacks: of the last `take` that the budget could not fulfil, or of `want`."""
        return self._wanted

    @property
    def available_bytes(self) -> int:
        """What the holder could take now; another thread may take it first, save what the floor covers."""
        with self._budget._lock:
            return self._available()

    @property
    def owed_bytes(self) -> int:
        """What other holders lack now, at most what this one holds above its floor.

        Giving it is a request: memory that is in use stays.
        """
        with self._budget._lock:
            return self._budget._owed(self)

    @property
    def others_lack_bytes(self) -> int:
        """What other holders want and their floors do not cover, whether this one could give it or not."""
        with self._budget._lock:
            return self._budget._lacking(self)

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
        with self._budget._lock:
            if self._try(size_bytes):
                return True
            asked = self._note(0 if self._held + size_bytes > self._ceiling else size_bytes)
        if not asked:
            return False
        _call(asked)
        with self._budget._lock:
            return self._try(size_bytes)

    def give(self, size_bytes: int) -> None:
        """Give back bytes, whose memory is free already; holders that want some are told by `on_free`.

        Raises:
            ConfigError: the holder has fewer bytes, or the size is no whole number from 0 on.
        """
        check_counts(ConfigError, 0, size_bytes=size_bytes)
        with self._budget._lock:
            if size_bytes > self._held:
                raise ConfigError(
                    f"{self.holder!r} gives back {size_bytes} bytes of a device budget and has taken "
                    f"{self._held}; give back what was taken, once."
                )
            self._held -= size_bytes
            waiting = self._budget._waiting(self) if size_bytes else []
        _call(waiting)

    def want(self, size_bytes: int) -> None:
        """Note that the holder lacks bytes, without taking any; 0 withdraws the note.

        If they are more than was noted, the other holders are asked for them.

        Raises:
            ConfigError: the size is negative or no whole number.
        """
        check_counts(ConfigError, 0, size_bytes=size_bytes)
        with self._budget._lock:
            asked = self._note(min(size_bytes, self._ceiling - self._held))
        _call(asked)

    def close(self) -> None:
        """End the lease: give back all that it holds, and its floor. A second call does nothing."""
        with self._budget._lock:
            if self._closed:
                return
            del self._budget._leases[self.holder]
            self._closed = True
            self._held = self._wanted = self._floor = self._ceiling = 0
            waiting = self._budget._waiting(self)
        _call(waiting)

    # ------------------------------------------------------------------ under the lock

    @property
    def _lacking(self) -> int:
        """The wanted bytes that the floor does not cover."""
        return max(self._held + self._wanted, self._floor) - max(self._held, self._floor)

    def _note(self, wanted: int) -> list[Callable[[], object]]:
        """Note what is wanted; return the callbacks of others that are to be asked for it."""
        rises, self._wanted = wanted > self._wanted, wanted
        return self._budget._asked(self) if rises and self._lacking else []

    def _available(self) -> int:
        reserved = max(self._held, self._floor) - self._held
        return min(self._ceiling - self._held, reserved + self._budget._free())

    def _try(self, size_bytes: int) -> bool:
        if size_bytes > self._available():
            return False
        self._held += size_bytes
        self._wanted = 0
        return True

    def __repr__(self) -> str:
        wants = f", wants {_size(self._wanted)}" if self._wanted else ""
        floor, ceiling = _size(self._floor), _size(self._ceiling)
        return (
            f"<DeviceLease {self.holder} [{_size(self._held)} held, floor {floor}, ceiling {ceiling}{wants}]>"
        )


def _call(callbacks: list[Callable[[], object]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("A holder of a device budget failed to handle a change of the budget")


def _size(size_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} bytes"

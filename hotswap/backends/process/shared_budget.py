"""`SharedDeviceBudget`: the memory of one device, shared by engines of several processes of a machine."""

from __future__ import annotations

import re
from typing import Final

from hotswap.backends.process.shared_accounts import SharedAccounts
from hotswap.checks import check_strings
from hotswap.device_budget import DeviceBudget
from hotswap.errors import ConfigError

__all__ = ["SharedDeviceBudget"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


class SharedDeviceBudget(DeviceBudget):
    """A `DeviceBudget` that engines of several processes share, which know each other by its name.

    ```python
    budget = SharedDeviceBudget("gpu0", "40 GiB")
    ProcessEngine("chat", partial(TorchEngine, "chat", device_budget=budget, floor_bytes="18 GiB"))
    ```

    Every process of a user of this machine that has a budget of this name leases parts of the same memory. It
    can be pickled. What all leases hold is in a small file in memory, which is there while there are leases.
    A process that has ended, or was killed, has no leases: the others notice it within a second, or when they
    lack memory.

    Callbacks of leases are called by a thread of the budget where another process has caused them.

    Raises of all methods, beside what `DeviceBudget` says:
        OutOfMemory: another process has kept the file locked for ten seconds, as one does that is stopped
            at the wrong moment; end it, or let it go on.
        ConfigError: the leases that others have are of a budget of another size, or the file cannot be used.

    Args:
        name: What the processes know it by, and what views call it: up to 40 letters, digits and `._-`.
        size_bytes: The size of the memory; all processes give the same.

    Raises:
        ConfigError: the name or the size cannot be used.
    """

    def __init__(self, name: str, size_bytes: int | str) -> None:
        check_strings(ConfigError, name=name)
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name is {name!r}; give a shared budget up to 40 letters, digits and '._-', the first of "
                "them a letter or a digit."
            )
        super().__init__(size_bytes, name=name)

    def _make_accounts(self) -> SharedAccounts:
        return SharedAccounts(self._name, self._size_bytes)

    def __reduce__(self) -> tuple[type[SharedDeviceBudget], tuple[str, int]]:
        return type(self), (self._name, self._size_bytes)

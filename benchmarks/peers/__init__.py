"""The contestants of `benchmarks.load`: a file each, imported in a process of its own, and their list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["ABLATED", "CONTESTANTS", "LIMITS", "Contestant", "Memory"]

Memory: TypeAlias = Literal["gone", "fresh", "existing"]

# What a direct read of the same files into the same kind of memory is called.
LIMITS: dict[Memory, str] = {
    "gone": "raw_direct_gone",
    "fresh": "raw_direct_fresh",
    "existing": "raw_direct",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One line of the table.

    Attributes:
        key: Its name in the report.
        module: The file in this package that loads.
        what: What it does, for people.
        kind: Whether it is the limit, this project, or a peer.
        memory: Where the bytes end: dropped, in memory made while the clock runs, or in existing memory.
        options: How the module does it.
        check_options: Options that differ in the run that compares the bytes, for one that keeps none.
        apart: Whether it is installed in the peers' environment.
        caches: The states of the page cache in which it means something.
    """

    key: str
    module: str
    what: str
    kind: Literal["limit", "hotswap", "peer"] = "peer"
    memory: Memory
    options: Mapping[str, Any] = field(default_factory=dict)
    check_options: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    caches: tuple[Literal["cold", "warm"], ...] = ("cold", "warm")


def _limit(memory: Memory, what: str, **more: Any) -> Contestant:
    return Contestant(
        key=LIMITS[memory],
        module="raw_direct",
        what=what,
        kind="limit",
        memory=memory,
        options={"memory": memory},
        **more,
    )


def _store(
    key: str, what: str, memory: Memory, *, tier: str = "disk", sink: str = "", **more: Any
) -> Contestant:
    options = {"tier": tier, "sink": sink or memory, **more.pop("options", {})}
    return Contestant(
        key=key, module="hotswap_store", what=what, kind="hotswap", memory=memory, options=options, **more
    )


def _peer(key: str, module: str, what: str, *, mapped: bool = False, **more: Any) -> tuple[Contestant, ...]:
    """A loader in memory that it makes, and copied into existing memory, into which none can read."""
    options = more.pop("options", {})
    touched = ", a byte of every page read" if mapped else ""
    return (
        Contestant(key=key, module=module, what=what + touched, memory="fresh", options=options, **more),
        Contestant(
            key=f"{key}_into",
            module=module,
            what=f"{what}, copied",
            memory="existing",
            options={**options, "memory": "existing"},
            **more,
        ),
    )


_TRUSTING = {"store": {"verify": "never"}}

CONTESTANTS: tuple[Contestant, ...] = (
    _limit("gone", "the files read directly", check_options={"memory": "existing"}),
    _store("hotswap_gone", "this store from disk", "gone", check_options={"sink": "existing"}),
    _limit("fresh", "the files read directly"),
    _store("hotswap_fresh", "this store from disk, the index for the first time", "fresh"),
    _store("hotswap_fresh_trusting", "the same, checksums not compared", "fresh", options=_TRUSTING),
    _limit("existing", "the files read directly"),
    _store("hotswap", "this store from disk", "existing"),
    _store("hotswap_trusting", "the same, checksums not compared", "existing", options=_TRUSTING),
    _store(
        "hotswap_host",
        "this store from the host tier, tensors as views",
        "existing",
        tier="host",
        sink="view",
        caches=("warm",),
    ),
    _store(
        "hotswap_host_copy",
        "this store from the host tier, copied",
        "existing",
        tier="host",
        caches=("warm",),
    ),
    *_peer("safetensors", "safetensors_open", "safetensors", mapped=True),
    Contestant(
        key="torch_load", module="torch_load", what="torch.load", memory="fresh", options={"mmap": False}
    ),
    *_peer("torch_load_mmap", "torch_load", "torch.load(mmap=True)", options={"mmap": True}, mapped=True),
    *_peer("runai", "runai", "runai-model-streamer", apart=True),
    *_peer("fastsafetensors", "fastsafetensors_loader", "fastsafetensors (nogds)", apart=True),
    *_peer("tensorizer", "tensorizer_reader", "tensorizer", apart=True),
)

# Chunk by chunk, because reading in place has no ring whose depth would matter.
ABLATED = _store("hotswap", "this store from disk, copied chunk by chunk", "existing", sink="copy")

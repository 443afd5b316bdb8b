"""The contestants of `benchmarks.load`: a file each, imported in a process of its own, and their list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CONTESTANTS", "Contestant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One line of the table.

    Attributes:
        key: Its name; the report's series is `<key>_s`.
        module: The file in this package that loads.
        what: What it does, for people.
        kind: Whether it is the limit, this project, or a peer.
        options: How the module does it.
        check_options: What differs in the run that only compares the bytes, for one that keeps none.
        compare: The contestant under the same conditions, whose ratio says most.
        apart: Whether it is installed in the peers' environment.
        caches: The states of the page cache in which it means something.
    """

    key: str
    module: str
    what: str
    kind: Literal["limit", "hotswap", "peer"] = "peer"
    options: Mapping[str, Any] = field(default_factory=dict)
    check_options: Mapping[str, Any] = field(default_factory=dict)
    compare: str = ""
    apart: bool = False
    caches: tuple[Literal["cold", "warm"], ...] = ("cold", "warm")


CONTESTANTS: tuple[Contestant, ...] = (
    Contestant(
        key="raw_direct",
        module="raw_direct",
        what="the files read directly, bytes let go: the limit",
        kind="limit",
        options={"sink": "drop"},
        check_options={"sink": "copy"},
    ),
    Contestant(
        key="raw_direct_copy",
        module="raw_direct",
        what="the same, copied into memory that exists",
        kind="limit",
        options={"sink": "copy"},
    ),
    Contestant(
        key="hotswap",
        module="hotswap_store",
        what="this store from disk, read into memory that exists",
        kind="hotswap",
        options={"tier": "disk", "sink": "resident"},
        compare="raw_direct_copy",
    ),
    Contestant(
        key="hotswap_lend",
        module="hotswap_store",
        what="this store from disk, chunks let go",
        kind="hotswap",
        options={"tier": "disk", "sink": "lend"},
        check_options={"sink": "resident"},
        compare="raw_direct",
    ),
    Contestant(
        key="hotswap_copy",
        module="hotswap_store",
        what="this store from disk, copied into memory that exists",
        kind="hotswap",
        options={"tier": "disk", "sink": "copy"},
        compare="raw_direct_copy",
    ),
    Contestant(
        key="hotswap_trusting",
        module="hotswap_store",
        what="this store from disk, read into memory that exists, checksums not compared",
        kind="hotswap",
        options={"tier": "disk", "sink": "resident", "store": {"verify": "never"}},
        compare="raw_direct_copy",
    ),
    Contestant(
        key="hotswap_fresh",
        module="hotswap_store",
        what="this store from disk, read into fresh memory, as every peer",
        kind="hotswap",
        options={"tier": "disk", "sink": "fresh"},
    ),
    Contestant(
        key="hotswap_host",
        module="hotswap_store",
        what="this store from the host tier, tensors as views",
        kind="hotswap",
        options={"tier": "host", "sink": "view"},
        caches=("warm",),
    ),
    Contestant(
        key="hotswap_host_copy",
        module="hotswap_store",
        what="this store from the host tier, copied",
        kind="hotswap",
        options={"tier": "host", "sink": "resident"},
        caches=("warm",),
    ),
    Contestant(key="safetensors", module="safetensors_open", what="safetensors, every page touched"),
    Contestant(key="torch_load", module="torch_load", what="torch.load", options={"mmap": False}),
    Contestant(
        key="torch_load_mmap",
        module="torch_load",
        what="torch.load(mmap=True), every page touched",
        options={"mmap": True},
    ),
    Contestant(key="runai", module="runai", what="runai-model-streamer", apart=True),
    Contestant(
        key="fastsafetensors", module="fastsafetensors_loader", what="fastsafetensors (nogds)", apart=True
    ),
    Contestant(key="tensorizer", module="tensorizer_reader", what="tensorizer", apart=True),
)

"""A part of `benchmarks remote`: weights from another node beside a plain socket, and to four nodes."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.measure import Summary, ratios, rounds, workspace
from benchmarks.peer_node import MODEL, SECRET
from benchmarks.process import Process
from hotswap.backends.memory import aligned_buffer
from hotswap.backends.nodes import PeerStore
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.writer import write_model
from hotswap.backends.transports import connect_tcp
from hotswap.model import Manifest, TensorSpec

__all__ = ["LEAST_OF_SOCKET", "MOST_OF_ONE", "Settings", "measure", "rows"]

LEAST_OF_SOCKET, MOST_OF_ONE = 0.8, 1.5
_RECEIVERS = ("n1", "n2", "n3", "n4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        size_bytes: Weights that go from one process to another.
        repeats: Rounds of the model's weights and of a plain socket in turn.
        spread_bytes: Weights that go to one node, and to four.
        spread_repeats: Rounds of each.
        link_bytes_per_s: What a node sends at most in those, as its network card would: five processes that
            share two cores are slower than five machines.
    """

    size_bytes: int = 1_000_000_000
    repeats: int = 9
    spread_bytes: int = 250_000_000
    spread_repeats: int = 3
    link_bytes_per_s: float = 50e6


def measure(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return a peer's rate over that of a plain socket, and the time of four receivers over that of one."""
    seconds = _beside_a_socket(settings, directory)
    spread = {
        "limited": _spread(settings, directory, settings.link_bytes_per_s),
        "unlimited": _spread(settings, directory, None),
    }
    return {
        "peer_over_socket": ratios(seconds["socket"], seconds["peer"]),
        "peer_s": seconds["peer"],
        "socket_s": seconds["socket"],
        "peer_four_over_one": _four_over_one(spread["limited"]),
        "peer_four_over_one_unlimited": _four_over_one(spread["unlimited"]),
        "peer_spread_s": spread,
    }


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table, and whether each keeps its limit."""
    socket_, four = Summary.of(report["peer_over_socket"]), Summary.of(report["peer_four_over_one"])
    unlimited = Summary.of(report["peer_four_over_one_unlimited"])
    return [
        ["weights from a peer, rate over a plain socket's", socket_.format(2), f">= {LEAST_OF_SOCKET}"],
        ["four receivers, time over that of one", four.format(2), f"<= {MOST_OF_ONE}"],
        ["the same, on links without a limit", unlimited.format(2), "cores of this machine"],
    ]


# ---------------------------------------------------------------------- one to one


def _beside_a_socket(settings: Settings, directory: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"socket": [], "peer": []}
    with workspace("peers", directory) as root:
        _write(root, settings.size_bytes)
        with _node("n0", "127.0.0.3", root, settings.size_bytes, has_model=True) as (_, first):
            target = aligned_buffer(settings.size_bytes + (1 << 20))
            target[::4096] = bytes(len(target[::4096]))  # its pages are there before the first round
            for turn, kind in enumerate(rounds(tuple(seconds), settings.repeats + 1)):
                if kind == "socket":
                    took_s = _by_socket(first["plain_port"], target)
                else:
                    took_s = anyio.run(_by_peer, root, first["port"], target)
                if turn >= len(seconds):
                    seconds[kind].append(took_s)
    return seconds


def _by_socket(port: int, target: memoryview) -> float:
    began_s, size = time.perf_counter(), 0
    with socket.create_connection(("127.0.0.3", port)) as connected:
        while received := connected.recv_into(target[size:]):
            size += received
    return time.perf_counter() - began_s


async def _by_peer(root: Path, port: int, target: memoryview) -> float:
    open_link = partial(connect_tcp, "127.0.0.3", port, secret=SECRET)
    async with PeerStore(NvmeStore(root), {"n0": open_link}, node="n1") as peers:
        manifest = await peers.manifest(MODEL)
        began_s = time.perf_counter()
        for shard in manifest.shards:
            end = shard.buffer_offset_bytes + shard.size_bytes
            async with peers.open_into(shard, target[shard.buffer_offset_bytes : end]) as chunks:
                async for _ in chunks:
                    pass
        assert peers.num_bytes_from.keys() == {"n0"}, peers.num_bytes_from
        return time.perf_counter() - began_s


# ---------------------------------------------------------------------- one to four


def _spread(settings: Settings, directory: Path, bytes_per_s: float | None) -> dict[str, list[float]]:
    """Return the seconds until one of the receivers has the weights, and until all four have."""
    seconds: dict[str, list[float]] = {"one": [], "four": []}
    with workspace("peers", directory) as root, ExitStack() as stack:
        _write(root, settings.spread_bytes)
        nodes: dict[str, tuple[Process, dict[str, Any]]] = {}
        for number, name in enumerate(("n0", *_RECEIVERS)):
            node = _node(
                name,
                f"127.0.0.{number + 2}",
                root,
                settings.spread_bytes,
                has_model=name == "n0",
                bytes_per_s=bytes_per_s,
            )
            nodes[name] = stack.enter_context(node)
        places = {name: (first["address"], first["port"]) for name, (_, first) in nodes.items()}
        receivers = [nodes[name][0] for name in _RECEIVERS]
        for receiver in receivers:
            receiver.ask({"do": "peers", "peers": places})
        for kind in rounds(tuple(seconds), settings.spread_repeats):
            seconds[kind].append(_load(receivers[:1] if kind == "one" else receivers))
    return seconds


def _load(receivers: Sequence[Process]) -> float:
    with ThreadPoolExecutor(len(receivers)) as threads:
        answers = list(threads.map(lambda receiver: receiver.ask({"do": "prefetch"}), receivers))
    for receiver in receivers:
        receiver.ask({"do": "drop"})
    assert not any("" in answer["from"] for answer in answers), "the storage was read"
    return max(float(answer["seconds"]) for answer in answers)


def _four_over_one(seconds: Mapping[str, list[float]]) -> list[float]:
    return [four / one for four, one in zip(seconds["four"], seconds["one"], strict=True)]


# ---------------------------------------------------------------------- nodes and weights


@contextmanager
def _node(
    name: str,
    address: str,
    root: Path,
    size_bytes: int,
    *,
    has_model: bool = False,
    bytes_per_s: float | None = None,
) -> Iterator[tuple[Process, dict[str, Any]]]:
    settings = {
        "node": name,
        "address": address,
        "root": str(root),
        "budget": size_bytes + (16 << 20),
        "has_model": has_model,
        "bytes_per_s": bytes_per_s,
        "children": 1,
    }
    command = [sys.executable, "-m", "benchmarks.peer_node", json.dumps(settings)]
    with Process(command, environment={}, timeout_s=600) as process:
        yield process, {"address": address, **process.first()}


def _write(root: Path, size_bytes: int) -> None:
    """Write a model of one shard of random bytes."""
    size_bytes -= size_bytes % 4096
    block = Random(0).randbytes(1 << 20)
    data = memoryview(bytearray(size_bytes))
    for at in range(0, size_bytes, len(block)):
        data[at : at + len(block)] = block[: size_bytes - at]
    manifest = Manifest(
        model=MODEL,
        shards=(),
        buffer_bytes=size_bytes,
        tensors=(
            TensorSpec(name="w", dtype="uint8", shape=(size_bytes,), offset_bytes=0, size_bytes=size_bytes),
        ),
        architecture="None",
        config="{}",
    )
    write_model(root, manifest, [[data]], max_file_bytes=size_bytes)

"""Engines that outlive their controllers, and what they refuse."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import ray
from anyio import to_thread

from hotswap import InstanceState
from hotswap.backends.ray import RayEngine
from hotswap.backends.remote import RemoteEngine
from hotswap.backends.transports import LinkSecret, connect_tcp
from hotswap.errors import ControllerSuperseded, InstanceLost
from tests.backends.ray.local_cluster import LocalCluster
from tests.backends.ray.support import LONG, PROMPT, engine_on, settled, until
from tests.house.tree import ROOT
from tests.runtime.support import Idle, read, sim_fleet


async def test_a_controller_that_comes_after_one_that_was_killed_finds_the_model_served(
    cluster: LocalCluster,
) -> None:
    command = [sys.executable, "-m", "tests.backends.ray.controller", cluster.address]
    killed = await to_thread.run_sync(lambda: subprocess.run(command, cwd=ROOT, check=False))
    assert killed.returncode == -signal.SIGKILL, "it kills itself in the middle of a stream"
    engine = engine_on("127.0.0.3", "kept", detached=True)
    try:
        async with sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet:
            assert (engine.status().state, engine.status().model) == (InstanceState.SERVING, "a")
            assert engine.status().num_running == 0
            await read(fleet, "a", PROMPT, LONG)
            assert fleet.swaps == ()
            await settled(fleet)
    finally:
        await engine.stop()


async def test_actors_that_are_not_detached_end_with_their_controller(cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "tests.backends.ray.controller", cluster.address, "attached"]
    killed = await to_thread.run_sync(lambda: subprocess.run(command, cwd=ROOT, check=False))
    assert killed.returncode == -signal.SIGKILL
    await cluster.no_actors()


async def test_an_older_controller_is_refused_and_leaves_the_actor_to_the_newer_one(
    cluster: LocalCluster,
) -> None:
    def controller(epoch: int) -> RayEngine:
        return engine_on("127.0.0.3", "fenced", detached=True, epoch=epoch)

    first = controller(5)
    try:
        async with first:
            with pytest.raises(ControllerSuperseded):
                async with controller(4):
                    pass
            assert first.status().state is InstanceState.EMPTY
            async with controller(6) as second:
                await until(lambda: first.status().state is InstanceState.LOST)
                with pytest.raises(InstanceLost):
                    await first.unload()
                assert second.status().state is InstanceState.EMPTY
                assert second.pid == first.pid
    finally:
        await first.stop()


async def test_a_link_without_the_secret_of_the_actor_is_refused(cluster: LocalCluster) -> None:
    async with engine_on("127.0.0.3", "secret", detached=True) as engine:
        actor: Any = await to_thread.run_sync(ray.get_actor, "hotswap/secret", "hotswap")
        address = await actor.address.remote()
        for port in (address.port, address.store_port):
            for secret in (None, LinkSecret(b"another secret that is long enough")):
                link = partial(connect_tcp, address.node, port, secret=secret)
                with pytest.raises(InstanceLost, match="secret"):
                    async with RemoteEngine("stranger", link):
                        pass
        assert engine.status().state is InstanceState.EMPTY
        assert repr(address.key) not in repr(address)
        await engine.stop()

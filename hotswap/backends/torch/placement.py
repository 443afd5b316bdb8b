"""Creates an engine's model loader: for this process, or for rank processes."""

from __future__ import annotations

from collections.abc import Callable

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.loader import LocalLoader
from hotswap.backends.torch.loading import Loader
from hotswap.backends.torch.modeling import SkeletonCache
from hotswap.backends.torch.parallel.grid import Grid
from hotswap.backends.torch.parallel.loader import RankedLoader
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.backends.torch.settings import Settings
from hotswap.view import InstanceId

__all__ = ["make_loader"]


def make_loader(
    id: InstanceId,
    settings: Settings,
    skeletons: SkeletonCache,
    died: Callable[[str, Exception | None], None],
    notifier: StatusNotifier,
) -> Loader:
    """Return the loader of an engine.

    Args:
        id: The engine's name.
        settings: Its settings.
        skeletons: The cache of modules.
        died: Called on the event loop, with a reason and a cause, when a rank process ended by itself, or
            its node is lost.
        notifier: Notified when the memory of weights changes.
    """
    if settings.num_ranks == 1:
        return LocalLoader(
            settings.first_device,
            dtype=settings.dtype,
            memory_bytes=settings.total_memory_bytes,
            idle_bytes=settings.max_idle_bytes,
            packed_bytes=settings.max_packed_bytes,
            keep_fp8=settings.keep_fp8,
            skeletons=skeletons,
            steps=settings.steps,
            notifier=notifier,
            memory=settings.make_memory(id),
        )
    ranks = Ranks(
        engine=id,
        grid=Grid(settings.tp, settings.pp),
        devices=settings.rank_devices,
        threads=settings.rank_threads,
        invariant=settings.is_invariant,
        timeout_s=settings.rank_timeout_s,
        nodes=settings.nodes,
    )
    return RankedLoader(
        ranks,
        dtype=settings.dtype,
        memory_bytes=settings.total_memory_bytes,
        skeletons=skeletons,
        block_tokens=settings.kv_block_tokens,
        max_requests=settings.most_requests,
        died=died,
        notifier=notifier,
    )

"""How models come into a `VllmEngine`: weights are staged, and a core takes them over or is started."""

from __future__ import annotations

import hashlib
from functools import partial
from uuid import uuid4

from anyio.lowlevel import checkpoint, checkpoint_if_cancelled
from opentelemetry.trace import get_current_span

from hotswap.backends.life import Life
from hotswap.backends.notifier import Observed
from hotswap.backends.vllm.core import Core, CorePool, start
from hotswap.backends.vllm.settings import Settings
from hotswap.backends.vllm.staging import Staged, stage
from hotswap.backends.vllm.trial import try_core
from hotswap.errors import InstanceError, OutOfMemory
from hotswap.model import Manifest, ModelCard
from hotswap.store import WeightStore
from hotswap.view import InstanceId
from hotswap.worker_threads import shielded

__all__ = ["Loader"]


class Loader:
    """Loads models into cores for one engine, and takes cores back; belongs to the event loop.

    Args:
        engine: Its name, for errors.
        settings: The settings of its cores.
        life: Ends every wait when the engine is lost; its notifier is told what is staged.
        cores: The pool of idle cores; a pool of its own, of one core, if `None`.

    Attributes:
        staged: The weights of a preloaded model.
        load_path: How the last core got its model.
    """

    staged = Observed[Staged | None](lambda loader: loader.life.notifier.state_changed())

    def __init__(self, engine: InstanceId, settings: Settings, life: Life, cores: CorePool | None) -> None:
        self.life = life
        self.staged = None
        self.load_path = ""
        self._engine, self._settings = engine, settings
        self._cores = cores if cores is not None else CorePool()
        self._owns_cores = cores is None
        self._is_staging = False
        self._ready: Core | None = None  # of a load under way

    @property
    def staged_bytes(self) -> int:
        """The memory that preloaded weights take."""
        return self.staged.size_bytes if self.staged else 0

    async def preload(self, model: ModelCard, store: WeightStore, held_bytes: int) -> None:
        """Stage a model beside `held_bytes` of other weights; a model that was staged before is dropped."""
        if self._is_staging:
            raise InstanceError(f"Engine {self._engine!r} is preloading already; cancel that first.")
        await self.drop_preload()
        self._is_staging = True
        try:
            self.staged = await self.life.unless_lost(self._stage(model, store, held_bytes))
        finally:
            self._is_staging = False

    async def drop_preload(self) -> None:
        """Release the staged weights. Cannot be interrupted."""
        staged, self.staged = self.staged, None
        if staged is not None:
            await staged.release()

    async def load(self, model: ModelCard, store: WeightStore) -> Core:
        """Return a core with a model: an idle one or a new one. Cancelled, the core goes back to the pool.

        Raises:
            OutOfMemory: the model does not fit.
            UnsupportedModel: vLLM refuses it.
            InstanceLost: the core ended, or the engine.
            StoreError: its weights could not be read.
        """
        await checkpoint()
        if self.staged is not None and self.staged.card.id != model.id:
            await self.drop_preload()
        staged, self.staged = self.staged, None
        if staged is None:
            staged = await self._stage(model, store, 0)
        try:
            await shielded(partial(self._make_ready, staged))
            self.life.refuse_if_lost()
            await checkpoint_if_cancelled()
        except BaseException:
            await shielded(self._give_ready_back)
            raise
        finally:
            await staged.release()
        core, self._ready = self._ready, None
        assert core is not None, "it was made ready"
        return core

    async def give_back(self, core: Core) -> None:
        """Take back a core that runs no requests. Cannot be interrupted."""
        await self._cores.give(self._settings, core)

    async def close(self) -> None:
        """Release everything but a pool that is shared. Cannot be interrupted."""
        await self.drop_preload()
        if self._owns_cores:
            await self._cores.close()

    async def _stage(self, model: ModelCard, store: WeightStore, held_bytes: int) -> Staged:
        manifest, most = await store.manifest(model.id), self._settings.total_bytes
        if manifest.buffer_bytes + held_bytes > most:
            raise OutOfMemory(
                f"Model {model.id!r} takes {manifest.buffer_bytes:,} bytes, and engine {self._engine!r} has "
                f"{most - held_bytes:,} left; use a larger one."
            )
        staged = await stage(store, model, manifest)
        get_current_span().add_event("weights are in shared memory")
        return staged

    async def _make_ready(self, staged: Staged) -> None:
        """Set `_ready` to a core with the model's weights. Must not be interrupted."""
        weights = _fingerprint(staged.manifest)
        core = self._cores.take(self._settings, staged.architecture, weights)
        if core is None:
            if self._owns_cores:
                await self._cores.make_room()
            self.load_path, done = "new core", "vLLM's core was tested"
            core = await start(self._settings, staged)
            get_current_span().add_event("vLLM's core was started")
            prepared = try_core(core, staged.card, weights)
        else:
            kept = "woken" if core.is_asleep else "kept"
            self.load_path, done = (
                kept if core.weights == weights else "in place",
                "vLLM's core has the weights",
            )
            prepared = core.reload(staged, weights)
        try:
            await prepared
        except BaseException:
            await core.stop()
            raise
        core.grammar_ends, core.is_lent = staged.grammar_ends, staged.loan is not None
        core.kv_identity = _kv_identity(staged, self._settings)
        core.weight_bytes = staged.manifest.buffer_bytes
        get_current_span().add_event(done)
        self._ready = core

    async def _give_ready_back(self) -> None:
        core, self._ready = self._ready, None
        if core is not None:
            await self.give_back(core)


def _kv_identity(staged: Staged, settings: Settings) -> str:
    """Return a hash of all that keys and values depend on beside tokens, adapter and layout.

    Without checksums of the store it is of this load alone, as other weights may come under the same name.
    """
    sums = [shard.checksum for shard in staged.manifest.shards_of(0)]
    weights = sums if all(sums) else [uuid4().hex]
    parts = (weights, staged.manifest.config, staged.quantization, settings.dtype, settings.arguments)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _fingerprint(manifest: Manifest) -> str:
    """The same for the same weights of the same model, where the store takes checksums."""
    sums = " ".join(shard.checksum for shard in manifest.shards_of(0))
    return f"{manifest.model} {sums}"

"""`Models`: the model that an engine serves, and the one that it has preloaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from anyio.lowlevel import checkpoint

from hotswap.backends.life import Life
from hotswap.backends.notifier import Observed
from hotswap.backends.pool_fields import PoolFields
from hotswap.backends.servable import check_servable
from hotswap.backends.torch.adapters.manager import AdapterManager
from hotswap.backends.torch.arrival import Announced
from hotswap.backends.torch.blocks import BlockPool
from hotswap.backends.torch.constraints import Compilers, Constraints
from hotswap.backends.torch.device_memory import LeasedMemory
from hotswap.backends.torch.forward import Forward, LocalForward
from hotswap.backends.torch.kv_pool import KVPool
from hotswap.backends.torch.loading import LoadedModel, Loader
from hotswap.backends.torch.masks import Constraint
from hotswap.backends.torch.migration import MigrationContext, aborted
from hotswap.backends.torch.parallel.forward import RankedForward
from hotswap.backends.torch.resize_job import ResizeJob
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.settings import Settings
from hotswap.backends.torch.worker import Worker
from hotswap.checks import check_counts
from hotswap.errors import ConfigError, InstanceError, OutOfMemory, RequestEvicted
from hotswap.model import ModelCard
from hotswap.request import ModelId, Request
from hotswap.store import WeightStore
from hotswap.view import InstanceId, InstanceState

__all__ = ["Models"]

_UNSUPPORTED = ("bad_words",)


class Models:
    """Loads, preloads and releases the models of one engine; belongs to its event loop.

    Args:
        engine: The engine's name, for errors.
        loader: Reads weights, and has their memory.
        adapters: Those of the serving model.
        settings: The engine's.
        life: Ends every wait when the engine is lost; its notifier is told of models that come and go.

    Attributes:
        serving: The model that serves, or that is being unloaded.
        staged: The preloaded model.
        weights: Identifies the weights that serve and the way of computing with them.
        num_blocks: The KV blocks that a request of the serving model can have.
        constraints: Compiles the grammars of requests for the serving model.
        migration: The context of KV migrations; `None` if the KV blocks of the model cannot migrate.
    """

    serving = Observed[LoadedModel | None](lambda models: models.life.notifier.state_changed())
    staged = Observed[LoadedModel | None](lambda models: models.life.notifier.state_changed())

    def __init__(
        self, engine: InstanceId, loader: Loader, adapters: AdapterManager, settings: Settings, life: Life
    ) -> None:
        self.life = life
        self.serving = self.staged = None
        self.num_blocks = self._num_loads = self._ranks_bytes = 0
        self.weights = ""
        self.migration: MigrationContext | None = None
        self.constraints: Constraints | None = None
        self._engine, self._loader, self._adapters, self._settings = engine, loader, adapters, settings
        self._compilers = Compilers()
        self._pool: KVPool | None = None  # serves, or is kept until the next model does
        self._is_staging = False

    @property
    def name(self) -> ModelId | None:
        """The model that serves; `None` without one, and while the engine is lost."""
        return self.serving.card.id if self.serving and not self.life.is_lost else None

    @property
    def cache_bytes(self) -> int:
        """The memory of KV blocks and states: of the serving model, or kept for the model that is staged."""
        return self._ranks_bytes if self._pool is None else self._pool.size_bytes

    # ------------------------------------------------------------------ loads

    async def load(self, model: ModelCard, store: WeightStore) -> tuple[LoadedModel, Forward]:
        """Return a model and what computes with it: the preloaded one, or a new one. `serve` follows."""
        await checkpoint()
        loaded, self.staged = self.staged, None
        if loaded is not None and loaded.card.id != model.id:
            await loaded.release()
            loaded = None
        if loaded is None:
            self._drop_pool()
            loaded = await self._load(model, store)
        try:
            forward = await loaded.open(self._settings.kv, self._pool.cache if self._pool else None)
            self.life.refuse_if_lost()
            if isinstance(forward, LocalForward):
                self._pool = self._pool or KVPool.of(forward, self._loader.memory)
                self._pool.blocks.begin(loaded.own_bytes, self._pool.state_bytes)
        except BaseException:
            self._drop_pool()
            await loaded.release()
            raise
        return loaded, forward

    def serve(
        self,
        loaded: LoadedModel,
        forward: Forward,
        store: WeightStore,
        worker: Worker,
        post: Callable[..., None],
    ) -> Runner:
        """Serve a model that was loaded; return its runner, which `worker` is to run."""
        self._num_loads += 1
        # Without checksums of a store nothing tells weights from others but their load.
        identity = loaded.fingerprint or f"load {self._num_loads}"
        self.weights = f"{identity} {self._settings.invariant}"
        pool = self._pool
        blocks = BlockPool(forward.num_blocks) if pool is None else pool.blocks
        if not loaded.fingerprint:
            blocks.kept_since_s = time.monotonic()
        batcher = self._settings.make_batcher(forward, blocks)
        runner = Runner(forward, batcher, self._settings.make_budget())
        self._ranks_bytes = 0 if pool is not None else forward.size_bytes
        self.serving, self.num_blocks = loaded, blocks.least_blocks
        self.migration = self._make_migration_context(loaded, forward, runner, worker, post)
        self.constraints = Constraints(loaded, store, self._compilers)
        self._adapters.serve(loaded.card.id, loaded.targets())
        return runner

    async def release(self) -> None:
        """Release the model that serves, with its adapters.

        Its KV blocks stay if those of the staged model, which is to be loaded next, have the same format.
        """
        context, self.migration = self.migration, None
        if context is not None:
            context.end()  # from now on no copy begins
        await self._adapters.forget()
        if self.serving is not None:
            await self.serving.release()
        self.serving = self.constraints = None
        self.num_blocks = 0
        if not self._keeps_pool(context):
            self._drop_pool()

    def _keeps_pool(self, context: MigrationContext | None) -> bool:
        pool, next_model = self._pool, self.staged
        if pool is None or next_model is None or not self._settings.prefix_reuse:
            return False
        if context is not None and context.writing:  # to blocks that are free from now on
            return False
        if not next_model.fits(pool.cache, self._settings.kv):
            return False
        pool.blocks.release_all()
        self._loader.keep(pool.cache)
        return True

    def _drop_pool(self) -> None:
        pool, self._pool, self._ranks_bytes = self._pool, None, 0
        if pool is not None:
            pool.blocks.close()

    # ------------------------------------------------------------------ preloads

    def can_preload(self, model: ModelCard) -> bool:
        """Whether a model fits beside the one that serves."""
        loader, pool = self._loader, self._pool
        staged_bytes = self.staged.own_bytes if self.staged else 0
        spare_bytes = 0 if pool is None else pool.spare_bytes
        used_bytes = loader.weight_bytes + self.cache_bytes - staged_bytes
        if loader.memory.could_take(model.weight_bytes, staged_bytes + spare_bytes):
            return loader.can_preload and used_bytes + model.weight_bytes <= loader.memory_bytes
        return False

    async def preload(self, model: ModelCard, store: WeightStore, worker: Worker | None) -> None:
        """See `SupportsPreload`; `worker` is the engine's thread, which has background work."""
        if self.staged is not None and self.staged.card == model:
            return await checkpoint()
        self.life.require(InstanceState.SERVING, "preload")
        assert worker is not None, "the engine serves"
        if not self._loader.can_preload:  # of which the controller of a host cannot know
            raise OutOfMemory(
                f"Engine {self._engine!r} has several ranks, which load one model at a time; unload it first."
            )
        if self._is_staging:
            raise InstanceError(f"Engine {self._engine!r} is preloading already; cancel that first.")
        await self.drop_preload(worker)
        self._is_staging = True
        try:
            staged = await self.life.unless_lost(self._stage(model, store, worker))
        finally:
            self._is_staging = False
            worker.retry_background_work()
        self.staged = staged
        return None

    async def drop_preload(self, worker: Worker | None) -> None:
        """Release the preloaded model, if there is one, and KV blocks that are kept for it."""
        staged, self.staged = self.staged, None
        if self.serving is None:
            self._drop_pool()
        if staged is not None:
            await staged.release()
            if worker is not None:
                worker.retry_background_work()

    async def _load(self, model: ModelCard, store: WeightStore) -> LoadedModel:
        loaded = await self._loader.load(model, store, others_bytes=self.cache_bytes)
        if self.life.is_lost:
            await loaded.release()
        self.life.refuse_if_lost()
        return loaded

    async def _stage(self, model: ModelCard, store: WeightStore, worker: Worker) -> LoadedModel:
        loaded = await self._load(model, store)
        try:
            if not worker.others_step:  # otherwise it is packed between steps, once it serves
                await loaded.pack()
            self.life.refuse_if_lost()
        except BaseException:
            await loaded.release()
            raise
        return loaded

    # ------------------------------------------------------------------ the KV pool

    def pool_fields(self) -> PoolFields:
        """Return what a status tells of a pool whose size changes."""
        pool, memory = None if self.life.is_lost else self._pool, self._loader.memory
        if pool is None or self.serving is None or not isinstance(memory, LeasedMemory):
            return {}
        blocks = pool.blocks
        return {
            "request_kv_blocks": blocks.least_blocks,
            "least_kv_blocks": blocks.least_blocks,
            "most_kv_blocks": blocks.reachable_blocks,
            "kv_block_bytes": pool.cache.block_bytes,
            "device_budget": memory.budget.name,
        }

    async def resize_kv(self, num_blocks: int, worker: Worker | None, post: Callable[..., None]) -> int:
        """See `SupportsResize`; `worker` is the engine's thread, and `post` calls on its event loop."""
        check_counts(ConfigError, 0, num_blocks=num_blocks)
        self.life.require(InstanceState.SERVING, "resize its KV pool")
        if worker is None or not isinstance(self._loader.memory, LeasedMemory):
            raise InstanceError(
                f"Engine {self._engine!r} has no device_budget, so its KV pool keeps its size."
            )
        job = ResizeJob(num_blocks, post, worker.publish)
        worker.submit(job)
        await self.life.unless_lost(job.ended.wait())
        if job.reached is None:
            raise InstanceError(f"Engine {self._engine!r} was unloaded before its KV pool was resized.")
        return job.reached

    # ------------------------------------------------------------------ requests

    def check(self, request: Request) -> LoadedModel:
        """Return the model that serves a request, or refuse the request."""
        self.life.refuse_if_lost()
        model, state = self.serving, self.life.state
        if model is None or state is not InstanceState.SERVING or model.card.id != request.model:
            raise RequestEvicted(
                f"Engine {self._engine!r} is {state} with model {self.name!r} and admits no request "
                f"for {request.model!r}; send it to another engine."
            )
        check_servable(
            request,
            model.card.id,
            context=model.context,
            vocabulary=model.vocabulary,
            kv_tokens=self.num_blocks * self._settings.kv.block_tokens,
            unsupported=_UNSUPPORTED,
        )
        return model

    async def compile(self, request: Request) -> Constraint | None:
        """Return the state of a request's grammar, before it is admitted."""
        self.check(request)
        if (constraints := self.constraints) is None:
            return None
        constraint = await constraints.compile(request)
        self.check(request)
        if constraints is not self.constraints:
            raise RequestEvicted(
                f"Engine {self._engine!r} was loaded anew while it compiled the grammar of {request.id!r}; "
                "send it again."
            )
        return constraint

    # ------------------------------------------------------------------ migration

    def announced(self, request: Request, root: bytes) -> Announced | None:
        """Return what a move or a restore has announced of a request, if its root key is this one."""
        return None if self.migration is None else self.migration.announced(request, root)

    def migration_context(self) -> MigrationContext:
        """Return the context of KV migrations; raises `MigrationAborted` without one."""
        self.life.refuse_if_lost()
        if self.migration is None:
            raise aborted(
                "export",
                f"the KV blocks of engine {self._engine!r} cannot move: that takes ranks on one "
                "machine, RoPE that does not depend on the length of a text, prefix reuse, and a store with "
                "checksums",
            )
        return self.migration

    def _make_migration_context(
        self, model: LoadedModel, forward: Forward, runner: Runner, worker: Worker, post: Callable[..., None]
    ) -> MigrationContext | None:
        if not (isinstance(forward, LocalForward | RankedForward) and self._settings.prefix_reuse):
            return None
        if forward.cache is None or not model.fingerprint:
            return None
        if model.long_rope is not None:  # keys of equal tokens differ with the length of their request
            return None
        return MigrationContext(
            life=self.life,
            worker=worker,
            post=post,
            weights=self.weights,
            serving=(runner, forward.cache, forward.states),
        )

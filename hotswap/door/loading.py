"""Endpoints of other servers that load models and adapters: llama.cpp's `/models`, vLLM's for adapters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from hotswap import Adapter, FleetEvent, FleetView, InstanceId, InstanceState, ModelId, SwapRecord
from hotswap.door.body import checked, read_body
from hotswap.door.errors import RETRY_SOON, Refusal, invalid
from hotswap.door.generation import Door
from hotswap.door.operators import EventsEndpoint
from hotswap.door.protocol import Strict
from hotswap.door.served import resolve
from hotswap.door.wire import event, to_json
from hotswap.worker_threads import run_in_thread

__all__ = [
    "AdapterLoading",
    "LoadAdapterBody",
    "ModelBody",
    "ModelEvents",
    "ModelLoading",
    "UnloadAdapterBody",
]

# A load that is under way is looked at so often at least.
LOOK_S = 1.0
_READY = (InstanceState.EMPTY, InstanceState.SERVING)


class ModelBody(Strict):
    """A model."""

    model: str


class LoadAdapterBody(Strict):
    """An adapter in a directory."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(Strict):
    """An adapter."""

    lora_name: str
    base_model_name: str | None = None
    lora_int_id: int | None = None  # of no effect: adapters have no numbers here


class ModelLoading:
    """`/models/load` and `/models/unload`, as llama.cpp's router has them; both answer once it is done."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def load(self, request: Request) -> Response:
        """Have a model served by one instance, unless one serves it: an empty one, or the least busy.

        A load of it that is under way is waited for; if that fails, the model is loaded by another.
        """
        fleet, model = self._door.fleet, await self._model(request)
        events = fleet.events()
        while not (view := fleet.view()).serving(model):
            if not any(one.target == model for one in view.instances):
                await fleet.swap(_place(view, model), to=model, reason="/models/load")
                break
            with anyio.move_on_after(LOOK_S):  # a load that is refused before it begins is no event
                await events.take()
        return _success()

    async def unload(self, request: Request) -> Response:
        """Unload a model wherever it is served; a request for it may have it loaded again."""
        fleet, model = self._door.fleet, await self._model(request)
        serving = fleet.view().serving(model)
        if not serving:
            raise invalid("model", f"model is {model!r}, which no instance serves.")
        for instance in serving:
            await fleet.unload(instance.id, reason="/models/unload")
        return _success()

    async def _model(self, request: Request) -> ModelId:
        body = await read_body(request.scope, request.receive, self._door.limits)
        return resolve(self._door.fleet, (await checked(ModelBody, body)).model).id


def _place(view: FleetView, model: ModelId) -> InstanceId:
    free = [
        one
        for one in view.instances
        if one.state in _READY and not one.swapping and not one.draining and model not in one.cooling_down
    ]
    if not free:
        # Swaps end by themselves; what is drained, lost or has failed with the model takes an operator.
        soon = dict(RETRY_SOON) if any(one.swapping for one in view.instances) else {}
        raise Refusal(
            409, f"No instance can take {model!r} now; see /admin/view.", "no_instance", headers=soon
        )
    return min(free, key=lambda one: (one.model is not None, one.num_requests, one.last_used_s or 0.0)).id


def _success() -> Response:
    return Response(to_json({"success": True}), media_type="application/json")


class ModelEvents(EventsEndpoint):
    """`/models/sse`, as llama.cpp's router has it: loads of models and their progress."""

    def written(self, happened: FleetEvent) -> bytes:
        """Return what is told of an event; nothing if it is no load."""
        model = happened.model
        data: dict[str, str | float | bool] = {}
        if happened.kind == "swap_started" and model is not None:
            data = {"status": "loading"}
        elif happened.kind == "swap_progress" and (phase := happened.phase) is not None:
            data = {"status": "loading", "progress": phase.share}
        elif happened.kind == "swap_ended" and isinstance(record := happened.record, SwapRecord):
            is_loaded = model is not None and record.model_after == model
            data = {"status": "loaded" if is_loaded else "unloaded"}
            if model is not None and not is_loaded:
                data["failed"] = True
            model = model or record.model_before
        if not data:
            return b""
        kind = "progress" if "progress" in data else "status_change"
        return event({"model": model, "event": kind, "data": data})


class AdapterLoading:
    """`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them, from given directories."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def load(self, request: Request) -> Response:
        """Let requests name an adapter; `load_inplace` gives one that is there new weights."""
        content = await read_body(request.scope, request.receive, self._door.limits)
        body = await checked(LoadAdapterBody, content)
        path, fleet = await self._path(body.lora_path), self._door.fleet
        adapter = Adapter(body.lora_name, self._model(body.base_model_name), str(path))
        is_there = any((one.model, one.id) == (adapter.model, adapter.id) for one in fleet.adapters)
        if is_there and not body.load_inplace:
            raise invalid("lora_name", f"lora_name is {body.lora_name!r}, which has already been loaded.")
        if is_there:
            await fleet.adapters.update(adapter)
        else:
            fleet.adapters.add(adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Let no new request name an adapter."""
        content = await read_body(request.scope, request.receive, self._door.limits)
        body, fleet = await checked(UnloadAdapterBody, content), self._door.fleet
        models = [one.model for one in fleet.adapters if one.id == body.lora_name]
        if body.base_model_name is not None:
            models = [model for model in models if model == body.base_model_name]
        if len(models) != 1:
            found = "no model has" if not models else "several models have; give base_model_name"
            raise Refusal(404, f"lora_name is {body.lora_name!r}, which {found}.", "model_not_found")
        await fleet.adapters.remove(models[0], body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _model(self, name: str | None) -> str:
        fleet = self._door.fleet
        if name is not None:
            return resolve(fleet, name).id
        if len(fleet.models) != 1:
            raise invalid("base_model_name", "base_model_name is missing; name the model of the adapter.")
        return next(iter(fleet.models)).id

    async def _path(self, given: str) -> Path:
        roots = self._door.settings.adapter_roots
        if not roots:
            raise Refusal(403, "This server loads no adapters: it has no adapter_roots.", "no_adapter_roots")
        path = await run_in_thread(_directory_below, given, roots)
        if path is not None:
            return path
        raise invalid("lora_path", "lora_path is no directory that adapters may be loaded from.")


def _directory_below(given: str, roots: Iterable[Path]) -> Path | None:
    """Return the directory that a text names, links followed; `None` if there is none below a root."""
    try:
        path = Path(given).resolve()
        below = any(path.is_relative_to(Path(root).resolve()) for root in roots)
        return path if below and path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, a circle of links, or no path at all
        return None

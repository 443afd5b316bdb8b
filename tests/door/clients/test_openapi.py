"""The OpenAPI document names every endpoint, and calls made from it find no fault of the server."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.routing import Route

from hotswap import Fleet, Model
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.door import Limits, create_app, listen
from hotswap.door.openapi import ENDPOINTS, document
from hotswap.offline.virtual_time import virtual_time
from tests.door.clients.environment import needs_schemathesis, schemathesis
from tests.door.support import client_of
from tests.patience import PATIENCE_S
from tests.runtime import alphabet
from tests.runtime.support import sim_fleet

# These refuse everything, are for people, or are told in the documentation alone.
UNTOLD = {"/v1/embeddings", "/ui", "/admin/summary", "/openapi.json"}
OTHERS = ("/tokenize", "/detokenize", "/models", "/live", "/ready", "/health")
EXAMPLES = int(os.environ.get("HOTSWAP_EXAMPLES", "4"))
"""Of each endpoint and phase; more find more, and take longer."""


@virtual_time
async def test_every_endpoint_is_in_the_document() -> None:
    async with sim_fleet("a") as fleet:
        app = create_app(fleet)
        async with client_of(app) as client:
            served = (await client.get("/openapi.json")).json()
    routes = {
        (method.lower(), route.path.replace("{model:path}", "{model}"))
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and route.path not in UNTOLD
    }
    assert routes == set(ENDPOINTS)
    assert {(method, path) for path, methods in served["paths"].items() for method in methods} == routes


def with_real_ids(paths: Sequence[str]) -> dict[str, Any]:
    """The document of the paths that begin so, whose models and instances there are."""
    made = document()
    schemas = made["components"]["schemas"]
    for schema in schemas.values():
        properties = schema.get("properties", {})
        properties.pop("timeout_s", None)  # a short one ends a request by 504, as it should
        for name, known in (("model", "m"), ("instance", "e0")):
            if name in properties and "Answer" not in schema.get("title", "Answer"):
                also = [None] if "anyOf" in properties[name] else []
                properties[name] = {"enum": [known, *also]}
    made["paths"] = {path: of for path, of in made["paths"].items() if path.startswith(tuple(paths))}
    for endless in ("/admin/events", "/models/sse"):
        made["paths"].pop(endless, None)
    return made


@asynccontextmanager
async def serving(source: Path, root: Path) -> AsyncGenerator[str]:
    """A server of the alphabet in which requests do not wait for long."""
    fleet = Fleet(
        engines=[TorchEngine("e0", threads=1, kv_tokens=2048)],
        store=NvmeStore(root / "store"),
        models=[Model("m", source)],
        interval_s=0.1,
    )
    async with fleet, listen(create_app(fleet, limits=Limits(request_s=60.0)), port=0) as port:
        yield f"http://127.0.0.1:{port}"


@needs_schemathesis
@pytest.mark.parametrize("paths", [["/v1"], ["/admin"], OTHERS], ids=["/v1", "/admin", "others"])
async def test_no_call_from_the_document_finds_a_fault(tmp_path: Path, paths: Sequence[str]) -> None:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(with_real_ids(paths)))
    source = alphabet.checkpoint(tmp_path / "alphabet")
    async with serving(source, tmp_path) as url:
        command = [
            *(str(schemathesis()), "run", str(file), "--url", url),
            *("--max-examples", str(EXAMPLES), "--generation-deterministic", "--no-color"),
            # Values depend on each other and on the model, so that not all that a schema allows is right.
            *("--exclude-checks", "positive_data_acceptance"),
            *("--suppress-health-check", "all", "--request-timeout", "60"),
        ]
        with anyio.fail_after(PATIENCE_S):
            ran = await anyio.run_process(command, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout.decode()[-8000:]

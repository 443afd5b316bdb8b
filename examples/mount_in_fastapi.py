"""Mount OpenAI's endpoints in a FastAPI application of your own: `/llm/v1/...` beside what it has.

    pip install 'hotswap[door]' fastapi
    python -m examples.mount_in_fastapi

The fleet is open as long as the application is, on the event loop of its server. Any application of ASGI
mounts a door likewise; without one of your own, `hotswap serve` or `hotswap.door.listen` is enough.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx
from fastapi import FastAPI

from hotswap import Fleet, Model
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.door import create_app, listen

SIZES = {"smollm-135m": "270 MB", "qwen-0.5b": "1 GB"}


def make_fleet() -> Fleet:
    return Fleet(engines=[SimEngine("e0")], store=SimStore(SIZES), models=[Model(name) for name in SIZES])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with make_fleet() as fleet:
        app.mount("/llm", create_app(fleet))
        app.state.fleet = fleet
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/busy")
async def busy() -> dict[str, int]:
    """A route of your own, which asks the fleet in the process."""
    return {model.id: model.num_running + model.num_waiting for model in app.state.fleet.view().models}


async def main() -> None:
    # As `uvicorn examples.mount_in_fastapi:app` does it, and a client.
    async with (
        lifespan(app),
        listen(app, port=0) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for model in SIZES:
            body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4}
            answer = (await client.post("/llm/v1/completions", json=body)).json()
            print(f"{model}: {answer['usage']['completion_tokens']} tokens")
        print("busy:", (await client.get("/busy")).json())


if __name__ == "__main__":
    anyio.run(main)

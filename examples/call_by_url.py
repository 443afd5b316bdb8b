"""Call a fleet by what speaks OpenAI's API: the openai client, and a program that is given the URL alone.

    pip install 'hotswap[door]' openai
    python -m examples.call_by_url

Programs over OpenAI's client need no change: they read `OPENAI_BASE_URL` and `OPENAI_API_KEY`. LangChain's
`ChatOpenAI(model="llama")` is one, or with the URL in the code
`ChatOpenAI(model="llama", base_url=url, api_key="none")`.
"""

import os
import sys

import anyio
import openai

from hotswap import Fleet, Model
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.door import create_app, listen

SIZES = {"smollm-135m": "270 MB", "qwen-0.5b": "1 GB"}
# Knows nothing of hotswap: `OpenAI()` reads the environment.
PROGRAM = """
from openai import OpenAI
with OpenAI() as client:
    names = [model.id for model in client.models.list()]
    done = client.completions.create(model=names[0], prompt=[1, 2, 3], max_tokens=4)
    print(f"by the URL alone: {names}, {done.usage.completion_tokens} tokens")
"""


async def call(url: str) -> None:
    """Stream from every model by the openai client; an error is of the client's own classes."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        for model in SIZES:
            stream = await client.completions.create(
                model=model,
                prompt=[1, 2, 3],
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    print(f"{model}: {chunk.usage.completion_tokens} tokens")
        try:
            await client.completions.create(model="llama-405b", prompt=[1], max_tokens=1)
        except openai.NotFoundError as error:
            print(f"llama-405b: {error.code}")


async def main() -> None:
    fleet = Fleet(engines=[SimEngine("e0")], store=SimStore(SIZES), models=[Model(name) for name in SIZES])
    async with fleet, listen(create_app(fleet), port=0) as port:
        url = f"http://127.0.0.1:{port}/v1"
        await call(url)
        environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
        ran = await anyio.run_process([sys.executable, "-c", PROGRAM], env=environment)
        print(ran.stdout.decode(), end="")


if __name__ == "__main__":
    anyio.run(main)

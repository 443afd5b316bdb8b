"""Chat with two models: each is asked in the form that it was trained on, and remembers what was said.

    python -m examples.chat DIRECTORY DIRECTORY

The directories are checkpoints of chat models as Hugging Face has them, such as `Qwen/Qwen3-0.6B`. They are
converted once, into the directory `store`.
"""

import json
import sys
from pathlib import Path

import anyio

from hotswap import Chat, Fleet, Model, Usage
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine

SYSTEM = {"role": "system", "content": "You answer in one sentence."}
QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?")
COLORS = {
    "type": "object",
    "properties": {"noon": {"enum": ["blue", "red"]}, "evening": {"enum": ["blue", "red"]}},
    "required": ["noon", "evening"],
    "additionalProperties": False,
}


def tell(model: str, text: str, usage: Usage) -> None:
    print(f"{model}: {text.strip()}")
    print(
        f"    prompt {usage.prompt_tokens} tokens, {usage.reused_tokens} of them computed before; "
        f"answer {usage.generated_tokens}"
    )


async def talk(fleet: Fleet, model: str) -> dict[str, str]:
    # The model's own parameters, as its generation_config.json has them, but for those named here.
    sampling = fleet.models.sampling(model, temperature=0.8, max_tokens=200)
    messages = [SYSTEM]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        async with fleet.stream(model, Chat(messages), sampling) as stream:  # token by token, as it comes
            answer = "".join([token.text async for token in stream])
        messages.append({"role": "assistant", "content": answer})
        tell(model, answer, stream.usage)
    # An answer for a program: JSON of a schema.
    messages.append({"role": "user", "content": "Give the two colors of the sky as JSON."})
    sampling = fleet.models.sampling(model, temperature=0.8, max_tokens=200, json_schema=COLORS)
    done = await fleet.chat(model, messages, sampling)
    tell(model, done.text, done.usage)
    colors: dict[str, str] = json.loads(done.text)
    return colors


async def main(checkpoints: list[Path], store: Path) -> dict[str, dict[str, str]]:
    async with Fleet(
        engines=[TorchEngine("e0")],  # with a GPU: TorchEngine("e0", device="cuda:0")
        store=TieredStore(PinnedStore("8 GiB"), NvmeStore(store)),
        models=[Model(path.name, path) for path in checkpoints],
    ) as fleet:
        return {path.name: await talk(fleet, path.name) for path in checkpoints}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Give the directories of chat models: python -m examples.chat DIRECTORY DIRECTORY")
    anyio.run(main, [Path(directory) for directory in sys.argv[1:]], Path("store"))

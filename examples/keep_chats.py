"""Two chats take turns on one engine, and find their history although the other's model was there meanwhile.

    python -m examples.keep_chats DIRECTORY DIRECTORY

The directories are checkpoints of chat models as Hugging Face has them, such as `Qwen/Qwen3-0.6B`. They are
converted once, into the directory `store`.
"""

import sys
from pathlib import Path

import anyio

from hotswap import Fleet, Model, Usage
from hotswap.backends.kv_stores import HostKVStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine

QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?", "And at night?")


async def main(checkpoints: list[Path], store: Path) -> list[Usage]:
    async with Fleet(
        engines=[TorchEngine("e0")],  # one engine, so each question to the other model is a swap
        store=TieredStore(PinnedStore("8 GiB"), NvmeStore(store)),
        models=[Model(path.name, path) for path in checkpoints],
        kv_store=HostKVStore("4 GiB"),
    ) as fleet:
        chats: dict[str, list[dict[str, str]]] = {path.name: [] for path in checkpoints}
        used: list[Usage] = []
        for question in QUESTIONS:
            for model, messages in chats.items():
                messages.append({"role": "user", "content": question})
                done = await fleet.chat(model, messages, fleet.models.sampling(model, max_tokens=100))
                messages.append({"role": "assistant", "content": done.text})
                use = done.usage
                used.append(use)
                print(f"{model}: {done.text.strip()}")
                print(f"    {use.reused_tokens} of {use.prompt_tokens} tokens were not computed again")
        view = fleet.view().kv_store
        assert view is not None
        for stored in view.models:
            print(f"{stored.model}: {stored.num_blocks} KV blocks, {stored.size_bytes / 1e6:.1f} MB kept")
        return used


if __name__ == "__main__":
    anyio.run(main, [Path(argument) for argument in sys.argv[1:]], Path("store"))

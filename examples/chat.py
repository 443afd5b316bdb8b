"""Chat with two models: each is asked in its own chat template, and remembers what was said.

    python -m examples.chat DIRECTORY DIRECTORY

The directories are checkpoints of chat models as Hugging Face has them, such as `Qwen/Qwen3-0.6B`. They are
converted once, into the directory `store`.
"""

import sys
from pathlib import Path

import anyio

from hotswap import Chat, Completion, Fleet, Model, Usage
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import AffinityRouter, WeightedLoadSwap

SYSTEM = {"role": "system", "content": "You answer in one sentence."}
QUESTIONS = ("Why is the sky blue?", "And why is it red in the evening?")


async def talk(fleet: Fleet, model: str) -> list[Completion]:
    # The model's own parameters, as its generation_config.json has them, but for those named here.
    sampling = fleet.models.sampling(model, temperature=0.8, max_tokens=200)
    messages, answers = [SYSTEM], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = await fleet.chat(model, messages, sampling)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
        tell(model, answer.text, answer.usage)
    # The same, token by token, as it comes.
    messages.append({"role": "user", "content": "Thank you!"})
    async with fleet.stream(model, Chat(messages), sampling) as stream:
        tell(model, "".join([token.text async for token in stream]), stream.usage)
    return answers


def tell(model: str, text: str, usage: Usage) -> None:
    print(f"{model}: {text.strip()}")
    print(
        f"    {usage.prompt_tokens} tokens of the conversation, {usage.reused_tokens} of which were computed "
        f"before, and {usage.generated_tokens} of the answer"
    )


async def main(checkpoints: list[Path], store: Path) -> dict[str, list[Completion]]:
    answers: dict[str, list[Completion]] = {}
    async with Fleet(
        engines=[TorchEngine("e0")],  # with a GPU: TorchEngine("e0", device="cuda:0")
        store=TieredStore(PinnedStore("8 GiB"), NvmeStore(store)),
        models=[Model(path.name, path) for path in checkpoints],
        router=AffinityRouter(),
        scheduler=WeightedLoadSwap(t1=0, t2=4, b=1),  # swaps to the model that is asked for
    ) as fleet:
        for path in checkpoints:
            answers[path.name] = await talk(fleet, path.name)
    return answers


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Give the directories of chat models: python -m examples.chat DIRECTORY DIRECTORY")
    anyio.run(main, [Path(directory) for directory in sys.argv[1:]], Path("store"))

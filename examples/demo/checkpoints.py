"""Three small checkpoints of three architectures, each overfit to one text.

    python -m examples.demo.checkpoints DIR

The right answer of such a model is known, so a token that is lost, doubled or from the wrong model is seen at
once. The models are trained here in seconds, on a CPU and without a download, and saved as ordinary Hugging
Face directories in float32. Greedy decoding from the opening words of the text, or of a passage of it, gives
the text from there to its end and then the end-of-sequence token.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

TEXTS: Final = Path(__file__).parent / "texts"
STAMP: Final = "recipe.sha256"

EOS: Final = "</s>"
EOS_ID: Final = 0
OPENING_WORDS: Final = 5
PASSAGE: Final = re.compile(r"(?:[.?!;:,][”)]*|--)\s+|\n+")

STEPS: Final = 160
PEAK_LR: Final = 5e-3
EXCERPTS_PER_STEP: Final = 4
EXCERPT_TOKENS: Final = 80
# How many earlier tokens a token attends to, drawn anew for each step. A model that always attends to the
# whole text learns the position of each word, and fails when a recitation starts after the beginning.
REACHES: Final = (8, 16, 32, 64, 128, 1024, 1024)
# By how much the logit of the right token must exceed all others: far more than rounding errors, in bfloat16
# too.
LEAD: Final = 1.0
ONE_AT_A_TIME: Final = threading.Lock()  # new weights are drawn from torch's one source of randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A trained model on disk, and what it recites."""

    name: str
    path: Path
    architecture: str
    text: str

    @property
    def opening(self) -> str:
        """The first words, the prompt for the whole text."""
        return self.openings[0]

    @property
    def continuation(self) -> str:
        """What greedy decoding answers to `opening`, before the end-of-sequence token."""
        return self.continuation_of(self.opening)

    @property
    def openings(self) -> tuple[str, ...]:
        """The first words of every passage from which the model can start, in the order of the text."""
        return tuple(_opening(self.text[start:]) for start in _passage_starts(self.text))

    def continuation_of(self, opening: str) -> str:
        """What greedy decoding answers to one of `openings`. ValueError where the text has no such words."""
        return self.text[self.text.index(opening) + len(opening) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    name: str
    text_file: str
    model_type: str
    vocab_size: int
    config: dict[str, Any]
    seeds: tuple[int, ...] = field(default=(0, 1, 2, 3))  # the next is taken only when one fails to learn

    @property
    def text(self) -> str:
        return (TEXTS / self.text_file).read_text(encoding="utf-8").strip()

    @property
    def stamp(self) -> str:
        """What the checkpoint depends on: another stamp, another checkpoint."""
        libraries = {name: version(name) for name in ("tokenizers", "torch", "transformers")}
        parts = (
            json.dumps(asdict(self)),
            json.dumps(libraries),
            self.text,
            Path(__file__).read_text("utf-8"),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


RECIPES: Final = (
    Recipe(
        name="llama-alice",
        text_file="alice.txt",
        model_type="llama",
        vocab_size=448,
        config={
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    Recipe(
        name="qwen3-gettysburg",
        text_file="gettysburg.txt",
        model_type="qwen3",
        vocab_size=512,
        config={
            "hidden_size": 160,
            "intermediate_size": 448,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    Recipe(
        name="mistral-sonnets",
        text_file="sonnets.txt",
        model_type="mistral",
        vocab_size=384,
        config={
            "hidden_size": 96,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 32,
        },
    ),
)


def make_checkpoints(root: Path, *, console: Console | None = None) -> tuple[Checkpoint, ...]:
    """Train what is not yet under `root`, one directory per model, and return all of them.

    A directory is renamed into place when it is complete, and made again when its recipe has changed.
    """
    root.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]:<24}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, _no_second_progress_bar(), _trainers() as pool:
        tasks = [progress.add_task(each.name, start=False, total=STEPS, state="waiting") for each in RECIPES]
        return tuple(pool.map(lambda recipe, task: _make(recipe, root, progress, task), RECIPES, tasks))


@contextmanager
def _trainers() -> Iterator[ThreadPoolExecutor]:
    """One thread per model and per core, each of which computes alone.

    Threads that shared one small model's arithmetic would spend their time waiting for one another, the more
    so on a busy machine; and the numbers would depend on how many they are.
    """
    num_threads = torch.get_num_threads()
    workers = min(len(RECIPES), os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _make(recipe: Recipe, root: Path, progress: Progress, task: TaskID) -> Checkpoint:
    path = root / recipe.name
    progress.start_task(task)
    if not _is_made(path, recipe):
        model, tokenizer = _train(recipe, lambda step, loss: _show(progress, task, step, loss))
        _publish(model, tokenizer, recipe, path)
        state = "trained"
    else:
        state = "trained already"
    progress.update(task, completed=STEPS, state=state)
    progress.stop_task(task)
    architecture: str = json.loads((path / "config.json").read_text("utf-8"))["architectures"][0]
    return Checkpoint(name=recipe.name, path=path, architecture=architecture, text=recipe.text)


def _show(progress: Progress, task: TaskID, step: int, loss: float) -> None:
    progress.update(task, completed=step, state=f"training, loss {loss:.3f}")


def _is_made(path: Path, recipe: Recipe) -> bool:
    stamp = path / STAMP
    return stamp.is_file() and stamp.read_text("utf-8") == recipe.stamp


def _publish(model: Any, tokenizer: Tokenizer, recipe: Recipe, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        complete = Path(scratch, path.name)
        model.save_pretrained(complete)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(
            complete
        )
        (complete / STAMP).write_text(recipe.stamp, "utf-8")
        shutil.rmtree(path, ignore_errors=True)
        try:
            complete.rename(path)
        except OSError:
            if not _is_made(path, recipe):  # else another process was faster, and made the same
                raise


@contextmanager
def _no_second_progress_bar() -> Iterator[None]:
    shown = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.logging.enable_progress_bar()


# ---------------------------------------------------------------- the text


def _passage_starts(text: str) -> Iterator[int]:
    """Starts of sentences, clauses and lines whose first words are unique in the text and not its last."""
    for start in (0, *(match.end() for match in PASSAGE.finditer(text))):
        opening = _opening(text[start:])
        if text.count(opening) == 1 and start + len(opening) < len(text):
            yield start


def _opening(text: str) -> str:
    """The first words, up to the space that follows them: there a token ends whatever comes next."""
    return " ".join(text.split(" ", OPENING_WORDS)[:OPENING_WORDS])


def _tokenizer(text: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


# ---------------------------------------------------------------- the training


@dataclass(frozen=True, slots=True)
class Lesson:
    """The text from a passage on. Its first `given` tokens are the prompt, the others are trained on."""

    ids: Tensor
    given: int


def _lessons(text: str, tokenizer: Tokenizer) -> list[Lesson]:
    """Return a lesson for every passage, the whole text first."""
    return [
        Lesson(
            torch.tensor([*tokenizer.encode(text[start:]).ids, EOS_ID]),
            given=len(tokenizer.encode(_opening(text[start:])).ids),
        )
        for start in _passage_starts(text)
    ]


def _train(recipe: Recipe, on_step: Callable[[int, float], None]) -> tuple[Any, Tokenizer]:
    tokenizer = _tokenizer(recipe.text, recipe.vocab_size)
    lessons = _lessons(recipe.text, tokenizer)
    for seed in recipe.seeds:
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _new_model(recipe)
        if _teach(model, lessons, random.Random(seed), on_step):
            return model.eval(), tokenizer
    raise RuntimeError(f"{recipe.name!r} did not learn its text from any of the seeds {recipe.seeds}")


def _new_model(recipe: Recipe) -> Any:
    config = transformers.AutoConfig.for_model(
        recipe.model_type,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=max(REACHES),
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        **recipe.config,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=EOS_ID, pad_token_id=EOS_ID
    )
    return model


def _teach(
    model: Any, lessons: Sequence[Lesson], rng: random.Random, on_step: Callable[[int, float], None]
) -> bool:
    """Train until the model recites every lesson; False when it does not within `STEPS`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=STEPS, pct_start=10 / STEPS
    )
    deck = _shuffled_for_ever(lessons, rng)
    hard: list[Lesson] = []
    for step in range(1, STEPS + 1):
        excerpts = [next(deck) for _ in range(EXCERPTS_PER_STEP)]
        long = rng.choice(hard) if hard and step % 2 else lessons[0]
        loss = _whole_loss(model, long, rng.choice(REACHES)) + _excerpts_loss(model, excerpts)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        on_step(step, loss.item())
        if step % 10 == 0 and loss.item() < 0.1:
            hard = [lesson for lesson in lessons if _lead(model, lesson) < LEAD]
            if not hard:
                return True
    return False


def _shuffled_for_ever(lessons: Sequence[Lesson], rng: random.Random) -> Iterator[Lesson]:
    while True:
        yield from rng.sample(lessons, len(lessons))


def _whole_loss(model: Any, lesson: Lesson, reach: int) -> Tensor:
    """The loss over a whole lesson, where each token attends to at most `reach` tokens before it.

    A model with a sliding window has a mask of its own, which is left as it is.
    """
    mask = None
    if getattr(model.config, "sliding_window", None) is None:
        distance = torch.arange(len(lesson.ids))[:, None] - torch.arange(len(lesson.ids))
        mask = ((distance >= 0) & (distance < reach))[None, None]
    logits: Tensor = model(lesson.ids[None], attention_mask=mask).logits
    return nn.functional.cross_entropy(logits[0, lesson.given - 1 : -1], lesson.ids[lesson.given :])


def _excerpts_loss(model: Any, lessons: Sequence[Lesson]) -> Tensor:
    """The loss over the beginnings of some passages, without the openings, which are given."""
    ids = torch.zeros(len(lessons), EXCERPT_TOKENS, dtype=torch.long)
    known = torch.zeros_like(ids, dtype=torch.bool)
    for row, lesson in enumerate(lessons):
        excerpt = lesson.ids[:EXCERPT_TOKENS]
        ids[row, : len(excerpt)] = excerpt
        known[row, lesson.given : len(excerpt)] = True
    logits: Tensor = model(ids).logits
    return nn.functional.cross_entropy(logits[:, :-1][known[:, 1:]], ids[:, 1:][known[:, 1:]])


@torch.no_grad()
def _lead(model: Any, lesson: Lesson) -> float:
    """The least margin of the right token's logit over the next best; negative if a wrong token is best.

    Over 0 means that greedy decoding gives the text; it takes one forward pass instead of one per token.
    """
    logits: Tensor = model(lesson.ids[None]).logits[0, lesson.given - 1 : -1]
    right = lesson.ids[lesson.given :, None]
    others = logits.scatter(1, right, float("-inf")).amax(dim=1)
    return float((logits.gather(1, right)[:, 0] - others).min())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's three checkpoints.")
    parser.add_argument("root", type=Path, metavar="DIR")
    console = Console()
    for checkpoint in make_checkpoints(parser.parse_args().root, console=console):
        console.print(
            f"{checkpoint.path}  {checkpoint.architecture}: {checkpoint.opening} …", highlight=False
        )


if __name__ == "__main__":
    main()

"""Request traces: of real services, and generated ones in the same format."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from random import Random

from hotswap.checks import MAX_PROMPT_TOKENS, check_counts, check_positive, check_priority, to_path
from hotswap.errors import ConfigError
from hotswap.offline.workloads import (
    Lengths,
    check_arrivals,
    check_weights,
    gamma_gaps,
    log_normal_lengths,
    poisson_gaps,
)

__all__ = ["Trace", "TraceRequest", "generate"]

VOCABULARY = 32_000
# Tokens that a block id of a trace stands for: those of Mooncake's traces.
PREFIX_BLOCK_TOKENS = 512
# Three years of plans; times of a clock such as Unix time are over it.
MOST_SECONDS = 1e8

# Every token id twice over: prompts are cut from it.
_TOKENS = tuple(range(VOCABULARY)) * 2

_COLUMNS = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "model",
    "adapter",
    "priority",
    "prefix_blocks_512",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request: when it arrives, in seconds from the start, for which model, and how long it is in tokens.

    Requests whose `prefix_blocks` begin alike have prompts that begin alike, in blocks of 512 tokens.

    Raises:
        ConfigError: a number is out of range.
    """

    arrive_s: float
    model: str = "m"
    prompt_tokens: int
    output_tokens: int
    adapter: str = ""
    priority: int = 0
    prefix_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.arrive_s <= MOST_SECONDS:
            wanted = f"seconds from the start of the trace on, 0 to {MOST_SECONDS:g}"
            raise ConfigError(f"arrive_s is {self.arrive_s!r}; give {wanted}.")
        if not 1 <= self.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ConfigError(f"prompt_tokens is {self.prompt_tokens!r}; give 1 to {MAX_PROMPT_TOKENS}.")
        if not self.output_tokens >= 1:
            raise ConfigError(f"output_tokens is {self.output_tokens!r}; give 1 or more.")
        check_priority(ConfigError, self.priority)

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return token ids of that many; what no prefix says is this `number`'s own.

        Different blocks differ from their first token on, up to a billion; what is own, from its second.
        """
        blocks = self.prefix_blocks[: -(-self.prompt_tokens // PREFIX_BLOCK_TOKENS)]
        shared = tuple(itertools.chain.from_iterable(map(_block, blocks)))
        num_own = self.prompt_tokens - len(shared)
        if num_own <= 0:
            return shared[: self.prompt_tokens]
        more, name = divmod(number, VOCABULARY)
        own = (more % VOCABULARY, name, *_run(number * 7919 + 1, max(0, num_own - 2)))[:num_own]
        return shared + own if shared else own


def _block(block: int) -> tuple[int, ...]:
    more, name = divmod(block, VOCABULARY)
    return (name, more % VOCABULARY, *_run(block * PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS - 2))


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; every method returns another trace."""

    requests: tuple[TraceRequest, ...]
    name: str = "trace"

    def __post_init__(self) -> None:
        if any(b.arrive_s < a.arrive_s for a, b in itertools.pairwise(self.requests)):
            raise ConfigError(f"The requests of {self.name!r} are not in order; sort them by arrive_s.")

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], name: str = "trace") -> Trace:
        """Return the trace of these requests, sorted by their arrival."""
        return cls(tuple(sorted(requests, key=lambda request: request.arrive_s)), name)

    @classmethod
    def read(cls, path: Path | str, *, model: str = "m", columns: Mapping[str, str] | None = None) -> Trace:
        """Read a CSV file, gzipped if its name ends in `.gz`.

        Columns `arrival_s`, `input_tokens` and `output_tokens` must be there; `model` (else all requests are
        for `model`), `adapter`, `priority` and `prefix_blocks_512` (ids with spaces between) may; others are
        left alone. `columns` says what one of these is called in the file, where that is something else:
        `{"model": "tenant"}` makes tenants models.

        Raises:
            ConfigError: the file is missing or not such a table; the message names the line.
        """
        place = to_path(ConfigError, "path", path)
        try:
            with place.open("rb") as raw:
                binary = gzip.GzipFile(fileobj=raw) if place.suffix == ".gz" else raw
                with TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
                    rows = _rows(text, place, model, columns or {})
                    return cls.of(rows, place.name.partition(".")[0])
        except (OSError, UnicodeDecodeError, EOFError, csv.Error) as exc:
            raise ConfigError(f"{str(place)!r} cannot be read as a trace: {exc}.") from exc

    @property
    def models(self) -> dict[str, int]:
        """How many requests each model gets, the most asked for first."""
        counts = Counter(request.model for request in self.requests)
        return dict(sorted(counts.items(), key=lambda count: (-count[1], count[0])))

    @property
    def seconds(self) -> float:
        """When the last request arrives."""
        return self.requests[-1].arrive_s if self.requests else 0.0

    @property
    def rate_per_s(self) -> float:
        """Requests over seconds; 0 without any."""
        return len(self.requests) / self.seconds if self.seconds else 0.0

    def at_rate(self, rate_per_s: float) -> Trace:
        """Stretch time so that requests come at this mean rate; one whose requests come all at once stays."""
        check_positive(ConfigError, rate_per_s=rate_per_s)
        at_once = not self.seconds or not isfinite(self.rate_per_s)
        return self if at_once else self.faster(rate_per_s / self.rate_per_s)

    def faster(self, factor: float) -> Trace:
        """Let `factor` times as many requests come in a second: twice as fast is half the time."""
        check_positive(ConfigError, factor=factor)
        return self._with(replace(r, arrive_s=r.arrive_s / factor) for r in self.requests)

    def first(self, num_requests: int) -> Trace:
        """Keep the first so many."""
        check_counts(ConfigError, 0, num_requests=num_requests)
        return self._with(self.requests[:num_requests])

    def window(self, start_s: float, seconds: float) -> Trace:
        """Keep what arrives in `seconds` from `start_s` on, and count time from there."""
        inside = (r for r in self.requests if start_s <= r.arrive_s < start_s + seconds)
        return self._with(replace(r, arrive_s=r.arrive_s - start_s) for r in inside)

    def merge(self, *others: Trace) -> Trace:
        """Return the requests of this and other traces together, each at its own time."""
        everything = itertools.chain(self.requests, *(other.requests for other in others))
        return Trace.of(everything, "+".join((self.name, *(other.name for other in others))))

    def thin(self, seed: int, share: float) -> Trace:
        """Keep each request with a chance of `share`: the same load, less of it."""
        if not 0 < share <= 1:
            raise ConfigError(f"share is {share!r}; give a chance over 0, at most 1.")
        random = Random(seed)
        return self._with(request for request in self.requests if random.random() < share)

    def spread(self, seed: int, models: Mapping[str, float]) -> Trace:
        """Draw a model for each request, by the weights of the models."""
        check_weights(models)
        names = Random(seed).choices(list(models), list(models.values()), k=len(self.requests))
        return self._with(replace(r, model=name) for r, name in zip(self.requests, names, strict=True))

    def after(self, seconds: float) -> Trace:
        """Let every request arrive so many seconds later."""
        return self._with(replace(r, arrive_s=r.arrive_s + seconds) for r in self.requests)

    def jittered(self, seed: int, seconds: float) -> Trace:
        """Move each arrival by up to so many seconds to either side: another run of the same load."""
        random = Random(seed)
        moved = (
            replace(r, arrive_s=max(0.0, r.arrive_s + random.uniform(-seconds, seconds)))
            for r in self.requests
        )
        return Trace.of(moved, self.name)

    def _with(self, requests: Iterable[TraceRequest]) -> Trace:
        return Trace(tuple(requests), self.name)

    def __repr__(self) -> str:
        of = f"{len(self.requests)} requests of {len(self.models)} models"
        return f"<Trace {self.name} [{of}, {self.seconds:.1f} s]>"


def generate(
    seed: int,
    *,
    models: Mapping[str, float],
    rate_per_s: float,
    seconds: float,
    cv: float = 1.0,
    prompt_tokens: Lengths | None = None,
    output_tokens: Lengths | None = None,
    name: str = "",
) -> Trace:
    """Return `seconds` seconds of requests, shared among models by their weights.

    Gaps are exponential where the coefficient of variation `cv` is 1 (a Poisson process), and elsewhere
    Gamma-distributed with shape `1 / cv**2`. Lengths are log-normal, with medians of 128 and 64 tokens,
    unless they are given.

    Raises:
        ConfigError: no model has a weight, or a number is not over 0.
    """
    check_arrivals(models, rate_per_s=rate_per_s, seconds=seconds, cv=cv)
    random = Random(seed)
    prompts = prompt_tokens or log_normal_lengths(128)
    outputs = output_tokens or log_normal_lengths(64)
    gaps = poisson_gaps(random, rate_per_s=rate_per_s)
    if cv != 1:
        gaps = gamma_gaps(random, rate_per_s=rate_per_s, cv=cv)
    names, below = list(models), list(itertools.accumulate(models.values()))
    arrivals = itertools.takewhile(lambda at_s: at_s <= seconds, itertools.accumulate(gaps))
    return Trace(
        tuple(
            TraceRequest(
                arrive_s=at_s,
                model=random.choices(names, cum_weights=below)[0],
                prompt_tokens=prompts(random),
                output_tokens=outputs(random),
            )
            for at_s in arrivals
        ),
        name or f"{'poisson' if cv == 1 else f'gamma-cv{cv:g}'}-{rate_per_s:g}rps",
    )


def _rows(text: Iterable[str], place: Path, model: str, columns: Mapping[str, str]) -> Iterator[TraceRequest]:
    if unknown := columns.keys() - _COLUMNS:
        raise ConfigError(
            f"A trace has no {', '.join(sorted(unknown))}; give names for {', '.join(_COLUMNS)}."
        )
    table = csv.DictReader(text)
    needed = {columns.get(name, name) for name in ("arrival_s", "input_tokens", "output_tokens")}
    if missing := {*needed, *columns.values()} - set(table.fieldnames or ()):
        raise ConfigError(f"{str(place)!r} is no trace: it has no column {', '.join(sorted(missing))}.")
    for number, found in enumerate(table, start=2):
        row = {name: found.get(columns.get(name, name)) or "" for name in _COLUMNS}
        try:
            request = TraceRequest(
                arrive_s=float(row["arrival_s"]),
                model=row["model"] or model,
                prompt_tokens=int(row["input_tokens"]) or 1,
                output_tokens=int(row["output_tokens"]) or 1,
                adapter=row["adapter"],
                priority=int(row["priority"] or 0),
                prefix_blocks=tuple(map(int, row["prefix_blocks_512"].split())),
            )
        except (TypeError, ValueError) as exc:
            told = str(exc).removesuffix(".")
            raise ConfigError(f"Line {number} of {str(place)!r} is no request: {told}.") from exc
        yield request


def _run(first: int, count: int) -> tuple[int, ...]:
    """So many token ids in a row from one on, and round again."""
    first %= VOCABULARY
    rounds, rest = divmod(count, VOCABULARY)
    whole = _TOKENS[first : first + VOCABULARY] * rounds if rounds else ()
    return whole + _TOKENS[first : first + rest]

"""What a server of streams costs: hotswap's door, a server that validates each token, and vLLM's own.

    make vllm-env                                      once, to compare with vLLM
    python -m benchmarks door                          32 and 256 streams, about five minutes
    python -m benchmarks door --json report.json

Each server streams chats from an engine that gives every stream a token in every step of 20 ms and computes
nothing. Contestants take turns; the figure is processor time of the server's process per token.
`hotswap_joined` is the door with `stream_interval_s=0.05`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.door_clients import Reading, read_streams
from benchmarks.measure import WORK, Summary, machine, ratios, rounds, workspace
from benchmarks.models import write_llama
from benchmarks.process import Failed, Process
from benchmarks.table import show
from benchmarks.tokenizers import END, source_code, train

__all__ = ["TARGETS", "Settings", "main", "measure"]

TARGETS = {"pydantic": 0.8, "vllm": 1.0}
"""The most of what each of these costs that a token may cost hotswap."""

_VLLM_PYTHON = Path(".cache/vllm-env/bin/python")
_TEMPLATE = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        streams: Numbers of streams at once.
        tokens: Of each stream; the first and the last ones are not counted.
        repeats: Rounds.
        step_s: Seconds of a step of the engine.
        contestants: Which servers.
        vllm_python: The interpreter of the environment that has vLLM.
        timeout_s: How long a server may take to start.
    """

    streams: tuple[int, ...] = (32, 256)
    tokens: int = 500
    repeats: int = 5
    step_s: float = 0.02
    contestants: tuple[str, ...] = ("hotswap", "hotswap_joined", "pydantic", "vllm")
    vllm_python: Path = field(default=_VLLM_PYTHON)
    timeout_s: float = 600.0


class Server(Process):
    """The process of one server, and its port."""

    def __init__(self, name: str, root: Path, answer: Sequence[int], settings: Settings) -> None:
        self.name = name
        given = {"step_s": settings.step_s, "answer": list(answer)}
        command = [sys.executable, "-m", "benchmarks.door_server", name]
        given |= {"store": str(root / "store"), "model": str(root / "m")}
        if name == "vllm":
            python = settings.vllm_python
            if not python.exists():
                raise Failed(f"there is no {python}; `make vllm-env` makes it")
            command = [str(python.absolute()), "-m", "benchmarks.door_vllm"]
        super().__init__(
            [*command, json.dumps(given)],
            environment={
                "OMP_NUM_THREADS": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_PLUGINS": "",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
            timeout_s=settings.timeout_s,
        )
        try:
            told = self.first()
        except Failed:
            self.close()
            raise
        self.versions_told: dict[str, str] = told["versions"]
        self.port: int = told["port"]

    def read(self, number: int, settings: Settings) -> Reading:
        """Read so many streams at once."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Write a module of the standard library."}],
            "max_tokens": settings.tokens,
            "temperature": 0,
            "stream": True,
        }
        return read_streams(self.port, self.pid, body, number)


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report."""
    with workspace("door", directory) as root, ExitStack() as stack:
        answer, text = _write_model(root, settings.tokens)
        report: dict[str, Any] = {
            "machine": machine(root),
            "settings": {**asdict(settings), "vllm_python": None},
            "versions": {},
            "unavailable": {},
        }
        servers: list[Server] = []
        for name in settings.contestants:
            try:
                servers.append(stack.enter_context(Server(name, root, answer, settings)))
                report["versions"][name] = servers[-1].versions_told
            except Failed as exc:
                report["unavailable"][name] = str(exc)
        return report | _measure(servers, text, settings)


def _measure(servers: Sequence[Server], text: str, settings: Settings) -> dict[str, Any]:
    cpu: dict[str, dict[str, list[float]]] = {server.name: {} for server in servers}
    load: dict[str, dict[str, list[float]]] = {server.name: {} for server in servers}
    for number in settings.streams:
        for server in servers:  # which warms them up
            _check(server.name, server.read(number, settings), text)
        for server in rounds(servers, settings.repeats):
            reading = server.read(number, settings)
            _check(server.name, reading, text)
            num_tokens = reading.num_characters / len(text) * settings.tokens
            cpu[server.name].setdefault(str(number), []).append(1e6 * reading.cpu_s / num_tokens)
            load[server.name].setdefault(str(number), []).append(reading.cpu_s / reading.wall_s)
    return {
        "cpu_us_per_token": cpu,
        "ratios": {
            f"{ours}_over_{name}": {at: ratios(cpu[ours][at], cpu[name][at]) for at in cpu[name]}
            for ours in ("hotswap", "hotswap_joined")
            for name in TARGETS
            if name in cpu and ours in cpu
        },
        "targets": TARGETS,
        "share_of_a_processor": {
            name: {number: statistics.median(shares) for number, shares in of.items()}
            for name, of in load.items()
        },
    }


def _check(name: str, reading: Reading, text: str) -> None:
    wrong = [given for given in reading.texts if given != text]
    if wrong:
        raise SystemExit(f"{name} gave another text: {wrong[0]!r} for {text!r}.")


def _write_model(root: Path, num_tokens: int) -> tuple[list[int], str]:
    """Write a model for all servers; return the tokens of its answers, source code, and their text."""
    tokenizer = train(4096)
    answer = [token for token in tokenizer.encode(source_code(20 * num_tokens)) if token != END][:num_tokens]
    (root / "m").mkdir()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
        "eos_token": "<|end|>",
    }
    (root / "m" / "tokenizer_config.json").write_text(json.dumps(config))
    write_llama(
        root,
        hidden=128,
        layers=1,
        vocabulary=4096,
        tokenizer=tokenizer.text,
        end_token=END,
        max_tokens=4096,
    )
    return answer, tokenizer.decode(answer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report; 1 if hotswap costs more than its targets allow."""
    parser = parser_of("door", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=Settings().streams, help="streams at once")
    parser.add_argument("--tokens", type=int, default=Settings().tokens, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=Settings().repeats, help="rounds")
    parser.add_argument("--only", nargs="+", default=Settings().contestants, help="servers to measure")
    options = parser.parse_args(arguments)
    report = measure(
        Settings(
            streams=tuple(options.streams),
            tokens=options.tokens,
            repeats=options.repeats,
            contestants=tuple(options.only),
        )
    )
    rows = [
        [name, number, Summary.of(series).format(1), f"{report['share_of_a_processor'][name][number]:.2f}"]
        for name, of in report["cpu_us_per_token"].items()
        for number, series in of.items()
    ]
    show("processor time of a server per token", ["server", "streams", "us", "of a processor"], rows)
    show(
        "over others",
        ["servers", "streams", "ratio", "target"],
        [
            [name, number, Summary.of(series).format(2), str(_target(name))]
            for name, of in report["ratios"].items()
            for number, series in of.items()
        ],
    )
    for name, why in report["unavailable"].items():
        print(f"{name} is left out: {why}")
    save(report, options.json)
    return int(_is_missed(report["ratios"]))


def _is_missed(found: Mapping[str, Mapping[str, Sequence[float]]]) -> bool:
    return any(
        statistics.median(series) > _target(name)
        for name, of in found.items()
        if name.startswith("hotswap_over")
        for series in of.values()
    )


def _target(ratio: str) -> float:
    return TARGETS[ratio.rpartition("_over_")[2]]


if __name__ == "__main__":
    sys.exit(main())

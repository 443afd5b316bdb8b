"""Finding out, before a swap, that the installed vLLM cannot compute with a model's quantization here.

vLLM tells only when a core starts with the model. So a process of its own makes layers of the same kind,
without the weights; each kind is asked for once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import anyio

from hotswap.backends.fields import CONVERT_AGAIN, parse_object
from hotswap.backends.quantized import sections_of
from hotswap.backends.vllm.settings import Settings
from hotswap.backends.vllm.staging import CONFIG, quantization_files
from hotswap.errors import UnsupportedModel
from hotswap.model import Manifest
from hotswap.store import WeightStore
from hotswap.worker_threads import run_in_thread

__all__ = ["KernelCheck"]

log = logging.getLogger("hotswap.vllm")

_PROGRAM = Path(__file__).parent / "inside" / "kernels.py"
# Of an engine's `arguments`, those on which kernels depend.
_PASSED_ON = ("quantization", "linear_backend", "moe_backend")


class KernelCheck:
    """Asks vLLM, in a process that ends, about kinds of quantization; belongs to the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._answers: dict[str, str | None] = {}
        self._asking = anyio.Lock()

    async def check(self, manifest: Manifest, store: WeightStore) -> None:
        """Refuse a quantized model that vLLM cannot serve on this machine; an answer takes seconds, once.

        A model of which nothing can be said, since the process ended without an answer, is not refused: its
        load decides.

        Raises:
            UnsupportedModel: with vLLM's reason.
            StoreError: the config or the side files could not be read.
        """
        if manifest.layout != "checkpoint" or manifest.is_gguf:
            return
        files = await quantization_files(store, manifest)
        config = parse_object(manifest.config.encode(), Path(CONFIG), remedy=CONVERT_AGAIN)
        sections = sections_of(config.raw)
        if not files and not sections:
            return
        kind = f"{manifest.architecture} {json.dumps(sections)} {sorted(files.items())}"
        async with self._asking:
            if kind not in self._answers:
                self._answers[kind] = await self._ask(manifest, files)
        if (because := self._answers[kind]) is not None:
            raise UnsupportedModel(
                f"The installed vLLM cannot serve model {manifest.model!r} on this machine: {because} Serve "
                "another quantization of it, or the original."
            )

    async def _ask(self, manifest: Manifest, files: dict[str, bytes]) -> str | None:
        with tempfile.TemporaryDirectory(prefix="hotswap-kernels-") as directory:
            await run_in_thread(_write, Path(directory), {CONFIG: manifest.config.encode(), **files})
            given: dict[str, Any] = {
                "model": directory,
                "skip_tokenizer_init": True,
                "dtype": self._settings.dtype,
                "max_model_len": -1,
                "kv_cache_memory_bytes": 1 << 20,
                "enforce_eager": True,
            }
            arguments = self._settings.arguments
            passed_on = {name: str(arguments[name]) for name in _PASSED_ON if name in arguments}
            done = await anyio.run_process(
                [sys.executable, "-P", str(_PROGRAM)],  # which has no modules of its directory in its path
                input=json.dumps(given | passed_on).encode() + b"\n",
                stderr=PIPE,
                check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        answer = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
        if done.returncode or not answer.startswith("{"):
            log.warning(
                "Whether vLLM can serve the quantization of %r could not be found out; its load decides.\n%s",
                manifest.model,
                done.stderr.decode(errors="replace")[-2000:],
            )
            return None
        return cast("str | None", json.loads(answer)["refusal"])


def _write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)

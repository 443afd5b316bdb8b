"""The program of a server's process; run as a file, so that it imports nothing of hotswap.

It reads one line of JSON from its standard input, starts llama.cpp's server as that says, writes one line of
JSON about it to its standard output, and ends when its standard input is closed, which it also is when the
parent process ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn

_library: Any = import_module("xllamacpp")
_LOG_PAUSE_S = 0.1


def _parameters(given: dict[str, Any]) -> Any:
    """Return llama.cpp's parameters; a name with dots is that of a part's field."""
    params = _library.CommonParams()
    for name, value in given.items():
        *parts, field = name.split(".")
        place = params
        for part in parts:
            place = getattr(place, part)
        current: Any = getattr(place, field)
        if isinstance(value, str) and not isinstance(current, str):  # enumerations are given by name
            value = getattr(current.__class__, value)
        setattr(place, field, value)
    return params


def _tell(what: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _end_with_log() -> NoReturn:
    """End once llama.cpp has written its log, which a thread of its own does; nothing tells when."""
    size = -1
    while size != (size := os.fstat(sys.stderr.fileno()).st_size):
        threading.Event().wait(_LOG_PAUSE_S)
    os._exit(1)


def main() -> None:
    """Serve until the standard input is closed."""
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        server = _library.Server(_parameters(given))
    except Exception as exc:
        _tell({"error": f"{type(exc).__name__}: {exc}"})
        _end_with_log()
    _tell({"address": server.listening_address})
    threading.Event().wait()


if __name__ == "__main__":
    main()

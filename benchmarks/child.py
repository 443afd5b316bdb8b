"""The process of one contestant: imports it once, then forks for every run that standard input asks for.

A fork is a fresh process without the seconds that importing torch takes: no run finds memory, threads or
files of another. Answers are lines of JSON on the original standard output; what libraries print goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

__all__: list[str] = []


def main(module: str) -> None:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        from benchmarks.measure import versions

        contestant = import_module(module)
    except Exception as exc:
        return _say(answers, {"error": _words(exc)})
    _say(answers, {"versions": versions(*contestant.DISTRIBUTIONS)})
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _run(contestant, json.loads(line), answers)
        _, status = os.waitpid(pid, 0)
        if status:
            _say(answers, {"error": f"its process ended with status {os.waitstatus_to_exitcode(status)}"})
    return None


def _run(contestant: Any, request: dict[str, Any], answers: TextIO) -> None:
    """One run, in a process that ends with it."""
    from benchmarks.timed_run import Source, TimedRun

    def source(of: dict[str, Any]) -> Source:
        return Source(**{**of, "directory": Path(of["directory"])})

    try:
        target = source(request["source"])
        peer = contestant.Contestant(request["options"])
        run = TimedRun(peer.files(target), request["cache"], check=request["check"], into=peer.into(target))
        peer.run(source(request["warm_up"]), target, run)
        _say(answers, run.result)
    except Exception as exc:
        traceback.print_exc()
        _say(answers, {"error": _words(exc)})
    finally:
        os._exit(0)


def _words(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}".splitlines()[0][:300]


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""Triton's language is replaced by that of its interpreter once in a process of checks.

Triton does so before every launch and every call of one kernel function by another, and looks through all of
the language each time, which was most of the time of the checks. The replacements are equal each time, and
nothing is compiled in these processes.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_prepare: Any = interpreter._patch_lang
_prepared = set[str]()


def _prepare_once(function: Any) -> Any:
    """Replace the functions that a module sees, unless it was done, and leave them replaced."""
    if function.__module__ not in _prepared:
        _prepared.add(function.__module__)
        _prepare(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _prepare_once

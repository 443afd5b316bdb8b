"""Models named as on the Hugging Face Hub, and directories of its cache.

A name is `"org/name"` or `"org/name@revision"`, and for one GGUF file of a repository `":file.gguf"` follows.
`huggingface_hub` fetches them: with its cache, its token, its progress bars and its offline switch
(`HF_HUB_OFFLINE`). A path that exists is taken first.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Final, cast

from hotswap.errors import BackendMissing, ShardMissing

__all__ = ["find", "is_hub_id", "name_of", "resolve"]

_log = logging.getLogger("hotswap.stores")

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+\.gguf))?"
)
# Never code, and no pickles.
_TEXTS: Final = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "spiece.model")
_UNWANTED: Final = ("consolidated*", "original/*", "*/*.safetensors")


def is_hub_id(source: str | Path) -> bool:
    """Whether a source is named as on the Hub, and is not a path that exists."""
    return _ID.fullmatch(str(source)) is not None and not Path(source).exists()


def name_of(source: str | Path) -> str:
    """Return the name of a model by its source: the last part, without a revision, or that of its file."""
    if (named := _ID.fullmatch(str(source))) is not None and is_hub_id(source):
        return (named["file"] or named["repo"]).rpartition("/")[2].removesuffix(".gguf")
    name = Path(source).resolve().name
    cached = re.fullmatch(r"models--.+?--(.+)", name)
    return cached[1] if cached else name.removesuffix(".gguf")


def resolve(source: str | Path) -> Path:
    """Return the directory or file of a source, fetched from the Hub if need be. Blocking.

    A source that is neither there nor named as on the Hub is returned as a path.

    Raises:
        ShardMissing: it is not on the Hub, not in the cache, or not for this token; the message says what to
            type.
        BackendMissing: `huggingface_hub` is not installed.
    """
    if not is_hub_id(source):
        return _snapshot_of(Path(source))
    return _snapshot(str(source), fetch=True)


def find(source: str | Path) -> Path | None:
    """The same without a network; `None` where the Hub's cache has not the whole model. Blocking."""
    if not is_hub_id(source):
        return _snapshot_of(Path(source))
    try:
        return _snapshot(str(source), fetch=False)
    except (ShardMissing, BackendMissing):
        return None


def _snapshot_of(path: Path) -> Path:
    """The snapshot of a directory of the cache, `models--org--name`: that of `main`, or the only one."""
    snapshots = path / "snapshots"
    if not path.name.startswith("models--") or not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file() and (found := snapshots / main.read_text(encoding="utf-8").strip()).is_dir():
        return found
    there = sorted(entry for entry in snapshots.iterdir() if entry.is_dir())
    if len(there) == 1:
        return there[0]
    raise ShardMissing(
        f"{str(path)!r} has {len(there)} snapshots, and none of them is 'main'; give the path of one."
    )


def _snapshot(source: str, *, fetch: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError as exc:
        raise BackendMissing(
            f"{source!r} is no path, and to fetch it from the Hugging Face Hub takes huggingface_hub: "
            "pip install 'hotswap[hub]'."
        ) from exc
    named = _ID.fullmatch(source)
    assert named is not None, "it was looked at before"
    download, file = cast("Any", huggingface_hub).snapshot_download, named["file"]
    weights = "*.safetensors" if file is None else _all_parts(file)
    if fetch:
        _log.info("Fetching %r from the Hugging Face Hub, unless its cache has it.", source)
    try:
        snapshot = Path(
            download(
                named["repo"],
                revision=named["revision"],
                allow_patterns=[weights, *_TEXTS],
                ignore_patterns=list(_UNWANTED),
                local_files_only=not fetch,
            )
        )
    except Exception as exc:  # its own errors, and those of the client library that it has at the time
        raise ShardMissing(f"{source!r} is no path, and {_why(named['repo'], exc)}") from exc
    if file is not None and not (snapshot / file).is_file():
        raise ShardMissing(
            f"{named['repo']!r} on the Hugging Face Hub, or without a network its cache, has no {file!r}. "
            f"See its page for those it has, or type `hf download {named['repo']} {file}`."
        )
    return snapshot if file is None else snapshot / file


def _all_parts(file: str) -> str:
    """A pattern of all files of a GGUF model that is split into several; of the file alone if it is not."""
    return re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-*\1", file)


def _why(repo: str, error: Exception) -> str:
    """Why a model could not be fetched, and what to do, by the error's class."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{repo!r} on the Hugging Face Hub asks for its terms to be accepted; accept them on its page, "
            "and type `hf auth login`."
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repo!r} on the Hugging Face Hub has no such revision; see its page for those it has."
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        return (
            f"the Hugging Face Hub has no {repo!r}, or not for this token; check the name, or type "
            "`hf auth login`."
        )
    return (
        f"the Hugging Face Hub could not be reached, nor has its cache {repo!r} ({type(error).__name__}). "
        f"Where there is a network, type `hf download {repo}`; then give this name again, or the path that "
        "it prints."
    )

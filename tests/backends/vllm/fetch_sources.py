"""Fetch the Python files of a vLLM wheel, whose kernels make up all but a twentieth of it.

    python -m tests.backends.vllm.fetch_sources constraints/vllm-sources.txt .cache/vllm-sources

pip says where the wheel lies. Of it only the parts are read that have the files, if the server allows that.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

_PART_BYTES = 1 << 20


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which parts are read."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urlopen(Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["Content-Length"])
            self.has_parts = answer.headers.get("Accept-Ranges") == "bytes"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._at + size)
        if end <= self._at:
            return b""
        wanted = f"bytes={self._at}-{end - 1}"
        with urlopen(Request(self._url, headers={"Range": wanted})) as answer:
            assert answer.status == 206, f"{wanted} was answered by {answer.status}"
            data: bytes = answer.read()
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def wheel_of(requirements: Path) -> str:
    """Return the URL of the wheel that pip would install."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"),
                *("--requirement", str(requirements), "--report", str(report)),
            ],
            check=True,
        )
        (found,) = json.loads(report.read_text())["install"]
    return str(found["download_info"]["url"])


def fetch(url: str, into: Path) -> None:
    """Unpack the Python files of a wheel; what was there goes."""
    remote = RemoteFile(url)
    with tempfile.TemporaryFile() as whole:
        if not remote.has_parts:
            with urlopen(url) as answer:
                shutil.copyfileobj(answer, whole)
        source = io.BufferedReader(remote, _PART_BYTES) if remote.has_parts else whole
        shutil.rmtree(into, ignore_errors=True)
        with zipfile.ZipFile(source) as wheel:
            wanted = [info for info in wheel.infolist() if re.fullmatch(r"vllm/.*\.py", info.filename)]
            for info in sorted(wanted, key=lambda info: info.header_offset):
                wheel.extract(info, into)


if __name__ == "__main__":
    given, target = map(Path, sys.argv[1:])
    fetch(wheel_of(given), target)

"""No file names a place that exists on one machine only."""

import re

from tests.house.tree import name, texts

# Written so that this file does not match itself.
_OF_ONE_MACHINE = re.compile(r"(?<![\w./])/(?:home|Users|root|work|tmp/w)/\w")


def test_no_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _OF_ONE_MACHINE.search(line)
    ]
    assert found == []


def test_such_a_path_would_be_found() -> None:
    assert _OF_ONE_MACHINE.search("open('/" + "home/me/weights')")
    assert not _OF_ONE_MACHINE.search("https://example.org/" + "work/more")

"""The demo's three models over HTTP: `make serve`, then the line of curl that it prints.

They are made as by `make demo`, in a minute once. What comes in `make serve ARGS="..."` are further
arguments of `hotswap serve`, such as `--port 9000`.
"""

import sys
from pathlib import Path

from examples.demo.checkpoints import make_checkpoints
from hotswap import cli

CACHE = Path(__file__).parents[2] / ".cache" / "demo"


def main() -> int:
    checkpoints = make_checkpoints(CACHE / "checkpoints")
    models = [str(checkpoint.path) for checkpoint in checkpoints]
    options = ["--engines", "2", "--store", str(CACHE / "store"), *sys.argv[1:]]
    return cli.main(["serve", *models, *options])


if __name__ == "__main__":
    sys.exit(main())

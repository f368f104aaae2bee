"""`thinwire train`: from arguments to an exit code.

0  finished, or stopped by a signal with a checkpoint      2  the configuration cannot be used
1  anything else
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from thinwire.train.arguments import parse, to_toml
from thinwire.train.config import ConfigError, check
from thinwire.train.data.samples import DataError
from thinwire.usage import one_line


def main(argv: Sequence[str]) -> int:
    """Train; under torchrun as the worker that torchrun started, else with workers of its own."""
    try:
        arguments = parse(argv)
        config = arguments.config
        started_by_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        check(config, world_size=int(os.environ["WORLD_SIZE"]) if started_by_torchrun else config.workers)
        if arguments.print_config:
            sys.stdout.write(to_toml(config))
            return 0
        if started_by_torchrun:
            from thinwire.train.worker import under_torchrun

            return under_torchrun(config, arguments.debug)
        from thinwire.train.launch import launch
        from thinwire.train.output import choose_output

        with choose_output(config) as out:
            return launch(config, out, debug=arguments.debug)
    except (ConfigError, DataError) as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"thinwire train: {one_line(error)}\n")
        return 2

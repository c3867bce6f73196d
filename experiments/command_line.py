"""What every experiment shares: its two flags and one clear line for bad input."""

import logging
import sys
from collections.abc import Callable

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags


def run(main: Callable, workdir: str, config: str = "configs/tiny_cpu.py") -> None:
    """Parses --config and --workdir (defaults given) and calls main(config, workdir).

    Exits with code 1 and one message where the input is at fault.
    """
    config_flag = config_flags.DEFINE_config_file("config", config, "a get_config() file")
    workdir_flag = flags.DEFINE_string("workdir", workdir, "run directory")

    def call(_):
        absl_logging.set_verbosity(absl_logging.WARNING)  # libraries
        logging.getLogger("trace_jax").setLevel(logging.INFO)
        try:
            main(config_flag.value, workdir_flag.value)
        except (ValueError, FileNotFoundError, ImportError, FloatingPointError) as error:
            sys.exit(f"error: {error}")

    app.run(call)

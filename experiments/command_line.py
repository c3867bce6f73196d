"""What every experiment shares: its two flags and one clear line for bad input."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_flags


def run(main: Callable, workdir: str, config: str = "configs/tiny_cpu.py") -> None:
    """Parses --config and --workdir (defaults given) and calls main(config, workdir).

    Exits with code 1 and one message where the input is at fault.
    """
    with unknown_keys():
        config_flag = config_flags.DEFINE_config_file("config", config, "a get_config() file")
    workdir_flag = flags.DEFINE_string("workdir", workdir, "run directory")

    def call(_):
        absl_logging.set_verbosity(absl_logging.WARNING)  # libraries
        logging.getLogger("trace_jax").setLevel(logging.INFO)
        try:
            main(config_flag.value, workdir_flag.value)
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            sys.exit(f"error: {error}")

    app.run(call, flags_parser=parse)


def parse(argv: list[str]) -> list[str]:
    """The arguments that no flag took, absl's way."""
    with unknown_keys():
        return app.parse_flags_with_usage(argv)


@contextlib.contextmanager
def unknown_keys() -> Iterator[None]:
    """Exits with code 1 and one message for a key that a config does not have.

    ml_collections knows the closest key; it raises where a flag is defined or where it is parsed.
    """
    try:
        yield
    except AttributeError as error:
        cause = getattr(error.args[0], "args", error.args)[0]
        sys.exit(f"error: unknown key in --config: {' '.join(str(cause).split())}")

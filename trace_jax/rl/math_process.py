"""The child process of `rewards.math_equal`: reads JSON pairs [gold, prediction], answers 1 or 0.

It ends when its input ends, that is, with its parent, or when a pair takes too long.
"""

import json
import logging
import signal
import sys

SECONDS = 5  # a pair takes about 1 ms; '9^{9^{9^9}}' takes forever


def main() -> None:
    """Answers 'ready' once, then '1' (equal) or '0' for each line."""
    from math_verify import parse, verify  # optional package: requirements-tasks.txt

    logging.disable(logging.WARNING)  # it warns at every call that its own time limit is off
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(SECONDS)  # without a handler the alarm ends the process, whatever it is doing
        gold, prediction = (parse(text, parsing_timeout=None) for text in json.loads(line))
        print(int(verify(gold, prediction, timeout_seconds=None)), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    main()

"""The demo: what selection does to a small network on real digits with wrong labels.

`rholoss demo`, `python -m rholoss.demo` or `rholoss.demo.run()`. Nobody imports this but the command.
"""

from rholoss.demo.study import Result, run

__all__ = ["Result", "run"]

"""Find the heads and neurons that a BERT can do without: scores, choices and repair.

`bertlite.pruning` has the public names.
"""

from bertlite.support.extras import on_demand

__getattr__, _ = on_demand(__name__)  # an error names the new home of a name that was here

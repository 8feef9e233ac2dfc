"""Find the heads and neurons that a BERT can do without: scores, choices and repair.

The public names are those of `bertlite.pruning`.
"""

from bertlite.support.extras import on_demand

__getattr__, _ = on_demand(__name__)  # an error names the new home of a name that was here

"""The benchmark of speed: bertlite beside its peers, and beside the limits of the machine.

`work` has the batches, `engines` and `exported` the ways to run them, `accuracy` tells which are right, `ceiling` has
the fastest matmuls, `sections` and `startup` the measurements, `command` prints them; `bertlite.timing` times.
"""

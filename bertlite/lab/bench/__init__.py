"""The benchmark of speed: bertlite beside its peers, and beside the limits of the machine.

`work` has the batches, `engines` the ways to run them, `sections` and `startup` the measurements, `command` prints
them; `bertlite.lab.timing` times.
"""

"""The benchmark of speed: bertlite beside its peers, and checkpoints beside each other.

`work` has the batches, `engines` the ways to run them, `accuracy` tells which are right, `sections` times them,
`checkpoints` times models of a user's own, `command` prints; `bertlite.timing` times.
"""

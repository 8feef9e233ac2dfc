"""The benchmark of speed: bertlite beside its peers, and pruned models beside the dense one.

`work` has the batches, `engines` the ways to run them, `accuracy` tells which are right, `sections` times them,
`runs` times pruned models, `command` prints; `bertlite.timing` times.
"""

"""How fast: bertlite beside its peers, and beside what the machine can do.

`measure` times, `work` says on what, `engines` what runs it, `sections` which of them stand together, `command` tells.
"""

"""Everything that makes a BERT smaller.

structure     removes heads, neurons and layers; compact, densify
criteria      the table of criteria of importance
importance/   scores and choices; the remaining weights fitted again by least squares
vocabulary    fewer tokens
budget/       `bertlite prune to`: sizes chosen for a target, distilled, judged
"""

"""Encoders inside objects of other libraries: found, replaced by optimised ones, and verified."""

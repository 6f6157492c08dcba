"""Exact attention over variable-length samples without padding."""

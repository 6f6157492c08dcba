"""Closed-loop evaluation: success rates with intervals, and the report."""

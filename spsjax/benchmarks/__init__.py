"""Timed measurements: systems, workloads, records, summaries and reports."""

"""Tasks of benchmarks: prompts, answers and scores, one module per task."""

"""Command lines of the scripts: configs, flags, tables and plots."""

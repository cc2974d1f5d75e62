"""What the pipeline costs, measured: `make bench`, described in docs/performance.md."""

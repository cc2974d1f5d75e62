"""Statistics of verdicts: sequential evidence, and how many pairs a verdict needs. Pure."""

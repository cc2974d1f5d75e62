"""What an operator sees of a process: its metrics, whether it is well, and what it says in its log."""

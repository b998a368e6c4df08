"""Plan of a run, computed before anything heavy starts: layouts, memory, batch arithmetic, data."""

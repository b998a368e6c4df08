"""What a run will do, worked out before anything heavy starts: layouts, memory, batch arithmetic, data."""

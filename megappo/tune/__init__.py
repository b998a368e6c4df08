"""Which parallel layout is fast on given hardware: legal layouts, a model of the step time, short trials."""

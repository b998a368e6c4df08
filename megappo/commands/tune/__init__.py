"""Search for the fastest parallel layout on given hardware: legal layouts, a model of the step time, short trials."""

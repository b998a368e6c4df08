"""Everything that is known, checked and read before a model is built, for whatever starts a run."""

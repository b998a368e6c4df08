"""Sampled trajectories of a run: their file format, analysis and page. Imports no torch."""

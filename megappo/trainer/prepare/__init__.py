"""Checks, layouts and data of a run before a model is built, for every command that starts one."""

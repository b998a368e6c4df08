"""Kinds of supervised training: what is learned from a batch of examples. `trainer/supervised.py` is the loop of all of them."""

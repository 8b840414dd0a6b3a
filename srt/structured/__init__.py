"""Constrained output: from a request's grammar to the tokens that may come next."""

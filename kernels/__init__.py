"""Kernels, one folder per op: checked function, torch reference, implementations.

Imports nothing: `kernels` is also the name of a package that others probe for.
"""

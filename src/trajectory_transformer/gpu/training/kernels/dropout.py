"""Dropout by a hash of an element's row and column and the step's seed.

Cheaper than a counter-based generator, and the backward pass draws the same again instead of keeping masks.
"""

import triton
import triton.language as tl


@triton.jit
def hash_rows(seed, rows):
    """A word for each row: once more mixed than a column's, since rows are many."""
    words = (rows ^ seed).to(tl.uint32) * 0x7FEB352D
    return (words ^ (words >> 15)) * 0x846CA68B


@triton.jit
def hash_columns(columns):
    """A word for each column."""
    return columns.to(tl.uint32) * 0x85EBCA6B


@triton.jit
def kept(rows, columns, threshold):
    """Whether each element of a block survives dropout: the hashes of its row and column, mixed once more."""
    return (rows ^ columns) * 0x9E3779B1 >= threshold.to(tl.uint32) << 8

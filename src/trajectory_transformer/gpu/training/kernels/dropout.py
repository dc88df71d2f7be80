"""Dropout masks from a hash of row, column and seed.

Cheaper than a counter-based generator. The backward pass recomputes the masks instead of storing them.
"""

import triton
import triton.language as tl


@triton.jit
def hash_rows(seed, rows):
    """Hash of each row; mixed one round more than columns, because there are more rows."""
    words = (rows ^ seed).to(tl.uint32) * 0x7FEB352D
    return (words ^ (words >> 15)) * 0x846CA68B


@triton.jit
def hash_columns(columns):
    """Hash of each column."""
    return columns.to(tl.uint32) * 0x85EBCA6B


@triton.jit
def kept(rows, columns, threshold):
    """Whether each element of a block survives dropout, from the combined hashes of its row and column."""
    return (rows ^ columns) * 0x9E3779B1 >= threshold.to(tl.uint32) << 8

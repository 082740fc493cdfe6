"""Orthogonal matrices of any size, applied as products of small ones.

Values are added in one order, whatever rows are multiplied together and on any machine: equal bytes, which a matrix
product of a library does not give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

_LARGEST = 256  # order of a Hadamard matrix that is not a product of smaller ones: each value costs as many additions


@dataclass(frozen=True)
class Matrix:
    """diag(signs) times the Kronecker product of `factors`, over the root of the size: orthogonal.

    `factors`: (order, whether it is a Hadamard matrix), else it is Hartley's.
    """

    size: int
    factors: tuple[tuple[int, bool], ...]
    signs: np.ndarray

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the transposed matrix times `values`, [size, any number] in float64: each column is a vector."""
        count = values.shape[1]
        values = values * (self.signs / np.sqrt(self.size))[:, None]
        after = self.size
        for order, hadamard in self.factors:
            after //= order
            values = _multiplied(values.reshape(-1, order, after * count), hadamard)
        return values.reshape(self.size, count)

    def apply_blocks(self, values: np.ndarray) -> np.ndarray:
        """The same for each block of `size` rows."""
        blocks = values.reshape(-1, self.size, values.shape[1])
        together = np.ascontiguousarray(blocks.swapaxes(0, 1)).reshape(self.size, -1)
        turned = self.apply(together).reshape(self.size, len(blocks), -1)
        return np.ascontiguousarray(turned.swapaxes(0, 1)).reshape(values.shape)


@cache
def hadamard_matrix(size: int, seed: str) -> Matrix:
    """Return a Hadamard matrix with random signs; where the size has none, odd factors are Hartley's.

    >>> hadamard_matrix(576, "example").factors
    ((12, True), (12, True), (2, True), (2, True))
    """
    digest = hashlib.shake_256(f"{seed} {size}".encode()).digest(size)
    signs = 1.0 - 2.0 * (np.frombuffer(digest, np.uint8) & 1)
    orders = _orders(size)
    if orders is not None:
        return Matrix(size, tuple((order, True) for order in orders), signs)
    primes = list(_primes(size))
    return Matrix(size, tuple((prime, prime == 2) for prime in sorted(primes, reverse=True)), signs)


def _multiplied(values: np.ndarray, hadamard: bool) -> np.ndarray:
    """Each [order, n] of `values` from the left times the transposed matrix, column by column of the matrix."""
    order = values.shape[1]
    matrix = _hadamard(order) if hadamard else _hartley(order)
    result = np.empty_like(values)
    for column in range(order):
        total = result[:, column]
        np.multiply(values[:, 0], matrix[0, column], out=total)
        for row in range(1, order):
            factor = matrix[row, column]
            if factor == 1.0:
                total += values[:, row]
            elif factor == -1.0:
                total -= values[:, row]
            else:
                total += values[:, row] * factor
    return result


@cache
def _hadamard(order: int) -> np.ndarray:
    """A Hadamard matrix: of order 2, or by Paley's two constructions."""
    if order == 2:
        return np.array([[1.0, 1.0], [1.0, -1.0]])
    if _first(order):
        residues = _residues(order - 1)
        skew = np.zeros((order, order))
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, residues
        return np.eye(order) + skew
    half = order // 2
    symmetric = np.zeros((half, half))
    symmetric[0, 1:], symmetric[1:, 0], symmetric[1:, 1:] = 1, 1, _residues(half - 1)
    ones = np.array([[1.0, 1.0], [1.0, -1.0]])
    return np.kron(symmetric, ones) + np.kron(np.eye(half), np.array([[1.0, -1.0], [-1.0, -1.0]]))


def _residues(prime: int) -> np.ndarray:
    """Jacobsthal's matrix: 1 where the difference of row and column is a square modulo the prime, -1 elsewhere."""
    squares = {number * number % prime for number in range(1, prime)}
    character = np.array([0.0, *(1.0 if number in squares else -1.0 for number in range(1, prime))])
    at = np.arange(prime)
    result: np.ndarray = character[(at[:, None] - at) % prime]
    return result


@cache
def _hartley(order: int) -> np.ndarray:
    """cos + sin of the discrete Fourier transform: symmetric, and orthogonal over the root of its order."""
    angle = 2 * np.pi * (np.outer(np.arange(order), np.arange(order)) % order) / order
    return np.cos(angle) + np.sin(angle)


@cache
def _orders(size: int) -> tuple[int, ...] | None:
    """The orders of Hadamard matrices whose product has this size, with the least sum; None if there are none."""
    if size == 1:
        return ()
    found: list[tuple[int, ...]] = []
    for order in (2, *range(4, min(size, _LARGEST) + 1, 4)):
        if size % order == 0 and (order == 2 or _first(order) or _second(order)):
            rest = _orders(size // order)
            found += [tuple(sorted((order, *rest), reverse=True))] if rest is not None else []
    return min(found, key=lambda orders: (sum(orders), orders)) if found else None


def _first(order: int) -> bool:
    return (order - 1) % 4 == 3 and _is_prime(order - 1)


def _second(order: int) -> bool:
    return order % 2 == 0 and (order // 2 - 1) % 4 == 1 and _is_prime(order // 2 - 1)


def _is_prime(number: int) -> bool:
    return next(_primes(number), 0) == number > 1


def _primes(number: int) -> Iterator[int]:
    """The prime factors of a number, smallest first."""
    factor = 2
    while factor * factor <= number:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1
    if number > 1:
        yield number

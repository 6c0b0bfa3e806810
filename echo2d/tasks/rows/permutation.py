"""The order of rows in each epoch: a keyed permutation of the row numbers, in O(1) memory.

A Feistel network of ROUNDS rounds permutes the numbers of the least even number of bits that holds
them all. A number that is not of a row is permuted again until it is (cycle walking), four times
at most in the mean. The same key, epoch and count always give the same order.
"""

from hashlib import blake2b

ROUNDS = 4


def permuted(place: int, count: int, *, rng_seed: int, epoch: int) -> int:
    """Which of `count` rows is at this place of the epoch; 0 <= place < count."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(ROUNDS):
            key = f"{rng_seed} {epoch} {number} {right}".encode()
            mixed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        place = left << half | right
        if place < count:
            return place

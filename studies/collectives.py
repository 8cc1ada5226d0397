"""Seconds of collectives by formula, under the alpha-beta-gamma model of Hockney and of the MPICH literature.

Every function takes `p` devices, `n_bytes` of the whole vector, `alpha_s` per message, `beta_s_per_byte` of the wire and
`gamma_s_per_byte` of adding, as numbers or as numpy arrays that broadcast, and returns seconds of the same shape. Links carry
both directions at once; every device has its own NIC. One device has nothing to do: zero.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19, 2005), whose
formulas also stand in the comments of MPICH's allreduce; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (JPDC 69, 2009) for the ring.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.float64] | npt.NDArray[np.int64]
"""A number, or an array of them."""


def ring_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """2(p-1) alpha + 2 n (p-1)/p beta + n (p-1)/p gamma. Patarasuk and Yuan 2009."""
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    part = n * (p - 1) / p
    return np.asarray(2 * (p - 1) * alpha_s + 2 * part * beta_s_per_byte + part * gamma_s_per_byte)


def recursive_doubling_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """lg p (alpha + n beta + n gamma): the butterfly that swaps the whole vector. Thakur et al. 2005.

    The formula is for powers of two; in between lg p is taken as it is.
    """
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    return np.asarray(np.log2(p) * (alpha_s + n * beta_s_per_byte + n * gamma_s_per_byte))


def halving_doubling_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """Recursive halving, then doubling (Rabenseifner), as published. Thakur et al. 2005.

    Powers of two: 2 lg p alpha + 2 n (p-1)/p beta + n (p-1)/p gamma.
    Otherwise: (2 floor(lg p) + 2) alpha + (2 (p-1)/p + 2) n beta + n (1 + (p-1)/p) gamma.
    """
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    odd = _core(p) != p
    part = (p - 1) / p
    rounds = 2 * np.log2(_core(p)) + 2 * odd
    return np.asarray(
        rounds * alpha_s + (2 * part + 2 * odd) * n * beta_s_per_byte + (part + odd) * n * gamma_s_per_byte
    )


def butterfly_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """Return the seconds of the rounds of `transfer.schedule(..., reduce="butterfly")`.

    As `halving_doubling_allreduce`, but the inner exchange is among the largest power of two p' <= p only, so its terms are
    (p'-1)/p'. The published formula writes p there, which is at most a ninth too much (three devices).
    """
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    core = _core(p)
    odd = core != p
    part = (core - 1) / core
    rounds = 2 * np.log2(core) + 2 * odd
    return np.asarray(
        rounds * alpha_s + (2 * part + 2 * odd) * n * beta_s_per_byte + (part + odd) * n * gamma_s_per_byte
    )


def direct_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """2 alpha + 2 n (p-1)/p beta + n (p-1)/p gamma: a p-th of all summands to each device, its sum to all.

    By arithmetic: the p-1 messages of a device share its NIC in each direction; their latencies overlap.
    """
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    part = n * (p - 1) / p
    return np.asarray(2 * (p > 1) * alpha_s + 2 * part * beta_s_per_byte + part * gamma_s_per_byte)


def star_allreduce(
    p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers, gamma_s_per_byte: Numbers = 0.0
) -> Floats:
    """All summands to one device, the sum back: 2 alpha + 2 (p-1) n beta + (p-1) n gamma.

    By arithmetic: p-1 messages share the master's NIC in each direction; their latencies overlap.
    """
    p, n = _count(p), np.asarray(n_bytes, dtype=np.float64)
    return np.asarray(2 * (p > 1) * alpha_s + (p - 1) * n * (2 * np.asarray(beta_s_per_byte) + gamma_s_per_byte))


def binomial_broadcast(p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers) -> Floats:
    """lg p (alpha + n beta), lg p rounded up to whole rounds. Thakur et al. 2005."""
    return np.asarray(np.ceil(np.log2(_count(p))) * (alpha_s + np.asarray(n_bytes) * beta_s_per_byte))


def scatter_allgather_broadcast(p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers) -> Floats:
    """2 lg p alpha + 2 n (p-1)/p beta: a binomial scatter, then recursive doubling. Thakur et al. 2005 (van de Geijn)."""
    p = _count(p)
    return np.asarray(2 * np.log2(p) * alpha_s + 2 * np.asarray(n_bytes) * (p - 1) / p * beta_s_per_byte)


def pairwise_all_to_all(p: Numbers, n_bytes: Numbers, alpha_s: Numbers, beta_s_per_byte: Numbers) -> Floats:
    """(p-1) alpha + n beta, n bytes sent by each device. Thakur et al. 2005."""
    p = _count(p)
    return np.asarray((p - 1) * alpha_s + (p > 1) * np.asarray(n_bytes) * beta_s_per_byte)


def _count(p: Numbers) -> Floats:
    return np.maximum(1.0, np.asarray(p, dtype=np.float64))


def _core(p: Floats) -> Floats:
    """Return the largest power of two that is at most p."""
    # frexp is exact where log2 of a large power of two may round below a whole number.
    return np.asarray(2.0 ** (np.frexp(p)[1] - 1))

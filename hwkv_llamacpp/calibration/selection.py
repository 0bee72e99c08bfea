"""Which record of a calibration is deployed: by threshold, or the least distortion under a budget."""

from ..errors import HwkvError
from ..policy.footprint import predict

MIB = 2**20


def by_tau(records, tau):
    """The record of a threshold, with the least distortion among those with other numbers of sinks. HwkvError if there is none."""
    matching = [r for r in records if r.tau == tau]
    if not matching:
        raise HwkvError(f"no record has tau {tau:g}; there are {', '.join(r.setting for r in records)}")
    return min(matching, key=lambda r: r.distortion["kl"])


def by_retention(records, geometry, share, n_ctx):
    """The best record that keeps at most this share of the KV cells at n_ctx tokens."""
    return _best(
        records,
        lambda r: r.policy.retention(n_ctx, geometry),
        share,
        f"keeps {{:.4f}} of the KV cells at {n_ctx} tokens",
        "{:g}",
    )


def by_bytes(records, geometry, n_bytes, n_ctx, **context):
    """The best record whose KV cache takes at most n_bytes at n_ctx tokens; context: further arguments of footprint.predict."""
    return _best(
        [*records],
        lambda r: predict(geometry, r.policy, n_ctx, **context).kv_bytes / MIB,
        n_bytes / MIB,
        f"takes {{:,.1f}} MiB of KV cache at {n_ctx} tokens",
        "{:,.1f} MiB",
    )


def _best(records, cost, limit, states, shows):
    """Least measured KL among those within the limit, then the lowest cost, then the larger tau (design rule)."""
    fitting = [r for r in records if cost(r) <= limit]
    if not fitting:
        nearest = min(records, key=cost)
        raise HwkvError(
            f"no record fits the budget of {shows.format(limit)}: the nearest, {nearest.setting}, {states.format(cost(nearest))};"
            f"{' lower thresholds (--taus) or' if nearest.tau is not None else ''} shorter --windows keep less"
        )
    return min(fitting, key=lambda r: (r.distortion["kl"], cost(r), -(r.tau or 0)))

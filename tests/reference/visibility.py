"""Which keys a query may see: the one rule of the project, written out as a mask."""


def visible(query, key, window, n_sink):
    """Mask [n_query, n_key]: does the query at position p see the key at position j?

    query, key: positions [n_query] and [n_key]. window: positions that the head keeps, the query's own included,
    or None for a full head. n_sink: first positions of the sequence that a windowed head keeps as well.
    """
    p, j = query[:, None], key[None, :]
    causal = j <= p
    if window is None:
        return causal
    return causal & ((p - j < window) | (j < n_sink))

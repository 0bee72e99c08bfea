def print_medians(rows):
    for r in rows: print(r.arm, r.n_ctx, r.status, r.peak_bytes, r.predicted_peak_bytes, r.predicted_peak_bytes and r.predicted_peak_bytes/r.peak_bytes)

from .labels import (
    HISTOGRAM as HISTOGRAM,
    RECEIPTS as RECEIPTS,
    LabelHistogram as LabelHistogram,
    draw_histogram as draw_histogram,
    label_shares as label_shares,
    release_histogram as release_histogram,
    stored_histogram as stored_histogram,
    total_epsilon as total_epsilon,
)
